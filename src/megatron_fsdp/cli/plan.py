"""`mfsdp plan`: memory, communication and time of a run, before there is hardware for it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils._pytree import tree_map

from megatron_fsdp.cli.output import write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME
from megatron_fsdp.config.ddp_config import ShardingStrategy, resolve_strategy
from megatron_fsdp.config.engine_options import (
    KINDS,
    MemoryArguments,
    offload_of,
    resolve_memory_options,
    resolve_offload,
)
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES, MixedPrecisionPolicy, dtype_from_name, weight_formats_of
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan import report
from megatron_fsdp.plan.machine import MACHINES, Machine, bytes_of, find_machine, nearest_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.planning import (
    Plan,
    Recommendation,
    Workload,
    make_workload,
    plan_workload,
    recommend,
)
from megatron_fsdp.plan.setup import OPTIMIZERS, ParallelRanks, Recompute, Setup, find_optimizer, make_setup
from megatron_fsdp.train.models.build import model_shape
from megatron_fsdp.train.models.decoder import Block, Decoder, ModelShape, next_token_loss
from megatron_fsdp.train.options.command_line import PRESETS as TRAINER_PRESETS
from megatron_fsdp.train.options.command_line import Layer, assemble, parse_options
from megatron_fsdp.train.options.job import Job, World, resolve

_AUTO = "auto"
_OF_RUN = {"ranks", "memory"}  # arguments that name something else than the setup's fields of these names
_STRATEGIES = ", ".join(each.name for each in ShardingStrategy)
_MOST_RANKS = 10**7
_BYTES = 256  # the vocabulary of the trainer's default tokens
_DTYPES = "fp16, bf16, fp32 or auto: follow"
_METAVARS: Mapping[type, str] = {int: "N", float: "X", str: "NAME"}
_BESIDE_CONFIG = (
    *("config", "ranks", "machine", "memory", "host_memory", "machine_set", "json", "units", "run", "parser"),
)


_OPTIONS: Mapping[str, Mapping[str, tuple[Any, str]]] = {
    "ranks": {
        "ranks": (8, "accelerators in all"),
        "outer": (int, "ranks of the outer axis of hybrid sharding"),
        "tp": (1, "tensor-parallel ranks"),
        "cp": (1, "context-parallel ranks"),
        "pp": (1, "pipeline-parallel ranks"),
        "ep": (1, "expert-parallel ranks"),
        "sequence-parallel": (True, "tensor-parallel ranks share activations between layers along the sequence"),
        "virtual-stages": (1, "pieces of the model on a pipeline rank"),
        "overlap-exchanges": (False, "tensor, context, expert and pipeline collectives run behind compute"),
        "machine": (str, f"{', '.join(MACHINES)} (h100, or with --memory the nearest of them)"),
        "memory": (str, "of one device, such as 24GB or 80GiB"),
        "host-memory": (str, "of the host for each device"),
        "machine-set": ([], "another figure of it, such as network_bytes_per_s=100e9; may be repeated"),
    },
    "batch": {
        "sequence-length": (int, "tokens of a sequence (4096; of a trainer's preset its own)"),
        "micro-batch-size": (int, "sequences per rank (1; of a trainer's preset its own)"),
        "inputs": (str, "package.module:function, () -> inputs of a microbatch, or them"),
        "loss": (str, "package.module:function, (model's output) -> a scalar"),
        "microbatches": (1, "per optimizer step"),
        "accumulation": ("every", "reduce gradients every microbatch, over the outer axis at the last, or all at last"),
    },
    "choices": {
        "strategy": (
            _AUTO,
            f"{_STRATEGIES}, 0 to 3, or auto: the cheapest that fits",
        ),
        "outer-strategy": (str, "no_shard or optim (no_shard)"),
        "recompute": (str, f"{', '.join(get_args(Recompute))} (mfsdp docs plan); with --strategy auto none and full"),
        "optimizer": ("adamw", ", ".join(OPTIMIZERS) + " (for matrices, with adamw)"),
        "dtype": (str, "of the weights that compute uses, for configs (bf16)"),
        "offload": (str, f"kinds of state in host memory, of {', '.join(KINDS)}: KIND or KIND=FRACTION,..."),
        "fp8": (False, "products with weights run in 8 bits"),
        "main-params-dtype": ("fp32", _DTYPES),
        "main-grads-dtype": (_AUTO, _DTYPES),
        "grad-comm-dtype": (_AUTO, _DTYPES),
        "weight-format": (str, f"{', '.join(WEIGHT_FORMAT_NAMES)}, or such as lm_head.*=none,*=fp8 (none)"),
        "keep-fp8-transpose-cache": (False, "weights in fp8_compute stay transposed, too, while they are gathered"),
        "backend": ("nccl", "of collectives, nccl or gloo"),
    },
    "output": {
        "json": (False, "print JSON"),
        "units": (False, "list units with their parameters and padding"),
    },
}
"""By group and name: the default, or the type of an option without one; and the help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.description = (
        "Plan a run: bytes of a rank over a step, padding, traffic, time under a machine's figures, and the cheapest "
        "strategy that fits. No weights are allocated. Exit status: 0 it fits, 1 it does not, 2 it cannot be planned."
    )
    model = (
        "a preset (llama-3-8b, the trainer's cpu-small, ...; --list), a Hugging Face config.json or its folder, or "
        "package.module:function"
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model)
    config = (
        "plan what `mfsdp train --config FILE` would run, instead of MODEL; beside it only --ranks, --machine, "
        "--memory, --host-memory, --machine-set and the flags of output are possible"
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help=config)
    parser.add_argument("--list", action="store_true", help="list presets of models and machines, with their memory")
    for title, options in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for name, (default, words) in options.items():
            kind = default if isinstance(default, type) else type(default)
            has_default = kind is not default
            how: dict[str, Any] = {"type": kind, "metavar": _METAVARS.get(kind), "help": words}
            if kind is bool:
                how = {"action": argparse.BooleanOptionalAction if default else "store_true", "help": words}
            elif kind is list:
                how = {"action": "append", "metavar": "FIGURE=VALUE", "help": words}
            elif has_default:
                how["help"] = f"{words} ({default})"
            group.add_argument(f"--{name}", default=default if has_default else None, **how)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    """Plan a run, print the plan, and return the exit status."""
    if args.list:
        return _list()
    if args.model is None and args.config is None:
        raise ConfigurationError(
            "no model was given; name a preset (--list), a config or package.module:function, or give --config"
        )
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise ConfigurationError(f"invalid --ranks {args.ranks}: give 1 to {_MOST_RANKS:,}")
    tried: Recommendation | None = None
    notes: tuple[str, ...] = ()
    if args.config is not None:
        for name, default in vars(args.parser.parse_args([])).items():
            if name not in _BESIDE_CONFIG and getattr(args, name) != default:
                given = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
                raise ConfigurationError(f"{given} contradicts --config, which says it: leave one of them out")
        workload, setup, notes = planned_run(args.config, args.ranks)
        plan = plan_workload(workload, setup, _machine(args))
    else:
        is_auto = args.strategy == _AUTO
        if is_auto and (args.outer is not None or args.outer_strategy is not None):
            raise ConfigurationError(
                "--outer and --outer-strategy are tried by themselves with --strategy auto; name a strategy, or leave "
                "them out"
            )
        setup, machine = _setup(args), _machine(args)
        workload = _preset_workload(args, setup) if args.model in TRAINER_PRESETS else _workload(args, setup)
        if is_auto:
            tried = recommend(workload, setup, machine, (args.recompute,) if args.recompute else ("none", "full"))
        plan = plan_workload(workload, setup, machine) if tried is None else tried.best or tried.smallest
    if args.json:
        write_json(report.plan_dict(plan, tried))
    else:
        _show(plan, tried, with_units=args.units)
        for note in notes:
            write_line(f"the trainer tells: {note}")
    return EXIT_SAME if plan.fits else EXIT_DIFFERENT


