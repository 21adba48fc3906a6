"""Compare a sharded run with one process on the whole batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

BatchT = TypeVar("BatchT")


@contextmanager
def fixed_seed(seed: int) -> Iterator[None]:
    """Seed torch's generators for the block, then restore their states."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@dataclass(frozen=True)
class ReferenceRun:
    """What each optimizer step of a one-process run left behind; index = step.

    Attributes:
        losses: mean loss over the step's microbatches.
        gradients: gradient by parameter name before clipping; parameters without one are absent.
        gradient_norms: total 2-norm before clipping; empty when no `max_norm` was given.
        parameters: parameter by name after the optimizer step.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    gradient_norms: list[float]
    parameters: list[dict[str, Tensor]]


def reference_run(
    model_fn: Callable[[], nn.Module],
    optimizer_fn: Callable[[nn.Module], torch.optim.Optimizer],
    steps: Sequence[Sequence[BatchT]],
    loss_fn: Callable[[nn.Module, BatchT], Tensor],
    *,
    zero_between: bool = False,
    max_norm: float | None = None,
) -> ReferenceRun:
    """Train one process on whole batches.

    Args:
        model_fn: builds the model.
        optimizer_fn: builds the optimizer of that model.
        steps: for each optimizer step its microbatches, each the whole batch of all ranks.
        loss_fn: (model, microbatch) -> scalar loss; it is divided by the number of microbatches before backward.
        zero_between: zero the gradients before every backward, so that only the last microbatch counts.
        max_norm: clip the total gradient norm to this before each step.
    """
    model = model_fn()
    optimizer = optimizer_fn(model)
    run = ReferenceRun([], [], [], [])
    for microbatches in steps:
        optimizer.zero_grad()
        losses = []
        for microbatch in microbatches:
            if zero_between:
                optimizer.zero_grad()
            loss = loss_fn(model, microbatch)
            (loss / len(microbatches)).backward()
            losses.append(loss.item())
        run.losses.append(sum(losses) / len(losses))
        run.gradients.append(gradients_by_name(model))
        if max_norm is not None:
            run.gradient_norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        run.parameters.append(parameters_by_name(model))
    return run


def gradients_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradient of every parameter that has one."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def parameters_by_name(model: nn.Module) -> dict[str, Tensor]:
    """Copy every parameter; a tied one appears once, under its first name."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_equal_tensors(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0, atol: float = 0.0
) -> None:
    """Assert the same names, shapes, dtypes and values: |actual - expected| <= atol + rtol * |expected|.

    With both tolerances at 0 values must be equal bit for bit, except that 0.0 equals -0.0; NaN equals nothing.

    Raises:
        AssertionError: naming the missing or extra names, or the first tensor of `expected` that differs.
    """
    missing, extra = sorted(expected.keys() - actual.keys()), sorted(actual.keys() - expected.keys())
    if missing or extra:
        raise AssertionError(f"names differ: missing {missing}, unexpected {extra}")
    for name, want in expected.items():
        _assert_equal_tensor(name, actual[name], want, rtol, atol)


def _assert_equal_tensor(name: str, got: Tensor, want: Tensor, rtol: float, atol: float) -> None:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise AssertionError(f"{name}: got {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}")
    got, want = got.detach().cpu().double(), want.detach().cpu().double()
    error = (got - want).abs()
    wrong = ~((error <= atol + rtol * want.abs()) | (got == want))
    if not bool(wrong.any()):
        return
    worst = int(torch.where(wrong, error.nan_to_num(nan=torch.inf), -1.0).argmax())
    largest = want.abs().max().item()
    raise AssertionError(
        f"{name} {tuple(want.shape)}: {int(wrong.sum())} of {wrong.numel()} elements differ; worst at flat index "
        f"{worst}: got {got.flatten()[worst].item():.9g}, expected {want.flatten()[worst].item():.9g}, max abs error "
        f"{error.max().item():.3g}, {error.max().item() / max(largest, 1e-300):.3g} of the largest expected value "
        f"(rtol {rtol:g}, atol {atol:g})"
    )
