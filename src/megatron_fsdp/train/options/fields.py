"""From the fields of a dataclass to flags: name, type, choices, help and the way to turn a switch off. Pure."""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class Option:
    """One field as a flag.

    Attributes:
        name: Of the field; also the key in a configuration file.
        flag: What turns a switch on, or comes before a value; for switches that are on by default too.
        off_flags: What turns a switch off; empty where nothing does.
        kind: The type of a value, without None.
        is_many: Whether the flag takes one value or more.
        choices: The values that are possible; empty: any.
        default: Of the field.
        meaning: One sentence or more.
    """

    name: str
    flag: str
    off_flags: tuple[str, ...]
    kind: type
    is_many: bool
    choices: tuple[Any, ...]
    default: Any
    meaning: str

    @property
    def is_switch(self) -> bool:
        """Whether it is on or off."""
        return self.kind is bool


def attribute_meanings(cls: type) -> dict[str, str]:
    """What the docstring of a class says of each field; empty where Python was told to drop docstrings."""
    text = inspect.cleandoc(cls.__doc__ or "").partition("\nAttributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, flags=re.MULTILINE)
    return {name: " ".join(meaning.split()) for name, meaning in entries}


def options_of(cls: type) -> tuple[Option, ...]:
    """The fields of a dataclass as options, in their order.

    A switch `x` that is off by default has the flags `--x` and `--no-x`; one that is on by default `--no-x` and, as in
    Megatron-LM, `--disable-x`, and `--x` to say so. A switch named `no_x` has the flag `--no-x` only.
    """
    hints, meanings = typing.get_type_hints(cls), attribute_meanings(cls)
    return tuple(
        _option(field, hints[field.name], meanings.get(field.name, ""))
        for field in dataclasses.fields(cls)
        if field.init
    )


def _option(field: dataclasses.Field[Any], hint: Any, meaning: str) -> Option:
    kind, is_many, choices = _kind_of(hint)
    kebab = field.name.replace("_", "-")
    off: tuple[str, ...] = ()
    if kind is bool and not kebab.startswith("no-"):
        off = (f"--no-{kebab}", f"--disable-{kebab}") if field.default else (f"--no-{kebab}",)
    return Option(field.name, f"--{kebab}", off, kind, is_many, choices, field.default, meaning)


def _kind_of(hint: Any) -> tuple[type, bool, tuple[Any, ...]]:
    """Type of a value, whether there are several, and the choices."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [part for part in get_args(hint) if part is not type(None)]
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return type(choices[0]), False, choices
    if get_origin(hint) is tuple:
        return get_args(hint)[0], True, ()
    return hint, False, ()


def converter_of(option: Option) -> Callable[[Any], Any]:
    """What turns a text, or a value of a configuration file, into a value of the field.

    Returns:
        A function that raises ConfigurationError, with what is allowed.
    """

    def convert(value: Any) -> Any:
        found = _READERS[option.kind](value)
        if found is None or (option.choices and found not in option.choices):
            raise ConfigurationError(f"invalid {option.flag} {shown(value)}: give {allowed_words(option)}")
        for names, is_inside, words in _BOUNDS:
            if option.name in names.split() and not is_inside(found):
                raise ConfigurationError(f"invalid {option.flag} {shown(value)}: give {words}")
        return found

    return convert


def shown(value: object) -> str:
    """A value as a message shows it."""
    return str(value) or repr("")


def allowed_words(option: Option) -> str:
    """What an option takes, in words."""
    if option.choices:
        return "one of " + ", ".join(str(choice) for choice in option.choices)
    return _WORDS[option.kind]


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,3}(_?\d){0,30}", value.strip()):
        return int(value)
    return value if isinstance(value, int) else None


def _real(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(found) else found


def _text(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        # Where the locale knows ASCII only, Python keeps the bytes of an argument as lone surrogates.
        return str(value).encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half of a pair of surrogates, which YAML can say
        return None


def _path(value: Any) -> Path | None:
    if not isinstance(value, str | Path) or not str(value) or "\0" in str(value):
        return None
    try:
        return Path(value).expanduser()
    except RuntimeError:  # nobody of this name is here
        return None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


_READERS: Mapping[type, Callable[[Any], Any]] = {int: _whole, float: _real, str: _text, Path: _path, bool: _switch}
_WORDS: Mapping[type, str] = {
    int: "a whole number",
    float: "a finite number",
    str: "a text",
    Path: "a path",
    bool: "true or false",
}

_AT_LEAST_ONE = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
    "max_position_embeddings make_vocab_size_divisible_by num_experts moe_router_topk moe_ffn_hidden_size "
    "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size nproc "
    "micro_batch_size global_batch_size train_iters exit_interval recompute_num_layers eval_interval eval_iters "
    "lr_decay_iters lr_wsd_decay_iters vocab_size save_interval keep_last log_interval sample_tokens"
)
_ABOVE_ZERO = (
    "rotary_base norm_epsilon init_method_std distributed_timeout_minutes initial_loss_scale lr adam_eps peak_tflops "
    "hang_timeout_minutes"
)
_AT_LEAST_ZERO = (
    "seed min_lr lr_warmup_iters weight_decay clip_grad num_workers max_restarts max_nan_steps max_failed_saves"
)
_MINUTES = "distributed_timeout_minutes hang_timeout_minutes"
_BELOW_ONE = "lr_warmup_fraction adam_beta1 adam_beta2 sgd_momentum"
_YEAR = 365 * 24 * 60  # timers of libraries overflow somewhere above
_TOO_LARGE = 2**63  # below it, tensors take a size, and generators a seed, as it is

_BOUNDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda value: value >= 1, "1 or more"),
    (_AT_LEAST_ONE, lambda value: value < _TOO_LARGE, "less than 2^63"),
    (_ABOVE_ZERO, lambda value: 0 < value < math.inf, "a finite number above 0"),
    ("exit_duration_in_mins", lambda value: value > 0, "a number above 0"),
    (_MINUTES, lambda value: value <= _YEAR, f"at most {_YEAR}, a year"),
    ("seed", lambda value: 0 <= value < _TOO_LARGE, f"0 to {_TOO_LARGE - 1}"),
    (_AT_LEAST_ZERO, lambda value: 0 <= value < math.inf, "a finite number, 0 or more"),
    (_BELOW_ONE, lambda value: 0 <= value < 1, "0 or more, and less than 1"),
)
"""(options, whether a value is inside, what is allowed in words)."""
