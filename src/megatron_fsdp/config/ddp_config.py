"""Sharding strategies, and `DistributedDataParallelConfig`: its fields, their values, and the rules between fields.

A field is checked by its declared type, so no field can be without a check. The combinations that are refused are
data, from which the documentation is made.
"""

import dataclasses
import enum
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import yaml

from megatron_fsdp.config.precision import DTYPE_NAMES, check_main_dtype, weight_formats_of
from megatron_fsdp.config.yaml_mapping import read_mapping
from megatron_fsdp.errors import ConfigurationError, explains_fields, nearest_name, warn_caller


class ShardingStrategy(enum.IntEnum):
    """Sharding strategies: the tensors that are sharded over data-parallel ranks.

    Attributes:
        no_shard: nothing, as in plain data parallelism (0).
        optim: main weights and optimizer state, as in ZeRO-1 (1).
        optim_grads: the above and gradients, as in ZeRO-2 (2).
        optim_grads_params: the above and compute weights, as in ZeRO-3 and FSDP (3).

    Clients may write the names in capitals, too.
    """

    shards_main_weights: bool  # and the optimizer's state
    shards_gradients: bool  # between microbatches
    shards_compute_weights: bool  # between uses

    def __new__(
        cls, number: int, main_weights: bool = False, gradients: bool = False, compute_weights: bool = False
    ) -> Self:
        """Return the member with a number; the rest says which buffers it shards."""
        member = int.__new__(cls, number)
        member._value_, member.shards_main_weights = number, main_weights
        member.shards_gradients, member.shards_compute_weights = gradients, compute_weights
        return member

    no_shard = 0, False, False, False
    optim = 1, True, False, False
    optim_grads = 2, True, True, False
    optim_grads_params = 3, True, True, True
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


MOST = 2**63 - 1
"""The largest whole number of a field: sizes are counted in 64 bits, and Python cannot print every larger one."""

FOLLOW = "auto"
"""The word for a dtype of None in flags and files."""


DECIDED_ELSEWHERE: Mapping[str, str] = {
    "grad_reduce_in_fp32": "mixed_precision_policy names the dtypes of gradients, and where it follows this is float32",
    "use_distributed_optimizer": "data_parallel_sharding_strategy says what is sharded",
    "num_distributed_optimizer_instances": "dist_index says which ranks share an optimizer (dp_outer_dim)",
    "align_param_gather": "whoever calls start_param_sync decides when pipeline stages gather",
    "num_buckets": "parameters are gathered and reduced by units",
    "pad_buckets_for_high_nccl_busbw": "parameters are gathered and reduced by units",
    "use_megatron_fsdp": "whoever calls MegatronFSDP has chosen it",
    "use_custom_fsdp": "whoever calls MegatronFSDP has chosen it",
}
"""Fields of a configuration that decide nothing in `MegatronFSDP`, with the reason."""


class Exclusion(NamedTuple):
    """Two fields that exclude each other, and their common effect, which follows "both" in the error."""

    one: str
    other: str
    reason: str


class Need(NamedTuple):
    """A switch that has an effect only with other switches.

    The published class takes those that are not refused in silence, so only a front end refuses them
    (`DistributedDataParallelConfig.idle_settings`).
    """

    field: str
    on: tuple[str, ...]
    refused: bool


EXCLUSIONS = (
    Exclusion(
        "param_name_patterns_for_fp32_local_accumulation",
        "grad_reduce_in_fp32",
        "choose which gradients accumulate in float32",
    ),
    Exclusion("num_buckets", "bucket_size", "cut gradients into buckets"),
    Exclusion("fp8_param_gather", "fp4_param_gather", "choose the format in which parameters are kept and gathered"),
    Exclusion("megatron_fsdp_weight_format", "fp8_param_gather", "choose the format in which parameters are gathered"),
    Exclusion("megatron_fsdp_weight_format", "fp4_param_gather", "choose the format in which parameters are gathered"),
)

