"""Optimizers on sharded parameters: groups, state, custom classes, foreign loops, each against one process; routes."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from megatron_fsdp import (
    ChainedOptimizer,
    MixedPrecisionPolicy,
    experimental,
    fully_shard,
    fully_shard_model,
    fully_shard_optimizer,
    steps_whole_tensors,
)
from megatron_fsdp.automodel import AutoModelForCausalLM, DDPConfig, FSDP2Config, MegatronFSDPConfig, connect_optimizer
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.optimizer import _has_warned
from tests.support.api_net import (
    Layer,
    backward,
    batches,
    build,
    largest_difference,
    mesh,
    own_part,
    train,
    weights,
    wrap,
)
from tests.support.on_ranks import on_ranks
from tests.support.optimizer_reference import Lion, flat, matrices, three_steps

TOLERANCE = 2e-6
"""For float32 weights after a few steps: ranks add up gradients in another order than one process does."""


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adam_fused": lambda params: torch.optim.Adam(params, lr=1e-2, fused=True),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=1e-2),
    "lion": Lion,
}


GROUP_NAMES = [["head.weight", "layers.1.linear.weight"], ["layers.1.linear.bias", "gain"], ["layers.0.linear.weight"]]
"""Not in model order, and neither head.bias nor layers.0.linear.bias is in any group."""

GROUP_OPTIONS: list[dict[str, Any]] = [
    {"lr": 2e-2, "weight_decay": 0.3, "betas": (0.8, 0.9), "label": "decay"},
    {"lr": 1e-2, "weight_decay": 0.0, "label": "no decay"},
    {"eps": 1e-3},
]


def grouped_optimizer(model: nn.Module) -> torch.optim.AdamW:
    params = dict(model.named_parameters())
    groups = [
        {"params": [params[name] for name in names], **options}
        for names, options in zip(GROUP_NAMES, GROUP_OPTIONS, strict=True)
    ]
    return torch.optim.AdamW(groups, lr=5e-3, weight_decay=0.05)


def assert_trained_alike(
    model: Any, optimizer: Any, alone: nn.Module, expected: Any, steps: int = 3, first: int = 0, atol: float = TOLERANCE
) -> None:
    """Train a sharded model and one process on the same batches, and compare all weights."""
    train(model, optimizer, steps, first=first)
    train(alone, expected, steps, first=first)
    assert largest_difference(weights(model), weights(alone)) <= atol


def options_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_groups_keep_order_and_options_and_parameters_in_none_stay_alone(strategy: int) -> None:
    model, reference = build(), build()
    expected, optimizer = grouped_optimizer(reference), grouped_optimizer(model)
    groups_before = optimizer.param_groups
    wrapped, same = fully_shard(model, optimizer, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    assert same is optimizer
    assert same.param_groups is groups_before
    names = [[wrapped.param_to_name[param] for param in group["params"]] for group in optimizer.param_groups]
    assert names == GROUP_NAMES
    assert options_of(optimizer) == options_of(expected)
    assert all(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
    assert len(optimizer.state) == 0
    before = weights(wrapped)
    assert_trained_alike(wrapped, optimizer, reference, expected, 4)
    after = weights(wrapped)
    left_alone = {name for name in after if torch.equal(after[name], before[name])}
    assert left_alone == {"head.bias", "layers.0.linear.bias"}


@pytest.mark.parametrize(("name", "strategy"), [("adam_fused", 2), ("sgd", 1), ("lion", 3), ("adamw", 0)])
@on_ranks(2)
def test_state_that_exists_is_sharded_and_training_goes_on(name: str, strategy: int) -> None:
    model, reference = build(), build()
    optimizer, expected = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](reference.parameters())
    train(model, optimizer, 2)
    train(reference, expected, 2)
    wrapped, _ = fully_shard(model, optimizer, mesh(), fsdp_unit_modules=[Layer], zero_dp_strategy=strategy)
    steps = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert steps == ({2.0} if name.startswith("adam") else set())
    assert len(optimizer.state) == len(list(wrapped.parameters()))
    for param, state in optimizer.state.items():
        alike = [value for value in state.values() if getattr(value, "shape", None) == param.shape]
        assert alike
        assert all(value.to_local().shape == param.to_local().shape for value in alike)
    assert_trained_alike(wrapped, optimizer, reference, expected, first=2)


# ---- kinds of optimizers ---------------------------------------------------------------------------------------------


def check_kinds(strategy: int, connect: bool, tolerance: float) -> None:
    """Compare weights after three steps with one process, and what compute sees of them."""
    for name, make in OPTIMIZERS.items():
        model, reference = wrap(strategy), build()
        optimizer, expected = make(model.parameters()), make(reference.parameters())
        if connect:
            fully_shard_optimizer(optimizer)
        assert_trained_alike(model, optimizer, reference, expected, atol=tolerance)
        inputs = next(batches(1, first=9))[0]
        assert (model(inputs) - reference(inputs)).abs().max().item() <= tolerance, name


@pytest.mark.parametrize(("strategy", "connect"), [(0, False), (1, True), (3, False)])
@on_ranks(2)
def test_optimizers_train_as_on_one_process(strategy: int, connect: bool) -> None:
    check_kinds(strategy, connect, 5 * TOLERANCE)


@pytest.mark.parametrize("connect", [True, False])
@on_ranks(1)
def test_one_rank_trains_bit_for_bit_as_without_sharding(connect: bool) -> None:
    check_kinds(3, connect, 0.0)


@on_ranks(2)
def test_an_optimizer_may_be_built_after_a_forward() -> None:
    model, reference = wrap(3), build()
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 5))
    model.train()
    model(torch.ones(2, 5)).sum().backward()
    model.zero_grad()
    params = list(model.parameters())
    assert all(isinstance(p, DTensor) for p in params)
    expected = OPTIMIZERS["adamw"](reference.parameters())
    assert_trained_alike(model, fully_shard_optimizer(OPTIMIZERS["adamw"](params)), reference, expected)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


class _OwnStep(torch.optim.AdamW):
    """Nobody knows what a step of its own needs."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


