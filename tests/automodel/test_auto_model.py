"""`from_config` draws as transformers do on any ranks, and values that ranks compare have one text."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from megatron_fsdp.automodel import AutoModelForCausalLM
from megatron_fsdp.automodel.auto_model import canonical_text
from tests.automodel.training import STRATEGIES, parameters_of, plain_name, strategy
from tests.conftest import RunRanks
from tests.support.language_models import config_of
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, on_ranks


def drawn(kind: str, name: str) -> Any:
    """What `from_config` draws under one seed."""
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config_of(kind), distributed_config=strategy(name), dtype=torch.float32)


@pytest.mark.full(short=["deepseek_v3"])
@pytest.mark.parametrize("kind", ["llama_tied", "deepseek_v3"])
@on_ranks(2)
def test_drawn_weights_are_those_of_transformers_bit_for_bit(kind: str) -> None:
    with fixed_seed(7):
        plain = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    for name in STRATEGIES:
        model = drawn(kind, name)
        assert_equal_tensors(parameters_of(model), dict(plain.named_parameters()))
        buffers = {plain_name(key): buffer for key, buffer in model.named_buffers()}
        assert_equal_tensors(buffers, dict(plain.named_buffers()))


def drawn_by_all(kind: str) -> list[dict[str, Tensor]]:
    return [parameters_of(drawn(kind, name)) for name in STRATEGIES]


@pytest.mark.full
def test_drawn_weights_depend_on_neither_strategy_nor_ranks(run_ranks: RunRanks) -> None:
    # The constructors of GPT-2 draw by themselves, so its weights are not those that transformers gives under the seed.
    (alone,) = run_ranks(1, drawn_by_all, "gpt2")
    for found in [*alone, *(entry for rank in run_ranks(2, drawn_by_all, "gpt2") for entry in rank)]:
        assert_equal_tensors(found, alone[0])


FORTH, BACK = {0, 8}, {8, 0}  # equal, and with their elements in another order, as sets of texts in another process


class Kind(StrEnum):
    LORA = "LORA"


@dataclass
class Inner:
    kind: Kind = Kind.LORA
    names: Any = field(default=None, repr=False)


@dataclass
class Config:
    rank: int = 8
    inner: Any = None


@dataclass(init=False)
class Loose:
    """As BitsAndBytesConfig is, whose values are no fields."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FORTH, BACK),
        (Config(inner=[Inner(names=frozenset(FORTH))]), Config(inner=[Inner(names=frozenset(BACK))])),
        ({"a": FORTH, "b": (1, FORTH)}, {"b": (1, BACK), "a": BACK}),
        (partial(print, 1), partial(print, 1)),
        (object(), object()),
    ],
)
def test_equal_values_have_the_same_text(one: object, other: object) -> None:
    assert list(FORTH) != list(BACK)
    assert canonical_text(one) == canonical_text(other)


def test_other_values_have_another_text() -> None:
    names = {"a"}
    values = [
        names, ["a"], ("a",), "a", {"a": 1}, {"a": "1"}, {"a", "b"}, {"a, b"}, 1, 1.0, True, None, Kind.LORA, Config,
        Config(), Config(9), Config(inner=Inner()), Config(inner=Inner(names=names)), torch.float32, torch.bfloat16,
        partial(print, 1), partial(print, 2), Loose(1), Loose(2),
    ]  # fmt: skip
    texts = [canonical_text(value) for value in values]
    assert len(set(texts)) == len(values), texts
