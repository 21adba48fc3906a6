"""`mfsdp checkpoint convert`, and the same under the reference tool's name: arguments in, an exit status out.

Runs in one process, or on every rank that torchrun starts; needs no GPU. Exit status 0: converted; 1: the output that
was read back differs from the source; 2: refused or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_fsdp.checkpoint.convert.convert import ConversionMismatchError, ConversionReport, Steps, convert
from megatron_fsdp.checkpoint.convert.groups import read_group_map_json
from megatron_fsdp.checkpoint.convert.names import ALL, AUTO, NONE
from megatron_fsdp.checkpoint.convert.plan import FP32, MODEL, ConvertOptions
from megatron_fsdp.comm.agreement import rank_of, together
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError

NAME, REFERENCE_NAME = "convert", "convert-torch-dist-to-fsdp-dtensor"
_SCOPE = re.compile(r"[\w.]+(,[\w.]+)*")


def add_parser(subparsers: Any) -> None:
    """Add the command under both names.

    Args:
        subparsers: What `ArgumentParser.add_subparsers` returned. Parsed arguments go to `run`.
    """
    for name, shown in ((NAME, {"help": "convert a torch_dist checkpoint to fsdp_dtensor"}), (REFERENCE_NAME, {})):
        parser = subparsers.add_parser(
            name,
            **shown,
            description="Convert a torch_dist checkpoint of Megatron to fsdp_dtensor. Run it as it is, or on several "
            "processes with torchrun; it needs no GPU.",
        )
        _add_arguments(parser)
        parser.set_defaults(run=run)
        # `--swiglu` may stand alone, before the folders; argparse would take the first of them for its value.
        parser.parse_known_args = partial(_parse, parser.parse_known_args, name == REFERENCE_NAME)


def run(args: argparse.Namespace) -> int:
    """Convert.

    Returns:
        The exit status.
    """
    started_here = False
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
            dist.init_process_group("gloo")
            started_here = True
        options = together("reading the arguments", lambda: _options(args))
        steps = Steps(args.dry_run, args.verify, args.write_tracker)
        show = None if args.json or rank_of() != 0 else _Progress()
        report = convert(args.source, args.target, options, steps, show)
    except ConversionMismatchError as error:
        return _fail(error, 1)
    except MegatronFSDPError as error:
        return _fail(error, 2)
    finally:
        if started_here:
            dist.destroy_process_group()
    if _is_first():
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n" if args.json else _tell(report, args))
    return 0


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="SRC", type=Path,
                        help="iter_* folder of a torch_dist checkpoint, or that of a run: then its latest")  # fmt: skip
    parser.add_argument("target", metavar="DST", type=Path, help="the folder to make; must not exist, or be empty")
    parser.add_argument("--from", dest="source_format", choices=["torch_dist"], default="torch_dist")
    parser.add_argument("--to", dest="target_format", choices=["fsdp_dtensor"], default="fsdp_dtensor")
    scope = parser.add_mutually_exclusive_group()
    scope.add_argument("--swiglu", metavar="auto|all|none|MODULE,...", default=None,
                       help="which MLPs are gated, so that fc1 becomes a gate (_w) and an up (_v) half; alone it means "
                       "all; auto (the default) goes by the checkpoint's arguments and shapes")  # fmt: skip
    scope.add_argument("--swiglu-modules", metavar="MODULE,...", help="the same as --swiglu MODULE,...")
    parser.add_argument("--param-to-param-group-map-json", metavar="MAP", type=Path,
                        help="parameter group of each parameter, from print-torch-dcp-in-json")  # fmt: skip
    parser.add_argument("--groups", choices=["infer", "map", "none"],
                        help="where parameter groups come from: map where one is given, else infer")  # fmt: skip
    parser.add_argument("--masters", choices=[FP32, MODEL], default=FP32,
                        help="write the fp32 master weights (default), or the model's rounded ones")  # fmt: skip
    parser.add_argument(
        "--weights-only", action="store_true", help="leave optimizer state and random generators behind"
    )
    parser.add_argument("--model-prefix", "--output-model-weight-prefix", metavar="P", default="model.module")
    parser.add_argument("--optimizer-prefix", "--output-optimizer-state-prefix", metavar="P",
                        help="default: optimizer.state and one module. for each wrapper of the run")  # fmt: skip
    parser.add_argument("--group-prefix", metavar="P", help="default: as the optimizer prefix, in param_to_group_meta")
    parser.add_argument("--rename-mtp-keys", action="store_true", help="transformer_layer -> mtp_model_layer")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, and write nothing")
    parser.add_argument("--verify", action="store_true", help="read the output back and compare it with the source")
    parser.add_argument("--write-tracker", action="store_true",
                        help="point latest_checkpointed_iteration.txt beside DST to it")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a report for scripts")
    parser.add_argument("--oom-traceback", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--enable-msc", action="store_true", help=argparse.SUPPRESS)


def _parse(
    parse: Any, is_reference: bool, argv: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
) -> tuple[argparse.Namespace, list[str]]:
    given = list(sys.argv[1:] if argv is None else argv)
    return parse(_with_swiglu_values(given, is_reference), namespace)


def _with_swiglu_values(argv: Sequence[str], is_reference: bool) -> list[str]:
    """Give each lone `--swiglu` the value "all", and join it with its value where it has one."""
    result: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--swiglu":
            has_value = bool(rest) and _is_scope(rest[0]) and not is_reference
            word = f"--swiglu={rest.pop(0) if has_value else ALL}"
        result.append(word)
    return result


def _is_scope(word: str) -> bool:
    """Return whether the word after `--swiglu` is its value, and not a folder."""
    return word in (AUTO, ALL, NONE) or (_SCOPE.fullmatch(word) is not None and not Path(word).exists())


def _options(args: argparse.Namespace) -> ConvertOptions:
    if args.enable_msc:
        raise ConfigurationError("--enable-msc asks for remote storage; give local folders, and leave it out")
    if args.oom_traceback and _is_first():
        sys.stderr.write("--oom-traceback has nothing to trace here: one tensor is held at a time\n")
    path = args.param_to_param_group_map_json
    return ConvertOptions(
        swiglu=args.swiglu or args.swiglu_modules or AUTO,
        groups=args.groups,
        param_to_group=None if path is None else read_group_map_json(path),
        masters=args.masters,
        weights_only=args.weights_only,
        model_prefix=args.model_prefix,
        optimizer_prefix=args.optimizer_prefix,
        group_prefix=args.group_prefix,
        rename_mtp=args.rename_mtp_keys,
    )


class _Progress:
    """Prints a line to stderr for each tenth of the first rank's bytes."""

    def __init__(self) -> None:
        self._told = 0

    def __call__(self, done: int, total: int) -> None:
        tenths = 10 * done // total if total else 0
        if tenths > self._told:
            self._told = tenths
            sys.stderr.write(f"{done / 2**20:,.1f} of {total / 2**20:,.1f} MiB written by the first rank\n")


