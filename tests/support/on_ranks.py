"""Tests whose body runs on every rank, as in torch's own tests, and what they begin and end with."""

import functools
import inspect
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_fsdp import MegatronFSDP
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import MegatronFSDPError

Test = Callable[..., None]


def on_ranks(world_size: int | None = None) -> Callable[[Test], Test]:
    """Run the body of a test on so many ranks (None: as the parameter `num_ranks` says); what one fails, fails it."""

    def decorate(body: Test) -> Test:
        @functools.wraps(body)
        def test(run_ranks: Callable[..., Any], num_ranks: int | None = world_size, **given: Any) -> None:
            assert num_ranks is not None
            if "num_ranks" in names:
                given["num_ranks"] = num_ranks
            run_ranks(num_ranks, _run, body.__module__, body.__name__, given)

        names = inspect.signature(body).parameters
        asked = {*names, "run_ranks"} | ({"num_ranks"} if world_size is None else set())
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(asked)]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _run(module: str, name: str, given: dict[str, Any]) -> None:
    getattr(import_module(module), name).__wrapped__(**given)


def of_ranks(value: Any) -> list[Any]:
    """What each rank has, in rank order; collective."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def same_on_ranks(value: Any) -> Any:
    """Assert that all ranks have the same, and return it."""
    found = of_ranks(value)
    assert found == [found[0]] * len(found), found
    return value


def once(make: Callable[[], object]) -> None:
    """Make something on the first rank (or without ranks), such as files, while the others wait."""
    is_ranked = dist.is_initialized()
    if not is_ranked or dist.get_rank() == 0:
        make()
    if is_ranked:
        dist.barrier()


def refusal(call: Callable[..., object], *given: Any, error: Any = MegatronFSDPError, **named: Any) -> str:
    """The sentence with which a call fails; where there are ranks, on all alike."""
    with pytest.raises(error) as raised:
        call(*given, **named)
    told = str(raised.value)
    return str(same_on_ranks(told)) if dist.is_initialized() else told


@contextmanager
def first_rank_warns(match: str, category: type[Warning] = UserWarning) -> Iterator[list[warnings.WarningMessage]]:
    """Expect a warning on the first rank, and none such on the others."""
    if dist.get_rank() == 0:
        with pytest.warns(category, match=match) as warned:
            yield warned.list
        assert all("torch" not in Path(each.filename).parts for each in warned)  # at the line of the user
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield []
    assert not [each for each in caught if re.search(match, str(each.message))]


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Seed torch's generators for the block, then restore their states."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def assert_equal_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert the same names, shapes, dtypes and values: |actual - expected| <= atol + rtol * |expected|.

    With both tolerances at 0 values must be equal bit for bit, except that 0.0 equals -0.0; NaN equals nothing.
    """
    torch.testing.assert_close(dict(actual), dict(expected), rtol=rtol, atol=atol, check_device=False)


def engine_of(model: MegatronFSDP) -> Engine:
    """Return the engine, which no public function shows: its units, scheduler, executor and observers."""
    return model._engine


def local_of(tensor: Tensor) -> Tensor:
    """Return the very tensor that lies below a DTensor, with what is written on it; `to_local()` may make a view."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local()
