"""Embeddings and heads that become units beside the blocks: which do, which do not, and in which order."""

import functools
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_fsdp.sharding.units import UnitPlan, find_units, large_ends, refine_units

FEATURES = 4


class Block(nn.Sequential):
    """A unit of 20 elements."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(linear=nn.Linear(FEATURES, FEATURES)))


class Scaled(nn.Embedding):
    """A subclass, as Hugging Face models have."""


class Parted(nn.Linear):
    """A linear layer with a module inside that owns parameters too."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.LayerNorm(outputs)


class Decoder(nn.Module):
    """Blocks and whatever else a test wants, in the order in which it is given."""

    def __init__(self, **others: nn.Module) -> None:
        super().__init__()
        for name, module in others.items():
            self.add_module(name, module)
        self.blocks = nn.ModuleList(Block() for _ in range(2))


def embedding(rows: int = 8) -> nn.Embedding:
    return nn.Embedding(rows, FEATURES)


def ends_of(model: nn.Module) -> list[str]:
    blocks = {name: module for name, module in model.named_modules() if isinstance(module, Block)}
    return list(large_ends(model, blocks))


def owned(plan: UnitPlan) -> dict[str, tuple[str, ...]]:
    return {unit.name: unit.parameters for unit in plan.units}


def test_an_end_has_a_quarter_of_the_parameters_of_the_largest_block() -> None:
    assert ends_of(Decoder(tokens=embedding(1))) == []  # 4 or 8 elements against 20
    model = Decoder(tokens=embedding(2))
    assert ends_of(model) == ["tokens"]
    assert ends_of(Decoder(tokens=embedding(), lazy=nn.LazyLinear(100))) == ["tokens"]
    model.blocks.append(nn.Sequential(*(Block() for _ in range(4))))
    blocks = dict(model.blocks.named_children())
    assert large_ends(model, blocks) == {}


def test_units_stand_in_module_order_with_the_root_first() -> None:
    model = Decoder(tokens=Scaled(8, FEATURES), norm=nn.LayerNorm(FEATURES))
    model.head = nn.Linear(FEATURES, 8)
    plan = find_units(model, "auto")
    assert list(owned(plan).items()) == [
        ("", ("norm.weight", "norm.bias")),
        ("tokens", ("tokens.weight",)),
        ("blocks.0", ("blocks.0.linear.weight", "blocks.0.linear.bias")),
        ("blocks.1", ("blocks.1.linear.weight", "blocks.1.linear.bias")),
        ("head", ("head.weight", "head.bias")),
    ]
    assert plan.source == "repeated blocks; large ends tokens, head"
    assert [unit.class_name for unit in plan.units] == ["Decoder", "Scaled", "Block", "Block", "Linear"]
    model = Decoder(tokens=embedding(100))
    assert [unit.name for unit in find_units(model, [Block]).units] == ["", "blocks.0", "blocks.1"]
    assert list(owned(find_units(model, [Block], adds_ends=True))) == ["", "blocks.0", "blocks.1"]
    model.other, model.head = nn.Linear(FEATURES, 99), nn.Linear(FEATURES, 100)
    plan = find_units(model, [Block], adds_ends=True)
    assert list(owned(plan)) == ["", "tokens", "blocks.0", "blocks.1", "head"]
    assert plan.source == "given classes Block; large ends tokens, head"
    assert list(owned(find_units(model, [Decoder], adds_ends=True))) == [""]
    assert [unit.name for unit in find_units(model, []).units] == [""]
    model = Decoder(tokens=embedding())
    plan = refine_units(model, find_units(model, None))
    assert [unit.name for unit in plan.units] == ["", "tokens", "blocks.0.linear", "blocks.1.linear"]


def test_a_tied_weight_stays_with_the_root() -> None:
    model = Decoder(tokens=embedding())
    model.head = nn.Linear(FEATURES, 8, bias=False)
    model.head.weight = model.tokens.weight
    assert ends_of(model) == []
    model.head.weight = nn.Parameter(torch.zeros(8, FEATURES))
    assert ends_of(model) == ["tokens", "head"]
    model.shown = model.head.weight  # the model itself has it too
    assert ends_of(model) == ["tokens"]


