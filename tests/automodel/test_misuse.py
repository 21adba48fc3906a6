"""What users do by mistake: each is right, or one sentence on every rank."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    accumulation_context,
    connect_optimizer,
)
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.test_adapters import QuietPeft, lora
from tests.automodel.test_auto_model_files import image_batch, small_llava
from tests.automodel.training import STRATEGIES, load, plain_name, saved, strategy, whole
from tests.support.language_models import batch_of, build, config_of
from tests.support.on_ranks import assert_equal_tensors, on_ranks, once, refusal


@on_ranks(2)
def test_ranks_with_other_arguments_are_told_and_do_not_wait(tmp_path: Path) -> None:
    rank, folder = dist.get_rank(), saved("llama", tmp_path / "llama")
    cases: dict[str, dict[str, Any]] = {
        "distributed_config is FSDP2Config on rank 0, MegatronFSDPConfig on rank 1; give": {"name": STRATEGIES[rank]},
        "tp_size is 1 on rank 0, 2 on rank 1": {"tp_size": 1 + rank},
        "dtype is torch.float32 on rank 0, torch.bfloat16 on rank 1": {"dtype": (torch.float32, torch.bfloat16)[rank]},
        "config.rms_norm_eps is 1e-06 on rank 0, 1e-05 on rank 1; give": {"rms_norm_eps": (1e-6, 1e-5)[rank]},
        "neither a local folder nor in the local cache": {"folder": folder if rank == 0 else folder / "absent"},
    }
    for told, given in cases.items():
        assert told in refusal(load, **{"folder": folder, **given})


@on_ranks(2)
def test_replicas_average_beside_parameters_that_nobody_uses(tmp_path: Path) -> None:
    """Gradients of the second of two backwards of a model whose tower of images has an unused norm."""
    plain = small_llava()
    once(lambda: plain.save_pretrained(tmp_path))
    plain(**image_batch(plain), use_cache=False).logits.square().mean().backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    config = strategy("ddp", find_unused_parameters=True)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path, distributed_config=config)
    own = {key: value.chunk(2)[dist.get_rank()] for key, value in image_batch(model.module).items()}
    for _ in range(2):
        model.zero_grad()
        model(**own, use_cache=False).logits.square().mean().backward()
    found = {plain_name(key): param.grad for key, param in model.named_parameters()}
    assert None in found.values()
    assert_equal_tensors({name: found[name] for name in expected}, expected, 1e-4, 1e-6)
    looks_once = load(tmp_path, "ddp", AutoModelForImageTextToText)
    assert "vision_tower" in (message := refusal(looks_once, **own, use_cache=False, error=ConfigurationError))
    assert "set DDPConfig.find_unused_parameters=True, or freeze them" in message


@on_ranks(2)
def test_an_optimizer_of_gathered_weights_is_refused(tmp_path: Path) -> None:
    model = load(saved("llama", tmp_path))
    model(input_ids=batch_of()["input_ids"], use_cache=False)
    assert "connect_optimizer was given a int and a" in refusal(connect_optimizer, 3, model)
    late = torch.optim.AdamW(model.parameters())
    assert "of the 39 parameters of the optimizer are not the model's sharded" in refusal(
        connect_optimizer, model, late
    )
    assert connect_optimizer(model, torch.optim.AdamW(model.parameters())).param_groups


@on_ranks(2)
def test_a_deep_copy_saves_its_own_weights(tmp_path: Path) -> None:
    model = load(saved("llama", tmp_path / "llama"), "ddp")
    kept = copy.deepcopy(model)
    with torch.no_grad():
        for param in kept.parameters():
            param.zero_()
    kept.save_pretrained(tmp_path / "zeros")
    model.save_pretrained(tmp_path / "weights")
    zeros = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "zeros", dtype=torch.float32)
    assert all(not param.any() for param in zeros.parameters())
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert_equal_tensors(dict(same.named_parameters()), dict(build("llama").named_parameters()))


@on_ranks(2)
def test_adapters_are_saved_after_a_forward_that_has_no_backward(tmp_path: Path) -> None:
    adapters, folder = lora(modules_to_save=["lm_head"], task_type="CAUSAL_LM"), saved("llama", tmp_path / "llama")
    with QuietPeft():
        model = load(folder, dtype=torch.float32, peft_config=adapters)
    model(input_ids=batch_of()["input_ids"], use_cache=False)
    model.save_pretrained(tmp_path / "out")
    found = [whole(param) for param in model.parameters() if param.requires_grad]
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(stored) == len(found)
    assert torch.equal(stored["base_model.model.lm_head.weight"], build("llama").lm_head.weight)


@on_ranks(1)
def test_generation_config_and_dtypes_by_name_are_taken(tmp_path: Path) -> None:
    plain = build("llama")
    plain.generation_config.eos_token_id = [1, 5]
    plain.save_pretrained(tmp_path)
    model = load(tmp_path, torch_dtype="bfloat16")
    assert (model.generation_config.eos_token_id, next(model.parameters()).dtype) == ([1, 5], torch.bfloat16)


def freeze_embeddings(model: Any) -> None:
    model.model.embed_tokens.requires_grad_(False)


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
@on_ranks(2)
def test_parameters_are_frozen_before_sharding(tmp_path: Path, name: str) -> None:
    model = load(saved("llama", tmp_path), name, prepare_model=freeze_embeddings)
    frozen = [plain_name(key) for key, param in model.named_parameters() if not param.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]


@on_ranks(2)
def test_a_pipeline_is_not_driven_by_microbatches(tmp_path: Path) -> None:
    model = load(saved("llama", tmp_path), pp_size=2)
    told = refusal(accumulation_context(model, True).__enter__)
    assert told.startswith("a Pipeline has all microbatches of a step inside; call model.step(")


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp"])
@pytest.mark.parametrize(("dropout", "told"), [(0.0, "were given different batches"), (0.3, "different random states")])
@on_ranks(2)
def test_ranks_of_one_model_have_the_same_rows_and_dropout(name: str, dropout: float, told: str) -> None:
    config, rank = config_of("phi", resid_pdrop=dropout), dist.get_rank()
    model: Any = AutoModelForCausalLM.from_config(config, distributed_config=strategy(name), tp_size=2)
    torch.manual_seed(100 + rank)
    tokens = batch_of(4, seed=1 if dropout else rank)["input_ids"]
    assert told in refusal(model, input_ids=tokens, use_cache=False, error=ConfigurationError)


UNSUPPORTED: list[tuple[Any, str, str, dict[str, int], str]] = [
    (AutoModelForCausalLM, "t5", "megatron_fsdp", {}, "builds no AutoModelForCausalLM from T5Config"),
    (AutoModelForCausalLM, "llama", "ddp", {"tp_size": 2}, "tp_size=2 is only supported with FSDP2Config or MegatronF"),
    (AutoModelForCausalLM, "llama", "megatron_fsdp", {"ep_size": 2}, "LlamaForCausalLM has no module called experts"),
    (AutoModelForSequenceClassification, "llama", "fsdp2", {"cp_size": 2}, "its head looks at one token of the sequ"),
]
"""Class, model, strategy, sizes, and what is said."""


@on_ranks(2)
def test_models_and_sizes_that_a_strategy_cannot_do_are_refused_on_every_rank() -> None:
    t5 = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
    for auto_class, kind, name, sizes, told in UNSUPPORTED:
        config = t5 if kind == "t5" else config_of(kind)
        assert told in refusal(auto_class.from_config, config, distributed_config=strategy(name), **sizes)
