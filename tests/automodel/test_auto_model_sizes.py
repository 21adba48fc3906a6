"""One call for any mesh: `from_pretrained` with sizes trains as one process does, and what it saves is whole."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers

from megatron_fsdp.automodel import AutoModelForCausalLM, PipelineConfig, clip_grad_norm_, shard_batch
from megatron_fsdp.automodel.pipeline_parallel import Pipeline
from tests.automodel.small_models import batch_of, label_count, reference
from tests.automodel.test_auto_model import save
from tests.automodel.training import (
    Trained,
    assert_close,
    assert_trained_alike,
    gradients_of,
    optimizer_of,
    parameters_of,
    strategy,
)
from tests.conftest import RunRanks


@dataclass(frozen=True)
class Case:
    """One way to divide a model.

    Attributes:
        kind: Of the model.
        sizes: As `from_pretrained` takes them.
        name: Of the strategy.
        fields: Of its config.
        options: Further arguments of `from_pretrained`.
        changes: Of the model's config.
    """

    kind: str
    sizes: dict[str, int]
    name: str = "fsdp2"
    fields: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        sizes = "-".join(f"{key.removesuffix('_size')}{size}" for key, size in self.sizes.items())
        return "-".join([self.kind, self.name, sizes, *self.fields])


def train_on_mesh(model: Any, steps: int = 2, rows: int = 4) -> Trained:
    """Train what `from_pretrained` returned on this rank's part of the batches of `reference`."""
    context = model.mesh_context
    optimizer = optimizer_of(model)
    ranks = context.sizes.dp_cp
    run = Trained([], [], [], [])
    for step in range(steps):
        batch = batch_of(rows, seed=1 + step)
        count = label_count(batch["labels"])
        own = {name: value.chunk(context.sizes.dp)[context.data_rank] for name, value in batch.items()}
        optimizer.zero_grad()
        if isinstance(model, Pipeline):
            loss = model.step(**own, num_label_tokens=count, dp_size=ranks)
        else:
            loss = loss_of(model, own) * ranks / count
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        run.losses.append(total.item() / dist.get_world_size())
        run.gradients.append(gradients_of(model))
        run.norms.append(clip_grad_norm_(model, math.inf).item())
        optimizer.step()
        run.parameters.append(parameters_of(model))
    return run


def loss_of(model: Any, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of this rank's token losses."""
    context = model.mesh_context
    if context.sizes.cp > 1:
        batch = shard_batch(own, context.axis("cp"))
        labels = batch.pop("shift_labels")
    else:
        batch = {"input_ids": own["input_ids"]}
        labels = torch.nn.functional.pad(own["labels"][:, 1:], (0, 1), value=-100)
    logits = model(**batch, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")


def check(case: Case, folder: str, out: str) -> None:
    expected = reference(case.kind, steps=2)
    norms = [math.sqrt(sum(grad.square().sum().item() for grad in of.values())) for of in expected.gradients]
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=strategy(case.name, **case.fields),
        dtype=torch.float32,
        **case.sizes,
        **case.options,
    )
    found = train_on_mesh(model)
    assert found.norms == pytest.approx(norms, rel=1e-3), (found.norms, norms)
    if isinstance(model, Pipeline):  # each rank has some of the layers
        expected = Trained(
            expected.losses,
            [{name: value for name, value in of.items() if name in found.gradients[0]} for of in expected.gradients],
            [{name: value for name, value in of.items() if name in found.parameters[0]} for of in expected.parameters],
        )
        found = Trained(
            found.losses,
            [{name: of[name] for name in expected.gradients[0]} for of in found.gradients],
            [{name: of[name] for name in expected.parameters[0]} for of in found.parameters],
        )
        assert expected.gradients[0]
    assert_trained_alike(found, expected, tolerance=1e-3)
    model.save_pretrained(out, max_shard_size="20KB")
    again = dict(transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
    assert set(again) == set(reference(case.kind, steps=1).parameters[0])
    trained = parameters_of(model)
    shared = again.keys() & trained.keys()
    assert_close({name: again[name] for name in shared}, {name: trained[name] for name in shared}, 0, 0, "saved")


TWO_RANKS = [
    Case("qwen3", {"tp_size": 2}),
    Case("gemma3", {"tp_size": 2}, fields={"sequence_parallel": True}),
    Case("olmo2", {"tp_size": 2}, "megatron_fsdp"),
    Case("llama_gqa", {"tp_size": 2}, "megatron_fsdp", {"sequence_parallel": True}),
    Case("mistral", {"cp_size": 2}),
    Case("llama", {"cp_size": 2}, "megatron_fsdp"),
    Case("llama", {"pp_size": 2}),
    Case("gemma3", {"pp_size": 2}, options={"pipeline_config": PipelineConfig("interleaved1f1b")}),
    Case("mixtral", {"ep_size": 2}),
    Case("deepseek_v3", {"ep_size": 2}, fields={"activation_checkpointing": True}),
]
FOUR_RANKS = [
    Case("gemma3", {"tp_size": 2}, fields={"sequence_parallel": True}),
    Case("qwen3_moe", {"tp_size": 2}, "megatron_fsdp"),
    Case("qwen3", {"cp_size": 2}),
    Case("llama_tied", {"cp_size": 2}, "megatron_fsdp", {"activation_checkpointing": True}),
    Case("llama_tied", {"pp_size": 2}),
    Case("qwen2_moe", {"ep_size": 2}),
    Case("qwen3_moe", {"ep_size": 4}),
    Case("llama", {"dp_replicate_size": 2}),
]


@pytest.mark.full(short=["olmo2-megatron_fsdp-tp2", "mixtral-fsdp2-ep2"])
@pytest.mark.parametrize("case", TWO_RANKS, ids=str)
def test_one_size_on_two_ranks(run_ranks: RunRanks, tmp_path: Path, case: Case) -> None:
    run_ranks(2, check, case, save(case.kind, tmp_path), str(tmp_path / "out"))


@pytest.mark.full
@pytest.mark.parametrize("case", FOUR_RANKS, ids=str)
def test_two_sizes_on_four_ranks(run_ranks: RunRanks, tmp_path: Path, case: Case) -> None:
    run_ranks(4, check, case, save(case.kind, tmp_path), str(tmp_path / "out"))
