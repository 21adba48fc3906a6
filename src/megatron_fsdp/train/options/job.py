"""A run, completed and checked: its ranks, batches and learning rate, the same on every rank. Pure.

`resolve` makes it of options and ranks: it fills in everything left open, and reports every adjustment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch

from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig, ShardingStrategy
from megatron_fsdp.config.ddp_config_flags import in_flags, off_flag_of
from megatron_fsdp.config.engine_options import with_weight_format
from megatron_fsdp.config.precision import MixedPrecisionPolicy, ResolvedPrecision, resolve_precision
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import DDP_FIELDS, Options, flag_for
from megatron_fsdp.train.options.checks import Sizes, check_options, idle_notes, wrong_sizes

Given = TypeVar("Given")
EngineName = Literal["megatron_fsdp", "ddp", "torch_fsdp2"]


@dataclass(frozen=True)
class World:
    """The ranks and hardware of a run, and the number of its restarts."""

    ranks: int
    device_type: str
    restarts: int = 0


@dataclass(frozen=True)
class BatchPlan:
    """The division of a step's `total` samples into microbatches of `micro` on data-parallel ranks.

    A remainder is filled up, so that a step has the same samples on any number of ranks.
    """

    micro: int
    total: int
    ranks: int

    @property
    def microbatches(self) -> int:
        """The microbatches of each rank."""
        return -(-self.total // (self.micro * self.ranks))

    @property
    def filled(self) -> int:
        """The fillers among the samples of all ranks."""
        return self.microbatches * self.micro * self.ranks - self.total

    def place(self, rank: int, microbatch: int) -> int:
        """Return the place, within the step's samples, at which a rank's microbatch begins."""
        return (microbatch * self.ranks + rank) * self.micro

    def positions(self, rank: int, microbatch: int) -> tuple[int | None, ...]:
        """Return the places, within the step's samples, of a rank's microbatch; None is a filler."""
        start = self.place(rank, microbatch)
        return tuple(place if place < self.total else None for place in range(start, start + self.micro))


@dataclass(frozen=True)
class Schedule:
    """The rise and fall of the learning rate."""

    peak: float  # largest rate
    final: float  # rate at the end of the decay
    style: str
    warmup_steps: float  # fewer than `decay_steps`; said in samples, perhaps no whole number
    decay_steps: float
    wsd_steps: float = 0  # of the linear fall at the end
    initial: float = 0.0  # rate that the warmup rises from

    def rate(self, step: int) -> float:
        """Return the learning rate of step `step` (0-based).

        Rises linearly and reaches the peak in the last step of the warmup, so that the first step has a rate above 0.
        Falls so that the last step of the decay has the final rate: along half a cosine (Loshchilov and Hutter 2017),
        a line, or the inverse root of the step (Vaswani et al. 2017); WSD stays at the peak and falls at the end (Hu et
        al. 2024).
        """
        if step + 1 <= self.warmup_steps:
            return self.initial + (self.peak - self.initial) * (step + 1) / self.warmup_steps
        if self.style == "constant":
            return self.peak
        if step + 1 >= self.decay_steps:
            return self.final
        if self.style == "inverse-square-root":
            start = max(1, self.warmup_steps)
            return max(self.final, self.peak * math.sqrt(start / max(start, step + 1)))
        return self.final + (self.peak - self.final) * self._share_left(step)

    def _share_left(self, step: int) -> float:
        """Return the fraction of the way from the final rate up to the peak."""
        if self.style == "WSD":
            return min(1.0, (self.decay_steps - step - 1) / self.wsd_steps) if self.wsd_steps else 1.0
        fallen = (step - self.warmup_steps + 1) / (self.decay_steps - self.warmup_steps)
        return 1.0 - fallen if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * fallen))


@dataclass(frozen=True)
class Job:
    """A complete, checked description of a run."""

    options: Options
    engine: EngineName
    ddp: DistributedDataParallelConfig
    sizes: Sizes
    batch: BatchPlan
    dtype: torch.dtype
    schedule: Schedule
    train_iters: int
    seq_length: int
    load_is_optional: bool  # there may be nothing to load yet
    notes: tuple[str, ...]
    restarts: int = 0

    @property
    def limit_s(self) -> float:
        """The seconds of training after which the run ends."""
        minutes = self.options.training.exit_duration_in_mins
        return math.inf if minutes is None else 60.0 * minutes

    @property
    def tokens_per_step(self) -> int:
        """The tokens of all ranks in one optimizer step, without fillers."""
        return self.batch.total * self.seq_length

    @property
    def precision(self) -> ResolvedPrecision:
        """The dtypes of weights and gradients, whichever engine is used."""
        ddp = self.ddp
        policy = MixedPrecisionPolicy(
            ddp.megatron_fsdp_main_params_dtype, ddp.megatron_fsdp_main_grads_dtype, ddp.megatron_fsdp_grad_comm_dtype
        )
        if self.engine == "torch_fsdp2":
            policy = MixedPrecisionPolicy(torch.float32, torch.float32, self.fsdp2_reduce_dtype)
        elif ddp.grad_reduce_in_fp32:
            policy = replace(policy, main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
        return resolve_precision(policy, self.dtype)

    @property
    def dtypes(self) -> dict[str, str]:
        """The names of the dtypes that decide rounding, by their holders."""
        found = self.precision
        dtypes = {
            "compute": found.compute,
            "main weights": found.main_params,
            "main gradients": found.main_grads,
            "gradient communication": found.grad_comm,
        }
        return {what: str(dtype).removeprefix("torch.") for what, dtype in dtypes.items()}

    @property
    def weight_formats(self) -> str:
        """The formats in which weights are gathered, which round them, as the flag's words."""
        chosen = with_weight_format(MixedPrecisionPolicy(), self.ddp).weight_formats
        return " ".join(f"{pattern}={name}" for pattern, name in chosen.items()) or "none"

    @property
    def fsdp2_reduce_dtype(self) -> torch.dtype:
        """The dtype in which FSDP2 reduces gradients."""
        return torch.bfloat16 if self.options.training.grad_reduce_in_bf16 else torch.float32


