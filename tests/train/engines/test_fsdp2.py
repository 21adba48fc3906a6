from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from megatron_fsdp.train.engines.automodel import policy_of
from megatron_fsdp.train.options.job import Job
from tests.conftest import RunRanks
from tests.train.engines.runs import DECODER, LLAMA, job_of, prepare

FSDP2 = {"use_torch_fsdp2": True}


def dtypes(job: Job) -> tuple[torch.dtype | None, torch.dtype | None]:
    policy = policy_of(job)
    return policy.param_dtype, policy.reduce_dtype


def test_gradients_travel_in_float32_unless_told() -> None:
    assert dtypes(job_of({**DECODER, **FSDP2}, 2)) == (torch.float32, torch.float32)
    assert dtypes(job_of({**DECODER, **FSDP2, "bf16": True}, 2)) == (torch.bfloat16, torch.float32)
    told = job_of({**DECODER, **FSDP2, "bf16": True, "grad_reduce_in_bf16": True}, 2)
    assert dtypes(told) == (torch.bfloat16, torch.bfloat16)


def kept_gathered(values: dict[str, Any]) -> bool:
    """Whether the first block has whole weights after a forward that a backward follows."""
    run = prepare({**values, **FSDP2})
    (first, *_) = run.feed.batches(0)
    model = run.trained.model
    _ = run.trained.accumulate([first], [first.weights])  # a backward first: FSDP2 sets itself up lazily
    output = model(first.inputs)
    block = next(module for name, module in model.named_modules() if name.endswith(("blocks.0", "layers.0")))
    is_kept = not any(isinstance(parameter, DTensor) for parameter in block.parameters())
    del output
    return is_kept


@pytest.mark.full(short=["model0"])
@pytest.mark.parametrize("model", [DECODER, LLAMA])
def test_weights_stay_gathered_only_where_told(run_ranks: RunRanks, model: dict[str, Any]) -> None:
    assert run_ranks(2, kept_gathered, model) == [False, False]
    told = {**model, "torch_fsdp2_no_reshard_after_forward": True}
    assert run_ranks(2, kept_gathered, told) == [True, True]
