"""The command line: flags from the dataclasses, a configuration file, a preset; unknown flags get a suggestion."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.config.ddp_config_flags import add_flags
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.config_file import read_config_file
from megatron_fsdp.train.options.fields import Option, options_of
from megatron_fsdp.train.options.known_flags import EXPLAINED, FIXED
from megatron_fsdp.train.options.options import (
    DDP_FIELDS,
    OPTIONS,
    SECTIONS,
    Layer,
    Options,
    assemble,
    fixed_notice,
    flag_for,
)
from megatron_fsdp.train.options.presets import PRESETS, find_preset
from megatron_fsdp.train.options.refused_flags import REFUSED
from megatron_fsdp.train.options.spellings import ALIASES

PROGRAM = "mfsdp train"
COMMAND_LINE = "command line"

_EXPLAINED, _WRONG = "explained", "wrong"
_USAGE = "%(prog)s [--config FILE] [--preset NAME] [--FLAG [VALUE]] ..."

_DESCRIPTION = """Train a decoder-only transformer on text that is on this machine, sharded over ranks. Under torchrun
this process is a rank; else it starts the ranks itself. Flags have the names of Megatron-LM."""


class TrainParser(Parser):
    """The parser of the trainer: tells of all flags that are wrong at once, and what to do about each."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but flags that are refused give their reason, and unknown ones the nearest name."""
        words = [str(word) for word in args or ()]
        flags = list(dict.fromkeys(word.partition("=")[0] for word in words))
        wrong = [f"{flag} is not supported: {REFUSED[flag]}" for flag in flags if flag in REFUSED]
        found, left = argparse.ArgumentParser.parse_known_args(self, args, namespace)
        wrong += getattr(found, _WRONG, ())
        unknown = [word for word in left if word.startswith("-") and word.partition("=")[0] not in REFUSED]
        wrong += [f"there is no flag {word}{self._suggestion(f'unrecognized arguments: {word}')}" for word in unknown]
        if left and not wrong:
            is_path = words[words.index(left[0]) - 2 : words.index(left[0]) - 1] == ["--data-path"]
            more = ", since --data-path takes one place, such as a folder of all texts" if is_path else ""
            wrong = [f"{left[0]!r} belongs to no flag: leave it out{more}"]
        setattr(found, _WRONG, tuple(wrong))
        return found, []

    def error(self, message: str) -> NoReturn:
        """Raise what cannot be read at all; `parse_options` tells all that is wrong together.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(self.told(message))


class HelpText(argparse.HelpFormatter):
    """Writes `--x, --no-x` as `--[no-]x`, and breaks what is too wide."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = action.option_strings
        on = flags[0] if flags else ""
        off = f"--no-{on.removeprefix('--')}"
        if action.nargs == 0 and flags[1:2] == [off]:
            shown = ", ".join([f"--[no-]{on.removeprefix('--')}", *flags[2:]])
        else:
            shown = super()._format_action_invocation(action)
        if len(shown) + self._current_indent <= self._width:
            return shown
        first, _, rest = shown.partition(" ")
        return f"{first}\n{' ' * (self._current_indent + 2)}{rest}"


def make_parser() -> TrainParser:
    """The parser; a namespace that it returns holds what was given and nothing else."""
    parser = TrainParser(prog=PROGRAM, description=_DESCRIPTION, usage=_USAGE, formatter_class=HelpText)
    start = parser.add_argument_group("where to begin")
    start.add_argument(
        "--config", type=_file, metavar="FILE", action=_Once, help="YAML with options by their names; flags win over it"
    )
    start.add_argument("--preset", choices=list(PRESETS), help="options that suit a model size; all others win over it")
    for attribute, cls in SECTIONS.items():
        group = parser.add_argument_group(attribute, (cls.__doc__ or "").partition("\n")[0])
        for option in options_of(cls):
            _add(group, option)
    add_flags(parser)
    _add_spellings(parser)
    _add_known(parser)
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return parser


