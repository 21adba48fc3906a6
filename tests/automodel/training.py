"""One training loop for every strategy, on one process and on any mesh of ranks, and comparisons of what it gave."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    DDPConfig,
    DDPManager,
    DistributedConfig,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    Pipeline,
    PipelineConfig,
    build_mesh_context,
    clip_grad_norm_,
    shard_batch,
    unshard_sequence,
)
from megatron_fsdp.automodel.pipeline_parallel import build_pipeline
from megatron_fsdp.comm.agreement import gather_objects
from tests.support.case import Tolerance, assert_values
from tests.support.language_models import batch_of, build, label_count
from tests.support.on_ranks import engine_of, once


def strategy(name: str, **fields: Any) -> DistributedConfig:
    """A strategy that computes in float32 on CPUs: "fsdp2", "megatron_fsdp" or "ddp"."""
    if name == "fsdp2":
        return FSDP2Config(**{"backend": "gloo", "mp_policy": MixedPrecisionPolicy(), **fields})
    kind = {"megatron_fsdp": MegatronFSDPConfig, "ddp": DDPConfig}[name]
    return kind(**{"backend": "gloo", **fields})


STRATEGIES = ("fsdp2", "megatron_fsdp", "ddp")


def saved(kind: str, folder: Path) -> Path:
    """A folder of transformers with the weights of `build(kind)`, for all ranks."""
    once(lambda: build(kind).save_pretrained(folder))
    return folder


def load(
    folder: Path | str,
    name: str = "fsdp2",
    auto_class: Any = AutoModelForCausalLM,
    backend: str = "gloo",
    **options: Any,
) -> Any:
    """The model of a folder, sharded by a strategy."""
    return auto_class.from_pretrained(str(folder), distributed_config=strategy(name, backend=backend), **options)


def managed(config: Any, model: nn.Module, pipeline: PipelineConfig | None = None, **sizes: int) -> Any:
    """The model made parallel by the manager of a strategy; a `Pipeline` with `pp_size` above 1."""
    context = build_mesh_context(config, **sizes)
    mesh: Any = context.device_mesh
    made: Any
    if isinstance(config, DDPConfig):
        made = DDPManager(config).parallelize(model)
    elif isinstance(config, MegatronFSDPConfig):
        made, _ = MegatronFSDPManager(config, mesh, context.moe_mesh).parallelize(model)
    else:
        made = FSDP2Manager(config, mesh, context.moe_mesh)
        if context.sizes.pp > 1:
            made = build_pipeline(
                model,
                mesh["pp"],
                pipeline or PipelineConfig(),
                parallelize_stage=made.parallelize,
                device=context.device,
                activation_dtype=config.mp_policy.output_dtype,
            )
        else:
            made = made.parallelize(model)
    made.mesh_context = context
    return made


def gradients_of(model: Any) -> dict[str, Tensor]:
    """All gradients that there are, whole, by the names of the unwrapped model."""
    return _of_all_stages(
        model, {n: _whole(model, n, p.grad) for n, p in model.named_parameters() if p.grad is not None}
    )


def parameters_of(model: Any) -> dict[str, Tensor]:
    """All parameters, whole, by the names of the unwrapped model."""
    return _of_all_stages(model, {name: _whole(model, name, param) for name, param in model.named_parameters()})


def _whole(model: Any, name: str, tensor: Tensor) -> Tensor:
    """All elements; of experts that the engine divides over ranks, those of all ranks."""
    if isinstance(model, MegatronFSDP):
        tensor = model.checkpoint_names.saved_view(plain_name(name), tensor)
    return whole(tensor)


def _of_all_stages(model: Any, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Put together what the ranks of a pipeline have; each name is in one stage, and tied copies are equal."""
    if not isinstance(model, Pipeline):
        return {plain_name(name): value for name, value in own.items()}
    stages = gather_objects(own, model.pp_mesh.get_group())
    found = {name: value for stage in stages for name, value in stage.items()}
    assert len(found) == sum(map(len, stages))
    for copy, source in model.tied_copies.items():
        assert torch.equal(found.pop(copy), found[source])
    return found


