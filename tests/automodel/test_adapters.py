"""Adapters of peft under each strategy: first values, gradients and updates of one process, frozen weights, files."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn

from megatron_fsdp.automodel import AutoModelForCausalLM, AutoModelForSequenceClassification
from megatron_fsdp.checkpoint.hf import load_adapter, save_adapter
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.training import (
    STRATEGIES,
    Trained,
    assert_trained_alike,
    managed,
    optimizer_of,
    parameters_of,
    plain_name,
    strategy,
    train,
)
from tests.conftest import RunRanks
from tests.support.language_models import batch_of, build, config_of
from tests.support.on_ranks import assert_equal_tensors

peft = pytest.importorskip("peft")

LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
ROWS, SEED = 4, 5


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{**copy.deepcopy(LORA), **changes})


class QuietPeft(warnings.catch_warnings):
    """Ignores what peft has to say about transformers: names of checkpointing, tied weights, fused experts."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    path = folder / f"{kind}-{dtype}".replace(".", "-")
    build(kind).to(dtype).save_pretrained(path)
    return str(path)


def with_adapters(base: nn.Module, config: Any) -> Any:
    with QuietPeft():
        torch.manual_seed(SEED)
        return peft.get_peft_model(base, config)


def one_process(folder: str, config: Any, dtype: torch.dtype) -> tuple[dict[str, Tensor], Trained]:
    """What peft and transformers do: first values and steps."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    model = with_adapters(base, config)
    return parameters_of(model), train(model, alone=True)


def assert_like_one_process(model: Any, expected: tuple[dict[str, Tensor], Trained], dtype: torch.dtype) -> None:
    first, alone = expected
    assert_equal_tensors(parameters_of(model), first)
    optimizer = optimizer_of(model)
    own = train(model, optimizer=optimizer)
    assert_trained_alike(own, alone, rtol=1e-4 if dtype == torch.float32 else 0.05)  # bfloat16 has 8 bits
    last = parameters_of(model)
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name
            assert torch.equal(last[plain_name(name)], first[plain_name(name)]), f"{name} has changed"
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    assert {id(param) for param in optimizer.state} <= trained


def train_adapters(cases: Sequence[tuple[str, str, Any, dict[str, Any], torch.dtype]], out: str) -> None:
    """Each case (strategy, folder, config, fields of the strategy, dtype) against one process, then files."""
    for index, case in enumerate(cases):
        _train_case(*case, f"{out}/{index}-{dist.get_world_size()}")


def _train_case(name: str, folder: str, config: Any, fields: dict[str, Any], dtype: torch.dtype, target: str) -> None:
    expected = one_process(folder, config, dtype)
    with QuietPeft():
        torch.manual_seed(SEED)
        sizes = {field: value for field, value in fields.items() if field == "ep_size"}
        config_of_strategy = strategy(name, **{field: value for field, value in fields.items() if field not in sizes})
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=config_of_strategy, dtype=dtype, peft_config=config, **sizes
        )
    assert_like_one_process(model, expected, dtype)
    model.save_pretrained(target)
    assert_files_give_the_same(model, folder, target, dtype)
    if config.target_parameters:
        trained = parameters_of(model)
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        load_adapter(model, target)
        assert_equal_tensors(parameters_of(model), trained)


def assert_files_give_the_same(model: Any, folder: str, target: str, dtype: torch.dtype) -> None:
    """Plain peft reads the files, and computes what the model does."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with QuietPeft():
        again = peft.PeftModel.from_pretrained(base, target).train()
    tokens = batch_of(ROWS)["input_ids"].chunk(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        expected = again(input_ids=tokens, use_cache=False).logits
        found = model(input_ids=tokens, use_cache=False).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    dist.barrier()


RECOMPUTE = {"activation_checkpointing": True}
FUSED = ["experts.gate_up_proj", "experts.down_proj"]
CASES: dict[str, tuple[int, list[tuple[str, str, Any, dict[str, Any], torch.dtype]]]] = {
    "each": (
        2,
        [
            ("megatron_fsdp", "llama", lora(), RECOMPUTE, torch.float32),
            ("fsdp2", "llama", lora(modules_to_save=["lm_head"]), {}, torch.float32),
            ("ddp", "llama_tied", lora(target_modules="all-linear"), {}, torch.float32),
        ],
    ),
    "experts": (2, [("megatron_fsdp", "mixtral", lora(target_modules="all-linear"), {}, torch.float32)]),
    **{
        f"fused experts {ranks}": (
            ranks,
            [
                ("megatron_fsdp", "mixtral", lora(target_parameters=FUSED), {**RECOMPUTE, **one}, torch.float32),
                ("fsdp2", "gpt_oss", lora(target_parameters=FUSED), other, torch.float32),
            ],
        )
        for ranks, one, other in ((2, {}, {"ep_size": 2}), (4, {"ep_size": 2}, {}))
    },
    **{
        name: (
            2,
            [
                (name, "gemma3", lora(target_modules="all-linear"), RECOMPUTE, torch.float32),
                (name, "llama", lora(), {}, torch.bfloat16),
            ],
        )
        for name in STRATEGIES
    },
    "4 ranks": (4, [(name, "llama", lora(modules_to_save=["lm_head"]), {}, torch.float32) for name in STRATEGIES]),
}
"""Number of ranks, and (strategy, kind, config, fields of the strategy, dtype)."""


@pytest.mark.full(short=["each", "fused experts 2"])
@pytest.mark.parametrize(("ranks", "cases"), CASES.values(), ids=CASES)
def test_adapters_train_as_in_one_process_and_peft_reads_them(
    run_ranks: RunRanks, tmp_path: Path, ranks: int, cases: list[Any]
) -> None:
    with_folders = [(name, save(kind, tmp_path, dtype), *rest, dtype) for name, kind, *rest, dtype in cases]
    run_ranks(ranks, train_adapters, with_folders, str(tmp_path / "out"), timeout_s=300.0)


def classify(folder: str, names: Sequence[str]) -> None:
    """A head that the files lack, with adapters that train a copy of it: as transformers and peft draw both."""
    config = lora(task_type="SEQ_CLS")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            torch.manual_seed(SEED)
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                folder, distributed_config=strategy(name), dtype=torch.float32, peft_config=config, num_labels=3
            )
            found = parameters_of(model)
            (original,) = [key for key in found if key.endswith("score.original_module.weight")]
            assert found[original].abs().sum() > 0
            assert torch.equal(found[original], found[original.replace("original_module", "modules_to_save.default")])
            logits = model(input_ids=batch_of(2)["input_ids"]).logits
            assert logits.shape == (2, 3)
            logits.sum().backward()
            trained = {plain_name(key) for key, param in model.named_parameters() if param.grad is not None}
            assert trained == {key for key in found if "lora_" in key or "modules_to_save" in key}


