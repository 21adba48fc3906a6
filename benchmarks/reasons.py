"""Why a target is missed where it is: by its title, filled in after a run is published (pure)."""

from __future__ import annotations

REASONS: dict[str, str] = {
    "many-small, 2 ranks: peak of live bytes over fsdp2's": (
        "the arena of shared memory holds what is under "
        "way, up to three stretches for each size of unit, "
        "and counts here; over sockets it is not there; "
        "slots have the size of the largest unit and are "
        "kept, and so are the root's gathered weights"
    ),
    "many-small, 2 ranks: peak off the planner's, fraction": (
        "the planner plans for sockets, without the arena of shared memory"
    ),
    "large, 2 ranks: peak of live bytes over fsdp2's": (
        "the arena of shared memory holds what is under "
        "way, up to three stretches for each size of unit, "
        "and counts here; over sockets it is not there; "
        "slots have the size of the largest unit and are "
        "kept, and so are the root's gathered weights"
    ),
    "large, 2 ranks: peak off the planner's, fraction": (
        "the planner plans for sockets, without the arena of shared memory"
    ),
    "llama, 2 ranks: peak of live bytes over fsdp2's": (
        "the arena of shared memory holds what is under "
        "way, up to three stretches for each size of unit, "
        "and counts here; over sockets it is not there; "
        "slots have the size of the largest unit and are "
        "kept, and so are the root's gathered weights"
    ),
    "llama, 2 ranks: peak off the planner's, fraction": (
        "the planner plans for sockets, without the arena of shared memory"
    ),
    "moe, 2 ranks: peak of live bytes over fsdp2's": (
        "the arena of shared memory holds what is under "
        "way, up to three stretches for each size of unit, "
        "and counts here; over sockets it is not there; "
        "slots have the size of the largest unit and are "
        "kept, and so are the root's gathered weights"
    ),
    "many-small, 2 ranks: CPU time of a step over fsdp2's": (
        "host time per unit, see below; runs with fewer contenders in one process read 0.34"
    ),
    "many-small, 2 ranks: wall time of a step over the floor's": (
        "host time per unit, see below; runs with fewer contenders in one process read 1.45"
    ),
    "large, 2 ranks: CPU time of a step over fsdp2's": ("five rounds on a small shared machine; to be measured again"),
    "many-small, 2 ranks: the slowest of strategies 0 to 2 over ddp, wall time": (
        "seven rounds on a small shared machine; to be measured again"
    ),
    "large, 2 ranks: the slowest of strategies 0 to 2 over ddp, wall time": (
        "five rounds on a small shared machine; to be measured again"
    ),
    "many-small, 2 ranks: allocated beyond the bare model in step 3, over its gradients": (
        "cleared gradients and buckets give their memory back and take it again, which lowers the peak"
    ),
    "large, 2 ranks: copied elements beyond the bare model, per parameter": (
        "what goes into and out of shared memory is copied by operators, which count; what sockets copy does not"
    ),
    "tiny tensors: optimizer.step over fsdp2's, fused AdamW": (
        "what is left is work for each parameter around the flat step; not looked into yet"
    ),
    "tiny tensors: optimizer.step over fsdp2's, foreach": (
        "what is left is work for each parameter around the flat step; not looked into yet"
    ),
    "many-small: optimizer.step over fsdp2's, foreach": (
        "what is left is work for each parameter around the flat step; not looked into yet"
    ),
    "many-small: clip_grad_norm_ over fsdp2's": "not looked into yet; a run before read 0.16",
    "many-small: time to wrap over fsdp2's": (
        "not looked into yet; ranks compare parameters and options first, and set shared memory up"
    ),
    "host time per unit of 20 parameters, forward": (
        "hooks, the scheduler and views of parameters are Python; c10d is not in it"
    ),
    "host time per unit of 20 parameters, backward": (
        "hooks, the scheduler and views of parameters are Python; c10d is not in it"
    ),
    "host time per unit of 1 parameter, backward": (
        "hooks, the scheduler and views of parameters are Python; c10d is not in it"
    ),
    "large: time to save over fsdp2's": (
        "stored results of an earlier run on a loaded machine, not made again in this one"
    ),
    "large: time to load over fsdp2's": (
        "stored results of an earlier run on a loaded machine, not made again in this one"
    ),
}
"""One sentence each, shown where the target is missed; a test holds every title to a target that exists."""