def _unknown(model: nn.Module) -> torch.optim.Optimizer:
    return _OwnStep(model.parameters())


def _unknown_in_chain(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return ChainedOptimizer(_OwnStep([first]), torch.optim.AdamW(others))


@pytest.mark.parametrize(
    ("optimizer_of", "loads_weights", "warned"),
    [
        *((_adamw, True, 0), (_unknown, True, 1), (_unknown, False, 0), (_unknown_in_chain, True, 1)),
        (_unknown, "and installs them", 1),
    ],
)
@on_ranks(2)
def test_moments_that_begin_at_zero_are_warned_of(
    optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], loads_weights: bool | str, warned: int, tmp_path: Path
) -> None:
    """As after `dcp.load`, which fills weights, but has no state to fill of an optimizer that it does not know."""
    folder = str(tmp_path)
    model = build(0)
    sharded, optimizer = fully_shard(model, optimizer_of(model), mesh(), "dp", fsdp_unit_modules=[Layer])
    state = {"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}
    if loads_weights:
        dcp.save(state, checkpoint_id=folder)
        dcp.load(state, checkpoint_id=folder)
    if isinstance(loads_weights, str):
        sharded.load_state_dict(state["model"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.load_state_dict(state["optimizer"])
    told = [str(warning.message) for warning in caught]
    assert len(told) == (warned if dist.get_rank() == 0 else 0)  # the first rank says it for all
    assert all("moments start from zero; load with megatron_fsdp.checkpoint.load" in text for text in told)


# ---- optimizers that would train nothing -----------------------------------------------------------------------------


class KeepsCopies(torch.optim.SGD):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, lr=0.1)
        self.mine = [param for group in self.param_groups for param in group["params"]]


@on_ranks(2)
def test_an_optimizer_that_would_train_nothing_says_so() -> None:
    module = build()
    forgotten = torch.optim.AdamW(module.parameters())
    model = fully_shard_model(module, mesh(), fsdp_unit_modules=[Layer])
    backward(model, next(batches(1)))
    with pytest.raises(ConfigurationError, match=r"^AdamW holds \S+ in its param_groups as it was before the model"):
        forgotten.step()
    torch.optim.AdamW(model.parameters()).step()  # not connected, which trains all the same
    module = build()
    before = list(module.parameters())
    with pytest.raises(
        ConfigurationError, match=r"^KeepsCopies keeps \S+ in its attribute mine, where sharding cannot"
    ):
        fully_shard(module, KeepsCopies(module.parameters()), mesh(), fsdp_unit_modules=[Layer])
    assert all(found is param for found, param in zip(module.parameters(), before, strict=True))


@on_ranks(2)
def test_optimizers_of_others_step_as_ever() -> None:
    """Optimizers that hold nothing of a sharded model, or something that somebody else trains."""
    module = build()
    average = torch.optim.swa_utils.AveragedModel(module)
    of_average = torch.optim.SGD(average.parameters(), lr=0.1)
    tied = next(module.parameters())
    of_tied = torch.optim.SGD([tied], lr=0.1)
    of_deleted = torch.optim.SGD(module.parameters(), lr=0.1)
    model = wrap(model=module)
    of_average.step()
    tied.grad = torch.ones_like(tied)
    before = tied.detach().clone()
    of_tied.step()
    assert torch.equal(tied, before - 0.1)
    del model, module
    gc.collect()
    of_deleted.step()


# ---- several models --------------------------------------------------------------------------------------------------


def adversarial_loss(models: Iterable[nn.Module], inputs: Tensor) -> Tensor:
    generator, discriminator = models
    made = generator(inputs)
    return discriminator(torch.cat([made, inputs[:, :2]], dim=1)).square().mean() + made.abs().mean()


def clip(params: list[nn.Parameter]) -> float:
    return float(nn.utils.clip_grad_norm_(params, 0.1))


@pytest.mark.parametrize(("strategies", "defers"), [((3, 0), False), ((1, 3), True)])
@on_ranks(2)
def test_one_optimizer_trains_two_models(strategies: tuple[int, int], defers: bool) -> None:
    references = (build(0), build(1))
    models = [wrap(strategy, build(seed)) for seed, strategy in enumerate(strategies)]

    def adamw(both: Iterable[nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.AdamW([param for model in both for param in model.parameters()], lr=1e-2)

    other, optimizer = adamw(references), fully_shard_optimizer(adamw(models))
    worst = 0.0
    for step in range(4):
        for microbatch in range(2):
            inputs, _ = next(batches(1, 2 * step + microbatch))
            adversarial_loss(references, inputs).backward()
            with contextlib.ExitStack() as stack:
                if defers:
                    for model in models:
                        stack.enter_context(model.no_sync())
                adversarial_loss(models, own_part(inputs)).backward()
        if not defers:
            wanted, found = (
                clip([param for model in both for param in model.parameters()]) for both in (references, models)
            )
            worst = max(worst, abs(wanted - found))
        for each in (other, optimizer):
            each.step()
            each.zero_grad()
        if step == 1:
            saved = optimizer.state_dict()
            optimizer = fully_shard_optimizer(adamw(models))
            optimizer.load_state_dict(saved)
    differences = [
        largest_difference(weights(model), dict(reference.named_parameters()))
        for model, reference in zip(models, references, strict=True)
    ]
    assert max(worst, *differences) < TOLERANCE


@on_ranks(2)
def test_a_connected_optimizer_is_not_copied() -> None:
    model = wrap(3)
    optimizer = fully_shard_optimizer(torch.optim.AdamW(model.parameters()))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigurationError, match="sharded parameters can be neither copied nor pickled"):
            copied(optimizer)


@on_ranks(2)
def test_an_optimizer_takes_no_second_model_later() -> None:
    models = [wrap(3, build(seed)) for seed in range(2)]
    optimizer = fully_shard_optimizer(torch.optim.SGD(models[0].parameters(), lr=0.1))
    groups = len(optimizer.param_groups)
    for foreign in (list(models[1].parameters()), [nn.Parameter(torch.ones(2))]):
        with pytest.raises(ConfigurationError, match=r"parameter 0 of param_groups\[1\] .* is not a parameter of the"):
            optimizer.add_param_group({"params": foreign})
        assert len(optimizer.param_groups) == groups
    optimizer.param_groups.append({**optimizer.param_groups[0], "params": list(models[1].parameters())})
    with pytest.raises(ConfigurationError, match="was connected before it held parameters of another sharded model"):
        fully_shard_optimizer(optimizer)


# ---- 16-bit main weights ---------------------------------------------------------------------------------------------


class Stochastic(torch.optim.SGD):
    """Says that it rounds stochastically, as torchao's do."""

    bf16_stochastic_round = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.bf16_stochastic_round = True


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def warned_of(connect: Callable[[], Any]) -> list[str]:
    _has_warned.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        connect()
    return [str(each.message) for each in caught if "rounds updates" in str(each.message)]


@on_ranks(2)
def test_an_optimizer_that_rounds_updates_of_16_bit_weights_away_is_warned_of_once_on_one_rank() -> None:
    narrow: dict[str, Any] = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None)}

    def together(dtype: torch.dtype, kind: Any = torch.optim.AdamW, **arguments: Any) -> list[str]:
        module = build().to(dtype)
        return warned_of(lambda: fully_shard(module, kind(module.parameters()), mesh(), **arguments))

    def twice() -> None:
        model = fully_shard_model(build().half(), mesh(), **narrow)
        for _ in range(2):
            fully_shard_optimizer(ChainedOptimizer(torch.optim.SGD(model.parameters())))

    def automodel(kind: Any = MegatronFSDPConfig) -> None:
        transformers = pytest.importorskip("transformers")
        config = kind(backend="gloo")
        model = AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SMALL), distributed_config=config, dtype=torch.bfloat16
        )
        connect_optimizer(model, torch.optim.AdamW(model.parameters()))

    def by_module() -> None:
        module = build().bfloat16()
        sharded = experimental.Placements([0], *([Shard(0)] for _ in range(3)))
        policy = MixedPrecisionPolicy(main_params_dtype=torch.bfloat16)
        with experimental.fully_shard_context("cpu"):
            experimental.fully_shard(module, mesh(), sharded, policy)
        experimental.fully_shard_optimizer(torch.optim.AdamW(module.parameters()))

    told = [together(torch.bfloat16, **narrow), warned_of(twice), warned_of(automodel), warned_of(by_module)]
    told += [warned_of(lambda kind=kind: automodel(kind)) for kind in (FSDP2Config, DDPConfig)]
    if dist.get_rank():
        assert told == [[]] * 6
    else:
        (policy,), (half,), (fields,), (alone,), *torchs = told
        assert alone.endswith("float32: MixedPrecisionPolicy(main_params_dtype=torch.float32)")
        for (of_torch,) in torchs:
            assert "give dtype=torch.float32 to from_pretrained" in of_torch
        assert policy.startswith("AdamW updates weights in bfloat16, which rounds updates of less than about a 500th")
        assert policy.endswith("float32: mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=torch.float32)")
        assert half.startswith("SGD updates weights in float16")
        assert fields.endswith("MegatronFSDPConfig(preserve_fp32_weights=True, grad_reduce_in_fp32=True)")
    assert together(torch.bfloat16) == together(torch.float32, **narrow) == []
    assert together(torch.bfloat16, Stochastic, **narrow) == []


