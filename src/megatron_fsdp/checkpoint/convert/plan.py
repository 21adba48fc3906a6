"""Plans a conversion: from the content of a checkpoint to what is written, moved and dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict

from megatron_fsdp.checkpoint.convert.groups import INFER, MAP, NO_GROUPS, Assignment, Parameter, assign
from megatron_fsdp.checkpoint.convert.names import (
    AUTO,
    Piece,
    decide_gating,
    is_bucket_space,
    leading_axes,
    parse_object_key,
    parse_tensor_key,
    pieces,
)
from megatron_fsdp.checkpoint.folder import TensorEntry
from megatron_fsdp.checkpoint.report import some_of
from megatron_fsdp.checkpoint.save import KeyPath
from megatron_fsdp.errors import CheckpointError, ConfigurationError

FP32, MODEL = "fp32", "model"
_STATE, _META = "optimizer.state", "optimizer.param_to_group_meta"

_MASTER = "fp32_param"
COMMON, RNG, RERUN = "common_state", "rng_state", "rerun_state_machine_state"

_KEPT_WITH_WEIGHTS = (
    "args",
    "checkpoint_version",
    "iteration",
    "num_floating_point_operations_so_far",
    "content_metadata",
)
_DEFAULT_VERSION = 3.0
BUCKET_KINDS = ("dp_reshardable", "fully_sharded_bucket_space")
"""Names in checkpoints of the optimizer layouts that follow communication buckets."""


@dataclass(frozen=True, slots=True)
class Move:
    """A box of a source tensor, in its true shape, that becomes a whole tensor of the output without its leading 1s."""

    source: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def target(self) -> str:
        """The key in the output."""
        return _key_of(self.path)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Value:
    """An object, or a tensor without a source box, that is written as it is; `path` is its key as nested steps."""

    path: KeyPath
    value: Any

    @property
    def target(self) -> str:
        """The key in the output."""
        return _key_of(self.path)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of the source that is not in the output, and why."""

    key: str
    why: str


def _key_of(path: KeyPath) -> str:
    """Join nested steps to a flat key, as DCP does."""
    return ".".join(map(str, path))


def flatten(tree: Mapping[str, Any]) -> list[Value]:
    """List the leaves of a nested dict, flattened as by DCP: only lists of dicts or tensors are walked."""
    values: list[Value] = []
    traverse_state_dict(dict(tree), lambda path, value: values.append(Value(path, value)))
    return values


@dataclass(frozen=True)
class CommonState:
    """The common state, and of it the groups of all optimizers, without members, and the step beside them."""

    tree: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    common_step: float | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> CommonState:
        """Read the groups and the step from a common dict."""
        groups: list[Mapping[str, Any]] = []
        steps: list[float] = []
        for part in _optimizer_parts(tree.get("optimizer")):
            found = part.get("param_groups", ())
            if not isinstance(found, Sequence) or not all(isinstance(group, Mapping) for group in found):
                raise CheckpointError(
                    "the optimizer's param_groups are not a list of dicts; the common state is damaged"
                )
            groups += [{key: value for key, value in group.items() if key != "params"} for group in found]
            state = part.get("state")
            step = state.get("common_step") if isinstance(state, Mapping) else None
            steps += [float(step)] if step is not None else []
        return cls(tree, tuple(groups), steps[0] if steps else None)

    def argument(self, name: str) -> Any:
        """Return `args.<name>`; None if the checkpoint does not have it."""
        args = self.tree.get("args")
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    @property
    def is_bucket_space(self) -> bool:
        """Whether the optimizer state is laid out by communication buckets, as the common state says."""
        said = self.tree.get("content_metadata")
        kinds = [said.get("distrib_optim_sharding_type")] if isinstance(said, Mapping) else []
        return any(kind in BUCKET_KINDS for kind in kinds)

    @property
    def is_fp32(self) -> bool:
        """Whether the run had no half-precision wrapper around its model, by its arguments."""
        return self.argument("bf16") is False and self.argument("fp16") is False

    def step_of(self, group: int | None) -> float | None:
        """Return the optimizer's step of a group; for None, the step that all groups share."""
        chosen = self.groups if group is None else (self.groups[group],)
        steps = {float(g["step"]) for g in chosen if isinstance(g.get("step"), int | float)}
        if len(steps) == 1:
            return steps.pop()
        return None if steps else self.common_step

    def output_tree(self, weights_only: bool, members: Mapping[int, Sequence[str]]) -> dict[str, Any]:
        """Build the nested dict to write, parameter groups included."""
        tree = {key: value for key, value in self.tree.items() if key != "optimizer"}
        if weights_only:
            tree = {key: value for key, value in tree.items() if key in _KEPT_WITH_WEIGHTS}
        tree.setdefault("checkpoint_version", _DEFAULT_VERSION)
        if self.groups and not weights_only:
            groups = [{"params": list(members.get(i, ())), **group} for i, group in enumerate(self.groups)]
            tree["optimizer"] = {"param_groups": groups}
            scalers = [part.get("grad_scaler") for part in _optimizer_parts(self.tree.get("optimizer"))]
            tree |= next(({"grad_scaler": scaler} for scaler in scalers if scaler is not None), {})
        return tree


