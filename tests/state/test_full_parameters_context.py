"""Full parameters inside a block: what modules hold, what writes do, and that everything is put back."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError, ScheduleError
from tests.support.api_net import (
    build,
    gradients,
    largest_difference,
    mesh,
    run_batch,
    summed_gradients,
    train,
    weights,
    wrap,
)
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks, same_on_ranks
from tests.support.zoo import MODEL_CASES, ModelName

BF16 = MixedPrecisionPolicy(main_params_dtype=torch.float32)
X = torch.ones(2, 5)


def full_names(module: nn.Module) -> set[str]:
    return {name for name, param in module.named_parameters() if not isinstance(param, DTensor)}


def difference_after_training(model: MegatronFSDP, reference: nn.Module, first: int = 0) -> float:
    """Two more updates of each; the largest difference of a weight afterwards."""
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        if isinstance(each, MegatronFSDP):
            fully_shard_optimizer(optimizer)
        train(each, optimizer, 2, first=first)
        optimizer.zero_grad()
    return largest_difference(weights(model), weights(reference))


# ---- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "name"), list(enumerate(["tied", "odd_shapes", "scalars", "partly_frozen"])))
@on_ranks(3)
def test_inside_modules_hold_full_plain_parameters(strategy: int, name: ModelName) -> None:
    case = MODEL_CASES[name]
    with fixed_seed(0):
        module = case.build()
    expected = weights(module)
    model = fully_shard_model(module, fsdp_unit_modules=list(case.unit_classes), zero_dp_strategy=strategy)
    sharded = dict(module.named_parameters())
    with model.full_parameters_context():
        assert_equal_tensors(weights(module), expected)
        assert {type(param) for param in module.parameters()} == {nn.Parameter}
        assert not any(param.requires_grad for param in module.parameters())
    after = dict(module.named_parameters())
    assert all(after[key] is sharded[key] for key in sharded)


@on_ranks(2)
def test_the_main_weights_are_shown_or_their_compute_dtype() -> None:
    model = wrap(model=build().bfloat16(), mixed_precision_policy=BF16)
    train(model, fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3)), 1)
    main = weights(model)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in main.values())
    with model.full_parameters_context():
        assert_equal_tensors(weights(model.module), main)
    with model.full_parameters_context(compute_dtype=True):
        assert_equal_tensors(weights(model.module), {name: value.bfloat16() for name, value in main.items()})


@pytest.mark.parametrize("weight_format", ["fp8_compute", "nvfp4"])
@on_ranks(2)
def test_what_compute_uses_is_shown_before_any_forward_and_after_a_change_in_place(weight_format: str) -> None:
    policy = MixedPrecisionPolicy(weight_format=weight_format)
    with fixed_seed(0):
        model = fully_shard_model(nn.Sequential(nn.Linear(8, 40)), mesh(), mixed_precision_policy=policy)
    for factor in (1, 100):
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
        main = weights(model)
        with model.full_parameters_context(compute_dtype=True):
            shown = weights(model.module)
        for name, value in main.items():
            assert (shown[name] - value).abs().max() <= value.abs().max() / 6  # e2m1 rounds 5 to 4 or 6
        model(torch.ones(2, 8))
        with model.full_parameters_context(compute_dtype=True):
            assert_equal_tensors(weights(model.module), shown)


@pytest.mark.unmerged
@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(2)
def test_one_unit_can_be_opened_and_the_model_be_run(strategy: int) -> None:
    model = wrap(strategy)
    net, before = model.module, model.traffic().gathers
    with model.full_parameters_context(net.layers[1]):
        assert full_names(net) == {"layers.1.linear.weight", "layers.1.linear.bias"}
        assert model.traffic().gathers - before == 1
        with torch.no_grad():
            assert torch.equal(net.layers[1](X), build().layers[1](X))
            assert torch.allclose(model(X), build()(X), atol=1e-6)
        with model.full_parameters_context(net.layers[0]):
            assert len(full_names(net.layers)) == 4
    refused = r"unit \(root\) was called with gradients enabled while other units show copies"
    with pytest.raises(ScheduleError, match=refused), model.full_parameters_context(net.layers[1]):
        model(X)
    model.reset()
    assert full_names(net) == set()
    assert difference_after_training(model, build()) <= 1e-6


# ---- writing ---------------------------------------------------------------------------------------------------------


def double(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(2.0)


@pytest.mark.parametrize("strategy", [0, 1, 3])
@on_ranks(3)
def test_what_is_written_is_taken_into_main_and_compute_weights(strategy: int) -> None:
    model, reference = wrap(strategy), build()
    with model.full_parameters_context(writeback=True):
        double(model.module)
    double(reference)
    assert largest_difference(weights(model), weights(reference)) == 0.0
    half = wrap(strategy, build().bfloat16(), mixed_precision_policy=BF16)
    with half.full_parameters_context(writeback=True):
        double(half.module)
    with torch.no_grad():
        assert torch.allclose(model(X), reference(X), atol=5e-6)
        assert torch.allclose(half(X.bfloat16()).float(), reference(X), rtol=0.0, atol=0.1)  # of about 5
    assert difference_after_training(model, reference) <= 5e-6
    with model.full_parameters_context(model.module.layers, writeback=True):
        double(model.module.layers)
    double(reference.layers)
    assert difference_after_training(model, reference, first=2) <= 5e-6


@on_ranks(2)
def test_without_writeback_nothing_is_taken() -> None:
    model = wrap()
    with model.full_parameters_context():
        double(model.module)
    assert largest_difference(weights(model), weights(build())) == 0.0
    assert difference_after_training(model, build()) <= 1e-6


@on_ranks(2)
def test_writes_that_differ_replace_or_fail_are_refused_on_every_rank() -> None:
    model = wrap()
    net, is_second = model.module, dist.get_rank() == 1

    def refused(use: Callable[[], None]) -> str:
        with pytest.raises((MegatronFSDPError, KeyError)) as raised, model.full_parameters_context(writeback=True):
            use()
        return str(raised.value)

    def differ() -> None:
        nn.init.constant_(net.gain, dist.get_rank())

    def replace() -> None:
        if is_second:
            net.gain = nn.Parameter(torch.ones(4))

    def fail() -> None:
        double(net)
        if is_second:
            raise KeyError("of rank 1")

    assert same_on_ranks(refused(differ)).startswith("ranks wrote different values into 1 parameters (first: gain)")
    assert "rank 1: ConfigurationError: gain was replaced inside full_" in same_on_ranks(refused(replace))
    message = refused(fail)
    assert message == "'of rank 1'" if is_second else "rank 1: KeyError: 'of rank 1'" in message
    assert largest_difference(weights(model), weights(build())) == 0.0
    assert full_names(net) == set()
    assert difference_after_training(model, build()) <= 1e-6


@on_ranks(2)
def test_it_is_refused_where_it_cannot_work() -> None:
    model, busy = wrap(), "full_parameters_context was entered inside a forward or backward"

    def refuse(words: str, *modules: nn.Module, **arguments: bool) -> None:
        with pytest.raises((ConfigurationError, ScheduleError), match=f"^{words}"):
            model.full_parameters_context(*modules, **arguments).__enter__()

    refuse("a Linear owns no parameter of this model", nn.Linear(2, 2))
    refuse("writeback=True with compute_dtype=True would round", writeback=True, compute_dtype=True)
    with model.full_parameters_context():
        refuse(r"unit \(root\) shows its full parameters already")
    hook = model.module.head.register_forward_hook(lambda *_: refuse(busy))
    output = model(X)
    hook.remove()
    output.register_hook(lambda _: refuse(busy))
    output.sum().backward()
    assert full_names(model.module) == set()


@on_ranks(2)
def test_gradients_that_wait_for_their_reduction_or_a_step_are_left_alone() -> None:
    model = wrap()
    run_batch(model, 0)
    with model.full_parameters_context(writeback=True):
        pass
    with model.no_sync():
        run_batch(model, 1)
    with model.full_parameters_context():
        pass
    run_batch(model, 2)
    assert largest_difference(gradients(model), summed_gradients(0, 1, 2)) <= 1e-6
