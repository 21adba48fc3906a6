"""Full parameters inside a block: what modules hold, what writes do, and that everything is put back."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.support.api_net import Layer, Net, backward, batches, build, largest_difference, mesh, train, weights
from tests.support.models import MODEL_CASES, ModelName
from tests.support.parity import assert_equal_tensors, fixed_seed

STRATEGIES = [0, 1, 2, 3]
BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32)


def wrap(strategy: int, dtype: torch.dtype = torch.float32, **arguments: Any) -> MegatronFSDP:
    model = build().to(dtype)
    return fully_shard_model(model, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy, **arguments)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def kinds(module: nn.Module) -> dict[str, str]:
    return {name: "sharded" if isinstance(p, DTensor) else "full" for name, p in module.named_parameters()}


def train_both(model: MegatronFSDP, reference: nn.Module, first: int = 0) -> float:
    """Two more updates of each; the largest difference of a weight afterwards."""
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        if isinstance(each, MegatronFSDP):
            fully_shard_optimizer(optimizer)
        train(each, optimizer, 2, first=first)
        optimizer.zero_grad()
    return largest_difference(weights(model), weights(reference))


# ---- reading -------------------------------------------------------------------------------------------------------


def read(strategy: int, name: ModelName) -> tuple[dict[str, Tensor], set[type], bool]:
    case = MODEL_CASES[name]
    with fixed_seed(0):
        module = case.build()
    model = fully_shard_model(module, fsdp_unit_modules=list(case.unit_classes), zero_dp_strategy=strategy)
    sharded = dict(model.module.named_parameters())
    with model.full_parameters_context():
        inside = values(model.module)
        classes = {type(param) for param in model.module.parameters()}
        takes_gradients = any(param.requires_grad for param in model.module.parameters())
    after = dict(model.module.named_parameters())
    assert all(after[key] is sharded[key] for key in sharded)
    return inside, classes, takes_gradients


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", ["tied", "odd_shapes", "scalars", "partly_frozen"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_modules_hold_full_plain_parameters(run_ranks: RunRanks, strategy: int, name: ModelName) -> None:
    with fixed_seed(0):
        expected = values(MODEL_CASES[name].build())
    for inside, classes, takes_gradients in run_ranks(3, read, strategy, name):
        assert_equal_tensors(inside, expected)
        assert classes == {nn.Parameter}
        assert not takes_gradients


def dtypes(compute_dtype: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What is shown after an update, and the main weights."""
    model = wrap(3, torch.bfloat16, mixed_precision_policy=BF16)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    train(model, optimizer, 1)
    with model.full_parameters_context(compute_dtype=compute_dtype):
        return values(model.module), weights(model)


def test_the_main_weights_are_shown_or_their_compute_dtype(run_ranks: RunRanks) -> None:
    for shown, main in run_ranks(2, dtypes, False):
        assert_equal_tensors(shown, main)
        assert any(not torch.equal(value, value.bfloat16().float()) for value in main.values())
    for shown, main in run_ranks(2, dtypes, True):
        assert_equal_tensors(shown, {name: value.bfloat16() for name, value in main.items()})


def one_unit(strategy: int) -> dict[str, Any]:
    model = wrap(strategy)
    net = model.module
    assert isinstance(net, Net)
    before = model.traffic().gathers
    x = torch.ones(2, 5)
    with model.full_parameters_context(net.layers[1]):
        found: dict[str, Any] = {"kinds": kinds(net), "gathers": model.traffic().gathers - before}
        with torch.no_grad():
            found["module"] = largest_difference({"x": net.layers[1](x)}, {"x": build().layers[1](x)})
            found["model"] = largest_difference({"x": model(x)}, {"x": build()(x)})
        with model.full_parameters_context(net.layers[0]):
            found["both"] = kinds(net.layers)
    with pytest.raises(ScheduleError) as raised, model.full_parameters_context(net.layers[1]):
        model(x)
    model.reset()
    found["refused"] = str(raised.value)
    found["after"] = set(kinds(net).values())
    found["trained"] = train_both(model, build())
    return found


@pytest.mark.parametrize("strategy", [1, 3])
def test_one_unit_can_be_opened_and_the_model_be_run(run_ranks: RunRanks, strategy: int) -> None:
    for found in run_ranks(2, one_unit, strategy):
        layer = {"layers.1.linear.weight", "layers.1.linear.bias"}
        assert {name for name, kind in found["kinds"].items() if kind == "full"} == layer
        assert found["gathers"] == 1
        assert set(found["both"].values()) == {"full"}
        assert found["module"] == 0.0
        assert found["model"] <= 1e-6
        assert found["refused"].startswith(
            "unit (root) was called with gradients enabled while other units show copies"
        )
        assert found["after"] == {"sharded"}
        assert found["trained"] <= 1e-6


