"""`mfsdp plan`: what a run will need, before there is hardware for it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_fsdp.cli.output import write_error, write_facts, write_json, write_line, write_table
from megatron_fsdp.cli.plan_trainer import build_trainer_model, is_trainer_preset, trainer_presets, trainer_workload
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME
from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.config.precision import DTYPE_NAMES, MixedPrecisionPolicy, dtype_from_name
from megatron_fsdp.config.strategy import ShardingStrategy, resolve_strategy
from megatron_fsdp.errors import ConfigurationError

_AUTO = "auto"
_FOLLOW = "auto"
_MOST_RANKS = 10**7
_BESIDE_CONFIG = ("config", "ranks", "machine", "machine_set", "json", "picture", "units", "check", "run", "parser")


def add_parser(subparsers: Any) -> None:
    """Add the command.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subparsers.add_parser(
        "plan",
        help="memory, traffic and time of a run, without hardware",
        description="Plan a run: bytes of a rank over a step, padding, traffic, time under a machine's figures, and "
        "the cheapest strategy that fits. No weights are allocated. Exit status: 0 it fits, 1 it does not, 2 it cannot "
        "be planned.",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a preset (llama-3-8b, the trainer's cpu-small, ...; --list), a Hugging Face config.json or its folder, "
        "or package.module:function",
        nargs="?",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=Path,
        help="plan what `mfsdp train --config FILE` would run, in place of MODEL; beside it only --ranks, --machine, "
        "--machine-set and the flags of output are possible",
    )
    parser.add_argument("--list", action="store_true", help="list presets of models and machines")
    _add_ranks(parser)
    _add_batch(parser)
    _add_choices(parser)
    out = parser.add_argument_group("output")
    out.add_argument("--json", action="store_true", help="print JSON")
    out.add_argument("--picture", metavar="FILE", type=Path, help="draw memory over the step (.png, .svg, .pdf)")
    out.add_argument("--units", action="store_true", help="list units with their parameters and padding")
    out.add_argument("--check", action="store_true", help="check the plan by a simulated run of the real engine")
    parser.set_defaults(run=run, parser=parser)


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument("--ranks", metavar="N", type=int, default=8, help="accelerators in all (8)")
    group.add_argument("--outer", metavar="M", type=int, help="ranks of the outer axis of hybrid sharding")
    for name, words in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline"), ("ep", "expert")):
        group.add_argument(f"--{name}", metavar="N", type=int, default=1, help=f"{words}-parallel ranks (1)")
    group.add_argument("--machine", default="h100", help="a100, h100, h200 or b200 (h100)")
    group.add_argument(
        "--machine-set",
        metavar="FIGURE=VALUE",
        action="append",
        default=[],
        help="another figure of the machine, such as network_bytes_per_s=100e9; may be repeated",
    )


def _add_batch(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--sequence-length", metavar="N", type=int, help="tokens of a sequence (4096; of a trainer's preset its own)"
    )
    group.add_argument(
        "--micro-batch-size", metavar="N", type=int, help="sequences per rank (1; of a trainer's preset its own)"
    )
    group.add_argument(
        "--inputs", metavar="PATH", help="package.module:function, () -> inputs of a microbatch, or them"
    )
    group.add_argument("--loss", metavar="PATH", help="package.module:function, (model's output) -> a scalar")
    group.add_argument("--microbatches", metavar="N", type=int, default=1, help="per optimizer step (1)")
    group.add_argument(
        "--accumulation",
        choices=("every", "outer", "last"),
        default="every",
        help="reduce gradients after every microbatch, over the outer axis at the last, or everything at the last",
    )


def _add_choices(parser: argparse.ArgumentParser) -> None:
    names = [strategy.name for strategy in ShardingStrategy]
    group = parser.add_argument_group("choices")
    group.add_argument(
        "--strategy", default=_AUTO, help=f"{', '.join(names)}, 0 to 3, or auto: the cheapest that fits (auto)"
    )
    group.add_argument("--outer-strategy", help="no_shard or optim (no_shard)")
    group.add_argument(
        "--recompute",
        default=None,
        choices=("none", "full", "attention", "mlp"),
        help="what is recomputed; with --strategy auto none and full are tried",
    )
    group.add_argument("--optimizer", default="adamw", help="adamw, adamw-fused, adamw-loop, momentum or sgd (adamw)")
    group.add_argument("--dtype", help="of the weights that compute uses, for configs (bf16)")
    for name, default in (("main-params", "fp32"), ("main-grads", _FOLLOW), ("grad-comm", _FOLLOW)):
        known = ", ".join(n for n in DTYPE_NAMES if n in ("fp16", "bf16", "fp32"))
        group.add_argument(f"--{name}-dtype", default=default, help=f"{known} or auto: follow ({default})")
    group.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="of collectives (nccl)")


def run(args: argparse.Namespace) -> int:
    """Plan.

    Returns:
        The exit status.

    Raises:
        ConfigurationError: Something is not known or cannot be.
    """
    if args.list:
        return _list()
    if args.picture is not None and not args.picture.parent.is_dir():
        raise ConfigurationError(f"--picture {args.picture}: there is no folder {args.picture.parent}; make it first")
    if args.config is not None:
        return _run_config(args)
    if args.model is None:
        raise ConfigurationError(
            "no model was given; name a preset (--list), a config or package.module:function, or give --config"
        )
    return _run_model(args)


def _run_config(args: argparse.Namespace) -> int:
    """Plan a run of the trainer."""
    from megatron_fsdp.cli.plan_config import planned_run
    from megatron_fsdp.plan.machine import find_machine
    from megatron_fsdp.plan.planning import plan_workload

    for name, default in vars(args.parser.parse_args([])).items():
        if name not in _BESIDE_CONFIG and getattr(args, name) != default:
            given = "MODEL" if name == "model" else f"--{name.replace('_', '-')}"
            raise ConfigurationError(f"{given} contradicts --config, which says it: leave one of them out")
    if not 1 <= args.ranks <= _MOST_RANKS:
        raise ConfigurationError(f"invalid --ranks {args.ranks}: give 1 to {_MOST_RANKS:,}")
    run = planned_run(args.config, args.ranks)
    plan = plan_workload(run.workload, run.setup, find_machine(args.machine).but(_figures(args.machine_set)))
    _show(args, plan, None)
    if not args.json:
        for notice in run.notices:
            write_line(f"the trainer tells: {notice}")
    agrees = not args.check or _agrees(args, plan, run.build)
    return EXIT_SAME if plan.fits and agrees else EXIT_DIFFERENT


def _run_model(args: argparse.Namespace) -> int:
    """Plan a model with what the command line says."""
    from megatron_fsdp.plan.machine import find_machine
    from megatron_fsdp.plan.planning import plan_workload
    from megatron_fsdp.plan.recommend import recommend

    is_auto = args.strategy == _AUTO
    if is_auto and (args.outer is not None or args.outer_strategy is not None):
        raise ConfigurationError(
            "--outer and --outer-strategy are tried by themselves with --strategy auto; name a strategy, or leave them "
            "out"
        )
    setup = _setup(args)
    machine = find_machine(args.machine).but(_figures(args.machine_set))
    workload = _workload(args, setup.ranks)
    tried = None
    if is_auto:
        tried = recommend(workload, setup, machine, (args.recompute,) if args.recompute else ("none", "full"))
        plan = tried.best or tried.smallest
    else:
        plan = plan_workload(workload, setup, machine)
    _show(args, plan, tried)
    agrees = not args.check or _check(args, plan)
    return EXIT_SAME if plan.fits and agrees else EXIT_DIFFERENT


def _setup(args: argparse.Namespace) -> Any:
    from megatron_fsdp.plan.front import find_optimizer
    from megatron_fsdp.plan.setup import Accumulation, Backend, Setup

    is_auto = args.strategy == _AUTO
    policy = MixedPrecisionPolicy(
        _dtype(args.main_params_dtype), _dtype(args.main_grads_dtype), _dtype(args.grad_comm_dtype)
    )
    return Setup(
        _ranks(args),
        ShardingStrategy.optim_grads_params if is_auto else resolve_strategy(_number(args.strategy), "--strategy"),
        resolve_strategy(_number(args.outer_strategy or "no_shard"), "--outer-strategy"),
        policy,
        microbatches=args.microbatches,
        accumulation=Accumulation[args.accumulation.upper()],
        optimizer=find_optimizer(args.optimizer),
        recompute=args.recompute or "none",
        backend=Backend(args.backend),
    )


def _workload(args: argparse.Namespace, ranks: Any) -> Any:
    from megatron_fsdp.plan.front import make_workload

    if is_trainer_preset(args.model):
        return trainer_workload(args.model, ranks, args.sequence_length, args.micro_batch_size, _compute_dtype(args))
    return make_workload(
        args.model,
        ranks,
        inputs=None if args.inputs is None else _inputs(args.inputs),
        loss_fn=_found(args.loss, "--loss"),
        sequence_length=args.sequence_length,
        micro_batch=args.micro_batch_size,
        dtype=None if args.dtype is None else _compute_dtype(args),
    )


def _compute_dtype(args: argparse.Namespace) -> Any:
    return dtype_from_name(args.dtype or "bf16", "--dtype")


def _inputs(path: str) -> Any:
    """Inputs on the meta device, made by a function or found as they are."""
    import torch
    from torch.utils._pytree import tree_map

    found = _found(path, "--inputs")
    with torch.device("meta"):
        made = found() if callable(found) else found
    return tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, made)


