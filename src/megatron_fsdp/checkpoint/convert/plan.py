"""Plan a conversion: the source's entries that are written, moved and dropped."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict

from megatron_fsdp.checkpoint.convert.groups import INFER, MAP, NO_GROUPS, Parameter, assign
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


class _Written:
    """An entry that is written under the key of its path."""

    __slots__ = ()
    path: KeyPath

    @property
    def target(self) -> str:
        """The key in the output: the path's steps, joined as by DCP."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Move(_Written):
    """A box of a source tensor, in its true shape, that becomes a whole output tensor without its leading 1s."""

    source: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    path: KeyPath
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Value(_Written):
    """An object, or a tensor without a source box, that is written as it is."""

    path: KeyPath
    value: Any


@dataclass(frozen=True, slots=True)
class Dropped:
    """A key of the source that is not in the output, and the reason."""

    key: str
    why: str


def flatten(tree: Mapping[str, Any]) -> list[Value]:
    """List the leaves of a nested dict, flattened as by DCP: only lists of dicts or tensors are walked."""
    values: list[Value] = []
    traverse_state_dict(dict(tree), lambda path, value: values.append(Value(path, value)))
    return values


@dataclass(frozen=True)
class CommonState:
    """The common state; of it the groups of all optimizers, without members, and the step beside them."""

    tree: Mapping[str, Any] = field(default_factory=dict)
    groups: tuple[Mapping[str, Any], ...] = ()
    common_step: float | None = None

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> CommonState:
        """Read the groups and the step from a common dict."""
        groups: list[Mapping[str, Any]] = []
        common_step = None
        for part in _optimizer_parts(tree.get("optimizer")):
            found, state = part.get("param_groups", ()), part.get("state")
            if not isinstance(found, Sequence) or not all(isinstance(group, Mapping) for group in found):
                raise CheckpointError(
                    "the optimizer's param_groups are not a list of dicts; the common state is damaged"
                )
            groups += [{key: value for key, value in group.items() if key != "params"} for group in found]
            step = state.get("common_step") if isinstance(state, Mapping) else None
            common_step = float(step) if common_step is None and step is not None else common_step
        return cls(tree, tuple(groups), common_step)

    def argument(self, name: str) -> Any:
        """Return `args.<name>`; None if the checkpoint has none."""
        args = self.tree.get("args")
        return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)

    @property
    def is_bucket_space(self) -> bool:
        """True if the optimizer state is laid out by communication buckets, according to the common state."""
        said = self.tree.get("content_metadata")
        return isinstance(said, Mapping) and said.get("distrib_optim_sharding_type") in BUCKET_KINDS

    @property
    def is_fp32(self) -> bool:
        """True if the run had no half-precision wrapper around its model, according to its arguments."""
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
    """Yield the dicts of one optimizer and its wrapper, or of several (numbered), from the outside in."""
    if isinstance(tree, Mapping):
        yield tree
        if "param_groups" not in tree:
            numbered = sorted((int(key), inner) for key, inner in tree.items() if str(key).isdigit())
            for inner in [tree["optimizer"]] if "optimizer" in tree else [inner for _, inner in numbered]:
                yield from _optimizer_parts(inner)


