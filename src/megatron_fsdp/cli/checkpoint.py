"""`mfsdp checkpoint ...`: arguments and output of its commands, with the names of Megatron-LM's inspector as aliases.

One process on the CPU does the work; `convert` also divides it among the ranks that torchrun starts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pprint
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_fsdp.checkpoint.convert.convert import ConversionMismatchError, ConversionReport, Steps, convert
from megatron_fsdp.checkpoint.convert.groups import export_group_map_json, read_group_map_json
from megatron_fsdp.checkpoint.convert.names import ALL, AUTO, NONE
from megatron_fsdp.checkpoint.convert.plan import FP32, MODEL, ConvertOptions
from megatron_fsdp.checkpoint.diff import Tolerance, diff
from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder
from megatron_fsdp.checkpoint.hf.saving import DEFAULT_SHARD_BYTES
from megatron_fsdp.checkpoint.inspect import GROUP_META, as_json, dtype_name, inspect_folder, recognise, show
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.report import together
from megatron_fsdp.checkpoint.store import POINTER, RunFolder, iteration_of, locate
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.cli.main import run_guarded
from megatron_fsdp.cli.output import in_bytes, write_error, write_facts, write_json, write_line, write_table, write_text
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_ERROR, EXIT_SAME, Parser
from megatron_fsdp.describe.text import WIDTH
from megatron_fsdp.errors import CheckpointError, ConfigurationError, MegatronFSDPError
from megatron_fsdp.package_info import __version__
from megatron_fsdp.train.models.export import export_run

_DESCRIPTION = "Look into checkpoints, compare and convert them. One process on the CPU is enough for all of it."

_OPTIMIZERS = {
    "none": "no optimizer state",
    "model_space": "one tensor per slot and model tensor (model space)",
    "bucket_space": "flat buckets (dp_reshardable), which only the run that wrote them understands",
    "per_parameter": "one tensor per parameter and slot",
}
_STATISTICS = ("min", "max", "mean", "norm", "non-finite", "zeros")
_REFERENCE_RTOL, _REFERENCE_ATOL = 1e-5, 1e-8
_SHOWN = 50
_SCOPE = re.compile(r"[\w.]+(,[\w.]+)*")


# ---- commands and their arguments ------------------------------------------------------------------------------------


_Run = Callable[[argparse.Namespace], int]
_Argument = tuple[tuple[str, ...], dict[str, Any]]
_COMMANDS: list[tuple[list[str], str, str, tuple[_Argument, ...], _Run]] = []


def _command(names: str, title: str, description: str, *arguments: _Argument) -> Callable[[_Run], _Run]:
    """Declare the command that a function runs, with aliases behind its name."""

    def declare(run: _Run) -> _Run:
        _COMMANDS.append((names.split(), title, description, arguments, run))
        return run

    return declare


def _arg(*names: str, **settings: Any) -> _Argument:
    return names, settings


def _flag(*names: str, **settings: Any) -> _Argument:
    return names, {"action": "store_true", **settings}


_DIR_HELP = "folder of one checkpoint, or of a run: its latest one"
_DIR = _arg("checkpoint_dir", metavar="DIR", help=_DIR_HELP)
_OUTPUT = {"type": Path, "help": "the folder to make; must not exist, or be empty"}
_FILTER = _arg("--filter", metavar="REGEX", help="only keys that contain a match of this regular expression")
_JSON = _flag("--json", help="print JSON")


def _opened(path: str) -> CheckpointFolder:
    return CheckpointFolder(locate(path))


# ---- inspect ---------------------------------------------------------------------------------------------------------


@_command(
    "inspect show print-tensor",
    "kind, iteration, keys, shapes, dtypes, bytes; one tensor or object",
    "Describe a checkpoint: torch_dist (all three generations), fsdp_dtensor, or any other of "
    "torch.distributed.checkpoint. With KEY print one tensor or object, of a large tensor the first corner unless "
    "--slice says otherwise. Exit status: 0; 1 if it has problems, which are listed; 2 if it cannot be read.",
    _DIR,
    _arg("key", metavar="KEY", nargs="?", help="print this tensor or object"),
    _FILTER,
    _flag("--stats", help="read all listed tensors: smallest, largest, mean, norm, non-finite"),
    _flag(
        "--all",
        "--not-ignore-param-to-group-meta",
        help=f"also list the keys under {GROUP_META}*, which are left out of tables otherwise",
    ),
    _arg("--slice", metavar="PART", help="of the tensor KEY, as 0:2,:8 or 3,-1 (write --slice=-1 if it starts with -)"),
    _JSON,
)
def _inspect(args: argparse.Namespace) -> int:
    if args.key is not None:
        return _show(args)
    if args.slice:
        raise ConfigurationError("--slice is for one tensor; give its KEY too")
    folder = _opened(args.checkpoint_dir)
    found = inspect_folder(folder, args.filter, with_statistics=args.stats)
    if args.json:
        write_json(found)
        return EXIT_DIFFERENT if found["problems"] else EXIT_SAME
    entries, common = found["entries"], found["common"]
    tensors, objects = ([entry for entry in entries if entry["type"] == kind] for kind in ("tensor", "object"))
    count = sum(math.prod(entry["shape"]) for entry in tensors)
    size_of_tensors, size_of_objects = (in_bytes(sum(entry["nbytes"] for entry in kind)) for kind in (tensors, objects))
    facts = {
        "path": found["path"],
        "format": recognise(folder).title,
        "optimizer": _OPTIMIZERS[found["optimizer"]] + (", keys with chained_<n>." if found["is_chained"] else ""),
        **{name: str(common[name]) for name in ("iteration", "checkpoint_version") if name in common},
        "common state": ", ".join(sorted(common.keys() - {"iteration", "checkpoint_version"})),
        "tensors": f"{len(tensors)}, {count:,} elements, {size_of_tensors}",
        "objects": f"{len(objects)}, {size_of_objects}",
        "files": f"{len(found['files'])}, {in_bytes(sum(found['files'].values()))}",
        "flattened": f"{len(found['mcore_data'])} tensors (mcore_data)" if found["mcore_data"] else "",
    }
    write_facts([(name, text) for name, text in facts.items() if text])
    write_line()
    shown = [entry for entry in entries if args.all or not entry["key"].startswith(GROUP_META)]
    if shown:
        titles = ["key", "type", "shape", "bytes", "chunks", *(_STATISTICS if args.stats else ())]
        write_table(titles, [_row(entry)[: len(titles)] for entry in shown], right=["bytes", "chunks", *_STATISTICS])
    if len(entries) > len(shown):
        write_line(f"({len(entries) - len(shown)} keys under {GROUP_META}* are not listed; --all lists them)")
    if found["hidden"]:
        write_line(f"({found['hidden']} keys do not match --filter)")
    for problem in found["problems"]:
        write_line(f"problem: {problem}")
    return EXIT_DIFFERENT if found["problems"] else EXIT_SAME


def _row(entry: dict[str, Any]) -> list[str]:
    shape, numbers = "" if entry["shape"] is None else str(tuple(entry["shape"])), [""] * len(_STATISTICS)
    if "statistics" in entry:
        numbers = ["-" if n is None else f"{n:.6g}" for n in entry["statistics"].values()]
    return [entry["key"], entry["dtype"] or "object", shape, in_bytes(entry["nbytes"]), str(entry["chunks"]), *numbers]


def _show(args: argparse.Namespace) -> int:
    folder = _opened(args.checkpoint_dir)
    value, box = show(folder, args.key, args.slice)
    if box is None:
        nbytes = folder.objects[args.key].span.length
        if args.json:
            write_json({"key": args.key, "type": "object", "bytes": nbytes, "value": as_json(value)})
        else:
            write_facts([("key", args.key), ("type", f"object, {in_bytes(nbytes)}")])
            write_text(pprint.pformat(value, width=WIDTH, compact=True))
        return EXIT_SAME
    entry = folder.tensors[args.key]
    dtype, chunks = dtype_name(entry.dtype), len(entry.chunks)
    part = f"[{', '.join(f'{index.start}:{index.stop}' for index in box.indices)}]"
    if args.json:
        sizes = {"shape": list(entry.shape), "dtype": dtype, "bytes": entry.nbytes, "chunks": chunks, "part": part}
        values = torch.view_as_real(value.resolve_conj()) if value.dtype.is_complex else value
        values = values.to(torch.float64) if values.dtype.is_floating_point else values
        write_json({"key": entry.key, "type": "tensor", **sizes, "values": as_json(values.tolist())})
    else:
        facts = [("key", entry.key), ("type", f"{dtype} {entry.shape}, {in_bytes(entry.nbytes)}")]
        write_facts([*facts, ("chunks", str(chunks)), *([] if box.lengths == entry.shape else [("part", part)])])
        write_text(str(value))
    return EXIT_SAME


# ---- diff and verify -------------------------------------------------------------------------------------------------


@_command(
    "diff compare-two-checkpoint",
    "compare two checkpoints",
    "Compare all tensors and objects of two checkpoints by value, however each is cut into chunks; one chunk of each "
    "is in memory at a time. Exit status: 0 they are the same, 1 they differ, 2 one cannot be read.",
    _arg("checkpoint_1", metavar="A", help=_DIR_HELP),
    _arg("checkpoint_2", metavar="B", help=_DIR_HELP),
    _arg(
        "--rtol",
        type=float,
        help=f"equal: |a - b| <= atol + rtol * |b| (default 0; of compare-two-checkpoint {_REFERENCE_RTOL})",
    ),
    _arg("--atol", type=float, help=f"see --rtol (default 0; of compare-two-checkpoint {_REFERENCE_ATOL})"),
    _flag("--bitwise", help="equal bits: 0.0 and -0.0 differ, and so do unlike NaN"),
    _flag("--all", help=f"list all differences, not only the first {_SHOWN}"),
    _FILTER,
    _JSON,
)
def _diff(args: argparse.Namespace) -> int:
    usual = (0.0, 0.0)
    if args.checkpoint_command == "compare-two-checkpoint" and not args.bitwise:
        usual = (_REFERENCE_RTOL, _REFERENCE_ATOL)
    rtol, atol = (own if given is None else given for given, own in zip((args.rtol, args.atol), usual, strict=True))
    tolerance = Tolerance(rtol, atol, args.bitwise)
    found = diff(_opened(args.checkpoint_1), _opened(args.checkpoint_2), tolerance, args.filter)
    if args.json:
        write_json(found.to_json())
    elif found.is_same:
        write_line(f"the same: {found.compared} keys")
    else:
        shown = found.differences if args.all else found.differences[:_SHOWN]
        for item in shown:
            write_line(f"{item.key}: {item.text}")
        if len(found.differences) > len(shown):
            write_line(f"... and {len(found.differences) - len(shown)} more (--all lists them)")
        write_line(f"{len(found.differences)} keys differ; {found.compared} were compared")
    return EXIT_SAME if found.is_same else EXIT_DIFFERENT


@_command(
    "verify",
    "find damaged, missing and unexpected tensors, objects and files",
    "Read a checkpoint and compare every tensor and object with its manifest. One process, no GPU, one chunk in "
    "memory at a time, and no code from the checkpoint is run. Exit status: 0 whole, 1 damaged, 2 it cannot be "
    "looked at.",
    _arg("checkpoint_dir", metavar="DIR", type=Path, help="an iter_* folder, or the folder of a run: then the latest"),
    _flag("--all", help="every checkpoint of the run"),
    _flag("--quick", help="names, shapes and files only; contents are not read"),
    _JSON,
)
def _verify(args: argparse.Namespace) -> int:
    given, pointer_problem = args.checkpoint_dir, None
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give a checkpoint or a run")
    folders = [given]
    if iteration_of(given.name) is not None or (given / METADATA).exists() or (given / FILE_NAME).exists():
        if args.all:
            raise CheckpointError(f"{given} is one checkpoint; --all takes the folder of a run")
    else:
        folders = sorted(path for path in given.glob("iter_*") if iteration_of(path.name) is not None)
        try:
            latest = RunFolder(given).latest()
            if latest is not None:
                folders = sorted({*folders, latest}) if args.all else [latest]
        except CheckpointError as error:
            pointer_problem = str(error)
        if not folders and pointer_problem is None:
            raise CheckpointError(f"{given} holds no checkpoint: neither {METADATA} nor {POINTER} nor iter_* folders")
    reports = [verify(folder, deep=not args.quick) for folder in folders]
    if args.json:
        write_json({"checkpoints": [report.to_dict() for report in reports], "pointer": pointer_problem})
    else:
        for line in [*map(str, reports), *filter(None, [pointer_problem])]:
            write_line(line)
    is_well = pointer_problem is None and all(report.is_whole for report in reports)
    return EXIT_SAME if is_well else EXIT_DIFFERENT


# ---- to other files --------------------------------------------------------------------------------------------------


@_command(
    "to-hf",
    "a checkpoint as a Hugging Face folder",
    "Write the weights of a checkpoint of a transformers model as a folder that from_pretrained loads: safetensors "
    "files with an index, and beside them the config, generation config and tokenizer of another folder. The trainer's "
    "own decoder becomes a Llama, where it computes what one does.",
    _DIR,
    _arg("output_dir", metavar="OUT", **_OUTPUT),
    _arg(
        "--config",
        metavar="FOLDER",
        type=Path,
        help="with config.json and tokenizer of the model; for the trainer's own decoder a config can be written",
    ),
    _arg("--dtype", choices=("float32", "bfloat16", "float16"), help="of floating-point weights; default: as stored"),
    _arg("--max-shard-bytes", type=int, metavar="N", default=DEFAULT_SHARD_BYTES, help="of one file (default 5 GiB)"),
)
def _to_hf(args: argparse.Namespace) -> int:
    dtype = getattr(torch, args.dtype) if args.dtype else None
    source = _opened(args.checkpoint_dir)
    files = export_run(source, args.output_dir, args.config, max_shard_bytes=args.max_shard_bytes, dtype=dtype)
    nbytes = sum((args.output_dir / name).stat().st_size for name in files)
    write_line(f"{args.output_dir}: {len(files)} weight files, {in_bytes(nbytes)}")
    return EXIT_SAME


@_command(
    "map print-torch-dcp-in-json",
    "parameter groups of a run as JSON",
    "Write the parameter group of each parameter as JSON, as `convert --param-to-param-group-map-json` reads it, "
    "from the folder that --dump-param-to-param-group-map made in training.",
    _arg("torch_dcp_dir", metavar="DIR", type=Path, help="the folder that training made"),
    _arg("--out", metavar="MAP.json", type=Path, help="default: param_to_param_group_map.json in the folder"),
    _arg(
        "--model-prefix",
        metavar="P",
        default="model.module",
        help="stands before names, instead of the module. of each wrapper (default %(default)s)",
    ),
)
def _map(args: argparse.Namespace) -> int:
    """Write the map, then print it and its path in the format of Megatron-LM's inspector."""
    path = export_group_map_json(args.torch_dcp_dir, args.out, args.model_prefix)
    write_text(f"torch dcp content: {json.dumps(json.loads(path.read_text(encoding='utf-8')))}")
    write_text(str(path))
    return EXIT_SAME


