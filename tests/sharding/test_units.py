"""Finding units: by class, by path, by what the model says, by repetition; and who owns tied parameters."""

from collections import OrderedDict, UserList

import pytest
import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.sharding.units import (
    GroupKey,
    ParameterGroupSpec,
    ParameterInfo,
    UnitPlan,
    UnitSpec,
    cut_groups,
    find_units,
    group_parameters,
)


class Block(nn.Sequential):
    """A unit with a module inside that could be one too."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(norm=Leaf(), linear=nn.Linear(2, 3)))


class Leaf(nn.LayerNorm):
    """A module with one parameter of two elements."""

    def __init__(self) -> None:
        super().__init__(2, bias=False)


class Model(nn.Sequential):
    """Embedding, blocks, head; the head may be tied to the embedding."""

    def __init__(self, blocks: int = 3, tied: bool = False) -> None:
        layers = nn.ModuleList(Block() for _ in range(blocks))
        super().__init__(OrderedDict(embed=nn.Embedding(5, 2), layers=layers, head=nn.Linear(2, 5, bias=False)))
        if tied:
            self.head.weight = self.embed.weight


def Branches(first: nn.Module, second: nn.Module) -> nn.Module:  # noqa: N802 - it stands for a class
    """Two units side by side."""
    return nn.ModuleDict({"first": first, "second": second})


def block_parameters(name: str) -> tuple[str, ...]:
    return (f"{name}.norm.weight", f"{name}.linear.weight", f"{name}.linear.bias")


def names(plan: UnitPlan) -> list[str]:
    return [unit.name for unit in plan.units]


def owned(plan: UnitPlan) -> dict[str, list[str]]:
    return {unit.name: list(unit.parameters) for unit in plan.units}


# ---- by class and by path -------------------------------------------------------------------------------------------


def test_the_root_comes_first_and_owns_the_rest() -> None:
    assert find_units(Model(2), [Block]) == UnitPlan(
        units=(
            UnitSpec.of_module("", ("embed.weight", "head.weight"), "Model"),
            UnitSpec.of_module("layers.0", block_parameters("layers.0"), "Block"),
            UnitSpec.of_module("layers.1", block_parameters("layers.1"), "Block"),
        ),
        source="given classes Block",
        aliases=(),
    )


def test_nested_matches_belong_to_the_outermost_unit() -> None:
    plan = find_units(Model(2), [Leaf, Block, nn.Linear])
    assert names(plan) == ["", "layers.0", "layers.1", "head"]
    assert plan.units[1].parameters == block_parameters("layers.0")
    assert plan.source == "given classes Leaf, Block, Linear"


def test_import_paths_name_classes() -> None:
    for path in ("torch.nn.Linear", "torch.nn:Linear", "torch.nn.modules.linear.Linear"):
        assert names(find_units(Model(1), [path])) == ["", "layers.0.linear", "head"]


def test_any_collection_lists_classes() -> None:
    for given in ((Block,), {Block}, frozenset([Block]), [Block, Block], UserList([Block])):
        assert names(find_units(Model(1), given)) == ["", "layers.0"]  # type: ignore[arg-type]
    plan = find_units(Model(1), {nn.Linear, nn.Embedding, Block})  # type: ignore[arg-type]
    assert plan.source == "given classes Block, Linear, Embedding"  # by module, then name


def test_no_classes_or_a_root_that_matches_leave_everything_to_the_root() -> None:
    plan = find_units(Model(1), [])
    assert owned(plan) == {"": ["embed.weight", *block_parameters("layers.0"), "head.weight"]}
    assert plan.source == "no classes given"
    assert names(find_units(Block(), [Block, Leaf])) == [""]


@pytest.mark.parametrize(("given", "shown"), [(Block, "Block"), (3, "3")])
def test_a_class_outside_a_list_is_refused(given: object, shown: str) -> None:
    with pytest.raises(TypeError) as caught:
        find_units(Model(), given)  # type: ignore[arg-type]
    assert str(caught.value) == (
        f"fsdp_unit_modules={shown} is not a list of classes or import paths; write fsdp_unit_modules=[...], "
        'or "auto" to look for repeated blocks.'
    )


@pytest.mark.parametrize("entry", [int, 7, "torch.nn.functional.linear"])
def test_entries_that_are_not_module_classes_are_refused(entry: object) -> None:
    with pytest.raises(TypeError, match=r"which is not a subclass of torch\.nn\.Module; give classes\."):
        find_units(Model(), [entry])  # type: ignore[list-item]


def test_a_class_that_does_not_occur_or_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_units(Model(3), [Block, nn.Conv2d])
    assert str(caught.value) == (
        "fsdp_unit_modules names Conv2d, but no module of that class holds parameters in this model; classes that do: "
        "Linear (4 x), Block (3 x), Leaf (3 x), Model (1 x), Embedding (1 x), ModuleList (1 x)."
    )
    with pytest.raises(ConfigurationError, match="names Dropout, but no module of that class holds parameters"):
        find_units(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), [nn.Dropout])
    with pytest.raises(ConfigurationError, match="'layers' of that class has no forward of its own"):
        find_units(Model(), [nn.ModuleList])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torch.nn:Linaer", "'torch.nn' has no 'Linaer'; the nearest name is 'Linear'."),
        ("tourch.nn.Linear", "No module named 'tourch'; write 'package.module.Class', as Python can import it."),
        ("Block", "No module named 'Block'; the nearest name is 'tests.sharding.test_units.Block'."),
        ("torch.nn.Linear.Inner", "'Linear' has no 'Inner'; write 'package.module.Class', as Python can import it."),
        ("torch..nn", "invalid format: 'torch..nn'; write 'package.module.Class', as Python can import it."),
    ],
)
def test_a_wrong_path_names_the_wrong_part_and_the_nearest_name(path: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        find_units(Model(), [path])
    assert str(caught.value) == f"fsdp_unit_modules has '{path}', but {message}"


# ---- automatic ------------------------------------------------------------------------------------------------------


def test_repeated_blocks_are_found() -> None:
    assert find_units(Model(2), None) == find_units(Model(2), "auto")
    plan = find_units(Model(2), None)
    assert names(plan) == ["", "embed", "layers.0", "layers.1", "head"]
    assert plan.source == "repeated blocks; large ends embed, head"
    model = nn.Sequential(nn.LayerNorm(2), Block(), Block(), nn.ReLU(), Leaf())
    assert names(find_units(model, None)) == ["", "1", "2"]
    model = nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Leaf()])])
    assert names(find_units(model, None)) == ["", "0.0", "0.1"]
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2)))
    assert names(find_units(model, None)) == ["", "0", "1"]
    block = Leaf()
    plan = find_units(nn.Sequential(block, block), None)
    assert (names(plan), plan.source) == ([""], "none found")
    plan = find_units(Model(1), "auto")
    assert (names(plan), plan.source) == ([""], "none found")


def test_what_the_model_says_goes_before_repetition() -> None:
    model = Model(2)
    model._no_split_modules = ["Embedding", "Absent"]  # type: ignore[assignment]
    plan = find_units(model, None)
    assert (names(plan), plan.source) == (["", "embed", "head"], "_no_split_modules Embedding; large ends head")
    outer = nn.Module()
    outer.inner = Model(2)
    outer.inner._no_split_modules = {"Block"}  # type: ignore[assignment]
    plan = find_units(outer, None)
    assert names(plan) == ["", "inner.embed", "inner.layers.0", "inner.layers.1", "inner.head"]
    assert plan.source.startswith("_no_split_modules Block;")
    outer.inner._no_split_modules = ["Absent"]  # type: ignore[assignment]
    assert find_units(outer, None).source.startswith("repeated blocks;")
    outer.inner._no_split_modules = None  # type: ignore[assignment]
    assert find_units(outer, None).source.startswith("repeated blocks;")


# ---- ties -----------------------------------------------------------------------------------------------------------


def test_parameters_of_two_owners_belong_to_the_root() -> None:
    first, second = Block(), Block()
    second.norm.weight = first.norm.weight
    plan = find_units(Branches(first, second), [Block])
    assert owned(plan) == {
        "": ["first.norm.weight"],
        "first": ["first.linear.weight", "first.linear.bias"],
        "second": ["second.linear.weight", "second.linear.bias"],
    }
    assert plan.aliases == (("second.norm.weight", "first.norm.weight"),)
    model = Model(1, tied=True)
    plan = find_units(model, [nn.Embedding, Block])
    assert owned(plan) == {"": ["embed.weight"], "layers.0": list(block_parameters("layers.0"))}
    assert plan.aliases == (("head.weight", "embed.weight"),)
    first, second = Block(), Block()
    second.norm = first.norm
    assert owned(find_units(Branches(first, second), [Block]))[""] == ["first.norm.weight"]
    block = Block()
    plan = find_units(Branches(block, block.norm), [Block, Leaf])
    assert owned(plan) == {"": ["first.norm.weight"], "first": ["first.linear.weight", "first.linear.bias"]}


def test_a_tie_inside_one_unit_and_a_unit_of_two_names_stay_there() -> None:
    block = Block()
    block.norm.weight = block.linear.bias = nn.Parameter(torch.zeros(3))
    plan = find_units(Branches(block, Leaf()), [Block])
    assert owned(plan) == {"": ["second.weight"], "first": ["first.norm.weight", "first.linear.weight"]}
    assert plan.aliases == (("first.linear.bias", "first.norm.weight"),)
    block = Leaf()
    plan = find_units(Branches(block, block), [Leaf])
    assert owned(plan) == {"": [], "first": ["first.weight"]}
    assert plan.aliases == (("second.weight", "first.weight"),)


# ---- groups of parameters --------------------------------------------------------------------------------------------

BF16, FP32 = torch.bfloat16, torch.float32


def info(name: str, dtype: torch.dtype = FP32, trained: bool = True, expert: bool = False) -> ParameterInfo:
    return ParameterInfo(name, (2, 3), GroupKey(dtype, trained, expert))


def test_groups_come_in_order_of_first_appearance_and_keep_the_order_inside() -> None:
    groups = group_parameters(
        [info("b", BF16), info("n", FP32), info("a", BF16), info("frozen", BF16, trained=False), info("z", FP32)]
    )
    assert [(group.key, [parameter.name for parameter in group.parameters]) for group in groups] == [
        (GroupKey(BF16, True, False), ["b", "a"]),
        (GroupKey(FP32, True, False), ["n", "z"]),
        (GroupKey(BF16, False, False), ["frozen"]),
    ]


def test_experts_are_kept_apart() -> None:
    groups = group_parameters([info("dense"), info("expert", expert=True)])
    assert [group.key.sharding for group in groups] == [False, True]
    assert group_parameters([]) == ()
    shapes = [(2, 3), (), (0, 4), (5,)]
    assert [ParameterInfo("p", shape, GroupKey(FP32, True, False)).numel for shape in shapes] == [6, 1, 0, 5]


def numels(buckets: tuple[ParameterGroupSpec, ...]) -> list[list[int]]:
    return [[info.numel for info in bucket.parameters] for bucket in buckets]


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    infos = [
        ParameterInfo(str(i), (n,), GroupKey(torch.float32, True, False)) for i, n in enumerate((4, 5, 20, 1, 9, 1))
    ]
    groups = group_parameters(infos)
    assert numels(cut_groups(groups, 10)) == [[4, 5, 20], [1, 9], [1]]
    assert numels(cut_groups(groups, 9)) == [[4, 5], [20], [1, 9], [1]]
    assert numels(cut_groups(groups, 1)) == [[4], [5], [20], [1], [9], [1]]
    assert cut_groups(groups, None) == cut_groups(groups, 1000) == groups
    infos = [ParameterInfo(str(i), (4,), GroupKey(torch.float32, i % 2 == 0, False)) for i in range(4)]
    buckets = cut_groups(group_parameters(infos), 8)
    assert [[info.name for info in bucket.parameters] for bucket in buckets] == [["0", "2"], ["1", "3"]]
    assert [bucket.key.requires_grad for bucket in buckets] == [True, False]
