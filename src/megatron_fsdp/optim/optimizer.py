"""Any torch optimizer on sharded parameters, by hooks: reduced gradients before a step, compute weights after it.

Which optimizer steps how is said here (`step_of`, `_make_step`), and which are refused (`check_kind` and others).
"""

from __future__ import annotations

import functools
import itertools
import re
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.comm.agreement import Groups, all_agree
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.engine.engine import Engine, engine_of_param
from megatron_fsdp.engine.gradients import GRAD
from megatron_fsdp.errors import ConfigurationError, RankError, ScheduleError, warn_caller
from megatron_fsdp.optim.adamw8bit import AdamW8bit, BlocksStep, problem_of_blocks
from megatron_fsdp.optim.chained import ChainedOptimizer, ChainedStep, members_of
from megatron_fsdp.optim.full_tensor.muon import SPLIT_KEY, MuonStep, check_muon
from megatron_fsdp.optim.full_tensor.step import (
    OwnedStep,
    ReplicatedStep,
    inherits_declaration,
    replicas_of,
    steps_owned,
    steps_replicated,
)
from megatron_fsdp.optim.local_step import (
    SHARDED_STATE,
    ExchangingStep,
    LocalStep,
    Step,
    check_offload,
    move_to_offload,
    params_of,
    steps_locally,
    without_parameter,
)
from megatron_fsdp.optim.state_dict import Lost, as_held, as_saved, warn_of_thawed, with_blank_state
from megatron_fsdp.optim.step_in_backward import StepInBackward
from megatron_fsdp.optim.watch import check_keeps_no_copies, refuse_local_blocks, watched_engines
from megatron_fsdp.sharding.units import outside_of_blocks

WHOLE_TENSOR_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.Rprop)
"""Torch's optimizers whose step, or an operation in it, needs more than the elements of a shard."""


def step_of(optimizer: Optimizer) -> str:
    """Describe the tensors that the step of a connected optimizer works on."""
    if type(optimizer) is torch.optim.Muon:
        pieces = [
            ", ".join(sizes) for group in optimizer.param_groups if isinstance(sizes := group.get(SPLIT_KEY), Mapping)
        ]
        split = f", split into {' and '.join(dict.fromkeys(pieces))}" if pieces else ""
        return f"on shards and whole matrices (Muon{split})"
    if isinstance(optimizer, AdamW8bit):
        return "on shards, in blocks of 256 elements of whole tensors"
    if steps_owned(optimizer):
        return "on whole tensors, one owner each"
    if isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS):
        return "on whole tensors, the same on every rank"
    return "on local tensors" if steps_locally(optimizer) else "on DTensors"


def count_kinds(params: Iterable[Tensor], *models: nn.Module) -> tuple[str, ...]:
    """Count parameters by kind, the most first: ("norms 65", "embeddings 1", "head 1"); see `kinds_of`."""
    return tuple(f"{kind} {count}" for kind, count in Counter(kinds_of(params, *models)).most_common())


def kinds_of(params: Iterable[Tensor], *models: nn.Module) -> list[str]:
    """Name the kind of each parameter: the one rule by which Muon's matrices are chosen, planned and shown.

    A head is what a model returns by `get_output_embeddings()`, or a linear layer as tall as a token embedding that
    stands outside of repeated blocks, where a width may be as large as the vocabulary by chance. Tied to an embedding
    it is one.

    `models` hold the parameters; one that they do not hold just now is judged by its shape.

    Returns:
        "matrices", "stacks of matrices", "embeddings", "head", "norms", "biases" or "vectors", for each.
    """
    holders: dict[int, tuple[nn.Module, str]] = {}
    for module in itertools.chain.from_iterable(model.modules() for model in models):
        for name, param in module._parameters.items():
            if param is not None and (id(param) not in holders or isinstance(module, nn.Embedding)):
                holders[id(param)] = module, name
    heads = {id(weight) for model in models for weight in _heads(model)}
    nowhere: tuple[nn.Module | None, str] = None, ""
    return [_kind(param, holders.get(id(param), nowhere), id(param) in heads) for param in params]


