"""Lightning's Trainer and Fabric with our strategies, by name and from YAML: beside one process; from 2 ranks to 1."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fsdp2 import fully_shard
from megatron_fsdp.fsdp2.module import ShardedModule
from tests.clients.test_accelerate import plain_steps
from tests.conftest import RunRanks
from tests.support.doors import one_by_one, weights_of
from tests.support.on_ranks import fixed_seed, of_ranks, on_ranks
from tests.support.zoo import Layer

lightning = pytest.importorskip("lightning")

ROWS = 4
"""Per step, over all ranks."""


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning warns of settings that do not matter here (workers of loaders, devices that are there)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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
            self.blocks = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)

    def training_step(self, batch: Any, _: int) -> Tensor:
        loss = F.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("eval_loss", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def one_process(steps: int) -> dict[str, Tensor]:
    """The same training on one process; two epochs' schedule steps as Lightning does them."""
    with fixed_seed(1):
        batches = [[each] for each in zip(*(torch.randn(3 * ROWS, 6).split(ROWS) for _ in range(2)), strict=True)]
    return plain_steps(Regression().blocks, (2 * batches)[:steps], 0.1, every=3)


class ByHand(Regression):
    """Runs backward and step itself, inside of `training_step`."""

    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, index)
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        optimizer.step()
        return loss.detach()


def assert_weights(found: dict[str, Tensor], expected: dict[str, Tensor], prefix: str = "") -> None:
    assert found.keys() == {prefix + name for name in expected}
    for name, value in expected.items():
        torch.testing.assert_close(found[prefix + name], value, rtol=1e-5, atol=1e-6)


def trainer(folder: str, **options: Any) -> Any:
    import megatron_fsdp.contrib.lightning  # noqa: F401 - registers the name

    return lightning.Trainer(
        **{
            "strategy": "megatron_fsdp",
            "accelerator": "cpu",
            "devices": dist.get_world_size(),
            "default_root_dir": folder,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "use_distributed_sampler": False,
            "enable_checkpointing": False,
            "gradient_clip_val": 0.5,
            **options,
        }
    )


def fit(
    folder: str, epochs: int, resume: str | None = None, kind: Callable[[], Regression] = Regression, **options: Any
) -> Any:
    with quiet():
        module, runner = kind(), trainer(folder, max_epochs=epochs, **options)
        runner.fit(module, data(), data(), ckpt_path=resume, **({"weights_only": False} if resume else {}))
        assert runner.global_step == 3 * epochs
        root, by = (module.blocks, module.by) if isinstance(module, Sharded) else (module, fully_shard)
        assert {isinstance(each, ShardedModule) for each in (root, *module.blocks)} == {by is fully_shard}
        assert_weights(weights_of(module), one_process(3 * epochs), "blocks.")
        if isinstance(module, Sharded):  # its strategy configures it anew to validate
            return runner
        (evaluated,) = runner.validate(module, data(), verbose=False)
    assert evaluated["eval_loss"] == pytest.approx(float(runner.callback_metrics["eval_loss"]))
    return runner


def fit_and_save(folder: str) -> None:
    runner = fit(folder, 1)
    with quiet():
        runner.save_checkpoint(f"{folder}/last.ckpt")


def go_on(folder: str) -> None:
    fit(folder, 2, f"{folder}/last.ckpt")


def test_trainer_is_as_one_process_and_goes_on_with_other_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, fit_and_save, str(tmp_path))
    run_ranks(1, go_on, str(tmp_path))


@pytest.mark.full
@on_ranks(4)
def test_replicas_are_as_one_process(tmp_path: Path) -> None:
    from megatron_fsdp.contrib.lightning import MegatronFSDPStrategy

    fit(str(tmp_path), 1, strategy=MegatronFSDPStrategy(fsdp_unit_modules=[Layer], num_replicas=2))


@on_ranks(2)
def test_manual_optimization_is_as_one_process(tmp_path: Path) -> None:
    fit(str(tmp_path), 1, kind=ByHand, gradient_clip_val=None)


