"""`mfsdp checkpoint ...`; the names of Megatron-LM's inspector are aliases of the commands."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import pprint
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint.convert.groups import export_group_map_json
from megatron_fsdp.checkpoint.folder import METADATA, CheckpointFolder, TensorEntry
from megatron_fsdp.checkpoint.hf import export_hf
from megatron_fsdp.checkpoint.hf.saving import DEFAULT_SHARD_BYTES
from megatron_fsdp.checkpoint.kinds import GROUP_META, as_json, dtype_name
from megatron_fsdp.checkpoint.manifest import FILE_NAME
from megatron_fsdp.checkpoint.store import POINTER, RunFolder, iteration_of, locate
from megatron_fsdp.checkpoint.tools.diff import Tolerance, diff
from megatron_fsdp.checkpoint.tools.inspect import (
    Inspection,
    ListedEntry,
    Shown,
    inspect_folder,
    list_checkpoints,
    show,
)
from megatron_fsdp.checkpoint.tools.torch_save import RepackReport, from_torch_save, to_torch_save
from megatron_fsdp.checkpoint.verify import verify
from megatron_fsdp.cli import checkpoint_convert
from megatron_fsdp.cli.main import run_guarded
from megatron_fsdp.cli.output import add_json, in_bytes, write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME, Parser
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.package_info import __version__

_DESCRIPTION = "Look into checkpoints, compare and convert them. One process on the CPU is enough for all of it."

_OPTIMIZERS = {
    "none": "no optimizer state",
    "model_space": "one tensor per slot and model tensor (model space)",
    "bucket_space": "flat buckets (dp_reshardable), which only the run that wrote them understands",
    "per_parameter": "one tensor per parameter and slot",
}
_ARGUMENTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_experts", "seq_length",
    "padded_vocab_size", "swiglu", "bf16", "fp16", "tensor_model_parallel_size", "pipeline_model_parallel_size",
    "expert_model_parallel_size", "world_size",
)  # fmt: skip
_STATISTICS = ("min", "max", "mean", "norm", "non-finite", "zeros")
_REFERENCE_RTOL, _REFERENCE_ATOL = 1e-5, 1e-8
_SHOWN = 50

Run = Callable[[argparse.Namespace], int]


def add_parser(commands: Any) -> None:
    """Add `checkpoint` and all below it to the sub-commands of a parser."""
    parser = commands.add_parser("checkpoint", help="inspect, compare and convert", description=_DESCRIPTION)
    add_commands(parser)


def add_commands(parser: argparse.ArgumentParser) -> None:
    """Add the commands for checkpoints to a parser."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=Parser)
    for add in (
        _add_inspect,
        _add_diff,
        _add_verify,
        _add_torch,
        _add_hf,
        _add_map,
        checkpoint_convert.add_parser,
    ):
        add(commands)


def inspector(argv: Sequence[str] | None = None) -> int:
    """Run the commands of `mfsdp checkpoint` as a separate program, `tools/checkpoint/checkpoint_inspector.py`."""
    parser = Parser(prog="checkpoint_inspector.py", description=_DESCRIPTION)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    add_commands(parser)
    return run_guarded(parser, sys.argv[1:] if argv is None else argv)