def resolve(options: Options, world: World) -> Job:
    """Complete and check a run."""
    notes = list(options.explained)
    options = _with_tokenizer_of_model(options, notes)
    check_options(options)
    check_backend(options, world.device_type)
    engine: EngineName = "megatron_fsdp" if options.ddp.use_megatron_fsdp else "ddp"
    engine = "torch_fsdp2" if options.parallel.use_torch_fsdp2 else engine
    sizes = _sizes(options, world)
    training, checkpoint, nproc = options.training, options.checkpoint, options.parallel.nproc
    dtype = torch.float16 if training.fp16 else torch.bfloat16 if training.bf16 else torch.float32
    batch = _batch(options, sizes.data)
    train_iters = _train_iters(options, batch)
    notes += idle_notes(options, train_iters)
    if nproc is not None and nproc != world.ranks:
        notes.append(f"--nproc {nproc} has no effect: {world.ranks} ranks were started")
    if batch.filled:
        notes.append(
            f"{batch.filled} of {batch.total + batch.filled} samples of a step only fill up, and do not count: "
            f"--global-batch-size {batch.total} is no multiple of --micro-batch-size {batch.micro} x {batch.ranks} "
            "data-parallel ranks"
        )
    if training.recompute_method == "uniform":  # which recomputes all blocks one by one
        options = replace(options, training=replace(training, recompute_num_layers=None))
    return Job(
        options=options,
        engine=engine,
        ddp=_engine_config(options, dtype, engine, sizes, notes),
        sizes=sizes,
        batch=batch,
        dtype=dtype,
        schedule=_schedule(options, train_iters, batch.total),
        train_iters=train_iters,
        seq_length=_require(options.model.seq_length, "--seq-length", "tokens of a sample"),
        load_is_optional=checkpoint.is_same_folder or (checkpoint.save is not None and world.restarts > 0),
        notes=tuple(notes),
        restarts=world.restarts,
    )


def _with_tokenizer_of_model(options: Options, notes: list[str]) -> Options:
    """Use the tokenizer of a model with weights, unless another is requested."""
    folder, place = options.model.hf_model, options.data.tokenizer_model
    if folder is None or options.is_given("tokenizer_type"):
        return options
    if place is None:
        notes.append(
            f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}, the model's own; --tokenizer-type byte "
            "trains it on bytes"
        )
    data = replace(options.data, tokenizer_type="HuggingFaceTokenizer", tokenizer_model=place or folder)
    return replace(options, data=data)


def _require(value: Given | None, flag: str, meaning: str) -> Given:
    if value is None:
        raise ConfigurationError(f"{flag} is missing ({meaning}): give it, or a --preset that has it")
    return value


def check_backend(options: Options, device_type: str) -> None:
    """Check that the requested backend supports the devices; torchrun's ranks call this before they join."""
    if options.parallel.distributed_backend == "nccl" and device_type == "cpu":
        raise ConfigurationError(
            "--distributed-backend nccl does not go with --device cpu, which it cannot reach: give gloo, or leave it "
            "out"
        )


