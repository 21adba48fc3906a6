"""One context-parallel rank on paper against a real one, and against arithmetic."""

from typing import Any

import pytest
import torch

from megatron_fsdp.automodel.context_parallel import enable_context_parallel, shard_batch
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.setup import Backend
from tests.automodel.small_models import build
from tests.conftest import RunRanks
from tests.plan.shares import ROWS, SEQUENCE, WIDER, bytes_of_step, profile, share, without_memory
from tests.support.arrangements import mesh_of

KINDS = ["llama_gqa", "mistral", "gemma2"]
"""Grouped heads; a sliding window; windows in every second layer, and softcaps."""


def _bytes(kind: str) -> tuple[int, int]:
    mesh = mesh_of((2,), ("cp",))
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % 96
    model = build(kind, **WIDER)
    enable_context_parallel(model, mesh)
    batch = shard_batch({"input_ids": tokens, "labels": tokens}, mesh)
    return bytes_of_step(model, **batch, labels=batch["shift_labels"])


@pytest.mark.full(short=["gemma2"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_a_real_rank(run_ranks: RunRanks, kind: str) -> None:
    """Live bytes within 3 %."""
    planned = profile(share(without_memory(kind, **WIDER), cp=2), Backend.GLOO, cp=2)
    assert (planned.kept_bytes, planned.peak_bytes) == pytest.approx(run_ranks(2, _bytes, kind)[0], rel=0.03)


def test_keys_and_values_travel_once_per_layer_and_direction() -> None:
    """Each of 4 ranks sends its keys and values to 3 others, and as many gradients back."""
    workload = share(without_memory("llama_gqa"), cp=4)
    own = ROWS * SEQUENCE // 4 * 2 * 2 * 8 * 4  # tokens, keys and values, heads, head size, bytes
    assert [(x.axis, x.unit, x.sent_bytes, x.in_backward, x.count) for x in workload.exchanges] == [
        ("cp", f"model.layers.{layer}", 3 * own, in_backward, 1) for layer in range(4) for in_backward in (False, True)
    ]
    assert [x.runs("full") for x in workload.exchanges[:2]] == [(1, 1), (0, 1)]
    assert [x.runs("mlp") for x in workload.exchanges[:2]] == [(1, 0), (0, 1)]
    assert workload.tokens == ROWS * SEQUENCE // 4


def test_heads_that_tensor_parallel_ranks_share_travel_once() -> None:
    """With tp=2 a rank has half of the key heads."""
    for kind, halves in (("llama", 2), ("olmo2", 1)):  # olmo2 gathers its heads
        alone, both = (share(without_memory(kind), cp=2, tp=tp) for tp in (1, 2))
        sent = [{x.sent_bytes for x in found.exchanges if x.axis == "cp"} for found in (alone, both)]
        assert sent[0] == {size * halves for size in sent[1]}, kind


@pytest.mark.full(short=["llama"])
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
def test_all_ranks_together_compute_what_one_does(kind: str) -> None:
    sequence = 128
    whole, part = (profile(share(without_memory(kind), cp=cp, sequence=sequence), Backend.NCCL, cp=cp) for cp in (1, 4))
    assert part.forward_flops * 4 == whole.forward_flops
    assert part.backward_flops * 4 == whole.backward_flops
    assert part.peak_bytes < 0.5 * whole.peak_bytes


def test_recomputation_and_registry() -> None:
    """Attention runs again in backward, and transformers forgets its name afterwards."""
    from transformers import AttentionInterface

    before = set(AttentionInterface._global_mapping)
    workload = share(without_memory("llama"), cp=2)
    kept, repeated = (profile(workload, Backend.NCCL, mode, cp=2) for mode in ("none", "full"))
    assert repeated.kept_bytes < 0.5 * kept.kept_bytes
    assert repeated.recomputed_flops > 0.5 * kept.forward_flops
    assert set(AttentionInterface._global_mapping) == before


def test_sequences_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ParallelSizeError, match="sequence_length=66 does not divide by 8 = 2 x cp"):
        share(without_memory("llama"), cp=4, sequence=66)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "layers of the kinds .'linear_attention'"),
        ({"attention_chunk_size": 8}, "attends inside chunks"),
    ],
)
def test_other_attention_is_refused(change: dict[str, Any], text: str) -> None:
    model = without_memory("llama")
    for name, value in change.items():
        setattr(model.config, name, value)
    with pytest.raises(ConfigurationError, match=f"cp=2 ranks, since it.*{text}.*use cp=1|{text}.*use cp=1"):
        share(model, cp=2)