def _tell(report: ConversionReport, args: argparse.Namespace) -> str:
    plan = report.plan
    lines = [f"{module}: {decision}" for module, decision in plan.gating.items()]
    lines += [f"left behind: {item.key} ({item.why})" for item in plan.dropped if "_extra_state" not in item.key]
    lines += list(plan.notes)
    if args.dry_run:
        lines += [f"{m.source} {_box(m.offsets, m.lengths)} -> {m.target} {list(m.shape)}" for m in plan.moves]
    lines += [] if report.source == args.source else [f"read {report.source}"]
    did = "would write" if not report.written else "wrote and verified" if report.verified else "wrote"
    size = f"{len(plan.moves)} tensors ({plan.nbytes / 2**20:,.1f} MiB) and {len(plan.values)} values"
    return "\n".join([*lines, f"{did} {size} to {args.target}"]) + "\n"


def _box(offsets: Sequence[int], lengths: Sequence[int]) -> str:
    return f"[{', '.join(f'{o}:{o + n}' for o, n in zip(offsets, lengths, strict=True))}]"


def _fail(error: Exception, status: int) -> int:
    if _is_first():
        sys.stderr.write(f"error: {error}\n")
    return status


def _is_first() -> bool:
    """Return whether this process prints; known with and without a process group."""
    return rank_of() == 0 if dist.is_initialized() else int(os.environ.get("RANK", "0")) == 0
