"""`mfsdp plan`: memory, communication and time of a run, before there is hardware for it."""

from __future__ import annotations

import argparse
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from torch.utils._pytree import tree_map

from megatron_fsdp.cli.output import write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME
from megatron_fsdp.config.engine_options import resolve_memory_options
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.config.precision import DTYPE_NAMES, MixedPrecisionPolicy, dtype_from_name
from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.ddp.resolve import resolve_ddp
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.plan import report
from megatron_fsdp.plan.machine import MACHINES, Machine, find_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.planning import (
    Plan,
    Recommendation,
    Workload,
    WorkloadOptions,
    make_workload,
    plan_workload,
    recommend,
)
from megatron_fsdp.plan.published import COLUMNS, compare_published, published_row
from megatron_fsdp.plan.setup import Accumulation, ParallelRanks, Recompute, Setup, find_optimizer, make_setup
from megatron_fsdp.train.models.build import model_shape
from megatron_fsdp.train.models.decoder import Block, Decoder, next_token_loss
from megatron_fsdp.train.options.command_line import PRESETS as TRAINER_PRESETS
from megatron_fsdp.train.options.command_line import Layer, assemble, find_preset, parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.options import ModelOptions
from megatron_fsdp.train.options.resolve import resolve

_AUTO = "auto"
_MOST_RANKS = 10**7
_BYTES = 256  # the vocabulary of the trainer's default tokens
_BESIDE_CONFIG = ("config", "ranks", "machine", "machine_set", "json", "picture", "units", "run", "parser")


