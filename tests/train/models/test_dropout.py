"""What a model drops at random follows from the samples, and not from ranks, engines, recomputation or restarts."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_fsdp.train.loop import train
from tests.conftest import RunRanks
from tests.train.models.runs import (
    LLAMA,
    NoCheckpoints,
    Results,
    Silent,
    assert_equal_to_one_process,
    prepare,
    results_of,
    train_plainly,
    whole_weights,
)

UNITS = {"use_megatron_fsdp": True}
FSDP2 = {"use_torch_fsdp2": True}
FULL = {"recompute_granularity": "full"}
RUN = {
    name: LLAMA[name] for name in ("seq_length", "micro_batch_size", "train_iters", "lr", "adam_eps", "weight_decay")
}
RUN |= {"global_batch_size": 7, "eval_iters": 1, "log_interval": 2, "clip_grad": 0.5}
GPT2 = {"model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 4}
IDS = {"bos_token_id": None, "eos_token_id": None}
DROPS = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of GPT-2 that drops a fifth everywhere."""
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps({**GPT2, **IDS, **DROPS, "initializer_range": 0.1}))
    return {**RUN, "hf_config": str(folder)}


def train_and_keep_the_beginning(values: dict[str, Any]) -> tuple[Results, dict[str, Tensor]]:
    run, watcher = prepare(values), Silent()
    first = whole_weights(run.trained.model)
    torch.manual_seed(torch.distributed.get_rank())  # what was drawn before must not matter
    train(run, watcher, NoCheckpoints())
    return results_of(run, watcher), first


@pytest.mark.full(short=["2-engine0"])
@pytest.mark.parametrize(("ranks", "engine"), [(2, {**UNITS, **FULL}), (3, {"overlap_grad_reduce": True}), (3, FSDP2)])
def test_the_same_is_dropped_on_any_ranks(
    run_ranks: RunRanks, values: dict[str, Any], ranks: int, engine: dict[str, Any]
) -> None:
    for found, first in run_ranks(ranks, train_and_keep_the_beginning, {**values, **engine}):
        assert_equal_to_one_process(found, values, plain=train_plainly(values, first=first))