def _found(path: str | None, argument: str) -> Any:
    return None if path is None else import_by_path(path, argument)


def _ranks(args: argparse.Namespace) -> Any:
    from megatron_fsdp.plan.setup import ParallelRanks

    if not 1 <= args.ranks <= _MOST_RANKS:
        raise ConfigurationError(f"invalid --ranks {args.ranks}: give 1 to {_MOST_RANKS:,}")
    if args.outer is not None and args.outer < 1:
        raise ConfigurationError(f"invalid --outer {args.outer}: give 1 or more, or leave it out")
    divided = args.tp * args.cp * args.pp * (args.outer or 1)
    if divided < 1 or args.ranks % divided:
        raise ConfigurationError(
            f"--ranks {args.ranks} is not a multiple of tp x cp x pp x outer = {args.tp} x {args.cp} x {args.pp} x "
            f"{args.outer or 1} = {divided}; give sizes whose product divides it"
        )
    return ParallelRanks(args.ranks // divided, args.outer or 1, args.tp, args.cp, args.pp, args.ep)


def _number(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _dtype(name: str) -> Any:
    return None if name == _FOLLOW else dtype_from_name(name)


def _figures(given: list[str]) -> dict[str, float]:
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigurationError(f"--machine-set {text} is not FIGURE=NUMBER") from None
    return found


def _list() -> int:
    from megatron_fsdp.plan.machine import MACHINES
    from megatron_fsdp.plan.presets import PRESETS
    from megatron_fsdp.plan.report import machine_words

    write_line("models: " + ", ".join(PRESETS))
    write_line("models of the trainer: " + ", ".join(trainer_presets()))
    for machine in MACHINES.values():
        write_line(machine_words(machine))
    return EXIT_SAME


def _show(args: argparse.Namespace, plan: Any, tried: Any) -> None:
    from megatron_fsdp.plan.picture import draw_memory
    from megatron_fsdp.plan.report import flags, plan_dict, summary_dict

    if args.picture is not None:
        draw_memory(plan, args.picture)
    if args.json:
        told = {**plan_dict(plan), "flags": flags(plan.setup)}
        if tried is not None:
            told["tried"] = [summary_dict(each) for each in tried.plans]
        write_json(told)
        return
    if tried is not None:
        _show_tried(tried)
    _show_plan(plan, with_units=args.units)
    if args.picture is not None:
        write_line(f"memory over the step: {args.picture}")


def _show_tried(tried: Any) -> None:
    from megatron_fsdp.plan.report import tried_row

    write_table(
        ("", "strategy", "outer", "ranks", "recompute", "peak", "fits", "step", "exposed"),
        [("*" if each is tried.best else "", *tried_row(each)) for each in tried.plans],
        right=("peak", "step", "exposed"),
    )
    write_line()
    if tried.best is None:
        write_line(
            "Nothing fits; what follows is the arrangement that takes least. Divide the model further (--tp, --pp, "
            "--ep), shorten or divide sequences (--sequence-length, --cp), or use devices with more memory (--machine)."
        )
        write_line()


def _show_plan(plan: Any, *, with_units: bool) -> None:
    from megatron_fsdp.plan.report import (
        facts,
        flags,
        machine_words,
        memory_rows,
        time_rows,
        traffic_rows,
        unit_rows,
        verdict,
    )

    write_facts(facts(plan))
    write_line()
    if with_units:
        write_table(
            ("units", "class", "count", "parameters each", "padding each"),
            unit_rows(plan.model.units),
            right=("count", "parameters each", "padding each"),
        )
        write_line()
    write_table(("memory of a rank at the peak", "bytes"), memory_rows(plan), right=("bytes",))
    write_line()
    if plan.traffic:
        columns = ("traffic of a step", "gathers", "reductions", "sent by a rank", "on the wire")
        write_table(columns, traffic_rows(plan), right=columns[1:])
        write_line()
    write_facts(time_rows(plan))
    write_line(f"assumed: {machine_words(plan.machine)}")
    write_line()
    write_line(verdict(plan))
    write_line("flags: " + " ".join(flags(plan.setup)))


def _check(args: argparse.Namespace, plan: Any) -> bool:
    from megatron_fsdp.plan.models import build_meta_model, comes_from_config

    dtype = _compute_dtype(args)
    if is_trainer_preset(args.model):
        return _agrees(args, plan, lambda: build_trainer_model(args.model, dtype))
    chosen = dtype if comes_from_config(args.model) else None
    return _agrees(args, plan, lambda: build_meta_model(args.model, chosen))


def _agrees(args: argparse.Namespace, plan: Any, build: Callable[[], Any]) -> bool:
    """Whether a simulated run of the engine agrees with a plan; shows both."""
    from megatron_fsdp.plan.checking import check_by_simulation

    found = check_by_simulation(plan, build)
    if not args.json:
        write_line()
        rows = [
            (each.name, f"{each.planned:,}", f"{each.simulated:,}", "ok" if each.agrees else "DIFFERS")
            for each in found
        ]
        write_table(("checked by a simulated run", "planned", "simulated", ""), rows, right=("planned", "simulated"))
    wrong = [each.name for each in found if not each.agrees]
    if wrong:
        write_error(f"plan and simulation differ in {', '.join(wrong)}")
    return not wrong