def parse_options(argv: Sequence[str]) -> Options:
    """Read a command line.

    Raises:
        ConfigurationError: A file, a flag or a value is not possible; with all that are.
        SystemExit: Help was asked for (0).
    """
    given = dict(vars(make_parser().parse_args(list(argv), _Given())))
    explained, wrong = tuple(given.pop(_EXPLAINED, ())), list(given.pop(_WRONG, ()))
    path, preset = given.pop("config", None), given.pop("preset", None)
    layers = [Layer(COMMAND_LINE, given)]
    try:
        if path is not None:
            out = given.get("out")
            layer = read_config_file(path, None if out is None else Path(out))
            values = dict(layer.values)
            of_file = values.pop("preset", None)
            preset = of_file if preset is None else preset
            layers.insert(0, replace(layer, values=values))
        if preset is not None:
            layers.insert(0, Layer(f"preset {preset}", find_preset(str(preset)), gives_way=True))
    except ConfigurationError as error:
        wrong.append(f"{layers[0].at('preset')}{error}")
    return assemble(tuple(layers), explained, wrong)


def _file(text: str) -> Path:
    path = Path(text)
    with suppress(RuntimeError):  # nobody of this name is here, so that the file is not, either
        path = path.expanduser()  # shells leave the ~ of --config=~/run.yaml as it is
    return path


class _Given(argparse.Namespace):
    """What was given; notes where a flag wins over one that came before it."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and name not in (_EXPLAINED, _WRONG, "config"):
            before = getattr(self, name, value)
            if before != value:
                flag = flag_for(name) if name in OPTIONS or name in DDP_FIELDS else f"--{name}"
                told = (
                    f"{flag} is given more than once: {_shown(value)} comes last and holds, {_shown(before)} does not"
                )
                _note(self, _EXPLAINED, told)
        super().__setattr__(name, value)


class _Once(argparse.Action):
    """Sets a value, and notes that there was one where the flag is given again."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            first = getattr(namespace, self.dest)
            _note(namespace, _WRONG, f"{option_string} is given twice ({first} and {values}): give one file")
        setattr(namespace, self.dest, values)


class _Explain(argparse.Action):
    """Notes that a flag without an effect was given."""

    def __call__(self, _parser: Any, namespace: Any, _values: Any, option_string: str | None = None) -> None:
        _note(namespace, _EXPLAINED, f"{option_string} has no effect: {EXPLAINED[str(option_string)].reason}")


class _Fix(argparse.Action):
    """Notes that a flag with one possible value was given, and whether it had that."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        try:
            _note(namespace, _EXPLAINED, fixed_notice(str(option_string), str(values)))
        except ConfigurationError as error:
            _note(namespace, _WRONG, str(error))


def _note(namespace: Any, attribute: str, text: str) -> None:
    setattr(namespace, attribute, (*getattr(namespace, attribute, ()), text))


def _add_spellings(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("other spellings", "names of Megatron-LM for options from above")
    for flag, spelling in ALIASES.items():
        if flag not in parser._option_string_actions:
            more: dict[str, Any] = {"metavar": "VALUE"}
            if spelling.value is not None:
                more = {"action": "store_const", "const": spelling.value}
            group.add_argument(flag, dest=spelling.name, help=f"sets {flag_for(spelling.name)}", **more)


def _add_known(parser: argparse.ArgumentParser) -> None:
    fixed = parser.add_argument_group("of Megatron-LM, with one possible value", "without an effect, too")
    for flag, known in FIXED.items():
        shown = "{" + ",".join(known.values) + "}"
        fixed.add_argument(flag, dest=_EXPLAINED, action=_Fix, metavar=shown, help=known.reason)
    explained = parser.add_argument_group("of Megatron-LM, without an effect here", "docs/training_flags.md has more")
    for flag, plain in EXPLAINED.items():
        arguments: dict[str, Any] = {"nargs": "+", "metavar": "VALUE"} if plain.takes_value else {"nargs": 0}
        explained.add_argument(flag, dest=_EXPLAINED, action=_Explain, help=plain.reason, **arguments)


def _add(group: Any, option: Option) -> None:
    told = "" if "default:" in option.meaning else f" (default: {_shown(option.default)})"
    help_text = f"{option.meaning}{told}".strip().replace("%", "%%")
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
