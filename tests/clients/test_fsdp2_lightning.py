"""Lightning's `ModelParallelStrategy`, unmodified, on our `fully_shard` and on torch's, beside one process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp.fsdp2 import fully_shard
from megatron_fsdp.fsdp2.module import ShardedModule
from tests.clients.test_fsdp2_accelerate import weights_of
from tests.clients.test_lightning import Regression, assert_weights, data, lightning, one_process, quiet
from tests.support.on_ranks import of_ranks, on_ranks


class Sharded(Regression):
    """Sharded where the strategy asks for it."""

    def __init__(self, by: Callable[..., Any]) -> None:
        super().__init__()
        self.by = by

    def configure_model(self) -> None:
        for block in self.blocks:
            self.by(block, mesh=self.device_mesh["data_parallel"])
        self.by(self.blocks, mesh=self.device_mesh["data_parallel"])


def fit(folder: str, by: Callable[..., Any], epochs: int, saves_shards: bool, resume: str | None = None) -> Any:
    ranks = dist.get_world_size()
    strategy = lightning.pytorch.strategies.ModelParallelStrategy(
        data_parallel_size=ranks, tensor_parallel_size=1, save_distributed_checkpoint=saves_shards
    )
    runner = lightning.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        gradient_clip_val=0.5,
    )
    module = Sharded(by)
    runner.fit(module, data(), data(), ckpt_path=resume, **({"weights_only": False} if resume else {}))
    assert isinstance(module.blocks, ShardedModule) is (by is fully_shard)
    assert_weights(weights_of(module), one_process(3 * epochs, clip=0.5), "blocks.")
    return runner


@pytest.mark.full(short=["shards"])
@pytest.mark.parametrize("saves_shards", [True, False], ids=["shards", "one file"])
@on_ranks(2)
def test_it_trains_as_one_process_and_shares_checkpoints_with_torch(saves_shards: bool, tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    with quiet():
        losses = []
        for by in (torch_fully_shard, fully_shard):
            runner = fit(folder, by, 1, saves_shards)
            runner.save_checkpoint(f"{folder}/{by.__module__}.ckpt")
            losses.append(float(runner.callback_metrics["eval_loss"]))
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)
        for by, written_by in (
            (fully_shard, torch_fully_shard),
            (fully_shard, fully_shard),
            (torch_fully_shard, fully_shard),
        ):
            fit(folder, by, 2, saves_shards, f"{folder}/{written_by.__module__}.ckpt")
