"""Recomputation of decoder layers of transformers: less is kept, nothing changes."""

import pytest
import torch
from torch import Tensor

from megatron_fsdp.train.options.options import TrainingOptions
from tests.train.engines.runs import LLAMA, job_of, plain_model

pytest.importorskip("transformers")


def kept_and_gradients(options: TrainingOptions) -> tuple[int, list[Tensor]]:
    """Elements that autograd keeps, and all gradients."""
    from megatron_fsdp.train.engines.transformers_sharded import recompute_layers

    model = plain_model(job_of({**LLAMA, "num_layers": 3}, 1)).train()
    recompute_layers(model, options)
    kept, known = [], {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in known:
            kept.append(tensor.numel())
        return tensor

    tokens = torch.arange(8)[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    return sum(kept), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_first_layers_are_recomputed() -> None:
    all_kept, gradients = kept_and_gradients(TrainingOptions())
    one, two, three = (
        kept_and_gradients(TrainingOptions(recompute_granularity="full", recompute_num_layers=layers))
        for layers in (1, 2, None)
    )
    assert all_kept > one[0] > two[0] > three[0]
    assert two[0] < 0.7 * all_kept
    for _, recomputed in (one, two, three):
        assert all(torch.equal(mine, plain) for mine, plain in zip(recomputed, gradients, strict=True))