def _optimizer_parts(tree: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the dicts of one optimizer and its wrapper, or of several (numbered), from the outside to the inside."""
    if isinstance(tree, Mapping):
        yield tree
        if "param_groups" not in tree:
            numbered = sorted((int(key), inner) for key, inner in tree.items() if str(key).isdigit())
            for inner in [tree["optimizer"]] if "optimizer" in tree else [inner for _, inner in numbered]:
                yield from _optimizer_parts(inner)


# ---- what is asked for ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvertOptions:
    """How to convert; the defaults suit a half-precision run that Megatron itself resumes.

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


class Prefixes:
    """The prefixes of an output: the adapter, MegatronFSDP and, in half precision, one wrapper more add `module.`."""

    def __init__(self, options: ConvertOptions, is_fp32: bool) -> None:
        self.model = options.model_prefix
        self.state = options.optimizer_prefix or ".".join([_STATE, *["module"] * (2 if is_fp32 else 3)])
        follows = _META + self.state.removeprefix(_STATE) if self.state.startswith(_STATE) else _META
        self.meta = options.group_prefix or follows

    def of_weight(self, name: str) -> KeyPath:
        """Return the steps to a weight: the top-level key, then the name in the model's own state dict."""
        return _steps(self.model, 1, name)

    def of_state(self, name: str, slot: str) -> KeyPath:
        """Return the steps to one tensor of a parameter's optimizer state."""
        return (*_steps(self.state, 2, name), slot)

    def of_group(self, name: str) -> KeyPath:
        """Return the steps to the fields of a parameter's group."""
        return _steps(self.meta, 2, name)


def _steps(prefix: str, nested: int, name: str) -> KeyPath:
    parts = prefix.split(".")
    return (*parts[:nested], ".".join([*parts[nested:], name]))


@dataclass(frozen=True)
class Content:
    """What a plan is made from: all tensors in their true shapes, and the contents of what `needed_objects` names."""

    entries: Sequence[TensorEntry]
    object_keys: Sequence[str]
    common: CommonState
    objects: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionPlan:
    """What of the source becomes what tensor of the output, what else is in it, what is left behind, and why."""

    moves: tuple[Move, ...]
    values: tuple[Value, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    gating: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of all moves."""
        return sum(move.nbytes for move in self.moves)


def needed_objects(object_keys: Iterable[str]) -> list[str]:
    """List the objects whose content a plan uses: those that are alone in their grid."""
    return [key for key in object_keys if parse_object_key(key) in ((RNG, True), (RERUN, True))]


def make_plan(source: Content, options: ConvertOptions) -> ConversionPlan:
    """Plan a conversion to `fsdp_dtensor`."""
    sorted_in = _sort(source, options)
    weights = sorted_in.weights
    gating = decide_gating(
        {key: entry.shape for key, entry in weights.items()}, options.swiglu, source.common.argument("swiglu")
    )
    prefixes = Prefixes(options, source.common.is_fp32)
    masters = sorted_in.states.get(_MASTER, {}) if options.masters == FP32 else {}
    cut = {
        key: list(pieces(key, entry.shape, key in gating.gated, options.rename_mtp)) for key, entry in weights.items()
    }
    moves = [
        _move(masters.get(key, weights[key]), piece, prefixes.of_weight(piece.name))
        for key, found in cut.items()
        for piece in found
    ]
    parameters: dict[str, list[Piece]] = {}
    for piece in chain.from_iterable(cut.values()):
        parameters.setdefault(piece.parameter, []).append(piece)
    assignment, values = Assignment({}), list[Value]()
    if not options.weights_only:
        moves += _state_moves(sorted_in, cut, prefixes)
        optimised = {piece.parameter for key in sorted_in.with_state() for piece in cut[key]}
        how = options.groups or (INFER if options.param_to_group is None else MAP)
        about = [Parameter(name, own[0].parameter_ndim, name in optimised) for name, own in parameters.items()]
        assignment = assign(about, source.common.groups, how, options.param_to_group)
        stepless = optimised if "step" not in sorted_in.states else set()
        values = _group_values(parameters, assignment, stepless, source.common, prefixes)
    members = _members(parameters, assignment)
    values += flatten(source.common.output_tree(options.weights_only, members))
    object_values, object_dropped, object_notes = _objects(source, options)
    values += object_values
    targets = Counter([move.target for move in moves] + [value.target for value in values])
    twice = [target for target, count in targets.items() if count > 1]
    if twice:
        raise CheckpointError(f"several tensors of the checkpoint would become {some_of(twice)}; it contradicts itself")
    notes = [*_notes(sorted_in, source.common, options), *assignment.notes, *object_notes]
    dropped = (*sorted_in.dropped, *object_dropped)
    return ConversionPlan(tuple(moves), tuple(values), dropped, tuple(notes), gating.decisions)


@dataclass
class _Sorted:
    """Source tensors by kind: model key -> weight, slot -> model key -> state."""

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    states: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    buckets: bool = False

    def with_state(self) -> set[str]:
        """Return the model keys of parameters that were optimised."""
        return {key for states in self.states.values() for key in states}


def _sort(source: Content, options: ConvertOptions) -> _Sorted:
    result, unknown = _Sorted(), []
    states: list[tuple[str, str, TensorEntry]] = []
    for entry in source.entries:
        name = parse_tensor_key(entry.key)
        if "._extra_state" in entry.key:
            result.dropped.append(Dropped(entry.key, "state of Transformer Engine, which fsdp_dtensor never stores"))
        elif is_bucket_space(entry.key):
            result.buckets = True
            result.dropped.append(Dropped(entry.key, "optimizer state by buckets"))
        elif name is None and options.weights_only and entry.key.startswith(("optimizer.", "chained_")):
            result.dropped.append(Dropped(entry.key, "--weights-only"))
        elif name is None:
            unknown.append(entry.key)
        elif name[1] is None:
            result.weights[name[0]] = entry
        else:
            states.append((name[1], name[0], entry))
    known = (COMMON, RNG, RERUN)
    objects = [key for key in source.object_keys if parse_object_key(key)[0] not in known]
    unknown += [key for key in objects if "._extra_state" not in key and not is_bucket_space(key)]
    unknown += [entry.key for _, key, entry in states if key not in result.weights]
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds keys that this converter does not know: {some_of(sorted(unknown), 30)}; they are "
            "neither parameters nor optimizer state of any, and guessing would lose them"
        )
    if (result.buckets or source.common.is_bucket_space) and not options.weights_only:
        raise CheckpointError(
            "the optimizer state is laid out by communication buckets (dp_reshardable), which do not say whose state "
            "it is; save again with --dist-ckpt-optim-fully-reshardable, or convert with --weights-only"
        )
    for slot, key, entry in states:
        weight = result.weights[key]
        is_scalar = slot != _MASTER and entry.shape == weight.shape[: leading_axes(weight.key)]
        if entry.shape != weight.shape and not is_scalar:
            raise CheckpointError(
                f"{entry.key} has shape {entry.shape}, but {weight.key} has {weight.shape}; they belong together"
            )
        result.states.setdefault(slot, {})[key] = entry
    return result


def _move(entry: TensorEntry, piece: Piece, path: KeyPath) -> Move:
    return Move(entry.key, piece.offsets, piece.lengths, path, piece.shape, entry.dtype)


def _state_moves(found: _Sorted, cut: Mapping[str, Sequence[Piece]], prefixes: Prefixes) -> Iterator[Move]:
    for slot, states in found.states.items():
        for key, entry in states.items() if slot != _MASTER else ():
            for piece in cut[key]:
                path = prefixes.of_state(piece.name, slot)
                if entry.shape == found.weights[key].shape:
                    yield _move(entry, piece, path)
                else:  # one number for each layer's, each expert's parameter
                    index = piece.offsets[: len(entry.shape)]
                    yield Move(entry.key, index, (1,) * len(index), path, (), entry.dtype)


def _group_values(
    parameters: Mapping[str, Sequence[Piece]],
    assignment: Assignment,
    stepless: Collection[str],
    common: CommonState,
    prefixes: Prefixes,
) -> list[Value]:
    """List the fields of each parameter's group, and its step, which torch's optimizers keep per parameter."""
    values: list[Value] = []
    for name, cut in parameters.items():
        group = assignment.group_of.get(name)
        if group is not None:
            for spelling in _spellings(name, cut):
                path = prefixes.of_group(spelling)
                values += [Value((*path, *v.path), v.value) for v in flatten(common.groups[group])]
        step = common.step_of(group) if name in stepless else None
        if step is not None:
            values += [Value(prefixes.of_state(piece.name, "step"), torch.tensor(step)) for piece in cut]
    return values


def _members(parameters: Mapping[str, Sequence[Piece]], assignment: Assignment) -> dict[int, list[str]]:
    members: dict[int, list[str]] = {}
    for name, group in assignment.group_of.items():
        members.setdefault(group, []).extend(f"module.{spelling}" for spelling in _spellings(name, parameters[name]))
    return members


def _spellings(name: str, cut: Sequence[Piece]) -> list[str]:
    """List the names under which a map may have a parameter: whole, or as two halves."""
    return list(dict.fromkeys([name, *(piece.name for piece in cut)]))


def _objects(source: Content, options: ConvertOptions) -> tuple[list[Value], list[Dropped], list[str]]:
    values: list[Value] = []
    dropped: list[Dropped] = []
    kept: set[str] = set()
    for key in source.object_keys:
        kind, content = parse_object_key(key)[0], source.objects.get(key)
        if kind == COMMON:
            continue
        if kind not in (RNG, RERUN):
            why = "optimizer state by buckets" if is_bucket_space(key) else "state of Transformer Engine"
            dropped.append(Dropped(key, why))
        elif options.weights_only:
            dropped.append(Dropped(key, "--weights-only"))
        elif content is None:
            dropped.append(Dropped(key, "one of several ranks' states; the ranks of the new run are others"))
        elif kind == RNG and (not isinstance(content, list) or len(content) != 1):
            dropped.append(Dropped(key, "states of several data-parallel ranks; the ranks of the new run are others"))
        elif kind == RNG:
            values += flatten({"rng_state": {"(0, 0)": content}})
            kept.add(RNG)
        else:
            values += flatten({"rerun_state_machine": {"sharded": content}})
    has_rng = any(d.key.startswith(RNG) for d in dropped)
    without = has_rng and RNG not in kept and not options.weights_only
    return values, dropped, ["random generators are left behind: load with --no-load-rng"] if without else []


def _notes(found: _Sorted, common: CommonState, options: ConvertOptions) -> Iterator[str]:
    if options.weights_only:
        yield "weights only: load with --no-load-optim --no-load-rng"
        return
    if not found.states:
        yield "the checkpoint holds no optimizer state: load with --no-load-optim"
    if _MASTER in found.states and options.masters != FP32:
        yield "weights are the model's, rounded; the fp32 master weights are left behind (--masters model)"
    elif _MASTER not in found.states and not common.is_fp32:
        yield "the checkpoint holds no fp32 master weights; weights are the model's"
    lacking = sorted(found.with_state() - found.states.get(_MASTER, {}).keys()) if _MASTER in found.states else []
    if lacking and options.masters == FP32:
        yield f"no fp32 master weights of {some_of(lacking)}; these are the model's"
    has_step = "step" in found.states or any(common.step_of(index) is not None for index in range(len(common.groups)))
    if found.states and not has_step:
        yield "the checkpoint does not say how many steps the optimizer has made; none are written"
