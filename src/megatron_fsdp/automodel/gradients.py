"""The training step for every strategy: connected optimizers, accumulation, losses per token, clipping."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from megatron_fsdp.automodel.architecture import IGNORED_LABEL
from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from megatron_fsdp.comm.agreement import Groups, agreed, default_if_all, device_over, raise_together
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.errors import ConfigurationError, NonFiniteNormError, waits_for
from megatron_fsdp.fully_shard import fully_shard_optimizer, ranks_of_parameters
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optim.grad_norm import check_clipping, combine_powers, compared_arguments, sum_of_powers
from megatron_fsdp.optim.optimizer import warn_of_lost_updates
from megatron_fsdp.state.statistics import ProcessGroups

Parts = Tensor | nn.Module | Pipeline | Iterable[Tensor] | Iterable[nn.Module]
"""An owner of gradients: a parameter, a model, a pipeline, several of the first two (the parts of a pipeline rank)."""

DEFERS = "_defers_grad_sync"
"""The attribute of a model that holds its `FSDP2Config.defer_fsdp_grad_sync`."""


def _ranks_of(model: object = None, optimizer: object = None, **_: object) -> Groups:
    """Return the groups that together reach the ranks of a model, or of that whose parameters an optimizer holds."""
    groups = getattr(optimizer, "param_groups", None) or ()
    held = [param for group in groups for param in group["params"]]
    for parts in (model, held):
        with contextlib.suppress(TypeError):  # it may be anything
            if reached := gather_gradients(parts).groups:  # type: ignore[arg-type]
                return reached
    return ()


@agreed("connecting the optimizer", _ranks_of)
def connect_optimizer(model: Any, optimizer: Any) -> torch.optim.Optimizer:
    """Connect an optimizer that was built on `model.parameters()` if the strategy needs it, and check its parameters.

    Args:
        model: Of a manager, `from_pretrained` or `from_config`: a module or a `Pipeline`.
        optimizer: Built on its parameters, after that.

    Returns:
        The same optimizer.

    Raises:
        ConfigurationError: It holds other parameters than the model's sharded ones, which are what training updates.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or not isinstance(model, nn.Module | Pipeline):
        raise ConfigurationError(
            f"connect_optimizer was given a {type(model).__name__} and a {type(optimizer).__name__}; give the model "
            "first, and then an optimizer of torch"
        )
    if isinstance(model, MegatronFSDP):
        return fully_shard_optimizer(optimizer)
    parts = model.parts if isinstance(model, Pipeline) else [model]
    for part in parts:
        reshard_units(part)
    own = {id(param) for part in parts for param in part.parameters()}
    held = [param for group in optimizer.param_groups for param in group["params"]]
    strange = sum(id(param) not in own for param in held)
    if strange:
        raise ConfigurationError(
            f"{strange} of the {len(held)} parameters of the optimizer are not the model's sharded ones, so its steps "
            "would train nothing; build it on model.parameters() before the first forward with gradients (after one, "
            "FSDP2 shows gathered weights until backward)"
        )
    warn_of_lost_updates(optimizer, "give dtype=torch.float32 to from_pretrained (FSDP2Config computes in bfloat16)")
    return optimizer


def reshard_units(model: nn.Module) -> None:
    """Reshard modules that FSDP2 left unsharded, so that the model shows its sharded parameters."""
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


