"""Whether the stored config of an adapter lets the same weights compute the same as the model's."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from megatron_fsdp.errors import CheckpointError

_ABOUT_THE_FILE = {"auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"}

_SEEN_BY_NAMES = {
    "bias",
    "exclude_modules",
    "layers_pattern",
    "layers_to_transform",
    "modules_to_save",
    "save_indices",
    "save_only_topk_weights",
    "save_precomputed_indices",
    "save_projection",
    "target_modules",
    "target_parameters",
}
"""They decide which tensors there are: the names of the stored ones are compared anyhow."""

_FOR_TRAINING = {
    "beta1",
    "beta2",
    "corda_config",
    "d_initial",
    "deltaT",
    "eva_config",
    "init_logits_std",
    "init_theta_d_bound",
    "init_v_bound",
    "init_vector_bank_bound",
    "lora_ga_config",
    "megatron_config",
    "megatron_core",
    "orth_reg_weight",
    "progressbar",
    "rank_dropout_scale",
    "runtime_config",
    "target_r",
    "tfinal",
    "tinit",
    "total_step",
}
"""Schedules, first values and where things run. Dropouts are told by their name."""

_HARMLESS = _ABOUT_THE_FILE | _SEEN_BY_NAMES | _FOR_TRAINING

_INIT_FIELDS = {"init_ia3_weights", "init_lora_weights", "init_weights"}
_PLAIN_INITS = {"eva", "gaussian", "orthogonal"}
"""Other named ones change the weights of the base, or what is computed (pissa, olora, loftq, bat)."""


def plain_config(config: Any) -> dict[str, Any]:
    """A peft config as JSON would give it back."""
    found: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=_as_list))
    return found


def default_config(config: Any) -> dict[str, Any]:
    """What peft takes for the fields that a stored config lacks."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
    defaults: dict[str, Any] = json.loads(json.dumps(found, default=_as_list))
    return defaults


def check_config(stored: Mapping[str, Any], own: Mapping[str, Any], defaults: Mapping[str, Any], where: object) -> None:
    """Refuse a stored config with which the same weights compute something else.

    Args:
        stored: The stored config.
        own: That of the model's adapter.
        defaults: For fields that `stored` lacks; older releases of peft do not know all.
        where: Names the file in messages.

    Raises:
        CheckpointError: A field that changes the computation differs, or is not known to the installed peft.
    """
    for name in sorted(own, key=lambda name: (name != "peft_type", name)):
        theirs = stored.get(name, defaults.get(name))
        if _meaning(name, theirs) != _meaning(name, own[name]):
            raise CheckpointError(
                f"{where} has {name}={theirs!r}, and the model's adapter {name}={own[name]!r}, with which the "
                "same weights compute something else; make the adapter with the stored config"
            )
    for name in sorted(stored.keys() - own.keys()):
        if _switches_on(_meaning(name, stored[name])):
            raise CheckpointError(
                f"{where} has {name}={stored[name]!r}, which the installed peft does not know; install a peft that does"
            )


def _meaning(name: str, value: Any) -> Any:
    """What is compared of a value: nothing of harmless ones, sets in one order."""
    if name in _HARMLESS or "dropout" in name:
        return None
    if name in _INIT_FIELDS and (not isinstance(value, str) or value in _PLAIN_INITS):
        return None
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return sorted(value) or None  # a set in the config, stored in any order
    return value or None


def _switches_on(value: Any) -> bool:
    """Numbers of unknown options are taken for the defaults of options that are off."""
    return value is True or isinstance(value, str | list | dict)


def _as_list(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