def add_parser(subparsers: Any) -> None:
    """Add the command to what `ArgumentParser.add_subparsers` returned."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, traffic and time of a run, without hardware",
        description="Plan a run: bytes of a rank over a step, padding, traffic, time under a machine's figures, and "
        "the cheapest strategy that fits. No weights are allocated. Exit status: 0 it fits, 1 it does not, 2 it cannot "
        "be planned.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a preset (llama-3-8b, the trainer's cpu-small, ...; --list), a Hugging Face config.json or its folder, "
        "or package.module:function",
    )
    add(
        "--config",
        metavar="FILE",
        type=Path,
        help="plan what `mfsdp train --config FILE` would run, in place of MODEL; beside it only --ranks, --machine, "
        "--machine-set and the flags of output are possible",
    )
    add("--list", action="store_true", help="list presets of models and machines")
    add("--published", action="store_true", help="plan published runs, and show what was measured beside it")
    _add_ranks(parser)
    _add_batch(parser)
    _add_choices(parser)
    out = parser.add_argument_group("output").add_argument
    out("--json", action="store_true", help="print JSON")
    out("--picture", metavar="FILE", type=Path, help="draw memory over the step (.png, .svg, .pdf)")
    out("--units", action="store_true", help="list units with their parameters and padding")
    parser.set_defaults(run=run, parser=parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ranks").add_argument
    add("--ranks", metavar="N", type=int, default=8, help="accelerators in all (8)")
    add("--outer", metavar="M", type=int, help="ranks of the outer axis of hybrid sharding")
    for name, words in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        add(f"--{name}", metavar="N", type=int, default=1, help=f"{words}-parallel ranks (1)")
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="tensor-parallel ranks share activations between layers along the sequence (yes)",
    )
    add("--virtual-stages", metavar="N", type=int, default=1, help="pieces of the model on a pipeline rank (1)")
    add(
        "--overlap-exchanges",
        action="store_true",
        help="collectives of tensor, context, expert and pipeline parallelism run behind compute",
    )
    add("--machine", default="h100", help="a100, h100, h800, h200 or b200 (h100)")
    add(
        "--machine-set",
        metavar="FIGURE=VALUE",
        action="append",
        default=[],
        help="another figure of the machine, such as network_bytes_per_s=100e9; may be repeated",
    )


def _add_batch(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("batch").add_argument
    add("--sequence-length", metavar="N", type=int, help="tokens of a sequence (4096; of a trainer's preset its own)")
    add("--micro-batch-size", metavar="N", type=int, help="sequences per rank (1; of a trainer's preset its own)")
    add("--inputs", metavar="PATH", help="package.module:function, () -> inputs of a microbatch, or them")
    add("--loss", metavar="PATH", help="package.module:function, (model's output) -> a scalar")
    add("--microbatches", metavar="N", type=int, default=1, help="per optimizer step (1)")
    add(
        "--accumulation",
        choices=("every", "outer", "last"),
        default="every",
        help="reduce gradients after every microbatch, over the outer axis at the last, or everything at the last",
    )
    add(
        "--defer-reduction",
        dest="accumulation",
        action="store_const",
        const="last",
        help="the same as --accumulation last",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    names = ", ".join(strategy.name for strategy in ShardingStrategy)
    add = parser.add_argument_group("choices").add_argument
    add("--strategy", default=_AUTO, help=f"{names}, 0 to 3, or auto: the cheapest that fits (auto)")
    add("--outer-strategy", help="no_shard or optim (no_shard)")
    add(
        "--recompute",
        choices=get_args(Recompute),
        help="what is recomputed (full: layers; selective: the core of attention; every_second_product: layers but for "
        "the results of attention and of every second product; mlp); with --strategy auto none and full are tried",
    )
    add(
        "--optimizer",
        default="adamw",
        help="adamw, adamw-fused, adamw-loop, momentum, sgd, or muon for matrices with adamw (adamw)",
    )
    add("--dtype", help="of the weights that compute uses, for configs (bf16)")
    add("--fp8", action="store_true", help="products with weights run in 8 bits")
    for name, default in (("main-params", "fp32"), ("main-grads", _AUTO), ("grad-comm", _AUTO)):
        known = ", ".join(n for n in DTYPE_NAMES if n in ("fp16", "bf16", "fp32"))
        add(f"--{name}-dtype", default=default, help=f"{known} or auto: follow ({default})")
    add("--backend", choices=("nccl", "gloo"), default="nccl", help="of collectives (nccl)")


def run(args: argparse.Namespace) -> int:
    """Plan a run and print the plan, and return the exit status."""
    if args.list:
        return _list()
    if args.published:
        return _published(as_json=args.json)
    if args.model is None and args.config is None:
        raise ConfigurationError(
            "no model was given; name a preset (--list), a config or package.module:function, or give --config"
        )
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise ConfigurationError(f"invalid --ranks {args.ranks}: give 1 to {_MOST_RANKS:,}")
    plan = _plan_model(args) if args.config is None else _plan_config(args)
    return EXIT_SAME if plan.fits else EXIT_DIFFERENT


def _plan_config(args: argparse.Namespace) -> Plan:
    """Plan a run of the trainer from its configuration file, and show it."""
    for name, default in vars(args.parser.parse_args([])).items():
        if name not in _BESIDE_CONFIG and getattr(args, name) != default:
            given = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{given} contradicts --config, which says it: leave one of them out")
    run = planned_run(args.config, args.ranks)
    plan = plan_workload(run.workload, run.setup, _machine(args))
    _show(args, plan, None)
    if not args.json:
        for notice in run.notices:
            write_line(f"the trainer tells: {notice}")
    return plan


def _plan_model(args: argparse.Namespace) -> Plan:
    """Plan a model with the options of the command line, and show it."""
    is_auto = args.strategy == _AUTO
    if is_auto and (args.outer is not None or args.outer_strategy is not None):
        raise ConfigurationError(
            "--outer and --outer-strategy are tried by themselves with --strategy auto; name a strategy, or leave them "
            "out"
        )
    setup, machine = _setup(args), _machine(args)
    dtype = dtype_from_name(args.dtype or "bf16", "--dtype")
    workload = _workload(args, setup.ranks, dtype)
    tried = None
    if is_auto:
        tried = recommend(workload, setup, machine, (args.recompute,) if args.recompute else ("none", "full"))
        plan = tried.best or tried.smallest
    else:
        plan = plan_workload(workload, setup, machine)
    _show(args, plan, tried)
    return plan


# ---- from flags to what is planned ----------------------------------------------------------------------------------


def _setup(args: argparse.Namespace) -> Setup:
    names = (args.main_params_dtype, args.main_grads_dtype, args.grad_comm_dtype)
    main_params, main_grads, grad_comm = (None if name == _AUTO else dtype_from_name(name) for name in names)
    strategy = "optim_grads_params" if args.strategy == _AUTO else args.strategy
    same = ["microbatches", "accumulation", "optimizer", "recompute", "backend", "sequence_parallel"]
    same += ["virtual_stages", "fp8", "overlap_exchanges"]
    return make_setup(
        _ranks(args),
        strategy=resolve_strategy(_number(strategy), "--strategy"),
        outer_strategy=resolve_strategy(_number(args.outer_strategy or "no_shard"), "--outer-strategy"),
        policy=MixedPrecisionPolicy(main_params, main_grads, grad_comm),
        **{name: getattr(args, name) for name in same},
    )


def _ranks(args: argparse.Namespace) -> ParallelRanks:
    outer = 1 if args.outer is None else args.outer
    divided = args.tp * args.cp * args.pp * outer
    if divided < 1 or args.ranks % divided:
        raise ConfigurationError(
            f"--ranks {args.ranks} is not a multiple of tp x cp x pp x outer = {args.tp} x {args.cp} x {args.pp} x "
            f"{outer} = {divided}; give sizes whose product divides it"
        )
    return ParallelRanks(args.ranks // divided, outer, args.tp, args.cp, args.pp, args.ep)


def _workload(args: argparse.Namespace, ranks: ParallelRanks, dtype: torch.dtype) -> Workload:
    if args.model in TRAINER_PRESETS:
        return trainer_workload(args.model, ranks, args.sequence_length, args.micro_batch_size, dtype)
    loss_fn: Any = None if args.loss is None else import_by_path(args.loss, "--loss")
    asked = WorkloadOptions(
        inputs=None if args.inputs is None else _inputs(args.inputs),
        loss_fn=loss_fn,
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch_size,
        dtype=None if args.dtype is None else dtype,
    )
    return make_workload(args.model, ranks, asked)


def _inputs(path: str) -> Any:
    """Load inputs on the meta device from an import path of a function or of a value."""
    found = import_by_path(path, "--inputs")
    with torch.device("meta"):
        made = found() if callable(found) else found
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, made)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _machine(args: argparse.Namespace) -> Machine:
    figures = {}
    for text in args.machine_set:
        name, _, value = text.partition("=")
        try:
            figures[name] = float(value)
        except ValueError:
            raise ConfigurationError(f"--machine-set {text} is not FIGURE=NUMBER") from None
    return find_machine(args.machine).but(figures)


# ---- what is shown --------------------------------------------------------------------------------------------------


def _list() -> int:
    write_line("models: " + ", ".join(PRESETS))
    write_line("models of the trainer: " + ", ".join(TRAINER_PRESETS))
    for machine in MACHINES.values():
        write_line(report.machine_words(machine))
    return EXIT_SAME


def _published(*, as_json: bool) -> int:
    rows = [published_row(each) for each in compare_published()]
    if as_json:
        write_json([dict(zip(COLUMNS, row, strict=True)) for row in rows])
    else:
        write_table(COLUMNS, rows, right=COLUMNS[1:-1])
    return EXIT_SAME


def _show(args: argparse.Namespace, plan: Plan, tried: Recommendation | None) -> None:
    if args.picture is not None:
        report.draw_memory(plan, args.picture)
    if args.json:
        write_json(report.plan_dict(plan, tried))
        return
    if tried is not None:
        columns, rows = report.tried_table(tried)
        write_table(columns, rows, right=("peak", "step", "exposed"))
        write_line()
        if tried.best is None:
            write_line(report.advice(tried.smallest))
            write_line()
    write_facts(report.facts(plan))
    write_line()
    for columns, rows in report.tables(plan, with_units=args.units):
        write_table(columns, rows, right=[column for column in columns[1:] if column != "class"])
        write_line()
    write_facts(report.time_rows(plan))
    write_line(f"assumed: {report.machine_words(plan.machine)}")
    write_line()
    write_line(report.verdict(plan))
    write_line("flags: " + " ".join(report.flags(plan.setup)))
    if args.picture is not None:
        write_line(f"memory over the step: {args.picture}")


# ---- what the trainer would run: its presets, and `mfsdp train --config FILE` ---------------------------------------


def trainer_workload(
    name: str, ranks: ParallelRanks, sequence_length: int | None, micro_batch: int | None, dtype: torch.dtype
) -> Workload:
    """Build the workload of one rank of the trainer with a preset, which has a batch of its own."""
    preset = assemble((Layer(f"preset {name}", find_preset(name)),))
    options, own_micro_batch = preset.model, preset.training.micro_batch_size or 1
    shape = (
        own_micro_batch if micro_batch is None else micro_batch,
        (options.seq_length or 1) if sequence_length is None else sequence_length,
    )
    return _decoder_workload(options, _BYTES, dtype, ranks, shape, name)


def _decoder_workload(
    options: ModelOptions, vocab_size: int, dtype: torch.dtype, ranks: ParallelRanks, shape: tuple[int, int], name: str
) -> Workload:
    """Build the workload of one rank with the trainer's own decoder, on (sequences, tokens)."""
    with torch.device("meta"):
        model = Decoder(model_shape(options, vocab_size)).to(dtype)
    tokens = torch.empty(shape, dtype=torch.long, device="meta")
    asked = WorkloadOptions(
        inputs=tokens,
        loss_fn=lambda logits: next_token_loss(logits, tokens),
        fsdp_unit_modules=[Block],
        name=name,
        tokens=tokens.numel(),
    )
    return make_workload(model, ranks, asked)