# ---- convert ---------------------------------------------------------------------------------------------------------


@_command(
    "convert convert-torch-dist-to-fsdp-dtensor",
    "convert a torch_dist checkpoint to fsdp_dtensor",
    "Convert a torch_dist checkpoint of Megatron to fsdp_dtensor. Run it as it is, or on several processes with "
    "torchrun; it needs no GPU.",
    _arg("source", metavar="SRC", type=Path, help="iter_* folder of torch_dist, or a run: its latest"),
    _arg("target", metavar="DST", **_OUTPUT),
    _arg("--from", dest="source_format", choices=["torch_dist"], default="torch_dist"),
    _arg("--to", dest="target_format", choices=["fsdp_dtensor"], default="fsdp_dtensor"),
    _arg(
        "--swiglu",
        "--swiglu-modules",
        metavar="auto|all|none|MODULE,...",
        default=AUTO,
        help="which MLPs are gated, so that fc1 becomes a gate (_w) and an up (_v) half; --swiglu alone means all; "
        "auto (the default) goes by the checkpoint's arguments and shapes",
    ),
    _arg("--param-to-param-group-map-json", metavar="MAP", type=Path, help="parameter groups, as map writes them"),
    _arg("--groups", choices=["infer", "map", "none"], help="where groups come from: a map if given, else infer"),
    _arg("--masters", choices=[FP32, MODEL], default=FP32, help="fp32 master weights (default), or the model's"),
    _flag("--weights-only", help="leave optimizer state and random generators behind"),
    _arg("--model-prefix", "--output-model-weight-prefix", metavar="P", default="model.module"),
    _arg(
        "--optimizer-prefix",
        "--output-optimizer-state-prefix",
        metavar="P",
        help="default: optimizer.state and one module. for each wrapper of the run",
    ),
    _arg("--group-prefix", metavar="P", help="default: as the optimizer prefix, in param_to_group_meta"),
    _flag("--rename-mtp-keys", dest="rename_mtp", help="transformer_layer -> mtp_model_layer"),
    _flag("--dry-run", help="say what would be done, and write nothing"),
    _flag("--verify", help="read the output back and compare it with the source"),
    _flag("--write-tracker", help="point latest_checkpointed_iteration.txt beside DST to it"),
    _JSON,
    _flag("--oom-traceback", help=argparse.SUPPRESS),  # nothing to trace: one tensor is held at a time
)
def _convert(args: argparse.Namespace) -> int:
    """Convert, in one process or on every rank that torchrun started; the first one prints."""
    starts = int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized()
    is_first = dist.get_rank() == 0 if dist.is_initialized() else os.environ.get("RANK", "0") == "0"
    try:
        if starts:
            dist.init_process_group("gloo")
        options = together("reading the arguments", lambda: _options(args))
        steps = Steps(args.dry_run, args.verify, args.write_tracker)
        report = convert(args.source, args.target, options, steps, _progress() if is_first and not args.json else None)
    except MegatronFSDPError as error:
        if is_first:
            write_error(str(error))
        return EXIT_DIFFERENT if isinstance(error, ConversionMismatchError) else EXIT_ERROR
    finally:
        if starts and dist.is_initialized():
            dist.destroy_process_group()
    if is_first and args.json:
        write_json(report.as_json())
    elif is_first:
        _write_conversion(report, args)
    return EXIT_SAME


