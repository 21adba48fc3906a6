"""Groups bound to devices, and sums on one rank."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.automodel.meshes import set_up_ranks
from megatron_fsdp.comm.collectives import Axis, add_up_into, put_scaled, sum_received
from megatron_fsdp.comm.groups import bound_device
from megatron_fsdp.doctor.local_ranks import join_job
from megatron_fsdp.train.ranks import join_ranks
from tests.support.on_ranks import on_ranks


def world_axis() -> Axis:
    num_ranks = dist.get_world_size()
    return Axis(dist.group.WORLD if num_ranks > 1 else None, dist.get_rank(), num_ranks)


@on_ranks(2)
def test_gloo_exchanges_pairwise_and_a_single_rank_does_not() -> None:
    assert (world_axis().exchanges_pairwise, Axis(None, 0, 1).exchanges_pairwise) == (True, False)


# ---- process groups know the accelerator of their rank, wherever the project makes them ------------------------------


CPU, SECOND = torch.device("cpu"), torch.device("cuda", 1)


@pytest.mark.parametrize(
    ("backend", "device", "bound"),
    [("nccl", SECOND, SECOND), ("cpu:gloo,cuda:nccl", SECOND, SECOND), ("gloo", SECOND, None), ("gloo", CPU, None)],
)
def test_a_group_is_bound_to_an_accelerator_that_its_back_end_connects(
    backend: str, device: torch.device, bound: torch.device | None
) -> None:
    assert bound_device(backend, device) == bound


def by_the_trainer(_folder: Path) -> None:
    with join_ranks("cuda"):
        pass


def by_a_manager(_folder: Path) -> None:
    set_up_ranks("nccl")


def by_the_doctor(folder: Path) -> None:
    job: Any = SimpleNamespace(num_ranks=2, device_type="cuda", folder=folder, timeout_s=1.0)
    join_job(1, job)


@pytest.mark.parametrize("join", [by_the_trainer, by_a_manager, by_the_doctor])
def test_ranks_that_compute_on_an_accelerator_meet_there(
    join: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[Any] = []
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **named: given.append(named["device_id"]))
    for name in ("barrier", "destroy_process_group"):
        monkeypatch.setattr(dist, name, lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    accelerator = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: 2,
        "set_device_index": given.append,
    }
    for name, function in accelerator.items():
        monkeypatch.setattr(torch.accelerator, name, function)
    join(tmp_path)
    assert given == [1, SECOND]


# ---- sums of rows: their order, their dtype, what they need memory for -----------------------------------------------


CACHED = 1 << 16


def test_sums_are_taken_in_float32_or_wider_and_repeat_bit_for_bit() -> None:
    # In bf16, 256 + 1 is 256 again; in float32 four small summands count.
    received = torch.tensor([[256.0], [1.0], [1.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = sum_received(received.flatten(), 5)
    assert total.dtype == torch.float32
    assert total.tolist() == [260.0]
    total = sum_received(torch.tensor([1.0, 1e-12], dtype=torch.float64), 2)
    assert total.dtype == torch.float64
    assert total.tolist() == [1.0 + 1e-12]
    received = torch.randn(4 * 1000)
    first = sum_received(received.clone(), 4)
    assert torch.equal(first, sum_received(received.clone(), 4))
    assert torch.equal(first, ((received[:1000] + received[1000:2000]) + received[2000:3000]) + received[3000:])


def rows_of(num_rows: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return list(torch.randn(num_rows, numel, generator=torch.Generator().manual_seed(numel)).to(dtype))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def test_a_scaled_value_is_rounded_once() -> None:
    for dtype, out_dtype in product(DTYPES, DTYPES):
        values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        out = torch.empty(1000, dtype=out_dtype)
        put_scaled(values, 1 / 3, out)
        wider = torch.promote_types(dtype, out_dtype)
        assert torch.equal(out, (values.to(wider) * (1 / 3)).to(out_dtype)), (dtype, out_dtype)


@given(
    num_rows=st.integers(2, 5),
    numel=st.sampled_from([0, 1, 7, CACHED - 1, CACHED, CACHED + 1, 2 * CACHED + 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    out_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    factor=st.sampled_from([1.0, 0.5, 1 / 3, 2.0**-20]),
)
def test_a_sum_put_elsewhere_is_the_product_of_the_whole_sum_bit_for_bit(
    num_rows: int, numel: int, dtype: torch.dtype, out_dtype: torch.dtype, factor: float
) -> None:
    rows = rows_of(num_rows, numel, dtype)
    before = [row.clone() for row in rows]
    out = torch.full((numel,), torch.nan, dtype=out_dtype)
    add_up_into(rows, out, factor)
    total = sum_received(torch.cat(rows), num_rows)
    scaled = torch.empty_like(out)
    put_scaled(total, factor, scaled)
    assert torch.equal(out, scaled)
    assert all(torch.equal(row, old) for row, old in zip(rows, before, strict=True))
