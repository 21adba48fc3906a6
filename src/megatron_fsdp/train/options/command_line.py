"""The command line, the configuration file and presets; put together, later ones win."""

from __future__ import annotations

import argparse
import difflib
import inspect
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import MEGATRON_DEFAULTS, add_flags, config_from_flags, flag_of
from megatron_fsdp.config.yaml_mapping import read_mapping
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options import DDP_FIELDS, OPTIONS, SECTIONS, Option, Options, flag_for, options_of
from megatron_fsdp.train.options.checks import ALTERNATIVES, NEEDS, SHAPE, is_met

PROGRAM = "mfsdp train"
COMMAND_LINE = "command line"

_USAGE = "%(prog)s [--config FILE] [--preset NAME] [--FLAG [VALUE]] ..."

_SECTIONS = (*SECTIONS, "ddp")
_OF_PRESETS, *_ = read_mapping(Path(__file__).with_name("presets.yaml"))
PRESETS: Mapping[str, Mapping[str, Any]] = {name: of for name, of in _OF_PRESETS.items() if not name.startswith(".")}
"""Options that suit a model size, by the name of the preset."""


_DESCRIPTION = """Train a decoder-only transformer on text that is on this machine, sharded over ranks. Under torchrun
this process is a rank; else it starts the ranks itself. Flags have the names of Megatron-LM. With --save, SIGTERM,
SIGINT, SIGHUP and SIGUSR1 end a run after the step, which is saved; SIGQUIT and SIGUSR2 end it at once."""


# ---- flags of Megatron-LM that are no options here: respelled, tied to one value, without effect, or refused ---------


class FixedFlag(NamedTuple):
    """The allowed values of a flag, which request the actual behaviour, and the reason with a remedy."""

    values: tuple[str, ...]
    reason: str

    def allows(self, text: str) -> bool:
        """Return True if a text is one of the values, or the same number as one."""
        with suppress(ValueError):
            return text in self.values or float(text) in map(float, self.values)
        return False


class Spelling(NamedTuple):
    """The option that an alternative flag sets, and its value; None: the value after the flag."""

    name: str
    value: Any = None


_TABLES: Mapping[str, Mapping[str, Any]] = tomllib.loads(
    Path(__file__).with_name("megatron_flags.toml").read_text("utf-8")
)
_IDLE = _TABLES["without_effect"]["flags"].split()

ALIASES = {flag: Spelling(to["option"], to.get("to")) for flag, to in _TABLES["other_spellings"].items()}
"""Megatron-LM's spellings, those of earlier versions included, that do not follow from the names of the options."""

FIXED = {flag: FixedFlag(tuple(one["values"]), one["reason"]) for flag, one in _TABLES["one_value"].items()}
"""Flags that are accepted with these values, and named in the note, and refused with others."""

IDLE_VALUES: Mapping[str, list[str]] = _TABLES["values_without_effect"]
"""Flag of an option -> values that are accepted, and named in a note, as if the flag were left out."""

IDLE = tuple(flag.removesuffix("=") for flag in _IDLE)
"""Flags that are accepted, and named in a note, since they have no effect."""

ELSEWHERE: Mapping[str, str] = _TABLES["elsewhere"]
"""Flag of other trainers -> the equivalent one of this trainer."""

VALUED = frozenset(flag.removesuffix("=") for flag in _IDLE if flag.endswith("="))
"""Those that need one or more values."""

REFUSED: Mapping[str, str] = {flag: reason for reason, flags in _TABLES["refused"].items() for flag in flags.split()}
"""Flag -> reason and remedy."""

OF_CONFIGURATIONS = REFUSED["--multi-latent-attention"]
"""The reason of those that describe models of which only a configuration can be given."""


# ---- the command line and the file -----------------------------------------------------------------------------------


