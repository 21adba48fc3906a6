"""Cutting a batch into microbatches and the samples of each rank (pure)."""

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten_with_path, tree_map

from megatron_fsdp.errors import ConfigurationError


def count_samples(batch: Any) -> int:
    """How many samples a batch has: the length of the first dimension, which all its tensors share.

    Args:
        batch: A tensor, or tensors in dicts, tuples and lists. Numbers and other values belong to every part.

    Raises:
        ConfigurationError: It has no tensor with a dimension, or their first dimensions differ.
    """
    leaves = tree_flatten_with_path(batch)[0]
    lengths = {
        "".join(map(str, path)) or "batch": len(leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.dim() > 0
    }
    if not lengths:
        raise ConfigurationError("the batch holds no tensor with a dimension; the first dimension of each is samples")
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ConfigurationError(
            f"the first dimension of every tensor of the batch is samples, and these differ: {told}; expand what all "
            "samples share, or close over it in loss_fn"
        )
    return next(iter(lengths.values()))


def check_divides(batch: Any, num_ranks: int, microbatches: int) -> None:
    """Refuse a batch that ranks and microbatches do not divide.

    Raises:
        ConfigurationError: They do not, or as of `count_samples`.
    """
    samples = count_samples(batch)
    if samples == 0 or samples % (num_ranks * microbatches):
        raise ConfigurationError(
            f"a batch of {samples} samples does not divide into {microbatches} microbatch(es) of {num_ranks} equal "
            f"slices; give a multiple of {num_ranks * microbatches} samples, or another number of ranks or microbatches"
        )


def part_of(batch: Any, index: int, count: int) -> Any:
    """Part `index` of `count` equal parts, in the order of the samples."""
    length = count_samples(batch) // count

    def cut(leaf: Any) -> Any:
        has_samples = isinstance(leaf, Tensor) and leaf.dim() > 0
        return leaf[index * length : (index + 1) * length] if has_samples else leaf

    return tree_map(cut, batch)
