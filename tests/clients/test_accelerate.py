"""accelerate, unmodified, beside one process: with a model that is sharded already, and with its FSDP2 plugin."""

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError, ShardOperationError
from megatron_fsdp.fsdp2 import FSDPModule, install
from megatron_fsdp.fsdp2.module import ShardedModule
from tests.conftest import RunRanks
from tests.support import language_models
from tests.support.doors import assert_same, weights_of, whole
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks, refusal

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


def forget_accelerate() -> None:
    """A worker has several programs one after another; accelerate keeps one state per process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@contextlib.contextmanager
def started(by_torchrun: bool = True) -> Iterator[None]:
    """The environment of one of torchrun's ranks, or of a program that was started alone, in a worker of the tests."""
    before = dict(os.environ)
    ranks = {"LOCAL_WORLD_SIZE": str(dist.get_world_size()), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    try:
        if by_torchrun:
            os.environ.update(ranks)
        else:
            for name in (*ranks, "RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name, None)
        forget_accelerate()
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        forget_accelerate()


def build() -> nn.Module:
    with fixed_seed(0):
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))


def rows() -> torch.utils.data.TensorDataset:
    with fixed_seed(1):
        return torch.utils.data.TensorDataset(torch.randn(24, 6), torch.randn(24, 3))


