"""The scripts of `sharded_run` in parallel by torch alone, with nothing of ours: is it the model that is at fault?"""

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tests.support.arrangements import Arrangement
from tests.support.sharded_run import Outcome, Run, Scenario, Setting, outcome_of

Average = Callable[[nn.Module], None]
"""Turns the gradients of this rank's loss into those of all ranks'."""


class HandMadeRun(Run):
    """A model that is divided as an arrangement says and not sharded; its gradients are averaged before each step."""

    def __init__(self, scenario: Scenario, arrangement: Arrangement, average: Average) -> None:
        super().__init__(scenario, Setting(0, arrangement=arrangement), dist.get_world_size())
        self._average = average

    def _shard(self, scenario: Scenario, setting: Setting) -> None:
        setting.arrangement.place(self.model)
        self.optimizer = scenario.optimizer(self.model)

    def loss(self, index: int) -> Tensor:
        loss = self.case.loss(self.model, self.arrangement.part(self.whole_batch(index)))
        self.note_loss(loss)
        return loss

    def note_gradients(self, label: str = "gradients") -> None:
        self._average(self.model)
        grads = {name: whole_tensor(p.grad) for name, p in self.model.named_parameters() if p.grad is not None}
        self.note(label, self.arrangement.whole(grads))

    def note_parameters(self, label: str = "parameters") -> None:
        params = {name: whole_tensor(p) for name, p in self.model.named_parameters()}
        self.note(label, self.arrangement.whole(params))


def whole_tensor(value: Tensor) -> Tensor:
    """The full tensor of a DTensor; other tensors as they are."""
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def run_by_hand(scenario: Scenario, arrangement: Arrangement, average: Average) -> Outcome:
    """Run a scenario on this rank, by torch alone."""
    run = HandMadeRun(scenario, arrangement, average)
    scenario.script(run)
    return outcome_of(run)


def average_over(model: nn.Module, group: dist.ProcessGroup | None, divisor: int, among: str = "") -> None:
    """Sum the gradients of parameters whose name contains `among` over a group, and divide them."""
    for name, param in model.named_parameters():
        if among in name and param.grad is not None:
            grad = param.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            dist.all_reduce(local, group=group)
            local /= divisor
