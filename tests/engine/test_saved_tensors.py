"""Saved activations away from the device, in one process: gradients, errors, and what leaves."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp.comm.lanes import HostLane
from megatron_fsdp.config.homes import Home, Place
from megatron_fsdp.engine.memory import storage_of
from megatron_fsdp.engine.saved_tensors import SavedTensors, UnitTensors

CPU = torch.device("cpu")
Compute = Callable[[Tensor], Tensor]


def away(limit: int | None = None, held: tuple[Tensor, ...] = (), place: Home | None = None) -> SavedTensors:
    home = place or Home(Place.HOST, limit_bytes=limit)
    return SavedTensors(home, CPU, HostLane(), HostLane(), lambda number: number in map(storage_of, held))


def unit_forward(saved: SavedTensors, compute: Compute, x: Tensor, unit: int = 1) -> tuple[Tensor, UnitTensors]:
    """Run the forward of a unit, and what follows it."""
    saved.begin(unit)
    y = compute(x)
    made = saved.end(unit, goes=True)
    assert made is not None
    return y, made


def gradient(compute: Compute, x: Tensor, saved: SavedTensors | None = None) -> Tensor:
    """The gradient of x, where what is saved leaves and comes back, or as torch has it."""
    x = x.clone().requires_grad_()
    if saved is None:
        compute(x).sum().backward()
    else:
        y, made = unit_forward(saved, compute, x)
        y = y.sum()
        assert saved.held_bytes > 0
        saved.fetch(made)
        y.backward()
    assert x.grad is not None
    return x.grad


def as_complex(x: Tensor) -> Tensor:
    return torch.complex(x.sin(), x.cos())


COMPUTED: dict[str, Compute] = {
    "plain": lambda x: x.sigmoid() * x.exp(),
    "views": lambda x: x.sin()[:, ::2].t().expand(3, -1, -1).square().sum(0),
    "overlapping views": lambda x: x.sin().unfold(1, 4, 2).square(),
    "complex": lambda x: (as_complex(x) ** 2).abs(),
    "conjugate": lambda x: (as_complex(x).conj() * as_complex(x)).imag + (as_complex(x).conj() @ as_complex(x)).real,
    "negative": lambda x: as_complex(x).conj().imag * x.tanh(),
    "in place before it is saved": lambda x: torch.relu_(x.sin() * 2).square(),
    "sparse": lambda x: torch.sparse.mm(torch.eye(32).to_sparse_csr(), x.sin()) * x.exp(),
    "half precision": lambda x: (x.bfloat16().sin() * x.bfloat16()).float(),
    "recomputed inside": lambda x: checkpoint(torch.sigmoid, x.sin(), use_reentrant=False) * x.exp(),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", COMPUTED)
def test_gradients_are_those_of_resident_tensors(name: str, tmp_path: Path) -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    expected = gradient(COMPUTED[name], x)
    assert torch.equal(gradient(COMPUTED[name], x, away()), expected)
    assert torch.equal(gradient(COMPUTED[name], x, away(place=Home(Place.FILE, tmp_path))), expected)
    assert not list(tmp_path.iterdir())


def test_a_graph_can_be_run_twice() -> None:
    x = torch.randn(32, 32).requires_grad_()
    saved = away()
    y, made = unit_forward(saved, torch.sigmoid, x)
    saved.fetch(made)
    (first,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    saved.fetch(made)
    (second,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(first, second)
    assert torch.equal(first, y.detach() * (1 - y.detach()))


@pytest.mark.parametrize("limit", [None, 0], ids=["away", "resident"])
@pytest.mark.parametrize("where", ["inside", "outside", "after the next unit"])
def test_a_change_in_place_is_an_error_as_autograd_has_it(where: str, limit: int | None) -> None:
    def compute(x: Tensor) -> Tensor:
        y = x.sigmoid()
        return y.mul_(2) if where == "inside" else y

    x = torch.randn(32, 32, requires_grad=True)
    saved = away(limit)
    y, first = unit_forward(saved, compute, x)
    z, second = unit_forward(saved, torch.exp, y, unit=2) if where == "after the next unit" else (y * 2, None)
    if where != "inside":
        with torch.no_grad():
            y.add_(1)
    for made in (second, first):
        if made is not None:
            saved.fetch(made)
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation: a saved tensor of torch.float32 \(32, 32"
    ):
        z.sum().backward()


@pytest.mark.parametrize(("limit", "leaves"), [(None, 12288), (0, 0), (8191, 4096), (8192, 8192)])
def test_no_more_leaves_than_the_limit(limit: int | None, leaves: int) -> None:
    saved, x = away(limit), torch.randn(32, 32, requires_grad=True)
    y, made = unit_forward(saved, lambda x: x.sin() * x.cos(), x)  # x and both factors are saved
    assert saved.held_bytes == leaves
    saved.fetch(made)
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (2 * x.detach()).cos())
    assert saved.held_bytes == 0


def test_what_is_small_stays() -> None:
    saved, x = away(), torch.randn(8, 31, requires_grad=True)
    y, _made = unit_forward(saved, torch.exp, x)
    assert saved.held_bytes == 0
    assert y.requires_grad


def test_weights_stay() -> None:
    weight, x = torch.ones(32, 32), torch.randn(32, 32, requires_grad=True)
    saved = away(held=(weight,))
    y, _made = unit_forward(saved, lambda x: x @ weight, x)
    assert saved.held_bytes == 0
    assert y.requires_grad


def test_memory_of_the_device_goes_after_the_next_unit_and_that_of_the_home_with_the_graph() -> None:
    saved, x = away(), torch.randn(32, 32, requires_grad=True)
    storages: list[torch.UntypedStorage] = []

    def compute(x: Tensor) -> Tensor:
        h = x.sin()
        storages.append(h.untyped_storage())
        return h.square()

    def owners() -> list[int]:
        return [torch._C._storage_Use_Count(each._cdata) for each in storages]

    y, first = unit_forward(saved, compute, x)
    assert owners()[0] > 1
    z, second = unit_forward(saved, compute, y, unit=2)
    assert owners()[0] == 1
    assert saved.held_bytes == 4 * 32 * 32 * 4  # the input and the sine in each
    saved.reset()
    del y, z, first, second
    assert saved.held_bytes == 0


def test_a_checkpoint_around_a_unit_in_a_unit_computes_again() -> None:
    saved, calls = away(), list[int]()

    def inner(x: Tensor) -> Tensor:
        if len(calls) > 1:
            return x.sin().exp()  # in the backward no forward of the engine begins
        saved.begin(2)
        y = x.sin().exp()
        assert saved.end(2, goes=True) is None
        return y

    def recomputed(x: Tensor) -> Tensor:
        calls.append(1)
        return inner(x.sigmoid()).sigmoid()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(recomputed, x.tanh(), use_reentrant=False)

    x = torch.randn(32, 32)
    found = gradient(outer, x, saved)
    assert len(calls) == 2
    assert torch.equal(found, gradient(lambda x: x.tanh().sigmoid().sin().exp().sigmoid(), x))


def test_an_exception_leaves_no_hooks() -> None:
    saved = away()
    saved.begin(1)
    saved.begin(2)
    saved.reset()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert saved.end(1, goes=True) is None
