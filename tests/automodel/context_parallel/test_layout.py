"""Which tokens each rank has."""

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from megatron_fsdp.automodel.context_parallel import SequenceLayout
from megatron_fsdp.errors import ParallelSizeError

SIZES = [(ranks, length) for ranks in (1, 2, 3, 4) for length in (24, 48)]


@pytest.mark.parametrize(("ranks", "length"), SIZES)
def test_balanced_tokens_have_the_order_of_torchs_load_balancer(ranks: int, length: int) -> None:
    layout = SequenceLayout(ranks)
    positions = torch.cat([layout.positions_of(rank, length // ranks) for rank in range(ranks)])
    assert positions.tolist() == _HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()[0].tolist()


@pytest.mark.parametrize("load_balance", [True, False])
@pytest.mark.parametrize(("ranks", "length"), SIZES)
def test_joining_undoes_cutting(ranks: int, length: int, load_balance: bool) -> None:
    layout = SequenceLayout(ranks, load_balance)
    whole = torch.arange(2 * length * 3).view(2, length, 3)
    parts = [layout.cut(whole, rank, 1) for rank in range(ranks)]
    assert torch.equal(layout.join(parts, 1), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, layout.positions_of(rank, length // ranks)])


def test_balanced_ranks_have_the_same_number_of_pairs_of_tokens() -> None:
    layout = SequenceLayout(4)
    assert len({int((layout.positions_of(rank, 8) + 1).sum()) for rank in range(4)}) == 1


@pytest.mark.parametrize(
    ("load_balance", "length", "arithmetic"),
    [(True, 20, "2 * 4 = 8 equal pieces"), (False, 18, "into 4 equal pieces"), (True, 0, "pad them to 8 tokens")],
)
def test_lengths_that_do_not_divide_are_refused_with_the_arithmetic(
    load_balance: bool, length: int, arithmetic: str
) -> None:
    with pytest.raises(ParallelSizeError) as raised:
        SequenceLayout(4, load_balance).check_length(length)
    assert f"sequences of {length} tokens" in str(raised.value)
    assert arithmetic in str(raised.value)
