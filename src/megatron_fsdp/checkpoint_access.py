"""The part of the wrapper that state dicts go through: what is saved, under which names, and how it comes back."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.runtime.assemble import Assembly
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.expert_state import names_as_saved, state_as_held, state_as_saved
from megatron_fsdp.runtime.load_check import are_from_file, check_load, other_shards, raise_everywhere
from megatron_fsdp.runtime.state_dicts import own_shard

StateDict = dict[str, Any]

_PREFIX = "module."


class CheckpointAccess(nn.Module):
    """State dicts of a sharded model and of its optimizers."""

    _engine: Engine
    _assembly: Assembly

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load as `torch.nn.Module.load_state_dict` does, then install the weights.

        Takes this rank's shards, as `state_dict()` gives them, and whole tensors that are the same on every rank, in
        any mixture; whole tensors of experts may be those of all ranks. No communication, but for DTensors that torch
        has cut, as those of FSDP2: they are gathered one after another, so that all ranks have to load them.

        Args:
            state_dict: By the names of `state_dict()`.
            strict: Refuse missing and unexpected keys. Shapes and cuts that do not fit are refused in any case.
            assign: False.

        Returns:
            What torch returns: the missing and the unexpected keys.

        Raises:
            CheckpointError: Something does not fit; lists everything. Nothing was loaded. Each rank judges what it was
                given and only ranks that were given what does not fit raise, as a state dict may be loaded by one rank
                alone; where shards come out of a file (`torch.load`) all ranks have to load them, and all raise.
            ConfigurationError: `assign` is True.
        """
        if assign:
            raise ConfigurationError(
                "load_state_dict(assign=True) would replace the sharded parameters of the model, which are pieces of "
                "flat buffers; load with assign=False, which copies"
            )
        given: object = state_dict
        if not isinstance(given, Mapping):
            return super().load_state_dict(state_dict, strict)  # which torch refuses
        state_dict = self._recut(state_dict)
        problem = self._problem_of_load(state_dict, strict)
        self.refuse_load(problem, are_from_file(state_dict.values()))
        result = super().load_state_dict(state_dict, strict)
        self._engine.install_main_weights()
        return result

    def refuse_load(self, problem: str | None, is_from_file: bool) -> None:
        """Raise what is wrong with a state dict; on all ranks, together, where it comes out of a file.

        Raises:
            CheckpointError: Something is wrong here, or, with `is_from_file`, on any rank.
        """
        raise_everywhere(problem, self._engine.reaching_all if is_from_file else ())

    def _recut(self, state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cut as parameters what torch has cut into equal shards."""
        recut, names = {}, {name for group in self._engine.groups() for name in group.names}
        for key, value in state_dict.items():
            name = self.held_name(key.removeprefix(_PREFIX))
            is_cut_by_torch = isinstance(value, DTensor) and not isinstance(value, UnevenDTensor)
            if not is_cut_by_torch or (name is not None and name not in names):
                continue  # as buffers may be, which are held as they are
            if not all(placement.is_replicate() for placement in value.placements):
                whole = value.full_tensor()
                recut[key] = whole if name is None else self.held_tensor(name, whole).clone()
        if not recut:
            return state_dict
        found = OrderedDict({**state_dict, **recut})
        if hasattr(state_dict, "_metadata"):
            found._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return found

    def _problem_of_load(self, state_dict: Mapping[str, Any], strict: bool) -> str | None:
        """Say what does not fit, and what to do; None where nothing is wrong."""
        groups = self._engine.groups()
        frames = {name: frame for group in groups for name, frame in zip(group.names, group.frames, strict=True)}
        keys = {self.checkpoint_name(name): name for name in frames}
        fit = [key for key in keys if _PREFIX + key in state_dict]
        bare = [key for key in keys if key in state_dict]
        if bare and not fit:
            return (
                f"the keys of the state dict lack the prefix {_PREFIX!r} (such as {bare[0]!r}), as those of an "
                "unsharded model do, and nothing was loaded; load it with model.module.load_state_dict(state_dict)"
            )
        for key in fit:
            held = self._engine.expert_names.as_held(keys[key], state_dict[_PREFIX + key])
            problem = other_shards(held, frames[keys[key]])
            if problem is not None:
                return problem
        load = super().load_state_dict
        problem = check_load(self, lambda: load(state_dict, strict))
        if problem is None:
            return None
        may_leave_out = fit and check_load(self, lambda: load(state_dict, strict=False)) is None
        advice = ", or pass strict=False to load what fits and leave out the rest" if may_leave_out else ""
        return (
            f"the state dict does not fit, and nothing was loaded: {problem}\n"
            f"load what state_dict() of the same model gave{advice}"
        )

    def checkpoint_name(self, name: str) -> str:
        """What a checkpoint of all ranks calls a parameter or buffer of this rank.

        Another name only for experts that ranks number from 0 each: those are numbered over all ranks there.

        Args:
            name: Canonical name, without the wrapper's own `module.`.
        """
        return self._engine.expert_names.name_of(name)

    def checkpoint_view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is cut as a parameter, the parameter itself or state of it, as checkpoints of all ranks see it.

        Another tensor, over the same memory, only for experts that share their name with those of other ranks: where
        they are stacked, its shape is that of all ranks' experts.

        Args:
            name: Canonical name of the parameter.
            tensor: A DTensor cut as it is; others are handed back.
        """
        seen: torch.Tensor = self._engine.expert_names.as_saved(name, tensor)
        return seen

    def held_name(self, name: str) -> str | None:
        """The reverse of `checkpoint_name`; None for an expert of another rank."""
        return self._engine.expert_names.name_here(name)

    def held_tensor(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The reverse of `checkpoint_view`, and of a whole tensor this rank's shard, as views; others are handed back.

        Args:
            name: Canonical name of the parameter.
            tensor: What is cut as it is, or of the shape of the whole parameter, or of those of all ranks' experts.
        """
        engine = self._engine
        own: torch.Tensor = engine.expert_names.as_held(name, tensor)
        for group in engine.groups():
            if name in group.names:
                own = own_shard(own, group.frames[group.names.index(name)])
        return own

    def stop_describing_state_dicts(self) -> None:
        """Leave the tensors of model state dicts without the description that torch.distributed.checkpoint reads."""
        for handle in self._assembly.state_dict_handles:
            handle.remove()

    def describe_optimizer_state(self, param: torch.Tensor, value: object) -> None:
        """Describe the chunks of a state tensor that is sharded as its parameter."""
        group, index = self._engine.places[id(param)]
        if isinstance(value, DTensor) and value.shape == param.shape:
            group.describe_chunks(index, value)

    def optimizer_state_as_saved(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """An optimizer's state dict as that of one optimizer with the experts of all ranks, with this rank's part."""
        if self._engine.expert_names.is_trivial:
            return state_dict
        return state_as_saved(optimizer, state_dict, self._names_by_id(), self._engine.expert_names)

    @property
    def has_other_experts_elsewhere(self) -> bool:
        """Whether ranks hold different experts, so that checkpoints number the parameters of all ranks."""
        return not self._engine.expert_names.is_trivial

    def optimizer_names(self, optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        """Names in a checkpoint by the numbers of `optimizer.state_dict()`, in groups; those of all ranks.

        None where no ranks hold other experts, so that the numbers are those of this rank's parameters.
        """
        if self._engine.expert_names.is_trivial:
            return None
        return names_as_saved(optimizer, self._names_by_id(), self._engine.expert_names)

    def optimizer_state_as_held(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
        """The reverse: what concerns this rank of such a state dict, numbered as torch does here."""
        if self._engine.expert_names.is_trivial:
            return state_dict
        return state_as_held(optimizer, state_dict, self._names_by_id(), self._engine.expert_names)

    @property
    def state_dict_was_filled(self) -> bool:
        """Whether a state dict of this model has been written to since the last forward, as `dcp.load` does."""
        return self._engine.handed_out.is_written

    def _names_by_id(self) -> dict[int, str]:
        groups = self._engine.groups()
        return {id(param): name for group in groups for name, param in zip(group.names, group.sharded, strict=True)}
