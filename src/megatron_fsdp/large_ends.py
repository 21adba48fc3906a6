"""Large ends of a model: embeddings and output heads beside the blocks that are worth units of their own. Pure."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.parameter import UninitializedParameter

READ_INNER_PARAMETERS: tuple[type[nn.Module], ...] = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Classes of torch that read parameters of the modules inside them without calling those."""

_END_TYPES = (nn.Embedding, nn.Linear)
_ALTERNATIVES = (nn.ModuleDict, nn.ModuleList)
"""What chooses among its modules by a key or an index, so that ranks may call different ones."""

_LEAST_PART = 4
"""An end has at least the parameters of the largest block divided by this."""


def large_ends(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Find the modules outside of all blocks that are worth gathering by themselves.

    In the root they would stay gathered from the beginning of forward to the end of backward, and share its bucket. An
    end is an `nn.Embedding` or `nn.Linear` (or of a subclass)

    * without modules inside, and outside of every block;
    * whose parameters hang on it alone: tied weights are needed in two places;
    * with at least a quarter of the parameters of the largest block. A smaller one would add a collective and spare
      next to nothing beside a slot and a bucket;
    * that every rank calls: not inside a `ModuleDict` or `ModuleList`, nor anything named after experts; and that is
      called rather than read: not inside torch's attention and encoder layers.

    Args:
        module: The model; it is only read.
        blocks: Its blocks by name.

    Returns:
        The ends by name, in module order; none where there is no block.
    """
    if not blocks:
        return {}
    least_numel = max(_numel(block) for block in blocks.values()) / _LEAST_PART
    holders = _holders(module)
    return {
        name: candidate
        for name, candidate in _outside(module, {id(block) for block in blocks.values()})
        if isinstance(candidate, _END_TYPES)
        and next(candidate.children(), None) is None
        and all(holders[id(param)] == {id(candidate)} for param in candidate.parameters())
        and _numel(candidate) >= least_numel
    }


def _outside(module: nn.Module, blocks: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that no block holds and every rank calls, each once, by name; without the model itself."""
    inside = {id(part) for block in module.modules() if id(block) in blocks for part in block.modules()}
    seen: set[int] = set()

    def walk(name: str, owner: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child_name, child in owner.named_children():
            if "expert" in child_name or id(child) in inside | seen:
                continue
            seen.add(id(child))
            path = f"{name}.{child_name}" if name else child_name
            yield path, child
            if not isinstance(child, (*_ALTERNATIVES, *READ_INNER_PARAMETERS)):
                yield from walk(path, child)

    if not isinstance(module, (*_ALTERNATIVES, *READ_INNER_PARAMETERS)):
        yield from walk("", module)


def _holders(module: nn.Module) -> dict[int, set[int]]:
    """For the id of each parameter, the ids of the modules that it hangs on."""
    found: dict[int, set[int]] = {}
    for owner in module.modules():
        for param in owner._parameters.values():
            if param is not None:
                found.setdefault(id(param), set()).add(id(owner))
    return found


def _numel(module: nn.Module) -> int:
    """Elements of the parameters inside a module; those that have no shape yet count as none."""
    return sum(param.numel() for param in module.parameters() if not isinstance(param, UninitializedParameter))
