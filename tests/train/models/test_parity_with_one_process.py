"""Every engine, on any number of ranks, trains as a plain loop in one process does on the whole batch."""

from typing import Any

import pytest
import torch

from tests.conftest import RunRanks
from tests.train.models.runs import (
    DECODER,
    LLAMA,
    MIXTRAL,
    TIED,
    assert_equal_to_one_process,
    refusal_of_building,
    train_here,
)

UNITS = {"use_megatron_fsdp": True}
EVERYTHING = {**UNITS, "data_parallel_sharding_strategy": "optim_grads_params"}
BUCKETS = {"overlap_grad_reduce": True}
SHARDED_BUCKETS = {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True}
FSDP2 = {"use_torch_fsdp2": True}
MASKED = {"eod_mask_loss": True, "calculate_per_token_loss": True}


def check(run_ranks: RunRanks, ranks: int, values: dict[str, Any]) -> None:
    for found in run_ranks(ranks, train_here, values):
        assert_equal_to_one_process(found, values)


@pytest.mark.full(short=["3-1"])
@pytest.mark.parametrize(("ranks", "micro"), [(1, 2), (2, 1), (3, 1), (3, 2), (4, 2)])
def test_five_samples_on_any_ranks(run_ranks: RunRanks, ranks: int, micro: int) -> None:
    check(run_ranks, ranks, {**DECODER, **EVERYTHING, "micro_batch_size": micro})


@pytest.mark.full(short=["optim_grads"])
@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_strategies(run_ranks: RunRanks, strategy: str) -> None:
    check(run_ranks, 2, {**DECODER, **UNITS, "data_parallel_sharding_strategy": strategy})


@pytest.mark.full
@pytest.mark.parametrize(
    "values",
    [
        BUCKETS,
        {**BUCKETS, "use_distributed_optimizer": True, "overlap_param_gather": True},
        {**BUCKETS, **MASKED},
        {**EVERYTHING, **MASKED},
        {**EVERYTHING, "eod_mask_loss": True},
        {**EVERYTHING, "calculate_per_token_loss": True},
        {**EVERYTHING, "init_model_with_meta_device": True},
        {**EVERYTHING, "global_batch_size": 11},
        {**BUCKETS, "global_batch_size": 11},
        {**EVERYTHING, "recompute_granularity": "full", "recompute_num_layers": 1},
        {**EVERYTHING, "recompute_granularity": "selective"},
        FSDP2,
        {**FSDP2, "init_model_with_meta_device": True},
        {
            **FSDP2,
            "torch_fsdp2_no_reshard_after_forward": True,
            "global_batch_size": 11,
            "recompute_granularity": "full",
        },
    ],
)
def test_decoder_on_two_ranks(run_ranks: RunRanks, values: dict[str, Any]) -> None:
    check(run_ranks, 2, {**DECODER, **values})


@pytest.mark.parametrize(("optimizer", "tolerance"), [("muon", 1e-3), ("adamw8bit", 2e-5)])
def test_decoder_under_other_optimizers(run_ranks: RunRanks, optimizer: str, tolerance: float) -> None:
    """Muon iterates in bf16, where gradients that are added in another order may round to other numbers."""
    values = {**DECODER, **EVERYTHING, "optimizer": optimizer}
    for found in run_ranks(2, train_here, values):
        assert_equal_to_one_process(found, values, tolerance)


def test_decoder_under_sgd(run_ranks: RunRanks) -> None:
    decoder = {name: value for name, value in DECODER.items() if name != "adam_eps"}
    check(run_ranks, 2, {**decoder, **EVERYTHING, "optimizer": "sgd", "clip_grad": 0.0})