def _options(args: argparse.Namespace) -> ConvertOptions:
    path = args.param_to_param_group_map_json
    names = ("swiglu", "groups", "masters", "weights_only", "model_prefix", "optimizer_prefix", "group_prefix")
    return ConvertOptions(
        param_to_group=None if path is None else read_group_map_json(path),
        rename_mtp=args.rename_mtp,
        **{name: getattr(args, name) for name in names},
    )


def _progress() -> Callable[[int, int], None]:
    """Return a function that prints a line to stderr for each tenth of the first rank's bytes."""
    tenths = 0

    def tell(done: int, total: int) -> None:
        nonlocal tenths
        if total and 10 * done // total > tenths:
            tenths = 10 * done // total
            sys.stderr.write(f"{in_bytes(done)} of {in_bytes(total)} written by the first rank\n")

    return tell


def _write_conversion(report: ConversionReport, args: argparse.Namespace) -> None:
    plan = report.plan
    lines = [f"{module}: {decision}" for module, decision in plan.gating.items()]
    lines += [f"left behind: {item.key} ({item.why})" for item in plan.dropped if "_extra_state" not in item.key]
    lines += plan.notes
    for move in plan.moves if args.dry_run else ():
        part = ", ".join(f"{first}:{first + n}" for first, n in zip(move.offsets, move.lengths, strict=True))
        lines.append(f"{move.source} [{part}] -> {move.target} {list(move.shape)}")
    lines += [] if report.source == args.source else [f"read {report.source}"]
    did = "would write" if not report.written else "wrote and verified" if report.verified else "wrote"
    size = f"{len(plan.moves)} tensors ({in_bytes(plan.nbytes)}) and {len(plan.values)} values"
    for line in [*lines, f"{did} {size} to {args.target}"]:
        write_text(line)  # a move stays in its line, which tools search


