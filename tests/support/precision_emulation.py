"""What a policy promises, worked out on one process: every cast and every sum in the dtype and the order it names.

For each rank in turn: autograd's gradient, cast to the dtype that travels. Then their sum in rank order, in float32 or
wider (an all-reduce: in the dtype that travels), times the factor, cast into the main gradient and added up there over
microbatches. Then a copy in the dtype of the main weights, an update of these, and a cast into compute weights. The
operations are elementwise and the factors powers of two, so the values do not depend on how a tensor is cut.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy
from megatron_fsdp.config.precision import ResolvedPrecision, resolve_precision
from tests.support.models import ModelCase
from tests.support.parity import fixed_seed
from tests.support.sharded_run import SAMPLES

LR, MOMENTUM = 2**-4, 0.5


def exact_sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """SGD whose factors are powers of two: products are exact, so fused and plain multiply-adds agree."""
    return torch.optim.SGD(params, lr=LR, momentum=MOMENTUM)


@dataclass(frozen=True)
class Job:
    """One training run.

    Attributes:
        case: Model and data; the model in the dtype that it computes in.
        policy: The dtypes.
        strategy: 0 to 3.
        mode: "each" (reduce after every microbatch), "last" (`is_last_microbatch`) or "no_sync".
        steps: Optimizer steps.
        microbatches: Per step.
    """

    case: ModelCase
    policy: MixedPrecisionPolicy
    strategy: int
    mode: str = "each"
    steps: int = 2
    microbatches: int = 3

    @property
    def defers(self) -> bool:
        """Whether gradients wait, whole and not reduced, for the last microbatch."""
        return self.mode == "no_sync" or (self.mode == "last" and self.strategy < 2)

    @property
    def all_reduces(self) -> bool:
        """Whether the sum over ranks is an all-reduce, in the dtype that travels."""
        return self.strategy == 0


@dataclass
class History:
    """Values by step: losses of every rank and microbatch, gradients as the optimizer saw them, main weights."""

    losses: list[list[float]] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)


def emulate(job: Job, num_ranks: int) -> History:
    """Train on this process as `num_ranks` ranks are to train; one thread, as they have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _Emulation(job, num_ranks).run()
    finally:
        torch.set_num_threads(threads)


class _Emulation:
    def __init__(self, job: Job, num_ranks: int) -> None:
        self.job, self.num_ranks = job, num_ranks
        with fixed_seed(0):
            self.model: nn.Module = job.case.build()
        self.compute = dict(self.model.named_parameters())
        self.precision = {name: resolve_precision(job.policy, param.dtype) for name, param in self.compute.items()}
        self.main = {
            name: nn.Parameter(param.detach().to(self.precision[name].main_params, copy=True))
            for name, param in self.compute.items()
        }
        self.optimizer = exact_sgd(list(self.main.values()))

    def run(self) -> History:
        history = History()
        for step in range(self.job.steps):
            losses, gradients = self.accumulate(step * self.job.microbatches)
            for name, gradient in gradients.items():
                self.main[name].grad = gradient.to(self.precision[name].main_params)
            history.losses.append(losses)
            history.gradients.append({name: self.main[name].grad.clone() for name in gradients})  # type: ignore[union-attr]
            self.optimizer.step()
            with torch.no_grad():
                for name, param in self.compute.items():
                    param.copy_(self.main[name])
            history.weights.append({name: param.detach().clone() for name, param in self.main.items()})
        return history

    def accumulate(self, first: int) -> tuple[list[float], dict[str, Tensor]]:
        """Main gradients of one step, in `main_grads_dtype`, and the losses of rank 0, 1, ... of each microbatch."""
        losses: list[float] = []
        waiting: list[dict[str, Tensor]] = [{} for _ in range(self.num_ranks)]
        main: dict[str, Tensor] = {}
        for microbatch in range(self.job.microbatches):
            for rank in range(self.num_ranks):
                loss, gradients = self.backward(first + microbatch, rank)
                losses.append(loss)
                self.wait(waiting[rank], gradients)
            if self.job.defers and microbatch < self.job.microbatches - 1:
                continue
            for name in self.compute:
                total = self.reduce(self.precision[name], [of_rank.pop(name) for of_rank in waiting])
                if name in main:
                    main[name].add_(total)
                else:
                    main[name] = total.to(self.precision[name].main_grads, copy=True)
        return losses, main

    def backward(self, index: int, rank: int) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients, in the dtype that the model computes in, of one rank's part of a batch."""
        self.model.zero_grad()
        part = self.job.case.make_batch(SAMPLES, torch.Generator().manual_seed(index)).part(rank, self.num_ranks)
        loss = self.job.case.loss(self.model, part)
        (loss / self.job.microbatches).backward()
        return loss.item(), {name: p.grad.clone() for name, p in self.compute.items() if p.grad is not None}

    def wait(self, waiting: dict[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """Keep a rank's gradients until they are reduced: as they are, or added up in `main_grads_dtype`."""
        for name, gradient in gradients.items():
            if not self.job.defers:
                waiting[name] = gradient
            elif name in waiting:
                waiting[name].add_(gradient)
            else:
                waiting[name] = gradient.to(self.precision[name].main_grads, copy=True)

    def reduce(self, precision: ResolvedPrecision, of_ranks: list[Tensor]) -> Tensor:
        """The mean over ranks; float16 is scaled before it travels, everything else after the sum."""
        comm = precision.grad_comm
        share = 1.0 / self.num_ranks
        before, after = (share, 1.0) if comm == torch.float16 else (1.0, share)
        sent = [gradient.mul(before).to(comm) for gradient in of_ranks]
        total = sent[0] if self.job.all_reduces else sent[0].to(torch.promote_types(comm, torch.float32))
        for gradient in sent[1:]:
            total = total + gradient
        return total.mul(after)