def draw_all(kind: str, name: str) -> None:
    """`from_config` with adapters: the base is drawn first, as without them."""
    with QuietPeft():
        torch.manual_seed(SEED)
        base = transformers.AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
        expected = dict(peft.get_peft_model(base, lora()).named_parameters())
        torch.manual_seed(SEED)
        model = AutoModelForCausalLM.from_config(
            config_of(kind), distributed_config=strategy(name), dtype=torch.float32, peft_config=lora()
        )
    assert_equal_tensors(parameters_of(model), expected)


def train_by_manager(folder: str, config: Any, out: str) -> None:
    """A whole model with adapters that need its weights (DoRA), given to each manager."""
    expected = one_process(folder, config, torch.float32)
    for name in STRATEGIES:
        whole_model = with_adapters(
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train(), config
        )
        model = managed(strategy(name), whole_model)
        assert_like_one_process(model, expected, torch.float32)
        save_adapter(model, f"{out}/{name}")
        assert_files_give_the_same(model, folder, f"{out}/{name}", torch.float32)


def refuse(folder: str) -> None:
    for config, words in [
        (lora(use_dora=True), "manager"),
        (lora(init_lora_weights="pissa"), "manager"),
        (lora(target_modules=["nothing"]), "nothing"),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "LoraConfig"),
        ({"r": 2}, "dict"),
    ]:
        with QuietPeft(), pytest.raises(ConfigurationError, match=words):
            AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=strategy("fsdp2"), dtype=torch.float32, peft_config=config
            )


def rest(folder: str, out: str) -> None:
    classify(folder, STRATEGIES)
    draw_all("gemma3", "fsdp2")
    draw_all("llama", "megatron_fsdp")
    train_by_manager(folder, lora(use_dora=True), out)
    refuse(folder)


@pytest.mark.full
def test_heads_managers_drawn_bases_and_refusals(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, rest, save("llama", tmp_path), str(tmp_path / "dora"), timeout_s=300.0)
