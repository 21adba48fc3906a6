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


def numbered(name: str, ranks: int, model: dict[str, Any], *values: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {number}": (ranks, {**model, **each}) for number, each in enumerate(values)}


TENSOR, CONTEXT, PIPELINE, EXPERT = (
    {f"{axis}_parallel_size": 2} for axis in ("tensor_model", "context", "pipeline_model", "expert_model")
)
FULL = {"recompute_granularity": "full"}
TWO = {**EVERYTHING, "num_distributed_optimizer_instances": 2}
WITHOUT_ADAM = {name: value for name, value in DECODER.items() if name != "adam_eps"}
TABLE: dict[str, tuple[int, dict[str, Any]]] = {
    **{
        f"five samples on {ranks} ranks by {micro}": (ranks, {**DECODER, **EVERYTHING, "micro_batch_size": micro})
        for ranks, micro in ((1, 2), (2, 1), (3, 1), (3, 2), (4, 2))
    },
    **{
        strategy: (2, {**DECODER, **UNITS, "data_parallel_sharding_strategy": strategy})
        for strategy in ("no_shard", "optim", "optim_grads")
    },
    **numbered(
        "decoder",
        2,
        DECODER,
        BUCKETS,
        SHARDED_BUCKETS,
        {**BUCKETS, **MASKED},
        {**EVERYTHING, **MASKED},
        {**EVERYTHING, "eod_mask_loss": True},
        {**EVERYTHING, "calculate_per_token_loss": True},
        {**EVERYTHING, "init_model_with_meta_device": True},
        {**EVERYTHING, "global_batch_size": 11},
        {**BUCKETS, "global_batch_size": 11},
        {**EVERYTHING, **FULL, "recompute_num_layers": 1},
        {**EVERYTHING, "recompute_granularity": "selective"},
        FSDP2,
        {**FSDP2, "init_model_with_meta_device": True},
        {**FSDP2, **FULL, "torch_fsdp2_no_reshard_after_forward": True, "global_batch_size": 11},
    ),
    "sgd": (2, {**WITHOUT_ADAM, **EVERYTHING, "optimizer": "sgd", "clip_grad": 0.0}),
    **{
        f"two instances, {outer}": (4, {**DECODER, **TWO, "outer_dp_sharding_strategy": outer})
        for outer in ("no_shard", "optim")
    },
    **numbered(
        "llama",
        2,
        LLAMA,
        EVERYTHING,
        {**EVERYTHING, **FULL, "recompute_num_layers": 1},
        {**EVERYTHING, **TENSOR},
        {**EVERYTHING, **TENSOR, "sequence_parallel": True},
        {**BUCKETS, **TENSOR},
        {**EVERYTHING, **CONTEXT},
        {**EVERYTHING, **MASKED, **CONTEXT},
        BUCKETS,
        FSDP2,
        {**FSDP2, **TENSOR},
        {**FSDP2, **CONTEXT},
        {**FSDP2, **PIPELINE},
        {**FSDP2, **MASKED, **PIPELINE},
        {**EVERYTHING, **PIPELINE},
        {**EVERYTHING, **MASKED, **PIPELINE, **FULL},
        {**BUCKETS, **PIPELINE},
    ),
    **numbered(
        "llama on four",
        4,
        LLAMA,
        {**EVERYTHING, **TENSOR},
        {**FSDP2, **PIPELINE},
        {**FSDP2, **PIPELINE, **CONTEXT},
        {**EVERYTHING, **PIPELINE, "global_batch_size": 11},
        {**EVERYTHING, **PIPELINE, **CONTEXT},
        {**EVERYTHING, **PIPELINE, **TENSOR},
        {**SHARDED_BUCKETS, **PIPELINE, "global_batch_size": 11},
        {**UNITS, "data_parallel_sharding_strategy": "optim_grads", **PIPELINE},
        {**TWO, **PIPELINE},
    ),
    **numbered(
        "experts",
        2,
        MIXTRAL,
        {**FSDP2, **EXPERT},
        {**EVERYTHING, **TENSOR},
        {**EVERYTHING, **EXPERT},
        {**BUCKETS, **MASKED, **EXPERT},
    ),
    **numbered(
        "experts on four",
        4,
        MIXTRAL,
        {**FSDP2, **EXPERT},
        {**EVERYTHING, **EXPERT, "global_batch_size": 11},
        {**SHARDED_BUCKETS, **EXPERT},
        {**EVERYTHING, **EXPERT, **CONTEXT},
        {**EVERYTHING, **EXPERT, **PIPELINE},
    ),
}
SHORT = ["five samples on 3 ranks by 1", "optim_grads", "sgd", "two instances, optim", "llama 2", "llama 14"]


@pytest.mark.full(short=[*SHORT, "llama on four 6", "experts 0"])
@pytest.mark.parametrize(("ranks", "values"), TABLE.values(), ids=TABLE)
def test_ranks_train_as_one_process_does(run_ranks: RunRanks, ranks: int, values: dict[str, Any]) -> None:
    for found in run_ranks(ranks, train_here, values):
        assert_equal_to_one_process(found, values)


@pytest.mark.parametrize(("optimizer", "tolerance"), [("muon", 1e-3), ("adamw8bit", 2e-5)])
def test_decoder_under_other_optimizers(run_ranks: RunRanks, optimizer: str, tolerance: float) -> None:
    """Muon iterates in bf16, where gradients that are added in another order may round to other numbers."""
    values = {**DECODER, **EVERYTHING, "optimizer": optimizer}
    for found in run_ranks(2, train_here, values):
        assert_equal_to_one_process(found, values, tolerance)


@pytest.mark.full(short=["engine1"])
@pytest.mark.parametrize("engine", [FSDP2, EVERYTHING])
def test_tied_ends_in_two_stages_stay_one(run_ranks: RunRanks, engine: dict[str, Any]) -> None:
    values = {**TIED, **engine, **PIPELINE}
    for found in run_ranks(2, train_here, values):
        head = found.weights.pop("lm_head.weight")
        assert torch.equal(head, found.weights["model.embed_tokens.weight"])
        assert_equal_to_one_process(found, values)


def test_tied_ends_that_would_be_cut_differently_are_refused(run_ranks: RunRanks) -> None:
    told = run_ranks(4, refusal_of_building, {**TIED, **EVERYTHING, **PIPELINE})
    assert told == told[:1] * 4
    assert told[0].startswith("the embeddings and the head of LlamaForCausalLM are tied, and lie in two stages")
    assert "give --untie-embeddings-and-output-weights" in told[0]
