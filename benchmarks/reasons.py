"""Why a target is missed where it is: a table to fill in after a run that is to be published (pure).

One row is a pattern of titles, as file names are matched, and one sentence; the first row that matches counts, and it
is shown where the target is missed, nowhere else. `python benchmarks/bench.py --again` writes the page with it, and
names missed targets without a reason and rows that no missed target needs.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

_ARENA = (
    "the arena of shared memory holds what is under way, up to three stretches for each size of unit, and counts here; "
    "slots have the size of the largest unit and are kept, and so are the root's gathered weights; the table of peaks "
    "says how much room the target leaves"
)
_HOST = "hooks, the scheduler and views of parameters are Python; c10d is not in it"
_FLAT_STEP = "what is left is work for each parameter around the flat step"

REASONS: tuple[tuple[str, str], ...] = (
    ("*: peak of live bytes over fsdp2's", _ARENA),
    ("*: bytes of reductions over fsdp2's", "padding of the layout, at most a hundredth (docs/padding.md)"),
    ("*: peak off the planner's, fraction", "the planner plans for sockets, without the arena of shared memory"),
    ("many-small, 2 ranks: CPU time of a step over fsdp2's", "host time per unit, see below"),
    ("many-small, 2 ranks: wall time of a step over the floor's", "host time per unit, see below"),
    ("large, 2 ranks: CPU time of a step over fsdp2's", "five rounds on a small shared machine; to be measured again"),
    (
        "*, 2 ranks: the slowest of strategies 0 to 2 over ddp, wall time",
        "few rounds on a small shared machine; to be measured again",
    ),
    (
        "*: allocated beyond the bare model in step 3, over its gradients",
        "cleared gradients and buckets give their memory back and take it again, which lowers the peak",
    ),
    (
        "*: elements that the engine copies outside of collectives, per parameter*",
        "one copy into the bucket; this rank's part of the sum is copied into its main gradient",
    ),
    ("*: optimizer.step over fsdp2's, *", _FLAT_STEP),
    ("many-small: clip_grad_norm_ over fsdp2's", "not looked into yet; a run before read 0.16"),
    (
        "many-small: time to wrap over fsdp2's",
        "not looked into yet; ranks compare parameters and options first, and set shared memory up",
    ),
    ("host time per unit of *", _HOST),
    (
        "*: time to save over fsdp2's",
        "every tensor is summed up as it is written, and folders and a manifest are forced to the disk, too",
    ),
)
"""Pattern of titles, reason; a test holds every pattern to a target that exists."""


def reason_for(title: str) -> str:
    """The sentence of the first row whose pattern matches a target's title; "" where none does."""
    return next((reason for pattern, reason in REASONS if fnmatchcase(title, pattern)), "")