# ---- optimizers around another one -----------------------------------------------------------------------------------


class Around(torch.optim.Optimizer):
    """Wraps another one as Lookahead and accelerate do, without torch's constructor."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups, self.defaults = optimizer.param_groups, optimizer.defaults

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)


class Sam(torch.optim.Optimizer):
    """Wraps another one as SAM does: around its own groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1)


class Bare:
    """Has groups and a step, and nothing that torch's have."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params)}]


@on_ranks(2)
def test_an_optimizer_around_another_is_refused_before_anything_changes() -> None:
    refused = r"^{} wraps another optimizer, {} \({}\), .*fully_shard_optimizer\(optimizer\.{}\)"
    for kind, inner, name in ((Around, "AdamW", "optimizer"), (Sam, "SGD", "base_optimizer")):
        module = build()
        params = list(module.parameters())
        optimizer = kind(torch.optim.AdamW(params)) if kind is Around else Sam(params)
        text = refused.format(kind.__name__, inner, name, name)
        with pytest.raises(ConfigurationError, match=text):
            fully_shard(module, optimizer, mesh(), fsdp_unit_modules=[Layer])
        assert all(left is right for left, right in zip(module.parameters(), params, strict=True))
        model = wrap(model=module)
        wrapping = kind(torch.optim.AdamW(model.parameters())) if kind is Around else Sam(model.parameters())
        with pytest.raises(ConfigurationError, match=text):
            fully_shard_optimizer(wrapping)
        fully_shard_optimizer(getattr(wrapping, name))
    module = build()
    with pytest.raises(ConfigurationError, match=r"Bare has no hooks .* derive it from torch.optim.Optimizer"):
        fully_shard(module, Bare(module.parameters()), mesh())  # type: ignore[arg-type]


@on_ranks(2)
def test_a_wrapper_around_a_connected_optimizer_trains_as_one_process() -> None:
    model, plain = wrap(3), build()
    optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    assert_trained_alike(model, Around(fully_shard_optimizer(optimizer)), plain, Around(expected))


# ---- unmodified optimizers of `pytorch_optimizer`, declared as stepping whole tensors: the bits of one process -------


library = pytest.importorskip("pytorch_optimizer")


@pytest.mark.full(short=["SOAP-2"])
@pytest.mark.parametrize(("name", "num_ranks"), [("SOAP", 2), ("Shampoo", 3)])
@on_ranks()
def test_optimizers_of_a_library_step_as_in_one_process(name: str) -> None:
    kind = steps_whole_tensors(getattr(library, name))
    three_steps(matrices(), lambda params: kind(params, lr=0.01), flat(3), without=2)
