"""The plan of a pass: which tensors of a model become which tensors on the wire, in which order and buckets."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.folder import whole_box
from megatron_fsdp.checkpoint.hf.live import (
    FileTensor,
    KeyMapping,
    LiveTensor,
    base_tensors,
    file_tensors,
    map_keys,
)
from megatron_fsdp.checkpoint.hf.saving import saved_tensors
from megatron_fsdp.checkpoint.rearranged import Part
from megatron_fsdp.comm.agreement import Groups, gather_over, rank_of
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.sharding.expert_plan import parse_expert
from megatron_fsdp.state.gathers import Parts, Place, parts_of
from megatron_fsdp.weights.adapters import Merge, adapter_tensors, merges_of

Dtypes = torch.dtype | Mapping[str, torch.dtype] | None


@dataclass(frozen=True)
class ParamMeta:
    """One tensor of a pass: its name and whole shape in a checkpoint, and its dtype on the wire."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Choice:
    """The arguments of a source that decide about names, dtypes and buckets."""

    dtype: Dtypes
    names: str | KeyMapping
    tied: str
    experts: str
    adapters: str
    include: str | Callable[[str], bool] | None
    buffers: bool
    values: str
    bucket_bytes: int


@dataclass(frozen=True)
class Wire:
    """One tensor on the wire, and the boxes of model tensors that it consists of."""

    meta: ParamMeta
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Source:
    """One tensor of the model as this rank holds it, and the dtype in which it is gathered."""

    names: tuple[str, ...]  # over all ranks; several where the ranks of `parts` hold tensors of their own
    shape: tuple[int, ...]  # of each, over all ranks
    tensor: torch.Tensor
    dtype: torch.dtype
    place: tuple[Engine, ParameterGroup, int] | None = None  # None for a tensor that no engine of ours has sharded
    parts: Parts | None = None
    receiver: int | None = None  # global rank; None: all
    merges: tuple[tuple[Merge, Mapping[str, Source]], ...] = ()  # adapters to add, with their factors by attribute

    @property
    def kind(self) -> tuple[object, ...]:
        """Sources of one kind are gathered together."""
        group = id(self.tensor) if self.place is None else id(self.place[1])
        return group, self.dtype, self.parts is not None

    @property
    def gathered(self) -> tuple[object, ...]:
        """The arguments of its gather, which are the same on every rank."""
        return len(self.names), self.shape, self.dtype, self.receiver

    @property
    def gathered_bytes(self) -> int:
        """Bytes beside the model while it is gathered; parts are put together beside each other."""
        times = 1 if self.parts is None else 2
        own = times * len(self.names) * math.prod(self.shape) * self.dtype.itemsize
        return own * (3 if self.merges else 1) + sum(each.gathered_bytes for each in self.factors)

    @property
    def factors(self) -> tuple[Source, ...]:
        """The factors of its adapters, to be gathered with it."""
        return tuple(replace(each, receiver=self.receiver) for _, held in self.merges for each in held.values())

    @property
    def mesh_key(self) -> tuple[int, int]:
        """The number of the group's rank mesh, and of its engine's ranks: the same on every rank."""
        assert self.place is not None
        engine, group, _ = self.place
        return engine.rank_meshes.index(group.plan.rank_mesh), group.plan.rank_mesh.num_ranks


@dataclass(frozen=True)
class Plan:
    """All tensors of a pass in their order, and the sources of each bucket."""

    wires: tuple[Wire, ...]
    buckets: tuple[tuple[Source, ...], ...]
    feeds: Mapping[str, Sequence[tuple[Wire, Part]]]  # by name of a model tensor
    places: Mapping[int, Mapping[tuple[int, int], Place]]  # by global rank, then by `mesh_key`
    holders: Mapping[str, int | None]  # the receiver by name on the wire

    @property
    def metas(self) -> list[ParamMeta]:
        """The metadata."""
        return [wire.meta for wire in self.wires]

    @property
    def facts(self) -> dict[str, str]:
        """The facts that ranks compare: they have to be the same on all of them."""
        factors = sum(len(source.factors) for bucket in self.buckets for source in bucket)
        gathers = [[(*each.gathered, [f.gathered for f in each.factors]) for each in of] for of in self.buckets]
        return {
            "names, dtypes and shapes": _digest([(*vars(meta).values(),) for meta in self.metas]),
            "the plan": f"{len(self.buckets)} gathers with {factors} factors of adapters ({_digest(gathers)})",
        }


