"""What a pipeline refuses, with the same outcome on every rank."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.automodel.pipeline_parallel.pipeline import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.pipeline_parallel.runs import CPU
from tests.automodel.small_models import batch_of, build
from tests.conftest import RunRanks


def message_of(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except ConfigurationError as error:
        return str(error)
    return ""


def refusals() -> dict[str, str]:
    """Case -> message of this rank; then a step still works."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    batch = batch_of()
    tokens, labels = batch["input_ids"], batch["labels"]

    def made(kind: str = "llama", prepare: Any = _same, **options: Any) -> Any:
        return build_pipeline(build(kind), mesh, PipelineConfig(**options), parallelize_stage=prepare, device=CPU)

    pipeline = made()
    rows = tokens[: 4 - rank], labels[: 4 - rank]
    found = {
        "other rows": message_of(pipeline.step, *rows),
        "labels on one rank": message_of(pipeline.step, tokens, labels if rank else None),
        "labels on none": message_of(pipeline.step, tokens),
        "labels in eval": message_of(pipeline.eval_step, tokens),
        "labels in forward": message_of(pipeline.forward, tokens, shift_labels=labels),
        "bad labels on one rank": message_of(pipeline.step, tokens, labels[:, rank:]),
        "mask on one rank": message_of(pipeline.step, tokens, labels, **_mask(tokens, rank)),
        "bad mask": message_of(pipeline.step, tokens, labels, attention_mask=torch.ones(3, 16)),
        "two kinds of labels": message_of(pipeline.step, tokens, labels, shift_labels=labels),
        "flat tokens": message_of(pipeline.step, tokens[0], labels[0]),
        "too few rows": message_of(pipeline.step, tokens[:1], labels[:1]),
        "dp_size alone": message_of(pipeline.step, tokens, labels, dp_size=2),
        "no tokens": message_of(pipeline.step, tokens, labels, num_label_tokens=0),
        "rows of a microbatch": message_of(made(pp_microbatch_size=3).step, tokens, labels),
        "rows of a batch": message_of(made(pp_batch_size=2).step, tokens, labels),
        "rounds": message_of(made(pp_schedule="interleaved1f1b").step, **batch_of(5)),
        "tokens of a mean": message_of(
            made(loss_fn=_mean, scale_grads_in_schedule=True).step, tokens, labels, num_label_tokens=5
        ),
        "batch too small": message_of(made, pp_microbatch_size=3, pp_batch_size=3),
        "ends of a tie": message_of(made, "llama_tied", prepare=_half if rank else _same),
        "uneven stages": message_of(made, pp_schedule="interleaved1f1b", layers_per_stage=2),
    }
    assert pipeline.step(tokens, labels).item() > 0
    return found


def _same(part: nn.Module) -> nn.Module:
    return part


def _half(part: nn.Module) -> nn.Module:
    return part.half()


def _mean(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.mean() + labels.sum()


def _mask(tokens: Tensor, rank: int) -> dict[str, Tensor]:
    return {"attention_mask": torch.ones_like(tokens)} if rank else {}


EXPECTED = {
    "other rows": "rank 0 has 'input_ids of shape (4, 16)', rank 1 has 'input_ids of shape (3, 16)'",
    "labels on one rank": "rank 0 has 'no labels', rank 1 has 'labels with the checksum ",
    "labels on none": "needs labels",
    "labels in eval": "needs labels",
    "labels in forward": "use eval_step",
    "bad labels on one rank": "rank 1: labels has shape (4, 15)",
    "mask on one rank": "other arguments",
    "bad mask": "attention_mask has shape (3, 16)",
    "two kinds of labels": "give one of them",
    "flat tokens": "(rows, sequence)",
    "too few rows": "make 1 microbatches, but 1F1B needs at least one for each of the 2 stages",
    "dp_size alone": "give both",
    "no tokens": "num_label_tokens=0",
    "rows of a microbatch": "4 rows does not divide into microbatches of pp_microbatch_size=3",
    "rows of a batch": "pp_batch_size=2",
    "rounds": "in 2 equal rounds; give a multiple of 2",
    "tokens of a mean": "leave them out",
    "batch too small": "make 1 microbatches",
    "ends of a tie": "cut or cast them differently",
    "uneven stages": "make 2 stages, 1 on each of 2 ranks, but Interleaved1F1B runs at least two stages",
}


def test_refusals_are_sentences_that_are_the_same_on_every_rank(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    assert first.keys() == EXPECTED.keys()
    for case, words in EXPECTED.items():
        assert words in first[case], case
        assert "\n" not in first[case]