def _kind(param: Tensor, holder: tuple[nn.Module | None, str], is_head: bool) -> str:
    module, name = holder
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "norms"
    if name.endswith("bias"):
        return "biases"
    if param.dim() == 2:
        return "head" if is_head else "matrices"
    return "stacks of matrices" if param.dim() > 2 else "vectors"


def _heads(model: nn.Module) -> Iterator[Tensor]:
    """Iterate over the weights that turn hidden states into scores of tokens."""
    outer = outside_of_blocks(model)
    named = _declared(model, "get_input_embeddings") or [
        module for name, module in outer.items() if not _POSITIONS.search(name)
    ]
    heights = {module.num_embeddings for module in named if isinstance(module, nn.Embedding)}
    declared = _declared(model, "get_output_embeddings")
    for module in (*declared, *outer.values()):
        # Not `module.weight`: that of a parametrization is computed, and is no parameter.
        weight = module._parameters.get("weight") if isinstance(module, nn.Linear) else None
        if weight is not None and (module in declared or weight.shape[0] in heights):
            yield weight


_POSITIONS = re.compile(r"pos(ition|_|$)|wpe|type|segment", re.IGNORECASE)
"""Names of embeddings of something else than tokens."""


def _declared(model: nn.Module, method: str) -> list[nn.Module]:
    """List the results of a method without arguments of a transformers model, or of models inside."""
    found = []
    for module in model.modules():
        with suppress(NotImplementedError, AttributeError):  # of a type that has none
            found.append(getattr(module, method)())
    return [module for module in found if isinstance(module, nn.Embedding | nn.Linear)]


def route_line(optimizer: Optimizer, *models: nn.Module) -> str:
    """Summarise the updated parameters in a line: "AdamW: 67 parameters on local tensors (norms 65, ...)"."""
    params = params_of(optimizer)
    parts = ", ".join(count_kinds(params, *models))
    return f"{type(optimizer).__name__}: {len(params)} parameters {step_of(optimizer)} ({parts})"


def facts_of(optimizer: Optimizer) -> dict[str, str]:
    """Return the facts of an optimizer that have to be the same on all ranks: its classes and parameters."""
    members = members_of(optimizer)
    return {
        "the optimizer": " and ".join(type(each).__name__ for each in members),
        "the shapes of its parameters": "; ".join(str([tuple(p.shape) for p in params_of(each)]) for each in members),
    }


SYNC_KEYWORD = "sync_grad_before_optimizer_step"
INSTALL_KEYWORD = "install_optimized_model_weights"


class Engines:
    """The engines of the models whose parameters one optimizer updates, mostly one; held weakly.

    Iterating raises a ConfigurationError where one of them has been deleted.
    """

    def __init__(self, engines: Iterable[Engine]) -> None:
        self._references = [weakref.ref(engine) for engine in engines]

    def __iter__(self) -> Iterator[Engine]:
        engines = [engine for reference in self._references if (engine := reference()) is not None]
        if len(engines) < len(self._references):
            raise ConfigurationError(
                "the model whose parameters this optimizer updates has been deleted; build a new optimizer for a new "
                "model"
            )
        return iter(engines)