# ---- the parser ------------------------------------------------------------------------------------------------------


class _CommandParser(Parser):
    """A parser whose option `--swiglu` may stand alone before folders, which argparse would take for its value."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(args)
        for place, (word, following) in enumerate(pairwise([*args, ""])):
            is_scope = following in (AUTO, ALL, NONE) or (_SCOPE.fullmatch(following) and not Path(following).exists())
            if word == "--swiglu" and not is_scope:
                words[place] = f"--swiglu={ALL}"
        return super().parse_known_args(words, namespace)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the commands for checkpoints."""
    parser.description = _DESCRIPTION
    commands = parser.add_subparsers(
        dest="checkpoint_command", metavar="COMMAND", required=True, parser_class=_CommandParser
    )
    for (name, *aliases), title, description, arguments, run in _COMMANDS:
        added = commands.add_parser(name, help=title, description=description, aliases=aliases)
        for names, settings in arguments:
            added.add_argument(*names, **settings)
        added.set_defaults(run=run if run is _convert or os.environ.get("RANK", "0") == "0" else lambda _: EXIT_SAME)


def inspector(argv: Sequence[str] | None = None) -> int:
    """Run the commands of `mfsdp checkpoint` as a separate program, `tools/checkpoint/checkpoint_inspector.py`."""
    parser = Parser(prog="checkpoint_inspector.py")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_arguments(parser)
    return run_guarded(parser, sys.argv[1:] if argv is None else argv)
