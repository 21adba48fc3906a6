"""Optimizers whose step runs on local tensors: what stepping DTensors gives, and seen as DTensors by all."""

import copy
import io
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ShardOperationError
from tests.support.api_net import Layer, Net, backward, batches, build, largest_difference, mesh, weights
from tests.support.on_ranks import fixed_seed, on_ranks, refusal, same_on_ranks

Params = Iterable[Any]
Make = Callable[[Params], torch.optim.Optimizer]
Deed = Callable[[MegatronFSDP, Any], None]
"""What is done with a model and its optimizer before a step."""
optim = torch.optim

VARIANTS: dict[str, Make] = {
    "adamw": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adamw foreach": lambda params: optim.AdamW(params, lr=1e-2, amsgrad=True, maximize=True, foreach=True),
    "adamw fused": lambda params: optim.AdamW(params, lr=1e-2, weight_decay=0.1, amsgrad=True, fused=True),
    "adamw tensor lr": lambda params: optim.AdamW(params, lr=torch.tensor(1e-2)),
    "adam": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "adam foreach": lambda params: optim.Adam(params, lr=1e-2, weight_decay=0.1, foreach=True),
    "sgd": lambda params: optim.SGD(params, lr=0.1, weight_decay=0.01),
    "sgd momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd foreach": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3, maximize=True, foreach=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.2),
    "adagrad foreach": lambda params: optim.Adagrad(params, lr=0.1, weight_decay=0.1, foreach=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=1e-2, momentum=0.9, centered=True),
    "rmsprop foreach": lambda params: optim.RMSprop(params, lr=1e-2, momentum=0.5, foreach=True),
    "adadelta": lambda params: optim.Adadelta(params, lr=1.0, weight_decay=0.1),
    "adadelta foreach": lambda params: optim.Adadelta(params, lr=1.0, foreach=True),
    "nadam": lambda params: optim.NAdam(params, lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True),
    "nadam foreach": lambda params: optim.NAdam(params, lr=1e-2, foreach=True),
    "radam": lambda params: optim.RAdam(params, lr=1e-2, weight_decay=0.1),
    "radam foreach": lambda params: optim.RAdam(params, lr=1e-2, foreach=True),
    "adamax": lambda params: optim.Adamax(params, lr=1e-2, weight_decay=0.1),
    "adamax foreach": lambda params: optim.Adamax(params, lr=1e-2, foreach=True),
    "asgd": lambda params: optim.ASGD(params, lr=0.1, t0=1.0, weight_decay=0.1),
    "asgd foreach": lambda params: optim.ASGD(params, lr=0.1, t0=1.0, foreach=True),
}
"""Each optimizer that steps locally, by torch's loop and by its lists, with options that take other branches."""


def tight() -> nn.Module:
    """A network whose weights lie side by side without gaps; 6 parameters. (samples, 5) -> (samples, 3)."""
    with fixed_seed(2):
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def odd() -> nn.Module:
    """A weight used twice, a parameter without dimensions, a frozen one and one that is never used."""
    net = build(1)
    net.layers[1].linear.weight = net.layers[0].linear.weight  # type: ignore[union-attr]
    net.gain, net.unused = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2, 2))
    net.head.bias.requires_grad_(False)
    return net


def bf16() -> Net:
    return build().to(torch.bfloat16)


def wrap(build_model: Callable[[], nn.Module], strategy: int) -> MegatronFSDP:
    return fully_shard_model(build_model(), mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)


def one_unit(model: nn.Module, strategy: int) -> MegatronFSDP:
    return fully_shard_model(model, mesh(), fsdp_unit_modules=[type(model)], zero_dp_strategy=strategy)


def connect(model: MegatronFSDP, make: Make, on_dtensors: bool = False) -> torch.optim.Optimizer:
    """A connected optimizer; with `on_dtensors` a hook puts the optimizer itself back instead of its proxy."""
    optimizer = fully_shard_optimizer(make([param for param in model.parameters() if param.requires_grad]))
    if on_dtensors:
        optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, *args[1:]), kwargs))
    return optimizer


def is_stepped_locally(args: tuple[Any, ...]) -> bool:
    """Whether what torch's code gets as its optimizer shows plain tensors."""
    return all(type(param) is Tensor for group in args[0].param_groups for param in group["params"])


