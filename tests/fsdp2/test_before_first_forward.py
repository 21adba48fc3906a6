"""The time between `fully_shard` and the first forward: who shares memory, who joins, what ranks compare."""

import re
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.fsdp2 import fully_shard
from megatron_fsdp.wrap import shard_unit
from tests.fsdp2.test_fully_shard import shard
from tests.support.case import momentum as sgd
from tests.support.doors import assert_like_one_process, assert_same, backward, build, whole, wholes
from tests.support.on_ranks import fixed_seed, on_ranks, refusal
from tests.support.zoo import TinyTransformer

# ---- memory ---------------------------------------------------------------------------------------------------------


@on_ranks(3)
def test_state_dicts_from_before_show_the_memory_of_the_parameters() -> None:
    model, plain = shard(build(tied=True), offload_policy=CPUOffloadPolicy()), build(tied=True)
    kept = [model.state_dict(), get_model_state_dict(model), {"block": model.blocks[1].state_dict()}["block"]]
    copies = {name: value.clone() for name, value in kept[0].items()}
    assert_like_one_process(model, plain)
    wanted = {**plain.state_dict(), **plain.blocks[1].state_dict()}
    for state_dict in kept:
        for name, value in state_dict.items():
            torch.testing.assert_close(value.full_tensor(), wanted[name])
    with torch.no_grad():
        kept[0]["norm.weight"].fill_(3)
    assert (whole(model.norm.weight) == 3).all()
    model.load_state_dict(copies)  # a copy is none of it
    assert_same(wholes(model.parameters()), wholes(build(tied=True).parameters()), rtol=0, atol=0)


@on_ranks(2)
def test_other_aliases_from_before_are_warned_of() -> None:
    model = shard(build())
    alias = model.head.weight.detach()
    with pytest.warns(UserWarning, match=r"share memory with .*Linear.weight and 0 more.*clone\(\)"):
        backward(model)
    assert whole(alias).equal(build().head.weight)
    model = shard(build())
    copies = [param.detach().clone() for param in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        backward(model)
    del alias, copies


@on_ranks(3)
def test_the_shards_of_a_model_that_has_run_are_loaded_before() -> None:
    ran, plain = shard(build()), build()
    assert_like_one_process(ran, plain)
    with torch.device("meta"):
        model: Any = TinyTransformer()
    shard(model).load_state_dict(ran.state_dict(), assign=True)
    assert_same(wholes(model.parameters()), wholes(plain.parameters()))
    assert_like_one_process(model, plain)


# ---- structure ------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_trainable_parameters_that_join_are_refused_by_name() -> None:
    for change, words in (
        (lambda model: setattr(model, "extra", nn.Linear(2, 2)), "extra.weight is a parameter that was put there"),
        (lambda model: setattr(model, "head", nn.Linear(16, 16)), "head.weight is a parameter that was put there"),
        (lambda model: setattr(model.head, "weight", model.tokens.weight), "became one parameter with .*tokens.weight"),
    ):
        model = shard(build())
        change(model)
        assert re.search(f"{words}.* after", refusal(backward, model, error=ConfigurationError))


@on_ranks(2)
def test_frozen_parameters_that_join_stay_as_they_are() -> None:
    model = shard(build())
    model.extra = nn.Linear(2, 2).requires_grad_(False)
    backward(model)
    assert type(model.extra.weight) is nn.Parameter
    assert isinstance(model.head.weight.grad, DTensor)


@on_ranks(2)
def test_ignored_parameters_may_come_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = TinyTransformer()
    shard(model, ignored_params={model.head.weight})
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    backward(model)
    assert not isinstance(model.head.weight, DTensor)


@on_ranks(2)
def test_hooks_from_before_are_called_once_and_can_be_removed() -> None:
    model, reference = shard(build()), build()
    seen: list[str] = []
    for each in (model, reference):
        weight = each.head.weight
        after = weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
        before = weight.register_hook(lambda _: seen.append("before"))
        for _ in range(2):
            backward(each)
        assert seen == ["before", "after"] * 2
        after.remove()
        before.remove()
        backward(each)
        (each.head.weight**2).sum().backward()  # autograd's own gradient of the shard
        assert len(seen) == 4
        seen.clear()
    torch.testing.assert_close(whole(model.head.weight.grad), reference.head.weight.grad)


# ---- ranks ----------------------------------------------------------------------------------------------------------


def settings() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "reshard_after_forward of blocks.1 is None on rank 0, True on rank 1", {"reshard_after_forward": True}
    yield "mp_policy of blocks.1", {"mp_policy": MixedPrecisionPolicy(output_dtype=torch.float64)}
    yield "offload_policy of blocks.1", {"offload_policy": CPUOffloadPolicy()}


@on_ranks(2)
def test_ranks_with_other_settings_hear_of_it_once() -> None:
    for words, options in settings():
        model: Any = build()
        fully_shard(model.blocks[1], **(options if dist.get_rank() else {}))
        fully_shard(model)
        told = refusal(lambda model=model: backward(model), error=ConfigurationError)
        assert words in told
        assert "give the same on every rank" in told


@on_ranks(2)
def test_a_unit_without_memory_leaves_its_parameters_as_they_were() -> None:
    model, plain = build(), build()
    for each in (model, plain):
        each.norm.requires_grad_(False)  # so that its unit has a second group
    params = dict(shard(model).named_parameters())
    before = {name: param.to_local().clone() for name, param in params.items()}
    made: list[ParameterGroup] = []

    def second_fails(*arguments: Any) -> ParameterGroup:
        if made:
            raise torch.OutOfMemoryError("planted")
        made.append(ParameterGroup(*arguments))
        return made[-1]

    with patch.object(shard_unit, "ParameterGroup", second_fails), pytest.raises(torch.OutOfMemoryError):
        backward(model)
    assert all(model.get_parameter(name) is param for name, param in params.items())
    assert all(param.to_local().equal(before[name]) for name, param in params.items())
    for each in (model, plain):
        each.norm.requires_grad_(True)
    assert_like_one_process(model, plain)


@on_ranks(2)
def test_only_optimizers_of_a_model_wait_for_it() -> None:
    with fixed_seed(0):
        broken, other = shard(build()), nn.Linear(2, 2)
    mine = sgd(broken)
    broken.head.weight = None
    other(torch.ones(2)).sum().backward()
    sgd(other).step()
    with pytest.raises(ScheduleError, match="weight was removed after fully_shard"):
        mine.step()
