"""Step optimizers that need whole tensors: each tensor on one rank that owns it, or all on every rank.

*Owned* (Adafactor, SOAP, Shampoo, or somebody's own): every parameter has an owner among the ranks of its mesh. For a
step the owner gets the whole parameter, the whole gradient and whole state of the parameter's shape; the code of the
optimizer's class, unchanged, runs there on plain tensors, and shards of the new parameter and state go back. Other
state (factors, preconditioners) stays with the owner, as global tensors of which the others hold nothing, so that
checkpoints have it once and any number of ranks loads it. Numbers are the same on all ranks. This is right for classes
that update a parameter from that parameter's own gradient and state, and from nothing else. A class says so with
`steps_whole_tensors`; of torch's own, Adafactor is one. With P parameters of b bytes over N ranks, a rank sends and
receives about 3 b P / N in a step, and 2 b P / N more for each state of the parameter's shape; meanwhile owners hold
these whole. The memory of messages is taken, and ranks agree that all have it, before the first is sent.

*Replicated* (LBFGS): it takes dot products over all parameters together, so it steps only where nothing is sharded
(strategy 0), on each rank alike. Its closure is called several times, and the mean of all ranks' losses (or the sum, as
of gradients) is what its searches look at, so that all ranks take the same decisions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map

from megatron_fsdp.comm.agreement import Groups, all_agree, gather_over, raise_together
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded
from megatron_fsdp.engine.gradients import show_grad, shown_grads
from megatron_fsdp.errors import ConfigurationError, RankError
from megatron_fsdp.optim.full_tensor.exchange import Exchange, Messages, Ranks, agreed, balanced_owners, holders_of
from megatron_fsdp.optim.local_step import ExchangingStep, Step, params_of, without_parameter
from megatron_fsdp.sharding.shards import ListedCut, MeshUse, ShardDescription
from megatron_fsdp.state.statistics import local_of

_DECLARED = "_megatron_fsdp_steps_whole_tensors"
Kind = TypeVar("Kind", bound=type[Optimizer])
State = dict[str, Any]


def steps_whole_tensors(kind: Kind) -> Kind:
    """Declare that a class of optimizers updates each parameter from its own whole gradient and state alone.

    Use as a decorator. Sharded parameters are then stepped whole, each by one rank. A subclass declares it itself.

    Raises:
        ConfigurationError: It is no class of optimizers, or Muon, which needs no declaration.
    """
    given: object = kind
    if not isinstance(given, type) or not issubclass(given, Optimizer):
        raise ConfigurationError(
            f"steps_whole_tensors was given {kind!r}; give a class of optimizers, not an object or a function"
        )
    if kind is torch.optim.Muon:
        raise ConfigurationError("torch.optim.Muon steps sharded matrices as it is; leave steps_whole_tensors out")
    setattr(kind, _DECLARED, kind)
    return kind


def steps_owned(optimizer: Optimizer) -> bool:
    """Return True if an optimizer is of a class that is stepped here."""
    kind = type(optimizer)
    return kind is torch.optim.Adafactor or getattr(kind, _DECLARED, None) is kind


def inherits_declaration(optimizer: Optimizer) -> bool:
    """Return True if only a base class of an optimizer is declared."""
    return not steps_owned(optimizer) and hasattr(type(optimizer), _DECLARED)


# What ranks tell each other of the state of a parameter after a step: a tree of these, and of plain values.


@dataclass(frozen=True)
class _Sharded:
    """A tensor of the parameter's shape, cut as the parameter."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Owned:
    """A tensor that only the owner rank holds."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Number:
    """A tensor without dimensions."""

    value: int | float | bool
    dtype: torch.dtype
    on_cpu: bool


@dataclass
class _Stepped:
    """A parameter in the step that is running."""

    param: UnevenDTensor
    grad: Tensor
    owner: int
    ranks: Ranks
    number: int  # its place among those of its mesh
    whole: nn.Parameter | None = None  # on its owner
    state: State | None = None  # whole, on its owner

    @property
    def is_here(self) -> bool:
        return self.owner == self.ranks.rank

    def must_move(self, value: object) -> bool:
        """Return True if the owner does not hold the whole of a state tensor."""
        if type(value) is not UnevenDTensor:
            return False
        held = value.shard_spec.description.boxes_at(self.ranks.coordinates[self.owner])
        return sum(box.numel for box in held) < math.prod(value.shape)


@dataclass(frozen=True)
class _Item:
    """A tensor to move: its parameter, its shard spec, and this rank's shard, or the full tensor on its owner."""

    of: _Stepped
    spec: ShardSpec
    dtype: torch.dtype
    tensor: Tensor | None
    is_kept: bool = False  # it stays in the memory in which it comes


