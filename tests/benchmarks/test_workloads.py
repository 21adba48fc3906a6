"""Every workload trains under every kind of contender as one process does, also with gradients sent in bfloat16."""

import warnings
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.compare import parse
from benchmarks.contenders import build_contender
from benchmarks.worker import microbatches_of, reference_losses, setting_of
from benchmarks.workloads import WORKLOADS, build_model
from tests.conftest import RunRanks

NAMES = ("ours-0", "ours-3", "mddp-optim", "fsdp2", "ddp", "ddp-zero")
Losses = dict[str, list[float]]


def train(arguments: Sequence[str]) -> tuple[Losses, tuple[float, ...]]:
    """Losses of this rank under each contender, and those of one process on the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn of their own deprecations
        request, _ = parse(arguments)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        setting = setting_of(request, torch.device("cpu"), mesh)
        losses = {}
        for name in NAMES:
            contender = build_contender(name, setting)
            batches = [microbatches_of(request, setting, step, dist.get_rank()) for step in range(3)]
            losses[name] = [contender.step(batch).item() for batch in batches]
        return losses, reference_losses(request, setting)


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "comm_dtype", "tolerance"),
    [("tiny-llama", "bfloat16", 1e-4), ("tiny-moe", "float32", 1e-6)],
)
def test_losses_equal_those_of_one_process(model: str, comm_dtype: str, tolerance: float, run_ranks: RunRanks) -> None:
    pytest.importorskip("transformers")
    arguments = ["--model", model, "--ranks", "2", "--device", "cpu", "--steps", "2", "--warmup", "1"]
    ranks = run_ranks(2, train, [*arguments, "--comm-dtype", comm_dtype])
    expected = ranks[0][1]
    assert len(expected) == 3
    for name in NAMES:
        means = [sum(seen) / 2 for seen in zip(*(losses[name] for losses, _ in ranks), strict=True)]
        assert means == pytest.approx(expected, rel=tolerance), name
        assert ranks[0][0][name] != pytest.approx(ranks[1][0][name], rel=1e-4), "ranks see different data"


@pytest.mark.parametrize(("name", "count"), [("many-small", 9_789_696), ("llama", 15_700_000), ("moe", 9_300_000)])
def test_sizes_are_about_those_of_the_issue(name: str, count: int) -> None:
    if name != "many-small":
        pytest.importorskip("transformers")
    model = build_model(WORKLOADS[name], torch.float32, torch.device("meta"))
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(count, rel=0.05)
