"""Sorting a unit's parameters into groups."""

import pytest
import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.layout import Granularity
from megatron_fsdp.sharding.units import GroupKey, ParameterGroupSpec, ParameterInfo, cut_groups, group_parameters

BF16, FP32 = torch.bfloat16, torch.float32


def info(name: str, dtype: torch.dtype = FP32, trained: bool = True, expert: bool = False) -> ParameterInfo:
    return ParameterInfo(name, (2, 3), dtype, trained, expert)


def test_groups_come_in_order_of_first_appearance_and_keep_the_order_inside() -> None:
    groups = group_parameters(
        [info("b", BF16), info("n", FP32), info("a", BF16), info("frozen", BF16, trained=False), info("z", FP32)]
    )
    assert [(group.key, [parameter.name for parameter in group.parameters]) for group in groups] == [
        (GroupKey(BF16, True, False), ["b", "a"]),
        (GroupKey(FP32, True, False), ["n", "z"]),
        (GroupKey(BF16, False, False), ["frozen"]),
    ]


def test_experts_are_kept_apart_from_dense_parameters() -> None:
    groups = group_parameters([info("dense"), info("expert", expert=True)])
    assert [group.key.is_expert for group in groups] == [False, True]


def test_granularity_does_not_split_a_group() -> None:
    whole = ParameterInfo("m", (2, 3), FP32, True, granularity=Granularity.TENSOR)
    (group,) = group_parameters([info("a"), whole])
    assert [parameter.granularity for parameter in group.parameters] == [Granularity.ROWS, Granularity.TENSOR]


def test_no_parameters_make_no_groups() -> None:
    assert group_parameters([]) == ()


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        group_parameters([info("tied"), info("tied", BF16)])
    assert str(caught.value) == ("parameter 'tied' is given twice; give each parameter once, tied ones under one name.")


def test_numel_counts_elements_of_scalars_and_empty_tensors_too() -> None:
    shapes = [(2, 3), (), (0, 4), (5,)]
    assert [ParameterInfo("p", shape, FP32, True).numel for shape in shapes] == [6, 1, 0, 5]


def numels(buckets: tuple[ParameterGroupSpec, ...]) -> list[list[int]]:
    return [[info.numel for info in bucket.parameters] for bucket in buckets]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    infos = [ParameterInfo(str(i), (n,), torch.float32, True) for i, n in enumerate((4, 5, 20, 1, 9, 1))]
    groups = group_parameters(infos)
    assert numels(cut_groups(groups, 10)) == [[4, 5, 20], [1, 9], [1]]
    assert numels(cut_groups(groups, 9)) == [[4, 5], [20], [1, 9], [1]]
    assert numels(cut_groups(groups, 1)) == [[4], [5], [20], [1], [9], [1]]
    assert cut_groups(groups, None) == cut_groups(groups, 1000) == groups


def test_groups_are_cut_each_by_itself() -> None:
    infos = [ParameterInfo(str(i), (4,), torch.float32, i % 2 == 0) for i in range(4)]
    buckets = cut_groups(group_parameters(infos), 8)
    assert [[info.name for info in bucket.parameters] for bucket in buckets] == [["0", "2"], ["1", "3"]]
    assert [bucket.key.requires_grad for bucket in buckets] == [True, False]
