"""The command line, the configuration file and presets; put together, later ones win."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from megatron_fsdp.config.command_parser import Parser
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.config.ddp_config_flags import MEGATRON_DEFAULTS, add_flags, destination_of, off_flag_of
from megatron_fsdp.config.yaml_mapping import lines_of_keys, read_mapping
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.options.checks import ALTERNATIVES, NEEDS, SHAPE, is_met
from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED, VALUED, Spelling
from megatron_fsdp.train.options.options import (
    DDP_FIELDS,
    OPTIONS,
    SECTIONS,
    Option,
    Options,
    flag_for,
    in_flags,
    options_of,
)

PROGRAM = "mfsdp train"
COMMAND_LINE = "command line"

WRITTEN = ("out", "save", "export_hf", "tensorboard_dir", "data_cache_path", "dump_param_to_param_group_map")
"""Options that are output paths."""

_USAGE = "%(prog)s [--config FILE] [--preset NAME] [--FLAG [VALUE]] ..."

_DESCRIPTION = """Train a decoder-only transformer on text that is on this machine, sharded over ranks. Under torchrun
this process is a rank; else it starts the ranks itself. Flags have the names of Megatron-LM."""


# ---- presets ---------------------------------------------------------------------------------------------------------


_DECODER: Mapping[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "exit_duration_in_mins": 5.0,
}
"""Options of all four sizes: a decoder with rotary positions, fully sharded, for five minutes at most."""

_HALF: Mapping[str, Any] = {"bf16": True, "grad_reduce_in_bf16": True}


def _preset(
    shape: tuple[int, int, int, int], seq_length: int, micro_batch: int, steps: int, lr: float
) -> Mapping[str, Any]:
    """Make a preset of a number of layers, width, heads and inner width."""
    num_layers, hidden_size, num_attention_heads, ffn_hidden_size = shape
    return {
        **_DECODER,
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "seq_length": seq_length,
        "micro_batch_size": micro_batch,
        "train_iters": steps,
        "lr": lr,
        "min_lr": lr / 10,
        "lr_warmup_fraction": 0.1,
        "eval_interval": max(1, steps // 5),
    }


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": _preset((2, 64, 2, 176), 64, 4, 30, 3e-3),
    "cpu-small": _preset((4, 448, 7, 1216), 256, 4, 300, 2e-3),
    "gpu-125m": {**_preset((12, 896, 14, 2688), 1024, 16, 600, 1e-3), **_HALF},
    "gpu-1b": {**_preset((20, 2048, 16, 5504), 2048, 4, 600, 4e-4), **_HALF},
}


def find_preset(name: str) -> Mapping[str, Any]:
    """Return the options of a preset."""
    if name not in PRESETS:
        raise ConfigurationError(f"preset {name!r} does not exist: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]


# ---- the command line and the file -----------------------------------------------------------------------------------


class TrainParser(Parser):
    """argparse's parser, which raises errors and leaves defaults out: layers and origins need what was given."""

    def read(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return what was given, as texts and switches, and all errors in the names of flags."""
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
        """Raise an error for an unreadable command line."""
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
    """Read a command line."""
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

    Nothing in the file is executed, and it cannot make a run write where it likes: places to write to lie below `out`
    where the command line names it, else below the current folder. What is wrong is among the problems of the layer.
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


# ---- layers ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Values from one origin."""

    origin: str  # such as `command line`
    values: Mapping[str, Any]  # by option, or field of the configuration; dashes or underscores
    gives_way: bool = False  # values that fit no value of a later layer are dropped
    place: str = ""  # what messages begin with, such as a file and a colon
    places: Mapping[str, str] = field(default_factory=dict)  # the same with the line, by key
    problems: tuple[str, ...] = ()  # what is wrong besides

    def at(self, key: str) -> str:
        """Return how a message about the value of a key begins."""
        return self.places.get(key, self.place)


def assemble(layers: tuple[Layer, ...], problems: Iterable[str] = ()) -> Options:
    """Combine layers into options; later layers win, and all that is wrong is told at once."""
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    notices: list[str] = []
    places: dict[str, str] = {}
    wrong = list(problems)
    for layer in reversed(layers):
        wrong += layer.problems
        read = _read(layer, notices, wrong, places)
        for name in list(_giving_way(read, values)) if layer.gives_way else ():
            del read[name]
        values = {**read, **values}
        origins = {**dict.fromkeys(read, layer.origin), **origins}
    try:
        ddp = _ddp_config(values, notices)
    except ConfigurationError as error:
        by_flag = {flag_for(name): place for name, place in places.items()}
        wrong += [by_flag.get(line.split(" ")[0], "") + line for line in str(error).splitlines()]
    if wrong:
        raise ConfigurationError("\nerror: ".join(wrong))
    sections = {
        attribute: cls(**{option.name: values[option.name] for option in options_of(cls) if option.name in values})
        for attribute, cls in SECTIONS.items()
    }
    return Options(**sections, ddp=ddp, origins=origins, explained=tuple(notices))


def _spellings() -> dict[str, Spelling]:
    found = {flag: Spelling(option.name, False) for option in OPTIONS.values() for flag in option.off_flags}
    for name, each in DistributedDataParallelConfig.__dataclass_fields__.items():
        if each.type in (bool, "bool"):
            found[off_flag_of(name)] = Spelling(destination_of(name), False)
    return {**ALIASES, **found}


SPELLINGS: Mapping[str, Spelling] = _spellings()
"""Flags that set an option and are not named like it: switches turned off, and Megatron-LM's own spellings."""


def _read(layer: Layer, notices: list[str], problems: list[str], places: dict[str, str]) -> dict[str, Any]:
    """Return the values of a layer by the names of options, parsed; record places not known before."""
    found: dict[str, Any] = {}
    for key, value in layer.values.items():
        try:
            said = _said(key, value, notices)
            if said is None:
                continue
            name, value = said
            if name in found:
                raise ConfigurationError(f"{flag_for(name)} is given twice ({key!r}): give it once")
            places.setdefault(name, layer.at(key))
            found[name] = OPTIONS[name].read(value) if name in OPTIONS else value  # the engine's read their own
        except ConfigurationError as error:
            problems.append(f"{layer.at(key)}{error}")
    return found


def _said(key: str, value: Any, notices: list[str]) -> tuple[str, Any] | None:
    """Return the option and value that a key of a layer stands for; None if it sets none."""
    flag = f"--{key}" if f"--{key}" in EXPLAINED else "--" + key.replace("_", "-")
    if flag in FIXED:
        if not FIXED[flag].allows(str(value)):
            allowed = " or ".join(FIXED[flag].values)
            raise ConfigurationError(f"invalid {flag} {value}: {FIXED[flag].reason}; give {allowed}, or leave it out")
        notices.append(f"{flag} {value} has no effect: {FIXED[flag].reason}")
        return None
    if flag in EXPLAINED:
        if value is not False:
            notices.append(f"{flag} has no effect: {EXPLAINED[flag]}")
        return None
    spelling = SPELLINGS.get(flag)
    if spelling is None:
        return _canonical_name(key), value
    if spelling.value is None:
        return spelling.name, value
    if not isinstance(value, bool):
        raise ConfigurationError(f"invalid {flag[2:]}: {value!r}: give true or false")
    return (spelling.name, spelling.value) if value else None


def _canonical_name(key: str) -> str:
    """Return the name of an option that was written with dashes or underscores; else name the nearest, or a reason."""
    name = key.replace("-", "_")
    if name in OPTIONS or name in DDP_FIELDS:
        return name
    if name in DDP_FIELDS.values():
        return destination_of(name)
    flag = "--" + name.replace("_", "-")
    if flag in REFUSED:
        raise ConfigurationError(f"{key!r} is not supported: {REFUSED[flag]}")
    near = difflib.get_close_matches(name, [*OPTIONS, *DDP_FIELDS], 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ConfigurationError(f"{key!r} is no option{hint}")


def _giving_way(preset: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of a preset that would contradict what the user gave, or do nothing beside it."""
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


def _ddp_config(values: Mapping[str, Any], notices: list[str]) -> DistributedDataParallelConfig:
    """Build the configuration of the engine.

    The strategy without a flag is that of Megatron-LM's command line: everything is sharded. The other two defaults
    that differ there from the class (`MEGATRON_DEFAULTS`) are the class's here: a NaN is skipped and counted by the
    trainer, and gathers align only where pipelines are interleaved.
    """
    given = {DDP_FIELDS[name]: value for name, value in values.items() if name in DDP_FIELDS}
    if given.pop("use_custom_fsdp", False):
        notices.append("--use-custom-fsdp: the former name of --use-megatron-fsdp, and taken as such")
        given["use_megatron_fsdp"] = True
    if given.get("use_megatron_fsdp"):
        given.setdefault("data_parallel_sharding_strategy", MEGATRON_DEFAULTS["data_parallel_sharding_strategy"])
    try:
        return DistributedDataParallelConfig(**given)
    except ConfigurationError as error:
        raise ConfigurationError(in_flags(str(error))) from None