@dataclass(frozen=True)
class PlannedRun:
    """A run of the trainer, for the planner; the trainer would print the notices."""

    setup: Setup
    workload: Workload
    notices: tuple[str, ...]


def planned_run(path: Path, num_ranks: int) -> PlannedRun:
    """Read a configuration as the trainer does, for `num_ranks` accelerators with bfloat16 matrix products."""
    job = resolve(parse_options(["--config", str(path)]), World(num_ranks, "cuda"))
    _check_job(job, path)
    setup, options = _setup_of_job(job), job.options
    model = options.model.hf_config or options.model.hf_model
    if model is not None:
        asked = WorkloadOptions(job.seq_length, job.batch.micro, job.dtype, name=str(model))
        workload = make_workload(model, setup.ranks, asked)
        return PlannedRun(setup, workload, job.notices)
    vocab_size = _BYTES if options.data.tokenizer_type == "byte" else options.data.vocab_size
    if vocab_size is None:
        raise ConfigurationError(
            f"--config {path} does not say how many tokens there are: set vocab_size, or tokenizer_type: byte"
        )

    shape = job.batch.micro, job.seq_length
    workload = _decoder_workload(options.model, vocab_size, job.dtype, setup.ranks, shape, str(path))
    return PlannedRun(setup, workload, job.notices)


