"""The settings of a plan besides the model: ranks, strategy, dtypes, batch, optimizer and recomputation."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from itertools import groupby
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from megatron_fsdp.config.ddp_config import ShardingStrategy, resolve_strategy
from megatron_fsdp.config.engine_options import MemoryOptions, Offload, default_memory_options, resolve_offload
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision
from megatron_fsdp.engine.schedule import SyncMode
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.optim.adamw8bit import BLOCK, CHUNK_NUMEL
from megatron_fsdp.sharding.placement import placements_for

Known = TypeVar("Known")

Recompute = Literal["none", "full", "selective", "every_second_product", "mlp"]
"""The part that backward recomputes: nothing; whole layers (every unit but the root); the core of attention, which
is all of it except its products with weights (as in Megatron-LM); whole layers except the results of attention and
of every second product; or the MLP (or mixture) of layers."""


def one_of(what: str, given: str, known: Mapping[str, Known]) -> Known:
    """Look up a name; raise a ConfigurationError for an unknown one, with the nearest and all known names."""
    if given in known:
        return known[given]
    nearest = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigurationError(f"{what}; {hint}choose one of {', '.join(known)}")


Backend = Literal["nccl", "gloo"]
"""The communication backend. gloo reduces by an exchange and a local sum, which needs memory to receive."""

Accumulation = Literal["every", "outer", "last"]
"""When gradients of several microbatches are reduced: after every one, as a plain loop does; over the outer axis at the
last (`set_model_auto_sync(False)` until then); or everything at the last (`no_sync` until then: a whole gradient is
kept)."""


class LocalShard(NamedTuple):
    """This rank's elements [start, stop) of one flattened parameter, as its optimizer updates them."""

    name: str
    start: int
    stop: int
    precision: ResolvedPrecision
    kind: OptimizerKind
    is_offloaded: bool = False  # its main weights
    state_is_offloaded: bool = False
    segment: str = ""  # the first parameter of the shards that are stepped with it as one tensor

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """The bytes of their main weights."""
        return self.numel * self.precision.main_params.itemsize

    @property
    def state_bytes(self) -> int:
        """The bytes of their optimizer state."""
        return self.kind.state_bytes(self)

    @property
    def is_streamed(self) -> bool:
        """True if only their optimizer state is offloaded, so that a step moves it to the device and back."""
        return self.state_is_offloaded and not self.is_offloaded


@dataclass(frozen=True)
class OptimizerKind:
    """The memory that an optimizer keeps and borrows."""

    name: str  # for people
    states_per_param: int  # values that it keeps per parameter, in the dtype of the main weights
    counts_steps: bool  # whether it keeps a counter of 4 bytes per parameter
    temporaries: int  # values per parameter that its step borrows
    one_by_one: bool  # whether it borrows for one parameter after another, else for all at a time
    passes_per_param: int  # values per parameter that a step reads and writes, its state included

    def state_bytes(self, shard: LocalShard) -> int:
        """Count the bytes of state for a shard."""
        return self.states_per_param * shard.num_bytes + self.counter_bytes

    @property
    def counter_bytes(self) -> int:
        """The bytes of a parameter's step counter."""
        return _COUNTER_BYTES * self.counts_steps

    def borrowed_bytes(self, shards: Sequence[LocalShard]) -> int:
        """Count the bytes that a step on shards borrows."""
        by_segment = groupby(shards, key=attrgetter("segment"))
        sizes = [sum(shard.num_bytes for shard in members) for _, members in by_segment]
        if not self.one_by_one:
            return self.temporaries * sum(sizes)
        first, second = nlargest(2, [*sizes, 0, 0])  # the last value of the one before is still there
        return self.temporaries * first + second


