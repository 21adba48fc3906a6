"""Parameters stepped as one flat tensor: what is joined, and that nothing a user does between steps is lost."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.runtime.flat_runs import Run, find_runs
from tests.conftest import RunRanks
from tests.runtime.test_local_step import VARIANTS, connect, odd, wrap
from tests.support.api_net import backward, batches, build

SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def runs_of(optimizer: torch.optim.Optimizer) -> list[Run]:
    runs = find_runs(optimizer.param_groups[0]["params"], optimizer.state, SLOTS)
    assert runs is not None
    return runs


def places(tensors: list[torch.Tensor]) -> list[tuple[int, int, int]]:
    """First address, last address and memory of each tensor with elements."""
    return sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor.untyped_storage().data_ptr())
        for tensor in tensors
        if tensor.numel()
    )


def what_is_joined(strategy: int, build_model: Callable[[], nn.Module]) -> dict[str, Any]:
    """Memory of members and runs after a step, and how many tensors of state there are."""
    model = wrap(build_model, strategy)
    optimizer: Any = connect(model, VARIANTS["adamw fused"])
    backward(model, next(batches(1)))
    optimizer.step()
    backward(model, next(batches(1)))
    runs = runs_of(optimizer)
    members = [param for run in runs for param in run.params]
    moments = [optimizer.state[param]["exp_avg"]._local_tensor for param in members]
    numbers = [optimizer.state[param]["step"] for param in members]
    params = [param for param in model.parameters() if param.grad is not None]
    local = places([param._local_tensor for param in params])
    gaps = sum(before[1:] != (after[0], after[2]) for before, after in itertools.pairwise(local))
    return {
        "members": {id(param) for param in members} == {id(param) for param in params},
        "memory": sum(stop - start for start, stop, _ in local) == sum(run.flat.nbytes for run in runs),
        "gaps": gaps,
        "runs": len([run for run in runs if run.flat.numel()]),
        "moments": len({moment.untyped_storage().data_ptr() for moment in moments if moment.numel()}),
        "steps": {number.item() for number in numbers},
        "own numbers": len({number.data_ptr() for number in numbers}) == len(numbers),
        "count": len(params),
    }


@pytest.mark.parametrize("strategy", [0, 3])
def test_what_lies_side_by_side_is_one_run_with_one_tensor_of_state(strategy: int, run_ranks: RunRanks) -> None:
    for found in run_ranks(2, what_is_joined, strategy, build):
        count = found.pop("count")
        assert (found["members"], found["memory"]) == (True, True)
        assert found["runs"] == found["gaps"] + 1 < count  # gradients have gaps where weights have
        assert found["moments"] == found["runs"]
        assert (found["steps"], found["own numbers"]) == ({1.0}, True)


# ---- what users do between steps -------------------------------------------------------------------------------------


def nothing(_optimizer: Any) -> None:
    """The usual case."""


def leave_one_out(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][4].grad = None


def set_back_one_number(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["step"].zero_()


def replace_one_moment(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"] = state["exp_avg"] * 0.5


def forget_one_state(optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][3]]


def load_what_was_saved(optimizer: Any) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replace_one_gradient(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad * 2.0


def two_groups(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[1::2], "lr": 3e-2})
        optimizer.param_groups[0]["params"] = params[::2]


DEEDS = (
    nothing,
    leave_one_out,
    set_back_one_number,
    replace_one_moment,
    forget_one_state,
    load_what_was_saved,
    replace_one_gradient,
    two_groups,
)


def difference_after(deed: Callable[[Any], None], variant: str) -> tuple[list[bool], list[float]]:
    """Whether every weight and all state are equal between runs and DTensors after five steps, by parameter."""
    model = wrap(odd, 3)
    start = [param.detach().clone() for param in model.parameters()]
    ends = []
    for on_dtensors in (False, True):
        with torch.no_grad():
            for param, value in zip(model.parameters(), start, strict=True):
                param.copy_(value)
        optimizer: Any = connect(model, VARIANTS[variant], on_dtensors)
        for number, batch in enumerate(batches(5)):
            optimizer.zero_grad()
            backward(model, batch)
            if number in (2, 3):
                deed(optimizer)
            optimizer.step()
        ends.append(_end(model, optimizer))
    same = [
        left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
        for left, right in zip(*ends, strict=True)
    ]
    return same, [end["step"].item() for end in ends[0] if "step" in end]


def _end(model: nn.Module, optimizer: Any) -> list[dict[str, torch.Tensor]]:
    found = []
    for param in model.parameters():
        values = {"param": param, **optimizer.state.get(param, {})}
        found.append(
            {
                key: (value._local_tensor if isinstance(value, UnevenDTensor) else value).detach().clone()
                for key, value in values.items()
            }
        )
    return found


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_what_is_done_between_steps_has_the_effect_that_it_has_on_dtensors(
    deed: Callable[[Any], None], run_ranks: RunRanks
) -> None:
    for variant in ("adamw", "adam foreach", "adamw fused"):
        (same, steps), (same_there, steps_there) = run_ranks(2, difference_after, deed, variant)
        assert all(same), variant
        assert all(same_there), variant
        assert steps == steps_there
        wanted = {"leave_one_out": {3.0, 5.0}, "set_back_one_number": {2.0, 5.0}, "forget_one_state": {2.0, 5.0}}
        assert set(steps) == wanted.get(deed.__name__, {5.0})


def memory_of_state() -> tuple[int, int]:
    """Bytes of the memory behind a state dict, and of the elements in it."""
    model = wrap(build, 3)
    optimizer: Any = connect(model, VARIANTS["adamw"])
    backward(model, next(batches(1)))
    optimizer.step()
    state = {
        number: {key: getattr(value, "_local_tensor", value) for key, value in values.items()}
        for number, values in optimizer.state_dict()["state"].items()
    }
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for values in state.values()
        for value in values.values()
    }
    elements = sum(value.nbytes for values in state.values() for value in values.values())
    return sum(storages.values()), elements


def test_state_takes_no_more_memory_than_its_elements(run_ranks: RunRanks) -> None:
    for held, elements in run_ranks(2, memory_of_state):
        assert held == elements


def order_of_state() -> tuple[list[int], list[int]]:
    """Numbers of the parameters with state in the order of the optimizer's state, and of its state dict."""
    model = wrap(odd, 3)
    optimizer: Any = connect(model, VARIANTS["adamw"])
    numbers = {param: number for number, param in enumerate(optimizer.param_groups[0]["params"])}
    backward(model, next(batches(1)))
    optimizer.step()
    return [numbers[param] for param in optimizer.state], list(optimizer.state_dict()["state"])


def test_state_is_in_the_order_of_parameters_on_every_rank(run_ranks: RunRanks) -> None:
    for order, saved in run_ranks(3, order_of_state):
        assert order == saved == sorted(order)
