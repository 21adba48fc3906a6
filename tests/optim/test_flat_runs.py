"""Parameters stepped as one flat tensor: what is joined, and that nothing a user does between steps is lost."""

import contextlib
import copy
import itertools
import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard_model, fully_shard_optimizer
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.optim.local_step import Run, find_runs
from tests.conftest import RunRanks
from tests.optim.test_local_step import VARIANTS, connect, odd, wrap
from tests.support.api_net import backward, batches, build, mesh
from tests.support.parity import fixed_seed
from tests.support.run_looks import counting_looks

SLOTS = frozenset({"exp_avg", "exp_avg_sq", "max_exp_avg_sq"})


def tight() -> nn.Module:
    """A network whose weights lie side by side without gaps; 6 parameters. (samples, 5) -> (samples, 3)."""
    with fixed_seed(2):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


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


def difference_after(
    deed: Callable[[Any], None], variant: str, build_model: Callable[[], nn.Module]
) -> tuple[list[bool], list[float]]:
    """Whether every weight and all state are equal between runs and DTensors after five steps, by parameter."""
    model = fully_shard_model(build_model(), mesh(), zero_dp_strategy=3)
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


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
@pytest.mark.parametrize(("variant", "build_model"), [("adamw", tight), ("adam foreach", odd), ("adamw fused", odd)])
def test_what_is_done_between_steps_has_the_effect_that_it_has_on_dtensors(
    variant: str, build_model: Callable[[], nn.Module], deed: Callable[[Any], None], run_ranks: RunRanks
) -> None:
    (same, steps), (same_there, steps_there) = run_ranks(2, difference_after, deed, variant, build_model)
    assert all(same)
    assert all(same_there)
    assert steps == steps_there
    wanted = {"leave_one_out": {3.0, 5.0}, "set_back_one_number": {2.0, 5.0}, "forget_one_state": {2.0, 5.0}}
    assert set(steps) - {0.0} == wanted.get(deed.__name__, {5.0})  # 0: blank state, of what is never used


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
        assert order == sorted(order)
        assert saved == sorted(saved)
        assert set(order) < set(saved)  # which has blank state of the parameter that was not used


# ---- hooks, failures and what cannot be joined -----------------------------------------------------------------------


def seen_by_an_early_hook() -> list[tuple[list[int], set[float]]]:
    """What a hook from before connecting finds after each step: the order of state, and the numbers of steps."""
    model = wrap(odd, 3)
    optimizer: Any = VARIANTS["adamw"]([param for param in model.parameters() if param.requires_grad])
    numbers = {param: number for number, param in enumerate(optimizer.param_groups[0]["params"])}
    seen: list[tuple[list[int], set[float]]] = []

    def look(own: Any, _args: Any, _kwargs: Any) -> None:
        seen.append(([numbers[param] for param in own.state], {state["step"].item() for state in own.state.values()}))

    optimizer.register_step_post_hook(look)
    fully_shard_optimizer(optimizer)
    for batch in batches(2):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    return seen


def test_hooks_from_before_connecting_find_state_in_order_and_every_step_counted(run_ranks: RunRanks) -> None:
    for seen in run_ranks(3, seen_by_an_early_hook):
        assert [order for order, _ in seen] == [[0, 2, 3, 4, 5, 6]] * 2  # number 1 is never used
        assert [steps for _, steps in seen] == [{1.0}, {2.0}]


def make_other_gradients(model: nn.Module, _optimizer: Any = None) -> None:
    """Replace all gradients but the first by others, of memory of their own."""
    for param in [param for param in model.parameters() if param.grad is not None][1:]:
        param.grad = param.grad * 10.0  # type: ignore[operator]


def fail_then_replace(model: nn.Module, optimizer: Any) -> None:
    """A first step that fails after gradients were looked at; then others take their place."""

    def fails() -> float:
        len(optimizer.state_dict())
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        optimizer.step(fails)
    options = optimizer.param_groups[0]
    rate, options["lr"] = options["lr"], torch.tensor(options["lr"])
    with contextlib.suppress(RuntimeError):
        optimizer.step()  # lists of tensors take no tensor as rate
    options["lr"] = rate
    make_other_gradients(model)