# ---- options --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvertOptions:
    """The options of a conversion; the defaults suit a half-precision run that Megatron itself resumes.

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
        state = options.optimizer_prefix or _STATE + ".module" * (2 if is_fp32 else 3)
        wrappers = state.removeprefix(_STATE) if state.startswith(_STATE) else ""
        # The steps to a weight: the top-level key, then the name in the model's own state dict.
        self.of_weight = partial(_steps, options.model_prefix, 1)
        self.of_state = partial(_steps, state, 2)  # to a parameter's optimizer state
        self.of_group = partial(_steps, options.group_prefix or _META + wrappers, 2)  # to the fields of its group


def _steps(prefix: str, nested: int, name: str) -> KeyPath:
    parts = prefix.split(".")
    return (*parts[:nested], ".".join([*parts[nested:], name]))


@dataclass(frozen=True)
class Content:
    """The source of a plan: all tensors in their true shapes, and the objects of `needed_objects`."""

    entries: Sequence[TensorEntry]
    object_keys: Sequence[str]
    common: CommonState
    objects: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ConversionPlan:
    """The moves and values of a conversion, the dropped entries, and notes."""

    moves: tuple[Move, ...]
    values: tuple[Value, ...]
    dropped: tuple[Dropped, ...]
    notes: tuple[str, ...]
    gating: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """The bytes of all moves."""
        return sum(move.nbytes for move in self.moves)


def needed_objects(object_keys: Iterable[str]) -> list[str]:
    """List the objects whose content a plan needs: those that are the only one of their grid."""
    return [key for key in object_keys if parse_object_key(key) in ((RNG, True), (RERUN, True))]


def make_plan(source: Content, options: ConvertOptions) -> ConversionPlan:
    """Plan a conversion to `fsdp_dtensor`."""
    found, common = _sort(source, options), source.common
    shapes = {key: entry.shape for key, entry in found.weights.items()}
    gated, reasons = decide_gating(shapes, options.swiglu, common.argument("swiglu"))
    cut = {key: list(pieces(key, shape, key in gated, options.rename_mtp)) for key, shape in shapes.items()}
    prefixes = Prefixes(options, common.is_fp32)
    masters = found.states.get(_MASTER, {}) if options.masters == FP32 else {}
    moves = [
        _move(masters.get(key, found.weights[key]), piece, prefixes.of_weight(piece.name))
        for key, own in cut.items()
        for piece in own
    ]
    notes = list(_notes(found, common, options))
    values: list[Value] = []
    members: dict[int, list[str]] = {}
    if not options.weights_only:
        moves += _state_moves(found, cut, prefixes)
        values, members, more = _of_parameters(found, cut, common, options)
        notes += more
    values += flatten(common.output_tree(options.weights_only, members))
    values += _objects(source, options, found.dropped, notes)
    targets = Counter(written.target for written in (*moves, *values))
    twice = [target for target, count in targets.items() if count > 1]
    if twice:
        raise CheckpointError(f"several tensors of the checkpoint would become {some_of(twice)}; it contradicts itself")
    return ConversionPlan(tuple(moves), tuple(values), tuple(found.dropped), tuple(notes), reasons)


@dataclass
class _Sorted:
    """The source tensors by kind: model key -> weight, slot -> model key -> state."""

    weights: dict[str, TensorEntry] = field(default_factory=dict)
    states: dict[str, dict[str, TensorEntry]] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)


def _sort(source: Content, options: ConvertOptions) -> _Sorted:
    found, unknown, states, has_buckets = _Sorted(), [], list[tuple[str, str, TensorEntry]](), False
    for entry in source.entries:
        name = parse_tensor_key(entry.key)
        if "._extra_state" in entry.key:
            found.dropped.append(Dropped(entry.key, "state of Transformer Engine, which fsdp_dtensor never stores"))
        elif is_bucket_space(entry.key):
            has_buckets = True
            found.dropped.append(Dropped(entry.key, "optimizer state by buckets"))
        elif name is None and options.weights_only and entry.key.startswith(("optimizer.", "chained_")):
            found.dropped.append(Dropped(entry.key, "--weights-only"))
        elif name is None:
            unknown.append(entry.key)
        elif name[1] is None:
            found.weights[name[0]] = entry
        else:
            states.append((name[1], name[0], entry))
    objects = [key for key in source.object_keys if parse_object_key(key)[0] not in (COMMON, RNG, RERUN)]
    unknown += [key for key in objects if "._extra_state" not in key and not is_bucket_space(key)]
    unknown += [entry.key for _, key, entry in states if key not in found.weights]
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds keys that this converter does not know: {some_of(sorted(unknown), 30)}; they are "
            "neither parameters nor optimizer state of any, and guessing would lose them"
        )
    if (has_buckets or source.common.is_bucket_space) and not options.weights_only:
        raise CheckpointError(
            "the optimizer state is laid out by communication buckets (dp_reshardable), which do not say whose state "
            "it is; save again with --dist-ckpt-optim-fully-reshardable, or convert with --weights-only"
        )
    for slot, key, entry in states:
        weight = found.weights[key]
        is_scalar = slot != _MASTER and entry.shape == weight.shape[: leading_axes(weight.key)]
        if entry.shape != weight.shape and not is_scalar:
            raise CheckpointError(
                f"{entry.key} has shape {entry.shape}, but {weight.key} has {weight.shape}; they belong together"
            )
        found.states.setdefault(slot, {})[key] = entry
    return found


def _move(entry: TensorEntry, piece: Piece, path: KeyPath) -> Move:
    return Move(entry.key, piece.offsets, piece.lengths, path, piece.shape, entry.dtype)


def _state_moves(found: _Sorted, cut: Mapping[str, Sequence[Piece]], prefixes: Prefixes) -> Iterator[Move]:
    for slot, states in found.states.items():
        for key, entry in states.items() if slot != _MASTER else ():
            for piece in cut[key]:
                path = (*prefixes.of_state(piece.name), slot)
                if entry.shape == found.weights[key].shape:
                    yield _move(entry, piece, path)
                else:  # one number for each layer's, each expert's parameter
                    index = piece.offsets[: len(entry.shape)]
                    yield Move(entry.key, index, (1,) * len(index), path, (), entry.dtype)


def _of_parameters(
    found: _Sorted, cut: Mapping[str, Sequence[Piece]], common: CommonState, options: ConvertOptions
) -> tuple[list[Value], dict[int, list[str]], Sequence[str]]:
    """Return the fields of each parameter's group and its step, the members of each group, and notes."""
    parameters: dict[str, list[Piece]] = {}
    for piece in chain.from_iterable(cut.values()):
        parameters.setdefault(piece.parameter, []).append(piece)
    optimised = {piece.parameter for states in found.states.values() for key in states for piece in cut[key]}
    about = [Parameter(name, len(own[0].shape), name in optimised) for name, own in parameters.items()]
    how = options.groups or (INFER if options.param_to_group is None else MAP)
    assignment, prefixes = assign(about, common.groups, how, options.param_to_group), Prefixes(options, common.is_fp32)
    values: list[Value] = []
    members: dict[int, list[str]] = {}
    for name, own in parameters.items():
        group = assignment.group_of.get(name)
        if group is not None:
            spellings = dict.fromkeys([name, *(piece.name for piece in own)])  # a map may have it whole, or as halves
            members.setdefault(group, []).extend(f"module.{spelling}" for spelling in spellings)
            fields = flatten(common.groups[group])
            values += [Value((*prefixes.of_group(each), *v.path), v.value) for each in spellings for v in fields]
        step = common.step_of(group) if name in optimised and "step" not in found.states else None
        if step is not None:  # torch's optimizers keep one for each parameter
            values += [Value((*prefixes.of_state(piece.name), "step"), torch.tensor(step)) for piece in own]
    return values, members, assignment.notes


