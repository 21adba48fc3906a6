"""The command line and the configuration file: flags made from dataclasses, with hints for unknown ones."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.config.ddp_config_flags import add_flags
from megatron_fsdp.config.yaml_mapping import lines_of_keys, read_mapping
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.fields import Option, options_of
from megatron_fsdp.train.options.layers import Layer, assemble
from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED, VALUED
from megatron_fsdp.train.options.options import OPTIONS, SECTIONS, Options, flag_for
from megatron_fsdp.train.options.presets import PRESETS, find_preset

PROGRAM = "mfsdp train"
COMMAND_LINE = "command line"

WRITTEN = ("out", "save", "export_hf", "tensorboard_dir", "data_cache_path", "dump_param_to_param_group_map")
"""Options that are output paths."""

_USAGE = "%(prog)s [--config FILE] [--preset NAME] [--FLAG [VALUE]] ..."

_DESCRIPTION = """Train a decoder-only transformer on text that is on this machine, sharded over ranks. Under torchrun
this process is a rank; else it starts the ranks itself. Flags have the names of Megatron-LM."""


class TrainParser(Parser):
    """argparse's parser, which raises errors and leaves defaults out: layers and origins need what was given."""

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return what was given, as texts and switches, and all errors in the names of flags.

        Raises:
            ConfigurationError: A flag lacks its value, or has one and takes none.
            SystemExit: Help was asked for (0).
        """
        flags = dict.fromkeys(word.partition("=")[0] for word in words)
        wrong = [f"{flag} is not supported: {REFUSED[flag]}" for flag in flags if flag in REFUSED]
        found, left = argparse.ArgumentParser.parse_known_args(self, list(words))
        unknown = [word for word in left if word.startswith("-") and word.partition("=")[0] not in REFUSED]
        wrong += [f"there is no flag {word}{self._suggestion(f'unrecognized arguments: {word}')}" for word in unknown]
        if left and not wrong:
            is_path = words[words.index(left[0]) - 2 : words.index(left[0]) - 1] == ["--data-path"]
            more = ", since --data-path takes one place, such as a folder of all texts" if is_path else ""
            wrong = [f"{left[0]!r} belongs to no flag: leave it out{more}"]
        return vars(found), wrong

    def error(self, message: str) -> NoReturn:
        """Raise an error for an unreadable command line.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(self.with_suggestion(message))


