"""What a save and a load cost, in exact counts: collectives, bytes, files, memory; whatever the number of tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan

from benchmarks.counting import counting
from megatron_fsdp.checkpoint import Checkpointer, load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.manifest import BLOCK
from tests.support.case import adamw_above_noise, shard
from tests.support.counting import LiveBytes
from tests.support.on_ranks import on_ranks

SAVE_COLLECTIVES, LOAD_COLLECTIVES = 21, 8
SAVE_FILES_OF_RANK, SAVE_FILES_OF_FIRST = 1, 4  # data; manifest, metadata and the pointer
SMALL, LARGE = 16, 256
BLOCK_BYTES = 2 * 8 * BLOCK  # the integers of a block of elements, and their weights


def job(count: int, features: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of `count` square weights that has stepped once."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(features, features, bias=False) for _ in range(count)))
    model, optimizer = shard(module, adamw_above_noise, fsdp_unit_modules=[nn.Linear])
    model(torch.ones(2, features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def payload(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of this rank's weights and moments."""
    found = [*model.parameters(), *(slots[key] for slots in optimizer.state.values() for key in slots if key != "step")]
    return sum(value.to_local().nbytes for value in found)


def counts_of(count: int, root: str) -> dict[str, Any]:
    model, optimizer = job(count, SMALL)
    with counting() as saving:
        save_checkpoint(model, optimizer, root, iteration=1)
    with counting() as loading:
        Checkpointer(root).load(model, optimizer)
    with Checkpointer(root, in_background=True) as checkpoints, counting() as behind:
        checkpoints.save(2, model, optimizer)
        checkpoints.wait()
    sizes = sum(path.stat().st_size for path in Path(root, "iter_0000001").iterdir())
    total = torch.tensor(payload(model, optimizer))
    dist.all_reduce(total)
    return {"save": saving, "load": loading, "behind": behind, "on disk": sizes, "payload": int(total)}


@on_ranks(2)
def test_collectives_and_files_do_not_depend_on_the_number_of_tensors(tmp_path: Path) -> None:
    few, many = (counts_of(count, f"{tmp_path}/{count}") for count in (4, 40))
    for found, tensors in ((few, 4 * 4), (many, 40 * 4)):
        assert (found["save"].collectives, found["load"].collectives) == (SAVE_COLLECTIVES, LOAD_COLLECTIVES)
        assert found["save"].opened == (SAVE_FILES_OF_FIRST if dist.get_rank() == 0 else SAVE_FILES_OF_RANK)
        overhead = found["on disk"] - found["payload"]
        assert 0 < overhead < 2 * tensors * 4096 + 65536  # an archive and its description for each rank's part
    assert few["behind"].collectives == many["behind"].collectives
    assert few["load"].object_bytes == many["load"].object_bytes < 100
    assert many["load"].opened - few["load"].opened < 4  # one data file may hold nothing that this rank wants
    assert few["save"].synced == many["save"].synced


@on_ranks(2)
def test_memory_is_bounded_as_documented(tmp_path: Path) -> None:
    root = str(tmp_path)
    model, optimizer = job(6, LARGE)
    found = {}
    with LiveBytes() as seen:
        save_checkpoint(model, optimizer, root, iteration=1)
    found["save"] = seen.peak_bytes
    with LiveBytes() as seen:
        load_checkpoint(model, optimizer, root)
    found["load"] = seen.peak_bytes
    whole = payload(model, optimizer)
    with Checkpointer(root, in_background=True) as checkpoints:
        for iteration in (2, 3):
            checkpoints.save(iteration, model, optimizer)
            checkpoints.wait()
            buffers = checkpoints._saver.buffers
            found |= {"staged": buffers.staged_bytes, "reserved": buffers.reserved_bytes}
    optimizer.state.clear()
    with LiveBytes() as seen:
        load_checkpoint(model, optimizer, root)
    found["load fresh"] = seen.peak_bytes
    largest = max(param.to_local().nbytes for param in model.parameters())
    rng_bytes = 2 * 8192
    assert found["save"] <= 2 * BLOCK_BYTES + rng_bytes < whole
    chunk = LARGE * LARGE * 4
    assert largest <= chunk
    assert found["load"] <= 2 * chunk + rng_bytes < whole
    assert whole * 2 // 3 <= found["load fresh"] <= whole * 2 // 3 + 2 * chunk + rng_bytes
    assert whole <= found["staged"] <= whole + 6 * 16 + rng_bytes
    assert found["staged"] <= found["reserved"] <= whole + 64 * 100 + rng_bytes


# ---- plain calls of torch --------------------------------------------------------------------------------------------


def count(call: Callable[[], Any]) -> tuple[int, Any]:
    with counting() as seen:
        result = call()
    return seen.collectives, result


def costs(layers: int, folder: str) -> dict[str, int]:
    assert count(lambda: dist.barrier())[0] == 1
    model = nn.Sequential(
        *(nn.Linear(3, 5, bias=False) if i % 2 == 0 else nn.Linear(5, 3, bias=False) for i in range(layers))
    )
    wrapped, optimizer = shard(model, adamw_above_noise, fsdp_unit_modules=[])
    wrapped(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    found: dict[str, int] = {}
    found["model"], state = count(wrapped.state_dict)
    found["optimizer"], optimizer_state = count(optimizer.state_dict)
    both = {"model": state, "optimizer": optimizer_state}
    found["plan"], plan = count(lambda: create_default_local_save_plan(state, dist.get_rank() == 0))
    assert plan.items
    found["save"], _ = count(lambda: dcp.save(both, checkpoint_id=folder))
    found["load"], _ = count(lambda: dcp.load(both, checkpoint_id=folder))
    found["into model"], _ = count(lambda: wrapped.load_state_dict(both["model"]))
    found["into optimizer"], _ = count(lambda: optimizer.load_state_dict(both["optimizer"]))
    return found


@on_ranks(2)
def test_state_dicts_need_no_collectives_but_to_agree_and_torch_needs_a_few(tmp_path: Path) -> None:
    found, of_many = (costs(layers, f"{tmp_path}/{layers}") for layers in (10, 100))
    assert found == of_many
    assert 0 < found.pop("save") < 20
    assert 0 < found.pop("load") < 20
    assert found.pop("into optimizer") == 2  # before and after it is loaded
    assert found == dict.fromkeys(("model", "optimizer", "plan", "into model"), 0)