class OwnedStep(ExchangingStep):
    """Steps one optimizer whose parameters are updated whole; keeps groups of ranks, and the last step's exchanges."""

    def __init__(self) -> None:
        super().__init__()
        self._ranks: dict[DeviceMesh, Ranks] = {}
        self._owned: tuple[list[ShardSpec], list[int]] = [], []  # specs of all parameters, and their owners
        self._exchanges: dict[Any, Exchange] = {}  # of this step
        self._earlier: dict[Any, Exchange] = {}
        self._running: list[_Stepped] = []  # mesh by mesh
        self._proxy: Optimizer | None = None

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Send full parameters to their owners; collective. Call `finish` after the step, or `fail`.

        Returns:
            The object on which the code of the optimizer's class is to run its step: an optimizer of this rank's own
            parameters, whole, with those attributes that the class has given it.
        """
        self._earlier, self._exchanges = self._exchanges, {}
        with torch.no_grad():
            self._running, self._begun = self._stepped(optimizer), None
            shards = [item for each in self._running for item in _shards(each, optimizer.state.get(each.param))]
            arrived = iter(self._exchanged(shards, to_owners=True))
            for each in self._running:
                _show(each, optimizer.state.get(each.param), arrived)
        groups, own = [], {id(each.param): each for each in self._running if each.is_here}
        for group in optimizer.param_groups:
            here = [own[id(param)].whole for param in group["params"] if id(param) in own]
            groups.append({**group, "params": here})
        made: Optimizer = object.__new__(type(optimizer))
        state = {each.whole: each.state for each in own.values() if each.state} | without_parameter(optimizer.state)
        made.__dict__ = {**optimizer.__dict__, "param_groups": groups, "state": defaultdict(dict, state)}
        self._proxy = made
        return made

    def finish(self, optimizer: Optimizer) -> None:
        """Send new parameters and state back to shards; collective."""
        made = self._proxy
        assert made is not None
        for each in self._running:
            if each.whole is not None:
                each.state = made.state.get(each.whole, {})
                show_grad(each.whole, None)  # room for the messages
        told = self._agreed(tells=True)
        with torch.no_grad():
            results = [item for each in self._running for item in _results(each, told[each.ranks][each.number])]
            arrived = iter(cast(list[Tensor], self._exchanged(results, to_owners=False)))
            for each in self._running:
                each.param._local_tensor.detach().copy_(next(arrived))
                mine = iter(_leaves(each.state)) if each.is_here else None
                rebuilt = functools.partial(_rebuilt, each, arrived, mine)
                optimizer.state[each.param] = _without_lists(tree_map(rebuilt, told[each.ranks][each.number]))
        optimizer.state.update(without_parameter(made.state))
        for key in made.__dict__.keys() - {"param_groups", "state"}:
            optimizer.__dict__[key] = made.__dict__[key]
        for group, shown in zip(optimizer.param_groups, made.param_groups, strict=True):
            group.update({key: value for key, value in shown.items() if key != "params"})
        self._drop()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that the step has failed here, and raise the same RankError on all; collective."""
        super().fail(error)
        self._agreed(error)
        self._drop()

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Raise the error of a hook on all ranks, which wait for shards; collective."""
        self._running, self._begun = self._stepped(optimizer), None
        self._agreed(error)

    def _agreed(self, error: BaseException | None = None, tells: bool = False) -> dict[Ranks, dict[int, Any]]:
        """All-gather owners' reports of new state over all meshes; raise on all ranks if any has failed."""
        told: dict[Ranks, dict[int, Any]] = {each.ranks: {} for each in self._running}
        for each in self._running if tells else ():
            if each.is_here:
                told[each.ranks][each.number] = _described(each.param, each.state or {})
        try:
            return agreed(told, error)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        """Drop the tensors of a step."""
        self._running, self._proxy = [], None

    def _stepped(self, optimizer: Optimizer) -> list[_Stepped]:
        """List the parameters that have a gradient, each with its owner, mesh by mesh in the order of the groups."""
        params = params_of(optimizer)
        for param in params:
            if type(param) is not UnevenDTensor:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} holds a {type(param).__name__} of shape {tuple(param.shape)} that is "
                    "not sharded; build the optimizer on the parameters of sharded models alone"
                )
        meshes = [param.shard_spec.mesh for param in params]
        for mesh in dict.fromkeys(meshes):
            self._ranks[mesh] = self._ranks.get(mesh) or Ranks(mesh)
        # Owners do not depend on which parameters have a gradient.
        specs = [param.shard_spec for param in params]
        if specs != self._owned[0]:
            costs = [math.prod(param.shape) * min(param.shape, default=1) for param in params]
            self._owned = specs, balanced_owners(meshes, costs, list(map(holders_of, specs)))
        found: dict[DeviceMesh, list[_Stepped]] = {}
        for param, grad, owner, mesh in zip(params, shown_grads(params), self._owned[1], meshes, strict=True):
            if grad is not None:
                of_mesh = found.setdefault(mesh, [])
                of_mesh.append(_Stepped(param, grad, owner, self._ranks[mesh], len(of_mesh)))
        return list(itertools.chain.from_iterable(found.values()))

    def _exchanged(self, items: Sequence[_Item], to_owners: bool) -> list[Tensor | None]:
        """Send shards to their owners, or whole tensors from there to shards; collective.

        Ranks agree that all have room for the messages before the first of them sends.

        Returns for each item this rank's shard; or the whole where this rank owns it, else None.
        """
        packed = list(self._packed(items, to_owners))
        self._agreed()
        for _, messages in packed:
            (messages.to_owners if to_owners else messages.to_shards)()
        for _, messages in packed:
            messages.wait(is_last=True)
        found: list[Tensor | None] = [None] * len(items)
        while packed:  # of which each may go
            places, messages = packed.pop()
            for index, tensor in messages.whole() if to_owners else messages.shards():
                found[places[index]] = tensor
        return found

    def _packed(self, items: Sequence[_Item], to_owners: bool) -> Iterator[tuple[list[int], Messages]]:
        """Yield messages of one mesh and dtype each, and the places of the items in them; kept items travel alone."""
        by_kind: dict[tuple[Ranks, torch.dtype, bool], list[int]] = {}
        for place, item in enumerate(items):
            by_kind.setdefault((item.of.ranks, item.dtype, item.is_kept), []).append(place)
        for (ranks, dtype, _), places in by_kind.items():
            those = [items[place] for place in places]
            key = tuple(item.spec for item in those), tuple(item.of.owner for item in those), ranks
            exchange = self._exchanges.get(key) or self._earlier.get(key) or Exchange(*key)
            self._exchanges[key] = exchange
            device = those[0].of.param.device
            here, own = (
                torch.empty(numel, dtype=dtype, device=device) for numel in (exchange.here_numel, exchange.own_numel)
            )
            messages, tensors = Messages(exchange, here, own), [item.tensor for item in those]
            if to_owners:
                messages.pack_shards(cast(list[Tensor], tensors))
            else:
                messages.pack_results({index: tensor for index, tensor in enumerate(tensors) if tensor is not None})
            yield places, messages


