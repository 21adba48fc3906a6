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

from megatron_fsdp.automodel import AutoModelForCausalLM, AutoModelForSequenceClassification, FSDP2Manager
from megatron_fsdp.automodel import DDPManager, MegatronFSDPManager, build_mesh_context
from megatron_fsdp.automodel.saving import let_save
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.small_models import batch_of, build, config_of, label_count, token_loss_sum
from tests.automodel.training import assert_close, optimizer_of, plain_name, strategy, whole
from tests.conftest import RunRanks

peft = pytest.importorskip("peft")

STRATEGIES = ("fsdp2", "megatron_fsdp", "ddp")
LORA = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
ROWS, STEPS, RATE, SEED = 4, 3, 1e-2, 5


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{**copy.deepcopy(LORA), **changes})


class _Quiet(warnings.catch_warnings):
    """Ignores what peft and transformers say to each other (names of checkpointing; tied weights, warned of by peft)."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        warnings.filterwarnings("ignore", "Model has `tie_word_embeddings=True`", UserWarning)


def save(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> str:
    path = folder / f"{kind}-{dtype}".replace(".", "-")
    build(kind).to(dtype).save_pretrained(path)
    return str(path)


def with_adapters(base: nn.Module, config: Any) -> Any:
    with _Quiet():
        torch.manual_seed(SEED)
        return peft.get_peft_model(base, config)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, ranks: int) -> list[dict[str, Any]]:
    """Loss of own rows, gradients and trained parameters of each step, whole."""
    found = []
    for step in range(STEPS):
        batch = batch_of(ROWS, seed=1 + step)
        own = {name: value.chunk(ranks)[rank] for name, value in batch.items()}
        logits = model(input_ids=own["input_ids"], use_cache=False).logits
        loss = token_loss_sum(logits, own["labels"]) * ranks / label_count(batch["labels"])
        optimizer.zero_grad()
        loss.backward()
        named = [(plain_name(name), param) for name, param in model.named_parameters()]
        gradients = {name: whole(param.grad) for name, param in named if param.grad is not None}
        optimizer.step()
        named = [(plain_name(name), param) for name, param in model.named_parameters()]
        trained = {name: whole(param) for name, param in named if param.requires_grad}
        found.append({"loss": loss.item(), "gradients": gradients, "trained": trained})
    return found


def one_process(folder: str, config: Any, dtype: torch.dtype) -> tuple[Any, Tensor, dict[str, Tensor], list[Any]]:
    """What peft and transformers do: the model, logits of the start, first values and steps."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    model = with_adapters(base, config)
    with torch.no_grad():
        logits = model(input_ids=batch_of(ROWS)["input_ids"], use_cache=False).logits
    first = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    return model, logits, first, steps_of(model, optimizer, 0, 1)


def assert_like_one_process(
    model: Any, expected: tuple[Any, Tensor, dict[str, Tensor], list[Any]], dtype: torch.dtype
) -> None:
    _, logits, first, steps = expected
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rtol, atol = (1e-4, 1e-6) if dtype == torch.float32 else (0.05, 0.02)  # bfloat16 has 8 bits
    started = {plain_name(name): whole(param) for name, param in model.named_parameters()}
    assert_close(started, first, 0, 0, "first values")
    with torch.no_grad():
        found = model(input_ids=batch_of(ROWS)["input_ids"].chunk(ranks)[rank], use_cache=False).logits
    torch.testing.assert_close(found, logits.chunk(ranks)[rank], rtol=max(rtol, 1e-5), atol=max(atol, 1e-5))
    optimizer = optimizer_of(model, RATE)
    for step, (own, alone) in enumerate(zip(steps_of(model, optimizer, rank, ranks), steps, strict=True)):
        total = torch.tensor(own["loss"])
        dist.all_reduce(total)
        torch.testing.assert_close(total.item() / ranks, alone["loss"], rtol=rtol, atol=atol)
        assert_close(own["gradients"], alone["gradients"], rtol, max(atol, 1e-6), f"gradients of step {step}")
        # AdamW's first steps follow signs of gradients: where one is as small as rounding, an element may differ.
        assert_close(own["trained"], alone["trained"], rtol, 2e-5 if atol < 1e-3 else 3 * RATE, f"after step {step}")
    for name, param in model.named_parameters():
        if not param.requires_grad:
            assert param.grad is None, name
            assert torch.equal(whole(param), first[plain_name(name)]), f"{name} has changed"
    trained = {id(param) for param in model.parameters() if param.requires_grad}
    assert {id(param) for param in optimizer.state} <= trained


def train_adapters(cases: Sequence[tuple[str, str, Any, dict[str, Any], torch.dtype]], out: str) -> None:
    """Each case (strategy, folder, config, fields of the strategy, dtype) against one process, then files."""
    for index, (name, folder, config, fields, dtype) in enumerate(cases):
        expected = one_process(folder, config, dtype)
        with _Quiet():
            torch.manual_seed(SEED)
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, distributed_config=strategy(name, **fields), dtype=dtype, peft_config=config
            )
        assert_like_one_process(model, expected, dtype)
        target = f"{out}/{index}-{dist.get_world_size()}"
        model.save_pretrained(target)
        assert_files_give_the_same(model, folder, target, dtype)


def assert_files_give_the_same(model: Any, folder: str, target: str, dtype: torch.dtype) -> None:
    """Plain peft reads the files, and computes what the model does."""
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with _Quiet():
        again = peft.PeftModel.from_pretrained(base, target).train()
    tokens = batch_of(ROWS)["input_ids"].chunk(dist.get_world_size())[dist.get_rank()]
    with torch.no_grad():
        expected = again(input_ids=tokens, use_cache=False).logits
        found = model(input_ids=tokens, use_cache=False).logits
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    dist.barrier()


def cases_of(name: str, folders: dict[str, str]) -> list[tuple[str, str, Any, dict[str, Any], torch.dtype]]:
    recompute = {"activation_checkpointing": True}
    head = lora(modules_to_save=["lm_head"])
    return [
        (name, folders["llama"], lora(), recompute, torch.float32),
        (name, folders["llama"], head, {}, torch.float32),
        (name, folders["llama_tied"], lora(target_modules="all-linear"), {}, torch.float32),
        (name, folders["gemma3"], lora(bias="none"), {}, torch.float32),
        (name, folders["bfloat16"], lora(), {}, torch.bfloat16),
    ]


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, str]:
    found = {kind: save(kind, tmp_path) for kind in ("llama", "llama_tied", "gemma3")}
    return {**found, "bfloat16": save("llama", tmp_path, torch.bfloat16)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_adapters_train_as_in_one_process_and_peft_reads_them(
    run_ranks: RunRanks, tmp_path: Path, folders: dict[str, str], name: str
) -> None:
    run_ranks(2, train_adapters, cases_of(name, folders), str(tmp_path / "out"), timeout_s=300.0)


@pytest.mark.parametrize("ranks", [1, 4])
def test_adapters_do_not_depend_on_the_number_of_ranks(
    run_ranks: RunRanks, tmp_path: Path, folders: dict[str, str], ranks: int
) -> None:
    cases = [cases_of(name, folders)[1] for name in STRATEGIES]
    run_ranks(ranks, train_adapters, cases, str(tmp_path / "out"), timeout_s=300.0)