# ---- accumulation ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def accumulation_context(
    model: nn.Module | Pipeline, is_last_microbatch: bool, *, defer_grad_sync: bool | None = None
) -> Iterator[None]:
    """Run forward and backward of one microbatch; gradients are reduced over ranks after the last one.

    Args:
        model: Of a manager, `from_pretrained` or `from_config` (not a pipeline, which has all microbatches
            of a step inside).
        is_last_microbatch: Whether the optimizer steps after this one.
        defer_grad_sync: False: reduce after every microbatch (less memory, more communication). None: what
            `FSDP2Config.defer_fsdp_grad_sync` said when the model was made parallel; True for the other strategies.
            With `DDPConfig.static_graph` every microbatch is reduced.

    Raises:
        ConfigurationError: The model is of none of the strategies.
    """
    if isinstance(model, Pipeline):
        raise ConfigurationError(
            "a Pipeline has all microbatches of a step inside; call model.step(input_ids, labels) once for each "
            "optimizer step"
        )
    defers = getattr(model, DEFERS, True) if defer_grad_sync is None else defer_grad_sync
    reduces = is_last_microbatch or not defers
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(reduces)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    elif isinstance(model, MegatronFSDP | nn.parallel.DistributedDataParallel):
        # With a static graph torch's reducer fails where its first backward follows one that does not reduce.
        reduces = reduces or (isinstance(model, nn.parallel.DistributedDataParallel) and model.static_graph)
        with contextlib.nullcontext() if reduces else model.no_sync():
            yield
    else:
        raise ConfigurationError(
            f"the model is a {type(model).__name__}; give what a manager, from_pretrained or from_config returned"
        )


# ---- losses per token ------------------------------------------------------------------------------------------------


def count_label_tokens(
    labels: Tensor | Iterable[Tensor], over: DeviceMesh | dist.ProcessGroup | None = None, *, shifted: bool
) -> int:
    """Count the labels of the loss on all ranks together; one all-reduce per mesh dimension.

    Args:
        labels: (batch, sequence), or those of several microbatches of one optimizer step.
        over: The ranks that have different tokens: data-parallel and context-parallel ones (the mesh "dp_cp", or
            mesh["dp", "cp"]), not tensor-parallel or pipeline ones. None: this rank alone.
        shifted: Whether they were shifted (`shift_labels`): label i belongs to the logits of token i. Otherwise, as
            transformers takes `labels`, the first label of each row belongs to no logits and does not count.

    Returns:
        The number, the same on all ranks of `over`.

    Raises:
        ConfigurationError: `over` is no mesh and no group; on all ranks where it is of all of them elsewhere.
        RankError: The labels of a rank cannot be counted; on all ranks of `over`.
    """
    error: Exception | None = None
    counts: list[Tensor] = []
    groups: Groups = ()
    try:
        if over is not None:
            groups = default_if_all(())  # unless it is known better
            if not isinstance(over, DeviceMesh | dist.ProcessGroup):
                raise ConfigurationError(
                    f"over={over!r} is a {type(over).__name__}; give a mesh, a process group or None"
                )
            groups = default_if_all(over.get_all_groups() if isinstance(over, DeviceMesh) else [over])
        several = [labels] if isinstance(labels, Tensor) else list(labels)
        counts = [((each if shifted else each[:, 1:]) != IGNORED_LABEL).sum() for each in several]
    except Exception as met:  # noqa: BLE001 - told in the collective that the others are in
        error = met
    # The second number counts the ranks that have met an error.
    totals = torch.tensor([0, error is not None], device=device_over(groups))
    totals[0] += sum(count.to(totals.device) for count in counts)
    for group in groups:
        with waits_for("the labels of all ranks are counted (count_label_tokens)"):
            dist.all_reduce(totals, group=group)
    total, num_failed = totals.tolist()
    if num_failed:
        raise_together(error, "count_label_tokens", groups or (None,))
    return int(total)


def scale_per_token_loss(
    loss_sum: Tensor, num_label_tokens: int, *, dp_group_size: int | None = None, gradients_are_summed: bool = False
) -> Tensor:
    """Scale a sum of losses so that backward gives the gradients of the mean over all tokens.

    A strategy that averages gradients over R ranks makes `sum_r(g_r) / R` of the gradients `g_r` of the ranks' losses.
    With the losses `S_r * R / T`, where S_r is the sum over the rank's tokens and T the number of tokens of all ranks
    and microbatches, that is the gradient of `sum_r(S_r) / T`, the mean over all tokens. A mean per rank would instead
    weigh a token more the fewer tokens its rank has.

    Args:
        loss_sum: The sum of this rank's token losses; a scalar.
        num_label_tokens: Labels of all ranks and microbatches of the step, of `count_label_tokens`.
        dp_group_size: Ranks that gradients are averaged over: data-parallel times context-parallel ones, replicas
            included.
        gradients_are_summed: Gradients are summed over ranks, as by `calculate_per_token_loss=True`.

    Raises:
        ConfigurationError: No label counts, or the size is missing, below 1 or without effect.
    """
    if num_label_tokens < 1:
        raise ConfigurationError(
            f"num_label_tokens={num_label_tokens}, so there is no mean over tokens; skip batches without labels"
        )
    if gradients_are_summed:
        if dp_group_size is not None:
            raise ConfigurationError(
                f"dp_group_size={dp_group_size} has no effect where gradients are summed; leave it out, or set "
                "gradients_are_summed=False"
            )
        return loss_sum / num_label_tokens
    if dp_group_size is None or dp_group_size < 1:
        raise ConfigurationError(
            f"dp_group_size={dp_group_size} is not the number of ranks that gradients are averaged over; give "
            "data-parallel times context-parallel ranks, or gradients_are_summed=True"
        )
    return loss_sum * (dp_group_size / num_label_tokens)


