"""Every option of `fully_shard`: how its value is read off a live model, and what effect it has there. Pure."""

from __future__ import annotations

from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.option_facts import Effect, Option, OptionFacts, has, none
from megatron_fsdp.placement import ShardingStrategy
from megatron_fsdp.weight_plan import DOUBLE_BUFFERS, WeightAllocator

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