class HelpText(argparse.HelpFormatter):
    """A help formatter that writes `--x, --no-x` as `--[no-]x`, and wraps what is too wide."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return f"--[no-]{action.option_strings[0].removeprefix('--')}"
        shown = super()._format_action_invocation(action)
        if len(shown) + self._current_indent <= self._width:
            return shown
        first, _, rest = shown.partition(" ")
        return f"{first}\n{' ' * (self._current_indent + 2)}{rest}"


def make_parser() -> TrainParser:
    """Make the parser; the namespace that it returns holds what was given and nothing else."""
    parser = TrainParser(prog=PROGRAM, description=_DESCRIPTION, usage=_USAGE, formatter_class=HelpText)
    start = parser.add_argument_group("where to begin")
    start.add_argument("--config", metavar="FILE", help="YAML with options by their names; flags win over it")
    start.add_argument("--preset", choices=list(PRESETS), help="options that suit a model size; all others win over it")
    for attribute, cls in SECTIONS.items():
        group = parser.add_argument_group(attribute, (cls.__doc__ or "").partition("\n")[0])
        for option in options_of(cls):
            _add(group, option)
    add_flags(parser)
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
    given, wrong = make_parser().read(argv)
    if sum(word.partition("=")[0] == "--config" for word in argv) > 1:
        wrong.append("--config is given twice: give one file")
    path, preset = given.pop("config", None), given.pop("preset", None)
    layers = [Layer(COMMAND_LINE, given)]
    where = ""
    try:
        if path is not None:
            layer = read_config_file(path, given.get("out"))
            of_file = {key: value for key, value in layer.values.items() if key != "preset"}
            layers.insert(0, replace(layer, values=of_file))
            if preset is None and "preset" in layer.values:
                preset, where = layer.values["preset"], layer.at("preset")
        if preset is not None:
            layers.insert(0, Layer(f"preset {preset}", find_preset(str(preset)), gives_way=True))
    except ConfigurationError as error:
        wrong.append(f"{where}{error}")
    return assemble(tuple(layers), wrong)


def read_config_file(path: str | Path, out: str | Path | None = None) -> Layer:
    """Read options by name from a file; a section (`model:`, `training:`, ... `ddp:`) may hold them, too.

    Nothing in the file is executed, and it cannot make a run write where it likes.

    Args:
        path: The file, of YAML or JSON.
        out: The folder for results, where the command line names one: places to write to that the file names lie below
            it, and are relative to it. Else the same holds of the current folder.

    Returns:
        The values. It has problems if the file names an option twice, or an output path outside of the folder.

    Raises:
        ConfigurationError: The file cannot be read, is no mapping, or has a key twice.
    """
    with suppress(RuntimeError):  # there is no user of this name, so no such file
        path = Path(path).expanduser()  # shells leave the ~ of --config=~/run.yaml as it is
    try:
        found, _ = read_mapping(Path(path))
    except RecursionError:
        raise ConfigurationError(f"{path}: a section holds itself: leave the alias out") from None
    places = {key: f"{path}:{line}: " for key, line in lines_of_keys(Path(path)).items()}
    places |= {key.replace("-", "_"): place for key, place in places.items()}
    layer = Layer(f"config {path}", {}, place=f"{path}: ", places=places)
    problems: list[str] = []
    values = _flat(found, layer, problems)
    _confine(values, None if out is None else Path(out), layer, problems)
    return replace(layer, values=values, problems=tuple(problems))


def _flat(found: Mapping[Any, Any], layer: Layer, problems: list[str]) -> dict[str, Any]:
    """Return options and values out of their sections; add to `problems` what is neither option nor section."""
    values: dict[str, Any] = {}
    sections = (*SECTIONS, "ddp")
    for key, value in found.items():
        is_section = key in sections and isinstance(value, Mapping)
        for name, each in (value if is_section else {key: value}).items():
            if each is None:
                continue
            if not isinstance(name, str) or isinstance(each, Mapping) or (name in sections and name not in OPTIONS):
                told = f"{name!r} is no option; give names, or sections of names: {', '.join(sections)}"
                problems.append(f"{layer.at(str(name))}{told}")
            elif name.replace("-", "_") in values:
                problems.append(f"{layer.at(name)}{name!r} is given twice: give it once")
            else:
                values[name.replace("-", "_")] = each
    return values


def _confine(values: dict[str, Any], out: Path | None, layer: Layer, problems: list[str]) -> None:
    """Make output paths absolute; remove those that a file may not name, and add them to `problems`.

    Someone else's file should not be able to write, or to delete old checkpoints, anywhere on the machine; symbolic
    links and `..` are followed to see where a path leads.
    """
    for name in [name for name in WRITTEN if name in values]:
        root = Path.cwd() if out is None or name == "out" else out
        try:
            place = OPTIONS[name].read(values.pop(name))
        except ConfigurationError as error:
            problems.append(f"{layer.at(name)}{error}")
            continue
        if (root / place).resolve().is_relative_to(root.resolve()):
            values[name] = str(root / place)
        else:
            problems.append(
                f"{layer.at(name)}{name}: {place} lies outside of {root.resolve()}: a file may only name places below "
                f"--out, or without it below the current folder; give {OPTIONS[name].flag} on the command line"
            )
    uri = values.get("mlflow_tracking_uri")
    if uri is not None and not str(uri).startswith(("http://", "https://")):
        del values["mlflow_tracking_uri"]
        problems.append(
            f"{layer.at('mlflow_tracking_uri')}mlflow_tracking_uri: {uri} is no server: a file may only name http:// "
            "and https:// ones; give --mlflow-tracking-uri on the command line"
        )


def _add(group: Any, option: Option) -> None:
    told = "" if "default:" in option.meaning else f" (default: {_shown(option.default)})"
    help_text = f"{option.meaning}{told}".strip().replace("%", "%%")
    if option.is_switch:
        action = argparse.BooleanOptionalAction if option.off_flags else "store_true"
        added = group.add_argument(option.flag, dest=option.name, action=action)
        added.help = help_text  # set afterwards: some versions of argparse add the default to it
        for flag in option.off_flags[1:]:
            group.add_argument(flag, dest=option.name, action="store_false", help=argparse.SUPPRESS)
        return
    names = {int: "N", float: "X", Path: "PATH", str: "TEXT"}
    shown = "{" + ",".join(map(str, option.choices)) + "}" if option.choices else names[option.kind]
    group.add_argument(option.flag, dest=option.name, metavar=shown, help=help_text)


def _add_known(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-LM that are no options here; `assemble` handles them."""
    group = parser.add_argument_group("other spellings", "names of Megatron-LM for options from above")
    for flag, spelling in ALIASES.items():
        if flag not in parser._option_string_actions:
            more: dict[str, Any] = {"metavar": "VALUE"}
            if spelling.value is not None:
                more = {"action": "store_const", "const": spelling.value}
            group.add_argument(flag, dest=spelling.name, help=f"sets {flag_for(spelling.name)}", **more)
    group = parser.add_argument_group("of Megatron-LM, with one possible value", "without an effect, too")
    for flag, fixed in FIXED.items():
        group.add_argument(flag, dest=flag[2:], metavar="{" + ",".join(fixed.values) + "}", help=fixed.reason)
    group = parser.add_argument_group("of Megatron-LM, without an effect here", "docs/training_flags.md has more")
    for flag, reason in EXPLAINED.items():
        more = {"nargs": "+", "metavar": "VALUE"} if flag in VALUED else {"action": "store_true"}
        group.add_argument(flag, dest=flag[2:], help=reason, **more)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)