def _sizes(options: Options, world: World) -> Sizes:
    parallel = options.parallel
    tensor, pipeline = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    context, expert = parallel.context_parallel_size, parallel.expert_model_parallel_size
    others = tensor * pipeline * context
    if world.ranks % others:
        raise ConfigurationError(
            f"{world.ranks} ranks cannot be cut into tensor {tensor} x pipeline {pipeline} x context {context} = "
            f"{others}: give sizes whose product divides the ranks"
        )
    sizes = Sizes(world.ranks // others, tensor, pipeline, context, expert)
    for problem in wrong_sizes(options, sizes):
        raise ConfigurationError(problem)
    return sizes


# ---- batches, steps and the learning rate ----------------------------------------------------------------------------


def _batch(options: Options, ranks: int) -> BatchPlan:
    """Plan `--micro-batch-size` and `--global-batch-size` for a number of data-parallel ranks."""
    micro = _require(options.training.micro_batch_size, "--micro-batch-size", "samples per rank and microbatch")
    total = options.training.global_batch_size or micro * ranks
    if total < micro:
        raise ConfigurationError(
            f"--global-batch-size {total} is less than --micro-batch-size {micro}: give a microbatch that fits in"
        )
    return BatchPlan(micro, total, ranks)


def _train_iters(options: Options, batch: BatchPlan) -> int:
    """Return the steps to train; with `--train-samples` those that fill whole steps, as in Megatron-LM."""
    samples, steps = options.training.train_samples, options.training.train_iters
    if samples is None and steps is None and options.training.skip_train:
        return 0
    if samples is None:
        return _require(steps, "--train-iters", "how many steps to train")
    if samples < batch.total:
        raise ConfigurationError(f"--train-samples {samples} is less than the {batch.total} of one step: give more")
    return samples // batch.total


def _schedule(options: Options, train_iters: int, samples_of_step: int) -> Schedule:
    """Return the learning rate over the steps; settings in samples may end within a step."""
    if options.training.skip_train:
        return Schedule(0.0, 0.0, "constant", 0, 0)
    optimizer, samples = options.optimizer, options.training.train_samples
    peak, style = _require(optimizer.lr, "--lr", "largest learning rate"), optimizer.lr_decay_style
    for name in ("min_lr", "lr_warmup_init"):
        if options.value(name) > peak:
            raise ConfigurationError(f"{flag_for(name)} {options.value(name)} is more than --lr {peak}: give less")
    unit, words = ("iters", "steps") if samples is None else ("samples", "samples")
    decay = options.value(f"lr_decay_{unit}") or samples or train_iters
    warmup, wsd = options.value(f"lr_warmup_{unit}"), options.value(f"lr_wsd_decay_{unit}")
    if optimizer.lr_warmup_fraction is not None:
        warmup = int(round(optimizer.lr_warmup_fraction * decay, 6))  # 0.58 x 100 is a little less than 58
    if warmup >= decay:
        raise ConfigurationError(
            f"--lr-warmup-{unit} {warmup} does not end within {decay} {words}: give fewer, or more --train-{unit} or "
            f"--lr-decay-{unit}"
        )
    if optimizer.lr_warmup_init and not warmup:
        raise ConfigurationError("--lr-warmup-init does nothing without a warmup: give --lr-warmup-fraction too")
    if (style == "WSD") != (wsd is not None):
        raise ConfigurationError(
            f"--lr-wsd-decay-{unit} and --lr-decay-style WSD belong together: give both or neither"
        )
    if warmup + (wsd or 0) > decay:
        raise ConfigurationError(
            f"--lr-wsd-decay-{unit} {wsd} and a warmup of {warmup} do not fit into {decay} {words}: give fewer"
        )
    rises, ends, falls = (count if samples is None else count / samples_of_step for count in (warmup, decay, wsd or 0))
    return Schedule(peak, optimizer.min_lr, style, rises, ends, falls, optimizer.lr_warmup_init)


# ---- the configuration of the engine ---------------------------------------------------------------------------------


def _engine_config(
    options: Options, dtype: torch.dtype, engine: EngineName, sizes: Sizes, notes: list[str]
) -> DistributedDataParallelConfig:
    """Complete the configuration of the engine; refuse or report settings without effect on it."""
    if engine == "torch_fsdp2":
        for name in options.origins:
            if name in DDP_FIELDS and name != "use_megatron_fsdp" and options.is_chosen(name):
                raise ConfigurationError(
                    f"{flag_for(name)} does nothing with --use-torch-fsdp2: leave it out, or shard with "
                    "--use-megatron-fsdp"
                )
        return replace(options.ddp, use_megatron_fsdp=False, data_parallel_sharding_strategy="no_shard")
    config = _with_gradient_dtypes(options, dtype, notes)
    if options.training.fp8_recipe == "mxfp8":
        config = replace(config, reuse_grad_buf_for_mxfp8_param_ag=True)  # the field that chooses this format
    for sentence in config.idle_settings().values():
        raise ConfigurationError(in_flags(sentence))
    if config.megatron_fsdp_use_decoupled_grad:
        raise ConfigurationError(
            "--megatron-fsdp-use-decoupled-grad puts gradients where PyTorch's optimizers do not look: leave it out"
        )
    if config.megatron_fsdp_cuda_graph_mode:
        raise ConfigurationError(
            "--megatron-fsdp-cuda-graph-mode keeps memory for CUDA graphs, and this trainer captures none: leave it out"
        )
    try:
        strategy = resolve_ddp(config, sizes.data * sizes.context, 1).strategy
    except ConfigurationError as error:
        raise ConfigurationError(in_flags(str(error))) from None
    if options.parallel.init_model_with_meta_device and strategy is ShardingStrategy.no_shard:
        raise ConfigurationError(
            "--init-model-with-meta-device does nothing where every rank holds the whole model: give "
            "--use-megatron-fsdp with a sharding strategy, or leave it out"
        )
    if config.use_megatron_fsdp:
        notes += _decided_by_strategy(options, strategy)
    return config


def _with_gradient_dtypes(options: Options, dtype: torch.dtype, notes: list[str]) -> DistributedDataParallelConfig:
    """Reduce and accumulate gradients of half-precision models in float32 by default."""
    config, in_bf16 = options.ddp, options.training.grad_reduce_in_bf16
    is_float32, in_float32 = dtype == torch.float32, config.grad_reduce_in_fp32
    comm, main = config.megatron_fsdp_grad_comm_dtype, config.megatron_fsdp_main_grads_dtype
    says_comm, says_main = (options.is_given(f"megatron_fsdp_{name}_dtype") for name in ("grad_comm", "main_grads"))
    if not (is_float32 or in_float32):
        comm, main = comm if says_comm else torch.float32, main if says_main else torch.float32
    if in_bf16 and not says_comm:
        comm = torch.bfloat16
        if is_float32:
            notes.append("--grad-reduce-in-bf16: gradients of a float32 model are communicated in bfloat16")
    if options.is_given("accumulate_allreduce_grads_in_fp32") and not in_bf16:
        flag = flag_for("accumulate_allreduce_grads_in_fp32") if in_float32 else off_flag_of("grad_reduce_in_fp32")
        notes.append(
            f"{flag} has no effect of its own: gradients are communicated and accumulated in float32, unless "
            "--grad-reduce-in-bf16 or the flags of dtypes say something else"
        )
    sent = torch.float32 if in_float32 else comm or main or dtype
    if config.reduce_scatter_with_fp32_accumulation and sent == torch.float32:
        raise ConfigurationError(
            "--ddp-reduce-scatter-with-fp32-accumulation does nothing here, since gradients are communicated in "
            "float32: give --grad-reduce-in-bf16, or leave it out"
        )
    return replace(config, megatron_fsdp_grad_comm_dtype=comm, megatron_fsdp_main_grads_dtype=main)


def _decided_by_strategy(options: Options, strategy: ShardingStrategy) -> Iterator[str]:
    """Yield warnings for switches that were turned off although the strategy implies them."""
    implied_from = {
        "use_distributed_optimizer": ShardingStrategy.optim,
        "overlap_grad_reduce": ShardingStrategy.optim_grads,
        "overlap_param_gather": ShardingStrategy.optim_grads_params,
    }
    for name, least in implied_from.items():
        if strategy >= least and options.is_given(name) and not options.value(name):
            yield (
                f"{off_flag_of(DDP_FIELDS[name])} has no effect: --data-parallel-sharding-strategy {strategy.name} "
                "implies it"
            )


def check_environment(environment: Mapping[str, str], job: Job, world: World) -> tuple[str, ...]:
    """Reject one connection to a GPU with full sharding; return warnings on variables without effect."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if environment.get(name) != "1" or job.engine == "ddp":
        return ()
    if world.device_type != "cuda":
        return (f"{name}=1 has no effect on {world.device_type}",)
    flag = "--use-megatron-fsdp" if job.engine == "megatron_fsdp" else "--use-torch-fsdp2"
    raise ConfigurationError(
        f"{name}=1 puts all kernels into one queue, where gathers and reductions of {flag} wait behind compute: "
        f"`unset {name}`, or give 8 or more"
    )
