"""Offload: the kinds of state that are kept in host memory between uses, and the fraction of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class Offload:
    """The offloaded fraction of each kind of state, 0 to 1 of the elements, in whole units.

    Host memory is pinned where the device is a CUDA device. The rest stays on the device.
    """

    main_weights: float = 0.0  # the parameters that the optimizer updates
    optimizer_state: float = 0.0  # tensors of the optimizer in the parameter's shape
    # the accumulated ones, that `.grad` shows: beside the main weights, as torch wants it
    main_gradients: float = 0.0
    compute_weights: float = 0.0  # this rank's shard of the weights that are gathered; strategy 3 only

    def __bool__(self) -> bool:
        """Return True if anything is offloaded."""
        return any(getattr(self, kind) for kind in KINDS)

    def __str__(self) -> str:
        """Return the offloaded kinds, with fractions other than 1."""
        found = ((kind, getattr(self, kind)) for kind in KINDS)
        parts = [kind if fraction == 1.0 else f"{kind} {fraction:g}" for kind, fraction in found if fraction]
        return ", ".join(parts) or "nothing"


def offload_by_unit(offload: Offload, numels: Sequence[int]) -> list[Offload]:
    """Assign each unit every kind whole, or not at all: the last first, up to the fraction.

    `numels` are the units' elements, the root's first. The last units are offloaded first, since their gradients come
    first.
    """
    later = [sum(numels[index + 1 :]) / max(1, sum(numels)) for index in range(len(numels))]
    return [Offload(**{kind: float(share < getattr(offload, kind)) for kind in KINDS}) for share in later]


KINDS = tuple(field.name for field in fields(Offload))
OffloadArgument = Any
"""Type of `fully_shard(offload=...)`: None, "all", torch's policies, a sequence of kinds, or kinds with fractions."""


def offload_of(words: Sequence[str]) -> dict[str, float]:
    """Parse the words of a flag, "KIND" or "KIND=FRACTION", into an argument of `resolve_offload`.

    Raises:
        ConfigurationError: A fraction is no number.
    """
    pairs = [word.partition("=") for word in words]
    try:
        return {kind: float(fraction) if equals else 1.0 for kind, equals, fraction in pairs}
    except ValueError:
        raise ConfigurationError(
            f"offload {' '.join(words)}: give kinds of {', '.join(KINDS)}, each alone or as KIND=FRACTION"
        ) from None


def resolve_offload(given: OffloadArgument, strategy: ShardingStrategy) -> Offload:
    """Resolve the argument `offload`.

    Args:
        given: A sequence of kinds, or a mapping of kind to fraction (0 to 1). "all", or torch's `CPUOffloadPolicy()`:
            every kind. State of the optimizer and gradients follow the main weights unless they are named.
        strategy: The strategy on the sharding axis.

    Raises:
        ConfigurationError: There is no such kind, a fraction is out of range, or kinds exclude each other.
    """
    kind_given = type(given).__name__  # torch's policies come from a package that takes long to import
    if given is None or kind_given == "OffloadPolicy":
        return Offload()
    if kind_given == "CPUOffloadPolicy" or given == "all":
        is_sharded = strategy is ShardingStrategy.optim_grads_params
        given = ("main_weights", "compute_weights") if is_sharded else ("main_weights",)
    is_listed = isinstance(given, Mapping | Sequence) and not isinstance(given, str | bytes)
    if not is_listed or not all(isinstance(kind, str) for kind in given):
        raise ConfigurationError(
            f'offload={given!r} is none of: "all", CPUOffloadPolicy(), a sequence of kinds such as '
            '["optimizer_state"], and a mapping of kinds to fractions such as {"main_weights": 0.5}'
        )
    asked = given if isinstance(given, Mapping) else dict.fromkeys(given, 1.0)
    for kind, fraction in asked.items():
        if kind not in KINDS:
            raise ConfigurationError(f"offload has {kind!r}; the kinds of state are {', '.join(KINDS)}")
        if isinstance(fraction, bool) or not isinstance(fraction, Real) or not 0 <= float(fraction) <= 1:
            raise ConfigurationError(f"offload[{kind!r}] is {fraction!r}; give a fraction, a number from 0 to 1")
    main = float(asked.get("main_weights", 0.0))
    found = {kind: float(fraction) for kind, fraction in asked.items()}
    offload = Offload(**{"optimizer_state": main, "main_gradients": main, **found})
    _check(offload, strategy)
    return offload


def _check(offload: Offload, strategy: ShardingStrategy) -> None:
    """Reject offload combinations that the strategy cannot support."""
    main = offload.main_weights
    if main != offload.main_gradients:
        raise ConfigurationError(
            f"offload has the fraction {offload.main_gradients:g} for main_gradients and {main:g} for main_weights; "
            "torch wants a gradient beside its parameter, so give both the same or leave main_gradients out"
        )
    if main and main != offload.optimizer_state:
        raise ConfigurationError(
            f"offload has the fraction {offload.optimizer_state:g} for optimizer_state and {main:g} for main_weights; "
            "the optimizer steps where the main weights rest and keeps its state there, so give both the same or "
            "leave optimizer_state out"
        )
    if offload.compute_weights and strategy is not ShardingStrategy.optim_grads_params:
        raise ConfigurationError(
            f"offload has compute_weights, and strategy {strategy.name} computes with whole weights that are there "
            "all the time; use zero_dp_strategy 3, or leave compute_weights out"
        )