class _StepHooks:
    """The hooks around one optimizer's `step`; the keyword that `before` takes out is kept for `after`."""

    def __init__(self, engines: Engines, step: Step) -> None:
        self._engines = engines
        self._installs = True
        self._step = step
        self._in_backward: StepInBackward | None = None  # between entering its block and the end of its step
        self._last: StepInBackward | None = None  # the last that has ended well
        self.lost: Lost = {}
        self.loading: Groups = (None,)  # those of the ranks that call load_state_dict
        self.has_synced = False  # in the step that is running

    def before(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Again: options may have been loaded.
        check_rounding(optimizer, any(engine.is_deterministic for engine in self._engines))
        if self.lost:
            warn_of_thawed(optimizer, self.lost)
        kwargs = dict(kwargs)
        syncs = kwargs.pop(SYNC_KEYWORD, True)
        self._installs = kwargs.pop(INSTALL_KEYWORD, True)
        self.refuse_inside("optimizer.step()")
        if self._in_backward is not None:
            self._in_backward.finish(optimizer, next(iter(self._engines)))
        elif self._last is not None and self._last.is_of_the_last_backward:
            raise ScheduleError(
                "optimizer.step_in_backward() has taken the step when its block ended; leave optimizer.step() out"
            )
        if len(args) > 1 and callable(args[1]):
            args = (args[0], self._around(args[1], syncs), *args[2:])
        elif callable(kwargs.get("closure")):
            kwargs["closure"] = self._around(kwargs["closure"], syncs)
        elif syncs:
            self.has_synced = True
            self.sync()
        if args and args[0] is optimizer:
            args = (self._step.proxy(optimizer), *args[1:])
        return args, kwargs

    def _around(self, closure: Callable[[], Any], syncs: bool) -> Callable[[], Any]:
        """Wrap a closure, which may run several times: install weights before each run, sync gradients after it."""

        def synchronised() -> Any:
            self._install()
            with torch.enable_grad():
                result = closure()
            if syncs:
                self.sync()
            return result

        return self._step.around(synchronised)

    @contextmanager
    def step_in_backward(self, optimizer: Optimizer) -> Iterator[None]:
        """Step units on a thread inside a block with the last backward of a step; then step the rest."""
        if self._in_backward is not None:
            raise ScheduleError(self._in_backward.broken or "optimizer.step_in_backward() was entered inside of itself")
        if not isinstance(self._step, LocalStep) or not steps_locally(optimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} cannot step in backward, since its step is none of those of torch that go "
                "element by element; leave step_in_backward out"
            )
        engine, *others = self._engines
        if others:
            raise ConfigurationError(
                "an optimizer of several sharded models cannot step in backward; leave step_in_backward out, or build "
                "an optimizer for each"
            )
        in_backward = self._in_backward = StepInBackward(optimizer, self._step, engine)
        try:
            yield
            in_backward.leave()
            optimizer.step()
        except BaseException as error:
            in_backward.fail(error)
            raise
        else:
            in_backward.end()
            self._last = in_backward
        finally:
            self._in_backward = in_backward if in_backward.broken else None

    def refuse_inside(self, what: str) -> None:
        """Raise if called inside the block of a step in backward."""
        if self._in_backward is not None and not self._in_backward.has_left and not self._in_backward.broken:
            raise ScheduleError(
                f"{what} was called inside of optimizer.step_in_backward(), whose block holds the backward alone and "
                "ends with the step; call it before or after the block"
            )

    def after_loading(self, optimizer: Optimizer) -> None:
        """Move loaded state to its offload memory; drop kept tensors, and a step in backward that has failed."""
        self._step.hand_over()
        if _moves_state(optimizer):
            for each in members_of(optimizer):
                move_to_offload(each)
        self.refuse_inside("optimizer.load_state_dict()")
        in_backward, self._in_backward = self._in_backward, None
        if in_backward is not None:
            in_backward.end()

    def after(self, _optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._installs:
            self._install()

    def sync(self) -> None:
        """Run the gradient syncs that no backward has run."""
        for engine in self._engines:
            engine.sync_if_unreduced()

    def _install(self) -> None:
        for engine in self._engines:
            engine.install_main_weights()


def integrate(optimizer: Optimizer, engines: Engines, describes_state: bool) -> None:
    """Register the hooks on an optimizer that holds sharded parameters. `step` itself is never called here.

    The step of torch's elementwise optimizers runs on local tensors (`local_step`); other hooks, which are called with
    the optimizer first, see DTensors as before.

    `optimizer.step` takes `sync_grad_before_optimizer_step` and `install_optimized_model_weights` (both True) as
    further keywords, and `optimizer.zero_grad` takes `zero_grad_buffer` (True). `optimizer.load_state_dict` becomes
    collective: what is wrong on one rank is refused on all.

    `describes_state`: attach to the tensors of its state dict which part of a global tensor they hold.
    """
    step = _make_step(optimizer)
    hooks = _StepHooks(engines, step)
    if isinstance(step, ExchangingStep):
        _guard(optimizer, step, hooks)
    elif isinstance(step, ReplicatedStep):
        _agree_after(optimizer)
    optimizer.register_step_pre_hook(hooks.before)
    optimizer.register_step_post_hook(hooks.after)
    first = optimizer.register_step_post_hook(lambda stepped, *_: step.finish(stepped))
    # Hooks that were registered before may read state, too.
    optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]
    optimizer.register_state_dict_pre_hook(lambda _: step.hand_over())
    optimizer.register_state_dict_post_hook(with_blank_state)
    if describes_state:
        optimizer.register_state_dict_post_hook(functools.partial(as_saved, engines))
    optimizer.register_load_state_dict_pre_hook(functools.partial(as_held, engines, hooks.lost, lambda: hooks.loading))
    optimizer._misses_no_state = hooks.lost.clear  # type: ignore[attr-defined]  # as our own checkpoints say
    optimizer.__reduce_ex__ = _refuse_copy  # type: ignore[method-assign]
    optimizer.register_load_state_dict_post_hook(hooks.after_loading)
    for each in members_of(optimizer):
        _check_new_groups(each, engines)
    owner, original = weakref.ref(optimizer), type(optimizer).zero_grad

    @functools.wraps(original)
    def zero_grad(*args: Any, zero_grad_buffer: bool = True, **kwargs: Any) -> None:
        alive = owner()
        if alive is None:
            return
        if any(engine.keeps_gradients for engine in engines):
            args, kwargs = (), {"set_to_none": False}
        hooks.refuse_inside("optimizer.zero_grad()")
        original(alive, *args, **kwargs)
        set_to_none = kwargs.get("set_to_none", args[0] if args else True)
        for engine in engines:
            params = [param for param in params_of(alive) if id(param) in engine.group_and_index]
            engine.clear_decoupled_gradients(params, set_to_none)
            if zero_grad_buffer:
                engine.drop_unsynced_gradients(params)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    load = type(optimizer).load_state_dict

    @functools.wraps(load)
    def load_state_dict(state_dict: dict[str, Any]) -> None:
        alive = owner()
        if alive is None:
            return
        hooks.loading = next(iter(engines)).reaching_all
        try:
            with all_agree("optimizer.load_state_dict", hooks.loading):
                load(alive, state_dict)
        finally:
            hooks.loading = (None,)

    optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]

    def step_in_backward() -> AbstractContextManager[None]:
        alive = owner()
        assert alive is not None
        return hooks.step_in_backward(alive)

    optimizer.step_in_backward = step_in_backward  # type: ignore[attr-defined]


