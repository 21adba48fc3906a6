"""Saved by one arrangement of ranks, loaded by all others: weights and optimizer, bit for bit, also by plain dcp."""

from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from megatron_fsdp.checkpoint import load_checkpoint
from megatron_fsdp.checkpoint.checkpointer import collect
from megatron_fsdp.checkpoint.save import write_state
from tests.conftest import RunRanks
from tests.support.arrangements import divide_tensors, divide_tensors_and_sequences, hybrid, tensor_parallel
from tests.support.case import Run, Scenario, Setting, whole_moments
from tests.support.dcp_contents import contents, load_state, same, state_of
from tests.support.zoo import DENSE, MODEL_CASES, ModelCase, ModelName

Places = dict[str, tuple[int, Setting]]

ODD = MODEL_CASES["odd_shapes"]
FLAT: Places = {f"{ranks} ranks, strategy {s}": (ranks, Setting(s)) for ranks, s in ((1, 0), (2, 3), (3, 2), (4, 1))}
HYBRID: Places = {
    "HSDP": (4, Setting(3, outer_strategy=0, arrangement=hybrid(2, 2))),
    "HFSDP": (4, Setting(3, outer_strategy=1, arrangement=hybrid(2, 2))),
}
TARGETS: Places = {f"{ranks} ranks, strategy {s}": (ranks, Setting(s)) for ranks, s in ((1, 3), (2, 1), (3, 3), (4, 3))}
SOME = ["2 ranks, strategy 3", "3 ranks, strategy 2", "1 ranks, strategy 3", "2 ranks, strategy 1", "HFSDP"]
SEQUENCES, TENSORS = tensor_parallel(divide_tensors_and_sequences), tensor_parallel(divide_tensors)
TENSOR_PARALLEL: Places = {
    "three ranks": (3, Setting(3)),
    "FSDP x TP": (4, Setting(3, arrangement=SEQUENCES)),
    "ZeRO-1 x TP of another plan": (4, Setting(1, arrangement=TENSORS)),
    "TP alone": (2, Setting(2, arrangement=TENSORS)),
    "HFSDP x TP": (4, Setting(3, outer_strategy=1, arrangement=tensor_parallel(divide_tensors, 2))),
}