def _objects(source: Content, options: ConvertOptions, dropped: list[Dropped], notes: list[str]) -> Iterator[Value]:
    """Yield the values of objects, and record the others in `dropped`."""
    has_rng = loses_rng = False
    for key in source.object_keys:
        kind, content = parse_object_key(key)[0], source.objects.get(key)
        if kind == COMMON:
            continue
        if kind not in (RNG, RERUN):
            why = "optimizer state by buckets" if is_bucket_space(key) else "state of Transformer Engine"
        elif options.weights_only:
            why = "--weights-only"
        elif content is None:
            why = "one of several ranks' states; the ranks of the new run are others"
        elif kind == RNG and (not isinstance(content, list) or len(content) != 1):
            why = "states of several data-parallel ranks; the ranks of the new run are others"
        else:
            yield from flatten(
                {"rng_state": {"(0, 0)": content}} if kind == RNG else {"rerun_state_machine": {"sharded": content}}
            )
            has_rng |= kind == RNG
            continue
        dropped.append(Dropped(key, why))
        loses_rng |= key.startswith(RNG)
    if loses_rng and not has_rng and not options.weights_only:
        notes.append("random generators are left behind: load with --no-load-rng")


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
    masters = found.states.get(_MASTER, {})
    lacking = sorted({key for states in found.states.values() for key in states} - masters.keys())
    if masters and lacking and options.masters == FP32:
        yield f"no fp32 master weights of {some_of(lacking)}; these are the model's"
    has_step = "step" in found.states or any(common.step_of(index) is not None for index in range(len(common.groups)))
    if found.states and not has_step:
        yield "the checkpoint does not say how many steps the optimizer has made; none are written"