@on_ranks(2)
def test_bad_arguments_and_copies_are_one_sentence(tmp_path: Path) -> None:
    from megatron_fsdp.contrib.lightning import MegatronFSDPStrategy

    averaging = lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9)
    for options, message in (
        ({"strategy": MegatronFSDPStrategy(num_replicas=3)}, r"num_replicas=3 does not divide the 2 ranks"),
        ({"callbacks": [averaging]}, r"a sharded module cannot be copied"),
    ):
        with quiet(), pytest.raises((ConfigurationError, AssertionError), match=message):
            trainer(str(tmp_path), max_epochs=1, **options).fit(Regression(), data())


@on_ranks(2)
def test_a_yaml_file_gives_its_arguments(tmp_path: Path) -> None:
    for package in ("jsonargparse", "typeshed_client", "docstring_parser"):
        pytest.importorskip(package)
    from lightning.pytorch.cli import LightningCLI

    path = tmp_path / f"settings-{dist.get_rank()}.yaml"
    path.write_text(
        f"""
trainer:
  strategy:
    class_path: megatron_fsdp.contrib.lightning.MegatronFSDPStrategy
    init_args: {{fsdp_unit_modules: [tests.support.zoo.Layer], reduce_dtype: float32}}
  accelerator: cpu
  devices: {dist.get_world_size()}
"""
    )
    with quiet():
        cli = LightningCLI(Regression, run=False, save_config_callback=None, args=["--config", str(path)])
    strategy: Any = cli.trainer.strategy
    assert strategy._unit_modules == [Layer]
    assert strategy._options["mp_policy"].reduce_dtype == torch.float32


# ---- Fabric ---------------------------------------------------------------------------------------------------------


def fabric_loop(folder: str, first: int, last: int) -> None:
    import megatron_fsdp.contrib.lightning  # noqa: F401 - registers the name

    with quiet():
        fabric: Any = lightning.Fabric(strategy="megatron_fsdp", accelerator="cpu", devices=dist.get_world_size())
        fabric.launch()
        model = fabric.setup(Regression().blocks)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(data(), use_distributed_sampler=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 1)
        state = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0}
        if first:
            fabric.load(f"{folder}/fabric", state)
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
        assert_weights(weights_of(model.module), one_process(last))
        fabric.save(f"{folder}/fabric", {**state, "step": last})


def test_fabric_is_as_one_process_and_goes_on_with_other_ranks(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, fabric_loop, str(tmp_path), 0, 3)
    run_ranks(1, fabric_loop, str(tmp_path), 3, 6)


# ---- its `ModelParallelStrategy`, on our `fully_shard` and on torch's ------------------------------------------------


class Sharded(Regression):
    """Sharded where the strategy asks for it."""

    def __init__(self, by: Callable[..., Any]) -> None:
        super().__init__()
        self.by = by

    def configure_model(self) -> None:
        one_by_one(self.by, *self.blocks, self.blocks, mesh=self.device_mesh["data_parallel"])


@pytest.mark.full(short=["shards"])
@pytest.mark.parametrize("saves_shards", [True, False], ids=["shards", "one file"])
@on_ranks(2)
def test_it_trains_as_one_process_and_shares_checkpoints_with_torch(saves_shards: bool, tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]

    def run(by: Callable[..., Any], *arguments: Any) -> Any:
        strategy = lightning.pytorch.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=saves_shards
        )
        return fit(folder, *arguments, kind=partial(Sharded, by), strategy=strategy)

    losses = []
    for by in (torch_fully_shard, fully_shard):
        runner = run(by, 1)
        with quiet():
            runner.save_checkpoint(f"{folder}/{by.__module__}.ckpt")
        losses.append(float(runner.callback_metrics["eval_loss"]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for by, written_by in (
        (fully_shard, torch_fully_shard),
        (fully_shard, fully_shard),
        (torch_fully_shard, fully_shard),
    ):
        run(by, 2, f"{folder}/{written_by.__module__}.ckpt")
