"""What users do by mistake: each is right, or one sentence on every rank."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    accumulation_context,
    connect_optimizer,
)
from megatron_fsdp.errors import ConfigurationError, MegatronFSDPError
from tests.automodel.test_auto_model import save
from tests.automodel.test_auto_model_files import image_batch, small_llava
from tests.automodel.training import STRATEGIES, assert_trained_alike, plain_name, reference, strategy, train, whole
from tests.conftest import RunRanks
from tests.support.language_models import batch_of, build, config_of
from tests.support.on_ranks import assert_equal_tensors


def other_arguments(folder: str, what: str) -> str:
    rank = dist.get_rank()
    given: dict[str, Any] = {"distributed_config": strategy("fsdp2")}
    if what == "strategy":
        given["distributed_config"] = strategy(STRATEGIES[rank])
    elif what == "tp_size":
        given["tp_size"] = 1 + rank
    elif what == "dtype":
        given["dtype"] = (torch.float32, torch.bfloat16)[rank]
    elif what == "field":
        given["rms_norm_eps"] = (1e-6, 1e-5)[rank]
    else:
        folder = folder if rank == 0 else folder + "-absent"
    try:
        AutoModelForCausalLM.from_pretrained(folder, **given)
    except MegatronFSDPError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("strategy", "distributed_config is FSDP2Config on rank 0, MegatronFSDPConfig on rank 1; give"),
        ("tp_size", "tp_size is 1 on rank 0, 2 on rank 1"),
        ("dtype", "dtype is torch.float32 on rank 0, torch.bfloat16 on rank 1"),
        ("field", "config.rms_norm_eps is 1e-06 on rank 0, 1e-05 on rank 1; give"),
        ("folder", "neither a local folder nor in the local cache"),
    ],
)
def test_ranks_with_other_arguments_are_told_and_do_not_wait(
    run_ranks: RunRanks, tmp_path: Path, what: str, told: str
) -> None:
    first, second = run_ranks(2, other_arguments, save("llama", tmp_path), what)
    assert told in first
    assert first == second


def unused_parameters(folder: str) -> tuple[dict[str, Tensor], bool]:
    """Gradients of the second of two backwards of a model whose tower of images has an unused norm."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, distributed_config=strategy("ddp"))
    batch = image_batch(model.module)
    own = {key: value.chunk(2)[dist.get_rank()] for key, value in batch.items()}
    for _ in range(2):
        model.zero_grad()
        model(**own, use_cache=False).logits.square().mean().backward()
    found = {plain_name(key): p.grad for key, p in model.named_parameters() if p.grad is not None}
    return found, any(param.grad is None for param in model.parameters())


def test_replicas_average_beside_parameters_that_nobody_uses(run_ranks: RunRanks, tmp_path: Path) -> None:
    plain = small_llava()
    plain.save_pretrained(tmp_path)
    plain(**image_batch(plain), use_cache=False).logits.square().mean().backward()
    expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    for found, has_unused in run_ranks(2, unused_parameters, str(tmp_path)):
        assert has_unused
        assert_equal_tensors({name: found[name] for name in expected}, expected, 1e-4, 1e-6)


def optimizer_too_late(folder: str) -> str:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy("fsdp2"))
    model(input_ids=batch_of()["input_ids"], use_cache=False)
    with pytest.raises(ConfigurationError, match="connect_optimizer was given a int and a"):
        connect_optimizer(3, model)
    late = torch.optim.AdamW(model.parameters())
    with pytest.raises(
        ConfigurationError, match="of the 39 parameters of the optimizer are not the model's sharded"
    ) as e:
        connect_optimizer(model, late)
    assert connect_optimizer(model, torch.optim.AdamW(model.parameters())).param_groups
    return str(e.value)


def test_an_optimizer_of_gathered_weights_is_refused(run_ranks: RunRanks, tmp_path: Path) -> None:
    first, second = run_ranks(2, optimizer_too_late, save("llama", tmp_path))
    assert first == second


def evaluate_first(folder: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy("fsdp2"))
    with torch.inference_mode():
        model(input_ids=batch_of()["input_ids"], use_cache=False)
    assert_trained_alike(train(model, steps=1), reference("llama", steps=1))


def test_evaluation_in_inference_mode_may_come_first(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, evaluate_first, save("llama", tmp_path))


def save_copies(folder: str, out: str) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy("ddp"))
    kept = copy.deepcopy(model)
    with torch.no_grad():
        for param in kept.parameters():
            param.zero_()
    kept.save_pretrained(f"{out}/zeros")
    model.save_pretrained(f"{out}/weights")


def test_a_deep_copy_saves_its_own_weights(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks(2, save_copies, save("llama", tmp_path), str(tmp_path))
    zeros = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "zeros", dtype=torch.float32)
    assert all(not param.any() for param in zeros.parameters())
    same = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "weights", dtype=torch.float32)
    assert_equal_tensors(dict(same.named_parameters()), dict(build("llama").named_parameters()))