class _EightBitKind(OptimizerKind):
    """`AdamW8bit`: a byte for each of two moments, and an fp32 scale with the first element of each block of 256."""

    def state_bytes(self, shard: LocalShard) -> int:
        """Count codes, scales and the counter."""
        scales = -(-shard.stop // BLOCK) - -(-shard.start // BLOCK)
        return 2 * (shard.numel + _FP32_BYTES * scales) + self.counter_bytes

    def borrowed_bytes(self, shards: Sequence[LocalShard]) -> int:
        """Count the scales of all blocks, the two codes, and the decoded state of one shard at a time."""
        blocks = {shard: -(-shard.stop // BLOCK) - shard.start // BLOCK for shard in shards if shard.numel}
        decoded = (
            self.temporaries * min(shard.numel, CHUNK_NUMEL) + min(BLOCK * count, CHUNK_NUMEL)
            for shard, count in blocks.items()
        )
        return _FP32_BYTES * (2 * sum(blocks.values()) + max(decoded, default=0) + 2 * _CODE_VALUES)


_COUNTER_BYTES = _FP32_BYTES = 4
_CODE_VALUES = 256 + 255  # of a code, and the thresholds between them
MUON, EIGHT_BIT = "muon", "adamw8bit"
OPTIMIZERS = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", 2, True, 1, False, 7),
        OptimizerKind("adamw-fused", 2, True, 0, False, 7),
        OptimizerKind("adamw-loop", 2, True, 2, True, 7),
        _EightBitKind(EIGHT_BIT, 0, True, 6, True, 82),
        OptimizerKind("momentum", 1, False, 0, False, 5),
        OptimizerKind("sgd", 0, False, 0, False, 3),
        OptimizerKind(MUON, 2, True, 1, False, 7),
    )
}
"""By name. Torch's AdamW on lists of tensors (foreach, its default on CUDA) borrows one value per parameter for the
denominator, its loop over parameters (the default on CPU) two for one parameter at a time; fused kernels nothing.
"muon" is `torch.optim.Muon` for matrices, of which it keeps one value, and such an AdamW for the others. "adamw8bit" is
`megatron_fsdp.AdamW8bit`, which runs operator by operator on a million elements at a time."""


def find_optimizer(name: str) -> OptimizerKind:
    """Return the optimizer kind of this name."""
    return one_of(f"optimizer {name!r} is not known", name, OPTIMIZERS)


@dataclass(frozen=True)
class ParallelRanks:
    """The ranks along each axis. Context-parallel ranks share parameters, so they belong to the sharding axis.

    Raises:
        ParallelSizeError: A size is below 1, or `ep` does not divide the ranks of the sharding axis.
    """

    dp_shard: int  # of the sharding axis without context parallelism
    dp_outer: int = 1  # of the outer axis of hybrid sharding; 1: there is none
    tp: int = 1  # tensor-parallel
    cp: int = 1  # context-parallel
    pp: int = 1  # pipeline stages
    ep: int = 1  # expert-parallel; they are some of the ranks of the sharding axis, and divide them

    def __post_init__(self) -> None:
        sizes = vars(self)
        wrong = [f"{name}={size!r}" for name, size in sizes.items() if not is_count(size)]
        if wrong:
            raise ParallelSizeError(f"invalid {', '.join(wrong)}: give whole numbers, 1 or more")
        if self.inner % self.ep:
            raise ParallelSizeError(
                f"ep={self.ep} does not divide the {self.inner} ranks that share parameters (dp_shard={self.dp_shard} "
                f"x cp={self.cp}); experts are divided over some of these ranks"
            )

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return self.dp_outer * self.inner * self.tp * self.pp

    @property
    def inner(self) -> int:
        """The ranks of the sharding axis, context-parallel ones included."""
        return self.dp_shard * self.cp

    @property
    def divided(self) -> dict[str, int]:
        """The sizes above 1 of the axes that divide the model or its sequences, by name."""
        return {name: size for name in ("tp", "cp", "pp", "ep") if (size := getattr(self, name)) > 1}

    @property
    def data_parallel(self) -> int:
        """The ranks that read different sequences."""
        return self.dp_shard * self.dp_outer


Ranks = int | Mapping[str, int] | ParallelRanks


def resolve_ranks(ranks: Ranks) -> ParallelRanks:
    """Return the sizes of all axes."""
    if isinstance(ranks, ParallelRanks):
        return ranks
    if isinstance(ranks, int):
        return ParallelRanks(ranks)
    given: object = ranks
    if not isinstance(given, Mapping) or not given:
        raise ConfigurationError(f"ranks={ranks!r}; give their number, or sizes by axis such as dict(dp_shard=8)")
    for name in given:
        one_of(f"there is no axis {name!r}", name, ParallelRanks.__dataclass_fields__)
    return ParallelRanks(**{"dp_shard": 1, **given})


def is_count(size: object) -> bool:
    """Return True if a value is a whole number of 1 or more."""
    return isinstance(size, int) and not isinstance(size, bool) and size >= 1


@dataclass(frozen=True)
class Setup:
    """The settings of a run besides the model.

    Raises:
        ConfigurationError: Something is not possible, alone or with the rest.
    """

    ranks: ParallelRanks
    strategy: ShardingStrategy = ShardingStrategy.optim_grads_params  # on the sharding axis
    # on the outer axis; without effect where it has one rank
    outer_strategy: ShardingStrategy = ShardingStrategy.no_shard
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)  # dtypes
    # how gathered weights borrow memory, and how far ahead they are gathered
    memory: MemoryOptions = field(default_factory=default_memory_options)
    overlap_grad_reduce: bool = True  # reduce during backward; strategies 2 and 3 always do
    microbatches: int = 1  # pairs of forward and backward per optimizer step
    accumulation: Accumulation = "every"  # when gradients of several microbatches are reduced
    optimizer: OptimizerKind = OPTIMIZERS["adamw"]
    recompute: Recompute = "none"  # which forwards are repeated
    backend: Backend = "nccl"  # the back end of collectives
    device_rank: int = 0  # the data-parallel rank that is looked at, outer axis first; they differ in padding only
    sequence_parallel: bool = True  # tensor-parallel ranks share activations between layers along the sequence
    virtual_stages: int = 1  # pieces of the model on each pipeline rank (interleaved 1F1B); 1: plain 1F1B
    fp8: bool = False  # products with weights run in 8 bits
    # collectives of tensor, context, expert and pipeline parallelism run behind compute
    overlap_exchanges: bool = False
    offload: Offload = Offload()  # noqa: RUF009 (frozen)
    # weights in "fp8_compute" stay transposed, too, from backward until they are resharded
    keep_fp8_transpose_cache: bool = False

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ConfigurationError(f"invalid microbatches={self.microbatches}: give 1 or more")
        for name, kind in (("recompute", Recompute), ("accumulation", Accumulation), ("backend", Backend)):
            if getattr(self, name) not in get_args(kind):
                known = ", ".join(get_args(kind))
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not known; choose one of {known}")
        if self.virtual_stages < 1 or (self.virtual_stages > 1 and self.ranks.pp == 1):
            raise ConfigurationError(
                f"invalid virtual_stages={self.virtual_stages} with pp={self.ranks.pp}: give 1, or more with pp above 1"
            )
        if self.optimizer.name == MUON and {"tp", "pp", "ep"} & self.ranks.divided.keys():
            raise ConfigurationError("Muon is planned on data- and context-parallel ranks; leave tp, pp and ep at 1")
        if self.optimizer.name == EIGHT_BIT and {"tp", "ep"} & self.ranks.divided.keys():
            raise ConfigurationError(
                "AdamW8bit is planned where no other axis cuts a parameter, maybe inside a block of 256 elements; "
                "leave tp and ep at 1"
            )
        data_ranks = self.ranks.dp_outer * self.ranks.inner
        if not 0 <= self.device_rank < data_ranks:
            raise ConfigurationError(f"rank {self.device_rank} does not exist; there are ranks 0 to {data_ranks - 1}")
        if self.ranks.dp_outer == 1 and self.outer_strategy is not ShardingStrategy.no_shard:
            raise ConfigurationError(
                f'outer strategy "{self.outer_strategy.name}" needs an outer axis of 2 ranks or more; leave it out'
            )
        placements_for(self.strategy, self.outer)
        if not self.may_offload(self.offload):
            raise ConfigurationError(
                f"offload={self.offload} cannot be: state of {self.optimizer.name} is where its main weights are, and "
                "compute weights stay on the device where outer ranks share out the main ones (HFSDP); leave them out"
            )

    def may_offload(self, offload: Offload) -> bool:
        """Return True if the engine can offload this state: alone, and with compute weights."""
        is_alone = offload.optimizer_state and not offload.main_weights
        shares_outer = self.outer not in (None, ShardingStrategy.no_shard)
        is_whole = self.optimizer.name in (MUON, EIGHT_BIT)
        return not (is_alone and is_whole) and not (offload.compute_weights and shares_outer)

    @property
    def outer(self) -> ShardingStrategy | None:
        """The strategy on the outer axis; None without one."""
        return self.outer_strategy if self.ranks.dp_outer > 1 else None

    def mode(self, is_last: bool) -> SyncMode:
        """Return the engine's sync mode for a microbatch; the optimizer steps after the last."""
        every = self.accumulation == "every"
        return SyncMode(auto_sync=is_last or every, defer_all=not is_last and self.accumulation == "last")

    @property
    def reduces_early(self) -> bool:
        """True if gradients are reduced during backward."""
        return self.overlap_grad_reduce or self.strategy.shards_gradients


def make_setup(ranks: Ranks, **options: Any) -> Setup:
    """Build a setup from fields; strategies and optimizers may be names, and offload as in `fully_shard`.

    None means the default.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in {"strategy", "outer_strategy"} & chosen.keys():
        chosen[name] = resolve_strategy(chosen[name], name)
    if isinstance(chosen.get("optimizer"), str):
        chosen["optimizer"] = find_optimizer(chosen["optimizer"])
    if not isinstance(chosen.get("offload", Offload()), Offload):
        chosen["offload"] = resolve_offload(chosen["offload"], chosen.get("strategy", Setup.strategy))
    return Setup(resolve_ranks(ranks), **chosen)