def _shards(each: _Stepped, state: State | None) -> Iterator[_Item]:
    """Yield the shards of a parameter, its gradient and its state, which go to the owner."""
    spec = each.param.shard_spec
    sharded: Any = as_sharded(each.grad, spec)
    for local in (each.param._local_tensor, sharded._local_tensor):
        yield _Item(each, spec, local.dtype, local)
    for value in _leaves(state):
        if each.must_move(value):
            yield _Item(each, value.shard_spec, value.dtype, value._local_tensor)


def _show(each: _Stepped, state: State | None, arrived: Iterator[Tensor | None]) -> None:
    """Set the received full parameter, gradient and state on the owner."""
    whole, grad = next(arrived), next(arrived)
    brought = {id(value): next(arrived) for value in _leaves(state) if each.must_move(value)}
    if each.is_here:
        assert whole is not None
        each.whole = nn.Parameter(whole)
        show_grad(each.whole, grad)
        shown = functools.partial(_shown, each.param.shard_spec, brought)
        each.state = _with_lists(tree_map(shown, dict(state or {})))


def _results(each: _Stepped, told: Any) -> Iterator[_Item]:
    """Yield the new parameter and state, full on the owner, which go back to shards."""
    spec = each.param.shard_spec
    yield _Item(each, spec, each.param.dtype, None if each.whole is None else each.whole.detach())
    values = _leaves(each.state) if each.is_here else [None] * len(_leaves(told))
    for kind, value in zip(_leaves(told), values, strict=True):
        if isinstance(kind, _Sharded):
            yield _Item(each, spec, kind.dtype, value, is_kept=True)


