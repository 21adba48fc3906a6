"""`show`: one tensor or object."""

from __future__ import annotations

import argparse
import pprint
from typing import Any

import torch

from megatron_fsdp.checkpoint.tools.common_state import as_json, dtype_name
from megatron_fsdp.checkpoint.tools.locate import open_checkpoint
from megatron_fsdp.checkpoint.tools.show import ShownObject, ShownTensor, show
from megatron_fsdp.cli.arguments import add_folder, add_json
from megatron_fsdp.cli.output import in_bytes, write_facts, write_json, write_line
from megatron_fsdp.config.command_parser import EXIT_SAME


def add_parser(subparsers: Any) -> None:
    """Add the command and its alias."""
    text = (
        "Print one tensor or object; only the chunks that are needed are read. Of a large tensor the first corner is "
        "shown unless --slice says otherwise."
    )
    for name, help_text in (("show", {"help": "one tensor or object"}), ("print-tensor", {})):
        parser = subparsers.add_parser(name, description=text, **help_text)
        add_folder(parser)
        parser.add_argument("key", metavar="KEY", help="as `inspect` lists it")
        parser.add_argument(
            "--slice", metavar="PART", help="such as 0:2,:8 or 3,-1 (write --slice=-1 if it starts with -)"
        )
        parser.add_argument("--hash", action="store_true", help="also print a checksum, of the part if one is given")
        add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Show.

    Raises:
        CheckpointError: There is no such key, or it cannot be read.
        ConfigurationError: The part does not fit.
    """
    found = show(open_checkpoint(args.checkpoint_dir), args.key, args.slice, with_hash=args.hash)
    if isinstance(found, ShownObject):
        _write_object(found, args)
    else:
        _write_tensor(found, args)
    return EXIT_SAME


def _write_object(found: ShownObject, args: argparse.Namespace) -> None:
    if args.json:
        write_json({"key": found.key, "type": "object", "bytes": found.nbytes, "sha256": found.sha256,
                    "value": as_json(found.value)})  # fmt: skip
        return
    facts = [("key", found.key), ("type", f"object, {in_bytes(found.nbytes)}")]
    write_facts([*facts, ("sha256", found.sha256)] if args.hash else facts)
    write_line(pprint.pformat(found.value, width=120, compact=True))


def _write_tensor(found: ShownTensor, args: argparse.Namespace) -> None:
    entry = found.entry
    part = ", ".join(
        f"{first}:{first + length}" for first, length in zip(found.box.offsets, found.box.lengths, strict=True)
    )
    is_whole = found.box.lengths == entry.shape
    if args.json:
        told = {"key": entry.key, "type": "tensor", "shape": list(entry.shape), "dtype": dtype_name(entry.dtype),
                "bytes": entry.nbytes, "chunks": len(entry.chunks), "part": f"[{part}]"}  # fmt: skip
        told |= {"checksum": found.checksum} if found.checksum else {}
        write_json({**told, "values": as_json(_numbers(found.values))})
        return
    facts = [("key", entry.key), ("type", f"{dtype_name(entry.dtype)} {entry.shape}, {in_bytes(entry.nbytes)}")]
    facts.append(("chunks", str(len(entry.chunks))))
    facts += [] if is_whole else [("part", f"[{part}]")]
    facts += [("checksum", found.checksum)] if found.checksum else []
    write_facts(facts)
    write_line(str(found.values))


def _numbers(values: torch.Tensor) -> Any:
    if values.dtype.is_complex:
        values = torch.view_as_real(values.resolve_conj())
    listed: Any = values.to(torch.float64).tolist() if values.dtype.is_floating_point else values.tolist()
    return listed
