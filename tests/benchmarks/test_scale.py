"""The benchmark of thousands of ranks: its counts are those of arithmetic."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.bench import published_scale
from benchmarks.launching import write_document
from benchmarks.page import SCALE, scale_parts
from benchmarks.scale import STRATEGY, measure, publish

WIDTH, LAYERS = 64, 2


class Tiny(nn.Module):
    """Layers of width 64 that take words, and give a loss as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16) for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **_: bool) -> "Tiny":
        """Feed ones."""
        found = torch.ones(*labels.shape, WIDTH, dtype=torch.bfloat16, device=input_ids.device)
        for layer in self.layers:
            found = layer(found)
        self.loss = found.sum()
        return self


def case(ranks: int) -> dict[str, float]:
    with mock.patch.dict(STRATEGY, fsdp_unit_modules=[nn.Linear]):
        return measure("ours", Tiny, ranks)


OBJECTS = 4  # iteration, options and class of the optimizer, sizes of the random states
FLAGS_BYTES = 48  # that ranks agree on when backward ends


@pytest.mark.parametrize(
    ("ranks", "shard", "weight_boxes", "bias_boxes"),
    [
        # 4160 elements in shards of 520; the bias comes first. Each of the 7 edges inside the weight cuts a row of 64,
        # which ends one shard and begins the next, besides the whole rows of the 8 shards.
        (8, 520, 8 + 2 * 7, 1),
        # 260 shards of 16 elements, a multiple of 16 bytes; the others hold nothing
        (512, 16, WIDTH * WIDTH // 16, WIDTH // 16),
    ],
)
def test_counts_are_those_of_arithmetic(ranks: int, shard: int, weight_boxes: int, bias_boxes: int) -> None:
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:  # it is another number of ranks for good
        found = process.submit(case, ranks).result()
    numel, slots = WIDTH * WIDTH + WIDTH, 3  # weights and two moments
    unit_bytes = 2 * shard * ranks
    assert found["padding"] == pytest.approx(shard * ranks / numel - 1, rel=1e-12)
    assert found["messages"] == 2 * LAYERS + 1
    flags = 2 * (FLAGS_BYTES - FLAGS_BYTES // ranks)
    assert found["sent_bytes"] == 2 * LAYERS * (unit_bytes - unit_bytes // ranks) + flags
    steps = 2 * LAYERS
    assert found["entries"] == LAYERS * slots * (weight_boxes + bias_boxes) + steps + OBJECTS + ranks
    assert found["agreement_bytes"] == found["agreements"] * ranks * 1024
    assert found["largest_message"] < 2048
    assert not found["is_sampled"]


def test_a_published_case_takes_the_place_of_its_own(tmp_path: Path) -> None:
    def named(model: str, ranks: int, **found: int) -> dict[str, object]:
        return {"model": model, "ranks": ranks, "engine": "ours", **found}

    write_document({"cases": [named("llama-3-8b", 8, messages=1), named("deepseek-v3", 8)]}, tmp_path / SCALE)
    publish([named("llama-3-8b", 64), named("llama-3-8b", 8, messages=2)], tmp_path)
    expected = [named("llama-3-8b", 8, messages=2), named("llama-3-8b", 64), named("deepseek-v3", 8)]
    assert published_scale(tmp_path) == expected


def test_the_page_shows_the_results() -> None:
    cases = published_scale()
    for case in cases:
        if case["model"] == "llama-3-405b" and case["ranks"] == 16384:
            case |= {"load_s": 12.34, "load_mib": 567.8}
    _, rows, boxes = scale_parts(cases)
    assert "llama-3-405b" in rows.splitlines()[4]
    assert "| 12.3, 568 |" in rows.splitlines()[4]
    assert "llama-3-8b on 64 ranks: 7,847 entries of a save for\n74,496" in boxes
