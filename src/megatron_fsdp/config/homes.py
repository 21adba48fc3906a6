"""Homes: where each kind of state rests between uses, and how much of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.errors import ConfigurationError

_DEVICE, _HOST = "device", "host"


@dataclass(frozen=True)
class Home:
    """Where one kind of state rests."""

    is_away: bool = False  # in host memory, which is pinned where the device is a CUDA device; else on the device
    # share of the elements that rests there, 0 to 1, in whole units; the rest stays on the device
    fraction: float = 1.0

    def __str__(self) -> str:
        """Return what `homes` takes for it."""
        return _HOST if self.is_away else _DEVICE


ON_DEVICE = Home()


@dataclass(frozen=True)
class Homes:
    """The home of each kind of state."""

    main_weights: Home = ON_DEVICE  # the parameters that the optimizer updates, where they rest
    optimizer_state: Home = ON_DEVICE  # what the optimizer keeps for each parameter in the parameter's shape
    # the accumulated ones, that `.grad` shows: beside the main weights, as torch wants it
    main_gradients: Home = ON_DEVICE
    compute_weights: Home = ON_DEVICE  # this rank's shard of the weights that are gathered; strategy 3 only

    @property
    def are_away(self) -> bool:
        """Whether anything rests elsewhere than on the device."""
        return any(getattr(self, name).is_away for name in _KINDS)

    def __str__(self) -> str:
        """Return the kinds that rest elsewhere, and where."""
        homes = ((name, getattr(self, name)) for name in _KINDS)
        return ", ".join(f"{name} {home}" for name, home in homes if home.is_away)

    def for_share(self, offset: float) -> Homes:
        """Return the homes of a unit, without fractions.

        `offset` is the share of the elements that later units hold: those go first, since their gradients come first.
        """
        chosen = {name: getattr(self, name) for name in _KINDS}
        return Homes(**{kind: home if offset < home.fraction else ON_DEVICE for kind, home in chosen.items()})


def homes_by_unit(homes: Homes, numels: Sequence[int]) -> list[Homes]:
    """Return where the state of each unit rests, without fractions, given its elements, root first.

    Units go from the last on, whose gradients come first.
    """
    later = [sum(numels[index + 1 :]) / max(1, sum(numels)) for index in range(len(numels))]
    return [homes.for_share(share) for share in later]


_KINDS = tuple(field.name for field in fields(Homes))
HomesArgument = Any
"""What `fully_shard(homes=...)` takes: a mapping, a string, torch's `OffloadPolicy` or `CPUOffloadPolicy`, or None."""


def resolve_homes(given: HomesArgument, strategy: ShardingStrategy) -> Homes:
    """Resolve what was asked for.

    Args:
        given: For each kind of state "device", "host", or a mapping with such a `home` and a `fraction`. One such
            string alone, or torch's `CPUOffloadPolicy()`, moves all state. State of the optimizer and gradients follow
            the main weights unless they are named.
        strategy: The strategy on the sharding axis.

    Raises:
        ConfigurationError: There is no such kind or home, or the combination cannot be.
    """
    kind_given = type(given).__name__  # torch's policies come from a package that takes long to import
    if given is None or kind_given == "OffloadPolicy":
        return Homes()
    if kind_given == "CPUOffloadPolicy":
        given = _HOST
    if isinstance(given, str):
        is_sharded = strategy is ShardingStrategy.optim_grads_params
        given = dict.fromkeys(("main_weights", *(["compute_weights"] if is_sharded else [])), given)
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f'homes={given!r} is a {type(given).__name__}; give a mapping such as {{"optimizer_state": "host"}}, '
            '"host", or CPUOffloadPolicy()'
        )
    unknown = [kind for kind in given if kind not in _KINDS]
    if unknown:
        raise ConfigurationError(f"homes has {unknown[0]!r}; the kinds of state are {', '.join(_KINDS)}")
    found = {kind: _home(kind, value) for kind, value in given.items()}
    main = found.get("main_weights", ON_DEVICE)
    homes = Homes(**{"optimizer_state": main, "main_gradients": main, **found})
    _check(homes, strategy)
    return homes


def _home(kind: str, given: object) -> Home:
    """Read the home of one kind of state."""
    options: Mapping[str, Any] = {"home": given} if not isinstance(given, Mapping) else given
    where, fraction = options.get("home"), options.get("fraction", 1.0)
    if set(options) - {"home", "fraction"} or not isinstance(where, str):
        raise ConfigurationError(f"homes[{kind!r}]={given!r}; give a home, or a mapping with 'home' and 'fraction'")
    if isinstance(fraction, bool) or not isinstance(fraction, int | float) or not 0 <= fraction <= 1:
        raise ConfigurationError(f"homes[{kind!r}] has the fraction {fraction!r}; give a number from 0 to 1")
    if where not in (_DEVICE, _HOST):
        raise ConfigurationError(f'homes[{kind!r}]={where!r} does not exist; give "{_DEVICE}" or "{_HOST}"')
    if where == _DEVICE and len(options) > 1:
        raise ConfigurationError(f"homes[{kind!r}]={given!r}: it stays on the device; give that alone")
    return Home(where == _HOST, float(fraction))


def _check(homes: Homes, strategy: ShardingStrategy) -> None:
    """Refuse combinations that cannot be."""
    main, grads, state = homes.main_weights, homes.main_gradients, homes.optimizer_state
    if (main.is_away, main.fraction) != (grads.is_away, grads.fraction):
        raise ConfigurationError(
            f"homes has main_gradients on {grads} (fraction {grads.fraction:g}) and main_weights on {main} (fraction "
            f"{main.fraction:g}); torch wants a gradient beside its parameter, so give both or leave main_gradients out"
        )
    if main.is_away and not state.is_away:
        raise ConfigurationError(
            f"homes has optimizer_state on the device and main_weights on {main}; the optimizer steps where the main "
            "weights rest and keeps its state there, so leave optimizer_state out"
        )
    if main.is_away and state.fraction != main.fraction:
        raise ConfigurationError(
            f"homes has the fraction {state.fraction:g} for optimizer_state and {main.fraction:g} for main_weights; "
            "state rests beside the main weights, so give both the same"
        )
    if homes.compute_weights.is_away and strategy is not ShardingStrategy.optim_grads_params:
        raise ConfigurationError(
            f"homes has compute_weights on {homes.compute_weights}, and strategy {strategy.name} computes with whole "
            "weights that are there all the time; use zero_dp_strategy 3, or leave compute_weights out"
        )