def test_an_end_that_hangs_in_two_places_is_one_unit_and_one_inside_a_block_is_none() -> None:
    model = Decoder(tokens=embedding())
    model.again = nn.Sequential(model.tokens)
    plan = find_units(model, None)
    assert [unit.name for unit in plan.units] == ["", "tokens", "blocks.0", "blocks.1"]
    assert owned(plan)["tokens"] == ("tokens.weight",)
    model.blocks[1].add_module("inner", model.tokens)
    assert owned(find_units(model, None))[""] == ("tokens.weight",)


def test_modules_that_ranks_choose_among_or_that_others_read_are_no_ends() -> None:
    for other in (
        nn.ModuleDict({"de": embedding(), "fr": nn.Linear(FEATURES, 8)}),
        nn.ModuleList([embedding()]),
        nn.Sequential(Parted(FEATURES, 8)),
        nn.MultiheadAttention(FEATURES, 1),  # calls no module for its output projection
        nn.Bilinear(FEATURES, FEATURES, 8),
    ):
        assert ends_of(Decoder(other=other)) == []
    assert ends_of(Decoder(experts=nn.Sequential(embedding()))) == []
    assert ends_of(Decoder(expert_head=embedding())) == []
    assert ends_of(Decoder(others=nn.Sequential(embedding()))) == ["others.0"]


class Reads(Decoder):
    """Multiplies by the weights of two of its ends, in a method that forward names, and asks a third for its dtype."""

    @property
    def table(self) -> torch.Tensor:
        return self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.scores(self.first(self.tokens(ids).to(self.first.weight.dtype)))

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        return sum(hidden @ self.inner.head.weight.t() for _ in range(2)) + hidden @ self.table.t()

    def reset(self) -> None:
        nn.init.zeros_(self.first.weight)


class Inherits(Reads):
    @functools.wraps(Reads.forward)
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return super().forward(*given)


@pytest.mark.parametrize("kind", [Reads, Inherits])
def test_an_end_whose_weight_the_code_of_a_forward_reads_stays_with_the_root(kind: type[Reads]) -> None:
    inner = nn.Sequential(OrderedDict(head=nn.Linear(FEATURES, 8)))
    model = kind(tokens=embedding(), first=nn.Linear(FEATURES, FEATURES), inner=inner)
    assert ends_of(model) == ["first"]
    assert ends_of(nn.Sequential(OrderedDict(model=model, other=embedding()))) == ["model.first", "other"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_hugging_face_decoder_has_its_embedding_and_head_as_units(tied: bool) -> None:
    sizes = {"vocab_size": 128, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    plan = find_units(LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=tied)), None)
    names, blocks = [unit.name for unit in plan.units], ["model.layers.0", "model.layers.1"]
    assert names == (["", *blocks] if tied else ["", "model.embed_tokens", *blocks, "lm_head"])
    ends = "" if tied else "; large ends model.embed_tokens, lm_head"
    assert plan.source == f"_no_split_modules LlamaDecoderLayer{ends}"
    assert plan.units[0].parameters == (("model.embed_tokens.weight",) if tied else ()) + ("model.norm.weight",)


@given(rows=st.lists(st.integers(1, 12), max_size=5), tied=st.sets(st.integers(0, 4)))
def test_every_parameter_has_one_owner_and_ends_are_exactly_the_large_untied_ones(
    rows: list[int], tied: set[int]
) -> None:
    model = Decoder(**{f"end{index}": embedding(count) for index, count in enumerate(rows)})
    for index in tied & set(range(len(rows))):
        model.register_parameter(f"tie{index}", getattr(model, f"end{index}").weight)
    plan = find_units(model, None)
    wanted = [f"end{i}" for i, count in enumerate(rows) if count * FEATURES >= 5 and i not in tied]
    assert [unit.name for unit in plan.units] == ["", *wanted, "blocks.0", "blocks.1"]
    of_all = [name for unit in plan.units for name in unit.parameters]
    assert sorted(of_all) == sorted(name for name, _ in model.named_parameters())
