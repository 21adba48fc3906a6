"""Every option of `fully_shard`: how its value is read off a live model, and what effect it has there. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_fsdp.config.precision import MixedPrecisionPolicy
from megatron_fsdp.config.strategy import ShardingStrategy
from megatron_fsdp.sharding.memory_plan import DOUBLE_BUFFERS, WeightAllocator

# What options are told by: facts of a live model, as plain data. Pure.


@dataclass(frozen=True)
class OptionFacts:
    """Facts of one model on one rank.

    Attributes:
        num_ranks: Data-parallel ranks of dense parameters.
        outer_ranks: Of the outer axis; 0: there is none.
        mesh_dims: Names of the mesh's dimensions.
        shard_dim: The one to shard over.
        outer_dim: The outer one.
        tp_dim: The tensor-parallel one.
        tensor_parallel: How many parameters tensor parallelism has cut.
        has_gather_group: Whether gathers run over a second group.
        has_expert_gather_group: The same for experts.
        has_expert_mesh: Whether experts have a mesh of their own.
        experts: How many parameters are experts'.
        device: Where the buffers live.
        strategy: On the sharding axis, 0 to 3.
        outer_strategy: On the outer axis.
        unit_modules: What was given as units, in words.
        unit_source: How units were found.
        units: Besides the root.
        uses_buckets: Whether these are buckets by size.
        init_meta: Of parameters on the meta device.
        policy: The dtypes asked for.
        narrow: Whether any gradient travels or accumulates in 16 bits.
        has_main_copy: Whether any main weight is memory of its own.
        overlap_grad_reduce: As asked for.
        overlap_param_gather: As asked for.
        reduces_early: Whether units are reduced during backward.
        gathers: Whether weights are gathered at all.
        sharded_weights: Whether weights are sharded at rest.
        auto_sync: Whether every backward ends with a sync.
        describes_state: Whether state dicts say which part of a tensor a rank holds.
        checks_finite: Whether gradients are checked for NaN.
        checks_large: For large values.
        averages: Whether the collective averages.
        exchanges: Whether reduce-scatters are built from an all-to-all and a local sum.
        sums_locally: Whether that was asked for.
        bucket_numel: Where parameters outside of units, or all of them, are cut; None: never.
        cut_groups: Whether they were cut.
        per_token: Whether gradients are summed without a factor.
        decouples: Whether gradients are shown as `decoupled_grad`.
        allocator: Of gathered weights.
        idle: Names of the arguments that were given for another allocator, and have no effect under the strategy.
        slots: How many units besides the root are gathered at a time.
        may_grow: Whether that number follows from prefetching.
        forward_depth: Units gathered ahead in forward.
        backward_depth: In backward.
        buckets: Buckets besides that of the root.
        communication_numel: Elements to communicate at once, as asked for.
        fine_grained: Whether modules inside units are units.
        verify_ranks_s: Seconds to wait for a rank in comparisons; 0.0: there are none.
        asks_usage: Whether ranks ask at every sync which parameters were used.
        scales_first: Whether gradients are scaled before they travel.
        fp32_patterns: Of parameters whose gradients accumulate in float32.
        gathers_at_once: Whether a parameter sync only starts gathers.
        gather_mode: When changed weights are gathered into buckets; None for units.
        numel_multiple: What the elements of every group are padded to a multiple of.
        delays_weights: Whether weight gradients are computed at the end of backward.
        fuses: Whether linears were asked to write weight gradients straight into buckets.
        fused_linears: How many do.
    """

    num_ranks: int
    outer_ranks: int
    mesh_dims: tuple[str, ...]
    shard_dim: str
    outer_dim: str | None
    tp_dim: str | None
    tensor_parallel: int
    has_gather_group: bool
    has_expert_gather_group: bool
    has_expert_mesh: bool
    experts: int
    device: str
    strategy: int
    outer_strategy: int
    unit_modules: str
    unit_source: str
    units: int
    uses_buckets: bool
    init_meta: bool | str
    policy: MixedPrecisionPolicy
    narrow: bool
    has_main_copy: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    reduces_early: bool
    gathers: bool
    sharded_weights: bool
    auto_sync: bool
    describes_state: bool
    checks_finite: bool
    checks_large: bool
    averages: bool
    exchanges: bool
    sums_locally: bool
    bucket_numel: int | None
    cut_groups: bool
    per_token: bool
    decouples: bool
    allocator: WeightAllocator
    idle: tuple[str, ...]
    slots: int
    may_grow: bool
    forward_depth: int
    backward_depth: int
    buckets: int
    communication_numel: int | None
    fine_grained: bool
    verify_ranks_s: float
    asks_usage: bool
    scales_first: bool
    fp32_patterns: tuple[str, ...]
    gathers_at_once: bool
    gather_mode: str | None
    numel_multiple: int
    delays_weights: bool
    fuses: bool
    fused_linears: int


@dataclass(frozen=True)
class Effect:
    """Whether an option has one, and which, or why not."""

    is_there: bool
    told: str


def has(told: str) -> Effect:
    """It has this effect."""
    return Effect(True, told)


def none(told: str) -> Effect:
    """It has none, for this reason."""
    return Effect(False, told)


Judge = Callable[[OptionFacts], Effect]
Read = Callable[[OptionFacts], object]


@dataclass(frozen=True)
class Option:
    """One option of a wrapper.

    Attributes:
        name: As the caller writes it.
        default: What leaving it out gives; or (facts) -> that, where it follows from something else.
        read: (facts) -> its value as it was applied.
        judge: (facts) -> its effect.
    """

    name: str
    default: object
    read: Read
    judge: Judge

    def default_in(self, facts: OptionFacts) -> object:
        """What leaving it out gives here."""
        return self.default(facts) if callable(self.default) else self.default


_ALONE = "one rank, nothing is communicated"
_SINGLE = "there is no outer axis"
_POLICY = MixedPrecisionPolicy()


def strategy_name(number: int) -> str:
    """A strategy by name."""
    return ShardingStrategy(number).name


def _strategy(facts: OptionFacts) -> Effect:
    held = ("nothing is sharded", "optimizer state is sharded", "optimizer state and gradients are sharded")
    told = (*held, "weights, gradients and optimizer state are sharded")[facts.strategy]
    inner = facts.num_ranks // max(1, facts.outer_ranks)
    return has(f"{told} over {inner} ranks") if inner > 1 else none(_ALONE)


def _outer(facts: OptionFacts) -> Effect:
    if not facts.outer_ranks:
        return none(_SINGLE)
    if facts.outer_ranks == 1:
        return none("the outer axis has one rank")
    how = "shared out" if facts.outer_strategy else "replicated"
    return has(f"main weights and optimizer state are {how} over {facts.outer_ranks} outer ranks")


def reduces_early(facts: OptionFacts) -> Effect:
    """Of `overlap_grad_reduce`."""
    if facts.num_ranks == 1:
        return none(_ALONE)
    if facts.delays_weights:
        return none("delayed weight gradients are computed and reduced at the end of backward")
    if facts.strategy >= ShardingStrategy.optim_grads:
        return none(f"strategy {strategy_name(facts.strategy)} always reduces during backward")
    when = "during backward" if facts.reduces_early else "at the end of backward"
    return has(f"gradients are reduced {when}")


def gathers_ahead(facts: OptionFacts) -> Effect:
    """Of `overlap_param_gather`."""
    if facts.num_ranks == 1:
        return none(_ALONE)
    if not facts.gathers:
        return none(f"strategy {strategy_name(facts.strategy)} gathers nothing")
    if facts.strategy == ShardingStrategy.optim_grads_params:
        return none("strategy optim_grads_params always gathers ahead")
    return has(f"weights are gathered {'ahead of their use' if facts.overlap_param_gather else 'when they are needed'}")


def averages(facts: OptionFacts) -> Effect:
    """Of `average_in_collective`."""
    if facts.num_ranks == 1:
        return none(_ALONE)
    if facts.per_token:
        return none("calculate_per_token_loss: gradients are summed")
    if facts.averages and facts.exchanges:
        return has("all-reduces average; reduce-scatters add up here and divide")
    return has("the collective averages" if facts.averages else "a sum and a factor")


def sums_in_fp32(facts: OptionFacts) -> Effect:
    """Of `reduce_scatter_with_fp32_accumulation`."""
    if facts.num_ranks == 1:
        return none(_ALONE)
    if facts.strategy == ShardingStrategy.no_shard:
        return none("gradients are all-reduced, never scattered")
    if not facts.narrow:
        return none("gradients travel in float32 or wider, and are added in it")
    if facts.exchanges and not facts.sums_locally:
        return none("this back end's reduce-scatter does so anyway")
    return has("gradients are exchanged and added up here" if facts.sums_locally else "the back end adds up")


def _double_buffer(facts: OptionFacts) -> Effect:
    if not facts.sharded_weights:
        return none("weights are whole on every rank")
    if facts.allocator in (WeightAllocator.DOUBLE_BUFFER, WeightAllocator.PERSISTENT_DOUBLE_BUFFER):
        return has(f"gathered weights of units alike live in {facts.slots} buffers that are taken at once")
    if facts.allocator is WeightAllocator.MAX_POOL:
        return none("maxpool_double_buffer says where gathered weights live")
    return has(f"gathered weights live in up to {facts.slots} slots or storages taken when they are first used")


def _max_pool(facts: OptionFacts) -> Effect:
    if not facts.sharded_weights:
        return none("weights are whole on every rank")
    if facts.allocator is WeightAllocator.MAX_POOL:
        return has(f"gathered weights of every unit live in {facts.slots} buffers that are taken at once")
    return none("other options say where gathered weights live")


def _persistent(facts: OptionFacts) -> Effect:
    if facts.allocator is WeightAllocator.PERSISTENT_DOUBLE_BUFFER:
        return has("units that fit no buffer keep one of their own")
    return none("concerns double buffers that not every unit fits")


def _in_slots(facts: OptionFacts, told: str) -> Effect:
    return has(told) if facts.sharded_weights else none("weights are whole on every rank")


def _prefetch(facts: OptionFacts, depth: int) -> Effect:
    if not facts.gathers:
        return none("nothing is gathered")
    return has(f"{depth} units are gathered ahead") if facts.units else none("there are no units besides the root")


def usual_depth(facts: OptionFacts) -> int:
    """How many units are gathered ahead where nothing is said."""
    ahead = int(facts.overlap_param_gather or facts.strategy == ShardingStrategy.optim_grads_params)
    return min(ahead, facts.slots - 1)


def _units(facts: OptionFacts) -> Effect:
    return has(f"{facts.units} units: {facts.unit_source}") if facts.units else none("no unit was found")


def _second_group(is_there: bool) -> Effect:
    return has("gathers run over a second group") if is_there else none("gathers and reductions share a group")


def _bucketing(facts: OptionFacts) -> Effect:
    if facts.bucket_numel is None:
        return has("parameters outside of units are never cut")
    if not facts.cut_groups:
        return none(f"parameters outside of units fill less than {facts.bucket_numel:,} elements")
    return has(f"parameters outside of units are cut at {facts.bucket_numel:,} elements")


def grad_comm(facts: OptionFacts) -> Effect:
    """Of the dtype in which gradients travel."""
    return has("gradients travel in it") if facts.num_ranks > 1 else none(_ALONE)


def main_params(facts: OptionFacts) -> Effect:
    """Of the dtype of main weights."""
    if facts.has_main_copy:
        return has("main weights are copies of their own")
    return none("compute weights are the main weights")


def _usage(facts: OptionFacts) -> Effect:
    if facts.num_ranks == 1:
        return none("one rank knows which parameters it used")
    return has("ranks agree at every sync" if facts.asks_usage else "ranks agree until all parameters were used")


def fuses(facts: OptionFacts) -> Effect:
    """Judge `gradient_accumulation_fusion`."""
    if not facts.fuses:
        return has("gradients of linears are copied into buckets, as all others")
    if not facts.fused_linears:
        return none("no plain nn.Linear computes its weight gradient in the dtype of its bucket")
    return has(f"{facts.fused_linears} linears write weight gradients straight into buckets")


def _meta(facts: OptionFacts) -> Effect:
    return has("was done when the model was wrapped") if facts.init_meta else none("nothing was on the meta device")


def _not_supported(name: str) -> Option:
    return Option(name, False, lambda _: False, lambda _: none("not supported yet; only the default is accepted"))


def _replaced(name: str, by: str) -> Option:
    return Option(name, None, lambda _: None, lambda _: none(f"deprecated; what it asked for shows in {by}"))


MESH: tuple[Option, ...] = (
    Option("device_mesh", ("fsdp",), lambda f: f.mesh_dims, lambda f: has(f"{f.num_ranks} data-parallel ranks")),
    Option(
        "dp_shard_dim",
        lambda f: f.shard_dim if len(f.mesh_dims) == 1 else None,
        lambda f: f.shard_dim,
        lambda f: has(f"sharded over {f.shard_dim}"),
    ),
    Option(
        "tp_dim",
        None,
        lambda f: f.tp_dim,
        lambda f: (
            has(f"{f.tensor_parallel} parameters are cut over {f.tp_dim} before")
            if f.tensor_parallel
            else none("no parameter is cut by tensor parallelism")
        ),
    ),
    Option(
        "expt_device_mesh",
        None,
        lambda f: "given" if f.has_expert_mesh else None,
        lambda f: (
            has(f"{f.experts} parameters are experts'")
            if f.experts and f.has_expert_mesh
            else none("no parameter is an expert's" if f.has_expert_mesh else "experts are sharded as everything else")
        ),
    ),
    Option("device", lambda f: f.device, lambda f: f.device, lambda f: has(f"buffers live on {f.device}")),
)
"""Where a model is sharded."""

COMMON: tuple[Option, ...] = (
    Option("init_model_with_meta_device", False, lambda f: f.init_meta, _meta),
    Option(
        "sync_model_each_microbatch",
        True,
        lambda f: f.auto_sync,
        lambda f: has(
            "every backward ends with a gradient sync" if f.auto_sync else "gradients are final at finish_grad_sync"
        ),
    ),
    Option(
        "calculate_per_token_loss",
        False,
        lambda f: f.per_token,
        lambda f: (
            has("gradients are summed" if f.per_token else "gradients are averaged")
            if f.num_ranks > 1
            else none(_ALONE)
        ),
    ),
    Option(
        "verify_ranks",
        0.0,
        lambda f: f.verify_ranks_s,
        lambda f: (
            none(_ALONE)
            if f.num_ranks == 1
            else has(f"ranks compare, waiting up to {f.verify_ranks_s:g} s")
            if f.verify_ranks_s
            else none("ranks are not compared")
        ),
    ),
    Option("find_unused_parameters", False, lambda f: f.asks_usage, _usage),
)
"""Options of every wrapper."""

FULLY_SHARD: tuple[Option, ...] = (
    *MESH,
    Option("dp_outer_dim", None, lambda f: f.outer_dim, _outer),
    Option("hybrid_fsdp_group", None, lambda f: "given" if f.outer_dim else None, _outer),
    Option(
        "hybrid_fsdp_expt_group",
        None,
        lambda f: "given" if f.outer_dim and f.has_expert_mesh else None,
        lambda f: _outer(f) if f.has_expert_mesh else none("experts have no mesh of their own"),
    ),
    Option(
        "fsdp_group_ag",
        None,
        lambda f: "given" if f.has_gather_group else None,
        lambda f: _second_group(f.has_gather_group),
    ),
    Option(
        "expt_fsdp_group_ag",
        None,
        lambda f: "given" if f.has_expert_gather_group else None,
        lambda f: _second_group(f.has_expert_gather_group),
    ),
    Option("fsdp_unit_modules", "auto", lambda f: f.unit_modules, _units),
    Option("zero_dp_strategy", "optim_grads_params", lambda f: strategy_name(f.strategy), _strategy),
    Option("outer_dp_sharding_strategy", "no_shard", lambda f: strategy_name(f.outer_strategy), _outer),
    *COMMON,
    Option("main_params_dtype", _POLICY.main_params_dtype, lambda f: f.policy.main_params_dtype, main_params),
    Option(
        "main_grads_dtype",
        _POLICY.main_grads_dtype,
        lambda f: f.policy.main_grads_dtype,
        lambda _: has("gradients accumulate in it"),
    ),
    Option("grad_comm_dtype", _POLICY.grad_comm_dtype, lambda f: f.policy.grad_comm_dtype, grad_comm),
    Option("overlap_grad_reduce", True, lambda f: f.overlap_grad_reduce, reduces_early),
    Option("overlap_param_gather", True, lambda f: f.overlap_param_gather, gathers_ahead),
    Option(
        "preproc_state_dict_for_dcp_ckpt",
        True,
        lambda f: f.describes_state,
        lambda f: has("state dicts say which part a rank holds" if f.describes_state else "state dicts say nothing"),
    ),
    Option(
        "report_nan_in_param_grad",
        False,
        lambda f: f.checks_finite,
        lambda f: has("every gradient is checked" if f.checks_finite else "gradients are not checked"),
    ),
    Option("average_in_collective", False, lambda f: f.averages, averages),
    Option("disable_bucketing", False, lambda f: f.bucket_numel is None, _bucketing),
    Option(
        "fsdp_double_buffer",
        False,
        lambda f: (
            "fsdp_double_buffer" in f.idle
            or (f.allocator in DOUBLE_BUFFERS and f.allocator is not WeightAllocator.MAX_POOL)
        ),
        _double_buffer,
    ),
    Option(
        "fsdp_db_use_persist_buf_on_alloc_fail",
        False,
        lambda f: (
            "fsdp_db_use_persist_buf_on_alloc_fail" in f.idle or f.allocator is WeightAllocator.PERSISTENT_DOUBLE_BUFFER
        ),
        _persistent,
    ),
    Option(
        "enable_fine_grained_param_gather",
        False,
        lambda f: f.fine_grained,
        lambda f: (
            has("modules are gathered one by one" if f.fine_grained else "units are gathered whole")
            if f.gathers
            else none("nothing is gathered")
        ),
    ),
    Option(
        "use_decoupled_grad",
        False,
        lambda f: f.decouples,
        lambda f: has(f"gradients are shown as {'decoupled_grad' if f.decouples else 'grad'}"),
    ),
    Option(
        "maxpool_double_buffer",
        False,
        lambda f: "maxpool_double_buffer" in f.idle or f.allocator is WeightAllocator.MAX_POOL,
        _max_pool,
    ),
    Option("reduce_scatter_with_fp32_accumulation", False, lambda f: f.sums_locally, sums_in_fp32),
    Option(
        "weight_allocator",
        "slots",
        lambda f: "resize" if f.allocator is WeightAllocator.RESIZE else "slots",
        lambda f: (
            none("double buffers were asked for")
            if f.allocator in DOUBLE_BUFFERS
            else _in_slots(f, f"gathered weights live by the rules of {f.allocator.value}")
        ),
    ),
    Option(
        "max_gathered_units",
        None,
        lambda f: None if f.may_grow or f.allocator in DOUBLE_BUFFERS else f.slots,
        lambda f: _in_slots(f, f"at most {f.slots} units are gathered at a time"),
    ),
    Option("forward_prefetch_units", usual_depth, lambda f: f.forward_depth, lambda f: _prefetch(f, f.forward_depth)),
    Option(
        "backward_prefetch_units", usual_depth, lambda f: f.backward_depth, lambda f: _prefetch(f, f.backward_depth)
    ),
    Option("gradient_accumulation_fusion", False, lambda f: f.fuses, fuses),
    *map(
        _not_supported,
        ("keep_fp8_transpose_cache", "nccl_ub", "disable_symmetric_registration", "cuda_graph_mode"),
    ),
    _replaced("grad_reduce_in_fp32", "main_grads_dtype and grad_comm_dtype"),
    _replaced("preserve_fp32_weights", "main_params_dtype"),
    _replaced("check_for_nan_in_grad", "report_nan_in_param_grad"),
    _replaced("keep_fp8_transpose_cache_when_using_custom_fsdp", "keep_fp8_transpose_cache"),
)
"""Every argument of `fully_shard_model` but the model; the policy by its three dtypes."""


# Every field of `DistributedDataParallelConfig`: what effect it has on a live model. Pure.

_OF_FULLY_SHARD: Mapping[str, Judge] = {option.name: option.judge for option in FULLY_SHARD}


def _not_yet(_facts: OptionFacts) -> Effect:
    return none("not supported yet; only the default is accepted")


def _idle(told: str) -> Judge:
    return lambda _: none(told)


def _units_only(judge: Judge) -> Judge:
    return lambda f: none("concerns units, and these are buckets") if f.uses_buckets else judge(f)


def _buckets_only(judge: Judge) -> Judge:
    return lambda f: judge(f) if f.uses_buckets else none("concerns buckets, and these are units")


def _optimizer(facts: OptionFacts) -> Effect:
    if not facts.uses_buckets:
        return none("the sharding strategy says so")
    if facts.num_ranks == 1:
        return none("one rank, nothing is sharded")
    return has("optimizer state is sharded" if facts.strategy else "every rank updates everything")


def _instances(facts: OptionFacts) -> Effect:
    if not facts.outer_ranks:
        return none("all ranks share one optimizer")
    return has(f"{facts.outer_ranks} groups of ranks with a whole optimizer each")


def _bucket_size(facts: OptionFacts) -> Effect:
    if facts.bucket_numel is None:
        return none("parameters are not cut by size")
    if not facts.cut_groups:
        return none(f"all fit into one bucket of {facts.bucket_numel:,} elements")
    return has(f"buckets close at {facts.bucket_numel:,} elements")


def _accumulates(facts: OptionFacts) -> Effect:
    return has("gradients accumulate and travel in float32" if not facts.narrow else "gradients may do so in 16 bits")


def _division(facts: OptionFacts) -> Effect:
    if facts.num_ranks == 1 or facts.per_token:
        return none("gradients are not divided")
    if facts.averages:
        return none("the collective divides")
    return has(f"gradients are divided {'before they travel' if facts.scales_first else 'after they were added up'}")


def _aligned(facts: OptionFacts) -> Effect:
    if not facts.gathers:
        return none("nothing is gathered")
    return has(f"weights are gathered {facts.gather_mode}")


def _padding(facts: OptionFacts) -> Effect:
    if facts.numel_multiple > 1:
        return has(f"buckets are multiples of {facts.numel_multiple:,} elements")
    return has("buckets are padded for their shards only")


def _unit_size(facts: OptionFacts) -> Effect:
    if facts.communication_numel is None:
        return none("one unit is gathered ahead and two buckets are used")
    return has(f"{facts.forward_depth} units are gathered ahead, and there are {facts.buckets} buckets")


def _patterns(facts: OptionFacts) -> Effect:
    return has("their gradients accumulate in float32") if facts.fp32_patterns else none("no parameter is named")


EFFECTS: Mapping[str, Judge] = {
    "grad_reduce_in_fp32": _accumulates,
    "overlap_grad_reduce": reduces_early,
    "overlap_param_gather": gathers_ahead,
    "align_param_gather": _buckets_only(_aligned),
    "use_distributed_optimizer": _optimizer,
    "num_distributed_optimizer_instances": _instances,
    "check_for_nan_in_grad": _OF_FULLY_SHARD["report_nan_in_param_grad"],
    "check_for_large_grads": lambda f: has(f"large gradients are {'' if f.checks_large else 'not '}looked for"),
    "bucket_size": _bucket_size,
    "num_buckets": _buckets_only(_bucket_size),
    "pad_buckets_for_high_nccl_busbw": _buckets_only(_padding),
    "reduce_scatter_with_fp32_accumulation": sums_in_fp32,
    "param_name_patterns_for_fp32_local_accumulation": _patterns,
    "average_in_collective": averages,
    "use_megatron_fsdp": lambda f: has(f"{f.units} {'buckets by size' if f.uses_buckets else 'units'}"),
    "megatron_fsdp_version": _idle("there is one engine"),
    "use_custom_fsdp": _idle("former name of use_megatron_fsdp"),
    "data_parallel_sharding_strategy": _units_only(_OF_FULLY_SHARD["zero_dp_strategy"]),
    "outer_dp_sharding_strategy": _units_only(_OF_FULLY_SHARD["outer_dp_sharding_strategy"]),
    "gradient_reduce_div_fusion": _division,
    "suggested_communication_unit_size": _units_only(_unit_size),
    "fsdp_double_buffer": _units_only(_OF_FULLY_SHARD["fsdp_double_buffer"]),
    "fsdp_db_use_persist_buf_on_alloc_fail": _units_only(_OF_FULLY_SHARD["fsdp_db_use_persist_buf_on_alloc_fail"]),
    "fsdp_all_gather_in_start_param_sync": _units_only(
        lambda f: (
            has("start_param_sync " + ("only starts gathers" if f.gathers_at_once else "waits for each gather"))
            if f.gathers
            else none("nothing is gathered")
        )
    ),
    "delay_wgrad_compute": lambda f: has(
        f"weight gradients are computed {'at the end of' if f.delays_weights else 'during'} backward"
    ),
    "megatron_fsdp_main_params_dtype": main_params,
    "megatron_fsdp_main_grads_dtype": _OF_FULLY_SHARD["main_grads_dtype"],
    "megatron_fsdp_grad_comm_dtype": grad_comm,
    "megatron_fsdp_use_decoupled_grad": _OF_FULLY_SHARD["use_decoupled_grad"],
    "megatron_fsdp_enable_fine_grained_param_gather": _units_only(_OF_FULLY_SHARD["enable_fine_grained_param_gather"]),
    "megatron_fsdp_max_pool_double_buffer": _units_only(_OF_FULLY_SHARD["maxpool_double_buffer"]),
    "gradient_accumulation_fusion": fuses,
    **dict.fromkeys(
        (
            "fp8_param_gather",
            "fp4_param_gather",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "keep_fp8_transpose_cache",
            "nccl_ub",
            "disable_symmetric_registration",
            "fsdp_manual_registration",
            "megatron_fsdp_cuda_graph_mode",
        ),
        _not_yet,
    ),
}
"""By name of the field."""

ENGINE_FIELDS = (
    "bucket_size",
    "suggested_communication_unit_size",
    "gradient_reduce_div_fusion",
    "param_name_patterns_for_fp32_local_accumulation",
    "check_for_large_grads",
    "delay_wgrad_compute",
    "fsdp_all_gather_in_start_param_sync",
)
"""Fields that `MegatronFSDP` honours and `fully_shard` has no argument for."""

BUCKETS: tuple[Option, ...] = (
    *MESH,
    *COMMON,
    *(option for option in FULLY_SHARD if option.name in ("disable_bucketing", "fsdp_unit_modules")),
)
"""Arguments of `DistributedDataParallel` beside its configuration (`dp_shard_dim` is called `dp_dim` there)."""
