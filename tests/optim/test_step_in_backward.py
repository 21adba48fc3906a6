"""Steps that begin in backward: the bits of the ordinary loop, when they happen, and what comes too late."""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.errors import ConfigurationError, RankError, ScheduleError
from megatron_fsdp.optim import step_in_backward
from megatron_fsdp.optim.adamw8bit import AdamW8bit
from tests.support.arrangements import FLAT, hybrid
from tests.support.case import shard
from tests.support.on_ranks import on_ranks, refusal, same_on_ranks
from tests.support.zoo import TOWER_FEATURES, PlannedError, tower_case, tower_loss

BF16 = MixedPrecisionPolicy(torch.float32, torch.float32)
WIDTHS = (32, 32, 48, 32, 32)


def adamw(params: Any) -> torch.optim.Optimizer:
    """Of two groups, of which the second decays."""
    first, *others = params
    groups = [{"params": [first], "weight_decay": 0.0}, {"params": others}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-3, fused=True)


def build(optimizer: Callable[[Any], torch.optim.Optimizer] = adamw, **options: Any) -> tuple[Any, Any]:
    options = {"offload": ["main_weights"], "mixed_precision_policy": BF16, **options}
    return shard(tower_case(WIDTHS, torch.bfloat16), lambda model: optimizer(model.parameters()), **options)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    inputs = torch.Generator().manual_seed(number + 100 * dist.get_rank())
    return tower_loss(model, torch.randn(4, TOWER_FEATURES, generator=inputs).bfloat16())


def step(model: Any, optimizer: Any, number: int) -> None:
    """A step of the usual kind, all of it in backward."""
    with optimizer.step_in_backward():
        loss_of(model, number).backward()


def warm() -> tuple[Any, Any]:
    """A model and an optimizer behind the first step, which is all at the end."""
    model, optimizer = build()
    step(model, optimizer, 0)
    optimizer.zero_grad()
    return model, optimizer


