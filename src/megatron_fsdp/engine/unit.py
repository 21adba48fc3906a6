"""A unit: parameters that are unsharded and resharded together, and the places in the module tree that hold them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from megatron_fsdp.comm.collectives import CommStream, Work
from megatron_fsdp.dtensor.shard_spec import OwningUnit
from megatron_fsdp.engine.gradients import GradientBuffers
from megatron_fsdp.engine.memory import Block
from megatron_fsdp.engine.param_group import ParameterGroup
from megatron_fsdp.engine.plans import GroupPlan, outer_buffer_offsets, pack_bytes
from megatron_fsdp.engine.schedule import SyncMode, SyncScope
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from megatron_fsdp.sharding.units import name_of_neighbours


class ParameterPlace(NamedTuple):
    """A module that holds a parameter, and the attribute; the module is referred to weakly.

    A module that is sharded in place owns its unit, so the unit must not own the module.
    """

    module: weakref.ref[nn.Module]
    parameters: dict[str, nn.Parameter | None]  # the module's own dictionary; attribute access would search several
    attribute: str
    is_plain: bool  # whether it is set in the dictionary; else by the setter of the module's class

    @classmethod
    def of(cls, module: nn.Module, attribute: str) -> ParameterPlace:
        """Return the place at an attribute of a module."""
        return cls(weakref.ref(module), module._parameters, attribute, _is_plain(module))

    def set(self, param: nn.Parameter) -> None:
        """Replace the parameter; no-op where the module was deleted."""
        if self.is_plain:
            self.parameters[self.attribute] = param
        elif (module := self.module()) is not None:
            set_parameter(module, self.attribute, param)


class TrainedGroup(NamedTuple):
    """A group with memory for gradients, and its position in its unit."""

    number: int
    group: ParameterGroup
    gradients: GradientBuffers


_Swap = tuple[ParameterPlace, dict[str, nn.Parameter | None], str, nn.Parameter, nn.Parameter, bool]
"""(owner, its dictionary, its attribute, full parameter, sharded parameter, True if it is set directly)."""
_version = attrgetter("_version")


class Unit:
    """The parameter groups of one unit and the places in the module tree that hold their parameters."""

    def __init__(
        self,
        index: int,
        name: str,
        groups: Sequence[ParameterGroup],
        owners: Sequence[Sequence[Sequence[ParameterPlace]]],
        modules: Mapping[str, nn.Module],
        mode: SyncMode,
    ) -> None:
        self.index = index  # position in the plan; 0 is the root
        self.name = name  # fully qualified; empty for the root
        # by path: one, or several small neighbours; none where it is a bucket of parameters
        self.modules = {path: weakref.ref(module) for path, module in modules.items()}
        self.mode = mode  # when its gradients are reduced
        # may be resharded after its forward, as soon as another unit needs the slot; else unsharded until backward ends
        self.reshard_after_forward = True
        self.groups = tuple(groups)  # none where the module owns no parameter of its own
        # of each parameter of each group
        self.owners = tuple(tuple(map(tuple, of_group)) for of_group in owners)
        self._swaps = _swaps(self.groups, self.owners, tuple(modules.values()))
        # of each group; a deterministic sum takes each microbatch on its own: none is added to another on a rank
        self._accumulates_shards = tuple(
            each is not None and (each.placements.accumulates_shards or each.options.deterministic is not None)
            for each in (plan.sharding for plan in self.group_plans)
        )
        # of its gathered weights in one block, where each group begins at an alignment
        self._gather_offsets, self.block_bytes = pack_bytes([group.plan.gathered_bytes for group in self.groups])
        self.plan_buckets()
        self.find_gathered()
        self.group_and_index = {id(param): (group, i) for group in self.groups for i, param in enumerate(group.sharded)}
        # before and after a forward of each of its modules
        self.forward_hooks: list[tuple[Callable[..., Any], Callable[..., Any]]] = []
        self._engine: weakref.ref[Any] | None = None  # an `Engine`, whose module imports this one
        self.state_dict_handles: list[RemovableHandle] = []  # of the hooks that describe its shards in state dicts
        self._block: Block | None = None
        self.is_unsharded = False  # the module tree holds the full parameters now
        self._swapped = set(range(len(self._swaps)))  # modules that may not hold the sharded parameters
        self.works: list[Work] = []  # all-gathers that nothing has waited for yet
        self._outer_works: list[Work] = []
        self._outer_gather_is_due = False  # the last update was not gathered over the outer ranks yet
        self._update_is_due = True  # nor over the inner ones
        self._slotted = tuple(
            param for group in self.groups if group.plan.shards_compute_weights for param in group.full
        )
        self._versions = tuple((version,) * len(self._slotted) for version in (0, 1))
        slotted = set(map(id, self._slotted))
        self._slotted_in = [[swap[3] for swap in swaps if id(swap[3]) in slotted] for swaps in self._swaps]

    @property
    def engine(self) -> Any:
        """The `Engine`; None until it is made, or after it was deleted."""
        return None if self._engine is None else self._engine()

    def connect(self, engine: object) -> None:
        """Set the engine, which owns the unit from here on."""
        self._engine = weakref.ref(engine)

    def locate(self, index: int, paths: Sequence[str], path_of: Mapping[int, str]) -> None:
        """Set the number of the unit, and name it and its parameters by their paths from the root.

        `paths` are those of its modules, `path_of` has those of all modules, by id.
        """
        self.index, self.name = index, name_of_neighbours(paths)
        self.modules = dict(zip(paths, self.modules.values(), strict=True))
        for group, of_group in zip(self.groups, self.owners, strict=True):
            firsts = [(path_of[id(owners[0].module())], owners[0].attribute) for owners in of_group]
            group.rename([f"{path}.{attribute}".lstrip(".") for path, attribute in firsts])

    def owning_modules(self) -> list[nn.Module]:
        """Return the modules that hold its parameters, each once."""
        owners = chain.from_iterable(chain.from_iterable(self.owners))
        found = {id(module): module for owner in owners if (module := owner.module()) is not None}
        return list(found.values())

    def find_gathered(self) -> None:
        """Set the memory that all-gathers write for units that live in no slot."""
        self.gathered: list[torch.Tensor] = [group.weights.compute.local for group in self.groups]

    @property
    def group_plans(self) -> list[GroupPlan]:
        """The plan of each group."""
        return [group.plan for group in self.groups]

    @property
    def sync_scope(self) -> SyncScope:
        """The sync scope of the running backward, or of the next one: that of the group which goes furthest."""
        return self.mode.sync_scope(any(self._accumulates_shards))

    def defers(self, group_index: int, sync_scope: SyncScope) -> bool:
        """Return True if a group stays unreduced in a reduction of this scope: groups may have other placements."""
        is_inside = sync_scope is SyncScope.INSIDE and not self._accumulates_shards[group_index]
        return is_inside or sync_scope is SyncScope.NOWHERE

    @property
    def trained(self) -> list[TrainedGroup]:
        """The groups that take gradients, or did before they were frozen."""
        numbered = enumerate(self.groups)
        return [TrainedGroup(at, group, group.gradients) for at, group in numbered if group.gradients is not None]

    @property
    def is_trainable(self) -> bool:
        """True if any parameter takes a gradient."""
        return any(group.is_trainable for group in self.groups)

    @property
    def shards_compute_weights(self) -> bool:
        """True if full weights exist only while gathered."""
        return bool(self._slotted)

    @property
    def only_looks_up(self) -> bool:
        """True if weights are sharded and backward reads none of them, as those of an embedding."""
        return self.shards_compute_weights and all(plan.is_looked_up for plan in self.group_plans)

    @property
    def label(self) -> str:
        """The name for messages."""
        return self.name or "(root)"

    def set_error_owner(self, remedy: str) -> None:
        """Set the unit and the remedy that errors about sharded parameters name, where full ones are needed."""
        owner = OwningUnit(self.label, remedy)
        for group in self.groups:
            for name, shard_spec in zip(group.names, group.shard_specs, strict=True):
                shard_spec.belongs = (name, owner)

    def plan_buckets(self) -> None:
        """Place buckets, and scratch, of all groups in one block; again after a change of the communication dtype."""
        self._bucket_offsets, self.bucket_bytes = pack_bytes([plan.bucket_bytes for plan in self.group_plans])
        self._scratch_offsets, self.scratch_bytes = pack_bytes([plan.scratch_bytes for plan in self.group_plans])

    # ---- weights ------------------------------------------------------------------------------------------------

    @property
    def needs_outer_all_gather(self) -> bool:
        """True if the last update was not all-gathered over the outer ranks yet."""
        return self._outer_gather_is_due and any(group.plan.gathers_outer for group in self.groups)

    def all_gather_outer(self, stream: CommStream) -> None:
        """Start to all-gather the last update over the outer ranks, where they shard it, into the inner ranks' shards.

        It writes into the memory of the weights, so it must be over (`wait_for_outer`) before these are changed.
        """
        if self._outer_gather_is_due:
            self._outer_gather_is_due = False
            self._outer_works += [
                stream.submit(group.weights.all_gather_outer) for group in self.groups if group.plan.gathers_outer
            ]

    def expect_update(self) -> None:
        """Mark weights as updated: they are all-gathered before the next forward, over the outer ranks first."""
        self._outer_gather_is_due = self._update_is_due = True

    def wait_for_outer(self) -> None:
        """Wait for the all-gathers of `all_gather_outer`."""
        # See `install_main_weights`.
        self._await(self._outer_works)

    def unshard(self, stream: CommStream, block: Block | None, copy_stream: CommStream) -> None:
        """Start to all-gather the compute weights, into `block` where they are sharded between uses.

        Offloaded shards are copied there before, on `copy_stream`.
        """
        # In the same block as before, full parameters are views of it already, as are tensors that autograd saved.
        are_pointed = all(group.is_pointed for group in self.groups if group.plan.gathered_bytes)
        if block is not None and (block is not self._block or not are_pointed):
            self._use(block)
        for group, full in zip(self.groups, self.gathered, strict=True):
            # It sends what the gather over the outer ranks writes, on a stream of its own: so it goes behind that.
            after = self._outer_works
            if group.weights.is_offloaded:  # See Note [Offloaded state] in `memory.py`.
                fetched = copy_stream.submit(partial(group.weights.fetch, full))
                self.works.append(fetched)
                after = [*after, fetched]
            # Weights that stay whole beside others that are resharded were gathered when they changed.
            is_current = self.block_bytes and not (group.plan.shards_compute_weights or self._update_is_due)
            if group.plan.needs_all_gather and not is_current:
                self.works.append(stream.submit(partial(group.weights.all_gather_into, full), after=after))
        self._update_is_due = False

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers, and decode encoded weights."""
        # Weights that are whole on every inner rank have no all-gather but this one.
        self._await(self._outer_works)
        if self._await(self.works):
            for group, full in zip(self.groups, self.gathered, strict=True):
                group.decode(full)
            self._mark(0)  # the bytes are those that autograd saved views of, so these count as unmodified again

    @staticmethod
    def _await(works: list[Work]) -> bool:
        """Wait for works and remove them; return True if there were any."""
        for work in works:
            work.wait()
        was_any = bool(works)
        works.clear()
        return was_any

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is a view of this unit's gathered weights in a slot."""
        return self._block is not None and self._block.holds(tensor)

    def reshard(self, loses_memory: bool) -> None:
        """Give up the gathered weights, which are stale or about to be overwritten; `loses_memory`: they were freed."""
        # See Note [Slots and saved views]: an unannounced backward raises "modified by an inplace operation" where it
        # would read the weights of another unit.
        self._mark(1)
        for group in self.groups:
            group.release_wrapped()
        if not loses_memory:
            return
        self._block = None
        for group in self.groups:
            if group.plan.gathered_bytes:
                group.invalidate_full()

    def _mark(self, version: int) -> None:
        """Set the version counters of full parameters in a slot, which saved views of them share."""
        if self._slotted:
            torch._C._autograd._unsafe_set_version_counter(self._slotted, self._versions[version])

    def _use(self, block: Block) -> None:
        # The block changes only while no forward waits for its backward.
        # See Note [Slots and saved views] in `schedule.py`.
        self._block = block
        for group_index, (group, offset) in enumerate(zip(self.groups, self._gather_offsets, strict=True)):
            if not group.plan.gathered_bytes:
                continue
            full = block.view(offset, group.plan.gathered_numel, group.plan.gathered_dtype)
            self.gathered[group_index] = full
            group.point_full_to(full)

    def to_unsharded(self, module_index: int | None = None) -> None:
        """Put the full parameters into all modules, or into the one at `module_index`.

        Something else that has been put there, by `torch.func.functional_call` or by hand, is refused.
        """
        self.is_unsharded = True
        chosen = range(len(self._swaps)) if module_index is None else (module_index,)
        self._swapped.update(chosen)
        # Written into the modules' own dictionaries: `nn.Module.__setattr__` takes most of the time of a swap.
        swaps = chain.from_iterable(self._swaps[inside] for inside in chosen)
        for owner, held, attribute, param, sharded, is_plain in swaps:
            found = held.get(attribute)
            if found is not sharded and found is not param:
                raise self._refusal_of(owner)
            if is_plain:
                held[attribute] = param
            else:
                owner.set(param)

    def check_untouched(self, module_index: int) -> None:
        """Raise if a module's forward wrote into its gathered weights: the change would be lost at the reshard.

        The error names the module; its parameters may share a version counter, so that none can be named.
        """
        # `wait_for_unshard` has set the counters to 0, and all-gathers do not raise them: something else has written.
        if any(map(_version, self._slotted_in[module_index])):
            self._mark(0)
            where = list(self.modules)[module_index] if self.modules else self.label
            raise ScheduleError(
                f"the forward of {where or self.label} modified its weights in place, and the change would be lost "
                "when they are resharded; modify parameters between forwards instead"
            )

    def to_sharded(self, module_index: int | None = None) -> None:
        """Put the sharded parameters into all modules, or into the one at `module_index`."""
        swapped = self._swapped if module_index is None else self._swapped & {module_index}
        self._swapped = self._swapped - swapped
        self.is_unsharded = self.is_unsharded and bool(self._swapped)
        for index in swapped:
            for owner, held, attribute, _, param, is_plain in self._swaps[index]:
                if is_plain:
                    held[attribute] = param
                else:
                    owner.set(param)

    def show_copies(self, copies: Sequence[Sequence[nn.Parameter]]) -> None:
        """Put given parameters into the module tree, one per parameter of each group."""
        self._swapped.update(range(len(self._swaps)))
        for group, params, of_group in zip(self.groups, copies, self.owners, strict=True):
            for sharded, param, owners in zip(group.sharded, params, of_group, strict=True):
                # Every owner of a tied weight, or the module that was left out would compute with the sharded one.
                for owner in owners:
                    if owner.parameters.get(owner.attribute) is not sharded:
                        raise self._refusal_of(owner)
                    owner.set(param)

    def _refusal_of(self, owner: ParameterPlace) -> ConfigurationError:
        return ConfigurationError(
            f"{owner.attribute} of a {type(owner.module()).__name__} in unit {self.label} is not the sharded parameter "
            "any more (functional_call, or assigned, pruned or parametrized after sharding); sharded models use their "
            "own weights, so change modules before fully_shard"
        )

    @property
    def main_changed(self) -> bool:
        """True if main weights were written to since they were last installed."""
        return any(group.main_changed for group in self.groups)

    def install_main_weights(self) -> None:
        """Copy main weights into this rank's shard of the compute weights."""
        # It writes into the memory of the weights, and would undo what is copied into them now.
        self.wait_for_outer()
        self.expect_update()
        for group in self.groups:
            group.install()

    # ---- gradients ----------------------------------------------------------------------------------------------

    @property
    def all_gather_bytes(self) -> int:
        """Bytes of the full weights that are all-gathered; 0 if every rank holds them whole."""
        return sum(plan.sent_bytes for plan in self.group_plans if plan.needs_all_gather)

    def slice_of(self, group_index: int, block: Block) -> torch.Tensor:
        """Return a group's slice of the unit's bucket, (numel,) in the communication dtype."""
        plan = self.groups[group_index].plan
        return block.view(self._bucket_offsets[group_index], plan.layout.numel, plan.precision.grad_comm)

    def scratch_of(self, group_index: int, block: Block | None) -> torch.Tensor | None:
        """Return a group's slice of the unit's scratch, in the communication dtype; None where it needs none."""
        plan, offset = self.groups[group_index].plan, self._scratch_offsets[group_index]
        numel, dtype = plan.scratch_bytes // plan.precision.grad_comm.itemsize, plan.precision.grad_comm
        return block.view(offset, numel, dtype) if block is not None and numel else None

    def outer_buffer_of(self, group_index: int, block: Block | None) -> tuple[torch.Tensor, ...]:
        """Return a group's send and receive buffers of the outer reduction; empty without a block."""
        if block is None:
            return ()
        plan, offsets = self.groups[group_index].plan, outer_buffer_offsets(self.group_plans)[0]
        dtype, numel = plan.precision.grad_comm, plan.inner_region.numel
        count = 2 if plan.received_bytes else 1
        return tuple(block.view(offset, numel, dtype) for offset in offsets[2 * group_index : 2 * group_index + count])


