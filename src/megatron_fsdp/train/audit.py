"""Audits of a deterministic run: steps that are computed again on other ranks, which have to give the same bits.

In an audited step every microbatch is computed a second time, by the rank before the one that computed it, and added in
the order of the microbatches; so all gradients, of microbatches and summed, are the same bits unless a rank got one
wrong. Where two ranks differ more passes decide which one. Weights are compared with what they were after the update.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.train.data.tokens import Batch, TokenData, make_feed
from megatron_fsdp.train.failures import RunError
from megatron_fsdp.train.models.trained import Trained
from megatron_fsdp.train.options.job import Job

Digests = Mapping[str, str]
"""By unit."""
Pass = tuple[int, list[list[dict[str, str]]]]
"""How many places further the rank is whose microbatches each rank computed; for each rank digests of its backwards."""
FactorsOf = Callable[[Sequence[Batch]], list[Tensor]]


class AuditError(RunError):
    """A rank computed something wrong, or its memory has changed."""


class Audit:
    """Decides which steps are audited, and audits them. Every method is collective.

    A step is audited with the probability `share`, by the seed of the run: what a rank gets wrong in one step is found
    with this probability, and what it gets wrong in each of k steps with 1 - (1 - share)^k.
    """

    def __init__(self, job: Job, trained: Trained, data: TokenData) -> None:
        """Audit the share of steps that `--audit-share` says."""
        self._job, self._trained, self._data = job, trained, data
        self._share, self._seed = job.options.recovery.audit_share or 0.0, job.options.training.seed
        self._updated: Digests | None = None  # this rank's weights after the last update, where the next step is due

    def is_due(self, step: int) -> bool:
        """Return whether a step, from 1, is audited."""
        return random.Random(f"{self._seed}:audit:{step}").random() < self._share

    def note_update(self, step: int) -> None:
        """Remember the weights after the update of a step, where the next one is audited."""
        self._updated = self._weights() if self.is_due(step + 1) else None

    def accumulate(self, step: int, first_sample: int, batches: Sequence[Batch], factors_of: FactorsOf) -> Tensor:
        """Run all microbatches of a step, as `Trained.accumulate`, and again on other ranks.

        `first_sample` is the number of the step's first sample; `factors_of` returns the weight of each token's loss,
        as `Trained.accumulate` takes it. What differs is an error, the same on every rank, that names rank, unit and
        microbatch.
        """
        before = self._weights()
        if self._updated is not None:
            self._compare_parts(step, "weights", self._updated, before, "between the update before this step and it")
        shares, first = self._run(0, batches, factors_of)
        passes, size = list[Pass]([(0, first)]), self._trained.data_size
        sums = self._sums()
        self._pass(1 % size, first_sample, factors_of, passes)
        if _disputed(passes, size):
            for shift in {1: (0,), 2: (0, 1)}.get(size, (2,)):
                self._pass(shift, first_sample, factors_of, passes)
            raise AuditError(_verdict(step, passes, size))
        self._compare_parts(step, "sums of gradients", sums, self._sums(), "when they were added up again")
        self._compare_parts(step, "weights", before, self._weights(), "while the step was computed")
        return shares

    def _pass(self, shift: int, first_sample: int, factors_of: FactorsOf, passes: list[Pass]) -> None:
        """Compute the microbatches of the rank `shift` places further."""
        self._trained.optimizer.zero_grad()
        feed = make_feed(self._data, self._job, (self._trained.data_index + shift) % self._trained.data_size)
        batches = feed.batches(first_sample)
        feed.close()
        passes.append((shift, self._run(shift, batches, factors_of)[1]))

    def _run(
        self, shift: int, batches: Sequence[Batch], factors_of: FactorsOf
    ) -> tuple[Tensor, list[list[dict[str, str]]]]:
        assert self._trained.inside is not None
        with self._trained.inside.digesting_backwards(shift) as found:
            shares = self._trained.accumulate(batches, factors_of(batches))
        return shares, gather_objects(found())

    def _weights(self) -> Digests:
        assert self._trained.inside is not None
        return self._trained.inside.parameter_digests(is_whole=False)

    def _sums(self) -> Digests:
        assert self._trained.inside is not None
        return self._trained.inside.gradient_digests(is_whole=False)

    def _compare_parts(self, step: int, what: str, left: Digests, right: Digests, when: str) -> None:
        """Compare two digests of this rank's parts; every rank hears of every difference."""
        changed = gather_objects([unit for unit in left if left[unit] != right[unit]])
        for rank, units in enumerate(changed):
            if units:
                raise AuditError(
                    f"step {step}, audited: the {what} of unit {units[0]} that rank {rank} holds changed {when}; "
                    f"{_ADVICE}"
                )


_ADVICE = "take this rank's machine out, and go on from the last checkpoint"


def _by_microbatch(passes: Sequence[Pass], size: int) -> Iterator[tuple[int, str, list[tuple[int, str]]]]:
    """Yield each microbatch and unit, with rank and digest of each pass; in the order of backward, the root last."""
    rounds, units = len(passes[0][1][0]), list(passes[0][1][0][0])
    for number in range(rounds * size):
        place, owner = divmod(number, size)
        for unit in (*reversed(units[1:]), units[0]):
            ranks = [(owner - shift) % size for shift, _ in passes]
            yield (
                number,
                unit,
                [(rank, found[rank][place][unit]) for rank, (_, found) in zip(ranks, passes, strict=True)],
            )


def _disputed(passes: Sequence[Pass], size: int) -> bool:
    return any(len({digest for _, digest in found}) > 1 for _, _, found in _by_microbatch(passes, size))


def _verdict(step: int, passes: Sequence[Pass], size: int) -> str:
    """Say which rank is wrong: the one that most others contradict, or that contradicts itself."""
    for number, unit, found in _by_microbatch(passes, size):
        (usual, count), *others = Counter(digest for _, digest in found).most_common()
        if not others:
            continue
        what = f"step {step}, audited: the gradients of unit {unit} for microbatch {number}"
        if 2 * count > len(found):
            wrong = ", ".join(map(str, sorted({rank for rank, digest in found if digest != usual})))
            return f"{what} are wrong on rank {wrong}, as {count} of {len(found)} passes say; {_ADVICE}"
        ranks = " and ".join(map(str, sorted({rank for rank, _ in found})))
        return (
            f"{what} differ between ranks {ranks}, and passes do not tell which is wrong; audit on three ranks or more"
        )
    raise AssertionError("nothing is disputed")