# ---- clipping --------------------------------------------------------------------------------------------------------


def clip_grad_norm_(
    parameters: Parts,
    max_norm: float,
    norm_type: float | str = 2.0,
    *,
    pp_mesh: DeviceMesh | None = None,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; as torch's function on one process.

    Different shards are summed over ranks, copies count once: DTensors on any meshes (FSDP2, tensor parallel, both,
    experts on their own mesh) next to plain tensors, which must be equal on every rank (DDP, or parameters that a
    tensor-parallel plan leaves alone). Sums over the same mesh dimension share one all-reduce of a few numbers. Models
    of this library's engine compute their own norm. All ranks call it where nothing names the ranks of plain tensors.

    Args:
        parameters: Every rank gives the same parameters in the same order; pipeline ranks their own parts. A parameter
            that is given twice counts once, also one that two parts on this rank share.
        max_norm: The largest norm allowed; infinity only measures.
        norm_type: The p of the p-norm, positive; infinity or "inf" for the largest absolute value.
        pp_mesh: One dimension, the pipeline ranks, each of which has other parameters; None: that of a `Pipeline`, else
            no pipeline.
        error_if_nonfinite: Raise where the norm is NaN or infinite, instead of scaling by it.

    Returns:
        The norm before clipping, a scalar of float32 (float64 where a gradient is), plain and the same on every rank.

    Raises:
        ConfigurationError: An argument means nothing; a gradient is sparse; or only a part of the parameters of a
            model of the engine is given. On all ranks of the model, if these are all ranks.
        NonFiniteNormError: The norm is not finite; on every rank, gradients are as they were.
    """
    order: Any = math.inf if norm_type == "inf" else norm_type
    found, problem = FoundGradients(), None
    try:
        found = gather_gradients(parameters, pp_mesh)
    except Exception as met:  # noqa: BLE001 - told in the collective that the others are in
        problem = met

    def check() -> None:
        if problem is not None:
            raise problem
        check_clipping(max_norm, order)
        if found.problem:
            raise ConfigurationError(found.problem)

    # In an all-reduce of its own: who gives no parameters takes part in no other one.
    groups = default_if_all(found.groups)
    asked = compared_arguments(
        groups,
        check,
        parameters="those of a pipeline rank" if found.pp_mesh else f"{found.num_tensors} tensors",
        max_norm=max_norm,
        norm_type=order,
        error_if_nonfinite=error_if_nonfinite,
    )
    known = combine_powers({(): torch.zeros((), device=device_over(groups))}, 2.0, asked)
    if len(found.models) == 1 and not (found.parameters or found.copies or found.pp_mesh):
        return found.models[0].clip_grad_norm_(max_norm, order, error_if_nonfinite)
    norm = _total_norm(
        found,
        float(order),
        lambda param: None if param.grad is None else _reduced(param.grad),
        lambda model: model.clip_grad_norm_(math.inf, float(order)),
    )
    norm = norm + known.to(norm.device)  # 0, or NaN where facts differ that the host has not seen
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise NonFiniteNormError(
            f"the total norm of order {order} of the gradients is {norm.item()}, so they cannot be clipped; clear "
            "them and continue, or pass error_if_nonfinite=False"
        )
    if math.isfinite(max_norm):
        found.scale(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def get_grad_norm(
    parameters: Parts,
    dp_cp_group: dist.ProcessGroup | None = None,  # noqa: ARG001
    tp_group: dist.ProcessGroup | None = None,  # noqa: ARG001
    norm_type: float | str = 2.0,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Return the norm of all gradients, each counted once; collective.

    Args:
        parameters: As of `clip_grad_norm_`, which this is without clipping.
        dp_cp_group: Accepted; DTensors name the ranks that they are divided over.
        tp_group: Accepted, likewise.
        norm_type: The p of the p-norm, positive; infinity for the largest absolute value.
        dtype: In which the norm is returned.
    """
    return float(clip_grad_norm_(parameters, math.inf, norm_type).to(dtype))


@torch.no_grad()
def clip_grad_by_total_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_grad_norm: float,
    total_norm: float,
    dtype: torch.dtype = torch.float32,  # noqa: ARG001
) -> None:
    """Scale gradients in place, in their own dtype, by `max_grad_norm / (total_norm + 1e-6)` where that is below 1."""
    factor = max_grad_norm / (total_norm + 1e-6)
    for param in [parameters] if isinstance(parameters, Tensor) else parameters:
        if param.grad is not None and factor < 1:
            param.grad.mul_(factor)