def _check_job(job: Job, path: Path) -> None:
    """Refuse runs that the planner does not cover."""
    training, model = job.options.training, job.options.model
    if job.engine != "megatron_fsdp":
        raise ConfigurationError(
            f"--config {path} trains with {'FSDP2' if job.engine == 'torch_fsdp2' else 'buckets'}, which cannot be "
            "planned: set use_megatron_fsdp in it, or plan by MODEL and flags"
        )
    if job.ddp.delay_wgrad_compute:
        raise ConfigurationError(
            "--delay-wgrad-compute cannot be planned, since it keeps what is planned to be freed: leave it out of the "
            "configuration"
        )
    if training.recompute_granularity == "full" and training.recompute_num_layers is not None:
        raise ConfigurationError(
            "--recompute-num-layers cannot be planned, only all blocks or none: leave it out of the configuration"
        )
    if not (model.hf_config or model.hf_model) and model.transformer_impl != "local":
        raise ConfigurationError(
            f"--config {path} gives the shape of a model of transformers, which is planned by its configuration: set "
            "hf_config in it"
        )


def _setup_of_job(job: Job) -> Setup:
    sizes, chosen = job.sizes, job.options.optimizer
    resolved = resolve_ddp(job.ddp, sizes.data * sizes.context, 1)
    if sizes.data % resolved.num_instances:
        raise ConfigurationError(
            f"{resolved.num_instances} instances of the optimizer do not divide the {sizes.data} data-parallel ranks "
            "that are left: give a divisor"
        )
    instances, defers = resolved.num_instances, resolved.strategy <= ShardingStrategy.optim  # as the trainer's engine
    momentum = "momentum" if chosen.sgd_momentum else "sgd"
    arguments = inspect.signature(MegatronFSDP.__init__).parameters  # whose defaults the trainer leaves alone
    unsaid = {name: each.default for name, each in arguments.items()}
    return Setup(
        ParallelRanks(sizes.data // instances, instances, sizes.tensor, sizes.context, sizes.pipeline, sizes.expert),
        resolved.strategy,
        resolved.outer_strategy,
        resolved.policy,
        resolve_memory_options(unsaid, resolved.engine_config),
        overlap_grad_reduce=resolved.config.overlap_grad_reduce,
        microbatches=job.batch.microbatches,
        accumulation=Accumulation.LAST if defers else Accumulation.EVERY,
        optimizer=find_optimizer("adamw-fused" if chosen.optimizer == "adam" else momentum),
        recompute=job.options.training.recompute_granularity or "none",
        sequence_parallel=job.options.parallel.sequence_parallel,
    )