# ---- from flags to a workload ---------------------------------------------------------------------------------------


def _setup(args: argparse.Namespace) -> Setup:
    outer = 1 if args.outer is None else args.outer
    divided = args.tp * args.cp * args.pp * outer
    if divided < 1 or args.ranks % divided:
        raise ConfigurationError(
            f"--ranks {args.ranks} is not a multiple of tp x cp x pp x outer = {args.tp} x {args.cp} x {args.pp} x "
            f"{outer} = {divided}; give sizes whose product divides it"
        )
    names = (args.main_params_dtype, args.main_grads_dtype, args.grad_comm_dtype)
    main_params, main_grads, grad_comm = (None if name == _AUTO else dtype_from_name(name) for name in names)
    formats = weight_formats_of(args.weight_format.split(",") if args.weight_format else ())
    strategy, outer_strategy = args.strategy, args.outer_strategy or "no_shard"
    chosen = {
        "strategy": resolve_strategy("optim_grads_params" if strategy == _AUTO else _number(strategy), "--strategy"),
        "outer_strategy": resolve_strategy(_number(outer_strategy), "--outer-strategy"),
        "policy": MixedPrecisionPolicy(main_params, main_grads, grad_comm, formats),
        "offload": offload_of(args.offload.split(",")) if args.offload else None,
    }
    same = {name: value for name, value in vars(args).items() if name in Setup.__dataclass_fields__.keys() - _OF_RUN}
    return make_setup(ParallelRanks(args.ranks // divided, outer, args.tp, args.cp, args.pp, args.ep), **same | chosen)


def _workload(args: argparse.Namespace, setup: Setup) -> Workload:
    loss_fn: Any = None if args.loss is None else import_by_path(args.loss, "--loss")
    inputs: Any = None
    if args.inputs is not None:  # a function, or a value
        found = import_by_path(args.inputs, "--inputs")
        with torch.device("meta"):
            made = found() if callable(found) else found
        inputs = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, made)
    return make_workload(
        args.model,
        setup.ranks,
        inputs=inputs,
        loss_fn=loss_fn,
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch_size,
        dtype=None if args.dtype is None else dtype_from_name(args.dtype, "--dtype"),
    )


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _machine(args: argparse.Namespace) -> Machine:
    said = {"memory_bytes": ("--memory", args.memory), "host_memory_bytes": ("--host-memory", args.host_memory)}
    figures = {name: bytes_of(text, flag) for name, (flag, text) in said.items() if text is not None}
    machine = find_machine(args.machine) if args.machine else nearest_machine(figures.get("memory_bytes"))
    for text in args.machine_set:
        name, _, value = text.partition("=")
        try:
            figures[name] = float(value)
        except ValueError:
            raise ConfigurationError(f"--machine-set {text} is not FIGURE=NUMBER") from None
    return machine.but(figures)


# ---- output ---------------------------------------------------------------------------------------------------------


def _list() -> int:
    write_line("models: " + ", ".join(PRESETS))
    write_line("models of the trainer: " + ", ".join(TRAINER_PRESETS))
    columns, rows = report.machine_table(MACHINES.values())
    write_table(columns, rows, right=columns[1:])
    return EXIT_SAME


def _show(plan: Plan, tried: Recommendation | None, *, with_units: bool) -> None:
    if tried is not None:
        columns, rows = report.tried_table(tried)
        write_table(columns, rows, right=("peak", "step", "exposed"))
        write_line()
        if tried.best is None:
            write_line(f"{report.advice(tried.smallest)}\n")
    write_facts(report.facts(plan))
    write_line()
    for columns, rows in report.tables(plan, with_units=with_units):
        write_table(columns, rows, right=[column for column in columns[1:] if column != "class"])
        write_line()
    write_facts(report.time_rows(plan))
    write_line(f"assumed: {report.machine_words(plan.machine)}\n")
    write_line(report.verdict(plan))
    if left_out := report.without_flags(plan):
        write_line(f"the trainer has no flag for: {'; '.join(left_out)}")
    write_line("flags: " + " ".join(report.flags(plan)), end=" \\")


# ---- runs of the trainer: its presets, and `mfsdp train --config FILE` ----------------------------------------------


def planned_run(path: Path, num_ranks: int) -> tuple[Workload, Setup, tuple[str, ...]]:
    """Read a configuration as the trainer does, for `num_ranks` accelerators with bfloat16 matrix products.

    Returns the workload, the setup, and the trainer's warnings.
    """
    job = resolve(parse_options(["--config", str(path)]), World(num_ranks, "cuda"))
    _check_job(job, path)
    setup, options, shape = _setup_of_job(job), job.options, (job.batch.micro, job.seq_length)
    model = options.model.hf_config or options.model.hf_model
    if model is not None:
        rows, length = shape
        given: dict[str, Any] = {"sequence_length": length, "micro_batch": rows, "dtype": job.dtype}
        return make_workload(model, setup.ranks, **given, name=str(model)), setup, job.notes
    vocab_size = _BYTES if options.data.tokenizer_type == "byte" else options.data.vocab_size
    if vocab_size is None:
        raise ConfigurationError(
            f"--config {path} does not say how many tokens there are: set vocab_size, or tokenizer_type: byte"
        )
    decoder = model_shape(options.model, vocab_size)
    return _decoder_workload(decoder, job.dtype, setup.ranks, shape, str(path)), setup, job.notes


def _preset_workload(args: argparse.Namespace, setup: Setup) -> Workload:
    """Build the workload of one rank for a preset of the trainer, which has its own batch."""
    if args.inputs is not None or args.loss is not None:
        raise ConfigurationError(f"{args.model} has inputs and a loss of its own: leave --inputs and --loss out")
    preset = assemble((Layer(f"preset {args.model}", TRAINER_PRESETS[args.model]),))
    rows = args.micro_batch_size or preset.training.micro_batch_size or 1
    shape = rows, args.sequence_length or preset.model.seq_length or 1
    dtype = dtype_from_name(args.dtype or "bf16", "--dtype")
    return _decoder_workload(model_shape(preset.model, _BYTES), dtype, setup.ranks, shape, args.model)


def _decoder_workload(
    decoder: ModelShape, dtype: torch.dtype, ranks: ParallelRanks, shape: tuple[int, int], name: str
) -> Workload:
    """Build the workload of one rank with the trainer's own decoder, on (sequences, tokens)."""
    with torch.device("meta"):
        model, tokens = Decoder(decoder).to(dtype), torch.empty(shape, dtype=torch.long)
    return make_workload(
        model,
        ranks,
        inputs=tokens,
        loss_fn=lambda logits: next_token_loss(logits, tokens),
        fsdp_unit_modules=[Block],
        name=name,
        tokens=tokens.numel(),
    )


def _check_job(job: Job, path: Path) -> None:
    """Raise for runs that the planner does not support."""
    training, model = job.options.training, job.options.model
    engine = {"torch_fsdp2": "FSDP2", "ddp": "buckets"}.get(job.engine)
    refusals = {
        f"--config {path} trains with {engine}": engine and "set use_megatron_fsdp in it, or plan by MODEL and flags",
        "--data-parallel-sharding-strategy-experts": job.ddp.data_parallel_sharding_strategy_experts
        and "plan one strategy of all parameters: leave it out",
        "--delay-wgrad-compute": job.ddp.delay_wgrad_compute and "it keeps what is planned to be freed; leave it out",
        "--recompute-num-layers": training.recompute_granularity == "full"
        and training.recompute_num_layers is not None
        and "plan all blocks or none: leave it out",
        "--recompute-modules": set(training.recompute_modules) - {"core_attn"}
        and "plan --recompute-granularity full or none: leave it out",
        f"--config {path} gives the shape of a model of transformers": model.transformer_impl != "local"
        and not (model.hf_config or model.hf_model)
        and "set hf_config in it",
    }
    for what, cure in refusals.items():
        if cure:
            raise ConfigurationError(f"{what}, which cannot be planned: {cure}")


def _setup_of_job(job: Job) -> Setup:
    sizes, chosen = job.sizes, job.options.optimizer
    resolved = resolve_ddp(job.ddp, sizes.data * sizes.context, 1)
    instances = job.ddp.num_distributed_optimizer_instances
    if sizes.data % instances:
        raise ConfigurationError(
            f"{instances} instances of the optimizer do not divide the {sizes.data} data-parallel ranks "
            "that are left: give a divisor"
        )
    # As the trainer's engine, and with the defaults of arguments that the trainer leaves alone.
    defers = not resolved.strategy.shards_gradients and job.options.training.deterministic is None
    return Setup(
        ParallelRanks(sizes.data // instances, instances, sizes.tensor, sizes.context, sizes.pipeline, sizes.expert),
        resolved.strategy,
        resolved.outer_strategy,
        resolved.policy,
        resolve_memory_options(MemoryArguments(), resolved.engine_config),
        overlap_grad_reduce=resolved.config.overlap_grad_reduce,
        microbatches=job.batch.microbatches,
        accumulation="last" if defers else "every",
        optimizer=find_optimizer(chosen.planned_name),
        recompute=job.options.training.recompute_granularity or "none",
        sequence_parallel=job.options.parallel.sequence_parallel,
        offload=resolve_offload(job.options.offload, resolved.strategy),
        keep_fp8_transpose_cache=resolved.config.keep_fp8_transpose_cache,
    )
