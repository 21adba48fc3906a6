"""Count the exit statuses of eight small programs on several ranks, each started many times.

    python tools/clean_exits.py [--rounds 25] [--ranks 3] [--only NAME]

A rank is forked from this process, which has imported everything, and ends as a program does: through the shutdown of
the interpreter. gloo's threads may abort a process there, after all work was done ("terminate called without an active
exception"); launchers then take the run for a failed one. Every exit status but 0 is listed, and one fails the count.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megatron_fsdp.checkpoint
import megatron_fsdp.ddp
import megatron_fsdp.megatron_fsdp
import megatron_fsdp.optim.optimizer
from megatron_fsdp import DistributedDataParallelConfig, MegatronFSDP, fully_shard
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.ddp import DistributedDataParallel

_KEPT: list[object] = []
_PATIENCE_S = 120.0


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def _trained(**options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    net = _net()
    model, optimizer = fully_shard(net, torch.optim.AdamW(net.parameters()), fsdp_unit_modules=[nn.Linear], **options)
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    _KEPT.extend((model, optimizer))  # as globals of a program, which live to its end
    return model, optimizer


def trains() -> None:
    """Train, and end without clean-up."""
    _trained()


def trains_and_destroys() -> None:
    """Train, and take torch.distributed down at the end."""
    _trained()
    dist.destroy_process_group()


def gathers_last() -> None:
    """End with a small collective."""
    _trained()
    gather_objects(dist.get_rank())


def gathers_and_destroys() -> None:
    """End with a small collective, and take torch.distributed down."""
    _trained()
    gather_objects(dist.get_rank())
    dist.destroy_process_group()


def saves() -> None:
    """Save a checkpoint at the end."""
    model, optimizer = _trained()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    megatron_fsdp.checkpoint.save_checkpoint(model, optimizer, folder[0], iteration=1)


def saves_in_background() -> None:
    """Save in the background, and take torch.distributed down."""
    model, optimizer = _trained()
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    with megatron_fsdp.checkpoint.Checkpointer(folder[0], in_background=True) as checkpoints:
        checkpoints.save(1, model, optimizer)
    dist.destroy_process_group()


def trains_buckets() -> None:
    """Train a DistributedDataParallel with groups of its own, delete it, and take torch.distributed down."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True)
    model = DistributedDataParallel(config, _net())
    model(torch.ones(2, 8)).sum().backward()
    model.clip_grad_norm_(1.0)
    del model
    gc.collect()
    dist.destroy_process_group()


def reports() -> None:
    """End with the collectives of reports, under strategy 1."""
    model, _ = _trained(zero_dp_strategy=1)
    model.parameter_statistics()
    model.full_parameters()
    dist.destroy_process_group()


PROGRAMS: tuple[Callable[[], None], ...] = (
    trains,
    trains_and_destroys,
    gathers_last,
    gathers_and_destroys,
    saves,
    saves_in_background,
    trains_buckets,
    reports,
)


def _start(program: Callable[[], None], num_ranks: int) -> bool:
    """Fork the ranks of one launch; return True in a rank, which is to end now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(num_ranks):
        pid = os.fork()
        if not pid:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            dist.init_process_group("gloo")
            program()
            return True
        children.append(pid)
    _ended[program.__name__].append(tuple(_status(pid) for pid in children))
    return False


_ended: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)


def _status(pid: int) -> int:
    """Return the exit status of a child; kill it after a time limit."""
    until = time.monotonic() + _PATIENCE_S
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(pid, 9)
        time.sleep(0.02)


def main() -> None:
    """Start everything, and print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help="launches of each program")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--only", choices=[program.__name__ for program in PROGRAMS])
    asked = parser.parse_args()
    gc.freeze()
    for program in PROGRAMS:
        if asked.only not in (None, program.__name__):
            continue
        for _ in range(asked.rounds):
            if _start(program, asked.ranks):
                return  # a rank: the interpreter shuts down now
        found = _ended[program.__name__]
        bad = [codes for codes in found if any(codes)]
        print(f"{program.__name__:22} {len(found) - len(bad)} of {len(found)} clean", *bad[:4], flush=True)
    every = [codes for found in _ended.values() for codes in found]
    clean = sum(not any(codes) for codes in every)
    print(f"{clean} of {len(every)} launches ended cleanly on {asked.ranks} ranks")
    sys.exit(clean != len(every))


if __name__ == "__main__":
    main()
