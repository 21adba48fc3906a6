"""Which parameter group a parameter belongs to: from a map, or by Megatron's default rule. Pure.

A `torch_dist` checkpoint keeps the groups without their members. The map is what a training run dumped; the rule
is what Megatron groups by unless told otherwise, and it is only used where exactly one group fits each parameter. Of a
single group, everything that is optimised is a member.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_fsdp.checkpoint.convert.entries import listed
from megatron_fsdp.checkpoint.convert.names import canonical_name
from megatron_fsdp.errors import CheckpointError, ConfigurationError

INFER, MAP, NO_GROUPS = "infer", "map", "none"
_ALIASES = (
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
"""How models without Transformer Engine call what files call by its names."""


@dataclass(frozen=True)
class Parameter:
    """What the choice depends on.

    Attributes:
        name: In the output's spelling, without prefix and before halves are told apart.
        ndim: Of one layer's, one expert's tensor.
        has_state: Whether the checkpoint holds optimizer state of it; buffers and frozen parameters have none.
    """

    name: str
    ndim: int
    has_state: bool

    @property
    def is_exempt(self) -> bool:
        """Whether it may lack a group: routers' biases are not optimised."""
        return not self.has_state or self.name.endswith(".expert_bias")


@dataclass(frozen=True)
class Assignment:
    """Parameter -> index of its group, for every parameter that has one; and what to tell people."""

    group_of: Mapping[str, int]
    notes: tuple[str, ...] = ()


def assign(
    parameters: Iterable[Parameter],
    groups: Sequence[Mapping[str, Any]],
    how: str,
    written_map: Mapping[str, int] | None = None,
) -> Assignment:
    """Find the group of each parameter.

    Args:
        parameters: Of the model.
        groups: Of all optimizers, in order.
        how: "infer", "map" or "none".
        written_map: Any spelling of names -> index into `groups`; for "map".

    Raises:
        CheckpointError: A parameter has no group in the map, or none or several fit it.
        ConfigurationError: A map is needed and not given, or the other way round.
    """
    if how == NO_GROUPS:
        return Assignment({})
    parameters = list(parameters)
    if how == MAP:
        if written_map is None:
            raise ConfigurationError("--groups map needs --param-to-param-group-map-json FILE")
        return _from_map(parameters, len(groups), written_map)
    if how != INFER:
        raise ConfigurationError(f"--groups is {how!r}; use infer, map or none")
    if not groups:
        return Assignment({}, ("the checkpoint holds no parameter groups; none are written",))
    return Assignment({p.name: _only_fit(p, groups) for p in parameters if not p.is_exempt})


def _from_map(parameters: Sequence[Parameter], count: int, written_map: Mapping[str, int]) -> Assignment:
    outside = [f"{name} -> {index}" for name, index in written_map.items() if not 0 <= index < count]
    if outside:
        raise CheckpointError(f"the map names groups that the checkpoint lacks (it has {count}): {listed(outside)}")
    by_name: dict[str, int] = {}
    apart = [name for name, i in written_map.items() if by_name.setdefault(canonical_name(name), i) != i]
    if apart:
        raise CheckpointError(f"the map puts one parameter into different groups under several names: {listed(apart)}")
    aliases = {_renamed(name): name for name in by_name}
    origin = {p.name: aliases.get(canonical_name(p.name), canonical_name(p.name)) for p in parameters}
    found = {name: by_name[key] for name, key in origin.items() if key in by_name}
    lacking = [p.name for p in parameters if p.name not in found and not p.is_exempt]
    if lacking:
        raise CheckpointError(
            f"the map has no group for {listed(lacking)}; dump it again from the model of this checkpoint"
        )
    surplus = sorted(by_name.keys() - origin.values())
    notes = (f"the map names what the checkpoint lacks: {listed(surplus)}",) if surplus else ()
    return Assignment(found, notes)


def _renamed(name: str) -> str:
    """A name of a model without Transformer Engine, as files spell it."""
    for old, new in _ALIASES:
        if old in name:
            return name.replace(old, new)
    return name


def _only_fit(parameter: Parameter, groups: Sequence[Mapping[str, Any]]) -> int:
    if len(groups) == 1:
        return 0
    is_expert = ".experts." in parameter.name
    decays = parameter.ndim != 1 and not parameter.name.endswith(".bias")
    fitting = [
        index
        for index, group in enumerate(groups)
        if bool(group.get("is_expert_parallel", False)) == is_expert and bool(group.get("wd_mult", 1.0)) == decays
    ]
    if any(group.get("is_decoupled_lr", False) for group in groups):
        decoupled = parameter.name.startswith(("embedding.", "output_layer."))
        fitting = [i for i in fitting if bool(groups[i].get("is_decoupled_lr", False)) == decoupled]
    if len(fitting) != 1:
        count = "no parameter group fits" if not fitting else f"the parameter groups {fitting} all fit"
        raise CheckpointError(
            f"{count} {parameter.name} by Megatron's default rule (1-d tensors and biases do not decay, experts "
            "apart); give --param-to-param-group-map-json FILE, dumped by the run, or --groups none"
        )
    return fitting[0]
