"""Sharding strategies, by number and by name."""

import enum

from megatron_fsdp.errors import ConfigurationError


class ShardingStrategy(enum.IntEnum):
    """Sharding strategies: the tensors that are sharded over data-parallel ranks.

    Attributes:
        no_shard: nothing, as in plain data parallelism (0).
        optim: main weights and optimizer state, as in ZeRO-1 (1).
        optim_grads: the above and gradients, as in ZeRO-2 (2).
        optim_grads_params: the above and compute weights, as in ZeRO-3 and FSDP (3).

    Clients may write the names in capitals, too.
    """

    no_shard = 0
    optim = 1
    optim_grads = 2
    optim_grads_params = 3
    NO_SHARD = no_shard
    OPTIM = optim
    OPTIM_GRADS = optim_grads
    OPTIM_GRADS_PARAMS = optim_grads_params


def resolve_strategy(value: int | str | ShardingStrategy, argument: str = "zero_dp_strategy") -> ShardingStrategy:
    """Resolve a strategy from its number or name."""
    if isinstance(value, str) and value in ShardingStrategy.__members__:
        return ShardingStrategy[value]
    if isinstance(value, int) and not isinstance(value, bool) and value in set(ShardingStrategy):
        return ShardingStrategy(value)
    allowed = ", ".join(f'{int(strategy)} or "{strategy.name}"' for strategy in ShardingStrategy)
    raise ConfigurationError(f"{argument}={value!r} is not a sharding strategy; give one of {allowed}.")
