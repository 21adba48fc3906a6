"""A sharded average is saved and loaded by any arrangement, as the parameters it follows."""

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from megatron_fsdp.ema import ShardedEMA
from tests.checkpoint.test_expert_checkpoints import case_of, sizes
from tests.checkpoint.test_reshard import DENSE, HYBRID, TENSOR_PARALLEL, adamw
from tests.conftest import RunRanks
from tests.support.dcp_contents import assert_same_contents, contents
from tests.support.experts import experts_of
from tests.support.models import ModelCase
from tests.support.sharded_run import Run, Scenario, Setting


def averaged(case: ModelCase, setting: Setting) -> tuple[Run, ShardedEMA]:
    run = Run(Scenario(lambda _run: None, case, adamw), setting)
    assert run.sharded is not None
    ema = ShardedEMA(run.sharded, decay=0.5)
    run.train(0)
    ema.update()
    return run, ema


def save(case: ModelCase, setting: Setting, folder: str) -> None:
    run, ema = averaged(case, setting)
    dcp.save({"ema": ema.state_dict(), "model": run.model.state_dict()}, checkpoint_id=folder)


def load(case: ModelCase, setting: Setting, source: str, target: str) -> tuple[dict[str, Tensor], bool]:
    """Through dcp into another average, from there saved again; and from whole tensors."""
    run, ema = averaged(case, setting)
    state = {"ema": ema.state_dict()}
    dcp.load(state, checkpoint_id=source)
    ema.load_state_dict(state["ema"])
    dcp.save({"ema": ema.state_dict()}, checkpoint_id=target)
    assert run.sharded is not None
    whole = {key.removeprefix("ema."): value for key, value in contents(source).items() if key.startswith("ema.")}
    other = ShardedEMA(run.sharded)
    other.load_state_dict(whole)
    same = all(
        torch.equal(mine.to_local(), theirs.to_local())
        for mine, theirs in zip(other.state_dict().values(), ema.state_dict().values(), strict=True)
    )
    with ema.applied():
        return {run.sharded.checkpoint_name(name): value for name, value in run.sharded.full_parameters().items()}, same


EXPERTS = {
    kind: (case_of(kind), (4, Setting(3, arrangement=experts_of(sizes(2, 2))))) for kind in ("stacked", "listed")
}
WAYS = {
    "HFSDP to three ranks": (DENSE, HYBRID["HFSDP"], (3, Setting(3))),
    "HFSDP x TP to TP alone": (DENSE, TENSOR_PARALLEL["HFSDP x TP"], TENSOR_PARALLEL["TP alone"]),
    "stacked experts to two ranks": (*EXPERTS["stacked"], (2, Setting(2))),
    "listed experts to EP 2": (EXPERTS["listed"][0], (1, Setting(0)), EXPERTS["listed"][1]),
}


@pytest.mark.full(short=["HFSDP to three ranks"])
@pytest.mark.parametrize("way", WAYS)
def test_an_average_is_resharded_bit_for_bit(run_ranks: RunRanks, tmp_path: Path, way: str) -> None:
    case, (ranks, saved), (to_ranks, loaded) = WAYS[way]
    source, target = str(tmp_path / "source"), str(tmp_path / "target")
    run_ranks(ranks, save, case, saved, source)
    by_rank = run_ranks(to_ranks, load, case, loaded, source, target)
    before = contents(source)
    expected = {key: value for key, value in before.items() if key.startswith("ema.")}
    assert all(not torch.equal(value, before[f"model.module.{key[4:]}"]) for key, value in expected.items())
    assert_same_contents(contents(target), expected)
    for applied, same in by_rank:
        assert same
        for name, value in applied.items():
            if "experts." not in name:
                assert torch.equal(value, expected[f"ema.{name}"]), name