def adapters_after_a_forward(folder: str, out: str) -> dict[str, Tensor]:
    import peft

    adapters = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    with warnings.catch_warnings():  # peft 0.21 asks what transformers 5.23 calls otherwise
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=strategy("fsdp2"), dtype=torch.float32, peft_config=adapters
        )
    model(input_ids=batch_of()["input_ids"], use_cache=False)
    model.save_pretrained(out)
    return {name: whole(param) for name, param in model.named_parameters() if param.requires_grad}


def test_adapters_are_saved_after_a_forward_that_has_no_backward(run_ranks: RunRanks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found, _ = run_ranks(2, adapters_after_a_forward, save("llama", tmp_path), str(tmp_path / "out"))
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert len(stored) == len(found)
    assert torch.equal(stored["base_model.model.lm_head.weight"], build("llama").lm_head.weight)


def what_folders_say(folder: str) -> tuple[Any, torch.dtype]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=strategy("fsdp2"), torch_dtype="bfloat16"
    )
    return model.generation_config.eos_token_id, next(model.parameters()).dtype


def test_generation_config_and_dtypes_by_name_are_taken(run_ranks: RunRanks, tmp_path: Path) -> None:
    model = build("llama")
    model.generation_config.eos_token_id = [1, 5]
    model.save_pretrained(tmp_path)
    assert run_ranks(1, what_folders_say, str(tmp_path)) == [([1, 5], torch.bfloat16)]


def frozen(folder: str, name: str) -> set[str]:
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=strategy(name),
        prepare_model=lambda whole_model: whole_model.model.embed_tokens.requires_grad_(False),
    )
    return {plain_name(key) for key, param in model.named_parameters() if not param.requires_grad}


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_are_frozen_before_sharding(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    assert run_ranks(2, frozen, save("llama", tmp_path), name) == [{"model.embed_tokens.weight"}] * 2


def accumulate_in_a_pipeline(folder: str) -> str:
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=strategy("fsdp2"), pp_size=2)
    with pytest.raises(ConfigurationError) as caught, accumulation_context(model, True):
        pass
    return str(caught.value)


def test_a_pipeline_is_not_driven_by_microbatches(run_ranks: RunRanks, tmp_path: Path) -> None:
    for told in run_ranks(2, accumulate_in_a_pipeline, save("llama", tmp_path)):
        assert told.startswith("a Pipeline has all microbatches of a step inside; call model.step(")


def different_batches(name: str, dropout: float) -> str:
    model: Any = AutoModelForCausalLM.from_config(
        config_of("phi", resid_pdrop=dropout), distributed_config=strategy(name), tp_size=2
    )
    rank = dist.get_rank()
    torch.manual_seed(100 + rank)
    try:
        model(input_ids=batch_of(4, seed=1 if dropout else rank)["input_ids"], use_cache=False)
    except ConfigurationError as error:
        return str(error)
    return "nothing was refused"


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp"])
@pytest.mark.parametrize(("dropout", "told"), [(0.0, "were given different batches"), (0.3, "different random states")])
def test_ranks_of_one_model_have_the_same_rows_and_dropout(
    run_ranks: RunRanks, name: str, dropout: float, told: str
) -> None:
    first, second = run_ranks(2, different_batches, name, dropout)
    assert told in first
    assert first == second


UNSUPPORTED: list[tuple[Any, Any, str, dict[str, int], str]] = [
    (AutoModelForCausalLM, "t5", "megatron_fsdp", {}, "builds no AutoModelForCausalLM from T5Config"),
    (
        AutoModelForCausalLM,
        "llama",
        "ddp",
        {"tp_size": 2},
        "tp_size=2 is only supported with FSDP2Config or MegatronFSDPConfig; DDPConfig takes dp_size",
    ),
    (
        AutoModelForCausalLM,
        "mixtral",
        "fsdp2",
        {"tp_size": 2, "ep_size": 2},
        "ep_size=2 with tp_size=2: tensor-parallel ranks share the experts out",
    ),
    (
        AutoModelForSequenceClassification,
        "llama",
        "fsdp2",
        {"cp_size": 2},
        "its head looks at one token of the sequence",
    ),
]
"""Class, model, strategy, sizes, and what is said."""


def unsupported_calls() -> list[str]:
    told = []
    for auto_class, kind, name, sizes, _ in UNSUPPORTED:
        if kind == "t5":
            config: Any = transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
        else:
            config = config_of(kind)
        with pytest.raises(MegatronFSDPError) as caught:
            auto_class.from_config(config, distributed_config=strategy(name), **sizes)
        told.append(str(caught.value))
    return told


def test_models_and_sizes_that_a_strategy_cannot_do_are_refused_on_every_rank(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, unsupported_calls)
    assert first == second
    for found, (*_, expected) in zip(first, UNSUPPORTED, strict=True):
        assert expected in found
