"""What a conversion may be told. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_fsdp.checkpoint.convert.entries import PathParts
from megatron_fsdp.checkpoint.convert.gating import AUTO
from megatron_fsdp.checkpoint.convert.groups import INFER, MAP, NO_GROUPS
from megatron_fsdp.errors import ConfigurationError

FP32, MODEL = "fp32", "model"
_STATE, _META = "optimizer.state", "optimizer.param_to_group_meta"


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert; the defaults suit a run in half precision that Megatron itself goes on with.

    Attributes:
        swiglu: Which fc1 hold two halves: "auto", "all", "none", or modules separated by commas.
        groups: Where parameter groups come from: "infer", "map", "none"; None: "map" where one is given, else "infer".
        param_to_group: The map, name -> index of its group.
        masters: Weights from "fp32" master weights where the checkpoint has them, or from the "model".
        weights_only: Leave optimizer state, schedule and random generators behind.
        model_prefix: Before every parameter's name.
        optimizer_prefix: Before every optimizer state's name; None: as many wrappers as the run had.
        group_prefix: Before the name of a parameter whose group is told; None: follows `optimizer_prefix`.
        rename_mtp: Call multi-token prediction layers as live models do (`mtp_model_layer`).

    Raises:
        ConfigurationError: An option has a value it cannot have, or two contradict each other.
    """

    swiglu: str = AUTO
    groups: str | None = None
    param_to_group: Mapping[str, int] | None = None
    masters: str = FP32
    weights_only: bool = False
    model_prefix: str = "model.module"
    optimizer_prefix: str | None = None
    group_prefix: str | None = None
    rename_mtp: bool = False

    def __post_init__(self) -> None:
        if self.groups not in (None, INFER, MAP, NO_GROUPS):
            raise ConfigurationError(f"--groups is {self.groups!r}; use infer, map or none")
        if not all(self.swiglu.split(",")):
            raise ConfigurationError(
                f"--swiglu is {self.swiglu!r}; use auto, all, none, or modules separated by commas"
            )
        if self.masters not in (FP32, MODEL):
            raise ConfigurationError(f"--masters is {self.masters!r}; use fp32 or model")
        if self.groups == MAP and self.param_to_group is None:
            raise ConfigurationError("--groups map needs --param-to-param-group-map-json FILE")
        if self.groups in (INFER, NO_GROUPS) and self.param_to_group is not None:
            raise ConfigurationError(
                f"--groups {self.groups} does not use the map that is given; leave one of them out"
            )
        for name in ("model_prefix", "optimizer_prefix", "group_prefix"):
            prefix = getattr(self, name)
            if prefix is not None and (not prefix.strip(".") or prefix != prefix.strip(".") or ".." in prefix):
                raise ConfigurationError(f"--{name.replace('_', '-')} is {prefix!r}; give names joined by single dots")

    @property
    def group_source(self) -> str:
        """Where parameter groups come from, decided."""
        return self.groups or (INFER if self.param_to_group is None else MAP)


@dataclass(frozen=True)
class Prefixes:
    """The prefixes of one output, decided."""

    model: str
    state: str
    meta: str

    @classmethod
    def of(cls, options: ConvertOptions, is_fp32: bool) -> Prefixes:
        """Decide: the adapter, MegatronFSDP and, in half precision, one more put `module.` before optimizer names."""
        state = options.optimizer_prefix or ".".join([_STATE, *["module"] * (2 if is_fp32 else 3)])
        follows = _META + state.removeprefix(_STATE) if state.startswith(_STATE) else _META
        return cls(options.model_prefix, state, options.group_prefix or follows)

    def of_weight(self, name: str) -> PathParts:
        """Steps to a weight: the top-level key, then the name that the model's own state dict has."""
        return _steps(self.model, 1, name)

    def of_state(self, name: str, slot: str) -> PathParts:
        """Steps to one tensor of a parameter's optimizer state."""
        return (*_steps(self.state, 2, name), slot)

    def of_group(self, name: str) -> PathParts:
        """Steps to the fields of a parameter's group."""
        return _steps(self.meta, 2, name)


def _steps(prefix: str, nested: int, name: str) -> PathParts:
    parts = prefix.split(".")
    return (*parts[:nested], ".".join([*parts[nested:], name]))
