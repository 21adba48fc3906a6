"""Divide the layers of a model of transformers over tensor-parallel ranks, in place, and if asked to the tokens too."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from torch.utils._pytree import tree_iter
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.automodel.architecture import Layers, find_layers, layer_configs, model_type
from megatron_fsdp.automodel.tensor_parallel import plans
from megatron_fsdp.automodel.tensor_parallel.styles import (
    SEQUENCE_DIM,
    LocalUse,
    gather_tokens,
    local_parts,
    not_a_view,
    own_tokens,
    place,
    undivided_units,
    use_plain_tensors,
)
from megatron_fsdp.automodel.tensor_parallel.trial import Trial
from megatron_fsdp.comm.agreement import Problem, ask
from megatron_fsdp.comm.fingerprint import fingerprint, random_state
from megatron_fsdp.debug.gradient_checks import ReplicaCheck
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError

SEQUENCE_PARALLEL_TYPES = (
    *("deepseek_v3", "cohere", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo2"),
    *("phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
"""Model types whose layers are proven to compute nothing across tokens outside of their blocks."""

_AT_EDGES = plans.COLWISE | plans.ROWWISE | {"replicated_with_grad_allreduce", "local_params"}
_AT_EDGES -= {"packed_colwise", "packed_rowwise", "rowwise_split_output"}

_SUMMED = ("replicated_with_grad_allreduce", "sequence_parallel")
_SHOWN = 4
_HEAD_COUNTS = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads")


def parallelize_tensors(
    model: nn.Module,
    tp_mesh: DeviceMesh,
    *,
    plan: plans.Plan | str | None = None,
    sequence_parallel: bool = False,
    apart: Collection[str] = (),
) -> None:
    """Divide the layers of a model over tensor-parallel ranks, in place; call it before anything else wraps layers.

    Afterwards every parameter is a DTensor over `tp_mesh`, placed as `Shard(dim)` or `Replicate()`, and every rank must
    be given the same batch. Inputs and outputs of the model are whole plain tensors.

    Args:
        model: A causal language model of transformers, also one of peft around it. Parameters on the meta device stay
            there; of real ones, which must be equal on all ranks, each rank keeps its part.
        tp_mesh: One-dimensional.
        plan: Style by name of the module (`*` stands for one part of a name): a ParallelStyle of torch, or a name that
            plans of transformers use; or the import path of such a dict or of a function without arguments that
            returns one. None: the plan that transformers has for the model.
        sequence_parallel: Divide the tokens of the residual stream, too. Rows must then divide by the ranks.
        apart: Names of modules that are left alone. They run on whole tokens; the caller divides them, as experts over
            ranks of their own.

    Raises:
        ConfigurationError: There is no plan, an entry names nothing, or a style does not fit its module.
        ParallelSizeError: The ranks cannot share heads, layers or experts evenly.
    """
    if tp_mesh.ndim != 1:
        raise ConfigurationError(
            f"tp_mesh has the dimensions {tp_mesh.mesh_dim_names}; give the one-dimensional mesh of tensor-parallel "
            "ranks, such as mesh['tp']"
        )
    inside = getattr(model, "get_base_model", None)  # of peft; plans use the names of the model inside
    base: Any = inside() if callable(inside) else model
    left_alone = {model.get_submodule(name) for name in apart}
    apart = {name for name, part in base.named_modules() if part in left_alone}
    matched = plans.match_plan(base, plan)
    ties = plans.Ties.of(base)
    styles = ties.adapt(base, matched.modules)
    plans.check_heads(base, styles, tp_mesh.size())
    region = sequence_region(base, styles) if sequence_parallel else None
    steps = {name: step for name, step in _steps(base, styles, region).items() if name not in apart}
    named = {name: style for name, style in matched.parameters.items() if name.rpartition(".")[0] not in apart}
    matched = replace(matched, parameters=named)
    _check(base, steps, matched, tp_mesh.size())
    head_owners = _head_owners(styles) if plan is not None else ()
    parts, running = _try_division(base, steps, matched, tp_mesh.size(), region, head_owners)
    parts |= _told_partial(base, matched, region)
    # What others have noted on parameters, such as that they are initialized, is kept.
    notes = {name: dict(vars(param)) for name, param in model.named_parameters(remove_duplicate=False)}
    _apply(base, steps, matched, tp_mesh)
    units = undivided_units(model, {base.get_submodule(name) for name in steps} | left_alone, parts)
    own = [(module, uses) for module, uses in units if module not in left_alone]
    for module, uses in _where_they_run(model, own, running):
        for use in uses:
            place(module.get_submodule(use.path), use.name, tp_mesh, Replicate())
        use_plain_tensors(module, uses)
    ties.restore(base)
    for name, param in model.named_parameters(remove_duplicate=False):
        vars(param).update(notes[name])
    model.register_forward_pre_hook(_FirstForward(tp_mesh), with_kwargs=True)
    FirstBackwards(tp_mesh).watch(model)
    _count_own_heads(base, head_owners, tp_mesh.size())
    if region is not None:
        split_tokens(base, region, tp_mesh)
    for name in steps:  # later code may write into outputs; and FSDP2 warns of a view that leaves a unit
        base.get_submodule(name).register_forward_hook(_leave_no_view)


def _leave_no_view(_module: nn.Module, _args: Any, output: Any) -> Any:
    is_plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
    return not_a_view(output) if is_plain else output


Steps = dict[str, tuple[ParallelStyle | str, bool]]
"""Name of the module -> (style, True if it is in a block that scatters its tokens)."""


def _steps(model: nn.Module, styles: Mapping[str, ParallelStyle | str], region: SequenceRegion | None) -> Steps:
    """List the steps of the division, adapters taken apart, in order of the model."""
    steps: Steps = {}
    for name, style in styles.items():
        scatters = region is not None and region.scatters(name)
        module = model.get_submodule(name)
        if isinstance(style, str) and style in plans.NOT_DIVIDED:
            continue
        if isinstance(style, str) and isinstance(getattr(module, "base_layer", None), nn.Module):  # of peft
            steps.update(
                (part, (own, scatters)) for part, own in plans.styles_of_adapted(name, module, style, scatters)
            )
        else:
            steps[name] = (style, scatters)
    for name in region.on_parts if region is not None else ():
        steps.setdefault(name, ("replicated_with_grad_allreduce", False))
    return steps


def _check(model: nn.Module, steps: Steps, matched: plans.MatchedPlan, ranks: int) -> None:
    for name, (style, _) in steps.items():
        if isinstance(style, str):
            plans.check_module(name, model.get_submodule(name), style, ranks)
    for name, own_style in matched.parameters.items():
        owner, _, _ = name.rpartition(".")
        if steps.get(owner, ("",))[0] != "moe_tp_experts":
            plans.check_parameter(name, model.get_parameter(name), own_style, ranks)


def _try_division(
    model: nn.Module,
    steps: Steps,
    matched: plans.MatchedPlan,
    ranks: int,
    region: SequenceRegion | None,
    head_owners: Sequence[str],
) -> tuple[set[int], dict[int, set[nn.Module]]]:
    """Return the ids of whole parameters of which each rank computes a partial gradient, and the modules that run.

    The second are those that run at all uses of a parameter, by its id; see `Trial`. Whatever no trial can follow
    (styles of torch with their own layouts, models that take no token ids) counts as whole. The first backward
    compares the gradients in any case.

    Raises:
        ConfigurationError: One rank's part of the model cannot compute what the whole model can.
    """
    own: dict[str, dict[str, Placement]] = {}
    for name, own_style in matched.parameters.items():
        owner, _, key = name.rpartition(".")
        own.setdefault(owner, {})[key] = plans.parameter_placement(own_style, model.get_parameter(name).ndim)

    def tried(parts: int) -> Trial:
        divisions = {}
        for name, (style, scatters) in steps.items():
            found = plans.division_of(style, model.get_submodule(name), scatters, own.get(name, {}), parts)
            divisions.update({} if found is None else {name: found})
        blocks = region.scattering if region is not None else ()
        return Trial(model, divisions, blocks, lambda copied: _count_own_heads(copied, head_owners, parts))

    try:
        trial, whole = tried(ranks), tried(1)
    except Exception:  # noqa: BLE001 - a model that cannot be copied, a style that cannot be followed
        return set(), {}
    reason, is_whole_tried = trial.run(), whole.run() is None
    if reason is None and is_whole_tried:
        reason = trial.differing_reduction(whole)
    if reason is None:
        found = {
            id(model.get_parameter(name)): {model.get_submodule(each) for each in modules}
            for name, modules in trial.running.items()
        }
        return {id(model.get_parameter(name)) for name in trial.partial}, found
    if not is_whole_tried:
        return set(), {}
    raise ConfigurationError(
        f"{ranks} tensor-parallel ranks cannot compute {type(model).__name__} by this plan: {reason}; give a tp_plan "
        f"that {_advice(model, trial.failed_in, steps)}, or use tp_size=1"
    )


Units = Iterable[tuple[nn.Module, tuple[LocalUse, ...]]]


def _where_they_run(model: nn.Module, units: Units, running: Mapping[int, set[nn.Module]]) -> Units:
    """Move each plain weight up to the nearest module whose forward runs at all of its uses (not Gemma 3n's AltUp)."""
    names, found = {module: name for name, module in model.named_modules()}, dict[str, list[LocalUse]]()
    for module, uses in units:
        for use in uses:
            name, path = names[module], use.path
            runs = running.get(id(module.get_submodule(path)._parameters[use.name]))
            while name and runs is not None and model.get_submodule(name) not in runs:
                name, _, last = name.rpartition(".")
                path = f"{last}.{path}".rstrip(".")
            found.setdefault(name, []).append(replace(use, path=path))
    return [(model.get_submodule(name), tuple(uses)) for name, uses in found.items()]


def _told_partial(model: nn.Module, matched: plans.MatchedPlan, region: SequenceRegion | None) -> set[int]:
    """Return the ids of whole parameters of which the plan, or Megatron's mark, says that gradients are to be summed.

    `sequence_parallel`: the parameter sees this rank's tokens, where these are divided.
    """
    summed = _SUMMED[: 1 if region is None else None]
    found = {id(model.get_parameter(name)) for name, style in matched.parameters.items() if style in summed}
    marked = model.parameters() if region is not None else ()
    return found | {id(param) for param in marked if getattr(param, "sequence_parallel", False)}


def _advice(model: nn.Module, name: str, steps: Steps) -> str:
    """Suggest a change of the plan for a module that does not fit."""
    block = name
    while block and not any(key.startswith(f"{block}.") for key in steps):
        block = block.rpartition(".")[0]
    entries = [f"{key} ({style})" for key, (style, _) in steps.items() if block and key.startswith(f"{block}.")]
    params = [key for key, _ in model.get_submodule(name).named_parameters(prefix=name, recurse=False)] if name else []
    what = f"leaves {', '.join(entries[:_SHOWN])} out" if entries else "leaves the layers around it out"
    return f"{what}{f', or cuts {params[0]} likewise' if params else ''}"


def _apply(model: nn.Module, steps: Steps, matched: plans.MatchedPlan, mesh: DeviceMesh) -> None:
    own: dict[str, dict[str, str]] = {}
    for name, own_style in matched.parameters.items():
        owner, _, key = name.rpartition(".")
        own.setdefault(owner, {})[key] = own_style
    for name, (style, scatters) in steps.items():
        module = model.get_submodule(name)
        placements = _placements(module, own.pop(name, {}))
        if isinstance(style, str):
            found = plans.style_of(style, module, scatters, placements, _layer_config(model, name))
        else:
            found = copy.copy(style)  # since applying changes a style
        if isinstance(found, ParallelStyle):
            parallelize_module(module, mesh, found, src_data_rank=None)
        else:
            found(module, mesh)
    for owner, keys in own.items():  # no style says how the module uses them: stored in parts, and used whole
        module = model.get_submodule(owner)
        stored = _placements(
            module, {key: style for key, style in keys.items() if style not in plans.NOT_DIVIDED | set(_SUMMED)}
        )
        if stored:
            local_parts(module, mesh, stored, whole=True)


def _layer_config(model: nn.Module, name: str) -> Any:
    """Return the config of the layer that a module is in."""
    configs = layer_configs(model)
    index = next(map(int, filter(str.isdecimal, name.split("."))), 0)
    return configs[index] if len(configs) > 1 else configs[0]


def _placements(module: nn.Module, styles: Mapping[str, str]) -> dict[str, Placement]:
    params: dict[str, Any] = module._parameters
    return {key: plans.parameter_placement(style, params[key].ndim) for key, style in styles.items()}


def _head_owners(styles: Mapping[str, ParallelStyle | str]) -> tuple[str, ...]:
    """Return the attention modules that are divided by heads; those with plans of transformers count by the tensors."""
    divided = (name for name, style in styles.items() if style == "colwise" and plans.in_attention(name))
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in divided))


