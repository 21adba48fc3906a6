"""The planner's bytes against what real ranks hold: persistent memory exactly, peaks of a step within 3.5 %."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import AdamW8bit, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.checkpoint.background import StagingBuffers
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.plan.planning import Workload, plan_workload
from megatron_fsdp.plan.setup import OPTIMIZERS, Accumulation, ParallelRanks, Setup
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS
from tests.conftest import RunRanks
from tests.plan.test_activations import first_token_loss, mean_square
from tests.support.counting import LiveBytes, held_bytes
from tests.support.language_models import build
from tests.support.zoo import TOWER_FEATURES, Block, Floor, TinyTransformer, Tower

BF16, FP32 = torch.bfloat16, torch.float32
PLAIN = MixedPrecisionPolicy()
WIDE = MixedPrecisionPolicy(main_grads_dtype=FP32, grad_comm_dtype=BF16)
ENCODED = {form: MixedPrecisionPolicy(weight_format=form) for form in ("fp8", "mxfp8", "nvfp4")}


def tower(dtype: torch.dtype) -> nn.Module:
    return Tower(hidden=(48, 32, 40, 32, 32, 56)).to(dtype)


def wide_tower(dtype: torch.dtype) -> nn.Module:
    return Tower(hidden=(160,) * 6).to(dtype)


def transformer(dtype: torch.dtype) -> nn.Module:
    return TinyTransformer(layers=5).to(dtype)


def llama(dtype: torch.dtype, vocabulary: int = 160) -> nn.Module:
    sizes = {"hidden_size": 48, "intermediate_size": 112, "vocab_size": vocabulary}
    model: nn.Module = build("llama_gqa", use_cache=False, **sizes).to(dtype)
    return model


def wide_llama(dtype: torch.dtype) -> nn.Module:
    """Its embedding and head are found as units."""
    return llama(dtype, vocabulary=500)


@dataclass(frozen=True)
class Model:
    """A model, its inputs and its loss."""

    build: Callable[[torch.dtype], nn.Module]
    inputs: Callable[[torch.dtype], Any]
    loss: Callable[[Any], Tensor] | None
    units: Any


def _llama_inputs(_dtype: torch.dtype) -> dict[str, Tensor]:
    tokens = torch.arange(3 * 40).view(3, 40) % 160
    return {"input_ids": tokens, "labels": tokens}


MODELS = {
    "tower": Model(tower, lambda dtype: torch.ones(50, TOWER_FEATURES, dtype=dtype), mean_square, [Floor]),
    "wide-tower": Model(wide_tower, lambda dtype: torch.ones(1, TOWER_FEATURES, dtype=dtype), mean_square, [Floor]),
    "transformer": Model(transformer, lambda _: torch.ones(6, 8, dtype=torch.long), first_token_loss, [Block]),
    "llama": Model(llama, _llama_inputs, None, None),
    "wide-llama": Model(wide_llama, _llama_inputs, None, None),
}


KINDS = {"adamw8bit": AdamW8bit}
"""Optimizers by the planner's names; others are torch's AdamW."""


@dataclass(frozen=True)
class Case:
    """One arrangement."""

    model: str
    strategy: int
    ranks: tuple[int, int] = (1, 2)
    outer: int = 0
    dtype: torch.dtype = FP32
    policy: MixedPrecisionPolicy = PLAIN
    microbatches: int = 1
    accumulation: Accumulation = "every"
    optimizer: str = "adamw-loop"

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        wide = "-wide" if self.policy is WIDE else ""
        wide += f"-{form}" if (form := self.policy.weight_format) else ""
        kind = f"-{self.optimizer}" if self.optimizer in KINDS else ""
        return (
            f"{self.model}-{self.strategy}{self.outer}-{self.ranks[0]}x{self.ranks[1]}-{dtype}{wide}"
            f"-{self.microbatches}{self.accumulation.upper()}{kind}"
        )

    @property
    def world(self) -> int:
        return self.ranks[0] * self.ranks[1]


CASES = [
    *(Case("tower", strategy, dtype=BF16, policy=policy) for strategy, policy in ((0, WIDE), (1, PLAIN), (2, WIDE))),
    Case("llama", 3, dtype=BF16),
    Case("wide-llama", 3, ranks=(1, 3), microbatches=3),
    Case("tower", 3, ranks=(1, 1)),
    Case("transformer", 3, ranks=(1, 4), dtype=BF16),
    Case("llama", 3, ranks=(2, 2), outer=1, dtype=BF16),
    Case("tower", 2, ranks=(2, 2), outer=1, dtype=BF16, microbatches=2, accumulation="outer"),
    Case("tower", 3, dtype=BF16, microbatches=2, accumulation="last"),
    Case("tower", 3, ranks=(1, 3), dtype=BF16, policy=WIDE, optimizer="adamw8bit"),
    Case("wide-tower", 3, dtype=BF16, policy=ENCODED["fp8"]),
    Case("llama", 3, ranks=(2, 2), outer=1, dtype=BF16, policy=ENCODED["mxfp8"]),
    Case("transformer", 3, ranks=(1, 3), policy=ENCODED["nvfp4"]),
]


def _measure(case: Case) -> dict[str, Any]:
    """What one rank held."""
    is_hybrid = case.ranks[0] > 1
    names, sizes = ("dp_outer", "dp_shard")[not is_hybrid :], case.ranks[not is_hybrid :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    spec = MODELS[case.model]
    torch.manual_seed(0)
    none = torch.empty(0)  # decodes tables that stay: they belong to the process, not to the model
    WEIGHT_FORMATS["nvfp4"].decode(none.to(torch.uint8), torch.ones(1), none)
    before = held_bytes()
    module = spec.build(case.dtype)
    model, optimizer = fully_shard(
        module,
        KINDS.get(case.optimizer, torch.optim.AdamW)(module.parameters()),
        mesh,
        "dp_shard",
        dp_outer_dim="dp_outer" if is_hybrid else None,
        hybrid_fsdp_group=mesh[names]._flatten("all").get_group() if is_hybrid else None,
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer,
        fsdp_unit_modules=spec.units,
        mixed_precision_policy=case.policy,
    )
    inputs = spec.inputs(case.dtype)
    for _ in range(2):
        _step(case, model, optimizer, inputs)
    between = held_bytes() - before
    with LiveBytes() as live:
        _step(case, model, optimizer, inputs)
    memory = model.memory()
    states = [v for state in optimizer.state.values() for v in state.values()]
    return {
        "buffers": (memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes),
        "state": sum(getattr(value, "_local_tensor", value).nbytes for value in states),
        "saved": _staged_bytes(model, optimizer),
        "transient": memory.transient_peak_bytes,
        "between": between,
        "peak": pytest.approx(between + live.peak_bytes, rel=0.035),
    }


def _staged_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What the copy of a save in the background takes."""
    buffers = StagingBuffers()
    buffers.copy({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})
    return buffers.staged_bytes