def _add(
    commands: Any, name: str, run: Run, description: str, title: str | None = None, aliases: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Add a command that runs on torchrun's first rank only; without a title it is not listed."""
    shown = {} if title is None else {"help": title}
    parser: argparse.ArgumentParser = commands.add_parser(name, description=description, aliases=aliases, **shown)
    parser.set_defaults(run=functools.partial(_on_first_rank, run))
    # An option of Megatron-LM's inspector that is not supported: accepted, so that it is refused with a message.
    parser.add_argument("--enable-msc", action="store_true", help=argparse.SUPPRESS)
    return parser


def _on_first_rank(run: Run, args: argparse.Namespace) -> int:
    if os.environ.get("RANK", "0") != "0":
        return EXIT_SAME
    if args.enable_msc:
        raise ConfigurationError(
            "--enable-msc is not supported: only folders of the file system can be read; mount or copy the checkpoint, "
            "and leave the option out"
        )
    return run(args)


def _add_folder(parser: argparse.ArgumentParser, name: str = "checkpoint_dir", metavar: str = "DIR") -> None:
    parser.add_argument(name, metavar=metavar, help="folder of one checkpoint, or of a run: its latest one")


def _opened(path: str) -> CheckpointFolder:
    return CheckpointFolder(locate(path))


def _add_filter(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--filter", metavar="REGEX", help="only keys that contain a match of this regular expression")


# ---- inspect ---------------------------------------------------------------------------------------------------------


def _add_inspect(commands: Any) -> None:
    parser = _add(
        commands,
        "inspect",
        _inspect,
        "Describe a checkpoint: torch_dist (all three generations), fsdp_dtensor, or any other of "
        "torch.distributed.checkpoint; of a run its checkpoints, and the latest one. With KEY print one tensor or "
        "object; only the chunks that are needed are read, and of a large tensor the first corner is shown unless "
        "--slice says otherwise. Exit status: 0; 1 if it has problems, which are listed; 2 if it cannot be read.",
        "kind, iteration, keys, shapes, dtypes, bytes; one tensor or object",
    )
    _add_folder(parser)
    parser.add_argument("key", metavar="KEY", nargs="?", help="print this tensor or object")
    _add_filter(parser)
    parser.add_argument(
        "--stats", action="store_true", help="read all listed tensors: smallest, largest, mean, norm, non-finite"
    )
    parser.add_argument(
        "--all",
        "--not-ignore-param-to-group-meta",
        action="store_true",
        help=f"also list the keys under {GROUP_META}*, which are left out of tables otherwise",
    )
    _add_show_options(parser)
    alias = _add(
        commands, "show", _show, "Print one tensor or object, as inspect DIR KEY does.", aliases=["print-tensor"]
    )
    _add_folder(alias)
    alias.add_argument("key", metavar="KEY", help="as `inspect` lists it")
    _add_show_options(alias)


def _add_show_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slice",
        metavar="PART",
        help="of the tensor KEY, such as 0:2,:8 or 3,-1 (write --slice=-1 if it starts with -)",
    )
    add_json(parser)


def _inspect(args: argparse.Namespace) -> int:
    if args.key is not None:
        return _show(args)
    if args.slice:
        raise ConfigurationError("--slice is for one tensor; give its KEY too")
    run = list_checkpoints(args.checkpoint_dir)
    if run and not args.json:
        rows = [
            [item.name, in_bytes(item.nbytes), "latest" if item.is_latest else "" if item.is_whole else "unfinished"]
            for item in run
        ]
        write_table(["checkpoint", "bytes", ""], rows, right=["bytes"])
        write_line()
    found = inspect_folder(_opened(args.checkpoint_dir), args.filter, with_statistics=args.stats)
    if args.json:
        write_json({**found.to_json(), "run": [item._asdict() for item in run]})
    else:
        _write_inspection(found, args)
    return EXIT_DIFFERENT if found.problems else EXIT_SAME


def _write_inspection(found: Inspection, args: argparse.Namespace) -> None:
    write_facts(_facts(found))
    write_line()
    shown = [entry for entry in found.entries if args.all or not entry.key.startswith(GROUP_META)]
    if shown:
        titles = ["key", "type", "shape", "bytes", "chunks", *(_STATISTICS if args.stats else ())]
        rows = [_row(entry, with_statistics=args.stats) for entry in shown]
        write_table(titles, rows, right=["bytes", "chunks", *_STATISTICS])
    hidden = len(found.entries) - len(shown)
    if hidden:
        write_line(f"({hidden} keys under {GROUP_META}* are not listed; --all lists them)")
    if found.hidden:
        write_line(f"({found.hidden} keys do not match --filter)")
    for problem in found.problems:
        write_line(f"problem: {problem}")


def _facts(found: Inspection) -> list[tuple[str, str]]:
    tensors, objects = ([entry for entry in found.entries if entry.type == kind] for kind in ("tensor", "object"))
    chained = ", keys with chained_<n>." if found.kind.is_chained else ""
    facts = [
        ("path", str(found.path)),
        ("format", found.kind.title),
        ("optimizer", _OPTIMIZERS[found.kind.optimizer] + chained),
    ]
    facts += [(name, str(found.common[name])) for name in ("iteration", "checkpoint_version") if name in found.common]
    arguments = found.common.get("args")
    if isinstance(arguments, dict):
        known = [f"{name}={arguments[name]}" for name in _ARGUMENTS if name in arguments]
        facts.append(("args", f"{len(arguments)}: {', '.join(known)}" if known else str(len(arguments))))
    others = sorted(found.common.keys() - {"args", "iteration", "checkpoint_version"})
    facts += [("common state", ", ".join(others))] if others else []
    elements = sum(math.prod(entry.shape or ()) for entry in tensors)
    facts += [
        ("tensors", f"{len(tensors)}, {elements:,} elements, {in_bytes(sum(entry.nbytes for entry in tensors))}"),
        ("objects", f"{len(objects)}, {in_bytes(sum(entry.nbytes for entry in objects))}"),
        ("files", f"{len(found.files)}, {in_bytes(sum(found.files.values()))}"),
    ]
    return facts + ([("flattened", f"{len(found.mcore_data)} tensors (mcore_data)")] if found.mcore_data else [])


def _row(entry: ListedEntry, *, with_statistics: bool) -> list[str]:
    shape = "" if entry.shape is None else str(tuple(entry.shape))
    row = [entry.key, entry.dtype or "object", shape, in_bytes(entry.nbytes), str(entry.chunks)]
    found = entry.statistics
    if not with_statistics:
        return row
    if found is None:
        return [*row, *("" for _ in _STATISTICS)]
    numbers = (found.minimum, found.maximum, found.mean, found.norm)
    return [*row, *("-" if n is None else f"{n:.6g}" for n in numbers), str(found.non_finite), str(found.zeros)]


def _show(args: argparse.Namespace) -> int:
    found = show(_opened(args.checkpoint_dir), args.key, args.slice)
    if found.entry is not None:
        _write_tensor(found, found.entry, as_data=args.json)
    elif args.json:
        write_json({"key": found.key, "type": "object", "bytes": found.nbytes, "value": as_json(found.value)})
    else:
        write_facts([("key", found.key), ("type", f"object, {in_bytes(found.nbytes)}")])
        write_line(pprint.pformat(found.value, width=120, compact=True))
    return EXIT_SAME


def _write_tensor(found: Shown, entry: TensorEntry, *, as_data: bool) -> None:
    assert found.box is not None, "tensors are shown in part"
    dtype = dtype_name(entry.dtype)
    part = f"[{', '.join(f'{index.start}:{index.stop}' for index in found.box.indices)}]"
    if as_data:
        told = {"key": entry.key, "type": "tensor", "shape": list(entry.shape), "dtype": dtype, "bytes": entry.nbytes,
                "chunks": len(entry.chunks), "part": part}  # fmt: skip
        write_json({**told, "values": as_json(_numbers(found.value))})
        return
    facts = [("key", entry.key), ("type", f"{dtype} {entry.shape}, {in_bytes(entry.nbytes)}")]
    facts.append(("chunks", str(len(entry.chunks))))
    facts += [] if found.box.lengths == entry.shape else [("part", part)]
    write_facts(facts)
    write_line(str(found.value))


def _numbers(values: torch.Tensor) -> Any:
    if values.dtype.is_complex:
        values = torch.view_as_real(values.resolve_conj())
    listed: Any = values.to(torch.float64).tolist() if values.dtype.is_floating_point else values.tolist()
    return listed


# ---- diff ------------------------------------------------------------------------------------------------------------


def _add_diff(commands: Any) -> None:
    text = (
        "Compare all tensors and objects of two checkpoints by value, however each is cut into chunks; one chunk of "
        "each is in memory at a time. Exit status: 0 they are the same, 1 they differ, 2 one cannot be read."
    )
    for parser, rtol, atol in (
        (_add(commands, "diff", _diff, text, "compare two checkpoints"), 0.0, 0.0),
        (_add(commands, "compare-two-checkpoint", _diff, text), _REFERENCE_RTOL, _REFERENCE_ATOL),
    ):
        _add_folder(parser, "checkpoint_1", "A")
        _add_folder(parser, "checkpoint_2", "B")
        what = "elements are equal where |a - b| <= atol + rtol * |b|"
        parser.add_argument("--rtol", type=float, default=rtol, help=f"{what} (default %(default)s)")
        parser.add_argument("--atol", type=float, default=atol, help="see --rtol (default %(default)s)")
        parser.add_argument(
            "--bitwise", action="store_true", help="equal bits: 0.0 and -0.0 differ, and so do unlike NaN"
        )
        parser.add_argument("--all", action="store_true", help=f"list all differences, not only the first {_SHOWN}")
        _add_filter(parser)
        add_json(parser)


def _diff(args: argparse.Namespace) -> int:
    given = (args.rtol, args.atol)
    rtol, atol = (0.0, 0.0) if args.bitwise and given == (_REFERENCE_RTOL, _REFERENCE_ATOL) else given
    tolerance = Tolerance(rtol, atol, args.bitwise)
    found = diff(_opened(args.checkpoint_1), _opened(args.checkpoint_2), tolerance, args.filter)
    if args.json:
        write_json(found.to_json())
    elif found.is_same:
        write_line(f"the same: {found.compared} keys")
    else:
        shown = len(found.differences) if args.all else _SHOWN
        for item in found.differences[:shown]:
            write_line(f"{item.key}: {item.told}")
        if len(found.differences) > shown:
            write_line(f"... and {len(found.differences) - shown} more (--all lists them)")
        write_line(f"{len(found.differences)} keys differ; {found.compared} were compared")
    return EXIT_SAME if found.is_same else EXIT_DIFFERENT


# ---- verify ----------------------------------------------------------------------------------------------------------


def _add_verify(commands: Any) -> None:
    parser = _add(
        commands,
        "verify",
        _verify,
        "Read a checkpoint and compare every tensor and object with its manifest. One process, no GPU, one "
        "chunk in memory at a time, and no code from the checkpoint is run. Exit status: 0 whole, 1 damaged, 2 it "
        "cannot be looked at.",
        "find damaged, missing and unexpected tensors, objects and files",
    )
    parser.add_argument(
        "checkpoint_dir", metavar="DIR", type=Path, help="an iter_* folder, or the folder of a run: then the latest"
    )
    parser.add_argument("--all", action="store_true", help="every checkpoint of the run")
    parser.add_argument("--quick", action="store_true", help="names, shapes and files only; contents are not read")
    add_json(parser)


def _verify(args: argparse.Namespace) -> int:
    folders, pointer_problem = _to_verify(args.checkpoint_dir, every=args.all)
    reports = [verify(folder, deep=not args.quick) for folder in folders]
    if args.json:
        write_json({"checkpoints": [report.to_dict() for report in reports], "pointer": pointer_problem})
    else:
        for line in [*map(str, reports), *filter(None, [pointer_problem])]:
            write_line(line)
    is_well = pointer_problem is None and all(report.is_whole for report in reports)
    return EXIT_SAME if is_well else EXIT_DIFFERENT


def _to_verify(given: Path, *, every: bool) -> tuple[list[Path], str | None]:
    """Return the folders to verify, and what is wrong with the pointer to the latest."""
    is_named_so = given.is_dir() and iteration_of(given.name) is not None
    if is_named_so or any((given / name).exists() for name in (METADATA, FILE_NAME)):  # one of them may be missing
        if every:
            raise CheckpointError(f"{given} is one checkpoint; --all takes the folder of a run")
        return [given], None
    if not given.is_dir():
        raise CheckpointError(f"{given} is not a folder; give a checkpoint or the folder of a run")
    run_folder, problem, latest = RunFolder(given), None, None
    try:
        latest = run_folder.latest()
    except CheckpointError as error:
        problem = str(error)
    inside = sorted(path for path in given.iterdir() if iteration_of(path.name) is not None and path.is_dir())
    if every and latest is not None and latest not in inside:
        inside.append(latest)
    chosen = inside if every or latest is None else [latest]
    if not chosen and problem is None:
        raise CheckpointError(f"{given} holds no checkpoint: neither {METADATA} nor {POINTER} nor iter_* folders")
    return chosen, problem


# ---- to-torch and from-torch -----------------------------------------------------------------------------------------


def _add_torch(commands: Any) -> None:
    out = _add(
        commands,
        "to-torch",
        _to_torch,
        "Write the whole state dict of a checkpoint, nested as it was saved, as one file that "
        "torch.load(weights_only=True) reads.",
        "a checkpoint as one torch.save file",
    )
    _add_folder(out)
    out.add_argument("file", metavar="FILE", type=Path, help="must not exist")
    out.add_argument("--tensors-only", action="store_true", help="leave out everything that is no tensor")
    back = _add(
        commands,
        "from-torch",
        _from_torch,
        "Write the state dict of a torch.save file as a checkpoint that torch.distributed.checkpoint.load "
        "reads on any number of ranks. The file is read without running code from it.",
        "a torch.save file as a checkpoint",
    )
    back.add_argument("file", metavar="FILE", type=Path, help="of torch.save, in the zip format (torch 1.6 and later)")
    back.add_argument("output_dir", metavar="DIR", type=Path, help="the checkpoint; must not exist, or be empty")
    back.add_argument(
        "--nesting",
        choices=("torch", "own"),
        default="torch",
        help="torch: keys as torch.distributed.checkpoint.save gives them (default); own: as this library's training "
        "writes them, with lists in one piece",
    )


def _to_torch(args: argparse.Namespace) -> int:
    report = to_torch_save(_opened(args.checkpoint_dir), args.file, tensors_only=args.tensors_only)
    return _write_repacked(args.file, report)


def _from_torch(args: argparse.Namespace) -> int:
    return _write_repacked(args.output_dir, from_torch_save(args.file, args.output_dir, nesting=args.nesting))


def _write_repacked(target: Path, found: RepackReport) -> int:
    write_line(f"{target}: {found.tensors} tensors, {in_bytes(found.nbytes)}, {found.objects} other values")
    for note in found.notes:
        write_line(f"note: {note}")
    return EXIT_SAME


# ---- to-hf -----------------------------------------------------------------------------------------------------------


def _add_hf(commands: Any) -> None:
    parser = _add(
        commands,
        "to-hf",
        _to_hf,
        "Write the weights of a checkpoint of a transformers model as a folder that from_pretrained loads: safetensors "
        "files with an index, and beside them the config, generation config and tokenizer of another folder.",
        "a checkpoint as a Hugging Face folder",
    )
    _add_folder(parser)
    parser.add_argument("output_dir", metavar="OUT", type=Path, help="the folder to make; must not exist, or be empty")
    parser.add_argument(
        "--config", metavar="FOLDER", type=Path, required=True, help="with config.json and tokenizer of the model"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="of floating-point weights; default: as stored"
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, metavar="N", default=DEFAULT_SHARD_BYTES, help="of one file (default 5 GiB)"
    )


def _to_hf(args: argparse.Namespace) -> int:
    files = export_hf(
        _opened(args.checkpoint_dir),
        args.output_dir,
        args.config,
        max_shard_bytes=args.max_shard_bytes,
        dtype=getattr(torch, args.dtype) if args.dtype else None,
    )
    nbytes = sum((args.output_dir / name).stat().st_size for name in files)
    write_line(f"{args.output_dir}: {len(files)} weight files, {in_bytes(nbytes)}")
    return EXIT_SAME


# ---- map -------------------------------------------------------------------------------------------------------------


def _add_map(commands: Any) -> None:
    text = (
        "Write the parameter group of each parameter as JSON, as `convert --param-to-param-group-map-json` reads it, "
        "from the folder that --dump-param-to-param-group-map made in training."
    )
    parser = _add(commands, "map", _map, text, "parameter groups of a run as JSON", ["print-torch-dcp-in-json"])
    parser.add_argument("torch_dcp_dir", metavar="DIR", type=Path, help="the folder that training made")
    parser.add_argument(
        "--out", metavar="MAP.json", type=Path, help="default: param_to_param_group_map.json in the folder"
    )
    parser.add_argument(
        "--model-prefix",
        metavar="P",
        default="model.module",
        help="stands before names, instead of the module. of each wrapper (default %(default)s)",
    )


def _map(args: argparse.Namespace) -> int:
    """Write the map, then print it and its path in the format of Megatron-LM's inspector."""
    path = export_group_map_json(args.torch_dcp_dir, args.out, args.model_prefix)
    write_line(f"torch dcp content: {json.dumps(json.loads(path.read_text(encoding='utf-8')))}")
    write_line(str(path))
    return EXIT_SAME
