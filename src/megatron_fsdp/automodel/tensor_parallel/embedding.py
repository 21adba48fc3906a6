"""An embedding of which each rank has some of the rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_fsdp.automodel.tensor_parallel.layouts import summed
from megatron_fsdp.automodel.tensor_parallel.local_parameters import LocalUse, place, use_plain_tensors


class DividedRows(ParallelStyle):
    """Each rank looks up the ids of its rows and adds zeros for the others; the sum over ranks is the output.

    torch's own `RowwiseParallel` computes the same, but makes a gradient of all rows on every rank.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        place(module, "weight", device_mesh, Shard(0))
        lookup = _Lookup(module, device_mesh)
        module.register_forward_pre_hook(lookup.before)
        module.register_forward_hook(lookup.after, always_call=True)
        use_plain_tensors(module, (LocalUse("", "weight", Shard(0)),))
        return module


class _Lookup:
    """The hooks around the lookup; `padding_idx` is this rank's own only meanwhile, since others read it, too."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        weight: Any = module.weight
        assert isinstance(weight, DTensor)
        self._mesh = mesh
        self._stop_row = weight.shape[0]
        self._rows = -(-weight.shape[0] // mesh.size())  # of all ranks but the last ones, as torch cuts
        self._first = min(self._rows * mesh.get_local_rank(), self._stop_row)
        self._count = weight.to_local().shape[0]
        self._padding: int | None = None
        self._elsewhere: list[Tensor] = []

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        ids = args[0] - self._first
        elsewhere = (ids < 0) | (ids >= self._count)
        self._elsewhere.append(elsewhere)
        self._padding = module.padding_idx  # type: ignore[assignment] # a plain attribute of nn.Embedding
        if self._padding is not None:
            own = self._padding - self._first
            module.padding_idx = own if 0 <= own < self._count else None  # type: ignore[assignment] # likewise
        return (ids.masked_fill(elsewhere, 0), *args[1:])

    def after(self, module: nn.Module, _args: Any, output: Tensor | None) -> Tensor | None:
        if not self._elsewhere:
            return output
        elsewhere = self._elsewhere.pop()
        module.padding_idx = self._padding  # type: ignore[assignment] # likewise
        return None if output is None else summed(output.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._mesh)
