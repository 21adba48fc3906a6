"""Training in stages equals one process on the whole batch."""

import pytest
import torch

from tests.automodel.pipeline_parallel.runs import Case, StageRun, run_cases, run_sharded
from tests.automodel.small_models import Reference, reference
from tests.conftest import RunRanks

CLOSE = {"rtol": 1e-4, "atol": 1e-6}
UPDATED = {"rtol": 1e-4, "atol": 5e-4}
"""Of parameters: AdamW divides a gradient by its own size, so rounding, which differs between processors, shows where a
gradient is nearly zero. This is a twentieth of one update (learning rate 1e-2)."""


def assert_same(runs: list[StageRun], case: Case, truth: Reference, rows: slice = slice(None)) -> None:
    """All that the ranks of one pipeline saw, against one process."""
    logits = [run.logits for run in runs if run.logits is not None]
    assert len(logits) == 1  # of the rank with the last stage
    torch.testing.assert_close(logits[0], truth.logits[rows], **CLOSE)
    copies = runs[0].copies
    for step in range(case.steps):
        for seen, known, close in (
            ([run.gradients[step] for run in runs], truth.gradients[step], CLOSE),
            ([run.parameters[step] for run in runs], truth.parameters[step], UPDATED),
        ):
            names = [name for by_name in seen for name in by_name]
            assert sorted(names) == sorted([*known, *copies]), case  # each in one stage only
            for by_name in seen:
                for name, value in by_name.items():
                    text = f"{case}, step {step}, {name}: "
                    torch.testing.assert_close(value, known[copies.get(name, name)], **close, msg=text.__add__)
            for copy, name in copies.items():
                assert torch.equal(seen[-1][copy], seen[0][name])
    copied = sum(truth.parameters[0][name].numel() for name in copies.values())
    assert sum(run.numel for run in runs) == sum(value.numel() for value in truth.parameters[0].values()) + copied


def compare(results: list[list[StageRun]], cases: list[Case]) -> None:
    """results: by rank, by case."""
    for index, case in enumerate(cases):
        truth = reference(case.kind, steps=case.steps, rows=case.rows, changes=case.changes)
        runs = [by_rank[index] for by_rank in results]
        for run in runs:
            torch.testing.assert_close(run.losses, truth.losses, rtol=1e-5, atol=0.0)
            torch.testing.assert_close(run.eval_loss, truth.losses[0], rtol=1e-5, atol=0.0)
        assert_same(runs, case, truth)


UNTIED = {"tie_word_embeddings": False}


SCHEDULES = [
    Case("qwen3_moe", microbatch_size=2),
    Case("gemma3"),  # tied
    Case("llama", "gpipe", microbatch_size=4),
    Case("gemma3", "interleaved1f1b", changes=UNTIED),
    Case("llama", "loopedbfs"),
]
FAMILIES = [
    Case("llama_gqa"),
    Case("mistral"),
    Case("gemma2", changes=UNTIED),
    Case("granite", changes={"embedding_multiplier": 3.0}),
    Case("phi"),
    Case("gpt2", changes=UNTIED),
    Case("deepseek_v3"),
]


@pytest.mark.full(short=["schedules"])
@pytest.mark.parametrize("cases", [SCHEDULES, FAMILIES], ids=["schedules", "families"])
def test_two_stages_equal_one_process(run_ranks: RunRanks, cases: list[Case]) -> None:
    compare(run_ranks(2, run_cases, cases), cases)


@pytest.mark.full
def test_four_stages_equal_one_process(run_ranks: RunRanks) -> None:
    cases = [Case("llama"), Case("gemma2"), Case("mixtral", "gpipe", microbatch_size=2)]
    compare(run_ranks(4, run_cases, cases), cases)


@pytest.mark.full
def test_stages_sharded_by_fsdp2_equal_one_process_with_labels_uneven_over_ranks(run_ranks: RunRanks) -> None:
    cases = [
        Case("llama_gqa"),
        Case("qwen3_moe", reshard=True),
        Case("gemma3", "interleaved1f1b"),
        Case("llama", "gpipe"),
        Case("llama", "loopedbfs", reshard=True),
    ]
    by_rank = run_ranks(4, run_sharded, cases, (2, 4))
    results = [runs for runs, _ in by_rank]
    for index, case in enumerate(cases):
        truth = reference(case.kind, steps=case.steps, rows=case.rows, changes=case.changes)
        for dp_rank in range(2):  # ranks are numbered with dp innermost
            runs = [results[2 * stage + dp_rank][index] for stage in range(2)]
            assert_same(runs, case, truth, slice(2 * dp_rank, 2 * dp_rank + 2))
        columns = [results[dp_rank][index].losses for dp_rank in range(2)]
        means = [sum(losses) / 2 for losses in zip(*columns, strict=True)]
        torch.testing.assert_close(means, truth.losses, rtol=1e-5, atol=0.0)
        assert columns == [results[2 + dp_rank][index].losses for dp_rank in range(2)]
    for rank, (_, counted) in enumerate(by_rank):
        for step, rows in zip(counted, (2, 4), strict=True):
            # Two layers and the rest, once each however many microbatches.
            assert (step.gathers, step.reductions) == (3, 3)
            truth = reference("llama", steps=1, rows=rows).losses[0]
            torch.testing.assert_close(step.loss, truth, rtol=2e-2, atol=0.0)  # bf16
            assert step.received_dtype == (None if rank < 2 else torch.bfloat16)
            assert step.gradient_dtypes == {torch.float32}
