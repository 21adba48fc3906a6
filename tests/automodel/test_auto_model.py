"""`from_pretrained` and `from_config`: transformers' weights in shards, training as one process, and back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megatron_fsdp.automodel import AutoModelForCausalLM
from megatron_fsdp.automodel.auto_model import canonical_text, facts_of
from tests.automodel.training import (
    STRATEGIES,
    assert_trained_alike,
    parameters_of,
    plain_name,
    reference,
    strategy,
    train,
)
from tests.conftest import RunRanks
from tests.support.language_models import FAMILIES, batch_of, build, config_of
from tests.support.on_ranks import assert_equal_tensors, fixed_seed


def save(kind: str, folder: Path, **options: Any) -> str:
    """A folder of transformers with the weights of `build(kind)`."""
    path = folder / kind
    build(kind).save_pretrained(path, **options)
    return str(path)


def load_train_save(folders: Sequence[tuple[str, str]], names: Sequence[str], out: str) -> None:
    """Each folder by each strategy: logits, two steps, and what plain transformers reads afterwards."""
    for kind, folder in folders:
        expected = reference(kind, steps=2)
        for name in names:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=strategy(name), dtype=torch.float32
            )
            ranks, rank = dist.get_world_size(), dist.get_rank()
            with torch.no_grad():
                logits = model(input_ids=batch_of(4)["input_ids"].chunk(ranks)[rank], use_cache=False).logits
            torch.testing.assert_close(logits, expected.logits[0].chunk(ranks)[rank], rtol=1e-5, atol=1e-5)
            assert_trained_alike(train(model, steps=2), expected)
            target = f"{out}/{kind}-{name}-{ranks}"
            model.save_pretrained(target, max_shard_size=20_000)
            trained = parameters_of(model)
            again = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
            assert_equal_tensors(dict(again.named_parameters()), trained)
            assert again.config.architectures == [FAMILIES[kind][0] + _suffix(kind)]
            dist.barrier()


def _suffix(kind: str) -> str:
    return "LMHeadModel" if kind == "gpt2" else "ForCausalLM"


def test_each_strategy_trains_as_one_process_and_goes_back_to_transformers(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, load_train_save, [("phi3", save("phi3", tmp_path))], STRATEGIES, str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_family_trains_as_one_process_and_goes_back_to_transformers(
    run_ranks: RunRanks, tmp_path: Path, name: str
) -> None:
    kinds = list(FAMILIES) if name == "megatron_fsdp" else ["llama", "gemma3", "phi3", "qwen2_moe"]
    folders = [(kind, save(kind, tmp_path)) for kind in kinds]
    run_ranks(2, load_train_save, folders, [name], str(tmp_path), timeout_s=300.0)


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_other_numbers_of_ranks_give_the_same(run_ranks: RunRanks, tmp_path: Path, ranks: int) -> None:
    folders = [(kind, save(kind, tmp_path, max_shard_size="20KB")) for kind in ("llama_tied", "qwen3_moe")]
    run_ranks(ranks, load_train_save, folders, STRATEGIES, str(tmp_path), timeout_s=300.0)


def drawn(kind: str, names: Sequence[str]) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Parameters and buffers that `from_config` gives under one seed, by each strategy."""
    found = []
    for name in names:
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(
            config_of(kind), distributed_config=strategy(name), dtype=torch.float32
        )
        parameters = parameters_of(model)
        buffers = {plain_name(key): buffer.clone() for key, buffer in model.named_buffers()}
        found.append((parameters, buffers))
    return found


@pytest.mark.full(short=["deepseek_v3"])
@pytest.mark.parametrize("kind", ["llama_tied", "gemma3", "deepseek_v3"])
def test_drawn_weights_are_those_of_transformers_bit_for_bit(run_ranks: RunRanks, kind: str) -> None:
    with fixed_seed(7):
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    for by_strategy in run_ranks(2, drawn, kind, STRATEGIES):
        for parameters, buffers in by_strategy:
            assert_equal_tensors(parameters, dict(model.named_parameters()))
            assert_equal_tensors(buffers, dict(model.named_buffers()))


def drawn_by_all(kind: str) -> list[dict[str, Tensor]]:
    return [parameters for parameters, _ in drawn(kind, STRATEGIES)]


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
    assert facts_of({"config": Config(inner=Inner(names=BACK)), "size": 2}) == {
        "config": "Config",
        "config.rank": "8",
        "config.inner": "Inner",
        "config.inner.kind": "<Kind.LORA: 'LORA'>",
        "config.inner.names": "{0, 8}",
        "size": "2",
    }
