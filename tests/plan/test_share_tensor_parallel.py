"""One tensor-parallel rank on paper against the rank that automodel makes."""

import warnings
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.setup import Backend
from megatron_fsdp.plan.simulate import simulated_ranks
from megatron_fsdp.plan.workload import Workload
from tests.automodel.small_models import FAMILIES, build
from tests.conftest import RunRanks
from tests.plan.shares import ROWS, SEQUENCE, WIDER, bytes_of_step, profile, share, without_memory
from tests.support.arrangements import mesh_of

DIVISIBLE = tuple(kind for kind in FAMILIES if kind != "gpt2")  # for gpt2 transformers has no plan


def _real_shapes(kind: str, vocabulary: int) -> dict[str, tuple[int, ...]]:
    with simulated_ranks({"tp": 2}) as mesh, real_values():
        model = without_memory(kind, vocab_size=vocabulary)
        parallelize_tensors(model, mesh)
        shapes = {}
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor)
            shapes[name] = tuple(param.to_local().shape)
    return shapes


@pytest.mark.parametrize("kind", DIVISIBLE)
def test_parameters_are_those_of_a_real_rank(kind: str) -> None:
    workload = share(without_memory(kind, vocab_size=97), tp=2)
    found = {name: tuple(param.shape) for name, param in workload.module.named_parameters()}
    assert found == _real_shapes(kind, 97)


def test_the_whole_model_stays_as_it_is() -> None:
    model = without_memory("qwen3")
    before = {name: (id(param), tuple(param.shape)) for name, param in model.named_parameters()}
    workload = share(model, tp=2, pp=2, cp=2)
    assert {name: (id(param), tuple(param.shape)) for name, param in model.named_parameters()} == before
    assert workload.total_numel == sum(param.numel() for param in model.parameters())
    assert model.config.num_hidden_layers == 4


def _measure(kind: str) -> tuple[tuple[int, int], list[int], list[int]]:
    mesh = mesh_of((2,), ("tp",))
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % 96
    model = build(kind, **WIDER)
    parallelize_tensors(model, mesh)
    inputs = {"input_ids": tokens, "labels": tokens}
    model(**inputs, use_cache=False)  # compares the ranks' inputs, once
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Bb]ackward hook", category=UserWarning)  # of CommDebugMode
        with CommDebugMode() as forward:
            loss = model(**inputs, use_cache=False).loss
        with CommDebugMode() as backward:
            loss.backward()
    model.zero_grad()
    del loss
    return bytes_of_step(model, **inputs), _counts(forward), _counts(backward)


def _counts(mode: CommDebugMode) -> list[int]:
    """Reductions and gathers."""
    counts = {str(packet): count for packet, count in mode.get_comm_counts().items()}
    return [sum(count for name, count in counts.items() if kind in name) for kind in ("reduce", "gather")]


@pytest.mark.full(short=["qwen3"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "llama_tied"])
def test_collectives_and_bytes_are_those_of_a_real_rank(run_ranks: RunRanks, kind: str) -> None:
    """All collectives to their number, live bytes within 3 %."""
    real, forward, backward = run_ranks(2, _measure, kind)[0]
    workload = share(without_memory(kind, **WIDER), tp=2)
    planned = profile(workload, Backend.GLOO, tp=2)
    assert (planned.kept_bytes, planned.peak_bytes) == pytest.approx(real, rel=0.03)
    for in_backward, counted in ((False, forward), (True, backward)):
        own = [exchange.count for exchange in workload.exchanges if exchange.in_backward == in_backward]
        assert sum(own) == sum(counted)


def _sent(workload: Workload, unit: str, in_backward: bool) -> dict[int, int]:
    found: dict[int, int] = {}
    for exchange in workload.exchanges:
        if (exchange.unit, exchange.in_backward) == (unit, in_backward):
            found[exchange.sent_bytes] = found.get(exchange.sent_bytes, 0) + exchange.count
    return found


def test_bytes_of_a_layer_by_arithmetic() -> None:
    """An all-reduce of N bytes over 4 ranks sends 2 * 3/4 * N from each."""
    workload = share(without_memory("llama", **WIDER), tp=4)
    hidden = ROWS * SEQUENCE * 64 * 4
    assert _sent(workload, "model.layers.1", in_backward=False) == {hidden * 3 // 2: 2}
    assert _sent(workload, "model.layers.1", in_backward=True) == {hidden * 3 // 2: 5}
    logits = ROWS * SEQUENCE * 96 * 4
    assert _sent(workload, "", in_backward=False) == {hidden * 3 // 2: 1, logits * 3 // 4: 1}


def test_compute_and_activations_of_layers_are_divided() -> None:
    whole, divided = (
        profile(share(without_memory("llama", vocab_size=16, **WIDER), tp=ranks), Backend.NCCL, tp=ranks)
        for ranks in (1, 4)
    )
    assert divided.forward_flops * 4 == whole.forward_flops
    assert divided.backward_flops * 4 == whole.backward_flops
    assert whole.kept_bytes / 4 < divided.kept_bytes < whole.kept_bytes * 0.6


def test_sums_at_the_end_of_a_layer_are_not_repeated() -> None:
    """Recomputation has all that it needs before the last sum."""
    layer = [x for x in share(without_memory("llama"), tp=2).exchanges if x.unit == "model.layers.0"]
    assert [sum(x.runs("full")[1] for x in layer if not x.in_backward)] == [1]
    normed = [x for x in share(without_memory("gemma2"), tp=2).exchanges if x.unit == "model.layers.0"]
    assert [sum(x.runs("full")[1] for x in normed if not x.in_backward)] == [2]
    assert sum(x.runs("attention")[1] for x in layer if not x.in_backward) == 0


@pytest.mark.parametrize(
    ("kind", "changes", "sizes", "text"),
    [
        ("llama_gqa", {}, {"tp": 4}, r"num_key_value_heads=2, which tp=4 .* divides 2"),
        ("llama", {"intermediate_size": 50}, {"tp": 4}, r"out_features=50, which tp=4"),
        ("mixtral", {"num_local_experts": 3}, {"tp": 2}, r"num_experts=3, which tp=2"),
    ],
)
def test_uneven_shares_are_refused(kind: str, changes: dict[str, Any], sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ParallelSizeError, match=text):
        share(without_memory(kind, **changes), **sizes)


def test_models_without_a_known_plan_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"no tensor-parallel plan for GPT2LMHeadModel.*use tp=1"):
        share(without_memory("gpt2"), tp=2)
    model = without_memory("llama")
    model._tp_plan = {**model._tp_plan, "model.layers.*.mlp.up_proj": "diagonal"}
    with pytest.raises(ConfigurationError, match=r"up_proj, a Linear, the style 'diagonal'.*inputs="):
        share(model, tp=2)
