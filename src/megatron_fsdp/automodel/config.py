"""The user's settings of a run: a dataclass for each of the three strategies, and the parallel sizes.

The sizes (`dp_size`, `dp_replicate_size`, `tp_size`, `pp_size`, `cp_size`, `ep_size`) are arguments of
`from_pretrained` and `from_config`; `resolve_sizes` checks them. Names, order and defaults of the fields are those of
NeMo AutoModel's `components.distributed.config`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, fields
from typing import Any, List, Optional, TypeAlias, Union  # noqa: UP035 (the published annotations)

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.multimodal import (
    MultimodalDistributedConfig,
    normalize_activation_checkpointing_scope,
)
from megatron_fsdp.config.ddp_config import resolve_strategy
from megatron_fsdp.config.engine_options import resolve_offload
from megatron_fsdp.config.precision import MixedPrecisionPolicy as EnginePolicy
from megatron_fsdp.errors import (
    ConfigurationError,
    NotSupportedYetError,
    ParallelSizeError,
    explains_fields,
    warn_caller,
)

BACKENDS = ("nccl", "gloo")


class _Config:
    """The base class of the three strategies' settings."""

    backend: str
    activation_checkpointing: bool | str

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name; values are the same objects, not copies."""
        return {each.name: getattr(self, each.name) for each in fields(self)}  # type: ignore[arg-type]

    def _check(self, **kinds: type) -> None:
        """Check flags (a string such as "false" would count as true), the backend, and the types of other fields."""
        kind = type(self).__name__
        for each in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            name, value = each.name, getattr(self, each.name)
            if each.type == "bool" and not isinstance(value, bool):
                raise ConfigurationError(f"{kind}.{name}={value!r}; give True or False")
            if name in kinds and value is not None and not isinstance(value, kinds[name]):
                raise ConfigurationError(
                    f"{kind}.{name}={value!r} is a {type(value).__name__}; give a {kinds[name].__name__} or None "
                    "(from YAML, see load_distributed_config)"
                )
        recomputed = self.activation_checkpointing
        if not isinstance(recomputed, bool) and recomputed not in ("full", "selective"):
            raise ConfigurationError(
                f"{kind}.activation_checkpointing={recomputed!r}; give True, False, 'full' or 'selective'"
            )
        degree = getattr(self, "ulysses_degree", 1)
        if type(degree) is not int or degree < 1:
            raise ConfigurationError(f"{kind}.ulysses_degree={degree!r}; give a whole number of ranks, 1 or more")
        if self.backend not in BACKENDS:
            raise ConfigurationError(f"{kind}.backend={self.backend!r}; give 'nccl' (accelerators) or 'gloo' (CPUs)")

    def _check_layers(self) -> None:
        """Check `autocast_dtype`, and put `activation_checkpointing_scope` into its stored form."""
        own: Any = self
        if own.autocast_dtype not in (None, torch.bfloat16, torch.float16):
            raise ConfigurationError(
                f"{type(self).__name__}.autocast_dtype={own.autocast_dtype} has no effect; give torch.bfloat16 or "
                "torch.float16"
            )
        own.activation_checkpointing_scope = normalize_activation_checkpointing_scope(
            own.activation_checkpointing_scope
        )

    def _refuse_deterministic(self, given: str | None, who_adds: str) -> None:
        """Raise for a field that only `MegatronFSDPConfig` has."""
        if given is not None:
            raise ConfigurationError(
                f"{type(self).__name__} takes no deterministic={given!r}: {who_adds} gradients up in the order of the "
                "back end; use MegatronFSDPConfig"
            )


@explains_fields
@dataclass
class FSDP2Config(_Config):
    """PyTorch's own FSDP2, with tensor, sequence, context, pipeline and expert parallelism.

    Attributes:
        sequence_parallel: Cut activations between the layers along the sequence too, over the tensor-parallel ranks.
        tp_plan: From module names (with `*`) to `ParallelStyle` objects or names of transformers' styles; or an import
            path of one. None: chosen by the model type.
        patch_is_packed_sequence: Let transformers take no sequence for a packed one, without looking. Saves one
            synchronisation of host and device per attention layer; not for packed sequences.
        mp_policy: Dtypes of FSDP2. None: compute and outputs in bfloat16, reduction in float32.
        offload_policy: Keep sharded parameters, gradients and optimizer state in host memory.
        autocast_dtype: Run forward under `torch.autocast` of the device in this dtype. None: no autocast.
        activation_checkpointing: True or "full": recompute the decoder layers in backward. "selective": recompute them,
            but keep the results of attention and of every second matrix product.
        defer_fsdp_grad_sync: With gradient accumulation, reduce gradients after the last microbatch only; read by
            `accumulation_context` from the model.
        backend: "nccl" or "gloo"; says whether the ranks compute on accelerators or on CPUs.
        enable_async_tensor_parallel: Let the compiler overlap collectives of tensor parallelism with matrix products.
            Needs `sequence_parallel`, which is switched on with a warning, and compiled layers.
        enable_compile: Compile each decoder layer by `torch.compile`; names of parameters stay as they are.
        enable_fsdp2_prefetch: Gather layers ahead of their use in a fixed order rather than one ahead.
        fsdp2_backward_prefetch_depth: How many layers ahead in backward; 0: as FSDP2 does by itself.
        fsdp2_forward_prefetch_depth: The same in forward.
        reshard_after_forward: Release the weights of a layer after forward, and gather them again in backward. None: of
            all layers but the last of each list, whose backward comes first, and of none with pipeline stages.
        activation_checkpointing_scope: Layers that are recomputed: "all", or some of "language", "vision", "audio" and
            "multimodal" (both towers), of which those that train nothing are left out. Kept as a tuple.
        multimodal: How the towers of models that read images or sound are sharded.
        ulysses_degree: Context-parallel ranks that exchange tokens for heads; the others gather keys and values.
            It divides `cp_size` and the heads; of this package only.
        deterministic: Not a field: refused, since FSDP2 adds gradients up in the order of the back end.
    """

    sequence_parallel: bool = False
    tp_plan: Optional[dict] = None  # type: ignore[type-arg]  # noqa: UP045 (the published annotation)
    patch_is_packed_sequence: bool = False
    mp_policy: Optional[MixedPrecisionPolicy] = None  # noqa: UP045
    offload_policy: Optional[CPUOffloadPolicy] = None  # noqa: UP045
    autocast_dtype: Optional[torch.dtype] = None  # noqa: UP045
    activation_checkpointing: Union[bool, str] = False  # noqa: UP007
    defer_fsdp_grad_sync: bool = True
    backend: str = "nccl"
    enable_async_tensor_parallel: bool = False
    enable_compile: bool = False
    enable_fsdp2_prefetch: bool = False
    fsdp2_backward_prefetch_depth: int = 2
    fsdp2_forward_prefetch_depth: int = 1
    reshard_after_forward: Optional[bool] = None  # noqa: UP045
    deterministic: InitVar[Optional[str]] = None  # noqa: UP045
    activation_checkpointing_scope: Any = "all"
    multimodal: MultimodalDistributedConfig = field(default_factory=MultimodalDistributedConfig)
    ulysses_degree: int = 1

    def __post_init__(self, deterministic: Optional[str]) -> None:  # noqa: UP045
        """Fill in the default policy and check values.

        Raises:
            ConfigurationError: A value is of another type or out of range.
        """
        self._check(
            mp_policy=MixedPrecisionPolicy,
            offload_policy=CPUOffloadPolicy,
            autocast_dtype=torch.dtype,
            reshard_after_forward=bool,
        )
        self._refuse_deterministic(deterministic, "FSDP2 adds")
        self._check_layers()
        if not isinstance(self.multimodal, MultimodalDistributedConfig):
            raise TypeError(
                f"FSDP2Config.multimodal is a {type(self.multimodal).__name__}; give a MultimodalDistributedConfig"
            )
        if self.tp_plan is not None and not isinstance(self.tp_plan, dict | str):
            raise ConfigurationError(
                f"FSDP2Config.tp_plan is a {type(self.tp_plan).__name__}; give a dict from module names to styles, the "
                "import path of one (or of a function that returns one), or None"
            )
        for name in ("fsdp2_backward_prefetch_depth", "fsdp2_forward_prefetch_depth"):
            depth = getattr(self, name)
            if not isinstance(depth, int) or isinstance(depth, bool) or depth < 0:
                raise ConfigurationError(f"FSDP2Config.{name}={depth!r}; give a whole number of layers, 0 or more")
        if self.enable_fsdp2_prefetch and not self.fsdp2_backward_prefetch_depth + self.fsdp2_forward_prefetch_depth:
            warn_caller("enable_fsdp2_prefetch has no effect with both prefetch depths 0")
        if self.mp_policy is None:
            self.mp_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16
            )
        if self.enable_async_tensor_parallel and not self.sequence_parallel:
            warn_caller("enable_async_tensor_parallel needs sequence_parallel=True, which is switched on")
            self.sequence_parallel = True


@explains_fields
@dataclass
class MegatronFSDPConfig(_Config):
    """This package's own engine, with tensor and context parallelism.

    Attributes:
        sequence_parallel: Cut activations between the layers along the sequence too, over the tensor-parallel ranks.
        tp_plan: Not a field: refused, since plans of one's own go with `FSDP2Config`.
        megatron_fsdp_unit_modules: Import paths (or classes) of the modules to gather and release together. None: what
            the model declares in `_no_split_modules`, else repeated blocks.
        zero_dp_strategy: 0: nothing is sharded, 1: optimizer state, 2: gradients too, 3: parameters too.
        init_fsdp_with_meta_device: The model that the manager is given is on the meta device; let its modules
            initialise themselves straight into their shards.
        grad_reduce_in_fp32: Communicate and accumulate gradients in float32.
        preserve_fp32_weights: Let the optimizer update float32 copies of the weights.
        overlap_grad_reduce: Reduce gradients during backward.
        overlap_param_gather: Gather weights ahead of their use.
        check_for_nan_in_grad: Raise on all ranks, with names, where a gradient is NaN or infinite. So does
            `report_nan_in_param_grad`; in NeMo AutoModel of today only that one looks, and this one does nothing.
        average_in_collective: Let the collective average instead of a sum and a factor.
        disable_bucketing: Never cut the parameters outside of units into several buckets.
        calculate_per_token_loss: Sum gradients over ranks instead of averaging; the loss must then be divided by the
            tokens of all ranks.
        keep_fp8_transpose_cache: With `weight_format="fp8_compute"`: keep what backward needs transposed.
        nccl_ub: Take communication memory once, and register it with NCCL where that is the back end.
        fsdp_double_buffer: Gather into two buffers that are kept.
        activation_checkpointing: True: recompute the MLP (or mixture of experts) of each decoder layer in backward.
            "full": the whole layers. "selective": these, but keep the results of attention and of every second matrix
            product.
        backend: "nccl" or "gloo"; says whether the ranks compute on accelerators or on CPUs.
        deterministic: "world": the same bits on any number of data-parallel ranks, as in `fully_shard`; of this package
            only.
        offload: The kinds of state in host memory, as in `fully_shard`; of this package only.
        weight_format: Weight format of sharded weights, as of `MixedPrecisionPolicy`; of this package only.
        report_nan_in_param_grad: As `check_for_nan_in_grad`, which is on by default: set both to False for no look.
        ulysses_degree: As of `FSDP2Config`.
        zero_dp_strategy_experts: The strategy of experts, with any `ep_size`; None: `zero_dp_strategy`.
    """

    sequence_parallel: bool = False
    tp_plan: InitVar[Optional[dict]] = None  # type: ignore[type-arg]  # noqa: UP045
    megatron_fsdp_unit_modules: Optional[List[str]] = None  # noqa: UP006, UP045
    zero_dp_strategy: int = 3
    init_fsdp_with_meta_device: bool = False
    grad_reduce_in_fp32: bool = False
    preserve_fp32_weights: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    check_for_nan_in_grad: bool = True
    average_in_collective: bool = False
    disable_bucketing: bool = False
    calculate_per_token_loss: bool = False
    keep_fp8_transpose_cache: bool = False
    nccl_ub: bool = False
    fsdp_double_buffer: bool = False
    activation_checkpointing: Union[bool, str] = False  # noqa: UP007
    backend: str = "nccl"
    deterministic: Optional[str] = None  # noqa: UP045
    offload: Any = None
    weight_format: Any = None
    report_nan_in_param_grad: bool = False
    ulysses_degree: int = 1
    zero_dp_strategy_experts: Optional[int] = None  # noqa: UP045

    def __post_init__(self, tp_plan: Optional[dict]) -> None:  # type: ignore[type-arg]  # noqa: UP045
        """Check values.

        Raises:
            ConfigurationError: A tensor-parallel plan is given, or a value is of another type or out of range.
        """
        if tp_plan is not None:
            raise ConfigurationError(
                "MegatronFSDPConfig takes no tp_plan: the plan is chosen by the model type; use FSDP2Config for a plan "
                "of your own, or call parallelize_tensors and fully_shard_model yourself"
            )
        self._check()
        strategy, of_experts = resolve_strategy(self.zero_dp_strategy), self.zero_dp_strategy_experts
        if of_experts is not None:
            strategy = max(strategy, resolve_strategy(of_experts, "zero_dp_strategy_experts"))
        resolve_offload(self.offload, strategy)
        EnginePolicy(weight_format=self.weight_format)
        units: Any = self.megatron_fsdp_unit_modules
        is_list = isinstance(units, Sequence) and not isinstance(units, str)
        if units is not None and not (is_list and all(isinstance(unit, type | str) and unit for unit in units)):
            raise ConfigurationError(
                f"MegatronFSDPConfig.megatron_fsdp_unit_modules={units!r}; give a list of import paths of module "
                "classes, or None"
            )


@explains_fields
@dataclass
class DDPConfig(_Config):
    """PyTorch's DistributedDataParallel: whole replicas; no parallelism but that of the data.

    Attributes:
        activation_checkpointing: As of `FSDP2Config`.
        backend: "nccl" or "gloo"; says whether the ranks compute on accelerators or on CPUs.
        find_unused_parameters: Look in every step which parameters have no gradient. False: look in the first step of
            training only, and raise where there are any, since torch's next forward would fail or wait for ever.
        static_graph: Find out in the first step which parameters are used, and how often; it must stay so. With
            gradient accumulation every microbatch is then reduced.
        bucket_cap_mb: Size of the buckets in which gradients are reduced, in MiB; None: torch's default.
        broadcast_buffers: Send the first rank's buffers to all at each forward.
        gradient_as_bucket_view: Let gradients be views of the buckets.
        autocast_dtype: As of `FSDP2Config`.
        activation_checkpointing_scope: As of `FSDP2Config`.
        deterministic: Not a field: refused as in `FSDP2Config`.
    """

    activation_checkpointing: Union[bool, str] = False  # noqa: UP007
    backend: str = "nccl"
    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: Optional[float] = None  # noqa: UP045
    deterministic: InitVar[Optional[str]] = None  # noqa: UP045
    broadcast_buffers: bool = False
    gradient_as_bucket_view: bool = False
    autocast_dtype: Optional[torch.dtype] = None  # noqa: UP045
    activation_checkpointing_scope: Any = "all"

    def __post_init__(self, deterministic: Optional[str]) -> None:  # noqa: UP045
        """Check values.

        Raises:
            ConfigurationError: A value is of another type or out of range.
        """
        self._check(autocast_dtype=torch.dtype)
        self._refuse_deterministic(deterministic, "PyTorch's DistributedDataParallel adds")
        self._check_layers()
        size: Any = self.bucket_cap_mb
        if size is not None and (isinstance(size, bool) or not isinstance(size, int | float) or not size > 0):
            raise ConfigurationError(f"DDPConfig.bucket_cap_mb={size!r}; give MiB, more than 0, or None")


@explains_fields
@dataclass
class MoEParallelizerConfig(_Config):
    """Settings for experts that are divided over ranks (`ep_size` > 1).

    Attributes:
        ignore_router_for_ac: Keep the products of routers where layers are recomputed, instead of computing them again.
        reshard_after_forward: Release the weights of experts after forward, and gather them again in backward;
            `FSDP2Config` only.
        lm_head_precision: Not supported yet.
        wrap_outer_model: True.
        mp_policy: Dtypes of experts; None: those of the layers. `FSDP2Config` only.

    Raises:
        ConfigurationError: A value is of another type.
        NotSupportedYetError: `lm_head_precision` is given, or `wrap_outer_model` is False.
    """

    ignore_router_for_ac: bool = True
    reshard_after_forward: bool = False
    lm_head_precision: Union[str, torch.dtype, None] = None  # noqa: UP007
    wrap_outer_model: bool = True
    mp_policy: Optional[MixedPrecisionPolicy] = None  # noqa: UP045

    def __post_init__(self) -> None:
        for name in ("ignore_router_for_ac", "reshard_after_forward", "wrap_outer_model"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"MoEParallelizerConfig.{name}={getattr(self, name)!r}; give True or False")
        if not isinstance(self.mp_policy, MixedPrecisionPolicy | None):
            raise ConfigurationError(
                f"MoEParallelizerConfig.mp_policy is a {type(self.mp_policy).__name__}; give FSDP2's "
                "MixedPrecisionPolicy, or None"
            )
        if self.lm_head_precision is not None:
            raise NotSupportedYetError(
                f"MoEParallelizerConfig.lm_head_precision={self.lm_head_precision!r} is not supported yet; leave it "
                "out, or keep the whole model's products in float32 by mp_policy of FSDP2Config"
            )
        if not self.wrap_outer_model:
            raise NotSupportedYetError(
                "MoEParallelizerConfig.wrap_outer_model=False is not supported yet: embeddings and head are sharded "
                "with the outermost unit; leave it True"
            )


DistributedConfig: TypeAlias = Union[FSDP2Config, MegatronFSDPConfig, DDPConfig]  # noqa: UP007
"""Any of the three."""


def check_config(config: object) -> DistributedConfig:
    """Return the argument if it is one of the three configs, else raise."""
    if not isinstance(config, FSDP2Config | MegatronFSDPConfig | DDPConfig):
        given = config.__name__ + " (the class)" if isinstance(config, type) else type(config).__name__
        raise ConfigurationError(
            f"distributed_config is {given}; give an FSDP2Config, a MegatronFSDPConfig or a DDPConfig"
        )
    return config


@dataclass(frozen=True)
class ParallelismSizes:
    """The sizes given by the user; None is 1, of the first two "not given".

    Attributes:
        dp_size: Data-parallel ranks, copies included; None, 0 or -1: all that the other sizes leave.
        dp_replicate_size: Copies of the sharded model; `FSDP2Config` only. None: 1, as for those that follow.
        tp_size: Tensor-parallel ranks.
        pp_size: Pipeline-parallel ranks; `FSDP2Config` only.
        cp_size: Context-parallel ranks.
        ep_size: Expert-parallel ranks.
    """

    dp_size: int | None = None
    dp_replicate_size: int | None = None
    tp_size: int | None = 1
    pp_size: int | None = 1
    cp_size: int | None = 1
    ep_size: int | None = 1


SIZE_NAMES = tuple(each.name for each in fields(ParallelismSizes))
"""The arguments that carry sizes."""

_ALLOWED = {
    FSDP2Config: SIZE_NAMES,
    MegatronFSDPConfig: ("dp_size", "tp_size", "cp_size", "ep_size"),
    DDPConfig: ("dp_size",),
}


@dataclass(frozen=True)
class ParallelSizes:
    """The number of ranks on each axis.

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
        """The ranks that read different data."""
        return self.dp_replicate * self.dp_shard

    def arguments(self) -> dict[str, int]:
        """Return the sizes by the names of `ParallelismSizes`."""
        ranks = (self.dp, self.dp_replicate, self.tp, self.pp, self.cp, self.ep)
        return dict(zip(SIZE_NAMES, ranks, strict=True))

    @property
    def dp_cp(self) -> int:
        """The ranks over which gradients of dense parameters are averaged."""
        return self.dp * self.cp

    @property
    def ep_shard(self) -> int:
        """The ranks that share the shards of one rank's experts."""
        return self.dp_cp * self.tp // self.ep


