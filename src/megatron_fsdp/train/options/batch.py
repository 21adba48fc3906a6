"""How the samples of an optimizer step are cut into microbatches over data-parallel ranks. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class BatchPlan:
    """The samples of a step, the same for any number of ranks; what does not come out even is filled up.

    Attributes:
        micro: Samples per rank and microbatch.
        total: Samples of a step.
        ranks: Data-parallel ranks.
    """

    micro: int
    total: int
    ranks: int

    @property
    def microbatches(self) -> int:
        """Microbatches of each rank."""
        return -(-self.total // (self.micro * self.ranks))

    @property
    def filled(self) -> int:
        """Samples that only fill up, over all ranks."""
        return self.microbatches * self.micro * self.ranks - self.total

    def notices(self) -> tuple[str, ...]:
        """What to tell the user of the plan, in words."""
        if not self.filled:
            return ()
        told = (
            f"{self.filled} of {self.total + self.filled} samples of a step only fill up, and do not count: "
            f"--global-batch-size {self.total} is no multiple of --micro-batch-size {self.micro} x {self.ranks} "
            "data-parallel ranks"
        )
        return (told,)

    def place(self, rank: int, microbatch: int) -> int:
        """The place, within the step's samples, at which a rank's microbatch begins."""
        return (microbatch * self.ranks + rank) * self.micro

    def positions(self, rank: int, microbatch: int) -> tuple[int | None, ...]:
        """The places, within the step's samples, of a rank's microbatch; None fills up."""
        start = self.place(rank, microbatch)
        return tuple(place if place < self.total else None for place in range(start, start + self.micro))


def plan_batch(micro: int, total: int | None, ranks: int) -> BatchPlan:
    """Return the plan for `--micro-batch-size`, `--global-batch-size` and so many data-parallel ranks.

    Raises:
        ConfigurationError: A size is not 1 or more, or a microbatch is larger than the whole.
    """
    total = micro * ranks if total is None else total
    if total < micro:
        raise ConfigurationError(
            f"--global-batch-size {total} is less than --micro-batch-size {micro}: give a microbatch that fits in"
        )
    return BatchPlan(micro, total, ranks)
