"""`map`: which parameter group each parameter belongs to, from a folder as a JSON file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.convert.groups import export_group_map_json
from megatron_fsdp.cli.output import write_line
from megatron_fsdp.config.command_parser import EXIT_SAME


def add_parser(subparsers: Any) -> None:
    """Add the command and its alias."""
    text = (
        "Write the parameter group of each parameter as JSON, as `convert --param-to-param-group-map-json` reads it, "
        "from the folder that --dump-param-to-param-group-map made in training."
    )
    for name, help_text in (("map", {"help": "parameter groups of a run as JSON"}), ("print-torch-dcp-in-json", {})):
        parser = subparsers.add_parser(name, description=text, **help_text)
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


def run(args: argparse.Namespace) -> int:
    """Write the map, and print it and where it is, in the words of Megatron-LM's inspector.

    Raises:
        CheckpointError: The folder cannot be read or holds something else, or the file not be written.
    """
    path = export_group_map_json(args.torch_dcp_dir, args.out, args.model_prefix)
    write_line(f"torch dcp content: {json.dumps(json.loads(path.read_text(encoding='utf-8')))}")
    write_line(str(path))
    return EXIT_SAME