def train(
    optimizer_of: Callable[[Any], torch.optim.Optimizer], in_backward: bool, **options: Any
) -> list[torch.Tensor]:
    """Four steps of two microbatches each, with a scheduler; return gradients of each, weights and state."""
    model, optimizer = build(optimizer_of, **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0 / (1 + number))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    seen = []
    for number in range(4):
        with model.no_sync():
            loss_of(model, 2 * number).backward()
        loss = loss_of(model, 2 * number + 1)
        with optimizer.step_in_backward() if in_backward else nullcontext():
            loss.backward()
        if not in_backward:
            optimizer.step()
        seen += [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.zero_grad()
        schedule.step()
    assert calls == ["before", "after"] * 4
    assert not [each for each in threading.enumerate() if each.name.startswith("step in backward")]
    for param in model.parameters():
        seen.append(param.to_local().detach().clone())
        state = optimizer.state[param]
        seen += [getattr(state[key], "to_local", lambda key=key, state=state: state[key])() for key in sorted(state)]
    return seen + [value for _, value in sorted(model.full_parameters().items())]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam foreach": lambda params: torch.optim.Adam(params, lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
}
HALF = {"main_weights": 0.5}
SETTINGS: dict[str, dict[str, Any]] = {
    "1": {"zero_dp_strategy": 1},
    "2": {"zero_dp_strategy": 2},
    "3": {"zero_dp_strategy": 3, "offload": "all"},
    "half": {"offload": HALF},
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count the parameters that are stepped on the thread."""
    found: list[int] = []
    run = step_in_backward.StepInBackward._run

    def counts(self: Any, view: Any, on_host: Any) -> None:
        found.append(sum(len(group["params"]) for group in view.param_groups))
        run(self, view, on_host)

    with patch.object(step_in_backward.StepInBackward, "_run", counts):
        yield found


def assert_same_bits(optimizer: str, **options: Any) -> None:
    expected = train(OPTIMIZERS[optimizer], in_backward=False, **options)
    with counted() as found:
        got = train(OPTIMIZERS[optimizer], in_backward=True, **options)
    assert len(expected) == len(got)
    assert all(torch.equal(one, other) for one, other in zip(expected, got, strict=True))
    wholly = options.get("offload") is not HALF
    params = 2 + 2 * len(WIDTHS)
    assert sum(found) == 3 * params if wholly else 0 < sum(found) < 3 * params


@pytest.mark.parametrize(
    ("num_ranks", "optimizer", "setting"),
    [(1, "sgd", "2"), (2, "adamw", "3"), (3, "adam foreach", "1"), (2, "adamw", "half")],
)
@on_ranks()
def test_bits_are_those_of_the_ordinary_loop(num_ranks: int, optimizer: str, setting: str) -> None:
    assert num_ranks == dist.get_world_size()
    assert_same_bits(optimizer, **SETTINGS[setting])


@pytest.mark.full(short=["1"])
@pytest.mark.parametrize("outer", [0, 1])
@on_ranks(4)
def test_so_they_are_with_an_outer_axis(outer: int) -> None:
    arguments = {**FLAT.arguments(), **hybrid(2, 2).arguments(), "outer_dp_sharding_strategy": outer}
    assert_same_bits("adamw", **arguments)


@pytest.mark.unmerged
@on_ranks(2)
def test_units_are_stepped_while_backward_goes_on() -> None:
    """The backward of the first floor waits for the step of the last one."""
    model, optimizer = warm()
    last = model.module.floors[-1].up.weight
    before = last.to_local().detach().clone()
    stepped = threading.Event()
    run = step_in_backward.StepInBackward._run

    def tells(self: Any, view: Any, on_host: Any) -> None:
        run(self, view, on_host)
        stepped.set()

    def waits(*_: object) -> None:
        assert stepped.wait(60)
        assert not before.numel() or not torch.equal(last.to_local(), before)
        waited.append(True)

    waited: list[bool] = []
    model.module.floors[0].register_full_backward_hook(waits)
    with patch.object(step_in_backward.StepInBackward, "_run", tells):
        step(model, optimizer, 1)
    assert waited


@on_ranks(2)
def test_no_unit_is_stepped_before_its_gradients_are_on_host() -> None:
    model, optimizer = warm()
    before = [param.to_local().detach().clone() for param in model.parameters()]
    on_host = threading.Event()
    with patch.object(step_in_backward, "reached", lambda _device: on_host.wait), optimizer.step_in_backward():
        loss_of(model, 1).backward()
        during = [param.to_local().detach().clone() for param in model.parameters()]
        on_host.set()
    assert all(map(torch.equal, before, during))
    assert not any(
        torch.equal(one, param.to_local()) for one, param in zip(before, model.parameters(), strict=True) if one.numel()
    )


# ---- refusals --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_cannot_step_in_backward_is_refused_on_entering() -> None:
    def refused(optimizer_of: Callable[[Any], torch.optim.Optimizer] = adamw, **options: Any) -> str:
        model, optimizer = build(optimizer_of, **options)
        told = refusal(optimizer.step_in_backward().__enter__, error=ConfigurationError)
        loss_of(model, 0).backward()
        optimizer.step()
        return told

    assert "where main weights rest on the device; leave" in refused(offload=None)
    assert "since its step is none of those of torch" in refused(lambda params: torch.optim.Adafactor(params))
    assert "AdamW8bit cannot step in backward" in refused(lambda params: AdamW8bit(params, lr=1e-2))
    assert "gradients are checked" in refused(report_nan_in_param_grad=True)
    assert "used parameters when backward ends (find_unused_parameters, skipped" in refused(find_unused_parameters=True)
    half = MixedPrecisionPolicy(torch.float32, torch.bfloat16)
    assert "gradients are cast" in refused(mixed_precision_policy=half)
    model, optimizer = build()
    with model.no_sync():
        assert "enter it for the last" in refusal(optimizer.step_in_backward().__enter__, error=ConfigurationError)


def changes(model: Any, optimizer: Any) -> dict[str, tuple[Callable[[], object], str]]:
    """What nobody may do behind a backward, and what it is told."""
    param = next(model.parameters())
    group = optimizer.param_groups[1]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))

    def clear() -> None:
        param.grad = None

    def halve(tensor: torch.Tensor) -> None:
        with torch.no_grad():
            tensor.mul_(0.5)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-9)

    too_late, is_used = "comes too late inside of", "would change the gradient of .*, which optimizer.step_in_backward"
    is_changed = "^the gradient of first.weight was changed inside of"
    return {
        "clip": (lambda: model.clip_grad_norm_(1.0), f"^clip_grad_norm_ {too_late}"),
        "scale": (lambda: model.scale_gradients(0.5), f"^scale_gradients {too_late}"),
        "torch's clip": (clip, is_used),
        "unscale": (lambda: scaler.unscale_(optimizer), is_used),
        "forward": (lambda: loss_of(model, 0), "^a forward began inside of"),
        "step": (optimizer.step, r"^optimizer.step\(\) was called inside of"),
        "zero": (optimizer.zero_grad, r"^optimizer.zero_grad\(\) was called inside of"),
        "load": (lambda: optimizer.load_state_dict(optimizer.state_dict()), "load_state_dict.* was called inside of"),
        "enter": (lambda: optimizer.step_in_backward().__enter__(), "entered inside of itself"),
        "rate": (lambda: group.update(lr=0.5 * group["lr"]), "^param_groups of AdamW were changed inside of"),
        "gradient": (lambda: halve(param.grad.to_local()), is_changed),
        "cleared": (clear, is_changed),
        "weight": (lambda: halve(param.to_local()), "^first.weight was changed inside of"),
    }


CHANGES = ["clip", "scale", "torch's clip", "unscale", "forward", "step", "zero", "load", "enter"]
CHANGES += ["rate", "gradient", "cleared", "weight"]


def run(model: Any, optimizer: Any, act: Callable[[], object]) -> None:
    """Do something behind a backward."""
    with optimizer.step_in_backward():
        loss_of(model, 1).backward()
        act()


@contextmanager
def stepped_all(model: Any) -> Iterator[Callable[[], None]]:
    """Give what waits until the thread has stepped every parameter, and would not see a change of one in between."""
    stepped, missing = threading.Event(), len(list(model.parameters()))
    step_view = step_in_backward.StepInBackward._run

    def tells(self: Any, view: Any, on_host: Any) -> None:
        nonlocal missing
        step_view(self, view, on_host)
        missing -= sum(len(group["params"]) for group in view.shown_groups)
        if not missing:
            stepped.set()

    with patch.object(step_in_backward.StepInBackward, "_run", tells):
        yield lambda: None if stepped.wait(60) else pytest.fail("some parameters are not stepped in backward")


@pytest.mark.full(short=["clip", "torch's clip", "forward", "rate", "gradient"])
@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2)
def test_what_comes_too_late_is_refused(name: str) -> None:
    model, optimizer = warm()
    act, told = changes(model, optimizer)[name]
    with stepped_all(model) as wait:
        found = refusal(run, model, optimizer, lambda: (wait(), act()), error=(ConfigurationError, ScheduleError))
    assert re.search(told, found)
    with pytest.raises(ScheduleError, match="load a checkpoint"):
        loss_of(model, 2)


@pytest.mark.parametrize("name", ["clip", "torch's clip", "rate", "cleared"])
@on_ranks(2)
def test_what_hooks_of_the_step_change_is_refused(name: str) -> None:
    model, optimizer = warm()
    act, told = changes(model, optimizer)[name]
    optimizer.register_step_pre_hook(lambda *_: act() and None)
    with pytest.raises(ConfigurationError, match=told), optimizer.step_in_backward():
        loss_of(model, 1).backward()


@on_ranks(2)
def test_a_second_step_with_the_same_gradients_is_refused() -> None:
    model, optimizer = build()
    for number in range(2):
        step(model, optimizer, number)
        with pytest.raises(ScheduleError, match=r"has taken the step.*leave optimizer.step\(\) out"):
            optimizer.step()
        model.clip_grad_norm_(1.0)
        optimizer.zero_grad()
    loss_of(model, 2).backward()
    optimizer.step()


@pytest.mark.unmerged
@pytest.mark.parametrize("kind", ["the same", "another", "a penalty"])
@on_ranks(2)
def test_gradients_after_the_step_of_their_parameter_are_an_error_that_names_it(kind: str) -> None:
    model, optimizer = warm()
    weight = model.module.floors[-1].up.weight
    penalty = (weight * weight).sum()  # the first in the graph, so that its gradient is the last
    loss = loss_of(model, 1)
    other = loss_of(model, 2) if kind == "another" else loss

    def backward() -> None:
        if kind == "a penalty":
            (loss + penalty).backward()
        else:
            loss.backward(retain_graph=True)
            other.backward()

    with pytest.raises((ScheduleError, ConfigurationError)) as refused, optimizer.step_in_backward():
        backward()
    assert re.search(
        r"gradient of floors\.4\.up\.weight, which" if kind == "a penalty" else r"gradient of floors\.\d\..*a second",
        same_on_ranks(str(refused.value)),
    )
    model.reset()
    with pytest.raises(ScheduleError, match="load a checkpoint"):
        loss_of(model, 3)
    with pytest.raises(ScheduleError, match="load a checkpoint"):
        optimizer.step()


# ---- failures --------------------------------------------------------------------------------------------------------


def fail(*_: object) -> None:
    raise PlannedError("as planned")


@pytest.mark.unmerged
@on_ranks(2)
def test_a_backward_that_fails_is_told_until_a_checkpoint_is_loaded() -> None:
    model, optimizer = warm()
    saved = {"model": dict(model.full_parameters()), "optimizer": optimizer.state_dict()}
    handle = model.module.floors[0].register_full_backward_hook(fail)
    with pytest.raises(PlannedError) as met:
        step(model, optimizer, 1)
    assert any("load a checkpoint" in note for note in met.value.__notes__)
    handle.remove()
    model.reset()
    for act in (lambda: loss_of(model, 1), optimizer.step, lambda: optimizer.step_in_backward().__enter__()):
        with pytest.raises(ScheduleError, match=r"failed \(PlannedError: as planned\).*load a checkpoint"):
            act()
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.zero_grad()
    step(model, optimizer, 1)


@on_ranks(2)
def test_a_thread_that_fails_on_one_rank_is_told_on_all() -> None:
    model, optimizer = warm()
    failing = patch.object(step_in_backward, "own_step", lambda _view: fail) if dist.get_rank() else nullcontext()
    with failing:
        told = refusal(step, model, optimizer, 1, error=RankError)
    assert "a step in backward failed (rank 1: RuntimeError: PlannedError: as planned" in told
    assert "load a checkpoint" in told
    assert not [each for each in threading.enumerate() if each.name.startswith("step in backward")]
    with pytest.raises(ScheduleError, match="load a checkpoint"):
        loss_of(model, 2)


@on_ranks(2)
def test_a_backward_that_fails_before_any_step_leaves_an_ordinary_loop() -> None:
    model, optimizer = build()
    with pytest.raises(PlannedError), optimizer.step_in_backward():
        fail()
    step(model, optimizer, 0)