def _step(case: Case, model: Any, optimizer: torch.optim.Optimizer, inputs: Any) -> None:
    spec = MODELS[case.model]
    for microbatch in range(case.microbatches):
        is_last = microbatch == case.microbatches - 1
        model.set_model_auto_sync(is_last or case.accumulation == "every")
        with model.no_sync() if case.accumulation == "last" and not is_last else nullcontext():
            output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            loss = spec.loss(output) if spec.loss is not None else output.loss
            del output
            loss.backward()
            del loss
    optimizer.step()
    optimizer.zero_grad()


def planned(case: Case, rank: int) -> dict[str, Any]:
    """The same on paper."""
    spec = MODELS[case.model]
    with torch.device("meta"):
        module = spec.build(case.dtype)
        inputs = spec.inputs(case.dtype)
    setup = Setup(
        ParallelRanks(case.ranks[1], case.ranks[0]),
        ShardingStrategy(case.strategy),
        ShardingStrategy(case.outer),
        case.policy,
        backend="gloo",
        microbatches=case.microbatches,
        accumulation=case.accumulation,
        optimizer=OPTIMIZERS[case.optimizer],
        device_rank=rank,
    )
    workload = Workload(case.model, module, inputs, 1, spec.loss, spec.units)
    found = plan_workload(workload, setup, find_machine("h100"))
    held = found.memory
    # where gathered weights were freed, of the root and of the units in two slots, an element of each group is left;
    # the backward of an embedding gathers nothing
    gathered_last = [unit for unit in found.model.units if unit.class_name != "Embedding"][:3]
    proxies = sum(
        group.precision.compute.itemsize
        for unit in gathered_last
        for group in unit.groups
        if group.shards_compute_weights
    )
    gathered = found.step.moments[-1].gathered_bytes + proxies  # stays gathered between steps
    return {
        "buffers": (held.compute_weights, held.main_weights, held.main_gradients),
        "state": held.optimizer,
        "saved": held.saving_bytes,
        "transient": found.step.borrowed_bytes,
        "between": held.resting_bytes + held.input_bytes + gathered,
        "peak": held.peak_bytes,
    }


SHORT = ["tower-00-1x2-bfloat16-wide-1EVERY", "tower-21-2x2-bfloat16-2OUTER", "transformer-30-1x3-float32-nvfp4-1EVERY"]


@pytest.mark.full(short=SHORT)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_of_a_rank_are_those_planned(run_ranks: RunRanks, case: Case) -> None:
    for rank, measured in enumerate(run_ranks(case.world, _measure, case)):
        assert planned(case, rank) == measured