class TrainParser(Parser):
    """argparse's parser, which collects all problems to report them at once, and leaves defaults out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.problems: list[str] = []
        self.idle: list[str] = []  # words that were given and have no effect

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """Return the given options, as texts and switches; record problems and options without effect."""
        flags = dict.fromkeys(word.partition("=")[0] for word in words)
        wrong = list(self._refusals(flags))
        found, left = argparse.ArgumentParser.parse_known_args(self, list(words))
        unknown = [word for word in left if word.startswith("-") and word.partition("=")[0] not in REFUSED]
        wrong += [f"there is no flag {word}{self._suggestion(f'unrecognized arguments: {word}')}" for word in unknown]
        if left and not wrong:
            is_path = words[words.index(left[0]) - 2 : words.index(left[0]) - 1] == ["--data-path"]
            more = ", since --data-path takes one place, such as a folder of all texts" if is_path else ""
            wrong = [f"{left[0]!r} belongs to no flag: leave it out{more}"]
        given = vars(found)
        for name in [name for name in given if name.startswith("--")]:
            value = given.pop(name)
            if name in IDLE:
                self.idle.append(name)
            elif not FIXED[name].allows(value):
                allowed = " or ".join(FIXED[name].values)
                wrong.append(f"invalid {name} {value}: {FIXED[name].reason}; give {allowed}, or leave it out")
            else:
                self.idle.append(f"{name} {value}")
        for flag, values in IDLE_VALUES.items():
            if given.get(name := self._option_string_actions[flag].dest) in values:
                self.idle.append(f"{flag} {given.pop(name)}")
        self.problems += wrong
        return given

    def _refusals(self, flags: Iterable[str]) -> Iterator[str]:
        """Yield each reason to refuse flags once, with all of them; and with the shape that a configuration sets."""
        refused: dict[str, list[str]] = {}
        for flag in flags:
            if flag in REFUSED:
                refused.setdefault(REFUSED[flag], []).append(flag)
        actions = self._option_string_actions
        shape = [flag for flag in flags if flag in actions and actions[flag].dest in SHAPE]
        for reason, named in refused.items():
            also = f"; leave out {', '.join(shape)} too" if shape and reason == OF_CONFIGURATIONS else ""
            yield f"{', '.join(named)} {'is' if len(named) == 1 else 'are'} not supported: {reason}{also}"

    @property
    def notes(self) -> list[str]:
        """The given flags that change nothing, in one line."""
        return [f"without effect here: {', '.join(self.idle)}"] if self.idle else []

    def read_file(self, path: Path) -> dict[str, Any]:
        """Read options by name from a file; a section (`model:`, `training:`, ... `ddp:`) may hold them, too.

        Every key is read as its flag on the command line would be; a model that is not in the current folder may be
        beside the file. Nothing in the file is executed.
        """
        found, _, lines = read_mapping(path)
        given = dict[str, Any]()
        for key, value in _flat(found):
            told = len(self.problems)
            try:
                values = self.read(self.words_of(key, _beside(path, key, value)))
                self.problems += [f"{key!r} is given twice: give it once" for name in values if name in given]
                given |= values
            except ConfigurationError as error:
                self.problems.append(str(error))
            place = f"{path}:{lines[key]}: " if key in lines else f"{path}: "
            self.problems[told:] = [place + problem for problem in self.problems[told:]]
        return given

    def words_of(self, key: str, value: Any) -> list[str]:
        """Return the command-line words that are equivalent to a key of a configuration file."""
        if key == "config" or isinstance(value, Mapping) or (key in _SECTIONS and key not in OPTIONS):
            raise ConfigurationError(f"{key!r} is no option; give names, or sections of names: {', '.join(_SECTIONS)}")
        flag = "--" + key.replace("_", "-")
        flag = next((each for each in (f"--{key}", flag) if each in self._option_string_actions), flag)
        if key in DDP_FIELDS.values():
            flag = flag_of(key)
        action = self._option_string_actions.get(flag)
        if flag in REFUSED:
            return [flag]
        if action is None:
            near = difflib.get_close_matches(key.replace("-", "_"), [*OPTIONS, *DDP_FIELDS], 1, 0.5)
            if (known := ELSEWHERE.get("--" + key.replace("_", "-"))) is not None:
                near = [known[2:].replace("-", "_")]
            raise ConfigurationError(f"{key!r} is no option" + (f"; did you mean {near[0]}?" if near else ""))
        if action.nargs != 0 and action.dest in OPTIONS:
            OPTIONS[action.dest].read(value)  # else YAML's true or 1.10 would become a text
        if isinstance(value, list):
            return [flag, *map(str, value)] if value else []
        if action.nargs != 0:
            return [f"{flag}={value}"]
        if not isinstance(value, bool):
            raise ConfigurationError(f"invalid {flag} {value!r}: give true or false")
        off = f"--no-{flag[2:]}"
        return [flag] if value else [off] if off in self._option_string_actions else []

    def _suggestion(self, message: str) -> str:
        given = re.search(r"unrecognized arguments: ([^\s=]+)", message)
        known = None if given is None else ELSEWHERE.get(given[1].replace("_", "-"))
        return super()._suggestion(message) if known is None else f"; did you mean {known}?"

    def error(self, message: str) -> NoReturn:
        """Raise an error for an unreadable command line."""
        raise ConfigurationError(self.with_suggestion(message))


def make_parser() -> TrainParser:
    """Make the parser; the namespace that it returns holds only given options."""
    parser = TrainParser(prog=PROGRAM, description=_DESCRIPTION, usage=_USAGE)
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
    """Read a command line, and its file and preset."""
    parser = make_parser()
    given = parser.read(argv)
    if sum(word.partition("=")[0] == "--config" for word in argv) > 1:
        parser.problems.append("--config is given twice: give one file")
    path, preset = given.pop("config", None), given.pop("preset", None)
    layers = [Layer(COMMAND_LINE, given)]
    if path is not None:
        with suppress(RuntimeError):  # there is no user of this name, so no such file
            path = Path(path).expanduser()  # shells leave the ~ of --config=~/run.yaml as it is
        try:
            values = parser.read_file(Path(path))
            of_file = values.pop("preset", None)
            preset = preset or of_file
            layers.insert(0, Layer(f"config {path}", values))
        except ConfigurationError as error:
            parser.problems.append(str(error))
    if preset is not None:
        layers.insert(0, Layer(f"preset {preset}", PRESETS[preset], gives_way=True))
    return assemble(layers, parser.problems, parser.notes)


def _beside(file: Path, key: str, value: Any) -> Any:
    """Return a relative path from its configuration file's folder, if the file exists only there."""
    option = OPTIONS.get(key.replace("-", "_"))
    if option is None or option.kind is not Path or not isinstance(value, str) or Path(value).exists():
        return value
    return str(near) if (near := file.parent / value).exists() else value


