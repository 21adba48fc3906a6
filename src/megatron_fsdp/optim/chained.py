"""Several optimizers of different parameters as one, such as Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from megatron_fsdp.errors import ConfigurationError


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
    _num_params = 0  # of all groups, when they were last checked

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
        self.__setstate__(
            {"optimizers": optimizers, "defaults": defaults}
        )  # with torch's hooks, and nothing of its own
        self._check_parameters()
        self.register_step_pre_hook(ChainedOptimizer._check_parameters)  # one may have been given a new group

    def _check_parameters(self, *_step_arguments: object) -> None:
        """Refuse a parameter that two optimizers have: both would step it, and one of its states would be lost."""
        groups, before = self.param_groups, self._num_params
        self._num_params = sum(len(group["params"]) for group in groups)
        if self._num_params == before:
            return
        twice = [param for param, count in Counter(p for group in groups for p in group["params"]).items() if count > 1]
        if twice:
            raise ConfigurationError(
                f"ChainedOptimizer was given a parameter of shape {tuple(twice[0].shape)} twice; give it to one "
                "optimizer"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of."""
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
        """Refuse.

        Raises:
            ConfigurationError: It is not said to which optimizer the group would belong.
        """
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
        first = 0
        for each in self.optimizers:
            own = groups[first : first + len(each.param_groups)]
            numbers = [number for group in own for number in group["params"]]
            state = {number: state_dict["state"][number] for number in numbers if number in state_dict["state"]}
            each.load_state_dict({"state": state, "param_groups": own})
            first += len(own)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def members_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """Return the optimizers of a chain, or the optimizer itself."""
    return optimizer.optimizers if isinstance(optimizer, ChainedOptimizer) else (optimizer,)
