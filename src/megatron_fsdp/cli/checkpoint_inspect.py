"""`inspect`: what a checkpoint is and holds."""

from __future__ import annotations

import argparse
from typing import Any

from megatron_fsdp.checkpoint.tools.inspect import Inspection, ListedEntry, inspect_folder
from megatron_fsdp.checkpoint.tools.kinds import GROUP_META
from megatron_fsdp.checkpoint.tools.locate import open_checkpoint
from megatron_fsdp.checkpoint.tools.tree import key_tree, walk
from megatron_fsdp.cli.arguments import add_filter, add_folder, add_json, add_msc, refuse_msc
from megatron_fsdp.cli.output import in_bytes, write_facts, write_json, write_line, write_table
from megatron_fsdp.config.command_parser import EXIT_DIFFERENT, EXIT_SAME
from megatron_fsdp.errors import ConfigurationError

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


def add_parser(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "inspect",
        help="kind, iteration, keys, shapes, dtypes, bytes",
        description="Describe a checkpoint: torch_dist (all three generations), fsdp_dtensor, or any other of "
        "torch.distributed.checkpoint. Exit status: 0; 1 if it has problems, which are listed; 2 if it cannot be read.",
    )
    add_folder(parser)
    add_filter(parser)
    add_json(parser)
    parser.add_argument("--tree", action="store_true", help="draw keys as a tree, with what each branch weighs")
    parser.add_argument(
        "--stats", action="store_true", help="read all listed tensors: smallest, largest, mean, norm, non-finite"
    )
    parser.add_argument(
        "--all",
        "--not-ignore-param-to-group-meta",
        action="store_true",
        help=f"also list the keys under {GROUP_META}*, which are left out of tables and trees otherwise",
    )
    add_msc(parser)


def run(args: argparse.Namespace) -> int:
    """Inspect.

    Raises:
        CheckpointError: It cannot be read.
        ConfigurationError: The options contradict each other.
    """
    refuse_msc(args)
    if args.tree and (args.json or args.stats):
        raise ConfigurationError("--tree draws sizes only; give it without --json and --stats")
    found = inspect_folder(open_checkpoint(args.checkpoint_dir), args.filter, with_statistics=args.stats)
    if args.json:
        write_json(found.to_json())
    else:
        _write(found, args)
    return EXIT_DIFFERENT if found.problems else EXIT_SAME


def _write(found: Inspection, args: argparse.Namespace) -> None:
    _write_facts(found)
    shown = [entry for entry in found.entries if args.all or not entry.key.startswith(GROUP_META)]
    write_line()
    if args.tree:
        for lines, branch in walk(key_tree(shown)):
            write_line(f"{lines}{branch.name}  {_branch_size(branch.entry, branch.count, branch.nbytes)}")
    elif shown:
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


def _write_facts(found: Inspection) -> None:
    tensors = found.tensors
    objects = [entry for entry in found.entries if entry.shape is None]
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
    elements = sum(_numel(entry) for entry in tensors)
    facts += [
        ("tensors", f"{len(tensors)}, {elements:,} elements, {in_bytes(sum(entry.nbytes for entry in tensors))}"),
        ("objects", f"{len(objects)}, {in_bytes(sum(entry.nbytes for entry in objects))}"),
        ("files", f"{len(found.files)}, {in_bytes(sum(found.files.values()))}"),
    ]
    facts += [("flattened", f"{len(found.mcore_data)} tensors (mcore_data)")] if found.mcore_data else []
    write_facts(facts)


_STATISTICS = ("min", "max", "mean", "norm", "non-finite", "zeros")


def _row(entry: ListedEntry, *, with_statistics: bool) -> list[str]:
    shape = "" if entry.shape is None else str(entry.shape)
    row = [entry.key, entry.dtype or "object", shape, in_bytes(entry.nbytes), str(entry.chunks)]
    found = entry.statistics
    if not with_statistics:
        return row
    if found is None:
        return [*row, *("" for _ in _STATISTICS)]
    numbers = (found.minimum, found.maximum, found.mean, found.norm)
    return [*row, *("-" if n is None else f"{n:.6g}" for n in numbers), str(found.non_finite), str(found.zeros)]


def _branch_size(entry: ListedEntry | None, count: int, nbytes: int) -> str:
    if entry is not None and count == 1:
        what = "object" if entry.shape is None else f"{entry.dtype} {entry.shape}"
        return f"{what}, {in_bytes(nbytes)}"
    return f"{count} entries, {in_bytes(nbytes)}"


def _numel(entry: ListedEntry) -> int:
    numel = 1
    for length in entry.shape or ():
        numel *= length
    return numel
