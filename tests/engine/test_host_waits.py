"""A steady step reads nothing back: on a device each reading would make the host wait (docs/debugging.md)."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from megatron_fsdp import fully_shard
from megatron_fsdp.engine import gradients as usage
from tests.conftest import RunRanks

_READINGS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__")


@contextlib.contextmanager
def readings() -> Iterator[list[str]]:
    """What code of this package reads out of tensors, by module and method."""
    found: list[str] = []

    def noting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            module = sys._getframe(1).f_globals["__name__"]
            if module.startswith("megatron_fsdp."):
                found.append(f"{module}: {name}")
            return read(tensor, *args, **kwargs)

        return method

    with contextlib.ExitStack() as stack:
        for name in _READINGS:
            patched = noting(name, getattr(torch.Tensor, name))
            stack.enter_context(mock.patch.object(torch.Tensor, name, patched))
        yield found


def steps(strategy: int, device: str, always: bool) -> list[list[str]]:
    """What each of four steps reads."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))).to(device)
    model, optimizer = fully_shard(
        module,
        torch.optim.AdamW(module.parameters(), fused=True),
        fsdp_unit_modules=[nn.Linear],
        zero_dp_strategy=strategy,
        find_unused_parameters=always,
    )
    x, found = torch.ones(2, 8, device=device), []
    for number in range(4):
        if device == "cuda":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
                torch.cuda.set_sync_debug_mode("error" if number > 1 and not always else "default")
        with readings() as read:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(read)
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    return found


AGREES = f"{usage.__name__}: tolist"


@pytest.mark.parametrize(("num_ranks", "strategy"), [(1, 3), (2, 0), (2, 3)])
def test_a_steady_step_reads_nothing_back(run_ranks: RunRanks, num_ranks: int, strategy: int) -> None:
    for first, *_, before_last, last in run_ranks(num_ranks, steps, strategy, "cpu", False):
        assert (AGREES in first) is (num_ranks > 1)
        assert before_last == last == []


def test_ranks_that_always_ask_read_once_in_each_step(run_ranks: RunRanks) -> None:
    for found in run_ranks(2, steps, 3, "cpu", True):
        assert found[-1] == [AGREES]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", [0, 3])
def test_the_host_waits_for_no_gpu_in_a_steady_step(run_ranks: RunRanks, strategy: int) -> None:
    for found in run_ranks(min(4, torch.cuda.device_count()), steps, strategy, "cuda", False, device_type="cuda"):
        assert found[-1] == []
