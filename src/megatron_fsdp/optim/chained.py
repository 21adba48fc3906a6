"""Several optimizers of different parameters as one, such as Muon for matrices and AdamW for the rest; and its step."""

from __future__ import annotations

import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from megatron_fsdp.comm.agreement import Problem, ask
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from megatron_fsdp.errors import ConfigurationError, RankError
from megatron_fsdp.optim.full_tensor.exchange import Met, Ranks
from megatron_fsdp.optim.local_step import ExchangingStep, Step, params_of, without_parameter


class ChainedOptimizer(Optimizer):
    """Several optimizers of different parameters as one: one step, one state dict, one checkpoint, one scheduler.

        muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)
        model, optimizer = fully_shard(model, ChainedOptimizer(muon, adamw))

    It has the groups and the state of its optimizers, not copies of them. They step in the order given.

    Args:
        optimizers: At least one; no parameter is in two of them. Step them through this object from now on.

    Attributes:
        optimizers: As given.

    Raises:
        ConfigurationError: There is none, something is no optimizer or a chain itself, or two have a parameter.
    """

    optimizers: tuple[Optimizer, ...]

    def __init__(self, *optimizers: Optimizer) -> None:
        given: tuple[object, ...] = optimizers
        wrong = [each for each in given if not isinstance(each, Optimizer) or isinstance(each, ChainedOptimizer)]
        if wrong or not optimizers:
            kind = type(wrong[0]).__name__ if wrong else "nothing"
            raise ConfigurationError(
                f"ChainedOptimizer was given {kind}; give optimizers of torch, of this library or of your own, one "
                "after another and not in a list"
            )
        shared = set.intersection(*(set(each.defaults) for each in optimizers))  # schedulers look for momentum or betas
        defaults = {key: value for key, value in optimizers[0].defaults.items() if key in shared}
        # With torch's hooks, and nothing of its own.
        self.__setstate__({"optimizers": optimizers, "defaults": defaults})
        self._check_parameters()
        self.register_step_pre_hook(ChainedOptimizer._check_parameters)  # one may have been given a new group

    def _check_parameters(self, *_step_arguments: object) -> None:
        """Raise if two optimizers have a parameter: both would step it, and one of its states would be lost."""
        twice = [param for param, count in Counter(params_of(self)).items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"ChainedOptimizer was given a parameter of shape {tuple(twice[0].shape)} twice; give it to one "
                "optimizer"
            )
        keys = Counter(key for each in self.optimizers for key in without_parameter(each.state))
        for key in (key for key, count in keys.items() if count > 1):
            raise ConfigurationError(
                f"two optimizers of a ChainedOptimizer keep state that belongs to no parameter under {key!r}, of which "
                "its state dict would hold one; rename one, or step them without a chain"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy."""
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in their order."""
        return [group for each in self.optimizers for group in each.param_groups]

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The state of all optimizers by parameter; new entries belong into that of one of them."""
        return defaultdict(dict, {param: state for each in self.optimizers for param, state in each.state.items()})

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizers one after another.

        Args:
            closure: Computes gradients and returns a loss, which is returned; called once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers:
            each.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise: a chain has no groups of its own, and nothing says to which optimizer this one would belong."""
        raise ConfigurationError(
            f"ChainedOptimizer.add_param_group was given a group with {', '.join(map(str, param_group))}, and not told "
            "for which optimizer; add it to one of them before they are chained"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state dict of such a chain; each optimizer loads its own part, as it does alone."""
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError("loaded state dict has a different number of parameter groups")  # as torch says it
        first, shared, last = 0, without_parameter(state_dict["state"]), self.optimizers[-1]
        for each in self.optimizers:
            own = groups[first : first + len(each.param_groups)]
            numbers = [number for group in own for number in group["params"]]
            state = {number: state_dict["state"][number] for number in numbers if number in state_dict["state"]}
            state |= {key: value for key, value in shared.items() if key in each.state or each is last}
            shared = {key: value for key, value in shared.items() if key not in state}
            each.load_state_dict({"state": state, "param_groups": own})
            first += len(own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)


class ChainedStep(ExchangingStep):
    """Steps the optimizers of a chain; they fail on all ranks together.

    A rank on which one fails steps the others all the same, as its peers do, which may wait for messages. Then ranks
    exchange the outcomes of all optimizers, by one small all-gather. No rank waits outside of `step` and `finish`.
    """

    def __init__(self, members: Sequence[tuple[Optimizer, Step]]) -> None:
        super().__init__()
        self._members = members
        self._running: Optimizer | None = None
        self._has_begun = False  # a proxy of the running one steps: ours, or that of its own hooks
        self._stands_in = False
        self._met: list[BaseException | None] = []  # in each optimizer, in the step that is running
        self._ranks: dict[DeviceMesh, Ranks] = {}
        before, after = weakref.WeakMethod(self._before), weakref.WeakMethod(self._after)
        for optimizer, way in members:
            optimizer.register_step_pre_hook(partial(_call, before, way))
            first = optimizer.register_step_post_hook(partial(_call, after, way))
            optimizer._optimizer_step_post_hooks.move_to_end(first.id, last=False)  # type: ignore[attr-defined]

    def proxy(self, optimizer: Optimizer) -> Optimizer:
        """Return a proxy: a chain whose only optimizer is this object."""
        made = object.__new__(ChainedOptimizer)
        made.__dict__ = {**optimizer.__dict__, "optimizers": (self,)}
        return made

    def step(self) -> None:
        """Step the optimizers one after another, with their own hooks; errors are kept for `finish`."""
        self._begun = None
        self._all(self._step)

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Join the agreement of each optimizer, whose steps a hook of the chain has prevented."""
        assert error is not None
        self._begun = None

        def fail(_optimizer: Optimizer, way: Step) -> None:
            way.fail(error)
            raise error

        self._all(fail)
        self._finish(optimizer, Met.of(error))

    def _all(self, step: Callable[[Optimizer, Step], None]) -> None:
        """Run a function for the optimizers one after another; errors are kept for `finish`."""
        self._met = []
        for optimizer, way in self._members:
            self._running, self._has_begun, self._stands_in = optimizer, False, False
            way.begin(optimizer)
            try:
                step(optimizer, way)
            except RankError as error:  # on all ranks together
                self._met.append(error)
                return
            except BaseException as error:  # noqa: BLE001 - see above
                self._met.append(error)
            else:
                self._met.append(None)
            finally:
                self._running = None

    def _step(self, optimizer: Optimizer, way: Step) -> None:
        try:
            optimizer.step()
        except RankError:
            raise
        except BaseException as error:
            if self._stands_in or not self._has_begun:  # else it has done so by itself
                way.fail(error)
            raise

    def _before(self, way: Step, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if optimizer is not self._running:
            return None  # somebody steps it without the chain
        self._has_begun = True
        if args[0] is not optimizer:
            return None  # it was connected before it was chained, and does by itself what is needed
        self._stands_in = True
        return (way.proxy(optimizer), *args[1:]), kwargs

    def _after(self, way: Step, optimizer: Optimizer, *_step_arguments: object) -> None:
        if optimizer is self._running and self._stands_in:
            way.finish(optimizer)

    def finish(self, optimizer: Optimizer) -> None:
        """Exchange the outcomes of all optimizers; raise on all ranks if any failed. Collective.

        Raises:
            RankError: On every rank, with the same message, where one has failed on a rank; says which ones stepped.
            Exception: What a rank without peers has met.
        """
        self._finish(optimizer, Met())

    def _finish(self, optimizer: Optimizer, prevented: Met) -> None:
        here = [Met.of(error).text for error in self._met]
        error = next(filter(None, self._met), None)
        names = [type(each).__name__ for each, _ in self._members]
        groups = [ranks.group for ranks in self._all_ranks(optimizer)]
        if error is not None and all(group is None for group in groups):
            raise error
        ask([(group, (prevented, here)) for group in groups], lambda everyone: _judge(names, everyone), error)

    def hand_over(self) -> None:
        """Move remaining new state to each optimizer."""
        for _, way in self._members:
            way.hand_over()

    def _all_ranks(self, optimizer: Optimizer) -> list[Ranks]:
        """Return the ranks of all meshes, the most first, but for those that all belong to another mesh."""
        params = params_of(optimizer)
        meshes = dict.fromkeys(param.shard_spec.mesh for param in params if isinstance(param, UnevenDTensor))
        found: dict[frozenset[int], Ranks] = {}
        for mesh in sorted(meshes, key=lambda mesh: -mesh.size()):
            members = frozenset(mesh.mesh.flatten().tolist())
            if not any(members <= others for others in found):
                self._ranks[mesh] = found[members] = self._ranks.get(mesh) or Ranks(mesh)
        return list(found.values())


def _call(method: weakref.WeakMethod[Callable[..., Any]], *arguments: Any) -> Any:
    alive = method()
    return None if alive is None else alive(*arguments)


def _judge(names: Sequence[str], everyone: Sequence[tuple[Met, Sequence[str | None]]]) -> Problem | None:
    first, _ = everyone[0]
    if first.is_ours and all(prevented == first for prevented, _ in everyone):
        return None  # each rank raises it
    return _told(names, [here for _, here in everyone])


def _told(names: Sequence[str], everyone: Sequence[Sequence[str | None]]) -> Problem | None:
    """Return the problem of a chain's step, with the outcome of each optimizer; None if all have stepped.

    `everyone` has each rank's error, or None, in each of the optimizers that were begun.
    """
    told, met = [], list(zip(*everyone, strict=True))
    if not any(text for texts in met for text in texts):
        return None
    for name, texts in zip(names, met, strict=False):
        failed = [f"on rank {rank} ({text})" for rank, text in enumerate(texts) if text is not None]
        if len(failed) == len(texts) and len(set(texts)) == 1:
            failed = [f"on all ranks ({texts[0]})"]
        told.append(f"{name} failed {', '.join(failed)}" if failed else f"{name} stepped")
    told += [f"{name} was not begun" for name in names[len(met) :]]
    has_stepped = any(text is None for texts in met for text in texts)
    cure = "load a checkpoint before the next step" if has_stepped else "no weights were changed"
    return RankError, f"the step of a ChainedOptimizer failed: {'; '.join(told)}; {cure}"
