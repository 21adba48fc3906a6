"""accelerate's FSDP2 plugin, unmodified, on our `fully_shard` and on torch's: the same losses, norms and weights."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.fsdp2 import FSDPModule, install
from megatron_fsdp.fsdp2.module import ShardedModule
from tests.clients.test_accelerate import started
from tests.fsdp2.test_fully_shard import assert_same, whole
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")


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


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def program(folder: str, kind: str, loads_on_one: bool) -> tuple[Any, list[torch.Tensor]]:
    """Two epochs, with a checkpoint between; the second one again, from the checkpoint. Model, losses and norms."""
    plugin = accelerate.FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=loads_on_one,
        state_dict_type="SHARDED_STATE_DICT",
    )
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin, gradient_accumulation_steps=2)
    model: Any = build(kind)
    with fixed_seed(1):
        loader: Any = torch.utils.data.DataLoader(torch.randint(0, VOCABULARY, (14, 8)), batch_size=2)
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
        theirs, wanted = program(f"{folder}/theirs", kind, loads_on_one)
    with install(), fsdp2_on_cpus():
        ours, found = program(f"{folder}/ours", kind, loads_on_one)
    assert isinstance(theirs, FSDPModule)
    assert not isinstance(theirs, ShardedModule)
    assert all(isinstance(module, ShardedModule) for module in (ours, *ours.model.layers))
    assert_same(found, wanted)
