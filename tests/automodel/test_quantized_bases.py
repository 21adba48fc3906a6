"""Quantised bases from folders: the bytes that transformers makes, and adapters that train as in one process."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from megatron_fsdp.automodel import AutoModelForCausalLM, connect_optimizer
from tests.automodel.test_adapters import SEED, with_adapters
from tests.automodel.training import strategy
from tests.conftest import RunRanks
from tests.formats.test_quantized import needs
from tests.support.on_ranks import fixed_seed, on_ranks, refusal

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

IDS = torch.randint(0, 96, (12, 8), generator=torch.Generator().manual_seed(5))


def make_folder(folder: Path) -> Path:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = transformers.LlamaConfig(**sizes, vocab_size=96, tie_word_embeddings=True)
    with fixed_seed(0):
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def quantization(kind: str) -> Any:
    if kind.startswith("torchao"):
        library = pytest.importorskip("torchao.quantization")
        config = library.Int8WeightOnlyConfig()
        return transformers.TorchAoConfig(config if kind == "torchao" else library.FqnToConfig({"re:.*q_proj": config}))
    pytest.importorskip("bitsandbytes")
    make: Any = transformers.BitsAndBytesConfig
    if kind == "8 bits":
        return make(load_in_8bit=True)
    return make(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )  # fmt: skip


def lora() -> Any:
    names = ["q_proj", "v_proj", "down_proj"]
    return peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False, task_type="CAUSAL_LM")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    losses = []
    for _ in range(3):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05)


def trained(kind: str, folder: Path, door: str, out: Path) -> list[float]:
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    config = quantization(kind) if kind != "ready" else None
    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=strategy(door), peft_config=lora(), quantization_config=config, dtype=torch.float32
    )
    names = [name for name, _ in model.named_parameters() if "parametrizations" in name]
    assert names
    optimizer = connect_optimizer(model, sgd(model))
    losses = torch.tensor(steps(model, optimizer, IDS.chunk(dist.get_world_size())[dist.get_rank()]))
    dist.all_reduce(losses)
    model.save_pretrained(out)
    return [float(loss) for loss in losses / dist.get_world_size()]


@pytest.mark.full(short=["4 bits-fsdp2", "torchao by name-megatron_fsdp"])
@pytest.mark.parametrize(
    ("kind", "door"),
    [
        ("4 bits", "fsdp2"),
        ("8 bits", "megatron_fsdp"),
        ("torchao", "fsdp2"),
        ("torchao by name", "megatron_fsdp"),
        ("ready", "fsdp2"),
        ("ready", "megatron_fsdp"),
    ],
)
def test_a_base_is_quantised_while_it_is_read(run_ranks: RunRanks, tmp_path: Path, kind: str, door: str) -> None:
    folder = make_folder(tmp_path / "plain")
    config = quantization("4 bits" if kind == "ready" else kind)
    load = transformers.AutoModelForCausalLM.from_pretrained
    base = load(folder, quantization_config=config, dtype=torch.float32)
    if kind == "ready":
        folder = tmp_path / "ready"
        base.save_pretrained(folder)
    alone = with_adapters(base, lora()).train()
    wanted = steps(alone, sgd(alone), IDS)
    seen = run_ranks(2, trained, kind, folder, door, tmp_path / "out")
    torch.testing.assert_close(seen, [wanted, wanted], rtol=1e-4, atol=1e-5)
    plain = load(make_folder(tmp_path / "again"), quantization_config=config, dtype=torch.float32)
    tuned = peft.PeftModel.from_pretrained(plain, tmp_path / "out").train()
    torch.testing.assert_close(tuned(input_ids=IDS, labels=IDS).loss, alone(input_ids=IDS, labels=IDS).loss)


@needs("bitsandbytes")
@on_ranks(2)
def test_a_quantised_base_without_adapters_is_refused(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        make_folder(tmp_path)
    dist.barrier()
    text = refusal(AutoModelForCausalLM.from_pretrained, tmp_path, quantization_config=quantization("4 bits"))
    assert "give a folder and peft_config, and leave tp_size" in text


@on_ranks(2)
def test_other_libraries_are_refused_by_name(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        make_folder(tmp_path)
    dist.barrier()
    given = {"quant_method": "gptq", "bits": 4}
    text = refusal(AutoModelForCausalLM.from_pretrained, tmp_path, quantization_config=given, peft_config=lora())
    assert "the quantization_config is of gptq; give BitsAndBytesConfig, TorchAoConfig, or a folder" in text
