"""The parallel sizes of a run: from what the user gives to numbers that multiply to the world size; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_fsdp.automodel.config import DDPConfig, DistributedConfig, FSDP2Config, MegatronFSDPConfig, check_config
from megatron_fsdp.errors import ParallelSizeError

SIZE_NAMES = ("dp_size", "dp_replicate_size", "tp_size", "pp_size", "cp_size", "ep_size")
"""The arguments that carry sizes."""

_ALLOWED = {
    FSDP2Config: SIZE_NAMES,
    MegatronFSDPConfig: ("dp_size", "tp_size", "cp_size"),
    DDPConfig: ("dp_size",),
}
_INSTEAD = {
    "tp_size": "FSDP2Config or MegatronFSDPConfig",
    "cp_size": "FSDP2Config or MegatronFSDPConfig",
}


@dataclass(frozen=True)
class ParallelSizes:
    """How many ranks lie on each axis.

    Attributes:
        dp_replicate: Copies of the sharded model.
        dp_shard: Data-parallel ranks that share one copy.
        tp: Tensor-parallel ranks.
        pp: Pipeline stages' ranks.
        cp: Context-parallel ranks.
        ep: Expert-parallel ranks; they lie across the data-, context- and tensor-parallel ones, not beside them.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def dp(self) -> int:
        """Ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients of dense parameters are averaged."""
        return self.dp * self.cp

    @property
    def ep_shard(self) -> int:
        """Ranks that share the shards of one rank's experts."""
        return self.dp_cp * self.tp // self.ep

    @property
    def world(self) -> int:
        """All ranks."""
        return self.dp_cp * self.tp * self.pp


def resolve_sizes(
    config: DistributedConfig,
    world_size: int,
    *,
    dp_size: int | None = None,
    dp_replicate_size: int | None = None,
    tp_size: int | None = None,
    pp_size: int | None = None,
    cp_size: int | None = None,
    ep_size: int | None = None,
) -> ParallelSizes:
    """Check sizes against the strategy and the world, and infer the data-parallel one.

    Args:
        config: The strategy.
        world_size: Number of ranks.
        dp_size: Data-parallel ranks, copies included; None, 0 or -1: all that the other sizes leave.
        dp_replicate_size: Copies of the sharded model; `FSDP2Config` only. None: 1, as for those that follow.
        tp_size: See `ParallelSizes`.
        pp_size: See there; `FSDP2Config` only.
        cp_size: See there.
        ep_size: See there; `FSDP2Config` only.

    Raises:
        ParallelSizeError: A size is no positive number, the strategy cannot do it, or they do not multiply to the
            world size; a ValueError and an AssertionError.
        ConfigurationError: The config is none of the three.
    """
    check_config(config)
    allowed = next(names for kind, names in _ALLOWED.items() if isinstance(config, kind))
    if world_size < 1:
        raise ParallelSizeError(f"world_size={world_size}; give the number of ranks, 1 or more")
    given = {
        "dp_size": None if type(dp_size) is int and dp_size in (0, -1) else dp_size,
        "dp_replicate_size": dp_replicate_size,
        "tp_size": tp_size,
        "pp_size": pp_size,
        "cp_size": cp_size,
        "ep_size": ep_size,
    }
    for name, size in given.items():
        _check_number(name, size)
        if size not in (None, 1) and name not in allowed:
            _refuse(config, name, size, allowed)
    tp, pp, cp, ep, copies = (given[name] or 1 for name in ("tp_size", "pp_size", "cp_size", "ep_size", SIZE_NAMES[1]))
    others = tp * pp * cp
    if given["dp_size"] is None and world_size % others:
        raise ParallelSizeError(
            f"world_size={world_size} cannot be divided by tp_size x pp_size x cp_size = {tp} x {pp} x {cp} = "
            f"{others}; change a size or start another number of ranks"
        )
    dp = given["dp_size"] or world_size // others
    if dp * others != world_size:
        raise ParallelSizeError(
            f"dp_size x tp_size x pp_size x cp_size = {dp} x {tp} x {pp} x {cp} = {dp * others}, but world_size is "
            f"{world_size}; leave dp_size out to have it inferred, or start {dp * others} ranks"
        )
    _check_copies(dp, copies)
    if (dp * cp * tp) % ep:
        raise ParallelSizeError(
            f"dp_size x cp_size x tp_size = {dp} x {cp} x {tp} = {dp * cp * tp} cannot be divided by ep_size={ep}; "
            "expert-parallel ranks lie across these; choose a divisor"
        )
    return ParallelSizes(copies, dp // copies, tp, pp, cp, ep)


def _check_number(name: str, size: object) -> None:
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
        raise ParallelSizeError(f"{name}={size!r}; give a whole number of ranks, 1 or more, or leave it out")


def _refuse(config: DistributedConfig, name: str, size: int | None, allowed: Sequence[str]) -> None:
    raise ParallelSizeError(
        f"{name}={size} is only supported with {_INSTEAD.get(name, 'FSDP2Config')}; {type(config).__name__} takes "
        f"{', '.join(allowed)}, so leave {name} out or change the config"
    )


def _check_copies(dp: int, copies: int) -> None:
    if dp % copies:
        raise ParallelSizeError(
            f"dp_size={dp} cannot be divided by dp_replicate_size={copies}; dp_size counts the copies too, so it must "
            "be a multiple of their number"
        )
    if copies > 1 and copies == dp:
        raise ParallelSizeError(
            f"dp_replicate_size={copies} must be less than dp_size={dp}, or nothing is sharded; use DDPConfig for "
            "whole replicas"
        )
