"""Training scripts that clip, by the model's method and by torch's function."""

from torch import nn
from torch.distributed.tensor import DTensor

from tests.support.sharded_run import Run

MAX_NORM = 0.05
"""A norm that every gradient exceeds."""

STEPS = 3


def clip_by_model(run: Run) -> None:
    """Three steps with the method; torch's function on one process."""
    for step in range(STEPS):
        run.loss(step).backward()
        if run.sharded is not None:
            norm = run.sharded.clip_grad_norm_(MAX_NORM)
        else:
            norm = nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.note("norm", {"norm": norm})
        run.step()


def clip_by_torch(run: Run) -> None:
    """Three steps with torch's function on both sides."""
    for step in range(STEPS):
        run.loss(step).backward()
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), MAX_NORM)
        run.note("norm", {"norm": norm.full_tensor() if isinstance(norm, DTensor) else norm})
        run.step()
