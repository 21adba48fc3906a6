"""Let ranks agree before they go on: what one rank alone finds wrong stops all of them, with the same message."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

from megatron_fsdp.comm.axis import real_values
from megatron_fsdp.comm.groups import gather_objects
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError


@real_values()
def agree(group: dist.ProcessGroup | None, error: Exception | None, facts: Sequence[str] = ()) -> None:
    """Compare over the ranks; one small collective, and where facts differ another one, to tell which.

    Args:
        group: The ranks; None for a single one.
        error: What this rank found wrong.
        facts: What has to be the same everywhere, one readable line each, in an order that all ranks share.

    Raises:
        ConfigurationError: On every rank, with the same message, where ranks differ.
        Exception: `error` itself, where every rank found the same.
    """
    if group is None:
        if error is not None:
            raise error
        return
    digest = hashlib.sha256("\n".join(facts).encode()).digest()
    everyone = gather_objects(group, (str(error) if error is not None else None, digest))
    errors = [found for found, _ in everyone]
    if error is not None and all(found == errors[0] for found in errors):
        raise error
    if any(found is not None for found in errors):
        told = "; ".join(f"rank {rank}: {found}" for rank, found in enumerate(errors) if found is not None)
        raise ConfigurationError(
            f"some ranks of the group cannot go on ({told}); give every rank the same model and arguments"
        )
    if any(found != digest for _, found in everyone):
        _compare(gather_objects(group, list(facts)))


def agree_over(groups: Sequence[dist.ProcessGroup | None], error: Exception | None, facts: Sequence[str] = ()) -> None:
    """As `agree`, over several groups one after another, so that what one rank finds stops the ranks of all of them.

    Args:
        groups: Data-parallel ranks first; facts are compared there only.
        error: What this rank found wrong.
        facts: As for `agree`.

    Raises:
        ConfigurationError: As `agree`.
    """
    for position, group in enumerate(groups):
        try:
            agree(group, error, facts if position == 0 and error is None else ())
        except (MegatronFSDPError, TypeError) as found:  # carried on to the ranks of the next group
            error = found
    if error is not None:
        raise error


def _compare(facts: Sequence[Sequence[str]]) -> None:
    for rank, other in enumerate(facts):
        for expected, found in zip_longest(facts[0], other, fillvalue="nothing more"):
            if expected != found:
                raise ConfigurationError(
                    f"ranks of the group disagree: rank 0 has {expected!r}, rank {rank} has {found!r}; give every "
                    "rank the same model and arguments"
                )