def norm_of_parameters(parts: nn.Module | Pipeline) -> float:
    """Return the 2-norm of all parameters, each counted once over all ranks; collective."""

    def of_model(model: MegatronFSDP) -> Tensor:
        return torch.tensor(model.parameter_statistics().total.norm)

    return float(_total_norm(gather_gradients(parts), 2.0, lambda param: local_tensor(param.detach()), of_model))


def count_zero_gradients(parts: nn.Module | Pipeline) -> int:
    """Count the zero elements of all gradients, each once over all ranks; collective."""

    def of_param(param: Tensor) -> Tensor | None:
        return None if param.grad is None else (_reduced(param.grad) == 0).sum(dtype=torch.float64)

    def of_model(model: MegatronFSDP) -> Tensor:
        total = model.gradient_statistics().total
        return torch.tensor(total.zero_fraction * total.numel if total.numel else 0.0, dtype=torch.float64)

    return round(float(_total_norm(gather_gradients(parts), 1.0, of_param, of_model)))


@dataclass(frozen=True)
class FoundGradients:
    """The gradients of a list of parameters, by owner."""

    models: tuple[MegatronFSDP, ...] = ()  # of the engine, all of whose parameters are among them
    parameters: tuple[Tensor, ...] = ()  # the others, each once
    copies: tuple[Tensor, ...] = ()  # of parameters that another rank has: scaled, and not counted again
    pp_mesh: DeviceMesh | None = None  # the ranks that have other parameters; None: no pipeline
    groups: ProcessGroups = ()  # which together reach all ranks that have some of them
    num_tensors: int = 0
    problem: str = ""  # why they have no norm; empty: they have

    def scale(self, factor: Tensor | float) -> None:
        """Multiply all gradients, in place, by a factor that is the same on every rank."""
        for model in self.models:
            model.scale_gradients(float(factor))
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in (*self.parameters, *self.copies):
            if param.grad is not None:
                local = local_tensor(param.grad)
                alike.setdefault((local.device, local.dtype), []).append(local)
        for (device, _), tensors in alike.items():
            torch._foreach_mul_(tensors, factor.to(device) if isinstance(factor, Tensor) else factor)