def state_dict_inside(strategy: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    model = wrap(strategy)
    with model.full_parameters_context():
        state = {name: value.clone() for name, value in model.module.state_dict().items()}
        x = torch.ones(2, 5)
        return state, build().state_dict(), model(x) - build()(x)  # with gradients enabled: there are none to lose


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inside_state_dicts_are_full_and_the_model_runs(run_ranks: RunRanks, strategy: int) -> None:
    for state, expected, difference in run_ranks(2, state_dict_inside, strategy):
        assert_equal_tensors(state, expected)
        assert not difference.any()


# ---- writing -------------------------------------------------------------------------------------------------------


def double(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)


def write(strategy: int, policy: MixedPrecisionPolicy, dtype: torch.dtype) -> list[Any]:
    """Differences after a write, after two updates, and after a write into one unit and two more."""
    model, reference = wrap(strategy, dtype, mixed_precision_policy=policy), build()
    with model.full_parameters_context(writeback=True):
        double(model.module)
    double(reference)
    found: list[Any] = [largest_difference(weights(model), weights(reference)) if dtype == torch.float32 else 0.0]
    x = torch.ones(2, 5)
    with torch.no_grad():
        found.append((model(x.to(dtype)).float() - reference(x)).abs().max().item())
    if dtype != torch.float32:
        return [*found, 0.0, 0.0]
    found.append(train_both(model, reference))
    with model.full_parameters_context(model.module.layers, writeback=True):  # type: ignore[arg-type]
        double(model.module.layers)  # type: ignore[arg-type]
    double(reference.layers)
    found.append(train_both(model, reference, first=2))
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_written_is_taken_into_main_and_compute_weights(run_ranks: RunRanks, strategy: int) -> None:
    for differences in run_ranks(3, write, strategy, MixedPrecisionPolicy(), torch.float32):
        assert differences[0] == 0.0
        assert max(differences) <= 5e-6
    for differences in run_ranks(2, write, strategy, BF16, torch.bfloat16):
        assert max(differences) <= 0.1  # of outputs of about 5 in bfloat16


def without_writeback(strategy: int) -> tuple[float, float]:
    model = wrap(strategy)
    with model.full_parameters_context():
        double(model.module)
    return largest_difference(weights(model), weights(build())), train_both(model, build())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_writeback_nothing_is_taken(run_ranks: RunRanks, strategy: int) -> None:
    for at_once, trained in run_ranks(2, without_writeback, strategy):
        assert at_once == 0.0
        assert trained <= 1e-6


def refused_writes(strategy: int) -> dict[str, Any]:
    model = wrap(strategy)
    net = model.module
    found: dict[str, Any] = {}

    def differ() -> None:
        with torch.no_grad():
            net.gain.fill_(dist.get_rank())  # type: ignore[union-attr, operator]

    def replace() -> None:
        if dist.get_rank() == 1:
            net.gain = nn.Parameter(torch.ones(4))

    def fail() -> None:
        double(net)
        if dist.get_rank() == 1:
            raise KeyError("of rank 1")

    for use in (differ, replace, fail):
        with pytest.raises((ConfigurationError, KeyError)) as raised, model.full_parameters_context(writeback=True):
            use()
        found[use.__name__] = str(raised.value)
    found["untouched"] = largest_difference(weights(model), weights(build()))
    found["kinds"] = set(kinds(net).values())
    found["trained"] = train_both(model, build())
    return found


@pytest.mark.parametrize("strategy", [0, 3])
def test_writes_that_differ_replace_or_fail_are_refused_on_every_rank(run_ranks: RunRanks, strategy: int) -> None:
    first, second = run_ranks(2, refused_writes, strategy)
    assert first["differ"] == second["differ"]
    assert first["differ"].startswith("ranks wrote different values into 1 parameters (first: gain)")
    assert first["replace"] == second["replace"]
    assert "rank 1: gain was replaced inside full_parameters_context" in first["replace"]
    assert "rank 1: 'of rank 1'" in first["fail"]
    assert second["fail"] == "'of rank 1'"
    for found in (first, second):
        assert found["untouched"] == 0.0
        assert found["kinds"] == {"sharded"}
        assert found["trained"] <= 1e-6


def refused_entries() -> dict[str, str]:
    model = wrap(3)
    found: dict[str, str] = {}

    def enter(label: str, *modules: nn.Module, **arguments: bool) -> None:
        with pytest.raises((ConfigurationError, ScheduleError)) as raised:
            model.full_parameters_context(*modules, **arguments).__enter__()
        found[label] = str(raised.value)

    enter("foreign", nn.Linear(2, 2))
    enter("switches", writeback=True, compute_dtype=True)
    with model.full_parameters_context():
        enter("twice")
    hook = model.module.head.register_forward_hook(lambda *_: enter("forward"))  # type: ignore[union-attr, operator]
    output = model(torch.ones(2, 5))
    hook.remove()
    output.register_hook(lambda _: enter("backward"))
    output.sum().backward()
    found["kinds"] = " ".join(sorted(set(kinds(model.module).values())))
    return found


def test_it_is_refused_where_it_cannot_work(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, refused_entries)
    assert first == second
    assert first["foreign"].startswith("a Linear owns no parameter of this model")
    assert first["switches"].startswith("writeback=True with compute_dtype=True would round")
    assert first["twice"].startswith("unit (root) shows its full parameters already")
    assert first["forward"].startswith("full_parameters_context was entered inside a forward or backward")
    assert first["backward"].startswith("full_parameters_context was entered inside a forward or backward")
    assert first["kinds"] == "sharded"


def gradients_survive() -> float:
    """Gradients that wait for their reduction, or for a step, are not disturbed."""
    model, reference = wrap(3), build()
    for each in (model, reference):
        backward(each, next(batches(1)))
    with model.full_parameters_context(writeback=True):
        pass
    with model.no_sync():
        backward(model, next(batches(1, 1)))
    with model.full_parameters_context():
        pass
    backward(model, next(batches(1, 2)))
    for batch in batches(2, 1):
        backward(reference, batch)
    wanted = {name: param.grad for name, param in reference.named_parameters() if param.grad is not None}
    return largest_difference({n: g for n, g in model.full_gradients().items() if g is not None}, wanted)


def test_gradients_under_way_are_left_alone(run_ranks: RunRanks) -> None:
    assert max(run_ranks(2, gradients_survive)) <= 1e-6
