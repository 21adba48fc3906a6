"""The three strategies on an accelerator, beside one process on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from megatron_fsdp.automodel import AutoModelForCausalLM
from tests.automodel.training import STRATEGIES, optimizer_of, reference, strategy
from tests.conftest import RunRanks
from tests.support.language_models import batch_of, build, label_count, token_loss_sum


def losses_on_gpu(folder: str, name: str) -> tuple[list[float], set[str]]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=strategy(name, backend="nccl"), dtype=torch.float32
    )
    optimizer = optimizer_of(model)
    losses = []
    for step in range(3):
        batch = {key: value.cuda() for key, value in batch_of(4, seed=1 + step).items()}
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = token_loss_sum(logits, batch["labels"]) / label_count(batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {param.device.type for param in model.parameters()}


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_strategy_trains_on_a_gpu_as_one_process_on_the_cpu(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    build("llama").save_pretrained(tmp_path)
    ((losses, devices),) = run_ranks(1, losses_on_gpu, str(tmp_path), name, device_type="cuda")
    assert devices == {"cuda"}
    assert losses == pytest.approx(reference("llama").losses, rel=1e-3)