NEEDS = (
    Need("reuse_grad_buf_for_mxfp8_param_ag", ("fp8_param_gather",), refused=True),
    Need("keep_fp8_transpose_cache", ("fp8_param_gather",), refused=False),
    Need("disable_symmetric_registration", ("nccl_ub",), refused=False),
    Need("fsdp_manual_registration", ("nccl_ub", "use_megatron_fsdp"), refused=False),
    Need("fsdp_db_use_persist_buf_on_alloc_fail", ("fsdp_double_buffer",), refused=False),
)

IMPLICATIONS = (
    ("nccl_ub", "fsdp_double_buffer"),
    ("megatron_fsdp_max_pool_double_buffer", "fsdp_double_buffer"),
    ("use_custom_fsdp", "use_megatron_fsdp"),
)
"""Switches that imply another one."""

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "megatron_fsdp_version": (1, 2),
    "data_parallel_sharding_strategy": tuple(strategy.name for strategy in ShardingStrategy),
    "outer_dp_sharding_strategy": (ShardingStrategy.no_shard.name, ShardingStrategy.optim.name),
    "data_parallel_sharding_strategy_experts": tuple(strategy.name for strategy in ShardingStrategy),
}
"""The allowed values of a field, as stored."""


def checked_values(given: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
    """Check the values of all fields and return them in their stored form."""
    values: dict[str, Any] = {}
    wrong = []
    for name, value in given.items():
        try:
            if isinstance(value, int) and abs(value) > MOST:
                raise ConfigurationError(f"{name} is a whole number beyond 2**63 - 1 in size; give a smaller one.")
            values[name] = _CHECKS[types[name]](name, value)
        except ConfigurationError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigurationError("\n".join(wrong))
    for rule in EXCLUSIONS:
        if _is_set(values[rule.one]) and _is_set(values[rule.other]):
            raise ConfigurationError(
                f"{rule.one}={values[rule.one]!r} and {rule.other}={values[rule.other]!r} both {rule.reason}; "
                "give only one of them."
            )
    for need in NEEDS:
        missing = missing_of(need, values)
        if need.refused and missing:
            raise ConfigurationError(f"{need.field}=True needs {missing}; set both or neither.")
    return values


def missing_of(need: Need, values: Mapping[str, Any]) -> str:
    """Return the missing requirement of a switch that is on; empty if there is none."""
    if not values[need.field]:
        return ""
    return " and ".join(f"{name}=True" for name in need.on if not values[name])


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != ()


def _switch(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is not a bool; give True or False.")
    return value


def _count(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigurationError(f"{name}={value!r} is not a positive whole number; give 1 or more.")
    if name in CHOICES and value not in CHOICES[name]:
        raise ConfigurationError(
            f"{name}={value!r} does not exist; give {' or '.join(str(choice) for choice in CHOICES[name])}."
        )
    return value


def _strategy(name: str, value: Any) -> str:
    strategy = resolve_strategy(value, name)
    if strategy.name not in CHOICES[name]:
        allowed = ", or ".join(f'{int(ShardingStrategy[choice])} or "{choice}"' for choice in CHOICES[name])
        raise ConfigurationError(f"{name}={strategy.name!r} is not possible on the outer axis; give {allowed}.")
    return strategy.name


def _dtype(name: str, value: object) -> torch.dtype | None:
    if isinstance(value, str):
        given, value = value, DTYPE_NAMES.get(value.removeprefix("torch."))
        if value is None and given != FOLLOW:
            known = ", ".join(DTYPE_NAMES)
            raise ConfigurationError(
                f"{name}={given!r} is not a dtype name; give one of {known}, or {FOLLOW!r} or None to follow."
            )
    try:
        check_main_dtype(value, name)
    except TypeError as error:
        raise ConfigurationError(str(error)) from None
    assert value is None or isinstance(value, torch.dtype)
    return value


def _patterns(name: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigurationError(f"{name}={value!r} is not a tuple of strings; write a tuple such as ('*norm*',).")
    for index, pattern in enumerate(value):
        if not isinstance(pattern, str):
            raise ConfigurationError(f"{name}[{index}]={pattern!r} is not a string; give a pattern such as '*norm*'.")
    if name == "megatron_fsdp_weight_format":
        weight_formats_of(value)
    return tuple(value)


_CHECKS: Mapping[Any, Callable[[str, Any], object]] = {
    bool: _switch,
    int: _count,
    int | None: lambda name, value: None if value is None else _count(name, value),
    str: _strategy,
    str | None: lambda name, value: None if value is None else _strategy(name, value),
    tuple[str, ...]: _patterns,
    torch.dtype | None: _dtype,
}
"""Declared type of a field -> its check, which returns the stored form."""


@explains_fields
@dataclass
class DistributedDataParallelConfig:
    """Configuration of gradient reduction and sharding over data-parallel ranks.

    It holds every field of the published package's class and of Megatron-Core's, and behind them some of its own.
    Holding a field is not a promise that every front end can honour it: what one cannot honour, it refuses when it is
    given the configuration.

    Strategies may be given as numbers and are stored as names; dtypes may be given as names such as ``"bf16"``,
    ``"torch.float32"`` or ``"auto"`` (None) and are stored as ``torch.dtype``. Checks run at construction; they always
    raise ``ConfigurationError``, which is a ``ValueError``, also where the published class raises ``AssertionError``. A
    check that torch before 2.11 needed (``nccl_ub`` with expandable segments) is left out, since 2.11 is required
    anyway.

    Attributes may be set afterwards; ``checked_copy`` checks them again, and front ends work on such a copy.

    Attributes:
        grad_reduce_in_fp32: Accumulate and reduce gradients in float32.
        overlap_grad_reduce: Reduce gradients during backward.
        overlap_param_gather: Gather weights ahead of their use; strategy 3 always does.
        align_param_gather: Start the parameter gathers of all pipeline stages together.
        use_distributed_optimizer: Shard the optimizer: reduce-scatter instead of all-reduce.
        num_distributed_optimizer_instances: Into how many parts data parallelism is cut, each of which shards a whole
            optimizer.
        check_for_nan_in_grad: Check gradients for NaN and infinity before they are reduced.
        check_for_large_grads: Check gradients for unexpectedly large values before they are reduced: above 100 times
            the largest of the same parameter in all backwards before, once there were 10.
        bucket_size: Parameters per gradient bucket, in elements; None: chosen by the front end.
        num_buckets: Number of gradient buckets, as an alternative to ``bucket_size``.
        pad_buckets_for_high_nccl_busbw: Round buckets up to a multiple of 2**16 elements.
        reduce_scatter_with_fp32_accumulation: Send gradients in their dtype, but add them up in float32.
        param_name_patterns_for_fp32_local_accumulation: ``fnmatch`` patterns of parameters whose gradients accumulate
            in float32 on each rank; ``"all"`` is every parameter.
        average_in_collective: Average in the collective, instead of a sum and a factor.
        fp8_param_gather: Keep compute weights in float8 and gather them so (``fp8``); needs sharded weights.
        fp4_param_gather: Keep compute weights in 4 bits and gather them so (``nvfp4``); needs sharded weights.
        reuse_grad_buf_for_mxfp8_param_ag: Gather MXFP8 parameters without memory of their own: chooses ``mxfp8`` for
            ``fp8_param_gather``, which it needs, and whose bytes arrive inside the memory of the decoded weights.
        use_megatron_fsdp: Use the fully sharded engine.
        megatron_fsdp_version: How that engine is made: 1: of the whole model; 2: unit by unit, in place, as
            ``megatron_fsdp.experimental`` does, where nothing is merged.
        use_custom_fsdp: Former name of ``use_megatron_fsdp``; mapped onto it with a ``DeprecationWarning``.
        data_parallel_sharding_strategy: ``"no_shard"``, ``"optim"``, ``"optim_grads"`` or ``"optim_grads_params"``.
        gradient_reduce_div_fusion: Fuse the gradient factor into the reduction.
        suggested_communication_unit_size: Elements to communicate at once: small neighbouring units are merged up to
            it; also bounds prefetching.
        keep_fp8_transpose_cache: With ``fp8_param_gather``: linears multiply the float8 weights themselves (as with
            ``weight_format="fp8_compute"``), and what backward needs transposed is kept while they are gathered.
        nccl_ub: Register communication buffers with NCCL; sets ``fsdp_double_buffer``.
        fsdp_double_buffer: Keep two fixed communication buffers instead of allocating one per use.
        fsdp_db_use_persist_buf_on_alloc_fail: Give units that fit neither buffer one of their own.
        fsdp_all_gather_in_start_param_sync: Only start parameter gathers in ``start_param_sync``; False: wait for each.
        outer_dp_sharding_strategy: ``"no_shard"`` or ``"optim"``, on the outer axis of hybrid sharding.
        disable_symmetric_registration: Register buffers with NCCL in the conventional way.
        fsdp_manual_registration: Register buffers with NCCL on demand.
        delay_wgrad_compute: Compute weight gradients later, to overlap more communication.
        megatron_fsdp_main_params_dtype: Dtype of main weights; None: the compute weights are the main weights.
        megatron_fsdp_main_grads_dtype: Dtype of main gradients; None: that of the parameter.
        megatron_fsdp_grad_comm_dtype: Dtype in which gradients are sent; None: that of the main gradients.
        megatron_fsdp_use_decoupled_grad: Put gradients into ``param.decoupled_grad``.
        megatron_fsdp_cuda_graph_mode: Keep memory and gradients, so that CUDA graphs can be captured.
        megatron_fsdp_enable_fine_grained_param_gather: Gather parameters per module instead of per unit.
        megatron_fsdp_max_pool_double_buffer: Double buffers that every unit fits; sets ``fsdp_double_buffer``.
        megatron_fsdp_weight_format: Formats of gathered weights, as ``weight_format`` of ``MixedPrecisionPolicy``, in
            words: ``"fp8"``, or ``"PATTERN=FORMAT"`` with ``fnmatch`` patterns of parameter names, the first that
            matches, and ``none`` for none; needs sharded weights. Of this package only.
        data_parallel_sharding_strategy_experts: The strategy of experts; None: that of all parameters.

    Raises:
        ConfigurationError: A value or a combination of values is not possible.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    fp4_param_gather: bool = False
    reuse_grad_buf_for_mxfp8_param_ag: bool = False
    use_megatron_fsdp: bool = False
    megatron_fsdp_version: int = 1
    use_custom_fsdp: bool = False
    data_parallel_sharding_strategy: str = "no_shard"
    gradient_reduce_div_fusion: bool = True
    suggested_communication_unit_size: int | None = None
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    fsdp_db_use_persist_buf_on_alloc_fail: bool = False
    fsdp_all_gather_in_start_param_sync: bool = True
    outer_dp_sharding_strategy: str = "no_shard"
    disable_symmetric_registration: bool = False
    fsdp_manual_registration: bool = False
    delay_wgrad_compute: bool = False
    megatron_fsdp_main_params_dtype: torch.dtype | None = torch.float32
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None
    megatron_fsdp_grad_comm_dtype: torch.dtype | None = None
    megatron_fsdp_use_decoupled_grad: bool = False
    megatron_fsdp_cuda_graph_mode: bool = False
    megatron_fsdp_enable_fine_grained_param_gather: bool = False
    megatron_fsdp_max_pool_double_buffer: bool = False
    megatron_fsdp_weight_format: tuple[str, ...] = ()
    data_parallel_sharding_strategy_experts: str | None = None

    def __post_init__(self) -> None:
        own = dataclasses.fields(DistributedDataParallelConfig)  # a subclass checks what it adds
        given = {field.name: getattr(self, field.name) for field in own}
        values = checked_values(given, {field.name: field.type for field in own})
        if values["use_custom_fsdp"]:
            warn_caller(
                "use_custom_fsdp is deprecated and was taken as use_megatron_fsdp=True; write that instead.",
                DeprecationWarning,
            )
        implied = {target: True for source, target in IMPLICATIONS if values[source]}
        for name, value in {**values, **implied, "use_custom_fsdp": False}.items():
            setattr(self, name, value)

    def checked_copy(self) -> Self:
        """Check the present attributes, and return a copy with all of them in their stored form.

        This object is not written to. A copy never warns of what this object warned of when it was built.

        Returns:
            A configuration that equals one built from these values.

        Raises:
            ConfigurationError: A value or a combination is not possible, or an attribute was set that is not a field.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for name in vars(self):
            if name not in known:
                hint = nearest_name(name, known)
                raise ConfigurationError(f"{name!r} was set on a {type(self).__name__} and is no field of it; {hint}")
        return type(self)(**{name: getattr(self, name) for name in known})

    @classmethod
    def read_from(cls, other: object, elsewhere: Mapping[str, str] = DECIDED_ELSEWHERE) -> tuple[Self, tuple[str, ...]]:
        """Build a configuration for `MegatronFSDP` from one of another class, such as Megatron-Core's own.

        Fields that it lacks take their defaults, and so do those that are decided elsewhere.
        What this class does not know cannot have an effect, and is warned of where it is not at its default.

        Args:
            other: Any object with attributes of these names.
            elsewhere: Fields that something else decides, with the reason.

        Returns:
            The configuration, and a sentence for each field that was set and is decided elsewhere.

        Raises:
            ConfigurationError: A value or a combination is not possible.
            TypeError: It is no configuration: it lacks ``data_parallel_sharding_strategy``.
        """
        if not hasattr(other, "data_parallel_sharding_strategy"):
            raise TypeError(
                f"a {type(other).__name__} was given as ddp_config, which has no data_parallel_sharding_strategy; give "
                f"a {cls.__name__}, or Megatron-Core's"
            )
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
        given = {name: getattr(other, name, default) for name, default in defaults.items()}
        notes = tuple(
            f"{name}={given.pop(name)!r} of ddp_config decides nothing here: {reason}"
            for name, reason in elsewhere.items()
            if given[name] != defaults[name]
        )
        unknown = [
            f"{field.name}={getattr(other, field.name)!r}"
            for field in (dataclasses.fields(other) if dataclasses.is_dataclass(other) else ())
            if field.name not in defaults and field.default is not dataclasses.MISSING
            if getattr(other, field.name) != field.default
        ]
        if unknown:
            warn_caller(
                f"{', '.join(unknown)} of {type(other).__name__} has no effect in this version of megatron_fsdp."
            )
        return cls(**given), notes

    def idle_settings(self) -> dict[str, str]:
        """List enabled switches without effect.

        The published class takes them in silence, so construction does too.

        Returns:
            One sentence by name of the field.
        """
        return {
            need.field: f"{need.field}=True has no effect without {missing}; set that too, or leave it out."
            for need in NEEDS
            if (missing := missing_of(need, vars(self)))
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build a configuration from plain values, such as those of ``to_dict`` or of a JSON file.

        Args:
            values: Field values by field name; what is missing takes its default.

        Returns:
            The configuration.

        Raises:
            ConfigurationError: A key is not a field, or a value is not possible.
        """
        if not isinstance(values, Mapping):
            raise ConfigurationError(
                f"a {cls.__name__} cannot be built from a {type(values).__name__}; give a mapping of fields to values."
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in values.items():
            if key not in known:
                is_section = isinstance(value, Mapping) and not value.keys().isdisjoint(known)
                hint = "give only the mapping below it." if is_section else nearest_name(key, known)
                raise ConfigurationError(f"{key!r} is not a field of {cls.__name__}; {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value for JSON: dtypes by name, the patterns as a list."""
        return {name: _plain(value) for name, value in dataclasses.asdict(self).items()}

    @classmethod
    def from_yaml(cls, source: str | os.PathLike[str]) -> Self:
        """Build a configuration from YAML, such as that of ``to_yaml``. Nothing in it is executed.

        Args:
            source: The text; or a path object (not a string), which is read.

        Returns:
            The configuration.

        Raises:
            ConfigurationError: The file cannot be read, this is not a YAML mapping, a key is not a field or is there
                twice, or a value is not possible; names the file.
        """
        values, where, _ = read_mapping(source)
        try:
            return cls.from_dict(values)
        except ConfigurationError as error:
            raise ConfigurationError("\n".join(f"{where}{line}" for line in str(error).splitlines())) from None

    def to_yaml(self) -> str:
        """Return every field as YAML text, one a line, in the order of the class."""
        text: str = yaml.safe_dump(self.to_dict(), sort_keys=False)
        return text


def _plain(value: object) -> object:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value
