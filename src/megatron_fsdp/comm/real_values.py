"""What ranks agree on has values, also in a simulated rank, whose tensors are fake: shapes and dtypes without memory.

A simulated rank (`plan/simulate.py`) is one process that takes part in collectives which move nothing. Its groups have
back ends of these names, which say what they stand in for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

SIMULATED = "simulated_"
"""What the names of simulated back ends begin with."""

real_values = unset_fake_temporarily
"""A context, or decorator, in which new tensors have values, whatever goes on outside; torch's own."""


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor can be read: it is neither fake nor on the meta device."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def address_of(tensor: Tensor) -> int:
    """Where its first element lies; for a fake tensor a number that no other place has while its storage lives."""
    if isinstance(tensor, FakeTensor):
        return tensor.untyped_storage()._cdata + tensor.storage_offset() * tensor.element_size()
    return tensor.data_ptr()


def addresses_of(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The same of several; a fraction of the time where none is fake."""
    return tuple(map(address_of if FakeTensor in map(type, tensors) else Tensor.data_ptr, tensors))


def backend_of(group: dist.ProcessGroup) -> str:
    """The name of the back end of a group, or of the one that it stands in for."""
    return dist.get_backend(group).removeprefix(SIMULATED)


def is_simulated(group: dist.ProcessGroup) -> bool:
    """Whether the collectives of a group move nothing."""
    name = dist.get_backend(group)
    return name == dist.Backend.FAKE or name.startswith(SIMULATED)
