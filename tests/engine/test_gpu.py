"""The same engine on CUDA: one NCCL rank per device against one process. Skipped where there is no GPU."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from tests.conftest import RunRanks
from tests.support.on_ranks import assert_equal_tensors, fixed_seed
from tests.support.zoo import MODEL_CASES, Batch, ModelName


def _on_device(batch: Batch) -> Batch:
    return Batch(batch.inputs.cuda(), batch.targets.cuda())


def train_both(name: ModelName, strategy: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Gradients and weights of three steps, sharded and not, on this rank's device."""
    case = MODEL_CASES[name]
    with fixed_seed(0):
        model = case.build().cuda()
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, reference)]
    wrapped, optimizer = fully_shard(
        model,
        optimizers[0],
        fsdp_unit_modules=list(case.unit_classes),
        zero_dp_strategy=strategy,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )
    pairs = []
    for seed in range(3):
        batch = _on_device(case.make_batch(12, torch.Generator().manual_seed(seed)))
        case.loss(reference, batch).backward()
        case.loss(wrapped, batch.part(dist.get_rank(), dist.get_world_size())).backward()
        found = {key: grad for key, grad in wrapped.full_gradients().items() if grad is not None}
        wanted = {key: p.grad.clone() for key, p in reference.named_parameters() if p.grad is not None}
        pairs.append((found, wanted))
        for each in (optimizer, optimizers[1]):
            each.step()
            each.zero_grad()
        pairs.append((wrapped.full_parameters(), {key: p.detach().clone() for key, p in reference.named_parameters()}))
    return pairs


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["transformer", "tied", "scalars", "odd_shapes"])
@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_gpus_train_as_one_process_does(run_ranks: RunRanks, name: ModelName, strategy: int) -> None:
    for pairs in run_ranks(min(4, torch.cuda.device_count()), train_both, name, strategy, device_type="cuda"):
        for found, wanted in pairs:
            assert_equal_tensors(found, wanted, rtol=1e-4, atol=1e-5)