def plain_steps(model: nn.Module, batches: Sequence[Sequence[Any]], factor: float, every: int = 1) -> dict[str, Tensor]:
    """Weights after clipped steps of one process, whose rate is multiplied after so many of them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, every, factor)
    for batch in batches:
        for inputs, targets in batch:
            (F.mse_loss(model(inputs), targets) / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return {name: param.detach() for name, param in model.named_parameters()}


def one_process(steps: int) -> dict[str, Tensor]:
    """Two microbatches of four rows a step."""
    return plain_steps(
        build(), [[rows()[at : at + 4] for at in (8 * step, 8 * step + 4)] for step in range(steps)], 0.5
    )


def loop(folder: str, strategy: int, first: int, last: int) -> None:
    with started():
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=2, step_scheduler_with_optimizer=False
        )
        plain = build()
        model: Any
        model, optimizer = fully_shard(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), zero_dp_strategy=strategy)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        loader = torch.utils.data.DataLoader(rows(), batch_size=4 // dist.get_world_size())
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        assert type(model) is MegatronFSDP
        assert accelerator.unwrap_model(model) is model
        if first:
            load_checkpoint(model, optimizer, folder, extra={"schedule": schedule})
        batches = list(loader)[2 * first : 2 * last]
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                accelerator.backward(F.mse_loss(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                if accelerator.sync_gradients:
                    schedule.step()
                optimizer.zero_grad()
        for name, value in one_process(last).items():
            torch.testing.assert_close(model.full_parameters()[name], value, rtol=1e-5, atol=1e-6)
        assert schedule.get_last_lr() == [1e-2 * 0.5**last]
        with pytest.raises(ShardOperationError, match=r"call on all ranks save_checkpoint"):
            accelerator.save_state(f"{folder}/of_accelerate")
        save_checkpoint(model, optimizer, folder, iteration=last, extra={"schedule": schedule})


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [3, 1])
def test_its_loop_trains_as_one_process_and_goes_on_with_other_ranks(
    run_ranks: RunRanks, tmp_path: Path, strategy: int
) -> None:
    run_ranks(2, loop, str(tmp_path), strategy, 0, 2)
    run_ranks(1, loop, str(tmp_path), strategy, 2, 3)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_savers_that_write_on_the_first_rank_are_refused_on_all(tmp_path: Path, strategy: int) -> None:
    """Its own of a wrapper, and that of peft of the module inside."""
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():  # peft asks what transformers calls otherwise
        warnings.simplefilter("ignore", FutureWarning)
        adapters = peft.get_peft_model(language_models.build("llama"), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model, adapted = (fully_shard_model(each, zero_dp_strategy=strategy) for each in (build(), adapters))
    with started():
        accelerator = accelerate.Accelerator(cpu=True)
        for save in (partial(accelerator.save_model, model), adapters.save_pretrained, adapted.save_pretrained):
            text = refusal(save, f"{tmp_path}/saved")
            assert (
                "call on all ranks save_checkpoint(" in text or "save_adapter(model, folder) for the adapters" in text
            )
    assert list(tmp_path.rglob("*.safetensors")) == []


@on_ranks(2)
def test_its_mixed_precision_is_refused() -> None:
    with started():
        plain = build()
        model, _ = fully_shard(plain, torch.optim.AdamW(plain.parameters()))
        with pytest.raises(ConfigurationError, match=r"Accelerator\(mixed_precision='bf16'\) has no effect"):
            accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(model)


# ---- its FSDP2 plugin, on our `fully_shard` and on torch's: the same losses, norms and weights -----------------------


@contextlib.contextmanager
def fsdp2_on_cpus() -> Iterator[None]:
    """A program of accelerate with FSDP2, which on CPUs it would silently take for DistributedDataParallel."""
    state = accelerate.state.PartialState
    prepare = state._prepare_backend

    def prepared(self: Any, *args: Any, **named: Any) -> Any:
        return prepare(self, *args, **named)[0], accelerate.state.DistributedType.MULTI_GPU

    with started(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setattr(state, "_prepare_backend", prepared)
        patch.setattr(state, "set_device", lambda self: setattr(self, "device", torch.device("cpu")))
        yield


def plugin_program(folder: str, kind: str, loads_on_one: bool) -> tuple[Any, list[torch.Tensor]]:
    """Two epochs, with a checkpoint between; the second one again, from the checkpoint. Model, losses and norms."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=loads_on_one,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model: Any = language_models.build(kind)
    with fixed_seed(1):
        loader: Any = torch.utils.data.DataLoader(torch.randint(0, language_models.VOCABULARY, (14, 8)), batch_size=2)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    noted: list[torch.Tensor] = []

    def epoch() -> list[torch.Tensor]:
        begun = len(noted)
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    noted.append(whole(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
                optimizer.step()
                optimizer.zero_grad()
            noted.append(accelerator.gather_for_metrics(loss.detach()[None]))
        return noted[begun:]

    epoch()
    accelerator.save_state(folder)
    saved = weights_of(model)
    second, trained = epoch(), weights_of(model)
    accelerator.load_state(folder)
    assert_equal_tensors(weights_of(model), saved)
    assert_same(epoch(), second, rtol=0, atol=0)
    assert_equal_tensors(weights_of(model), trained)
    accelerator.save_model(model, f"{folder}/model")
    state = accelerator.get_state_dict(model)  # whole on the first rank
    is_first = dist.get_rank() == 0
    assert (is_first and set(state) >= set(trained)) or not state
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(f"{folder}/pretrained", is_main_process=is_first, state_dict=dict(state))
    if is_first:
        assert_equal_tensors({name: state[name] for name in trained}, trained)
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/pretrained")
        assert_equal_tensors(weights_of(again), trained)
    dist.barrier()
    return model, [*noted, *trained.values()]


@pytest.mark.full(short=["ram"])
@pytest.mark.parametrize(
    ("kind", "loads_on_one"), [("llama", False), ("llama", True), ("llama_tied", False)], ids=["plain", "ram", "tied"]
)
@on_ranks(2)
def test_its_plugin_trains_and_saves_as_on_torch(kind: str, loads_on_one: bool, tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    with fsdp2_on_cpus():
        theirs, wanted = plugin_program(f"{folder}/theirs", kind, loads_on_one)
    with install(), fsdp2_on_cpus():
        ours, found = plugin_program(f"{folder}/ours", kind, loads_on_one)
    assert isinstance(theirs, FSDPModule)
    assert not isinstance(theirs, ShardedModule)
    assert all(isinstance(module, ShardedModule) for module in (ours, *ours.model.layers))
    assert_same(found, wanted)