def _refuse_copy(_protocol: object) -> Any:
    """Raise when pickled or copied: torch would leave the hooks out, without which steps are wrong."""
    raise ConfigurationError(
        "an optimizer of sharded parameters can be neither copied nor pickled; save optimizer.state_dict() with "
        "torch.distributed.checkpoint, or build a second optimizer and hand it to fully_shard_optimizer"
    )


def _check_new_groups(optimizer: Optimizer, engines: Engines) -> None:
    """Make `add_param_group` check new groups as those of a new optimizer."""
    owner, original = weakref.ref(optimizer), type(optimizer).add_param_group

    @functools.wraps(original)
    def add_param_group(param_group: dict[str, Any]) -> None:
        alive = owner()
        if alive is None:
            return
        original(alive, param_group)
        try:
            check_connected(alive, engines)
        except ConfigurationError:
            alive.param_groups.pop()
            raise

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]


def _make_step(optimizer: Optimizer) -> Step:
    """Make the `Step` for an optimizer of this class."""
    if isinstance(optimizer, ChainedOptimizer):
        return ChainedStep([(each, _make_step(each)) for each in optimizer.optimizers])
    if type(optimizer) is torch.optim.Muon:
        return MuonStep()
    if steps_owned(optimizer):
        return OwnedStep()
    if isinstance(optimizer, AdamW8bit):
        return BlocksStep()
    return ReplicatedStep() if steps_replicated(optimizer) else LocalStep(_moves_state(optimizer))


