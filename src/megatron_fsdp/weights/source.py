"""A source of a model's weights for inference engines, which reads them while training goes on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.checkpoint.hf.live import KeyMapping, engines_of, unwrap
from megatron_fsdp.comm.agreement import (
    Groups,
    all_agree,
    default_if_all,
    device_over,
    gather_over,
    over,
    raise_together,
    rank_of,
)
from megatron_fsdp.comm.collectives import SideStream, all_gather_flat, default_device
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.engine.engine import Engine, engine_of_module
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError, RankError, ScheduleError
from megatron_fsdp.sharding.units import ROOT_UNIT
from megatron_fsdp.state.full_tensors import check_between_steps, check_bucket_bytes, open_iteration
from megatron_fsdp.weights.delta import MAX_NUMEL, Patch, Shard, Snapshot, gather_changes, local_shards, sum_counts
from megatron_fsdp.weights.gathering import gather_bucket
from megatron_fsdp.weights.plan import (
    Choice,
    Dtypes,
    ParamMeta,
    Pending,
    Plan,
    Source,
    Wire,
    complete,
    fed,
    layerwise_groups,
    make_plan,
)
from megatron_fsdp.wrap.shard_unit import unit_of

Named = tuple[str, torch.Tensor | None]


class _State(IntEnum):
    """The state of a pass on one rank, which ranks exchange before each bucket and at the end."""

    GOES_ON = 0
    ENDED = 1
    STOPPED = 2
    FAILED = 3


# Note [When a bucket is gathered]
#
# A caller sends tensors to an engine, over another group and maybe in a stream of its own, between two of ours; other
# ranks only iterate. Gathers that were still under way then would wait for sends that wait for them: the deadlock that
# trainers meet most. So a bucket is gathered on a stream of its own and the host waits for it, before its first tensor
# is yielded; no stream context stays open across a yield; and before each bucket ranks exchange an integer each, so
# that one which has failed or stopped is named instead of waited for.


class WeightSource:
    """Whole tensors of a model, named and shaped as engines load them; has vLLM's interface of that name.

    Every rank of the model makes one and iterates over it in lockstep. Iterating begins a pass over the weights as they
    are then; until it is exhausted, closed or deleted, forwards, backwards, steps, syncs, saves, loads and further
    passes raise a ScheduleError. A tensor is a copy that stays as it is.

    Args:
        model: Sharded by this library or by torch, or plain; wrappers and compiled modules are seen through.
        dtype: Of floating-point tensors on the wire; None: of main weights; or by regular expressions on names, and
            bfloat16 for the rest.
        names: "hf": of Hugging Face checkpoints; "model": canonical names, nothing split; or a function, or regular
            expressions with replacements, applied to the "hf" names.
        tied: "once": under the name that files have; "all": under each name.
        experts: "split": a tensor per expert and projection, as in files; "fused": as the model has them.
        adapters: "refuse"; "merged": base weights with LoRA added as peft does; "only": what `save_adapter` stores.
        include: A regular expression or a function of a name; the rest is left out.
        buffers: Send persistent buffers, too.
        values: "main": main weights; "computed": as a forward sees them, rounded by the compute dtype or weight format.
        bucket_bytes: The most that is held beside the model while no more than the latest tensor is kept; a tensor of
            more than half of it is held together with the bucket before it.
        destination: "all"; a rank of `group`, which alone gets tensors, the others None; "spread": each layer goes to
            one rank. Tensors that this library has not sharded are gathered on all ranks nevertheless.
        device: Of the tensors; None: the model's.
        group: The ranks that hold the model; None: those that it is sharded over, else all.
        snapshot: Where `changed` keeps this rank's part of what was sent last: "off", "device" or "cpu".
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: Dtypes = torch.bfloat16,
        names: str | KeyMapping = "hf",
        tied: str = "once",
        experts: str = "split",
        adapters: str = "refuse",
        include: str | Callable[[str], bool] | None = None,
        buffers: bool = False,
        values: str = "main",
        bucket_bytes: int = 2**28,
        destination: int | str = "all",
        device: torch.device | str | None = None,
        group: dist.ProcessGroup | None = None,
        snapshot: str = "off",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ConfigurationError(f"model is a {type(model).__name__}; give an nn.Module, sharded or not")
        _check_group(model, group)
        self._model, self._group = model, group
        self._choice = Choice(dtype, names, tied, experts, adapters, include, buffers, values, bucket_bytes)
        self._destination = destination
        self._device = device
        self._engines = _engines_of(model)
        self._keeps = snapshot
        self._snapshot = Snapshot(snapshot == "cpu")
        self._plan: Plan | None = None
        self._planned_for: tuple[int, ...] = ()
        self._side: SideStream | None = None
        self._open = ""  # the pass that is open, where there is no engine to know of it
        self._is_last = False  # the last tensor of the open pass was yielded
        self._counted = 0  # passes before which the weights of a model without an engine had changed
        self._seen = self._versions()
        self._first_version = 0

    # ---- what there is -----------------------------------------------------------------------------------------------

    def metadata(self) -> list[ParamMeta]:
        """List name, dtype and whole shape of every tensor, in the order of a pass; moves none of them.

        Collective where it is the first call, or the model's parameters are others than before.

        Raises:
            ConfigurationError: The model or the arguments do not fit, or ranks differ in them; the same on every rank.
        """
        return self._planned().metas

    def _planned(self) -> Plan:
        self._find_engines()
        if self._plan is None or self._planned_for != self._parameter_ids():
            self._snapshot.clear()  # its ranges are those of the plan
            doing = "planning the weights to send"
            with all_agree(doing, self.ranks) as facts:
                self._check_arguments()
                told = {**vars(self._choice), "destination": self._destination, "snapshot": self._keeps}
                facts |= {name: str(value) for name, value in told.items() if not callable(value)}
            with all_agree(doing, self.ranks) as facts:  # which collectives follow depends on these arguments
                made = make_plan(unwrap(self._model), self._choice, self.ranks, self._receivers())
                facts |= made.facts
            self._plan, self._planned_for = made, self._parameter_ids()
        assert self._plan is not None
        return self._plan

    def _find_engines(self) -> None:
        """Find the engines anew: `fsdp2` makes one in the first forward. Versions go on, with another one for it."""
        found = _engines_of(self._model)
        if list(map(id, found)) != list(map(id, self._engines)):
            self._first_version += 1 + sum(engine.weights_version for engine in self._engines)
            self._engines, self._plan = found, None

    def _parameter_ids(self) -> tuple[int, ...]:
        return tuple(map(id, self._model.parameters()))

    @property
    def ranks(self) -> Groups:
        """Process groups that together reach all ranks of the model."""
        if self._group is not None or len(self._engines) != 1:
            return default_if_all(over(self._group))
        return self._engines[0].reaching_all

    def _check_arguments(self) -> None:
        choice, allowed = self._choice, {"tied": "once all", "experts": "split fused", "values": "main computed"}
        allowed["adapters"] = "refuse merged only"
        if isinstance(choice.names, str):
            allowed["names"] = "hf model"
        if self._keeps not in ("off", "device", "cpu") or (self._keeps != "off" and choice.adapters == "merged"):
            raise ConfigurationError(
                f"snapshot={self._keeps!r} with adapters={choice.adapters!r}; give snapshot='off', 'device' or 'cpu', "
                "and only 'off' with merged adapters, of which no rank holds a part"
            )
        for name, words in allowed.items():
            if getattr(choice, name) not in words.split():
                given, known = getattr(choice, name), " or ".join(map(repr, words.split()))
                raise ConfigurationError(f"{name}={given!r} is unknown; give {known}")
        check_bucket_bytes(choice.bucket_bytes)
        self._device = None if self._device is None else torch.device(self._device)
        for dtype in choice.dtype.values() if isinstance(choice.dtype, Mapping) else [choice.dtype]:
            if dtype is not None and not getattr(dtype, "is_floating_point", False):
                raise ConfigurationError(
                    f"dtype={choice.dtype!r} is no floating-point torch.dtype; give one, None, or a mapping from "
                    "regular expressions to such"
                )
        dtypes = choice.dtype if isinstance(choice.dtype, Mapping) else {}
        patterns = {"dtype": [*dtypes], "include": [] if callable(choice.include) else [choice.include or ""]}
        for argument, given in patterns.items():
            for pattern in given:
                try:
                    re.compile(pattern)
                except (TypeError, re.error) as error:
                    raise ConfigurationError(
                        f"{argument} has {pattern!r}, which is no regular expression: {error}"
                    ) from None

    def _receivers(self) -> list[int] | None:
        """Return the global ranks that the tensors are shared out to; None: every rank gets all."""
        if self._destination == "all":
            return None
        ranks = sorted(gather_over(self.ranks, rank_of()))
        if self._group is not None:
            ranks = dist.get_process_group_ranks(self._group)
        if self._destination == "spread":
            return ranks
        if type(self._destination) is not int or not 0 <= self._destination < len(ranks):
            raise ConfigurationError(
                f'destination={self._destination!r} is no rank of the group; give 0 to {len(ranks) - 1}, "all" or '
                '"spread"'
            )
        return [ranks[self._destination]]

    @property
    def num_tensors(self) -> int:
        """Tensors in a pass."""
        return len(self.metadata())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors on the wire."""
        return sum(meta.nbytes for meta in self.metadata())

    @property
    def largest(self) -> int:
        """Bytes of the largest tensor on the wire."""
        return max(meta.nbytes for meta in self.metadata())

    def update_info(self) -> dict[str, Any]:
        """Return names, dtype names and shapes, as vLLM and sglang take them."""
        metas = self.metadata()
        return {
            "names": [meta.name for meta in metas],
            "dtype_names": [str(meta.dtype).removeprefix("torch.") for meta in metas],
            "shapes": [list(meta.shape) for meta in metas],
        }

    def held_names(self) -> Collection[str] | None:
        """Return the names of the tensors that this rank gets; None: all."""
        if self._destination == "all":
            return None
        return {name for name, rank in self._planned().holders.items() if rank == rank_of()}

    def groups(self) -> list[list[str]]:
        """Group the names by layer, without groups of which this rank gets nothing."""
        held, found = self.held_names(), layerwise_groups(meta.name for meta in self.metadata())
        return [group for group in found if held is None or any(name in held for name in group)]

    def iter_groups(self) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
        """Iterate over the names and tensors of one layer after another, as far as this rank gets them; a pass."""
        layers = layerwise_groups(meta.name for meta in self.metadata())
        left = {name: len(layer) for layer in layers for name in layer[-1:]}
        names, found = list[str](), list[torch.Tensor]()
        for name, tensor in self:
            if tensor is not None:
                names.append(name)
                found.append(tensor)
            del tensor
            if name in left and names:
                yield names, found
                names, found = [], []

    # ---- versions ----------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """The number of changes of the weights: by steps, loads and edits of the program.

        Without an engine of this library: the number of passes before which they had changed.
        """
        self._find_engines()
        engines = sum(engine.weights_version for engine in self._engines)
        return self._first_version + engines + self._counted + (not self._engines and self._versions() != self._seen)

    @property
    def label(self) -> str:
        """The version as text, for engines."""
        return str(self.version)

    def state_dict(self) -> dict[str, int]:
        """Return the version, to be stored with a checkpoint."""
        return {"version": self.version}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Go on from the version of a checkpoint, once its weights are loaded."""
        if type(state_dict.get("version")) is not int:
            raise ConfigurationError(f"{dict(state_dict)} has no version; give what state_dict() has returned")
        self._first_version += state_dict["version"] - self.version

    def digest(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return the SHA-256 of the bytes of each tensor that this rank gets, in a pass of its own."""
        return {
            name: digest_of(tensor) for name, tensor in self if tensor is not None and (names is None or name in names)
        }

    def _versions(self) -> int:
        return sum(local_tensor(param)._version for param in self._model.parameters())

    # ---- passes ------------------------------------------------------------------------------------------------------
    #
    # See Note [When a bucket is gathered].

    def __iter__(self) -> Iterator[Named]:
        """Begin a pass: iterate over names and whole tensors, None for those that this rank does not get. Collective.

        Raises:
            ScheduleError: Inside a forward or backward, or while another pass is open; weights were written to since.
            RankError: Another rank failed, or stopped before the end.
        """
        return self._pass("a pass over weights", self._full)

    def changed(self, since: int | None = None, *, dense_above: float = 0.25) -> Iterator[Patch]:
        """Iterate over the elements that have changed since the last pass that was committed. Collective.

        Every rank gets the sparse patches; whole tensors go to the destination.

        Args:
            since: The version that the receiver has; None: that of the snapshot.
            dense_above: A tensor of which a larger part has changed comes whole.

        Raises:
            ScheduleError: There is no snapshot, or of another version: send everything first.
            ConfigurationError: `dense_above` is no such number, or another one than on other ranks.
        """
        check = partial(self._check_snapshot, since, dense_above)
        return self._pass("a pass over changed weights", partial(self._delta, dense_above=dense_above), check)

    def commit(self) -> None:
        """Make the last complete pass the one that `changed` compares with, once the engine has confirmed it."""
        self._snapshot.commit()

    def local_shards(self) -> Iterator[Shard]:
        """Iterate over this rank's ranges of the flattened tensors; no communication once the metadata is known."""
        plan = self._planned()
        self._refuse("local shards were asked for")
        for engine in self._engines:
            engine.refresh_weights()
        return local_shards(plan, self._choice.values, self.ranks)

    def close(self) -> None:
        """Drop the plan and the snapshot."""
        self._plan = None
        self._snapshot.clear()

    def _pass(
        self, what: str, make: Callable[[Plan], Iterator[Any]], check: Callable[[], Mapping[str, str]] = dict
    ) -> Iterator[Any]:
        """Iterate over one pass over one version of the weights, and send the others its outcome here."""
        self._find_engines()
        with ExitStack() as stack:
            with all_agree(what, self.ranks) as facts:
                self._refuse(f"{what} was begun")
                facts |= {**check(), "version": self.label}
                facts["knowing the metadata"] = str(
                    self._plan is not None and self._planned_for == self._parameter_ids()
                )
            plan = self._planned()
            self._begin(stack, what)
            is_told = False
            try:
                yield from make(plan)
                is_told = True
                self._meet(what, _State.ENDED)
            except GeneratorExit:
                with suppress(Exception):
                    if not is_told:
                        stopped = None if self._is_last else RankError("stopped iterating before the end")
                        self._meet(what, _State.ENDED if self._is_last else _State.STOPPED, stopped)
                raise
            except BaseException as error:
                if not is_told and not hasattr(error, "__agreed__"):
                    self._meet(what, _State.FAILED, error)
                raise
            self._snapshot.finish()

    def _refuse(self, what: str) -> None:
        for engine in self._engines:
            check_between_steps(engine, what)
        if self._open:
            raise ScheduleError(f"{what} while {self._open} is open; exhaust the iterator or close() it first")

    def _begin(self, stack: ExitStack, what: str) -> None:
        for engine in self._engines:
            engine.refresh_weights()
            stack.enter_context(open_iteration(engine, "WeightSource"))
        self._open, self._is_last = what, False
        stack.callback(setattr, self, "_open", "")
        if not self._engines and self._seen != (versions := self._versions()):
            self._seen, self._counted = versions, self._counted + 1
        if self._side is None:
            devices = [*(engine.device for engine in self._engines), *(p.device for p in self._model.parameters())]
            self._side = SideStream(devices[0] if devices else default_device())

    def _meet(self, what: str, state: _State, error: BaseException | None = None) -> None:
        """Exchange states, and raise on all ranks where some have failed, or stopped before others."""
        states = set(self._exchange(state))
        if _State.FAILED in states or (_State.STOPPED in states and len(states) > 1):
            raise_together(error, what, self.ranks)

    def _exchange(self, value: int) -> list[int]:
        """All-gather one integer."""
        values = [int(value)]
        for group in [group for group in self.ranks if group is not None]:
            sent = torch.tensor(values, dtype=torch.int64, device=device_over([group]))
            received = sent.new_empty(len(values) * dist.get_world_size(group))
            all_gather_flat(received, sent, group=group)
            values = received.tolist()
        return values

    def _met(self, plan: Plan) -> Iterator[Sequence[Source]]:
        """Iterate over the buckets, each once all ranks have come to it and none has written to weights since."""
        versions = {id(each.tensor): local_tensor(each.tensor)._version for bucket in plan.buckets for each in bucket}
        for bucket in plan.buckets:
            written = [each for each in bucket if local_tensor(each.tensor)._version != versions[id(each.tensor)]]
            error = None
            if written:
                error = ScheduleError(
                    f"{written[0].names[0]} was written to while {self._open} is open, whose tensors would be of two "
                    "versions; exhaust the iterator or close() it first"
                )
            self._meet(self._open, _State.GOES_ON if error is None else _State.FAILED, error)
            yield bucket

    def _full(self, plan: Plan) -> Iterator[Named]:
        if self._keeps != "off":
            self._snapshot.take(self.version, local_shards(plan, self._choice.values, self.ranks))
        left, pending = len(plan.wires), Pending()
        for bucket in self._met(plan):
            for wire, tensor in self._completed(plan, bucket, pending):
                left -= 1
                self._is_last = not left
                yield wire.meta.name, tensor
                del tensor

    def _check_snapshot(self, since: int | None, dense_above: Any) -> dict[str, str]:
        """Return the facts of a delta to compare over ranks, once they fit here."""
        version = self._snapshot.version
        if not isinstance(dense_above, int | float) or not dense_above >= 0:
            raise ConfigurationError(f"dense_above={dense_above!r}; give a part of a tensor, from 0 to 1")
        if version is None:
            raise ScheduleError(
                'there is no snapshot to compare with; give snapshot="device" or "cpu", send everything, and commit()'
            )
        if since not in (None, version):
            raise ScheduleError(
                f"the receiver has version {since}, and the snapshot is of version {version}; send everything first"
            )
        return {"dense_above": f"{dense_above}", "the version of the snapshot": f"{version}"}

    def _delta(self, plan: Plan, dense_above: float) -> Iterator[Patch]:
        changes = self._snapshot.changes(self.version, local_shards(plan, self._choice.values, self.ranks))
        assert self._side is not None
        device, metas = self._side.device, {meta.name: meta for meta in plan.metas}
        summed = sum_counts([changes.count(name) for name in metas], self.ranks, device)
        counts = dict(zip(metas, summed, strict=True))
        dense = {
            name
            for name, meta in metas.items()
            if counts[name] > dense_above * meta.numel or (counts[name] and meta.numel > MAX_NUMEL)
        }
        pending, nothing = Pending(), Pending()
        for bucket in self._met(plan):
            needed = [source for source in bucket if any(wire.meta.name in dense for wire in fed(source, plan.feeds))]
            for wire, tensor in self._completed(plan, needed, pending, dense) if needed else ():
                if tensor is not None:
                    yield Patch(wire.meta.name, None, tensor, wire.meta.shape)
                del tensor
            here = [wire.meta for wire, _ in complete(plan, bucket, None, nothing)]
            sparse = [meta for meta in here if counts[meta.name] and meta.name not in dense]
            yield from gather_changes(sparse, changes, self.ranks, device)

    def _completed(
        self, plan: Plan, bucket: Sequence[Source], pending: Pending, only: Collection[str] | None = None
    ) -> Iterator[tuple[Wire, torch.Tensor | None]]:
        """Gather a bucket, and iterate over the tensors of the wire that it completes."""
        assert self._side is not None
        with ExitStack() as stack:
            for engine in self._engines:
                stack.enter_context(engine.observers.during(Phase.WHOLE, ROOT_UNIT))
            stack.enter_context(self._side.finished())
            found = gather_bucket(bucket, plan, self._choice.values)
        for tensor in (found or {}).values():
            self._side.hand_over(tensor)
        for wire, made in complete(plan, bucket, found, pending, only):
            yield wire, made if made is None or self._device is None else made.to(self._device)
            del made


def _check_group(model: nn.Module, group: object) -> None:
    """Raise unless a group is None, or has this rank and all others that hold the model."""
    if group is None:
        return
    meshes = {id(param.device_mesh): param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    needed = {rank_of(), *(rank for mesh in meshes.values() for rank in mesh.mesh.flatten().tolist())}
    there = dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else []
    if missing := sorted(needed - set(there)):
        raise ConfigurationError(
            f"group has the ranks {there}, and the model is on the ranks {missing}, too; give a group of all of them, "
            "or None"
        )


def _engines_of(model: nn.Module) -> list[Engine]:
    """List the engines of a model, each once; raise where units were sharded and their engine is not made yet."""
    found = {id(engine): engine for engine in engines_of(model)}
    for module in model.modules():
        engine = engine_of_module(module)
        if engine is not None:
            found[id(engine)] = engine
        elif unit_of(module) is not None:
            raise ScheduleError(
                f"a {type(module).__name__} was sharded in place, and the engine of all units is not made yet; leave "
                "the fully_shard context, or run a forward, first"
            )
    return list(found.values())


def digest_of(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes, in hexadecimal digits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()
