"""The options of a run: what a user may type, and the settings that follow from it."""

from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, replace
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.placement import ShardingStrategy
from megatron_fsdp.train.checkpoint_arguments import CheckpointArguments, check_checkpoint_arguments
from megatron_fsdp.train.presets import Preset, find_preset

PresetName = Literal["tiny", "cpu-small", "gpu-125m", "gpu-1b"]
StrategyName = Literal["no_shard", "optim", "optim_grads", "optim_grads_params", "0", "1", "2", "3"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Arguments:
    """Train a decoder-only transformer on text that is already on this machine, sharded over all ranks.

    Started without torchrun, this starts the ranks itself. Options left out take the value of the preset.
    """

    preset: PresetName = "cpu-small"
    """Model size: tiny for seconds, cpu-small (10 M parameters) for minutes on a CPU, gpu-125m and gpu-1b for GPUs."""
    strategy: StrategyName = "optim_grads_params"
    """What is sharded: nothing (0), optimizer state (1), gradients too (2), parameters too (3)."""
    data: str | None = None
    """Text file, or folder of text files; default: the source of the Python standard library."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """Tokens are bytes, or 8192 pieces learned from the text on the spot."""
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Dtype that the model computes in; auto is bf16 where the hardware multiplies it, else fp32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto is the accelerator if there is one."""
    ranks: int | None = None
    """Processes to start; default: one per accelerator, or two on a CPU."""
    steps: int | None = None
    """Optimizer steps, those of the runs that this one goes on from included."""
    lr_decay_iters: int | None = None
    """Step at which the learning rate has fallen all the way; default: the last one."""
    exit_interval: int | None = None
    """End training after a step that is a multiple of this."""
    minutes: float = 5.0
    """End training after this time even if steps are left (inf: never)."""
    batch_size: int | None = None
    """Samples per rank and microbatch."""
    sequence_length: int | None = None
    """Tokens per sample."""
    grad_accumulation: int = 1
    """Microbatches per optimizer step."""
    learning_rate: float | None = None
    """Peak learning rate."""
    warmup: int | None = None
    """Steps in which the learning rate rises."""
    weight_decay: float = 0.1
    """Decay of the matrices; norms and embeddings have none."""
    clip: float = 1.0
    """Largest norm of the gradient; longer ones are scaled down."""
    seed: int = 0
    """Fixes the initial weights, the order of the data and the sample that is written."""
    evaluations: int = 5
    """How often the held-out loss is measured, evenly over the run."""
    log_every: int = 5
    """Steps between updates of the display."""
    prompt: str = "def "
    """Text that the trained model continues."""
    out: Path | None = None
    """Folder for results; default: runs/<date and time>."""
    checkpoints: Annotated[CheckpointArguments, tyro.conf.arg(name="")] = field(default_factory=CheckpointArguments)
    """Saving and going on."""


@dataclass(frozen=True)
class Settings:
    """A complete, checked description of a run, the same on every rank.

    Attributes:
        preset: Model size and training settings, with the user's values in place.
        decay_steps: Steps after which the learning rate has fallen all the way.
        strategy: What is sharded.
        dtype: Dtype that the model computes in.
        arguments: What the user typed; read only for what has no default elsewhere.
    """

    preset: Preset
    decay_steps: int
    strategy: ShardingStrategy
    dtype: torch.dtype
    arguments: Arguments


def parse_arguments(argv: Sequence[str], *, quiet: bool = False) -> Arguments:
    """Read options; help and mistakes end the process as usual for a command (`quiet` keeps other ranks silent)."""
    with ExitStack() as silence:
        if quiet:
            silence.enter_context(redirect_stdout(StringIO()))
            silence.enter_context(redirect_stderr(StringIO()))
        return tyro.cli(Arguments, prog="python -m megatron_fsdp.train", args=argv)


def check_arguments(arguments: Arguments) -> None:
    """Check that every number can be used.

    Raises:
        ConfigurationError: One cannot; names the option, what was given and what is allowed.
    """
    sizes = ("ranks", "steps", "batch_size", "sequence_length", "grad_accumulation", "evaluations", "log_every")
    for name in (*sizes, "lr_decay_iters", "exit_interval"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigurationError(f"{_option(name)} {value} is not possible: give 1 or more")
    if not arguments.minutes > 0.0:
        raise ConfigurationError(f"--minutes {arguments.minutes} is not possible: give a number above 0, or inf")
    for name in ("learning_rate", "clip"):
        value = getattr(arguments, name)
        if value is not None and not 0.0 < value < float("inf"):
            raise ConfigurationError(f"{_option(name)} {value} is not possible: give a number above 0")
    for name in ("weight_decay", "seed", "warmup"):
        value = getattr(arguments, name)
        if value is not None and not 0 <= value < float("inf"):
            raise ConfigurationError(f"{_option(name)} {value} is not possible: give 0 or more")
    check_checkpoint_arguments(arguments.checkpoints)
    if not arguments.prompt:
        raise ConfigurationError("--prompt '' is not possible: give at least one character to continue")


def resolve_settings(arguments: Arguments, device_type: str) -> Settings:
    """Fill in what the user left out.

    Args:
        arguments: What the user typed.
        device_type: Such as `cpu` or `cuda`; decides what `--dtype auto` means.

    Raises:
        ConfigurationError: A number cannot be used.
    """
    check_arguments(arguments)
    names = {field.name for field in fields(Preset)} & {field.name for field in fields(Arguments)}
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    preset = replace(find_preset(arguments.preset), **given)
    decay_steps = preset.steps if arguments.lr_decay_iters is None else arguments.lr_decay_iters
    if arguments.warmup is None and preset.warmup >= decay_steps:
        preset = replace(preset, warmup=decay_steps // 10)  # a short run of a long preset
    elif preset.warmup >= decay_steps:
        raise ConfigurationError(
            f"--warmup {preset.warmup} does not end within {decay_steps} steps: give fewer, or more "
            f"{'--steps' if arguments.lr_decay_iters is None else '--lr-decay-iters'}"
        )
    dtype = find_dtype(arguments.dtype, device_type)
    return Settings(preset, decay_steps, find_strategy(arguments.strategy), dtype, arguments)


def find_strategy(name: str) -> ShardingStrategy:
    """Return the strategy of one of the eight spellings in `StrategyName`."""
    return ShardingStrategy(int(name)) if name.isdigit() else ShardingStrategy[name]


def find_dtype(name: str, device_type: str) -> torch.dtype:
    """Return the dtype for `auto`, `fp32` or `bf16` on a type of device."""
    if name == "auto":
        name = "bf16" if device_type != "cpu" or cpu_multiplies_bf16() else "fp32"
    return DTYPES[name]


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bfloat16 instructions; without them bf16 is slower than fp32."""
    read_capabilities = getattr(torch.cpu, "get_capabilities", None)  # younger than the oldest torch we run on
    capabilities = {} if read_capabilities is None else read_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16", "bf16"))


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