def _moves_state(optimizer: Optimizer) -> bool:
    """Return True if state of some parameters of an optimizer is offloaded."""
    return any(engine_of_param(param).options.offload.optimizer_state for param in params_of(optimizer))


def _agree_after(optimizer: Optimizer) -> None:
    """Make a step whose closure is collective end with an agreement: an error of one rank is raised on all."""
    original = optimizer.step

    @functools.wraps(original)
    def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with all_agree("the step of LBFGS", replicas_of(params_of(_optimizer))):
            return original(*args, **kwargs)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _guard(optimizer: Optimizer, made: ExchangingStep, hooks: _StepHooks) -> None:
    """Make a step that fails on one rank fail on all, which wait for its results."""
    original = optimizer.step

    @functools.wraps(original)
    def step(_optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        has_closure = any(callable(each) for each in (*args, kwargs.get("closure")))
        if has_closure and isinstance(made, OwnedStep):
            raise ConfigurationError(
                f"{type(optimizer).__name__}.step takes no closure where parameters are sharded, since their owners "
                "step them after gradients have been sent; call backward before step"
            )
        made.begin(_optimizer)
        hooks.has_synced = has_closure or not kwargs.get(SYNC_KEYWORD, True)
        try:
            return original(*args, **kwargs)
        except RankError:
            raise  # on all ranks together
        except BaseException as error:
            if not hooks.has_synced:  # a hook has failed before ours, in which other ranks reduce gradients
                hooks.sync()
            made.fail(error)
            raise

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]  # a method, as schedulers want it


def check_connected(optimizer: Optimizer, engines: Engines) -> None:
    """Raise for an optimizer that cannot update the sharded parameters of these models."""
    check_parameters(optimizer, {key: name for engine in engines for key, name in engine.sharded_names().items()})
    check_kind(optimizer, are_sharded(params_of(optimizer)))
    for each in members_of(optimizer):
        check_offload(each)
    check_rounding(optimizer, any(engine.is_deterministic for engine in engines))
    is_decoupled = any(group.grad_attribute != GRAD for engine in engines for group in engine.groups())
    check_reads_decoupled(optimizer, is_decoupled)


def check_is_whole(optimizer: Any) -> None:
    """Raise for an optimizer that steps another one, which has to be connected itself, or without hooks of torch."""
    kind = type(optimizer).__name__
    for name, inner in vars(optimizer).items() if not _is_ours(optimizer) else ():
        if not hasattr(inner, "param_groups"):
            continue
        raise ConfigurationError(
            f"{kind} wraps another optimizer, {type(inner).__name__} ({name}), whose step is the one to connect: call "
            f"fully_shard_model first, build both on model.parameters(), call fully_shard_optimizer(optimizer.{name}), "
            f"and step the {kind} as before"
        )
    if not (vars(optimizer).keys() >= _HOOKS or _is_ours(optimizer)):
        raise ConfigurationError(
            f"{kind} has no hooks around its step; derive it from torch.optim.Optimizer, and call super().__init__"
        )
    for key in (key for key in optimizer.state if not isinstance(key, Tensor | str)):
        raise ConfigurationError(
            f"{kind} keeps state under {key!r}, a {type(key).__name__}, which belongs to no parameter and has no name "
            "in a checkpoint; use a text"
        )