def _flat(found: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values out of their sections, without empty ones."""
    for key, value in found.items():
        is_section = key in _SECTIONS and isinstance(value, Mapping)
        for name, each in value.items() if is_section else ((key, value),):
            if each is not None:
                yield str(name), each


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
    many: dict[str, Any] = {"nargs": "+"} if option.is_list else {}
    group.add_argument(option.flag, dest=option.name, metavar=shown, help=help_text, **many)


def _add_known(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Megatron-LM that are no options here; `TrainParser.read` handles them."""
    group = parser.add_argument_group("other spellings", "names of Megatron-LM for options from above")
    for flag, spelling in ALIASES.items():
        more: dict[str, Any] = {"metavar": "VALUE"}
        if spelling.value is not None:
            more = {"action": "store_const", "const": spelling.value}
        # Some, such as --disable-x, turn a switch off anyway.
        if flag not in parser._option_string_actions:
            group.add_argument(flag, dest=spelling.name, help=f"sets {flag_for(spelling.name)}", **more)
    group = parser.add_argument_group("of Megatron-LM, with one possible value", "without an effect, too")
    for flag, fixed in FIXED.items():
        group.add_argument(flag, dest=flag, metavar="{" + ",".join(fixed.values) + "}", help=fixed.reason)
    parser.epilog = f"{len(IDLE)} more flags of Megatron-LM are taken and change nothing here (docs/training_flags.md)."
    for flag in IDLE:
        more = {"nargs": "+", "metavar": "VALUE"} if flag in VALUED else {"action": "store_true"}
        parser.add_argument(flag, dest=flag, help=argparse.SUPPRESS, **more)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value in (None, ()) else str(value)


# ---- layers ----------------------------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """The values from one origin."""

    origin: str  # such as `command line`
    values: Mapping[str, Any]  # by option
    gives_way: bool = False  # values that fit no value of a later layer are dropped


def assemble(layers: Sequence[Layer], problems: Iterable[str] = (), notes: Iterable[str] = ()) -> Options:
    """Combine layers into options; later layers win, and all problems are reported at once."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    wrong, told = list(problems), list(notes)
    for layer in reversed(layers):
        found: dict[str, Any] = {}
        for name, value in layer.values.items():
            try:
                found[name] = OPTIONS[name].read(value) if name in OPTIONS else value
            except ConfigurationError as error:
                wrong.append(str(error))
        for name in list(_giving_way(found, values)) if layer.gives_way else ():
            del found[name]
        values = {**found, **values}
        origins = {**dict.fromkeys(found, layer.origin), **origins}
    try:
        ddp = _ddp_config(values, told)
    except ConfigurationError as error:
        wrong += str(error).splitlines()
    if wrong:
        raise ConfigurationError("\nerror: ".join(wrong))
    sections = {
        attribute: cls(**{name: values[name] for name in inspect.signature(cls).parameters if name in values})
        for attribute, cls in SECTIONS.items()
    }
    return Options(**sections, ddp=ddp, origins=origins, explained=tuple(told))


def _giving_way(preset: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a preset that contradict the user's, or have no effect beside them."""
    both = {**preset, **given}
    has_configuration = bool(given.get("hf_config") or given.get("hf_model"))
    is_unsharded = given.get("use_megatron_fsdp") is False or bool(given.get("use_torch_fsdp2"))
    for name in preset.keys() - given.keys():
        rivals = {second if name == first else first for first, second, _ in ALTERNATIVES if name in (first, second)}
        needed = [needed for names, needed in NEEDS.items() if name in names.split()]
        reasons = (
            any(given.get(rival) is not None and given[rival] is not False for rival in rivals),
            not all(is_met(each, lambda other: both.get(other, OPTIONS[other].default)) for each in needed),
            has_configuration and name in SHAPE,
            is_unsharded and name in ("use_megatron_fsdp", "data_parallel_sharding_strategy"),
            name == "min_lr" and "lr" in given and given["lr"] < preset["min_lr"],
        )
        if any(reasons):
            yield name


def _ddp_config(values: Mapping[str, Any], notes: list[str]) -> DistributedDataParallelConfig:
    """Build the configuration of the engine.

    The strategy without a flag is that of Megatron-LM's command line: everything is sharded. The other two defaults
    that differ there from the class (`MEGATRON_DEFAULTS`) are the class's here: a NaN is skipped and counted by the
    trainer, and gathers align only if pipelines are interleaved.
    """
    given = dict(values)
    if given.pop("use_custom_fsdp", False):
        notes.append("--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such")
        given["use_megatron_fsdp"] = True
    if given.get("use_megatron_fsdp"):
        given.setdefault("data_parallel_sharding_strategy", MEGATRON_DEFAULTS["data_parallel_sharding_strategy"])
    return config_from_flags(argparse.Namespace(**given))