def one_group_on_dtensors(_model: nn.Module, optimizer: Any) -> None:
    """A step where a second group cannot be shown as local tensors, and so none is."""
    foreign = nn.Parameter(torch.ones(2))
    foreign.grad = torch.ones(2)
    optimizer.add_param_group({"params": [foreign]})
    optimizer.step()
    optimizer.state.pop(foreign)
    optimizer.param_groups.pop()


def listed_twice(_model: nn.Module, optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = [*params, params[1]]


def own_values(_model: nn.Module, optimizer: Any) -> None:
    """State that is none of the optimizer's: numbers, and things that cannot be compared."""
    for param in optimizer.param_groups[0]["params"]:
        optimizer.state[param].update(seen=torch.zeros(()), list=[torch.ones(2), torch.ones(2)])


def after_trouble(trouble: Callable[[nn.Module, Any], None], at: int) -> tuple[list[bool], bool]:
    """Whether weights and state are equal by parameter, and own values the user's, between runs and DTensors."""
    ends, kept = [], True
    for on_dtensors in (False, True):
        model = fully_shard_model(tight(), mesh(), zero_dp_strategy=3)
        optimizer: Any = connect(model, VARIANTS["adam foreach"], on_dtensors)
        for number, batch in enumerate(batches(4)):
            optimizer.zero_grad()
            backward(model, batch)
            if number == at:
                trouble(model, optimizer)
                own = [state.get("seen") for state in optimizer.state.values()]
            optimizer.step()
        kept &= all(map(operator.is_, own, [state.get("seen") for state in optimizer.state.values()]))
        for state in optimizer.state.values():
            state.pop("list", None)
        ends.append(_end(model, optimizer))
    same = [
        left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
        for left, right in zip(*ends, strict=True)
    ]
    return same, kept


@pytest.mark.parametrize(
    ("trouble", "at"),
    [
        (fail_then_replace, 0),
        (fail_then_replace, 2),
        (one_group_on_dtensors, 0),
        (listed_twice, 0),
        (own_values, 1),
        (make_other_gradients, 2),
    ],
)
def test_after_trouble_weights_and_state_are_those_of_dtensors(
    trouble: Callable[[nn.Module, Any], None], at: int, run_ranks: RunRanks
) -> None:
    for same, kept in run_ranks(2, after_trouble, trouble, at):
        assert all(same)
        assert kept


def with_cast_gradients() -> tuple[list[int], int, bool]:
    """Looks for runs in each step, runs then, and whether steps without gradients change nothing."""
    model = fully_shard_model(tight().to(torch.bfloat16), mesh(), zero_dp_strategy=0)  # float32 main weights
    optimizer: Any = connect(model, VARIANTS["adamw"])
    with counting_looks() as looks:
        for number, batch in enumerate(batches(5)):
            looks.append(0)
            optimizer.zero_grad()
            backward(model, batch)
            if number == 2:
                make_other_gradients(model)
            optimizer.step()
        runs = len(runs_of(optimizer))
        before = _end(model, optimizer)
        optimizer.zero_grad()
        looks.append(0)
        optimizer.step()
    after = _end(model, optimizer)
    same = all(torch.equal(left[key], right[key]) for left, right in zip(before, after, strict=True) for key in left)
    return looks, runs, same


def test_gradients_that_are_cast_in_every_step_are_not_looked_through_anew(run_ranks: RunRanks) -> None:
    for looks, runs, same in run_ranks(2, with_cast_gradients):
        assert looks == [1, 0, 1, 1, 0, 1]
        assert runs < 6
        assert same


# ---- the norm --------------------------------------------------------------------------------------------------------


def norms_after_nan(strategy: int) -> list[float]:
    """Norms of the same gradients, before and after some that were NaN were clipped and zeroed in place."""
    model = wrap(build, strategy)
    norms = []
    for factor in (1.0, float("nan"), 1.0):
        model.zero_grad(set_to_none=False)
        backward(model, next(batches(1)))
        with torch.no_grad():
            for param in model.parameters():
                param.grad._local_tensor.mul_(factor)  # type: ignore[union-attr]
        norms.append(model.clip_grad_norm_(1.0).item())
    return norms


@pytest.mark.parametrize("strategy", [0, 3])
def test_gaps_between_gradients_count_for_nothing_even_after_nan(strategy: int, run_ranks: RunRanks) -> None:
    for first, nan, last in run_ranks(2, norms_after_nan, strategy):
        assert math.isnan(nan)
        assert first == last > 0.0