def _is_ours(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("megatron_fsdp.")


_HOOKS = {"_optimizer_step_pre_hooks", "_optimizer_state_dict_pre_hooks"}
"""Attributes that the constructor of torch's optimizers sets."""


def check_before_sharding(optimizer: Optimizer, names: Mapping[int, str], *, are_cut: bool, is_captured: bool) -> None:
    """Raise for an optimizer that cannot be connected once its model is sharded.

    `names` are those of the model's parameters, by id. `are_cut`: they will be sharded. `is_captured`: steps will be
    captured in a CUDA graph.
    """
    check_parameters(optimizer, names)
    check_kind(optimizer, are_cut or are_sharded(params_of(optimizer)))
    check_keeps_no_copies(optimizer, names)
    if is_captured:
        check_capturable(optimizer)


def check_parameters(optimizer: Optimizer, known: Mapping[int, str]) -> None:
    """Raise for an optimizer that would update other tensors than the sharded parameters, or none."""
    for each in members_of(optimizer):
        if not params_of(each):
            name = "the optimizer" if each is optimizer else f"{type(each).__name__}, in a ChainedOptimizer,"
            raise ConfigurationError(f"{name} has no parameters; build it on the parameters of the model")
    for position, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            if id(param) not in known:
                raise ConfigurationError(
                    f"parameter {index} of param_groups[{position}] (shape {tuple(param.shape)}) is not a parameter of "
                    "the model that is being sharded, so stepping it would train nothing; build the optimizer on "
                    "model.parameters() after fully_shard_model, or hand model and optimizer to fully_shard together"
                )


def check_kind(optimizer: Optimizer, is_sharded: bool) -> None:
    """Raise for optimizers of torch whose update of an element depends on elements that may be on other ranks.

    `is_sharded`: parameters are, or will be, cut between ranks; the optimizer's may still be plain tensors.
    """
    for each in members_of(optimizer):
        _check_member(each, is_sharded)
        if steps_replicated(each) and each is not optimizer:
            raise ConfigurationError(
                f"{type(each).__name__} calls its closure several times in a step, and a ChainedOptimizer once; "
                "leave it out of the chain and hand it to fully_shard_optimizer"
            )


def are_sharded(params: Iterable[Tensor]) -> bool:
    """Return True if some parameters are sharded over ranks."""
    return any(
        isinstance(param, DTensor) and any(placement.is_shard() for placement in param.placements) for param in params
    )


def _check_member(optimizer: Optimizer, is_sharded: bool) -> None:
    name = type(optimizer).__name__
    refuse_local_blocks(optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigurationError(
            f"{name} takes sparse gradients alone, and those of a wrapped model are dense under every strategy; use "
            "Adam or AdamW, and embeddings with sparse=False"
        )
    if type(optimizer) is torch.optim.Muon:
        check_muon(optimizer)
        return
    if isinstance(optimizer, AdamW8bit):
        problem = next(filter(None, map(problem_of_blocks, params_of(optimizer))), None)
        if problem is not None:
            raise ConfigurationError(f"AdamW8bit was given {problem}")
    if is_sharded and inherits_declaration(optimizer):
        raise ConfigurationError(
            f"{name} is derived from a class that steps_whole_tensors declares, and declares nothing itself: decorate "
            "it, too, if it also updates each parameter from its own gradient and state alone"
        )
    fused = bool(optimizer.defaults.get("fused")) and isinstance(optimizer, torch.optim.SGD | torch.optim.Adagrad)
    if is_sharded and (fused or isinstance(optimizer, WHOLE_TENSOR_OPTIMIZERS)) and not steps_owned(optimizer):
        raise ConfigurationError(
            f"{name} {'with fused=True ' if fused else ''}cannot update sharded parameters: it works on whole tensors, "
            "or on operations that torch does not offer for shards; use an elementwise optimizer (SGD, AdamW, ...), "
            "torch.optim.Muon itself for matrices, or shard nothing (zero_dp_strategy=0, "
            "use_distributed_optimizer=False)"
        )
    specs = [param.shard_spec for param in params_of(optimizer) if isinstance(param, UnevenDTensor)]
    if steps_replicated(optimizer) and (len({f.mesh for f in specs}) > 1 or any(f.foreign_groups for f in specs)):
        raise ConfigurationError(
            f"{name} needs all parameters whole on every rank, and cannot step a model whose experts differ between "
            "ranks, or models on several meshes; use another optimizer"
        )


def check_rounding(optimizer: Optimizer, is_deterministic: bool) -> None:
    """Raise for an optimizer of a deterministic model that rounds an element by its place in a shard.

    On the CPU torch computes what fills no vector register, at the end of a tensor, one by one. Operations that round
    only once in a register round twice there: those of fused steps in any dtype (the second moment of AdamW in
    float32), and sums with a factor in narrow dtypes. AdamW has none of those; as for others, see the tests.
    """
    for each in members_of(optimizer) if is_deterministic else ():
        here = [param for param in params_of(each) if param.device.type == "cpu" and param.is_floating_point()]
        narrow = [] if type(each) is torch.optim.AdamW else [p for p in here if p.itemsize < torch.float32.itemsize]
        is_fused = bool(here) and any(group.get("fused") for group in each.param_groups)
        if not steps_owned(each) and (is_fused or narrow):
            what = (
                "with fused=True" if is_fused else f"on main weights in {str(narrow[0].dtype).removeprefix('torch.')}"
            )
            instead = "leave fused out" if is_fused else "keep them in float32 (main_params_dtype), or take AdamW"
            raise ConfigurationError(
                f'{type(each).__name__} {what} cannot step on the CPU with deterministic="world": torch rounds an '
                "element there by its place in a tensor, and its place in a shard depends on the number of ranks; "
                f"{instead}"
            )


KEEPS_FLOAT32_BY = "_keeps_float32_by"
"""The attribute of a wrapper, or of the module inside, with the arguments that keep main weights in float32."""
_KEEPS_WHAT_IT_ROUNDS = re.compile("stochastic|kahan|master", re.IGNORECASE)


def warn_of_lost_updates(optimizer: Optimizer, cure: str) -> None:
    """Warn, once in a process and on rank 0, of 16-bit main weights, in which most updates are rounded away.

    Optimizers that say in an option or attribute that they round stochastically, compensate, or have weights of their
    own in float32 (`bf16_stochastic_round`, `kahan_sum`, `master_weights`) lose nothing.
    `cure`: what to write for main weights in float32 (`float32_by`).
    """
    if _has_warned():
        return
    for each in members_of(optimizer):
        options = {**each.defaults, **vars(each)}
        narrow = [p.dtype for p in params_of(each) if p.is_floating_point() and p.requires_grad and p.itemsize == 2]
        if narrow and not any(value and _KEEPS_WHAT_IT_ROUNDS.search(name) for name, value in options.items()):
            _has_warned().append(True)
            warn_caller(
                f"{type(each).__name__} updates weights in {str(narrow[0]).removeprefix('torch.')}, which rounds "
                "updates of less than about a 500th of a weight away: at usual learning rates most weights never "
                f"change; let it update copies in float32: {cure}"
            )
            return


def float32_by(model: Any) -> str:
    """Return the argument for float32 main weights, in the terms of the function that has sharded the model."""
    return getattr(model.module, KEEPS_FLOAT32_BY, None) or getattr(model, KEEPS_FLOAT32_BY)


@functools.cache
def _has_warned() -> list[bool]:
    """Return a list that is empty until the process has warned of lost updates."""
    return []


def check_reads_decoupled(optimizer: Optimizer, is_decoupled: bool) -> None:
    """Raise for an optimizer that would silently train nothing, since it reads no `.decoupled_grad`."""
    for each in members_of(optimizer) if is_decoupled else ():
        kind = type(each)
        is_torch = kind.step.__module__.startswith("torch.optim")
        is_shown = steps_owned(each) or steps_replicated(each) or kind is torch.optim.Muon
        if not is_shown and (is_torch or isinstance(each, AdamW8bit)):
            whose = "one of torch's own" if is_torch else "one of this library"
            raise ConfigurationError(
                f"with use_decoupled_grad=True gradients are in param.decoupled_grad, where {kind.__name__}, {whose}, "
                "does not look; use an optimizer that reads them there, or leave use_decoupled_grad out"
            )


def check_capturable(optimizer: Optimizer) -> None:
    """Raise for an optimizer whose step cannot be captured into a CUDA graph."""
    for each in members_of(optimizer):
        name = type(each).__name__
        if isinstance(each, AdamW8bit | torch.optim.Muon | torch.optim.LBFGS) or steps_owned(each):
            raise ConfigurationError(
                f"steps of {name} cannot be captured, which cuda_graph_mode=True is for: they count or agree on the "
                "host; use an elementwise optimizer of torch, or leave cuda_graph_mode out"
            )
        if not all(group.get("capturable", True) for group in each.param_groups):
            raise ConfigurationError(
                f"{name} with capturable=False cannot be captured, which cuda_graph_mode=True is for; build it as "
                f"{name}(..., capturable=True), or leave cuda_graph_mode out"
            )


def move_to_sharded(
    optimizer: Optimizer,
    replacements: Mapping[int, nn.Parameter],
    shard_state: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
) -> None:
    """Replace an optimizer's original parameters by the sharded ones; groups, order and options stay.

    So do the lists of parameters themselves, which an optimizer may keep under other names as well (LBFGS does).

    `replacements` has the sharded parameter for the id of each original. `shard_state` turns a full state tensor,
    shaped as its parameter, into the one for the sharded parameter.
    """
    if isinstance(optimizer, ChainedOptimizer):
        for each in optimizer.optimizers:
            move_to_sharded(each, replacements, shard_state)
        return
    state = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(without_parameter(state))
    sharded = SHARDED_STATE.get(type(optimizer), ())  # of a scalar, its own state is else like any counter
    for group in optimizer.param_groups:
        originals = list(group["params"])
        group["params"][:] = [replacements[id(param)] for param in originals]
        for original, param in zip(originals, group["params"], strict=True):
            if original in state:
                like = original.shape if original.dim() else None
                optimizer.state[param] = {
                    key: shard_state(param, value)
                    if key in sharded or (isinstance(value, torch.Tensor) and value.shape == like)
                    else value
                    for key, value in state[original].items()
                }


def connect(optimizer: Optimizer, engine: Engine) -> None:
    """Connect an optimizer to an engine, which then leaves it to the optimizer's hooks to install weights.

    Raises:
        ConfigurationError: It keeps parameters, besides those of its groups, from before the model was sharded; or its
            steps cannot be captured, and `cuda_graph_mode` is on.
    """
    watched_engines()[engine].check_parameters(optimizer)
    if engine.keeps_gradients and engine.device.type == "cuda":
        check_capturable(optimizer)
    engine.connected.add(optimizer)


def connect_with_hooks(optimizer: Optimizer, engines: Sequence[Engine], describes_state: bool, cure: str) -> bool:
    """Connect an optimizer, and those of a chain, to engines; return False if it has its hooks already.

    `describes_state` is as in `integrate`, `cure` as in `warn_of_lost_updates`.
    """
    is_new = not any(optimizer in engine.connected for engine in engines)
    for engine in engines:
        for each in dict.fromkeys((optimizer, *members_of(optimizer))):
            connect(each, engine)
    if is_new:
        integrate(optimizer, Engines(engines), describes_state)
        warn_of_lost_updates(optimizer, cure)
    return is_new