def gather_gradients(parts: Parts, pp_mesh: DeviceMesh | None = None) -> FoundGradients:
    """Find the parameters that may have gradients, and the engine's models that own some of them."""
    copies: dict[int, Tensor] = {}
    groups = [parts.process_group] if isinstance(parts, nn.parallel.DistributedDataParallel) else []
    if isinstance(parts, Pipeline):
        copies = {id(param): param for name, param in parts.named_parameters() if name in parts.tied_copies}
        pp_mesh = parts.pp_mesh if pp_mesh is None else pp_mesh
        parts = [param for param in parts.parameters() if id(param) not in copies]
    params = {id(param): param for param in _parameters(parts) if param.requires_grad or param.grad is not None}
    models: dict[int, MegatronFSDP] = {}
    others = []
    problem = ""
    for param in params.values():
        # A model of the engine would count copies, too; its gradients are DTensors like others.
        owner = None if copies else getattr(param, "_megatron_fsdp_model", None)
        if owner is not None:
            try:
                models[id(owner.module)] = owner
            except ReferenceError:
                raise ConfigurationError(
                    "the model that some parameters belong to has been deleted; keep what fully_shard_model returned"
                ) from None
        elif param.grad is not None and param.grad.layout != torch.strided:
            problem = (
                f"a gradient of shape {tuple(param.shape)} is sparse, whose norm is not computed; use an embedding "
                "with sparse=False"
            )
        else:
            others.append(param)
    for model in models.values():
        if any(param.requires_grad and id(param) not in params for param in model.parameters()):
            problem = (
                "only some parameters of a model of fully_shard_model are given, but it measures and scales all of its "
                "gradients together; give the model or all of model.parameters()"
            )
    meshes = [param.device_mesh for param in others if isinstance(param, DTensor)]
    if meshes:
        groups += max(meshes, key=DeviceMesh.size).get_all_groups()
    elif models:
        groups += filter(None, ranks_of_parameters(*models.values()))
    if pp_mesh is not None and pp_mesh.get_group() not in groups:
        groups.append(pp_mesh.get_group())
    return FoundGradients(
        tuple(models.values()), tuple(others), tuple(copies.values()), pp_mesh, tuple(groups), len(params), problem
    )


def _parameters(parts: Parts) -> Iterator[Tensor]:
    if isinstance(parts, Tensor):
        yield parts
    elif isinstance(parts, nn.Module | Pipeline):
        yield from parts.parameters()
    else:
        for part in parts:
            yield from _parameters(part)


def _total_norm(
    found: FoundGradients,
    norm_type: float,
    of_param: Callable[[Tensor], Tensor | None],
    of_model: Callable[[MegatronFSDP], Tensor],
) -> Tensor:
    """Return the norm over ranks, of parameters by `of_param` and of the engine's models by `of_model`."""
    # Gradients may be offloaded, so numbers are reduced on the device of a mesh, with the index of the current one.
    meshes = [found.pp_mesh, *(param.device_mesh for param in found.parameters if isinstance(param, DTensor))]
    mesh = next((mesh for mesh in meshes if mesh is not None), None)
    kind = mesh.device_type if mesh is not None else found.parameters[0].device if found.parameters else "cpu"
    device = torch.empty(0, device=kind).device
    shards: dict[ProcessGroups, list[Tensor]] = {(): []}
    for param in found.parameters:  # the keys are the same on all ranks, gradient or not
        tensors = shards.setdefault(_shard_groups(param), [])
        if (shard := of_param(param)) is not None:
            tensors.append(shard)
    powers = {groups: sum_of_powers(tensors, norm_type, device) for groups, tensors in shards.items()}
    norms = [combine_powers(powers, norm_type)]
    norms += [of_model(model).to(device) for model in found.models]
    # Pipeline ranks have other parameters, and perhaps other meshes, so they meet only once each has its own norm.
    over = () if found.pp_mesh is None else (found.pp_mesh.get_group(),)
    return combine_powers({over: sum_of_powers(norms, norm_type, device)}, norm_type)


def _shard_groups(param: Tensor) -> ProcessGroups:
    """Return the process groups along which ranks hold different shards."""
    if not isinstance(param, DTensor):
        return ()
    mesh = param.device_mesh
    dims = [dim for dim, where in enumerate(param.placements) if not where.is_replicate() and mesh.size(dim) > 1]
    return tuple(mesh.get_group(dim) for dim in dims)


def _reduced(grad: Tensor) -> Tensor:
    """Return this rank's shard, after an all-reduce of partial sums."""
    if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
        grad = grad.redistribute(
            placements=[Replicate() if placement.is_partial() else placement for placement in grad.placements]
        )
    return local_tensor(grad)
