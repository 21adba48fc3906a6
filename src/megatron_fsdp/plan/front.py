"""`plan`: one call from a model and a number of ranks to what a run will need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.memory_options import MemoryOptions
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy
from megatron_fsdp.plan.machine import Machine, find_machine
from megatron_fsdp.plan.models import ModelSpec, build_meta_model
from megatron_fsdp.plan.names import nearest_name
from megatron_fsdp.plan.planned_model import UnitModules
from megatron_fsdp.plan.planning import Plan, plan_workload
from megatron_fsdp.plan.recompute import Recompute
from megatron_fsdp.plan.setup import OPTIMIZERS, Accumulation, Backend, OptimizerKind, ParallelRanks, Setup
from megatron_fsdp.plan.share import share_of_rank
from megatron_fsdp.plan.workload import Workload

Ranks = int | Mapping[str, int] | ParallelRanks


def plan(
    model: ModelSpec,
    ranks: Ranks,
    strategy: str | int | ShardingStrategy = ShardingStrategy.optim_grads_params,
    *,
    outer_strategy: str | int | ShardingStrategy = ShardingStrategy.no_shard,
    machine: Machine | str = "h100",
    sequence_length: int = 4096,
    micro_batch: int = 1,
    microbatches: int = 1,
    recompute: Recompute = "none",
    dtype: torch.dtype | None = torch.bfloat16,
    policy: MixedPrecisionPolicy | None = None,
    optimizer: OptimizerKind | str = "adamw",
    backend: Backend | str = Backend.NCCL,
    accumulation: Accumulation = Accumulation.EVERY,
    memory: MemoryOptions | None = None,
    fsdp_unit_modules: UnitModules = None,
    inputs: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    stage: int = 0,
) -> Plan:
    """Work out what a run will need, without hardware and without memory for weights.

    Args:
        model: A preset's name, a Hugging Face config (mapping, file or folder), an import path of a function that
            builds a model, the function, or a model on the meta device.
        ranks: Their number; or sizes by axis: `dp_shard`, `dp_outer`, `tp`, `cp`, `pp`, `ep`.
        strategy: On the sharding axis, as `zero_dp_strategy` of `fully_shard`.
        outer_strategy: On the outer axis, as `outer_dp_sharding_strategy`.
        machine: A preset's name or a machine.
        sequence_length: Tokens of a sequence, over all context-parallel ranks.
        micro_batch: Sequences per rank and microbatch.
        microbatches: Per optimizer step.
        recompute: "none", "full" (every unit), "attention" or "mlp".
        dtype: Of models that are built from a config.
        policy: Dtypes of main weights and gradients; None: the default of `fully_shard`.
        optimizer: One of `OPTIMIZERS` or its name.
        backend: "nccl" or "gloo".
        accumulation: When gradients of several microbatches are reduced.
        memory: How gathered weights borrow memory; None: the default of `fully_shard`.
        fsdp_unit_modules: As for `fully_shard`.
        inputs: Of one rank and microbatch, on the meta device, for models that do not take tokens.
        loss_fn: Scalar loss of the model's output, for models that return none.
        stage: The pipeline stage to look at; the first keeps most activations.

    Raises:
        ConfigurationError: Something is not known or cannot be; sizes raise its subclass ParallelSizeError.
    """
    setup = Setup(
        resolve_ranks(ranks),
        resolve_strategy(strategy, "strategy"),
        resolve_strategy(outer_strategy, "outer_strategy"),
        policy or MixedPrecisionPolicy(),
        memory or MemoryOptions(),
        microbatches=microbatches,
        optimizer=optimizer if isinstance(optimizer, OptimizerKind) else find_optimizer(optimizer),
        recompute=recompute,
        backend=Backend(backend),
        accumulation=accumulation,
    )
    workload = make_workload(
        model,
        setup.ranks,
        sequence_length=sequence_length,
        micro_batch=micro_batch,
        dtype=dtype,
        fsdp_unit_modules=fsdp_unit_modules,
        inputs=inputs,
        loss_fn=loss_fn,
        stage=stage,
    )
    return plan_workload(workload, setup, machine if isinstance(machine, Machine) else find_machine(machine))


def make_workload(
    model: ModelSpec,
    ranks: ParallelRanks,
    *,
    sequence_length: int = 4096,
    micro_batch: int = 1,
    dtype: torch.dtype | None = torch.bfloat16,
    fsdp_unit_modules: UnitModules = None,
    inputs: Any = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    stage: int = 0,
    name: str | None = None,
    tokens: int | None = None,
) -> Workload:
    """One rank's share of a model and of a microbatch; arguments as for `plan`.

    With inputs of their own, `tokens` says how many tokens they hold (None: as many as the first tensor has samples);
    `name` is what to call the model.

    Raises:
        ConfigurationError: The model is not known, or cannot be divided like that.
    """
    for argument, count in (("sequence_length", sequence_length), ("micro_batch", micro_batch)):
        if count < 1:
            raise ConfigurationError(f"{argument}={count} cannot be; give 1 or more")
    is_config = isinstance(model, Mapping) or (isinstance(model, str) and ":" not in model)
    module = build_meta_model(model, dtype if is_config else None)
    kind = getattr(getattr(module, "config", None), "model_type", None)
    label = name or (model if isinstance(model, str) else str(kind or type(module).__name__))
    if inputs is None:
        return share_of_rank(label, module, ranks, micro_batch, sequence_length, fsdp_unit_modules, stage)
    for axis in ("tp", "cp", "pp"):
        if getattr(ranks, axis) > 1:
            raise ConfigurationError(
                f"{axis}={getattr(ranks, axis)} divides language models of transformers only; with inputs= of your "
                "own, give the model as one rank of that axis computes it, and leave the axis out"
            )
    return Workload(
        label,
        module,
        inputs,
        _samples(inputs) if tokens is None else tokens,
        loss_fn,
        fsdp_unit_modules,
        sum(param.numel() for param in module.parameters()),
    )


def resolve_ranks(ranks: Ranks) -> ParallelRanks:
    """Sizes of all axes.

    Raises:
        ParallelSizeError: A size cannot be.
        ConfigurationError: There is no such axis.
    """
    if isinstance(ranks, ParallelRanks):
        return ranks
    if isinstance(ranks, int):
        return ParallelRanks(ranks)
    known = list(ParallelRanks.__dataclass_fields__)
    for name in ranks:
        if name not in known:
            raise ConfigurationError(f"there is no axis {name!r}; {nearest_name(name, known)}")
    return ParallelRanks(**{"dp_shard": 1, **ranks})


def find_optimizer(name: str) -> OptimizerKind:
    """An optimizer by name.

    Raises:
        ConfigurationError: There is none of this name.
    """
    if name not in OPTIMIZERS:
        raise ConfigurationError(f"optimizer {name!r} is not known; {nearest_name(name, OPTIMIZERS)}")
    return OPTIMIZERS[name]


def _samples(inputs: Any) -> int:
    """Samples of a microbatch: the first dimension of the first tensor."""
    leaves = tree_leaves(inputs)
    first = next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim), None)
    if first is None:
        raise ConfigurationError("inputs hold no tensor with a dimension of samples; give tensors on the meta device")
    return int(first.shape[0])