def resolve_sizes(config: DistributedConfig, world_size: int, **sizes: int | None) -> ParallelSizes:
    """Check sizes against the strategy and the world, and infer the data-parallel one.

    Args:
        config: The strategy.
        world_size: Number of ranks.
        sizes: By the names of `ParallelismSizes`.

    Raises:
        ParallelSizeError: A size is no positive number, the strategy cannot do it, or they do not multiply to the
            world size; a ValueError and an AssertionError.
        ConfigurationError: The config is none of the three.
        TypeError: There is no such size.
    """
    check_config(config)
    allowed = next(names for kind, names in _ALLOWED.items() if isinstance(config, kind))
    if world_size < 1:
        raise ParallelSizeError(f"world_size={world_size}; give the number of ranks, 1 or more")
    given: dict[str, Any] = dict(vars(ParallelismSizes(**sizes)))  # from YAML: not only whole numbers
    if type(given["dp_size"]) is int and given["dp_size"] in (0, -1):
        given["dp_size"] = None
    for name, size in given.items():
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ParallelSizeError(f"{name}={size!r}; give a whole number of ranks, 1 or more, or leave it out")
        if size not in (None, 1) and name not in allowed:
            takers = " or ".join(kind.__name__ for kind, names in _ALLOWED.items() if name in names)
            raise ParallelSizeError(
                f"{name}={size} is only supported with {takers}; {type(config).__name__} takes {', '.join(allowed)}, "
                f"so leave {name} out or change the config"
            )
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
    if dp % copies:
        raise ParallelSizeError(
            f"dp_size={dp} cannot be divided by dp_replicate_size={copies}; dp_size counts the copies too, so it must "
            "be a multiple of their number"
        )
    if copies > 1 and copies == dp * cp:
        raise ParallelSizeError(
            f"dp_replicate_size={copies} must be less than dp_size={dp}, or nothing is sharded; use DDPConfig for "
            "whole replicas"
        )
    if (dp * cp * tp) % ep:
        raise ParallelSizeError(
            f"dp_size x cp_size x tp_size = {dp} x {cp} x {tp} = {dp * cp * tp} cannot be divided by ep_size={ep}; "
            "experts are divided over these ranks; give an ep_size that divides their number"
        )
    return ParallelSizes(copies, dp // copies, tp, pp, cp, ep)
