"""The command line: flags from the dataclasses, a configuration file, a preset; unknown flags get a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_fsdp.command_parser import Parser
from megatron_fsdp.ddp_config_flags import add_flags
from megatron_fsdp.train.options.config_file import read_config_file
from megatron_fsdp.train.options.fields import Option, options_of
from megatron_fsdp.train.options.known_flags import EXPLAINED, REFUSED
from megatron_fsdp.train.options.options import SECTIONS, Layer, Options, assemble
from megatron_fsdp.train.options.presets import PRESETS, find_preset

PROGRAM = "mfsdp train"
COMMAND_LINE = "command line"

_DESCRIPTION = """Train a decoder-only transformer on text that is on this machine, sharded over ranks. Under torchrun
this process is a rank; else it starts the ranks itself. Flags have the names of Megatron-LM."""


class TrainParser(Parser):
    """The parser of the trainer: knows which flags of Megatron-LM are refused, and why."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As the base class, but a flag that is refused gives its reason."""
        for word in args or ():
            flag = str(word).partition("=")[0]
            if flag in REFUSED:
                self.exit(2, f"{self.prog}: error: {flag} is not possible here: {REFUSED[flag]}\n")
        return super().parse_known_args(args, namespace)


def make_parser() -> TrainParser:
    """The parser; a namespace that it returns holds what was given and nothing else."""
    parser = TrainParser(prog=PROGRAM, description=_DESCRIPTION, formatter_class=argparse.HelpFormatter)
    start = parser.add_argument_group("where to begin")
    start.add_argument(
        "--config", type=Path, metavar="FILE", help="YAML with options by their names; flags win over it"
    )
    start.add_argument("--preset", choices=list(PRESETS), help="options that suit a model size; all others win over it")
    for attribute, cls in SECTIONS.items():
        group = parser.add_argument_group(attribute, (cls.__doc__ or "").partition("\n")[0])
        for option in options_of(cls):
            _add(group, option)
    add_flags(parser)
    explained = parser.add_argument_group("of Megatron-LM, without an effect here")
    for flag, known in EXPLAINED.items():
        arguments: dict[str, Any] = {"nargs": "+"} if known.takes_value else {"nargs": 0}
        explained.add_argument(flag, dest="explained", action=_Explain, help=known.reason, **arguments)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read a command line.

    Raises:
        ConfigurationError: A file, a name or a value is not possible.
        SystemExit: Help was asked for (0), or a flag is unknown, refused or lacks its value (2); it was said on
            standard error.
    """
    given = dict(vars(make_parser().parse_args(list(argv))))
    explained = tuple(given.pop("explained", ()))
    path, preset = given.pop("config", None), given.pop("preset", None)
    layers = [Layer(COMMAND_LINE, given)]
    if path is not None:
        out = given.get("out")
        values = dict(read_config_file(path, None if out is None else Path(out)))
        preset = values.pop("preset", None) if preset is None else (values.pop("preset", None), preset)[1]
        layers.insert(0, Layer(f"config {path}", values))
    if preset is not None:
        layers.insert(0, Layer(f"preset {preset}", find_preset(str(preset))))
    return assemble(tuple(layers), explained)


class _Explain(argparse.Action):
    """Notes that a flag without an effect was given."""

    def __call__(self, _parser: Any, namespace: Any, _values: Any, option_string: str | None = None) -> None:
        noted = getattr(namespace, "explained", ())
        namespace.explained = *noted, f"{option_string} has no effect: {EXPLAINED[str(option_string)].reason}"


def _add(group: Any, option: Option) -> None:
    help_text = f"{option.meaning} (default: {_shown(option.default)})".strip().replace("%", "%%")
    if option.is_switch:
        flags = [option.flag, *option.off_flags]
        group.add_argument(
            *flags, dest=option.name, action=_Switch, nargs=0, off_flags=option.off_flags, help=help_text
        )
    else:
        more: dict[str, Any] = {"nargs": "+"} if option.is_many else {}
        names = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
        shown = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else names[option.kind]
        group.add_argument(option.flag, dest=option.name, metavar=shown, help=help_text, **more)


class _Switch(argparse.Action):
    """Sets a switch to what the flag says."""

    def __init__(self, *args: Any, off_flags: tuple[str, ...], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.off_flags = off_flags

    def __call__(self, _parser: Any, namespace: Any, _values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, option_string not in self.off_flags)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
