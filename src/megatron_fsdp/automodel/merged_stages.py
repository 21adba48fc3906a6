"""The stages of a pipeline that one rank holds as one model, for loading, saving and drawing values."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from megatron_fsdp.checkpoint.hf.live import own_class


def merge_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """A model that holds what the stages hold, under the same names; tensors are shared, not copied.

    Args:
        stages: Cut from one model: what lies in another stage is None there, or absent in a `ModuleDict`.
    """
    merged = stages[0]
    for stage in stages[1:]:
        merged = _merged(merged, stage)
    return merged


def _merged(one: nn.Module, other: nn.Module) -> nn.Module:
    kind = own_class(one)
    result = kind.__new__(kind)
    result.__dict__.update(one.__dict__)
    result._modules = dict(one._modules)
    for name, child in other._modules.items():
        own = result._modules.get(name)
        if own is None:
            result._modules[name] = child
        elif child is not None and own is not child:
            result._modules[name] = _merged(own, child)
    return result
