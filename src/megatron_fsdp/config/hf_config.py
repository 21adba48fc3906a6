"""Configs of transformers: read one from a local folder, and build its model on the meta device."""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optional_packages import require

CONFIG_FILE = "config.json"
CAUSAL = "AutoModelForCausalLM"

_MAX_CONFIG_BYTES = 64 << 20
_MOST_MODULES = 100_000
_LANGUAGE = ("AutoModelForMultimodalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", CAUSAL)
_BASE = "AutoModel"
_MASKED = "AutoModelForMaskedLM"


def read_config(source: str | Path) -> Any:
    """Read a transformers config from a local folder or file, without running code beside it."""
    transformers: Any = require("transformers", str(source))
    path = Path(source)
    try:
        _require_small_file(path / CONFIG_FILE if path.is_dir() else path)
        # None, the default of transformers, would ask on standard input whether to run code of the folder.
        return transformers.AutoConfig.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigurationError(
            f"{source} has no config that transformers {transformers.__version__} reads: {first_words(error)}"
        ) from error


def _require_small_file(path: Path) -> None:
    """Raise unless the path is a small regular file: transformers would wait for a pipe, and read a device for ever."""
    if not path.exists():
        return  # transformers says so
    found = path.stat()
    if not stat.S_ISREG(found.st_mode) or found.st_size > _MAX_CONFIG_BYTES:
        raise ConfigurationError(f"{path} is no regular file of at most {_MAX_CONFIG_BYTES >> 20} MiB")


_COUNTS_MODULES = re.compile(r"^(?!.*size).*(layers?|experts?|blocks?|depths?)$")
"""Matches fields that count modules, such as num_hidden_layers, n_layer, num_experts and depths."""


def _check_counts(fields: Mapping[str, Any]) -> None:
    """Raise if a config, or one inside of it, counts absurdly many modules."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            _check_counts(value)
            continue
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int) and count > _MOST_MODULES and _COUNTS_MODULES.search(name):
                raise ConfigurationError(f"the config has {name}={value}; give at most {_MOST_MODULES}")


def build_from_config(config: Any, dtype: torch.dtype, kind: str | None = CAUSAL, **options: Any) -> nn.Module:
    """Build a transformers model on the meta device, with tied weights and the dtypes of a loaded one.

    `options` are further arguments of `from_config` of the auto class `kind`; without one (None) the model is the whole
    one that the config names, never a part of it.
    """
    transformers: Any = require("transformers", kind or "a model of this config")
    _check_counts(config.to_dict())
    try:
        with torch.device("meta"):
            if kind is None:
                model: Any = _without_memory(_whole_model(transformers, config, dtype))
            else:
                model = getattr(transformers, kind).from_config(config, dtype=dtype, trust_remote_code=False, **options)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"transformers {transformers.__version__} builds no {kind or 'model'} from {type(config).__name__}: "
            f"{first_words(error)}"
        ) from error
    model.tie_weights()
    for pattern, kept in model._get_dtype_plan(dtype).items():
        for name, param in model.named_parameters():
            if pattern in name and param.dtype != kept:
                param.data = param.data.to(kept)
    return model.train()


def _whole_model(transformers: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build `architectures[0]`; without it, the first language model around the whole base model, else the base model.

    A few families have a causal language model, or a classifier, that is a part of what their configs describe.
    """
    if named := next(iter(config.architectures or ()), None):
        return _class_named(transformers, config, named)._from_config(config, dtype=dtype)
    found = dict(_classes_of(transformers, config))
    base_kind = found.get(_BASE)
    base = None
    for auto in (*_LANGUAGE, _MASKED):
        if auto not in found:
            continue
        try:
            model = found[auto]._from_config(config, dtype=dtype)
        except Exception:  # noqa: BLE001  # a class may want another field, as is_decoder
            continue
        if base_kind is None or any(type(part) is base_kind for part in model.modules()):
            return model
        base = base_kind._from_config(config, dtype=dtype) if base is None else base
        if model.num_parameters() >= base.num_parameters():
            return model
    kind = base_kind or next(iter(found.values()), None)
    if kind is None:
        raise ConfigurationError(
            f"transformers {transformers.__version__} has no model of {type(config).__name__} alone; give the "
            "config of a whole model, with architectures"
        )
    return base if base is not None else kind._from_config(config, dtype=dtype)


def _without_memory(model: Any) -> Any:
    """Move to the meta device the few parameters that constructors put on the CPU."""
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            if not param.is_meta:
                setattr(module, name, nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad))
    return model


def _class_named(transformers: Any, config: Any, name: str) -> Any:
    """Return a class of transformers, or one registered for such configs, by its name."""
    kind: Any = getattr(transformers, name, None) if name.isidentifier() else None
    base = transformers.PreTrainedModel
    if not (isinstance(kind, type) and issubclass(kind, base) and kind is not base):
        kind = next((each for _, each in _classes_of(transformers, config) if each.__name__ == name), None)
    if kind is None:
        raise ConfigurationError(
            f"the config names the class {name!r}, and transformers {transformers.__version__} has no such model: use "
            "a version that does, register the class (AutoModelForCausalLM.register), or correct `architectures`"
        )
    wanted = kind.config_class
    if isinstance(wanted, type) and not isinstance(config, wanted):
        raise ConfigurationError(
            f"the config is a {type(config).__name__} and names the class {name}, which takes a {wanted.__name__}: "
            "correct `model_type` or `architectures`"
        )
    return kind


def _classes_of(transformers: Any, config: Any) -> Iterator[tuple[str, Any]]:
    """List the model classes of a config by auto class."""
    for auto in sorted(name for name in dir(transformers) if name.startswith(_BASE)):
        mapping = getattr(getattr(transformers, auto), "_model_mapping", None)
        if mapping is not None and type(config) in mapping:
            kind = mapping[type(config)]
            yield auto, kind[0] if isinstance(kind, tuple) else kind


def first_words(error: Exception) -> str:
    """Shorten an error of transformers; explain the one about code in the folder."""
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            "it needs code of its own (auto_map), which is never run here; run it yourself, and register its classes "
            "with transformers first (AutoConfig.register, AutoModelForCausalLM.register)"
        )
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return text[:400]
