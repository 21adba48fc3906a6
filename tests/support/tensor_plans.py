"""How torch's `parallelize_module` divides the transformer of tests/support/parallel_transformer.py."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

_COLUMNS = ("attention.q", "attention.k", "attention.v", "mlp.up")
_ROWS = ("attention.out", "mlp.down")


def divide_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide embedding, attention, MLP and head; norms and positions stay plain tensors, the same on all ranks."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    for block in _blocks(model):
        plan |= {f"{block}.{name}": ColwiseParallel() for name in _COLUMNS}
        plan |= {f"{block}.{name}": RowwiseParallel() for name in _ROWS}
    parallelize_module(model, mesh, plan)


def divide_tensors_and_sequences(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same, with activations between the layers divided along the tokens; all parameters are DTensors."""
    plan: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "positions": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    whole_input = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    for block in _blocks(model):
        plan |= {f"{block}.{norm}": SequenceParallel() for norm in ("attention_norm", "mlp_norm")}
        plan |= {f"{block}.attention": whole_input, f"{block}.mlp": whole_input}
        plan |= {f"{block}.{name}": ColwiseParallel() for name in _COLUMNS}
        plan |= {f"{block}.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in _ROWS}
    parallelize_module(model, mesh, plan)


def _blocks(model: nn.Module) -> list[str]:
    return [f"blocks.{name}" for name, _ in model.get_submodule("blocks").named_children()]
