"""Hugging Face models, and LoRA adapters on them, train and generate under sharding as on one process."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.conftest import RunRanks
from tests.support.case import STRATEGIES, Run, Scenario, Setting, Tolerance, check_strategies
from tests.support.on_ranks import fixed_seed, on_ranks
from tests.support.zoo import Batch, ModelCase

transformers = pytest.importorskip("transformers")

from tests.support.language_models import config_of  # noqa: E402

SHARDED = (Setting(3), Setting(2))
CLOSE = Tolerance(rtol=1e-5, atol=2e-6)
VOCABULARY = 40
UNITS = (
    "transformers.models.llama.modeling_llama.LlamaDecoderLayer",
    "transformers.models.gpt2.modeling_gpt2.GPT2Block",
)


def build_llama(checkpointing: str | None = None, adapters: bool = False) -> nn.Module:
    config = config_of("llama_gqa", vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24)
    model = transformers.LlamaForCausalLM(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer releases have other names for checkpointing
        if adapters:
            peft = pytest.importorskip("peft")
            lora = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
            model = peft.get_peft_model(model, lora)
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
    return model


def build_gpt2() -> nn.Module:
    config = config_of("gpt2", vocab_size=VOCABULARY, n_embd=16, n_inner=None, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    assert model.lm_head.weight is model.transformer.wte.weight
    return model


def make_batch(samples: int, generator: torch.Generator) -> Batch:
    tokens = torch.randint(2, VOCABULARY, (samples, 9), generator=generator)
    return Batch(tokens, tokens)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The model's own loss, out of its output object."""
    return model(input_ids=batch.inputs, labels=batch.targets).loss


def _case(build: Callable[[], nn.Module], unit: int) -> ModelCase:
    return ModelCase(build, make_batch, loss_of, (UNITS[unit],))  # type: ignore[arg-type]


def train_and_evaluate(run: Run) -> None:
    run.train(0)
    run.model.eval()
    with torch.no_grad():
        run.loss(9)
    run.model.train()
    run.train(1, 2)


CASES = {"llama": _case(build_llama, 0), "gpt2, tied": _case(build_gpt2, 1)}


@pytest.mark.full(short=["gpt2, tied-2"])
@pytest.mark.parametrize(("name", "num_ranks"), [("llama", 1), ("gpt2, tied", 2)])
def test_models_train_as_on_one_process(run_ranks: RunRanks, name: str, num_ranks: int) -> None:
    check_strategies(run_ranks, num_ranks, Scenario(train_and_evaluate, CASES[name]), STRATEGIES[::3], CLOSE)


@pytest.mark.full(short=["not reentrant"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
def test_gradient_checkpointing_of_the_model_itself(run_ranks: RunRanks, kind: str) -> None:
    case = _case(partial(build_llama, kind), 0)
    check_strategies(run_ranks, 2, Scenario(train_and_evaluate, case), SHARDED, CLOSE)


def test_adapters_on_a_frozen_base_train_as_on_one_process(run_ranks: RunRanks) -> None:
    pytest.importorskip("peft")
    case = _case(partial(build_llama, adapters=True), 0)
    check_strategies(run_ranks, 2, Scenario(train_and_evaluate, case), SHARDED, CLOSE)


# ---- generation ----------------------------------------------------------------------------------------------------


def _wrap(build: Callable[[], nn.Module], unit: int, strategy: int, **options: Any) -> tuple[nn.Module, MegatronFSDP]:
    with fixed_seed(0):
        plain = build()
    with fixed_seed(0):
        model = fully_shard_model(build(), fsdp_unit_modules=[UNITS[unit]], zero_dp_strategy=strategy, **options)
    plain.eval()
    model.eval()
    return plain, model


@pytest.mark.full(short=["gpt2, tied-3"])
@pytest.mark.parametrize(("name", "strategy"), [("llama", 1), ("gpt2, tied", 3)])
@on_ranks(2)
def test_generation_gives_the_same_tokens(name: str, strategy: int) -> None:
    """Greedy, with a cache, before and after a training step; each rank has prompts of its own."""
    build, unit = (build_llama, 0) if name == "llama" else (build_gpt2, 1)
    plain, model = _wrap(build, unit, strategy)
    pairs = []
    prompt = torch.randint(2, VOCABULARY, (2, 4), generator=torch.Generator().manual_seed(dist.get_rank()))
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    for _ in range(2):
        with torch.no_grad():
            pairs.append((model.module.generate(prompt, **settings), plain.generate(prompt, **settings)))
        loss_of(model, make_batch(2, torch.Generator().manual_seed(5))).backward()
    for found, wanted in pairs:
        assert found.shape == (2, 12)
        assert torch.equal(found, wanted)


@on_ranks(2)
def test_ranks_that_generate_longer_are_kept_company() -> None:
    """Rank 1 is done earlier, and takes part until rank 0 is done too."""
    plain, model = _wrap(build_llama, 0, 3, verify_ranks=300.0)
    count = 4 - 2 * dist.get_rank()
    prompt = torch.full((1, 3), 5)
    settings = {"min_new_tokens": count, "max_new_tokens": count, "do_sample": False}
    settings["attention_mask"] = torch.ones_like(prompt)
    with torch.no_grad():
        found = model.module.generate(prompt, synced_gpus=False, **settings)
        for _ in range(4 - count):
            model.take_part()
        wanted = plain.generate(prompt, **settings)
    batch = make_batch(2, torch.Generator().manual_seed(5))
    assert torch.equal(found, wanted)
    assert (loss_of(model, batch) - loss_of(plain, batch)).abs() < 1e-5


SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
IMAGE = {**SIZE, "image_size": 8, "patch_size": 4}
SEQUENCES = {
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), VOCABULARY),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ForImageClassification", IMAGE),
    "Dinov2": ("ForImageClassification", IMAGE),
    "CLIPVision": ("Model", IMAGE),
    "T5": ("ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "Bart": ("ForConditionalGeneration", SEQUENCES),
    "Bert": ("ForMaskedLM", {**SIZE, "vocab_size": VOCABULARY}),
    "Mamba2": (
        "ForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 8}
        | {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    ),
}


@pytest.mark.full(short=["ViT"])
@pytest.mark.parametrize("name", TYPES)
@on_ranks(2)
def test_models_in_bfloat16_compute_as_on_one_process(name: str) -> None:
    """Both ranks have the same batch, so their mean is the gradient of one process, bit for bit."""
    kind, sizes = TYPES[name]
    with fixed_seed(0):
        alone = getattr(transformers, name + kind)(getattr(transformers, f"{name}Config")(**sizes)).bfloat16().eval()
    model = fully_shard_model(copy.deepcopy(alone), zero_dp_strategy=3)
    ids = torch.arange(12).view(2, 6) + 3
    pixels = torch.linspace(-1, 1, 2 * 3 * 8 * 8).view(2, 3, 8, 8).bfloat16()
    batch = {"pixel_values": pixels} if sizes is IMAGE else {"input_ids": ids, "labels": ids}
    losses = []
    for net in (model, alone):
        output = net(**batch)
        loss = output[0].float().square().mean()
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    gradients = model.full_gradients()
    for key, param in alone.named_parameters():
        if param.grad is not None:
            found = gradients[key]
            assert found is not None
            torch.testing.assert_close(found, param.grad.float(), rtol=0.0, atol=0.0, msg=key)