def set_parameter(module: nn.Module, attribute: str, param: nn.Parameter) -> None:
    """Replace a parameter; use the setter of modules that have one (recurrent layers keep a second list)."""
    if _is_plain(module):
        module._parameters[attribute] = param
    else:
        setattr(module, attribute, param)


def _is_plain(module: nn.Module) -> bool:
    return type(module).__setattr__ is nn.Module.__setattr__


def _swaps(
    groups: Sequence[ParameterGroup], owners: Sequence[Sequence[Sequence[ParameterPlace]]], modules: Sequence[nn.Module]
) -> tuple[tuple[_Swap, ...], ...]:
    """Return the swaps inside each of a unit's modules; all together where it has one, or none."""
    found: list[list[_Swap]] = [[] for _ in modules or (None,)]
    inside = [{id(inner) for inner in module.modules()} for module in modules] if len(modules) > 1 else []
    for group, of_group in zip(groups, owners, strict=True):
        for full, sharded, at in zip(group.full, group.sharded, of_group, strict=True):
            for owner in at:
                swap = (owner, owner.parameters, owner.attribute, full, sharded, owner.is_plain)
                for index in [i for i, ids in enumerate(inside) if id(owner.module()) in ids] or (0,):
                    found[index].append(swap)
    return tuple(map(tuple, found))


