"""Why a target is missed where it is: a table to fill in after a run that is to be published (pure).

One row is a pattern of titles, as file names are matched, and one sentence; the first row that matches counts, and it
is shown where the target is missed, nowhere else. `python benchmarks/bench.py --again` writes the page with it, and
names missed targets without a reason and rows that no missed target needs.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_FLAT_STEP = (
    "what is left is one look at gradient, state and version of each parameter, and what torch's own call costs"
)

REASONS: tuple[tuple[str, str], ...] = (
    (
        "*, 4 microbatches reduced once: peak of live bytes over fsdp2's",
        "sums that were deferred go through two small buckets that other ranks can read, which come on top of them",
    ),
    (
        "*, 4 microbatches reduced once: bytes of reductions over fsdp2's",
        "ranks are cut between rows, which takes some KiB of padding in all",
    ),
    (
        "many-small, *: peak of live bytes over fsdp2's",
        (
            "shards and activations alone take most of fsdp2's peak (the table of peaks says how much); no slots, no "
            "scratch and two small buckets come on top"
        ),
    ),
    (
        "*: allocated beyond the bare model in step 3, over its gradients",
        "cleared gradients and buckets give their memory back and take it again, which lowers the peak",
    ),
    ("*: optimizer.step over fsdp2's, *", _FLAT_STEP),
    (
        "many-small: clip_grad_norm_ over fsdp2's",
        "single runs read 0.13 to 0.24; what is left is mostly reading and scaling the gradients themselves",
    ),
    (
        "*, 2 ranks: CPU time of a step over fsdp2's",
        "set when ranks of one machine shared memory; over gloo half of a step's CPU time goes to sockets, for all",
    ),
    (
        "*, 2 ranks: wall time of a step over fsdp2's",
        "set when ranks of one machine shared memory; over gloo waiting for its sockets takes half of a step",
    ),
    (
        "*, 2 ranks: wall time of a step over the floor's",
        "set when ranks of one machine shared memory; two cores that compute have none left to communicate on",
    ),
    (
        "*, 2 ranks: the slowest of strategies 0 to 2 over ddp, wall time",
        "an exchange and a local sum in rank order, which repeats bit for bit, take longer than gloo's own all-reduce",
    ),
    (
        "*, 2 ranks: mddp*, wall time",
        "an exchange and a local sum in rank order, which repeats bit for bit, take longer than gloo's own all-reduce",
    ),
    (
        "*, 2 ranks: peak of live bytes over fsdp2's",
        "gloo's reduce-scatter moves twice the bytes; the exchange in its place takes scratch of a bucket's size",
    ),
    (
        "host time per unit of *",
        "hooks, the scheduler and views of parameters are Python, as are fsdp2's, which take about three times as long",
    ),
    (
        "*: time to save over fsdp2's",
        "every tensor is summed up as it is written, and folders and a manifest are forced to the disk, too",
    ),
)
"""Pattern of titles, reason; a test holds every pattern to a target that exists."""


def reason_for(title: str) -> str:
    """The sentence of the first row whose pattern matches a target's title; "" where none does."""
    return next((reason for pattern, reason in REASONS if fnmatchcase(title, pattern)), "")
