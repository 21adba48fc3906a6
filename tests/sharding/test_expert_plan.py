"""Names and shapes tell the experts of expert-parallel ranks apart, or it is said why they do not."""

import pytest

from megatron_fsdp.sharding.expert_plan import number_parameters, parse_expert, plan_experts, stack_container

LISTED = {"b.experts.0.w": (2, 3), "b.experts.1.w": (2, 3)}


@pytest.mark.parametrize(
    ("name", "third"),
    [
        ("experts.1.w", "experts.3.w"),
        ("a.0.mlp.experts.1.fc.weight", "a.0.mlp.experts.3.fc.weight"),
        ("mlp.experts.local_experts.1.w", "mlp.experts.local_experts.3.w"),
        ("mlp.experts.fc1.weight1", "mlp.experts.fc1.weight3"),
        ("mlp.experts.fc1.bias1", "mlp.experts.fc1.bias3"),
    ],
)
def test_a_number_below_experts_is_found(name: str, third: str) -> None:
    found = parse_expert(name)
    assert found is not None
    assert found.index == 1
    assert found.at(3) == third
    assert stack_container(name) is None


@pytest.mark.parametrize("name", ["experts.weight1", "mlp.my_experts.0.w", "mlp.experts.w", "layers.0.w", "experts.0"])
def test_other_names_have_none(name: str) -> None:
    assert parse_expert(name) is None


def test_numbers_that_start_at_0_on_every_rank_become_numbers_over_all_ranks() -> None:
    other = {"b.experts.0.w": (2, 3)}
    held = [LISTED, other, LISTED]
    plans = [plan_experts(held, rank) for rank in range(3)]
    found = [[plan.to_global(name) for name in names] for plan, names in zip(plans, held, strict=True)]
    assert found == [[f"b.experts.{index}.w" for index in indices] for indices in ((0, 1), (2,), (3, 4))]
    assert [plans[2].to_local(f"b.experts.{index}.w") for index in range(6)] == [
        None, None, None, "b.experts.0.w", "b.experts.1.w", "b.experts.5.w"
    ]  # fmt: skip
    assert plans[0].to_local("b.router.w") == plans[0].to_global("b.router.w") == "b.router.w"


def test_numbers_over_all_ranks_stay() -> None:
    other = {"b.experts.2.w": (2, 3), "b.experts.3.w": (2, 3)}
    plan = plan_experts([LISTED, other], 1)
    assert plan.to_global("b.experts.2.w") == "b.experts.2.w"
    assert plan.to_local("b.experts.3.w") == "b.experts.3.w"
    assert plan.to_local("b.experts.0.w") is None
    assert not plan.problems


def test_stacks_lie_one_after_another() -> None:
    one, two = {"experts.up": (2, 5), "experts.shift": (2,)}, {"experts.up": (3, 5), "experts.shift": (3,)}
    plan = plan_experts([one, two], 0)
    assert plan.stacks == {"experts.up": (0, 2, 5), "experts.shift": (0, 2, 5)}
    assert not plan.problems


@pytest.mark.parametrize(
    ("names", "other", "told"),
    [
        ({"experts.up": (2, 5), "experts.gate": (5, 2)}, None, "first dimensions"),
        ({"experts.up": (2, 5)}, {"experts.up": (2, 6)}, "no parts along a first dimension"),
        ({"experts.scale": ()}, None, "no parts along a first dimension"),
        ({"moe.w": (2, 5)}, None, "nothing in its name"),
        ({"experts.blocks.0.w": (2, 5)}, None, "nothing in its name"),
        ({"experts.1.w": (2, 5)}, None, "overlap"),
        ({"experts.0.w": (2, 5)}, {"experts.0.w": (2, 5), "experts.2.w": (2, 5)}, "overlap"),
    ],
)
def test_what_cannot_be_told_apart_is_a_problem(
    names: dict[str, tuple[int, ...]], other: dict[str, tuple[int, ...]] | None, told: str
) -> None:
    for rank in range(2):
        plan = plan_experts([names, other or names], rank)
        assert plan.problems
        assert all(told in text for text in plan.problems.values())


WHOLE = ["a", *(f"experts.{index}.{part}" for index in range(4) for part in "wb"), "z"]


@pytest.mark.parametrize("order", [["0.w", "0.b", "1.w", "1.b"], ["0.w", "1.w", "0.b", "1.b"]])
def test_an_optimizer_lists_the_experts_of_all_ranks_as_one_process_would(order: list[str]) -> None:
    for rank in range(2):
        plan = plan_experts([{f"experts.{each}": (1,) for each in ("0.w", "0.b", "1.w", "1.b")}] * 2, rank)
        own = ["a", *(f"experts.{each}" for each in order), "z"]
        numbering = number_parameters([own], plan)
        assert numbering.problem is None
        assert numbering.groups == [WHOLE]
        assert [WHOLE[position] for position in numbering.own[0]] == [plan.to_global(name) for name in own]


def test_groups_by_kind_are_listed_each_and_mixed_ones_are_a_problem() -> None:
    plan = plan_experts([LISTED, LISTED], 1)
    assert number_parameters([["b.experts.0.w", "b.experts.1.w"], ["c"]], plan).own == [[2, 3], [0]]
    assert "groups" in str(number_parameters([["b.experts.0.w"], ["b.experts.1.w"]], plan).problem)
    lone = plan_experts([LISTED, {}], 0)
    assert "none of the kind" in str(number_parameters([["b.experts.0.w", "b.experts.1.w"]], lone).problem)