def by_kind(model: nn.Module, num_groups: int = 2) -> torch.optim.Optimizer:
    """AdamW of two groups, as weight decay is usually given, or of one."""
    trainable = [param for param in model.parameters() if param.requires_grad]
    if num_groups == 1:
        return torch.optim.AdamW(trainable, lr=1e-2)
    matrices, others = ([param for param in trainable if (param.dim() > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-2, amsgrad=True)


def trained(case: ModelCase, setting: Setting, *batches: int, num_groups: int = 2) -> Run:
    run = Run(Scenario(lambda _run: None, case, partial(by_kind, num_groups=num_groups)), setting)
    run.train(*batches)
    return run


def whole_state(run: Run) -> dict[str, Tensor]:
    """Weights and moments, gathered by the model's own means, and steps, under the keys of a checkpoint."""
    assert run.sharded is not None
    found = {f"model.module.{name}": value.clone() for name, value in run.sharded.iter_full_tensors()}
    first: dict[int, str] = {}
    for name, param in run.module.named_parameters(remove_duplicate=False):  # a tied one has both its names
        found[f"model.module.{name}"] = found[f"model.module.{first.setdefault(id(param), name)}"]
    params = (param for group in run.optimizer.param_groups for param in group["params"])
    numbers = {id(param): number for number, param in enumerate(params)}
    by_name = {name: numbers.get(key) for key, name in run.sharded._engine.sharded_names().items()}
    for name, kind, value in whole_moments(run.sharded, run.optimizer):
        found[f"optimizer.state.{by_name[name]}.{kind}"] = value
    for param, state in run.optimizer.state.items():
        found[f"optimizer.state.{numbers[id(param)]}.step"] = state["step"].clone()
    return found


def with_options(run: Run) -> dict[str, Any]:
    """The same, and the options of all groups."""
    found: dict[str, Any] = whole_state(run)
    for number, group in enumerate(run.optimizer.param_groups):
        found |= {f"optimizer.param_groups.{number}.{key}": group[key] for key in group.keys() - {"params"}}
    return found


def loss_of(run: Run) -> float:
    """Of a whole batch, with the weights that compute uses."""
    with torch.no_grad():
        return run.case.loss(run.model, run.whole_batch(9)).item()


def write(run: Run, folder: str) -> None:
    """By plain calls, and by the library; the rate is one that a schedule has left."""
    run.optimizer.param_groups[0]["lr"] = 0.5
    dcp.save(state_of(run.model, run.optimizer), checkpoint_id=f"{folder}/plain")
    write_state(collect(run.model, run.optimizer, 2), Path(folder) / "own")


def save(case: ModelCase, setting: Setting, folder: str, num_groups: int) -> tuple[dict[str, Any], float]:
    run = trained(case, setting, 0, 1, num_groups=num_groups)
    write(run, folder)
    return with_options(run), loss_of(run)


def load_each(
    case: ModelCase, setting: Setting, folders: Collection[str], num_groups: int
) -> dict[str, tuple[list[str], float]]:
    """Load checkpoints one after another, by us and by plain calls; by folder what differs, and the loss then."""
    told = {}
    for folder in folders:
        run, library = (trained(case, setting, *batches, num_groups=num_groups) for batches in ([5], []))
        load_state(run.model, run.optimizer, f"{folder}/plain")
        saved = contents(f"{folder}/plain")
        wrong = differences(with_options(run), saved)
        for batches in ([], [5]):  # into an optimizer that has no state, and into one that has
            library.train(*batches)
            report = load_checkpoint(library.model, library.optimizer, f"{folder}/own")
            assert (report.iteration, report.is_complete) == (2, True)
            wrong += differences(with_options(library), saved)
        told[folder] = wrong, loss_of(run)
    return told


def differences(found: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    saved = {key: value for key, value in saved.items() if not key.endswith(".params")}
    told = [f"only in one: {key}" for key in found.keys() ^ saved.keys()]
    return told + [key for key in found.keys() & saved.keys() if not same(found[key], saved[key])]


def check(
    run_ranks: RunRanks, case: ModelCase, saved: Places, loaded: Places, folder: Path, num_groups: int = 2
) -> None:
    losses = {}
    for number, (ranks, setting) in enumerate(saved.values()):
        source = str(folder / str(number))
        whole, losses[source] = run_ranks(ranks, save, case, setting, source, num_groups)[0]
        assert differences(whole, contents(f"{source}/plain")) == []
        assert sum(key.endswith(".exp_avg") and bool(value.any()) for key, value in whole.items()) > 3
    for place, (ranks, setting) in loaded.items():
        for told in run_ranks(ranks, load_each, case, setting, list(losses), num_groups):
            assert {key: differing for key, (differing, _) in told.items()} == {key: [] for key in losses}, place
            assert {key: loss for key, (_, loss) in told.items()} == pytest.approx(losses, rel=1e-6), place


@pytest.mark.full(short=["some"])
@pytest.mark.parametrize("names", [SOME, [*FLAT, *HYBRID, *TARGETS]], ids=["some", "all"])
def test_one_to_four_ranks_and_hybrids_in_every_direction(
    run_ranks: RunRanks, names: Collection[str], tmp_path: Path
) -> None:
    """Rows that do not divide, and shards cut inside rows."""
    saved, loaded = (
        {name: place for name, place in {**places, **HYBRID}.items() if name in names} for places in (FLAT, TARGETS)
    )
    check(run_ranks, ODD, saved, loaded, tmp_path)


@pytest.mark.full(short=["tied-saved1-loaded1"])
@pytest.mark.parametrize(
    ("name", "saved", "loaded"),
    [("scalars", (2, 3), (3, 3)), ("tied", (3, 2), (2, 0)), ("transformer", (4, 3), (1, 1))],
)
def test_other_models(
    run_ranks: RunRanks, name: ModelName, saved: tuple[int, int], loaded: tuple[int, int], tmp_path: Path
) -> None:
    (ranks, strategy), (to_ranks, to_strategy) = saved, loaded
    places: list[Places] = [{"": (ranks, Setting(strategy))}, {"": (to_ranks, Setting(to_strategy))}]
    check(run_ranks, MODEL_CASES[name], *places, tmp_path)


@pytest.mark.full
def test_tensor_parallel_sizes_in_every_direction(run_ranks: RunRanks, tmp_path: Path) -> None:
    check(run_ranks, DENSE, TENSOR_PARALLEL, TENSOR_PARALLEL, tmp_path, num_groups=1)
