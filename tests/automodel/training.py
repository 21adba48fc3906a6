"""Train what `from_pretrained` returns beside one process, on any number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, fully_shard_optimizer
from megatron_fsdp.automodel import (
    DDPConfig,
    DDPManager,
    DistributedConfig,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    build_mesh_context,
)
from tests.automodel.small_models import batch_of, label_count, token_loss_sum


def strategy(name: str, **fields: Any) -> DistributedConfig:
    """A strategy that computes in float32 on CPUs: "fsdp2", "megatron_fsdp" or "ddp"."""
    if name == "fsdp2":
        return FSDP2Config(**{"backend": "gloo", "mp_policy": MixedPrecisionPolicy(), **fields})
    kind = {"megatron_fsdp": MegatronFSDPConfig, "ddp": DDPConfig}[name]
    return kind(**{"backend": "gloo", **fields})


STRATEGIES = ("fsdp2", "megatron_fsdp", "ddp")


def managed(config: Any, model: nn.Module, **sizes: int) -> Any:
    """The model made parallel by the manager of a strategy."""
    context = build_mesh_context(config, **sizes)
    if isinstance(config, DDPConfig):
        return DDPManager(config).parallelize(model)
    if isinstance(config, MegatronFSDPConfig):
        return MegatronFSDPManager(config, context.device_mesh).parallelize(model)[0]
    return FSDP2Manager(config, context.device_mesh).parallelize(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """All gradients that there are, whole, by the names of the unwrapped model."""
    return {plain_name(name): whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """All parameters, whole, by the names of the unwrapped model."""
    return {plain_name(name): whole(param) for name, param in model.named_parameters()}


@dataclass(frozen=True)
class Trained:
    """What a run left behind; index = step. Tensors are whole, names those of the unwrapped model.

    Attributes:
        losses: Mean over all counted tokens of all ranks.
        gradients: By parameter name.
        parameters: By parameter name, after the step.
        norms: Of all gradients, where they were measured.
        logits: Of this rank's rows.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]
    norms: list[float] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


def whole(tensor: Tensor) -> Tensor:
    """All elements of a parameter or gradient, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def plain_name(name: str) -> str:
    """The name in the unwrapped model."""
    return name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")


def optimizer_of(model: nn.Module, learning_rate: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW, connected where the engine needs it."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    return fully_shard_optimizer(optimizer) if isinstance(model, MegatronFSDP) else optimizer


def train(
    model: nn.Module,
    *,
    steps: int = 2,
    rows: int | Sequence[int] = 4,
    data_rank: int | None = None,
    data_ranks: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Train on this rank's rows of the batches of `reference`.

    Args:
        model: Parallel, or plain with `data_ranks=1`.
        steps: How many.
        rows: Of the whole batch, in equal shares; or of each rank.
        data_rank: Which share this rank reads; None: by its global rank.
        data_ranks: How many read different rows; None: all.
        optimizer: None: AdamW.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = data_rank if data_rank is not None else dist.get_rank() if dist.is_initialized() else 0
    ranks = world if data_ranks is None else data_ranks
    shares = [rows // ranks] * ranks if isinstance(rows, int) else list(rows)
    own_rows = slice(sum(shares[:rank]), sum(shares[: rank + 1]))
    optimizer = optimizer_of(model) if optimizer is None else optimizer
    run = Trained([], [], [])
    for step in range(steps):
        batch = batch_of(sum(shares), seed=1 + step)
        logits = model(input_ids=batch["input_ids"][own_rows], use_cache=False).logits
        loss = token_loss_sum(logits, batch["labels"][own_rows]) * ranks / label_count(batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        run.losses.append(total.item() / world)
        run.logits.append(logits.detach().clone())
        run.gradients.append(gradients_of(model))
        optimizer.step()
        run.parameters.append(parameters_of(model))
    return run


def assert_trained_alike(found: Trained, expected: Any, *, tolerance: float = 2e-4) -> None:
    """Compare losses, every gradient and all updates with a `Reference`.

    After the first update tolerances are wider: AdamW moves a weight whose gradient is nearly zero by its sign alone,
    so what was rounding becomes a part of a step.
    """
    for step, loss in enumerate(found.losses):
        assert abs(loss - expected.losses[step]) < (1e-4 if step else 1e-5), (step, loss, expected.losses[step])
        atol = 1e-4 if step else 1e-6
        assert_close(found.gradients[step], expected.gradients[step], 1e-4, atol, f"gradients of step {step}")
        assert_close(found.parameters[step], expected.parameters[step], tolerance, tolerance, f"weights, step {step}")


def assert_close(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float, atol: float, what: str
) -> None:
    """Compare tensors by name; the names must be the same."""
    assert found.keys() == expected.keys(), (what, found.keys() ^ expected.keys())
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{what}: {n}: {m}")