@pytest.mark.full(short=["build-3-3"])
@pytest.mark.parametrize(("build_model", "strategy", "num_ranks"), [(build, 3, 3), (odd, 1, 2), (odd, 0, 2)])
@on_ranks()
def test_a_local_step_is_that_of_one_process(build_model: Callable[[], nn.Module], strategy: int) -> None:
    """Three steps under a schedule, after which state lies as its parameter, alike on all ranks."""
    model = wrap(build_model, strategy)
    start = [param.detach().clone() for param in model.parameters()]
    for name, make in VARIANTS.items():
        with torch.no_grad():
            for param, value in zip(model.parameters(), start, strict=True):
                param.copy_(value)
        reference = build_model()
        optimizer, other = (
            connect(model, make),
            make([param for param in reference.parameters() if param.requires_grad]),
        )
        took: list[bool] = []
        optimizer.register_step_pre_hook(lambda _own, args, _kwargs, took=took: took.append(is_stepped_locally(args)))
        schedules = [optim.lr_scheduler.StepLR(each, step_size=2, gamma=0.5) for each in (optimizer, other)]
        for batch in batches(3):
            for net, each, schedule in zip((model, reference), (optimizer, other), schedules, strict=True):
                each.zero_grad()
                backward(net, batch)
                each.step()
                schedule.step()
        assert took == [True] * 3, name
        assert largest_difference(weights(model), weights(reference)) <= 2e-5, name
        keys = []
        for param in model.parameters():
            state = optimizer.state.get(param, {})
            keys.append(sorted(state))
            for key, value in state.items():
                assert isinstance(value, DTensor) == (key not in ("step", "mu", "eta", "mu_product")), (name, key)
                if isinstance(value, DTensor):
                    assert (value.placements, value.shape) == (param.placements, param.shape), (name, key)
        same_on_ranks(keys)


# ---- who sees what ---------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_hooks_and_closures_see_dtensors() -> None:
    model = wrap(build, 3)
    optimizer = VARIANTS["adamw"](model.parameters())
    found: dict[str, list[int]] = {}

    def look(name: str) -> None:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        state = [each["exp_avg"] for each in optimizer.state.values()]
        assert all(isinstance(each, DTensor) for each in (*params, *state))
        assert optimizer.state.keys() <= set(params)
        found.setdefault(name, []).append(len(state))

    def hook(name: str) -> Any:
        def called(own: Any, _args: Any, _kwargs: Any) -> None:
            assert own is optimizer
            look(name)

        return called

    for time in ("early", "late"):
        optimizer.register_step_pre_hook(hook(f"pre, {time}"))
        optimizer.register_step_post_hook(hook(f"post, {time}"))
        if time == "early":
            fully_shard_optimizer(optimizer)
    for batch in batches(2):

        def closure(batch: Any = batch) -> float:
            look("closure")
            optimizer.zero_grad()
            return backward(model, batch)

        optimizer.step(closure)
    count = len(list(model.parameters()))
    before = {name: [0, count] for name in ("pre, early", "pre, late", "closure")}
    assert found == before | {name: [count, count] for name in ("post, early", "post, late")}


@on_ranks(2)
def test_a_step_that_fails_leaves_everything_as_it_was() -> None:
    """Steps that fail in a closure, and in torch's code half way; then as if nothing had happened."""
    runs = []
    for fails in (True, False):
        model = wrap(build, 3)
        optimizer = connect(model, VARIANTS["adamw foreach"])
        for number, batch in enumerate(batches(3)):
            optimizer.zero_grad()
            backward(model, batch)
            if fails:
                options = optimizer.param_groups[0]
                rate, options["lr"] = options["lr"], torch.tensor(options["lr"])
                with pytest.raises(RuntimeError):  # in the middle of collecting parameters and state
                    optimizer.step()
                if number != 1:
                    with pytest.raises(ZeroDivisionError):
                        optimizer.step(lambda: 1 / 0)
                options["lr"] = rate
                held = [*options["params"], *(each["exp_avg"] for each in optimizer.state.values())]
                assert all(isinstance(each, DTensor) for each in held)
            optimizer.step()
        runs.append(weights(model))
    assert largest_difference(*runs) == 0.0


@on_ranks(2)
def test_state_that_is_not_cut_as_its_parameter_is_refused_as_ever() -> None:
    found = set()
    for on_dtensors in (False, True):
        model = wrap(build, 3)
        optimizer = connect(model, VARIANTS["adamw"], on_dtensors)
        backward(model, next(batches(1)))
        optimizer.step()
        for param, state in optimizer.state.items():
            state["exp_avg"] = torch.zeros(param.shape)
        found.add(refusal(optimizer.step, error=ShardOperationError))
    assert len(found) == 1