# ---- state -----------------------------------------------------------------------------------------------------------


def _leaves(state: Any) -> list[Any]:
    return tree_flatten(dict(state or {}))[0]


def _shown(spec: ShardSpec, brought: Mapping[int, Tensor | None], value: Any) -> Any:
    """Return a value of the state for the owner's step: a DTensor as a plain tensor.

    What is sharded as the parameter, by this spec, stays as it was should the step fail.
    """
    if type(value) is not UnevenDTensor:
        return value
    if id(value) in brought:
        return brought[id(value)]
    local = value._local_tensor
    return local.clone() if value.shard_spec == spec else local


# Checkpoints store a tensor under a key, and a list in one piece. So lists of tensors are kept as dicts of text keys.


def _without_lists(value: Any) -> Any:
    """Replace lists and tuples that hold tensors by dicts with the keys "[0]", "[1]", ... or "(0)", "(1)", ..."""
    if isinstance(value, dict):
        return {key: _without_lists(each) for key, each in value.items()}
    if type(value) not in (list, tuple) or not any(isinstance(leaf, Tensor) for leaf in tree_flatten(value)[0]):
        return value
    form = "[{}]" if type(value) is list else "({})"
    return {form.format(place): _without_lists(each) for place, each in enumerate(value)}


def _with_lists(value: Any) -> Any:
    """Undo `_without_lists`."""
    if not isinstance(value, dict):
        return value
    undone = {key: _with_lists(each) for key, each in value.items()}
    for form, kind in (("[{}]", list), ("({})", tuple)):
        if undone and list(undone) == [form.format(place) for place in range(len(undone))]:
            return kind(undone.values())
    return undone


