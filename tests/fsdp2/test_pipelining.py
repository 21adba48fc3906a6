"""torch's pipeline schedules, unmodified, over stages that our `fully_shard` has sharded, beside one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from megatron_fsdp.fsdp2 import fully_shard
from tests.fsdp2.test_fully_shard import whole
from tests.support.on_ranks import fixed_seed, on_ranks

ROWS, WIDTH = 8, 6


def blocks(number: int) -> list[nn.Module]:
    with fixed_seed(0):
        return [nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH)) for _ in range(number)]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.full(short=["Schedule1F1B"])
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B])
@on_ranks(4)
def test_stages_train_as_one_process(schedule: Any) -> None:
    """Two stages (or four, two on each rank) over two data-parallel ranks; three steps of four microbatches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage, data_rank = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    is_interleaved = schedule is ScheduleInterleaved1F1B
    number = 4 if is_interleaved else 2
    own, reference, group = blocks(2 * number), nn.Sequential(*blocks(2 * number)), mesh.get_group("pp")
    stages, parts = [], {}
    for index in range(stage, number, 2):
        part = parts[index] = nn.Sequential(*own[2 * index : 2 * index + 2])
        for block in part:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
        stages.append(PipelineStage(part, index, number, torch.device("cpu"), group=group))
    run = schedule(stages if is_interleaved else stages[0], 4, loss_fn=nn.functional.mse_loss)
    optimizer, wanted = adam([p for part in parts.values() for p in part.parameters()]), adam(reference.parameters())
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        inputs, targets = (torch.randn(2 * ROWS, WIDTH, generator=generator) for _ in range(2))
        mine = slice(data_rank * ROWS, (data_rank + 1) * ROWS)
        losses: list[Tensor] = []
        run.step(
            *([inputs[mine]] if stage == 0 else []),
            **({"target": targets[mine], "losses": losses} if stage == 1 else {}),
        )
        loss = nn.functional.mse_loss(reference(inputs), targets)
        loss.backward()
        if stage == 1:
            total = torch.stack(losses).mean()
            dist.all_reduce(total, group=mesh.get_group("dp"))
            torch.testing.assert_close(total / 2, loss.detach())
        for each in (optimizer, wanted):
            each.step()
            each.zero_grad()
    for index, part in parts.items():
        for param, expected in zip(part.parameters(), reference[2 * index : 2 * index + 2].parameters(), strict=True):
            torch.testing.assert_close(whole(param), expected.detach())