# ---- writes, and loss scaling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "dtype"), [(1, torch.float32), (3, torch.bfloat16)])
@on_ranks(2)
def test_writes_of_a_local_step_are_noticed_at_the_next_forward(strategy: int, dtype: torch.dtype) -> None:
    outputs = []
    inputs = torch.ones(2, 5, dtype=dtype)
    for on_dtensors in (False, True):
        model = wrap(build if dtype == torch.float32 else bf16, strategy)
        optimizer: Any = connect(model, lambda params: optim.SGD(params, lr=1.0), on_dtensors)
        backward(model, next(batches(1)))
        before = model(inputs).detach().clone()
        optimizer.step(install_optimized_model_weights=False)
        outputs.append(model(inputs).detach())
    assert (outputs[0] - before).abs().max() > 1e-2
    assert torch.equal(*outputs)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_an_infinite_gradient_of_one_rank_alone_skips_the_step_on_all(strategy: int) -> None:
    """Of a replica or a shard, as clipping by hand may leave it."""
    model = wrap(build, strategy)
    optimizer = connect(model, VARIANTS["adamw fused"], True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = weights(model)
    ((inputs, _),) = batches(1)
    scaler.scale(model(inputs).square().mean()).backward()
    if torch.distributed.get_rank() == 1:
        for param in optimizer.param_groups[0]["params"]:  # some have no elements here
            param.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert largest_difference(before, weights(model)) == 0.0


@on_ranks(2)
def test_a_gradient_is_held_by_its_parameter_alone_after_a_step() -> None:
    model = wrap(build, 0)
    optimizer = connect(model, VARIANTS["adamw fused"])
    for batch in batches(2):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
    grads = [param.grad for param in model.parameters()]
    assert [sys.getrefcount(grad._local_tensor) - 1 for grad in grads] == [1] * len(grads)


# ---- what users do between steps -------------------------------------------------------------------------------------


def leave_one_out(optimizer: Any) -> None:
    optimizer.param_groups[0]["params"][4].grad = None


def set_back_one_number(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][2]]["step"].zero_()


def replace_one_moment(optimizer: Any) -> None:
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["exp_avg"] = state["exp_avg"] * 0.5


def forget_one_state(optimizer: Any) -> None:
    del optimizer.state[optimizer.param_groups[0]["params"][3]]


def replace_one_gradient(optimizer: Any) -> None:
    param = optimizer.param_groups[0]["params"][0]
    param.grad = param.grad * 2.0


def two_groups(optimizer: Any) -> None:
    params = optimizer.param_groups[0]["params"]
    if len(optimizer.param_groups) == 1:
        optimizer.param_groups.append({**optimizer.param_groups[0], "params": params[1::2], "lr": 3e-2})
        optimizer.param_groups[0]["params"] = params[::2]


def halve_one_moment(optimizer: Any) -> None:
    optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg_sq"].mul_(0.5)


