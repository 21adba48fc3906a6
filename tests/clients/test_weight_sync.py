"""trl sends weights from our `fully_shard`: asynchronous GRPO, also by a `WeightSource`, and GRPO with a server."""

import queue
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp.fsdp2 import install
from megatron_fsdp.weights import WeightSource
from tests.clients.test_accelerate import fsdp2_on_cpus
from tests.clients.test_fsdp2_trainers import arguments, grpo, preferences, tokenizer
from tests.support.doors import weights_of
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, of_ranks, on_ranks, once

STEPS = 3


@pytest.fixture(autouse=True)
def _needs_trl() -> None:
    pytest.importorskip("trl.experimental.async_grpo")  # a second, which those who only collect need not spend


class Rollouts:
    """Samples that are there from the start."""

    def __init__(self) -> None:
        from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.versions: list[int] = []
        generator = np.random.default_rng(1)
        for at in range(32):
            self.rollout_buffer.put(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=generator.integers(2, VOCABULARY, 8),
                    completion_mask=np.array([0] * 4 + [1] * 4),
                    old_log_probs=np.full(8, -3.0, dtype=np.float32),
                    advantage=(-1.0) ** at,
                    model_version=0,
                    group_id=at // 2,
                    metrics={},
                )
            )

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def check_health(self, stale_after_s: float) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        self.versions.append(model_version)


class Transfer:
    """A transport that keeps what it is to send."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Tensor]] = []

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def destroy(self) -> None: ...

    def send_weights(self, iterator: Iterable[tuple[str, Tensor]]) -> None:
        self.sent.append({name: tensor.clone() for name, tensor in iterator})


def trained(folder: str, *, by_source: bool) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return what was sent before the first step and after each, and the weights at the end."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

    transfer, rollouts = Transfer(), Rollouts()
    given = arguments(AsyncGRPOConfig, folder, token_budget=-1, max_staleness=100, save_strategy="no", dtype="float32")
    rows = preferences().select_columns(["prompt"])
    with patch("torch.cuda.get_device_name", return_value="of no interest"):  # asked also where there is none
        trainer = AsyncGRPOTrainer(
            f"{folder}/base",
            lambda **_: [],
            given,
            rows,
            tokenizer(),
            rollout_worker=rollouts,
            weight_transfer=transfer,
        )
    AttentionInterface.register(trainer.model.config._attn_implementation, sdpa_attention_forward)  # theirs is CUDA's
    if by_source:
        source = None

        def whole() -> Iterable[tuple[str, Tensor | None]]:
            nonlocal source
            source = source or WeightSource(trainer.accelerator.unwrap_model(trainer.model), destination=0, dtype=None)
            return iter(source)

        trainer._streaming_iter = whole
    trainer.train()
    return transfer.sent, weights_of(trainer.accelerator.unwrap_model(trainer.model))


@pytest.mark.full
@on_ranks(2)
def test_asynchronous_grpo_sends_the_same_weights_as_on_torch(tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    once(lambda: [each.save_pretrained(f"{folder}/base") for each in (build("llama"), tokenizer())])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        with fsdp2_on_cpus():
            wanted = trained(folder, by_source=False)
        with install(), fsdp2_on_cpus():
            found = [trained(folder, by_source=by_source) for by_source in (False, True)]
    assert len(wanted[0]) == (STEPS + 1 if dist.get_rank() == 0 else 0)
    for (sent, weights), (others, same), near in ((found[0], wanted, 1e-6), (found[1], found[0], 0.0)):
        assert_equal_tensors(weights, same, rtol=near, atol=near)
        for each, other in zip(sent, others, strict=True):
            assert_equal_tensors(each, other, rtol=near, atol=near)
    if wanted[0]:
        assert not any(torch.equal(before, wanted[0][-1][name]) for name, before in wanted[0][0].items())


class Server:
    """trl's client of a vLLM server, as far as weights go."""

    def update_named_params(self, described: list[Any], tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.described, self.sent = described, {name: tensor.clone() for name, tensor in tensors}

    def reset_prefix_cache(self) -> None: ...


@on_ranks(2)
def test_grpo_in_server_mode_sends_the_weights_as_they_are(tmp_path: Path) -> None:
    from trl.generation.vllm_generation import VLLMGeneration

    folder = of_ranks(str(tmp_path))[0]
    once(lambda: build("llama").save_pretrained(f"{folder}/base"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        with install(), fsdp2_on_cpus():
            trainer = grpo(f"{folder}/out")
            trainer.train()
            with patch.object(VLLMGeneration, "_init_vllm"):  # it would look for a server
                sender = VLLMGeneration(trainer.model, trainer.accelerator, tokenizer(), mode="server")
            sender.vllm_client = Server()
            sender.sync_weights()
            weights = weights_of(trainer.accelerator.unwrap_model(trainer.model))
    if dist.get_rank() == 0:
        assert_equal_tensors(sender.vllm_client.sent, weights)
        assert sender.vllm_client.described == [
            (name, "float32", list(tensor.shape)) for name, tensor in weights.items()
        ]
