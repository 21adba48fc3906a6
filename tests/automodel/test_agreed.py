"""Text of values that ranks compare is the same for equal values, whatever their order and place in memory."""

from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import pytest
import torch

from megatron_fsdp.automodel.auto_model import canonical_facts, canonical_text

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
        partial(print, 1), partial(print, 2),
    ]  # fmt: skip
    texts = [canonical_text(value) for value in values]
    assert len(set(texts)) == len(values), texts


def test_fields_of_dataclasses_are_facts_of_their_own() -> None:
    assert canonical_facts({"config": Config(inner=Inner(names=BACK)), "size": 2}) == {
        "config": "Config",
        "config.rank": "8",
        "config.inner": "Inner",
        "config.inner.kind": "<Kind.LORA: 'LORA'>",
        "config.inner.names": "{0, 8}",
        "size": "2",
    }
