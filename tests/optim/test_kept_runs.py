"""Runs are kept from step to step for as long as they are right, and shown in short lists where that helps."""

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard_model
from megatron_fsdp.optim import local_step as group_runs
from tests.conftest import RunRanks
from tests.optim.test_flat_runs import difference_after, tight, two_groups
from tests.optim.test_local_step import VARIANTS, connect, wrap
from tests.support.api_net import backward, batches, build, mesh
from tests.support.run_looks import counting_looks

# ---- what users do between steps -------------------------------------------------------------------------------------


def load_from_a_file(optimizer: Any) -> None:
    """The numbers of steps share one memory then, and each has a version counter of its own."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


def other_numbers_then_set_back_some(optimizer: Any) -> None:
    """Numbers side by side in one memory, but with a version counter each, as files give them; then writes to some."""
    states = list(optimizer.state.values())
    if states[0]["step"].item() == 2.0:
        memory = torch.full((len(states),), 2.0).untyped_storage()
        for index, state in enumerate(states):
            state["step"] = torch.empty(0).set_(memory, index, ())
    else:
        states[3]["step"].zero_()  # on both ranks it comes second in its run


def exchange_groups(optimizer: Any) -> None:
    """Two groups of other rates, which then have each other's parameters."""
    if len(optimizer.param_groups) == 1:
        two_groups(optimizer)
    else:
        first, second = optimizer.param_groups
        first["params"], second["params"] = second["params"], first["params"]


def move_state_of_one(optimizer: Any) -> None:
    """The same values, but other objects."""
    param = optimizer.param_groups[0]["params"][1]
    optimizer.state[param] = {key: copy.deepcopy(value) for key, value in optimizer.state[param].items()}


def state_of_its_own(optimizer: Any) -> None:
    """Things in the state that belong to no parameter, as state dicts allow."""
    optimizer.state["seen"] = {"count": 1}


def leave_the_last_group(optimizer: Any) -> None:
    """A group of its own for some parameters, which leaves them again; their state stays."""
    params = optimizer.param_groups[0]["params"]
    if len(params) > 4:
        optimizer.param_groups[0]["params"] = params[:4]


@pytest.mark.parametrize(
    "deed",
    [other_numbers_then_set_back_some, exchange_groups, move_state_of_one, state_of_its_own, leave_the_last_group],
    ids=lambda deed: deed.__name__,
)
def test_what_is_done_between_steps_is_seen(deed: Callable[[Any], None], run_ranks: RunRanks) -> None:
    for variant in ("adamw", "adam foreach"):
        found = run_ranks(2, difference_after, deed, variant, tight)
        for same, steps in found:
            assert all(same), variant
            assert steps == found[0][1]
        wanted = {"other_numbers_then_set_back_some": {2.0, 5.0}, "leave_the_last_group": {2.0, 5.0}}
        assert set(found[0][1]) == wanted.get(deed.__name__, {5.0})


# ---- how often runs are looked for -----------------------------------------------------------------------------------


def looks_in_steps(deed: Callable[[Any], None] | None) -> list[int]:
    """How often runs are found in each of five steps; before the fourth something is done."""
    model = fully_shard_model(tight(), mesh(), zero_dp_strategy=3)
    optimizer: Any = connect(model, VARIANTS["adamw fused"])
    with counting_looks() as looks:
        for number, batch in enumerate(batches(5)):
            looks.append(0)
            optimizer.zero_grad()
            backward(model, batch)
            if number == 3 and deed is not None:
                deed(optimizer)
            optimizer.step()
    return looks


def change_the_rate(optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def set_back_numbers(optimizer: Any) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def look_at_state(optimizer: Any) -> None:
    len(optimizer.state_dict()["state"])


@pytest.mark.parametrize(
    ("deed", "looks"),
    [
        (None, [1, 0, 0, 0, 0]),
        (change_the_rate, [1, 0, 0, 0, 0]),
        (look_at_state, [1, 0, 0, 0, 0]),
        (set_back_numbers, [1, 0, 0, 1, 0]),
        (load_from_a_file, [1, 0, 0, 1, 0]),
    ],
)
def test_runs_are_found_once_and_again_after_a_change(
    deed: Callable[[Any], None] | None, looks: list[int], run_ranks: RunRanks
) -> None:
    assert run_ranks(2, looks_in_steps, deed) == [looks] * 2


# ---- lists of few elements -------------------------------------------------------------------------------------------


def lists_in_a_step(variant: str, most: int) -> tuple[list[list[int]], float, bool]:
    """Elements of each tensor in each list that torch steps; largest difference to steps on all; order of groups."""
    lists: list[list[int]] = []
    ends = []
    for batch_numel in (most, 1 << 40):
        model = wrap(build, 3)
        optimizer: Any = connect(model, VARIANTS[variant])
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 3e-2})
        with mock.patch.object(group_runs, "_BATCH_NUMEL", batch_numel):
            for batch in batches(3):
                backward(model, batch)
                optimizer.step()
                optimizer.zero_grad()
            backward(model, next(batches(1)))
            if batch_numel == most:
                optimizer.register_step_pre_hook(lambda _own, args, _kwargs: lists.extend(_numels(args[0])))
            optimizer.step()
        ends.append([param.detach()._local_tensor.clone() for param in model.parameters()])  # type: ignore[attr-defined]
    difference = max((left - right).abs().max().item() for left, right in zip(*ends, strict=True) if left.numel())
    return lists, difference, len(optimizer.param_groups) == 2


def _numels(stand_in: torch.optim.Optimizer) -> list[list[int]]:
    return [[param.numel() for param in group["params"]] for group in stand_in.param_groups]


def test_lists_of_few_elements_step_as_one_list_does(run_ranks: RunRanks) -> None:
    for lists, difference, kept in run_ranks(2, lists_in_a_step, "adamw foreach", 12):
        assert (difference, kept) == (0.0, True)
        assert len(lists) > 2
        assert all(len(each) == 1 or sum(each) <= 12 for each in lists)
        assert all(sum(each) + after[0] > 12 for each, after in itertools.pairwise(lists[:-1]))
    for lists, difference, _ in run_ranks(2, lists_in_a_step, "adamw fused", 12):
        assert (difference, len(lists)) == (0.0, 2)  # kernels that make no temporary tensors take all at once


def parameters_on_meta() -> list[nn.Parameter]:
    return [nn.Parameter(torch.empty(30, device="meta")) for _ in range(4)]


def test_elsewhere_than_on_cpus_there_is_one_list() -> None:
    with mock.patch.object(group_runs, "_BATCH_NUMEL", 40):
        assert [len(batch) for batch in group_runs._batches(parameters_on_meta())] == [4]
        assert [len(batch) for batch in group_runs._batches([torch.ones(30) for _ in range(4)])] == [1] * 4
        assert list(group_runs._batches([])) == [[]]
