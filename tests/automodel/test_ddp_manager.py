"""DDP by its manager trains as one process does, with and without recomputation."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.automodel import DDPConfig, DDPManager
from tests.automodel.process_groups import groups_destroyed
from tests.automodel.small_models import batch_of, build, reference
from tests.automodel.training import assert_trained_alike, train
from tests.conftest import RunRanks


def calls_in_a_step(model: nn.Module, part: Any) -> int:
    """How often a module's forward begins in forward and backward."""
    calls: list[None] = []
    handle = part.register_forward_pre_hook(lambda *_: calls.append(None))
    tokens = batch_of(2)["input_ids"]
    model(input_ids=tokens, use_cache=False).logits.sum().backward()
    model.zero_grad()
    handle.remove()
    return len(calls)


def train_replicas(kind: str) -> None:
    with groups_destroyed():
        for flag in (False, True):
            config = DDPConfig(backend="gloo", activation_checkpointing=flag)
            model = DDPManager(config).parallelize(build(kind))
            assert isinstance(model, nn.parallel.DistributedDataParallel)
            layer: Any = next(part for part in model.modules() if isinstance(part, nn.ModuleList))[0]
            assert calls_in_a_step(model, next(layer.children())) == 1 + flag
            assert_trained_alike(train(model), reference(kind))


def test_replicas_train_as_one_process_and_recompute_when_asked(run_ranks: RunRanks) -> None:
    for kind in ("llama_tied", "gpt2"):
        run_ranks(2, train_replicas, kind)


def start_differently() -> None:
    with groups_destroyed():
        mesh = dist.init_device_mesh("cpu", (2,))
        model = DDPManager(DDPConfig(backend="gloo"), mesh).parallelize(build("llama", seed=dist.get_rank()))
        expected = dict(build("llama", seed=0).named_parameters())
        for name, param in model.module.named_parameters():
            assert torch.equal(param, expected[name])


def test_replicas_start_with_the_first_ranks_weights(run_ranks: RunRanks) -> None:
    run_ranks(2, start_differently)


def one_rank() -> None:
    with groups_destroyed():
        model = DDPManager(DDPConfig(backend="gloo")).parallelize(build("llama"))
        assert {param.dtype for param in model.parameters()} == {torch.float32}
        assert_trained_alike(train(model, steps=2), reference("llama", steps=2))


def test_one_rank_keeps_dtype_and_device(run_ranks: RunRanks) -> None:
    run_ranks(1, one_rank)
