"""Notes on an error of communication: where it happened, and what is known of the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron_fsdp.errors import MegatronFSDPError
from megatron_fsdp.runtime.observer import Observers
from megatron_fsdp.runtime.verify_ranks import Verifier

_HANG_ADVICE = (
    "if a rank is missing, MFSDP_HANG_LOG=DIR names it and what it does (docs/hangs.md), and MFSDP_VERIFY_RANKS=1 "
    "finds the first difference between ranks (docs/ranks.md)"
)


def explain(error: BaseException, where: str, observers: Observers, verifier: Verifier | None) -> None:
    """Add notes to an error of a collective, such as one that timed out; others stay as they are.

    Args:
        error: What was raised.
        where: During what.
        observers: May know what other ranks do.
        verifier: Is told that ranks may have stopped at different points; None: nobody compares them.
    """
    if not isinstance(error, RuntimeError) or isinstance(error, MegatronFSDPError):
        return
    if verifier is not None:
        verifier.communication_failed(error)
    explanations = observers.explanations()
    error.add_note(where if explanations else f"{where}; {_HANG_ADVICE}")
    for text in explanations:
        error.add_note(text)


@contextmanager
def explained(where: str, observers: Observers, verifier: Verifier | None) -> Iterator[None]:
    """Add them to what is raised inside of a block."""
    try:
        yield
    except RuntimeError as error:
        explain(error, where, observers, verifier)
        raise
