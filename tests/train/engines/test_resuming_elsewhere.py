"""A run goes on with another engine, other ranks and other microbatches, and comes to what one process comes to."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, LLAMA, expected
from tests.train.engines.test_resuming import train_with_checkpoints

UNITS = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
TWO_INSTANCES = {**UNITS, "num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
BUCKETS = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
FSDP2 = {"use_torch_fsdp2": True}
BATCH = {"global_batch_size": 7, "train_iters": 4}
CLASSIC = {
    **DECODER,
    **BATCH,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
}
TIED_LLAMA = {**LLAMA, **BATCH, "untie_embeddings_and_output_weights": False}


@pytest.mark.full(short=["model1-first1-3-then1-2"])
@pytest.mark.parametrize(
    ("model", "first", "ranks", "then", "other_ranks"),
    [
        (CLASSIC, FSDP2, 2, UNITS, 3),
        (CLASSIC, UNITS, 3, FSDP2, 2),
        (CLASSIC, TWO_INSTANCES, 4, FSDP2, 1),
        (TIED_LLAMA, FSDP2, 2, BUCKETS, 3),
        (TIED_LLAMA, BUCKETS, 1, FSDP2, 2),
    ],
)
def test_the_rest_is_that_of_one_process(
    run_ranks: RunRanks,
    tmp_path: Path,
    model: dict[str, Any],
    first: dict[str, Any],
    ranks: int,
    then: dict[str, Any],
    other_ranks: int,
) -> None:
    folder = str(tmp_path / "saved")
    begin = {**model, **first, "save": folder, "train_iters": 2, "lr_decay_iters": 4, "micro_batch_size": 2}
    run_ranks(ranks, train_with_checkpoints, begin)
    go_on = {**model, **then, "load": folder, "lr_decay_iters": 4, "micro_batch_size": 1}
    plain = expected(model)
    for found in run_ranks(other_ranks, train_with_checkpoints, go_on):
        torch.testing.assert_close(found.losses, plain.losses[2:], rtol=2e-6, atol=0)
        torch.testing.assert_close(found.norms, plain.norms[2:], rtol=2e-5, atol=0)
        for name, value in plain.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=2e-6)