def _described(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the owner's state of a parameter for the other ranks; raise if it is neither tensor nor plain value."""
    found = {}
    for key, value in state.items():
        if isinstance(value, Tensor) and value.dim() and value.shape == param.shape:
            found[key] = _Sharded(value.dtype)
        else:  # nested tensors stay as they are, strides included, whatever their shape
            found[key] = tree_map(functools.partial(_described_value, key), value)
    return found


def _described_value(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        on_cpu = value.device.type == "cpu"
        return _Owned(tuple(value.shape), value.dtype) if value.dim() else _Number(value.item(), value.dtype, on_cpu)
    if value is None or isinstance(value, bool | int | float | complex | torch.dtype):
        return value  # no text, which torch's load_state_dict turns into another one
    raise ConfigurationError(
        f"state {key!r} holds a {type(value).__qualname__}, which cannot rest with one rank and be saved; an optimizer "
        "whose parameters are stepped whole keeps tensors and numbers, in lists or dicts if need be"
    )


def _rebuilt(each: _Stepped, arrived: Iterator[Tensor], mine: Iterator[Any] | None, kind: Any) -> Any:
    """Return a value of the state as this rank keeps it.

    `arrived` has the shards that have come, `mine` the values themselves where this rank is their owner, in the order
    of the values; `kind` is what the owner has told of this one.
    """
    own = None if mine is None else next(mine)
    param = each.param
    if isinstance(kind, _Sharded):
        return UnevenDTensor.wrap(next(arrived), param.shard_spec)
    if isinstance(kind, _Owned):
        spec = _owned_spec(param.shard_spec, kind.shape, each.owner)
        local = torch.empty(spec.description.local_shape, dtype=kind.dtype, device=param.device) if own is None else own
        return UnevenDTensor.wrap(local, spec)
    if isinstance(kind, _Number):
        return torch.tensor(kind.value, dtype=kind.dtype, device="cpu" if kind.on_cpu else param.device)
    return kind


def _owned_spec(spec: ShardSpec, shape: tuple[int, ...], owner: int) -> ShardSpec:
    """Return the shard spec of a tensor held entirely by one rank."""
    sizes, coordinate = spec.description.use.sizes, spec.description.coordinate
    numel, num_ranks = math.prod(shape), math.prod(sizes)
    cut = ListedCut((0,) * (owner + 1) + (numel,) * (num_ranks - owner))
    use = MeshUse(sizes, tuple(range(len(sizes))))
    made = ShardSpec(spec.mesh, ShardDescription(shape, use, coordinate, cut))
    made.belongs = spec.belongs
    return made


# ---- on every rank ---------------------------------------------------------------------------------------------------


def steps_replicated(optimizer: Optimizer) -> bool:
    """Return True for torch's LBFGS itself; a subclass may do anything."""
    return type(optimizer) is torch.optim.LBFGS


def replicas_of(params: Sequence[UnevenDTensor]) -> Groups:
    """Return the groups of the ranks that hold the same parameters."""
    spec = params[0].shard_spec
    return (*spec.shard_groups, *spec.copy_groups) or (None,)


class ReplicatedStep(Step):
    """Steps one LBFGS on full local tensors; between steps it holds none."""

    def __init__(self) -> None:
        self._params: Sequence[UnevenDTensor] = ()  # of the running step
        self._made: Optimizer | None = None

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return a proxy of the same class over the local tensors of the parameters and of the state."""
        (group,) = optimizer.param_groups
        self._params = group["params"]
        shown = [param._local_tensor.detach() for param in self._params]  # share the version counters
        state = tree_map(local_of, dict(optimizer.state.get(self._params[0], {})))  # loading wraps vectors
        made: Optimizer = object.__new__(type(optimizer))
        made.__dict__ = {
            **optimizer.__dict__,
            "param_groups": [{**group, "params": shown}],
            "_params": shown,  # where LBFGS finds them
            "state": defaultdict(dict, {shown[0]: state} if state else {}),
        }
        self._made = made
        return made

    def around(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure: it returns the mean (or sum) of all ranks' losses, and fails on all ranks together."""

        def evaluated() -> Any:
            assert self._made is not None
            spec, groups = self._params[0].shard_spec, replicas_of(self._params)
            # Of a rank that has left it, before gradients are reduced.
            raise_together(None, "the step of LBFGS", groups)
            with all_agree("the closure of LBFGS", groups, raises=RankError):
                result = closure()
                loss = float(result.detach() if isinstance(result, Tensor) else result)
            (shown,) = self._made.param_groups
            for param, local, grad in zip(self._params, shown["params"], shown_grads(self._params), strict=True):
                sharded: Any = grad if grad is None else as_sharded(grad, param.shard_spec)
                show_grad(local, grad if grad is None else sharded._local_tensor)
            losses = gather_over(groups, loss)
            united = sum(losses) / (1 if spec.adds_up else len(losses))
            return result.new_tensor(united) if isinstance(result, Tensor) else united

        return evaluated

    def finish(self, optimizer: Optimizer) -> None:
        """Set the new state on the optimizer."""
        assert self._made is not None
        (group,), (shown,) = optimizer.param_groups, self._made.param_groups
        group.update({key: value for key, value in shown.items() if key != "params"})
        optimizer.state[self._params[0]] = self._made.state[shown["params"][0]]
        self._params, self._made = (), None