class StructureCheck:
    """Check for trainable parameters that joined the model after sharding: each rank would train its own.

    Modules around known ones (wrappers) and modules without trainable parameters may come and go.
    """

    def __init__(self, roots: Mapping[str, nn.Module], units: Sequence[Unit]) -> None:
        """Record the modules and parameters of `roots`, by path."""
        # by label, unit modules that were compiled in place, which must not be compiled again
        self.compiled: list[tuple[str, weakref.ref[nn.Module], object]] = []
        modules = [named for path, root in roots.items() for named in root.named_modules(prefix=path)]
        # weak, since a module that is sharded in place owns the engine
        self._modules = tuple((name, weakref.ref(module), module._parameters) for name, module in modules)
        self._known_modules = {id(None), *(id(module) for _, module in modules)}
        self._known_params = {id(None), *(id(param) for root in roots.values() for param in root.parameters())}
        self._known_params.update(id(param) for unit in units for group in unit.groups for param in group.full)

    def check(self) -> None:
        """Raise for the first module or parameter that is new, or unit that was compiled again."""
        for label, reference, call in self.compiled:
            if (compiled := reference()) is not None and compiled._compiled_call_impl is not call:
                raise ConfigurationError(
                    f"unit {label} was compiled before and after the model was sharded; compile it once, before"
                )
        known_modules, known_params = self._known_modules, self._known_params
        for name, weakly, parameters in self._modules:
            module = weakly()
            children = {} if module is None else module._modules
            if known_modules.issuperset(map(id, children.values())) and known_params.issuperset(
                map(id, parameters.values())
            ):
                continue  # as nearly always
            for attribute, child in children.items():
                if child is None or id(child) in known_modules:
                    continue
                if any(param.requires_grad and id(param) not in known_params for param in child.parameters()):
                    what = f"a {type(child).__name__} with trainable parameters"
                    raise joined_late(f"{name}.{attribute}".lstrip("."), what)
            for attribute, param in parameters.items():
                if param is not None and id(param) not in known_params and param.requires_grad:
                    raise joined_late(f"{name}.{attribute}".lstrip("."), "a parameter")


def joined_late(name: str, what: str) -> ConfigurationError:
    """Make the error about trainable parameters that joined the model after sharding."""
    return ConfigurationError(
        f"{name} is {what} that was put there after the model was sharded, so every rank would train its own copy; "
        "change the model before fully_shard, or freeze what is added"
    )