def _count_own_heads(model: nn.Module, owners: Sequence[str], ranks: int) -> None:
    """Set the local number of heads in attention modules."""
    for owner in owners:
        module = model.get_submodule(owner)
        for key in _HEAD_COUNTS:
            count = vars(module).get(key)
            if isinstance(count, int) and count % ranks == 0:
                setattr(module, key, count // ranks)


def enable_async_tensor_parallel(tp_mesh: DeviceMesh) -> bool:
    """Enable inductor's overlap of sequence parallelism's gathers and reduce-scatters with the adjacent products.

    It needs compiled layers, and devices that reach each other's memory; otherwise it warns once and changes nothing.
    The switch is inductor's own and counts for the whole process. Returns whether it is on.
    """
    if tp_mesh.device_type == "cpu":
        warnings.warn(
            "asynchronous tensor parallelism needs devices that reach each other's memory, which CPUs are not; "
            "training continues without it",
            stacklevel=2,
        )
        return False
    from torch._inductor import config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch may have made the call needless; it does no harm
            enable_symm_mem_for_group(tp_mesh.get_group().group_name)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        warnings.warn(
            f"asynchronous tensor parallelism is off, since the ranks cannot share memory: {error}", stacklevel=2
        )
        return False
    inductor._micro_pipeline_tp = True
    return True


class _FirstForward:
    """A hook that compares inputs, and with dropout random states, over the ranks; only the first time.

    Activations of ranks with different batches would be joined from different rows, and after different random numbers
    replicated weights would drift apart, with a loss that looks the same on all ranks. The usual cause is a sampler or
    a seed by the global rank.
    """

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        self._mesh = tp_mesh
        self._is_done = False

    def __deepcopy__(self, _: dict[int, Any]) -> _FirstForward:
        """Share the hook between copies of a model: process groups cannot be copied."""
        return self

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._is_done or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        self._is_done = True
        device = torch.empty(0, device=self._mesh.device_type).device  # with the index of the current device
        drops_out = any(isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in module.modules())
        random = int(fingerprint(random_state(device)[-1])) if drops_out else 0
        ask([(self._mesh.get_group(), (_describe(args, kwargs), random))], _judge_inputs)


class FirstBackwards:
    """Compares the gradients of parameters that are whole on every rank, when the first backwards have ended.

    It reads `.grad`, however the model is sharded further. Every backward through an output of the model asks the other
    ranks, with or without gradients here, so none waits for another.
    """

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        self._mesh = tp_mesh
        self._check: ReplicaCheck | None = None
        self._is_queued = False
        self._handle: RemovableHandle | None = None

    def __deepcopy__(self, _: dict[int, Any]) -> FirstBackwards:
        """Share the hook between copies of a model: process groups cannot be copied."""
        return self

    def watch(self, model: nn.Module) -> None:
        """Register the hook of a model."""
        self._handle = model.register_forward_hook(self)

    def __call__(self, model: nn.Module, _args: Any, output: Any) -> None:
        """Wait for the backward of this output."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        for tensor in tree_iter(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._begin, model))

    def _begin(self, model: nn.Module, _grad: Tensor) -> None:
        if not self._is_queued and self._handle is not None:
            self._is_queued = True
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(partial(self._end, model)))  # after those that set the gradients

    def _end(self, model: nn.Module) -> None:
        self._is_queued = False
        whole = {name: param for name, param in model.named_parameters() if self._is_whole(param)}
        if self._check is None:
            self._check = self._make(whole)
        self._check.begin()
        for name, param in whole.items():
            if isinstance(param.grad, DTensor):
                self._check.record(name, param.grad.to_local())
        self._check.conclude()
        if self._check.is_done and self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _is_whole(self, param: nn.Parameter) -> bool:
        # Of ours, the engine has compared the gradients.
        if not isinstance(param, DTensor) or hasattr(param, "_megatron_fsdp_model"):
            return False
        names = param.device_mesh.mesh_dim_names or ()
        if "ep" in names:  # each rank has experts of its own
            return False
        return param.placements[self._dim_of(param.device_mesh)].is_replicate()

    def _dim_of(self, mesh: DeviceMesh) -> int:
        names = mesh.mesh_dim_names or ()
        return names.index(self._mesh.mesh_dim_names[0]) if len(names) > 1 and self._mesh.mesh_dim_names else 0

    def _make(self, whole: Mapping[str, nn.Parameter]) -> ReplicaCheck:
        meshes: list[Any] = [param.device_mesh for param in whole.values()]  # type: ignore[attr-defined] # DTensors
        widest = max(meshes, key=lambda mesh: mesh.ndim, default=self._mesh)
        others = [widest.get_group(dim) for dim in range(widest.ndim) if dim != self._dim_of(widest)]
        device = torch.empty(0, device=self._mesh.device_type).device
        dtypes = {name: param.dtype for name, param in whole.items()}
        return ReplicaCheck(dtypes, self._mesh.get_group(), others, device)


def _judge_inputs(reports: Sequence[tuple[str, int]]) -> Problem | None:
    inputs, states = zip(*reports, strict=True)
    if len(set(inputs)) > 1:
        return ConfigurationError, (
            "tensor-parallel ranks were given different batches; let ranks that share a model read the same rows "
            "(mesh_context.data_rank, not the global rank)"
        )
    if len(set(states)) > 1:
        return ConfigurationError, (
            "tensor-parallel ranks have different random states, so dropout would let their weights drift apart; "
            "seed ranks that share a model alike (by mesh_context.data_rank, not by the global rank)"
        )
    return None


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Describe the tensors of integers among the arguments, by name, shape and fingerprint."""
    named = [*((str(index), value) for index, value in enumerate(args)), *sorted(kwargs.items())]
    tensors = [(name, value) for name, value in named if isinstance(value, Tensor) and not value.is_floating_point()]
    return repr([(name, tuple(value.shape), int(fingerprint(value))) for name, value in tensors])


# ---- sequence parallelism: between its blocks a decoder layer holds only this rank's tokens --------------------------

# Norms, dropouts and sums of the residual stream run on a part of the tokens, so their activations take 1 / ranks of
# the memory (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022). The decoder
# layers are the region: the first one cuts the tokens, the last one gathers them, so what is outside, position ids and
# masks included, sees whole tensors. A block (attention, feed-forward) gathers the tokens at its entry. Where all of
# its entry projections are column-wise and its exit is row-wise, gradients are reduce-scattered at the entry and
# outputs at the exit; any other block (experts with their router) runs on whole tokens as without sequence parallelism.


@dataclass(frozen=True)
class SequenceRegion:
    """The parts of the decoder layers, by their names in the model."""

    layers: Layers
    scattering: tuple[str, ...]  # blocks that take partial gradients and scatter their output themselves
    whole: tuple[str, ...]  # blocks that run on whole tokens
    on_parts: tuple[str, ...]  # modules with parameters that run on this rank's tokens

    def scatters(self, name: str) -> bool:
        """Return True if a module belongs to a block that scatters its output."""
        return any(name.startswith(f"{block}.") for block in self.scattering)


def sequence_region(model: nn.Module, styles: Mapping[str, ParallelStyle | str]) -> SequenceRegion:
    """Classify the parts of the decoder layers; raise for unproven model types, and plans with styles of torch."""
    if model_type(model) not in SEQUENCE_PARALLEL_TYPES:
        raise ConfigurationError(
            f"sequence_parallel=True is not offered for {type(model).__name__} ({model_type(model) or 'no type'}), but "
            f"for the model types {', '.join(SEQUENCE_PARALLEL_TYPES)}; set it to False, and give a tp_plan of torch's "
            "styles with sequence layouts where you need it"
        )
    own = [name for name, style in styles.items() if not isinstance(style, str)]
    if own:
        raise ConfigurationError(
            f"sequence_parallel=True cannot change the styles of torch that the plan gives (to {own[0]}); write the "
            "sequence layouts into them and set it to False, or give names of styles"
        )
    layers = find_layers(model)
    sorted_parts: dict[str, list[str]] = {"scattering": [], "whole": [], "on_parts": []}
    for layer_name, layer in layers.named():
        for child, part in layer.named_children():
            name = f"{layer_name}.{child}"
            inside = [str(style) for key, style in styles.items() if key == name or key.startswith(f"{name}.")]
            kind = _kind(part, inside)
            if kind is not None:
                sorted_parts[kind].append(name)
    return SequenceRegion(layers, *(tuple(names) for names in sorted_parts.values()))


def _kind(part: nn.Module, styles: list[str]) -> str | None:
    if styles:
        exits = sum(style in plans.ROWWISE for style in styles)
        return "scattering" if set(styles) <= _AT_EDGES and exits == 1 else "whole"
    has_parameters = next(part.parameters(), None) is not None
    if "norm" in type(part).__name__.lower():
        return "on_parts" if has_parameters else None
    return "whole" if has_parameters else None


def split_tokens(model: nn.Module, region: SequenceRegion, mesh: DeviceMesh) -> None:
    """Register a region's splits and gathers."""
    layers = region.layers.modules()
    layers[0].register_forward_pre_hook(_on_input(partial(_cut, mesh=mesh)), with_kwargs=True)
    layers[-1].register_forward_hook(_on_output(lambda tensor: not_a_view(gather_tokens(tensor, mesh, Replicate()))))
    for names, gradient in ((region.scattering, Partial()), (region.whole, Replicate())):
        gather = _on_input(partial(gather_tokens, mesh=mesh, gradient=gradient))
        for name in names:
            model.get_submodule(name).register_forward_pre_hook(gather, with_kwargs=True)
    for name in region.whole:
        model.get_submodule(name).register_forward_hook(_on_output(partial(own_tokens, mesh=mesh)))


def _cut(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    if tensor.shape[SEQUENCE_DIM] % mesh.size():
        raise ParallelSizeError(
            f"the batch has {tensor.shape[SEQUENCE_DIM]} tokens in a row, which {mesh.size()} tensor-parallel ranks "
            "cannot share evenly under sequence parallelism; pad rows to a multiple of that"
        )
    return own_tokens(tensor, mesh)


def _on_input(change: Any) -> Any:
    """Return a hook that changes the input hidden states: the first argument or the one of that name."""

    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    return hook


def _on_output(change: Any) -> Any:
    """Return a hook that changes the output hidden states, alone or first of a tuple."""

    def hook(_module: nn.Module, _args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return hook
