"""Sharded state describes its chunks to torch.distributed.checkpoint, unless the switch says otherwise."""

import pytest
import torch

from megatron_fsdp import fully_shard
from tests.conftest import RunRanks
from tests.support.models import MODEL_CASES
from tests.support.parity import fixed_seed


def chunk_keys(describes: bool) -> list[bool]:
    case = MODEL_CASES["odd_shapes"]
    with fixed_seed(0):
        model = case.build()
    wrapped, _ = fully_shard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), preproc_state_dict_for_dcp_ckpt=describes
    )
    return [hasattr(value._local_tensor, "__create_chunk_list__") for value in wrapped.state_dict().values()]


@pytest.mark.parametrize("describes", [True, False])
def test_the_switch_for_checkpoint_preparation_is_real(run_ranks: RunRanks, describes: bool) -> None:
    for found in run_ranks(2, chunk_keys, describes):
        assert found == [describes] * len(found)
        assert found