@dataclass(frozen=True)
class Trained:
    """What a run left behind; index = step. Tensors are whole, names those of the unwrapped model.

    Attributes:
        losses: Mean over all counted tokens of all ranks.
        gradients: By parameter name.
        parameters: By parameter name, after the step.
        norms: Of all gradients, as `clip_grad_norm_` measures them.
        logits: Of the rows from `logit_rows[0]` to before `logit_rows[1]`; empty on a rank that has none of a pipeline.
        logit_rows: That this rank reads.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    logit_rows: tuple[int, int] = (0, 0)


def whole(tensor: Tensor) -> Tensor:
    """All elements of a parameter or gradient, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_name(name: str) -> str:
    """The name in the unwrapped model."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """AdamW, connected where the engine needs it.

    Its eps is above rounding noise: where the exact gradient is 0 (the bias of keys), steps are made of what is left.
    """
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3)
    return fully_shard_optimizer(optimizer) if isinstance(model, MegatronFSDP) else optimizer


def train(
    model: Any,
    *,
    steps: int = 2,
    rows: int | Sequence[int] = 4,
    alone: bool = False,
    loss_inside: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Train on this rank's rows of batches of the seeds 1, 2, ...; the loss is the mean over all counted tokens.

    Args:
        model: Parallel, or plain.
        steps: How many.
        rows: Of the whole batch, in equal shares; or of each data-parallel rank.
        alone: One process has all rows, also where there are other ranks.
        loss_inside: The model computes the loss, in place of the loop.
        optimizer: None: that of `optimizer_of`.
    """
    world = 1 if alone or not dist.is_initialized() else dist.get_world_size()
    context = getattr(model, "mesh_context", None)
    ranks, rank = world, dist.get_rank() if world > 1 else 0
    if context is not None:
        ranks, rank = context.sizes.dp, context.data_rank
    shares = [rows // ranks] * ranks if isinstance(rows, int) else list(rows)
    own_rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    parts = ranks * (context.sizes.cp if context is not None else 1)
    sums = isinstance(model, MegatronFSDP) and engine_of(model).options.calculate_per_token_loss
    averaged = 1 if sums else parts
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    device = next(model.parameters()).device
    run = Trained(logit_rows=(own_rows.start, own_rows.stop))
    for step in range(steps):
        batch = batch_of(sum(shares), seed=1 + step)
        count = label_count(batch["labels"])
        own = {name: value[own_rows].to(device) for name, value in batch.items()}
        optimizer.zero_grad()
        with warnings.catch_warnings():
            if context is None or context.sizes.tp == 1:
                # Phi's head has a bias, of which torch makes a view. Nothing is written into it.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
            if isinstance(model, Pipeline):
                logits = model.forward(own["input_ids"])
                assert (logits is not None) == model.has_last_stage
                loss = model.step(**own, num_label_tokens=count, dp_size=averaged)
            else:
                logits, loss_sum = _forward(model, own, loss_inside)
                loss = loss_sum * averaged / count
                loss.backward()
        total = loss.detach() * (parts / averaged)
        if world > 1:
            dist.all_reduce(total)
        run.losses.append(total.item() / world)
        run.logits.extend([] if logits is None else [logits.detach().clone()])
        run.gradients.append(gradients_of(model))
        run.norms.append(clip_grad_norm_(model, math.inf).item())
        optimizer.step()
        run.parameters.append(parameters_of(model))
    return run


def _forward(model: Any, own: dict[str, Tensor], loss_inside: bool) -> tuple[Tensor, Tensor]:
    """Logits of this rank's rows, and the sum of its tokens' losses."""
    context = getattr(model, "mesh_context", None)
    labels = nn.functional.pad(own["labels"][:, 1:], (0, 1), value=-100)
    batch, cp_mesh = {"input_ids": own["input_ids"]}, None
    if context is not None and context.sizes.cp > 1:
        cp_mesh = context.axis("cp")
        batch = shard_batch(own, cp_mesh)
        labels = batch.pop("shift_labels")
    if loss_inside:
        batch |= {"labels": labels, "shift_labels": labels}
    out = model(**batch, use_cache=False, **({"num_items_in_batch": 1} if loss_inside else {}))
    flat = out.logits.float().flatten(0, 1)
    loss = out.loss if loss_inside else nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum")
    return out.logits if cp_mesh is None else unshard_sequence(out.logits, cp_mesh), loss


_KNOWN: dict[tuple[Any, ...], Trained] = {}
"""What one process computes, by all but the number of steps; ranks live longer than a test."""


def reference(
    kind: str, *, steps: int = 3, rows: int = 4, changes: Mapping[str, Any] | None = None, edit: Any = None
) -> Trained:
    """What one process computes; `changes` are those of the config, `edit` changes the model or returns another."""
    key = (kind, rows, repr(sorted((changes or {}).items())), edit)
    if key not in _KNOWN or len(_KNOWN[key].losses) < steps:
        model = build(kind, **(changes or {}))
        if edit is not None:
            model = edit(model) or model
        _KNOWN[key] = train(model, steps=steps, rows=rows, alone=True)
    return Trained(**{name: value[:steps] for name, value in vars(_KNOWN[key]).items()} | {"logit_rows": (0, rows)})


def assert_trained_alike(found: Trained, expected: Trained, rtol: float = 1e-4) -> None:
    """Compare losses, norms, logits, every gradient and all updates.

    Sums are grouped in another way on ranks. Tolerances are relative to a tensor's largest element, since each element
    sums products of that size.
    """
    torch.testing.assert_close(found.losses, expected.losses[: len(found.losses)], rtol=rtol / 10, atol=1e-6)
    torch.testing.assert_close(found.norms, expected.norms[: len(found.norms)], rtol=rtol, atol=1e-6)
    tolerance = Tolerance(atol=1e-6, of_largest=rtol)
    for step, (gradients, parameters) in enumerate(zip(found.gradients, found.parameters, strict=True)):
        assert_values(gradients, expected.gradients[step], tolerance)
        assert_values(parameters, expected.parameters[step], tolerance)
    for step, logits in enumerate(found.logits):
        assert_values({"": logits}, {"": expected.logits[step][slice(*found.logit_rows)]}, tolerance)