def load_from_a_file(optimizer: Any) -> None:
    """Each number of steps has a memory of its own then."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    optimizer.load_state_dict(torch.load(file))


DEEDS = (
    leave_one_out,
    set_back_one_number,
    replace_one_moment,
    forget_one_state,
    replace_one_gradient,
    two_groups,
    load_from_a_file,
    halve_one_moment,
)


def end_after(
    deed: Deed, at: Sequence[int], optimizer: Any, model: MegatronFSDP, steps: int
) -> list[dict[str, Tensor]]:
    """What each parameter and its state are after some steps, before some of which something is done."""
    for number, batch in enumerate(batches(steps)):
        optimizer.zero_grad()
        backward(model, batch)
        if number in at:
            deed(model, optimizer)
        optimizer.step()
    return [
        {
            key: (value.to_local() if isinstance(value, UnevenDTensor) else value).detach().clone()
            for key, value in {"param": param, **optimizer.state.get(param, {})}.items()
            if isinstance(value, Tensor)
        }
        for param in model.parameters()
    ]


def assert_same(ends: Iterable[list[dict[str, Tensor]]]) -> None:
    """Every weight and all state are equal between local steps and DTensors."""
    for left, right in zip(*ends, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize(
    ("deed", "variant", "build_model"),
    [(deed, *(("adamw fused", odd) if number % 2 else ("adamw", tight))) for number, deed in enumerate(DEEDS)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@on_ranks(2)
def test_what_is_done_between_steps_has_the_effect_that_it_has_on_dtensors(
    variant: str, build_model: Callable[[], nn.Module], deed: Callable[[Any], None]
) -> None:
    model = one_unit(build_model(), 3)
    start = [param.detach().clone() for param in model.parameters()]
    ends = []
    for on_dtensors in (False, True):
        with torch.no_grad():
            for param, value in zip(model.parameters(), start, strict=True):
                param.copy_(value)
        optimizer = connect(model, VARIANTS[variant], on_dtensors)
        ends.append(end_after(lambda _model, own: deed(own), (2, 3), optimizer, model, 5))
    assert_same(ends)
    steps = same_on_ranks([end["step"].item() for end in ends[0] if "step" in end])
    wanted = {"leave_one_out": {3.0, 5.0}, **{key: {2.0, 5.0} for key in ("set_back_one_number", "forget_one_state")}}
    assert set(steps) - {0.0} == wanted.get(deed.__name__, {5.0})  # 0: blank state, of what is never used


@pytest.mark.parametrize("deed", [leave_one_out, replace_one_gradient])
@on_ranks(3)
def test_a_first_step_may_leave_out_what_later_ones_join(deed: Callable[[Any], None]) -> None:
    ends = []
    for on_dtensors in (False, True):
        model = one_unit(tight(), 3)
        optimizer = connect(model, VARIANTS["adamw"], on_dtensors)
        ends.append(end_after(lambda _model, own: deed(own), (0, 3), optimizer, model, 5))
    assert_same(ends)


@on_ranks(2)
def test_numbers_that_a_file_has_set_apart_are_counted_apart_from_then_on() -> None:
    """One number of steps is set after the load, when no step has joined the states yet, and back after two steps."""
    ends = []
    for on_dtensors in (False, True):
        model = one_unit(tight(), 0)
        optimizer: Any = connect(model, VARIANTS["adamw"], on_dtensors)

        def change(_model: Any, own: Any) -> None:
            last = own.state[own.param_groups[0]["params"][-1]]
            if last["step"] == 2:
                load_from_a_file(own)
                own.state[own.param_groups[0]["params"][-1]]["step"].fill_(7.0)
            else:
                last["step"].fill_(4.0)

        ends.append(end_after(change, (2, 4), optimizer, model, 6))
    assert_same(ends)
    assert {end["step"].item() for end in ends[0]} == {6.0}


# ---- neighbours ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "num_ranks"), [(0, 2), (2, 3), (3, 3)])
@on_ranks()
def test_neighbours_are_stepped_as_one_tensor(strategy: int) -> None:
    """From the first step on and after a load, with state in one memory; on 3 ranks the layout has a gap."""
    model = one_unit(tight(), strategy)
    optimizer = connect(model, VARIANTS["adamw"])
    shown: list[list[int]] = []
    optimizer.register_step_pre_hook(
        lambda _own, args, _kwargs: shown.append([param.numel() for param in args[0].param_groups[0]["params"]])
    )
    elements = sum(param.to_local().numel() for param in model.parameters())
    for number, batch in enumerate(batches(4)):
        if number == 2:
            load_from_a_file(optimizer)
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()
        for key in ("exp_avg", "exp_avg_sq"):
            storages = {
                state[key].to_local().untyped_storage()._cdata: state[key].to_local().untyped_storage().nbytes()
                for state in optimizer.state.values()
                if state[key].to_local().numel()
            }
            assert (len(storages), sum(storages.values())) == (len(shown[-1]), 4 * elements)
    assert [sum(sizes) for sizes in shown] == [elements] * 4
    assert {len(sizes) for sizes in shown} <= ({1} if torch.distributed.get_world_size() == 2 else {1, 2})
    numbers = {state["step"].untyped_storage()._cdata for state in optimizer.state.values()}
    assert len(numbers) == len(shown[-1])


@on_ranks(2)
def test_states_stay_where_they_are_and_every_write_is_noticed() -> None:
    """After a state dict, too; numbers of the user's own are left alone; each step raises every version counter."""
    model = one_unit(tight(), 3)
    optimizer = connect(model, VARIANTS["adamw"])
    params = list(model.parameters())
    own = {param: torch.tensor(1.0) for param in params}
    found = []
    for number, batch in enumerate(batches(4)):
        optimizer.zero_grad()
        backward(model, batch)
        versions = [param.to_local()._version for param in params]
        optimizer.step()
        if number < 3:
            states = [optimizer.state[param] for param in params]
            found.append([(each["step"].data_ptr(), each["exp_avg"].to_local().data_ptr()) for each in states])
        assert all(param.to_local()._version > seen for param, seen in zip(params, versions, strict=True))
        optimizer.state_dict()
        if number == 2:
            for param, value in own.items():
                optimizer.state[param]["own"] = value
    assert found[0] == found[1] == found[2]
    assert all(optimizer.state[param]["own"] is value for param, value in own.items())
    assert {state["step"].item() for state in optimizer.state.values()} == {4.0}