def _digest(facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


# ---- names -----------------------------------------------------------------------------------------------------------


def _layer_of(name: str) -> tuple[str, int] | None:
    """Return the prefix and number of the outermost numbered module of a name."""
    parts = name.split(".")
    at = next((at for at, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else (".".join(parts[:at]), int(parts[at]))


def layerwise_groups(names: Iterable[str]) -> list[list[str]]:
    """Group names by layer, as vLLM does: those before and those after the layers are a group each."""
    first: list[str] = []
    last: list[str] = []
    layers: dict[str, dict[int, list[str]]] = {}
    for name in names:
        layer = _layer_of(name)
        if layer is None:
            (last if layers else first).append(name)
        else:
            layers.setdefault(layer[0], {}).setdefault(layer[1], []).append(name)
    numbered = [of_prefix[number] for of_prefix in layers.values() for number in sorted(of_prefix)]
    return [group for group in (first, *numbered, last) if group]


def wire_dtype(dtypes: Dtypes, name: str, own: torch.dtype) -> torch.dtype:
    """Return the dtype of a tensor on the wire."""
    if not own.is_floating_point:
        return own
    if isinstance(dtypes, Mapping):
        return next((dtype for pattern, dtype in dtypes.items() if re.search(pattern, name)), torch.bfloat16)
    return dtypes or own


def _described(module: Any, live: Sequence[LiveTensor], choice: Choice, shapes: Shapes) -> dict[str, FileTensor]:
    """Return the tensors of the wire by name, before they are renamed or left out."""
    aliases: dict[str, str] = {}
    if choice.tied == "all":
        aliases = {alias: tensor.name for tensor in live for alias in tensor.aliases if tensor.name in shapes}
    every = {**shapes, **{alias: shapes[name] for alias, name in aliases.items()}}
    found = {name: FileTensor.of(name, shape) for name, shape in every.items()}
    if choice.names != "model":
        stored = file_tensors(module, every)
        if choice.experts == "fused":
            divided = {
                part.key
                for tensor in stored.values()
                for part in tensor.parts
                if len(tensor.parts) > 1 or part.source != whole_box(every[part.key])
            }
            stored = {key: tensor for key, tensor in stored.items() if not tensor.names & divided}
            stored |= {name: tensor for name, tensor in found.items() if name in divided}
        found = stored
    return {
        key: replace(tensor, parts=tuple(replace(part, key=aliases.get(part.key, part.key)) for part in tensor.parts))
        for key, tensor in found.items()
    }


Shapes = Mapping[str, tuple[int, ...]]


def _choose(tensors: Mapping[str, FileTensor], choice: Choice) -> dict[str, FileTensor]:
    """Rename tensors, and leave those out that are not included."""
    try:
        renamed = map_keys(tensors, None if isinstance(choice.names, str) else choice.names)
    except (CheckpointError, ConfigurationError) as error:
        raise ConfigurationError(str(error).replace("key_mapping", "names", 1)) from None
    include = choice.include
    is_wanted = re.compile(include).search if isinstance(include, str) else include
    chosen = {name: tensors[key] for name, key in renamed.items() if is_wanted is None or is_wanted(name)}
    if not chosen:
        raise ConfigurationError(f"include={include!r} leaves no tensor; there are such as {', '.join([*renamed][:3])}")
    return chosen


# ---- the plan --------------------------------------------------------------------------------------------------------


def make_plan(module: nn.Module, choice: Choice, groups: Groups, receivers: Sequence[int] | None) -> Plan:
    """Plan a pass over an unwrapped model; collective where experts are divided, or not all ranks get all tensors.

    `receivers` are global ranks that share the tensors; None: every rank gets all.
    """
    live, describe, merges = _live_tensors(module, choice)
    sources = [replace(_source(each), merges=_with_factors(merges.get(id(each.tensor), ()))) for each in live]
    sources = _numbered_over_ranks(sources, groups)
    own = {name: source for source in sources for name in source.names}
    shapes = {name: source.shape for name, source in own.items()}
    wires, feeds = dict[str, Wire](), dict[str, list[tuple[Wire, Part]]]()
    for name, tensor in _choose(describe(shapes), choice).items():
        dtypes = {own[part.key].tensor.dtype for part in tensor.parts}
        if len(dtypes) != 1:
            raise ConfigurationError(f"{name} consists of tensors of several dtypes: {sorted(map(str, dtypes))}")
        wires[name] = Wire(ParamMeta(name, wire_dtype(choice.dtype, name, dtypes.pop()), tensor.shape), tensor.parts)
        for part in tensor.parts:
            feeds.setdefault(part.key, []).append((wires[name], part))
    used = [
        replace(source, dtype=_gathered_dtype(source, fed(source, feeds), choice.values))
        for source in _in_order(sources, wires, feeds)
    ]
    if receivers is not None:
        used = _shared_out(used, feeds, receivers)
    holders = dict[str, int | None]()
    for source in used:
        for wire in fed(source, feeds):
            if holders.setdefault(wire.meta.name, source.receiver) != source.receiver:
                raise ConfigurationError(
                    f'{wire.meta.name} is made of tensors of several layers; give one rank as destination, or "all"'
                )
    everything = [each for source in used for each in (source, *source.factors)]
    coordinates = {each.mesh_key: _place_of(each.place[1]) for each in everything if each.place is not None}
    places = {} if receivers is None else dict(gather_over(groups, (rank_of(), coordinates)))
    plan = Plan((), tuple(_buckets(used, choice.bucket_bytes)), feeds, places, holders)
    sent = tuple(wire for bucket in plan.buckets for wire, _ in complete(plan, bucket, None, {}))
    names = [wire.meta.name for wire in sent]
    if [name for layer in layerwise_groups(names) for name in layer] != names:
        raise ConfigurationError(
            "the names do not follow the model's layers, by which engines load weights; let names= keep the number of "
            "a layer"
        )
    return replace(plan, wires=sent)


def _live_tensors(
    module: Any, choice: Choice
) -> tuple[list[LiveTensor], Callable[[Shapes], dict[str, FileTensor]], Mapping[int, Sequence[Merge]]]:
    """Return the tensors to send, their counterparts on the wire by shapes, and adapters by id of their tensor."""
    is_peft = bool(getattr(module, "peft_config", None))
    if is_peft and choice.adapters == "refuse":
        raise ConfigurationError(
            'the model has adapters; give adapters="merged" for base weights with the adapters added, or '
            'adapters="only" for the adapters alone'
        )
    if choice.adapters == "only":
        live, described = adapter_tensors(module)
        return live, lambda _: described, {}
    base, live = base_tensors(module) if is_peft else (module, saved_tensors(module))
    live = [tensor for tensor in live if tensor.is_parameter or choice.buffers]
    return live, partial(_described, base, live, choice), merges_of(base) if is_peft else {}


def _with_factors(merges: Sequence[Merge]) -> tuple[tuple[Merge, Mapping[str, Source]], ...]:
    """Find the factors of adapters among the groups of their engine."""
    found = []
    for merge in merges:
        live = {attribute: LiveTensor(f"{id(factor)}", (), factor, True) for attribute, factor in merge.factors.items()}
        found.append((merge, {attribute: _source(each) for attribute, each in live.items()}))
    return tuple(found)


def _source(live: LiveTensor) -> Source:
    """Find a tensor among the groups of its engine, and the shards of it on other ranks."""
    tensor = live.tensor
    if tensor.device.type == "meta":
        raise ConfigurationError(f"{live.name} is on the meta device; initialise the model first")
    is_plain = isinstance(tensor, DTensor) or type(tensor) in (nn.Parameter, nn.Buffer, torch.Tensor)
    if not is_plain or (live.is_parameter and not tensor.is_floating_point()):
        raise ConfigurationError(
            f"{live.name} is a {type(tensor).__name__} of {tensor.dtype}, a quantised weight without a dense value; "
            'send adapters alone (adapters="only"), or leave it out by include='
        )
    reference = getattr(tensor, "_fsdp_engine", None)
    engine: Engine | None = None if reference is None else reference()
    if engine is None:
        return Source((live.name,), tuple(tensor.shape), tensor, tensor.dtype)
    group, index = engine.group_and_index[id(tensor)]
    problem = group.shard_specs[index].problem
    if problem is not None and group.names[index] not in engine.expert_names.specs:
        raise ConfigurationError(problem)
    source = Source(
        (live.name,), tuple(tensor.shape), tensor, tensor.dtype, (engine, group, index), parts_of(group, index)
    )
    if engine.expert_names.is_trivial or not group.plan.rank_mesh.foreign_groups:
        return source
    if source.parts is not None or len(group.plan.rank_mesh.foreign_groups) > 1:
        raise ConfigurationError(
            f"{live.name} is an expert's and cut along several dimensions of a mesh; send models whose experts are "
            "divided along one"
        )
    return source


def _numbered_over_ranks(sources: Sequence[Source], groups: Groups) -> list[Source]:
    """Give experts that are divided over ranks the parts and names of all ranks; collective where there are any."""
    divided = {
        source.names[0]: (*source.place, group)
        for source in sources
        if source.place is not None and source.place[0].expert_names.plan is not None
        for group in source.place[1].plan.rank_mesh.foreign_groups
    }
    if not divided:
        return list(sources)
    everywhere = dict[str, str]()  # this rank's experts, by their name here
    for name, (engine, group, index, _) in divided.items():
        here, mine = parse_expert(name), parse_expert(engine.expert_names.name_of(group.names[index]))
        everywhere[name] = name if here is None or mine is None else here.at(mine.index)
    of_ranks = dict(gather_over(groups, (rank_of(), everywhere)))
    found = []
    for source in sources:
        if source.names[0] in divided:
            engine, group, index, expert_group = divided[source.names[0]]
            ranks, mesh_dim = dist.get_process_group_ranks(expert_group), len(_place_of(group)) - 1
            names = tuple(of_ranks[rank][source.names[0]] for rank in ranks)
            assert engine.expert_names.plan is not None
            edges = engine.expert_names.plan.stacks.get(group.names[index])
            if edges is not None:
                rest = source.shape[1:]
                shapes = tuple((stop - start, *rest) for start, stop in pairwise(edges))
                parts, shape = Parts(expert_group, mesh_dim, 0, shapes), (edges[-1], *rest)
                source = replace(source, parts=parts, shape=shape)
            elif len(set(names)) > 1:
                source = replace(
                    source, names=names, parts=Parts(expert_group, mesh_dim, None, (source.shape,) * len(ranks))
                )
        found.append(source)
    return found


def _place_of(group: ParameterGroup) -> Place:
    """Return this rank's coordinates on the mesh of a group, and its number among ranks with other experts."""
    return (*group.shard_specs[0].description.coordinate, *map(dist.get_rank, group.plan.rank_mesh.foreign_groups))


def fed(source: Source, feeds: Mapping[str, Sequence[tuple[Wire, Part]]]) -> list[Wire]:
    """List the tensors of the wire that are made of a source."""
    return [wire for name in source.names for wire, _ in feeds.get(name, ())]


def _in_order(
    sources: Sequence[Source], wires: Mapping[str, Wire], feeds: Mapping[str, Sequence[tuple[Wire, Part]]]
) -> list[Source]:
    """Sort sources layer by layer, after those without a number; inside of a layer as files list them."""
    layers = {name: at for at, layer in enumerate(layerwise_groups(wires)) for name in layer}
    at_name = {name: at for at, name in enumerate(wires)}

    def order(source: Source) -> tuple[int, int]:
        names = [wire.meta.name for wire in fed(source, feeds)]
        layer = min(-1 if _layer_of(name) is None else layers[name] for name in names)
        return layer, min(map(at_name.__getitem__, names))

    return sorted((source for source in sources if fed(source, feeds)), key=order)


def _gathered_dtype(source: Source, fed: Sequence[Wire], values: str) -> torch.dtype:
    """Return the dtype to gather in: a cast before the gather gives the same bits, and no more bytes."""
    own = source.tensor.dtype
    if source.place is not None and values == "computed":
        return source.place[1].plan.precision.compute
    wanted = {wire.meta.dtype for wire in fed} if not source.merges else {own}
    dtype = wanted.pop() if len(wanted) == 1 else own
    return dtype if dtype.itemsize <= own.itemsize else own


def _shared_out(
    sources: Sequence[Source], feeds: Mapping[str, Sequence[tuple[Wire, Part]]], receivers: Sequence[int]
) -> list[Source]:
    """Give each layer to the receiver that has the fewest bytes so far."""
    given, found = dict.fromkeys(receivers, 0), list[Source]()
    for _, run in groupby(sources, key=lambda source: _layer_of(fed(source, feeds)[0].meta.name)):
        layer = list(run)
        chosen = min(given, key=given.__getitem__)
        given[chosen] += sum(wire.meta.nbytes for source in layer for wire in fed(source, feeds))
        found += [replace(source, receiver=chosen) for source in layer]
    return found


def _buckets(sources: Iterable[Source], bucket_bytes: int) -> Iterator[tuple[Source, ...]]:
    """Group sources of one receiver into buckets of half the bytes, for a caller may hold a tensor of the last one."""
    taken: list[Source] = []
    filled = 0
    for source in sources:
        is_full = filled + source.gathered_bytes > bucket_bytes // 2
        if taken and (is_full or source.receiver != taken[0].receiver):
            yield tuple(taken)
            taken, filled = [], 0
        taken.append(source)
        filled += source.gathered_bytes
    if taken:
        yield tuple(taken)


# ---- from model tensors to tensors of the wire -----------------------------------------------------------------------

Pending = dict[str, tuple[torch.Tensor | None, int]]
"""By name, each unfinished tensor of the wire: its memory (None where this rank gets none), and its missing parts."""


def complete(
    plan: Plan,
    bucket: Sequence[Source],
    full: dict[str, torch.Tensor] | None,
    pending: Pending,
    only: Collection[str] | None = None,
) -> Iterator[tuple[Wire, torch.Tensor | None]]:
    """Iterate over the tensors of the wire that a bucket completes; None for each where nothing was gathered here.

    `full` are the model tensors by name, taken out one after another; `only`: names to go by, None: all.
    """
    for name in (name for source in bucket for name in source.names):
        tensor = None if full is None else full.pop(name)
        for wire, part in plan.feeds.get(name, ()):
            if only is not None and wire.meta.name not in only:
                continue
            made, left = pending.pop(wire.meta.name, (None, len(wire.parts)))
            if tensor is not None:
                value = tensor[part.source.indices]
                if len(wire.parts) == 1:
                    made = value.reshape(wire.meta.shape).to(wire.meta.dtype).contiguous()
                else:
                    made = tensor.new_empty(wire.meta.shape, dtype=wire.meta.dtype) if made is None else made
                    made[part.target.indices].copy_(value.reshape(part.target.lengths))
            if left > 1:
                pending[wire.meta.name] = made, left - 1
            else:
                yield wire, made