@pytest.mark.full(short=["optim"])
@pytest.mark.parametrize("outer", ["no_shard", "optim"])
def test_two_instances_of_the_optimizer_on_four_ranks(run_ranks: RunRanks, outer: str) -> None:
    values = {**DECODER, **EVERYTHING, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": outer}
    check(run_ranks, 4, values)


@pytest.mark.full(short=["values2", "values14"])
@pytest.mark.parametrize(
    "values",
    [
        EVERYTHING,
        {**EVERYTHING, "recompute_granularity": "full", "recompute_num_layers": 1},
        {**EVERYTHING, "tensor_model_parallel_size": 2},
        {**EVERYTHING, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        {**BUCKETS, "tensor_model_parallel_size": 2},
        {**EVERYTHING, "context_parallel_size": 2},
        {**EVERYTHING, **MASKED, "context_parallel_size": 2},
        BUCKETS,
        FSDP2,
        {**FSDP2, "tensor_model_parallel_size": 2},
        {**FSDP2, "context_parallel_size": 2},
        {**FSDP2, "pipeline_model_parallel_size": 2},
        {**FSDP2, **MASKED, "pipeline_model_parallel_size": 2},
        {**EVERYTHING, "pipeline_model_parallel_size": 2},
        {**EVERYTHING, **MASKED, "pipeline_model_parallel_size": 2, "recompute_granularity": "full"},
        {**BUCKETS, "pipeline_model_parallel_size": 2},
    ],
)
def test_llama_on_two_ranks(run_ranks: RunRanks, values: dict[str, Any]) -> None:
    check(run_ranks, 2, {**LLAMA, **values})


@pytest.mark.full(short=["engine1"])
@pytest.mark.parametrize("engine", [FSDP2, EVERYTHING])
def test_tied_ends_in_two_stages_stay_one(run_ranks: RunRanks, engine: dict[str, Any]) -> None:
    values = {**TIED, **engine, "pipeline_model_parallel_size": 2}
    for found in run_ranks(2, train_here, values):
        head = found.weights.pop("lm_head.weight")
        assert torch.equal(head, found.weights["model.embed_tokens.weight"])
        assert_equal_to_one_process(found, values)


def test_tied_ends_that_would_be_cut_differently_are_refused(run_ranks: RunRanks) -> None:
    told = run_ranks(4, refusal_of_building, {**TIED, **EVERYTHING, "pipeline_model_parallel_size": 2})
    assert told == told[:1] * 4
    assert told[0].startswith("the embeddings and the head of LlamaForCausalLM are tied, and lie in two stages")
    assert "give --untie-embeddings-and-output-weights" in told[0]


@pytest.mark.full(short=["values6"])
@pytest.mark.parametrize(
    "values",
    [
        {**EVERYTHING, "tensor_model_parallel_size": 2},
        {**FSDP2, "pipeline_model_parallel_size": 2},
        {**FSDP2, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
        {**EVERYTHING, "pipeline_model_parallel_size": 2, "global_batch_size": 11},
        {**EVERYTHING, "pipeline_model_parallel_size": 2, "context_parallel_size": 2},
        {**EVERYTHING, "pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2},
        {**SHARDED_BUCKETS, "pipeline_model_parallel_size": 2, "global_batch_size": 11},
        {**UNITS, "data_parallel_sharding_strategy": "optim_grads", "pipeline_model_parallel_size": 2},
        {**EVERYTHING, "pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
    ],
)
def test_llama_on_four_ranks(run_ranks: RunRanks, values: dict[str, Any]) -> None:
    check(run_ranks, 4, {**LLAMA, **values})


@pytest.mark.full(short=["2-values0"])
@pytest.mark.parametrize(
    ("ranks", "values"),
    [
        (2, {**FSDP2, "expert_model_parallel_size": 2}),
        (4, {**FSDP2, "expert_model_parallel_size": 2}),
        (2, {**EVERYTHING, "tensor_model_parallel_size": 2}),
        (2, {**EVERYTHING, "expert_model_parallel_size": 2}),
        (2, {**BUCKETS, **MASKED, "expert_model_parallel_size": 2}),
        (4, {**EVERYTHING, "expert_model_parallel_size": 2, "global_batch_size": 11}),
        (4, {**SHARDED_BUCKETS, "expert_model_parallel_size": 2}),
        (4, {**EVERYTHING, "expert_model_parallel_size": 2, "context_parallel_size": 2}),
        (4, {**EVERYTHING, "expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    ],
)
def test_experts(run_ranks: RunRanks, ranks: int, values: dict[str, Any]) -> None:
    check(run_ranks, ranks, {**MIXTRAL, **values})
