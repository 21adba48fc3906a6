"""Models whose sequences are shared by ranks equal one process: loss, logits, gradients and two updates."""

from typing import Any

import pytest

from tests.automodel.context_parallel.runs import ENGINE, Case, check
from tests.conftest import RunRanks

pytest.importorskip("transformers")

SOFTCAP = (("attn_logit_softcapping", 1.0),)
"""So low that scores bend."""

KINDS = ("llama", "llama_gqa", "qwen3", "mistral", "phi", "qwen3_moe", "deepseek_v3")


@pytest.mark.full
def test_two_ranks_that_share_sequences_equal_one_process(run_ranks: RunRanks) -> None:
    cases = [Case(kind) for kind in KINDS]
    cases += [Case("gemma2", changes=SOFTCAP), Case("gemma2", load_balance=False, changes=SOFTCAP)]
    cases += [Case(kind, load_balance=False) for kind in ("llama_gqa", "mistral", "deepseek_v3")]
    check(run_ranks, 2, cases)


def test_four_ranks_that_share_sequences_equal_one_process(run_ranks: RunRanks) -> None:
    check(run_ranks, 4, [Case("gemma2", cp_size=4, changes=SOFTCAP)])


@pytest.mark.full
def test_data_and_context_parallel_ranks_together_equal_one_process(run_ranks: RunRanks) -> None:
    check(run_ranks, 4, [Case("llama_gqa"), Case("llama_gqa", strategy=ENGINE)])


@pytest.mark.full
def test_activations_computed_again_are_those_of_the_whole_sequence(run_ranks: RunRanks) -> None:
    settings: list[dict[str, Any]] = [{"strategy": ENGINE}, {"load_balance": False}]
    check(run_ranks, 2, [Case("mistral", checkpointing=True, **setting) for setting in settings])


def test_the_models_own_loss_takes_labels_shifted_before_cutting(run_ranks: RunRanks) -> None:
    check(run_ranks, 2, [Case("qwen3", loss_inside=True), Case("llama_gqa", loss_inside=True, strategy=ENGINE)])
