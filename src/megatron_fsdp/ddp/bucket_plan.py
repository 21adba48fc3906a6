"""Division of a model's parameters into buckets by size, in the order in which backward reaches them. Pure.

Backward computes gradients roughly in reverse order of registration, so buckets are filled from the last parameter to
the first, each kind of parameter by itself, and closed as soon as they reach their size. A bucket is complete when the
gradient of its first parameter comes, so buckets are sorted by that: bucket 1 holds the first parameters of the model
and is reduced last.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from megatron_fsdp.sharding.units import GroupKey, ParameterInfo, UnitPlan, UnitSpec

BUCKET_NAME = "bucket {}"


def cut_buckets(
    parameters: Sequence[ParameterInfo], bucket_numel: int | None, alone: Collection[str] = ()
) -> tuple[tuple[str, ...], ...]:
    """Divide the trainable parameters of a model into buckets; a parameter is never cut.

    Args:
        parameters: In model order; frozen ones are left out.
        bucket_numel: The parameter with which a bucket reaches this many elements is its last; None: no limit.
        alone: Names of parameters that get a bucket of their own.

    Returns:
        Names in model order, bucket by bucket; parameters of a bucket agree in their `GroupKey`. Buckets are in the
        order of their first parameters.
    """
    order = {info.name: number for number, info in enumerate(parameters)}
    open_buckets: dict[GroupKey, list[ParameterInfo]] = {}
    closed: list[list[ParameterInfo]] = []
    for info in reversed(parameters):
        if not info.key.requires_grad:
            continue
        if info.name in alone:
            closed.append([info])
            continue
        bucket = open_buckets.setdefault(info.key, [])
        bucket.append(info)
        if bucket_numel is not None and sum(member.numel for member in bucket) >= bucket_numel:
            closed.append(open_buckets.pop(info.key))
    closed += open_buckets.values()
    in_order = sorted(closed, key=lambda bucket: order[bucket[-1].name])
    return tuple(tuple(info.name for info in reversed(bucket)) for bucket in in_order)


def plan_buckets(
    parameters: Sequence[ParameterInfo],
    root_class: str,
    aliases: Sequence[tuple[str, str]],
    bucket_numel: int | None,
    alone: Collection[str] = (),
) -> UnitPlan:
    """Plan the units of the engine: the root with the frozen parameters, then one for each bucket."""
    frozen = tuple(info.name for info in parameters if not info.key.requires_grad)
    buckets = cut_buckets(parameters, bucket_numel, alone)
    size = "one bucket per kind" if bucket_numel is None else f"closed at {bucket_numel:,} parameters"
    units = [UnitSpec.of_module("", frozen, root_class)]
    units += [
        UnitSpec(BUCKET_NAME.format(number), names, "parameters", modules=())
        for number, names in enumerate(buckets, start=1)
    ]
    return UnitPlan(tuple(units), f"buckets in backward order, {size}", tuple(aliases))


def plan_readers(
    owned: Sequence[tuple[str, frozenset[int]]], called: Callable[[str], bool]
) -> dict[str, frozenset[int]]:
    """Return the buckets that each called module reads.

    A module reads the parameters it owns, and those of the modules below it that are never called themselves: their
    weights are used by a module above them (as `nn.MultiheadAttention` uses those of its output projection). A module
    that was not called reads everything below it, should it be called one day.
    """
    found: dict[str, set[int]] = {}
    for name, buckets in owned:
        reader = name
        found.setdefault(reader, set()).update(buckets)
        while reader and not called(reader):
            reader = reader.rpartition(".")[0]
            found.setdefault(reader, set()).update(buckets)
    return {name: frozenset(buckets) for name, buckets in found.items() if buckets}
