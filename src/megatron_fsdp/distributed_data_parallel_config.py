"""The configuration of the ``DistributedDataParallel`` front end."""

import dataclasses
import difflib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mixed_precision import check_main_dtype, dtype_from_name
from megatron_fsdp.placement import ShardingStrategy, resolve_strategy

_DTYPE_FIELDS = (
    "megatron_fsdp_main_params_dtype",
    "megatron_fsdp_main_grads_dtype",
    "megatron_fsdp_grad_comm_dtype",
)
_POSITIVE_FIELDS = (
    "bucket_size",
    "num_buckets",
    "num_distributed_optimizer_instances",
    "suggested_communication_unit_size",
)


@dataclass
class DistributedDataParallelConfig:
    """How to reduce gradients and shard a model over data-parallel ranks.

    It holds every field of the published package's class and of Megatron-Core's. Holding a field is not a promise that
    every front end can honour it: what one cannot honour, it refuses when it is given the configuration.

    Strategies may be given as numbers and are stored as names; dtypes may be given as names such as ``"bf16"`` or
    ``"torch.float32"`` and are stored as ``torch.dtype``. Checks run at construction; they always raise
    ``ConfigurationError``, which is a ``ValueError``, also where the published class raises ``AssertionError``. A check
    that torch before 2.11 needed (``nccl_ub`` with expandable segments) is left out, since 2.11 is required anyway.

    Attributes:
        grad_reduce_in_fp32: Accumulate and reduce gradients in float32.
        overlap_grad_reduce: Reduce gradients while backward goes on.
        overlap_param_gather: Gather parameters while forward goes on.
        align_param_gather: Start the parameter gathers of all pipeline stages together.
        use_distributed_optimizer: Shard the optimizer: reduce-scatter in place of all-reduce.
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
        average_in_collective: Let the collective average, in place of a sum and a factor.
        fp8_param_gather: Keep compute weights in float8 and gather them so.
        fp4_param_gather: Keep compute weights in 4 bits and gather them so.
        reuse_grad_buf_for_mxfp8_param_ag: Gather MXFP8 parameters into the gradient buffer; needs
            ``fp8_param_gather``.
        use_megatron_fsdp: Use the fully sharded engine.
        megatron_fsdp_version: Version of that engine, 1 or 2.
        use_custom_fsdp: Former name of ``use_megatron_fsdp``; mapped onto it with a ``DeprecationWarning``.
        data_parallel_sharding_strategy: ``"no_shard"``, ``"optim"``, ``"optim_grads"`` or ``"optim_grads_params"``.
        gradient_reduce_div_fusion: Fuse the gradient factor into the reduction.
        suggested_communication_unit_size: Elements to communicate at once; also bounds prefetching.
        keep_fp8_transpose_cache: Keep transposed float8 weights.
        nccl_ub: Register communication buffers with NCCL; sets ``fsdp_double_buffer``.
        fsdp_double_buffer: Keep two fixed communication buffers in place of allocating one per use.
        fsdp_db_use_persist_buf_on_alloc_fail: Give units that fit neither buffer one of their own.
        fsdp_all_gather_in_start_param_sync: Only start parameter gathers in ``start_param_sync``; False: wait for each.
        outer_dp_sharding_strategy: ``"no_shard"`` or ``"optim"``, on the outer axis of hybrid sharding.
        disable_symmetric_registration: Register buffers with NCCL in the conventional way.
        fsdp_manual_registration: Register buffers with NCCL on demand.
        delay_wgrad_compute: Compute weight gradients later, to overlap more communication.
        megatron_fsdp_main_params_dtype: Dtype of main weights; None: the compute weights are the main weights.
        megatron_fsdp_main_grads_dtype: Dtype of main gradients; None: that of the parameter.
        megatron_fsdp_grad_comm_dtype: Dtype in which gradients travel; None: that of the main gradients.
        megatron_fsdp_use_decoupled_grad: Put gradients into ``param.decoupled_grad``.
        megatron_fsdp_cuda_graph_mode: Never drop references to gradients.
        megatron_fsdp_enable_fine_grained_param_gather: Gather parameters per module in place of per unit.
        megatron_fsdp_max_pool_double_buffer: Double buffers that every unit fits; sets ``fsdp_double_buffer``.

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

    def __post_init__(self) -> None:
        self._normalise_strategies()
        self._normalise_dtypes()
        self._normalise_patterns()
        self._check_numbers()
        self._check_combinations()
        self._apply_implications()

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
        known = [field.name for field in dataclasses.fields(cls)]
        for key in values:
            if key not in known:
                nearest = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"the fields are {', '.join(known)}."
                raise ConfigurationError(f"{key!r} is not a field of {cls.__name__}; {hint}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return every field as a plain value that JSON can hold: dtypes by name, the patterns as a list."""
        values = dataclasses.asdict(self)
        for name in _DTYPE_FIELDS:
            if values[name] is not None:
                values[name] = str(values[name]).removeprefix("torch.")
        patterns = "param_name_patterns_for_fp32_local_accumulation"
        values[patterns] = list(values[patterns])
        return values

    def _normalise_strategies(self) -> None:
        for name in ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy"):
            setattr(self, name, resolve_strategy(getattr(self, name), name).name)
        if ShardingStrategy[self.outer_dp_sharding_strategy] > ShardingStrategy.optim:
            raise ConfigurationError(
                f"outer_dp_sharding_strategy={self.outer_dp_sharding_strategy!r} is not possible on the outer axis; "
                'give 0 or "no_shard", or 1 or "optim".'
            )

    def _normalise_dtypes(self) -> None:
        for name in _DTYPE_FIELDS:
            value: object = getattr(self, name)
            if isinstance(value, str):
                value = dtype_from_name(value, name)
            try:
                check_main_dtype(value, name)
            except TypeError as error:
                raise ConfigurationError(str(error)) from None
            setattr(self, name, value)

    def _normalise_patterns(self) -> None:
        name = "param_name_patterns_for_fp32_local_accumulation"
        patterns: object = getattr(self, name)
        if not isinstance(patterns, (list, tuple)) or not all(isinstance(pattern, str) for pattern in patterns):
            raise ConfigurationError(
                f"{name}={patterns!r} is not a tuple of strings; write a tuple such as ('*norm*',)."
            )
        setattr(self, name, tuple(patterns))

    def _check_numbers(self) -> None:
        for name in _POSITIVE_FIELDS:
            value: object = getattr(self, name)
            if value is None and name != "num_distributed_optimizer_instances":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigurationError(f"{name}={value!r} is not a positive whole number; give 1 or more.")
        if self.megatron_fsdp_version not in (1, 2):
            raise ConfigurationError(
                f"megatron_fsdp_version={self.megatron_fsdp_version!r} does not exist; give 1 or 2."
            )

    def _check_combinations(self) -> None:
        if self.reuse_grad_buf_for_mxfp8_param_ag and not self.fp8_param_gather:
            raise ConfigurationError(
                "reuse_grad_buf_for_mxfp8_param_ag=True needs fp8_param_gather=True; set both or neither."
            )
        if self.param_name_patterns_for_fp32_local_accumulation and self.grad_reduce_in_fp32:
            raise ConfigurationError(
                "param_name_patterns_for_fp32_local_accumulation has no effect beside grad_reduce_in_fp32=True, which "
                "accumulates everything in float32; give only one of them."
            )
        if self.num_buckets is not None and self.bucket_size is not None:
            raise ConfigurationError(
                f"num_buckets={self.num_buckets} and bucket_size={self.bucket_size} both cut gradients into buckets; "
                "give only one of them."
            )

    def _apply_implications(self) -> None:
        if self.nccl_ub or self.megatron_fsdp_max_pool_double_buffer:
            self.fsdp_double_buffer = True
        if self.use_custom_fsdp:
            warnings.warn(
                "use_custom_fsdp is deprecated and was taken as use_megatron_fsdp=True; write that instead.",
                DeprecationWarning,
                stacklevel=4,  # this method, __post_init__ and __init__ stand between here and the caller
            )
            self.use_megatron_fsdp = True
            self.use_custom_fsdp = False
