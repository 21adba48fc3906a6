"""Lightning's Trainer and Fabric, unmodified, with sharded models: beside one process, and from 2 ranks to 1."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fsdp.errors import ConfigurationError
from tests.conftest import RunRanks
from tests.support.on_ranks import fixed_seed, on_ranks

lightning = pytest.importorskip("lightning")

ROWS = 4
"""Per step, over all ranks."""


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning warns of settings that do not matter here (workers of loaders, devices that are there)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def data() -> torch.utils.data.DataLoader[Any]:
    """Three steps an epoch; each rank reads its share of the rows."""
    with fixed_seed(1):
        rows = torch.utils.data.TensorDataset(torch.randn(3 * ROWS, 6), torch.randn(3 * ROWS, 6))
    own = torch.utils.data.DistributedSampler(rows, shuffle=False)  # the one that Lightning would put in shuffles
    return torch.utils.data.DataLoader(rows, batch_size=ROWS // dist.get_world_size(), sampler=own)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        with fixed_seed(0):
            self.blocks = nn.Sequential(Block(), Block())

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.mse_loss(self.blocks(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("eval_loss", F.mse_loss(self.blocks(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def one_process(steps: int, *, clip: float | None = None) -> dict[str, Tensor]:
    """The same training as a plain loop on one process; two epochs' schedule steps as Lightning does them."""
    model = Regression().blocks
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with fixed_seed(1):
        inputs, targets = torch.randn(3 * ROWS, 6), torch.randn(3 * ROWS, 6)
    for step in range(steps):
        rows = slice(step % 3 * ROWS, (step % 3 + 1) * ROWS)
        optimizer.zero_grad()
        F.mse_loss(model(inputs[rows]), targets[rows]).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if step % 3 == 2:
            schedule.step()
    return {name: param.detach() for name, param in model.named_parameters()}


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], prefix: str = "") -> None:
    assert found.keys() == {prefix + name for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(found[prefix + name], value, rtol=1e-5, atol=1e-6)


def trainer(folder: str, strategy: int, **options: Any) -> Any:
    from megatron_fsdp.contrib.lightning import MegatronFSDPStrategy

    return lightning.Trainer(
        strategy=MegatronFSDPStrategy(zero_dp_strategy=strategy, fsdp_unit_modules=[Block]),
        accelerator="cpu",
        devices=dist.get_world_size(),
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"gradient_clip_val": 0.5, "enable_checkpointing": False, **options},
    )


def fit(folder: str, strategy: int) -> None:
    with quiet():
        runner = trainer(folder, strategy, max_epochs=1)
        runner.fit(Regression(), data(), data())
        runner.save_checkpoint(f"{folder}/last.ckpt")
        assert_weights(runner.model.full_parameters(), one_process(3, clip=0.5), "blocks.")
        (evaluated,) = runner.validate(runner.lightning_module, data(), verbose=False)
    assert evaluated["eval_loss"] == pytest.approx(float(runner.callback_metrics["eval_loss"]))
    assert runner.model.dist_index.get_dp_group().size() == 2


def fit_on(folder: str, strategy: int) -> None:
    with quiet():
        runner = trainer(folder, strategy, max_epochs=2)
        runner.fit(Regression(), data(), ckpt_path=f"{folder}/last.ckpt")
        assert runner.global_step == 6
        assert_weights(runner.model.full_parameters(), one_process(6, clip=0.5), "blocks.")


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [3, 1])
def test_trainer_is_as_one_process_and_goes_on_with_other_ranks(
    run_ranks: RunRanks, tmp_path: Path, strategy: int
) -> None:
    run_ranks(2, fit, str(tmp_path), strategy)
    run_ranks(1, fit_on, str(tmp_path), strategy)


@on_ranks(2)
def test_accumulation_communicates_once_and_callbacks_keep_checkpoints(tmp_path: Path) -> None:
    folder = str(tmp_path)
    best = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="loss", save_top_k=1)
    with quiet():
        runner = trainer(
            folder, 3, max_epochs=2, accumulate_grad_batches=3, enable_checkpointing=True, callbacks=[best]
        )
        runner.fit(Regression(), data())
        assert runner.global_step == 2
        assert runner.model.traffic().reductions == 2 * len(runner.model.parameter_groups())
        dist.barrier()  # the first rank removes the checkpoint that is no longer the best
        assert Path(best.best_model_path).is_dir()
        assert len(list(Path(folder).glob("*.ckpt"))) == 1
        runner.validate(runner.lightning_module, data(), ckpt_path=best.best_model_path, verbose=False)
        with pytest.raises(ConfigurationError, match="another trainer has sharded this Regression; use that trainer"):
            trainer(folder, 3, max_epochs=1).fit(runner.lightning_module, data())
        by_hand, runner = Regression(), trainer(folder, 3, max_epochs=1, gradient_clip_val=None)
        by_hand.automatic_optimization = False
        with pytest.raises(ConfigurationError, match="Regression sets automatic_optimization=False"):
            runner.fit(by_hand, data())
        averaging = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9)
        with pytest.raises(ConfigurationError, match="EMAWeightAveraging copies or masks whole weights"):
            trainer(folder, 3, max_epochs=1, callbacks=[averaging]).fit(Regression(), data())


# ---- Fabric ---------------------------------------------------------------------------------------------------------


def fabric_loop(folder: str, first: int, last: int, together: bool) -> None:
    from megatron_fsdp.contrib.lightning import FabricMegatronFSDPStrategy

    with quiet():
        fabric: Any = lightning.Fabric(
            strategy=FabricMegatronFSDPStrategy(fsdp_unit_modules=[Block]),
            accelerator="cpu",
            devices=dist.get_world_size(),
        )
        fabric.launch()
        model: Any = Regression().blocks
        if together:
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        else:
            model = fabric.setup(model)
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(data(), use_distributed_sampler=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        if first:
            assert fabric.load(f"{folder}/fabric", state) == {}
            assert state["step"] == first
        for step, batch in enumerate(list(loader) * 2):
            if not first <= step < last:
                continue
            with fabric.no_backward_sync(model, enabled=True):
                fabric.backward(F.mse_loss(model(batch[0]), batch[1]) * 0.25)
            fabric.backward(F.mse_loss(model(batch[0]), batch[1]) * 0.75)
            fabric.clip_gradients(model, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                schedule.step()
        fabric.save(f"{folder}/fabric", {**state, "step": last})
        assert_weights(model._forward_module.full_parameters(), one_process(last, clip=0.5))
        with pytest.raises(ConfigurationError, match="filter"):
            fabric.save(f"{folder}/other", state, filter={"model": lambda *_: True})
        with pytest.raises(ConfigurationError, match="0 sharded models"):
            fabric.save(f"{folder}/other", {"step": 1})
        assert not Path(f"{folder}/other").exists()


@pytest.mark.parametrize("together", [True, False], ids=["together", "optimizer_later"])
def test_fabric_is_as_one_process_and_goes_on_with_other_ranks(
    run_ranks: RunRanks, tmp_path: Path, together: bool
) -> None:
    run_ranks(2, fabric_loop, str(tmp_path), 0, 3, together)
    run_ranks(1, fabric_loop, str(tmp_path), 3, 6, together)