@on_ranks(2)
def test_a_number_that_a_hook_sets_after_another_has_looked_stays_set() -> None:
    ends = []
    for on_dtensors in (False, True):
        model = one_unit(tight(), 3)
        optimizer: Any = connect(model, VARIANTS["adamw"])
        optimizer.register_step_pre_hook(lambda _own, args, _kwargs: args[0].param_groups and None)

        def change(own: Any, _args: Any, _kwargs: Any) -> None:
            if own.state and own.state[own.param_groups[0]["params"][0]]["step"] == 2:
                set_back_one_number(own)

        optimizer.register_step_pre_hook(change)
        if on_dtensors:
            optimizer.register_step_pre_hook(lambda own, args, kwargs: ((own, *args[1:]), kwargs))
        ends.append(end_after(lambda *_: None, (), optimizer, model, 4))
    assert_same(ends)
    assert {end["step"].item() for end in ends[0]} == {2.0, 4.0}


@on_ranks(2)
def test_tensors_of_nobodys_model_and_gradients_that_are_cast_are_stepped_one_by_one() -> None:
    model = one_unit(tight(), 3)
    params = list(model.parameters())
    other = nn.Parameter(torch.zeros_like(params[0]))
    other.grad = torch.ones_like(other)
    optimizer = optim.AdamW([*params, other], lr=0.5)  # not connected
    backward(model, next(batches(1)))
    optimizer.step()
    assert torch.allclose(other.to_local(), torch.tensor(-0.5))  # type: ignore[attr-defined]

    model = fully_shard_model(
        tight(),
        mesh(),
        fsdp_unit_modules=[nn.Sequential],
        mixed_precision_policy=MixedPrecisionPolicy(main_grads_dtype=torch.float64),
    )
    connected = connect(model, VARIANTS["adamw"])
    for batch in batches(2):
        backward(model, batch)
        connected.step()
    held = [state["exp_avg"].to_local() for state in connected.state.values()]
    filled = [each for each in held if each.numel()]
    assert len({each.untyped_storage()._cdata for each in filled}) == len(filled) > 1


@on_ranks(1)
def test_what_is_large_is_stepped_by_itself() -> None:
    """A weight of 1.5 MiB between small ones, which are joined up to 1 MiB."""
    widths = [*[64] * 3, 6144, *[64] * 3]
    layers = [nn.Linear(inputs, outputs, bias=False) for inputs, outputs in itertools.pairwise(widths)]
    for strategy in (0, 3):
        model = one_unit(copy.deepcopy(nn.Sequential(*layers)), strategy)
        optimizer = connect(model, VARIANTS["adamw fused"])
        shown: list[int] = []
        optimizer.register_step_pre_hook(
            lambda _own, args, _kwargs, shown=shown: shown.extend(
                param.numel() for param in args[0].param_groups[0]["params"]
            )
        )
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        assert shown == [2 * 64 * 64, 64 * 6144, 6144 * 64, 2 * 64 * 64]


@on_ranks(3)
def test_state_is_in_the_order_of_parameters_on_every_rank() -> None:
    """Numbers of the parameters with state in the order of the optimizer's state, and of its state dict."""
    model = wrap(odd, 3)
    optimizer: Any = connect(model, VARIANTS["adamw"])
    numbers = {param: number for number, param in enumerate(optimizer.param_groups[0]["params"])}
    backward(model, next(batches(1)))
    optimizer.step()
    order = [numbers[param] for param in optimizer.state]
    saved = list(optimizer.state_dict()["state"])
    assert order == sorted(order)
    assert saved == sorted(saved)
    assert set(order) < set(saved)  # which has blank state of the parameter that was not used
