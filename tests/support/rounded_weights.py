"""One process that computes with weights in a narrow format, as ranks are to do, and steps exact ones."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tests.support.case import SAMPLES, Recording, Scenario, one_thread
from tests.support.on_ranks import fixed_seed


def train_rounded(
    scenario: Scenario,
    ranks: tuple[int, ...],
    batches: Sequence[Sequence[int]],
    compute: Callable[[nn.Module, nn.Module], None],
    main_dtype: torch.dtype = torch.float32,
    per_token: bool = False,
) -> Recording:
    """Train on the parts of the ranks (outer and inner ones) of some batches for each step.

    `compute(model, main)` gives the model what it computes with, of the main weights of another one. Gradients are
    added up in float32: those of inner ranks in their order, then the sums of outer ones. Losses are of ranks in turn.
    """
    num_ranks, recording = math.prod(ranks), Recording()
    with fixed_seed(0):
        model = scenario.case.build()
    main = copy.deepcopy(model).to(main_dtype)
    optimizer = scenario.optimizer(main)
    with one_thread():
        for indices in batches:
            compute(model, main)
            totals = [torch.zeros_like(param, dtype=torch.float32) for param in main.parameters()]
            for index in indices:
                whole, of_ranks = scenario.case.make_batch(SAMPLES, torch.Generator().manual_seed(index)), []
                for rank in range(num_ranks):
                    loss = scenario.case.loss(model, whole.part(rank, num_ranks))
                    of_ranks.append([grad.float() for grad in torch.autograd.grad(loss, list(model.parameters()))])
                    recording.losses.append(loss.item())
                for total, grads in zip(totals, zip(*of_ranks, strict=True), strict=True):
                    total += _added(grads, ranks[-1]) / (1 if per_token else num_ranks)
            for param, total in zip(main.parameters(), totals, strict=True):
                param.grad = total.to(main_dtype)
            recording.notes.append(("gradients", {name: param.grad for name, param in main.named_parameters()}))
            optimizer.step()
            weights = {name: param.detach().clone() for name, param in main.named_parameters()}
            recording.notes.append(("parameters", weights))
    return recording


def _added(of_ranks: Sequence[Tensor], inner: int) -> Tensor:
    sums = [sum(of_ranks[first : first + inner]) for first in range(0, len(of_ranks), inner)]
    return torch.as_tensor(sum(sums))
