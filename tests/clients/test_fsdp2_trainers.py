"""Trainers of transformers and trl, unmodified, on our `fully_shard` and on torch's: the same losses and weights."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp

from megatron_fsdp.fsdp2 import FSDPModule, install
from megatron_fsdp.fsdp2.module import ShardedModule
from tests.clients.test_fsdp2_accelerate import fsdp2_on_cpus, weights_of
from tests.clients.test_trl import adapters, conversations, tokenizer
from tests.fsdp2.test_fully_shard import assert_same
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

COMMON: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "max_steps": 3,
    "learning_rate": 1e-3,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_steps": 2,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": [],
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
    "seed": 5,
}
OPTIONS: dict[str, Any] = {
    "fsdp": True,
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def arguments(kind: Any, folder: str, **changes: Any) -> Any:
    options = dict(OPTIONS, fsdp_config=dict(OPTIONS["fsdp_config"]))
    return kind(folder, **{**COMMON, **options, **changes})


def texts() -> Any:
    with fixed_seed(3):
        rows = torch.randint(2, VOCABULARY, (24, 10)).tolist()
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows})


def preferences() -> Any:
    with fixed_seed(4):
        rows = torch.randint(2, VOCABULARY, (24, 3, 4)).tolist()
    words = [[" ".join(map(str, part)) for part in row] for row in rows]
    return datasets.Dataset.from_dict(
        {name: [row[at] for row in words] for at, name in enumerate(("prompt", "chosen", "rejected"))}
    )


def loaded(folder: str, **options: Any) -> Any:
    base = Path(folder).parent / "base"
    return transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **options)


def by_options(_folder: str) -> Any:
    return build("llama"), {}


def sharded_before(_folder: str) -> Any:
    model = build("llama")
    shard = torch.distributed.fsdp.fully_shard
    for layer in model.model.layers:
        shard(layer)
    return shard(model), {"fsdp_config": {"version": 2, "auto_wrap_policy": "NO_WRAP"}}


def by_distributed_config(folder: str) -> Any:
    """Sharded at load time; the trainer refuses to save what it could resume from."""
    config = transformers.distributed.DistributedConfig(fsdp_size=dist.get_world_size())
    return loaded(folder, distributed_config=config), {"fsdp": None, "fsdp_config": None, "save_strategy": "no"}


def of_transformers(make: Callable[[str], Any]) -> Callable[[str], Any]:
    def trainer(folder: str) -> Any:
        model, changes = make(folder)
        given = arguments(transformers.TrainingArguments, folder, **changes)
        return transformers.Trainer(model, given, train_dataset=texts(), eval_dataset=texts())

    return trainer


def sft(folder: str, **options: Any) -> Any:
    given = arguments(trl.SFTConfig, folder)
    return trl.SFTTrainer(loaded(folder), given, train_dataset=conversations(), processing_class=tokenizer(), **options)


def sft_of_adapters(folder: str) -> Any:
    torch.manual_seed(6)
    return sft(folder, peft_config=adapters())


def dpo(folder: str, **options: Any) -> Any:
    given = arguments(trl.DPOConfig, folder, max_length=16)
    return trl.DPOTrainer(
        loaded(folder), args=given, train_dataset=preferences(), processing_class=tokenizer(), **options
    )


def dpo_with_reference(folder: str) -> Any:
    return dpo(folder, ref_model=build("llama", seed=1))


def dpo_of_adapters(folder: str) -> Any:
    torch.manual_seed(6)
    return dpo(folder, peft_config=adapters())


def reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(text)) / 10 for text in completions]


def grpo(folder: str) -> Any:
    given = arguments(trl.GRPOConfig, folder, num_generations=2, max_completion_length=4, beta=0.1)
    rows = preferences().select_columns(["prompt"])
    return trl.GRPOTrainer(loaded(folder), reward, args=given, train_dataset=rows, processing_class=tokenizer())


TRAINERS: dict[str, Callable[[str], Any]] = {
    "its options": of_transformers(by_options),
    "sharded before": of_transformers(sharded_before),
    "DistributedConfig": of_transformers(by_distributed_config),
    "SFT": sft,
    "SFT of adapters": sft_of_adapters,
    "DPO": dpo,
    "DPO with a reference": dpo_with_reference,
    "DPO of adapters": dpo_of_adapters,
    "GRPO": grpo,
}


def program(make: Callable[[str], Any], folder: str) -> tuple[Any, list[torch.Tensor]]:
    """Three steps with checkpoints, then the last again from a checkpoint; the model, and losses and weights."""
    trainer = make(folder)
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    found = weights_of(model)
    noted = [
        torch.tensor([entry["loss"], entry["grad_norm"]]) for entry in trainer.state.log_history if "loss" in entry
    ]
    if trainer.eval_dataset is not None:
        noted.append(torch.tensor(trainer.evaluate()["eval_loss"]))
    trainer.save_model(f"{folder}/saved")
    if dist.get_rank() == 0 and not hasattr(model, "peft_config"):
        again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved", dtype=torch.float32)
        assert_equal_tensors(weights_of(again), found)
    if hasattr(model, "generate"):
        prompt = torch.arange(4)[None] + 2
        noted.append(model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False, synced_gpus=True))
    if trainer.args.save_strategy != "no":
        again = make(folder)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
        assert_equal_tensors(weights_of(again.accelerator.unwrap_model(again.model)), found)
    dist.barrier()
    return model, [*noted, *found.values()]


@pytest.mark.full(short=["its options"])
@pytest.mark.parametrize("name", TRAINERS)
@on_ranks(2)
def test_it_trains_evaluates_saves_and_resumes_as_on_torch(name: str, tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    if dist.get_rank() == 0:
        build("llama").save_pretrained(f"{folder}/base")
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        with fsdp2_on_cpus():
            theirs, wanted = program(TRAINERS[name], f"{folder}/theirs")
        with install(), fsdp2_on_cpus():
            ours, found = program(TRAINERS[name], f"{folder}/ours")
    assert any(isinstance(module, FSDPModule) for module in theirs.modules())
    assert not any(isinstance(module, ShardedModule) for module in theirs.modules())
    assert all(isinstance(module, ShardedModule) for module in ours.modules() if isinstance(module, FSDPModule))
    assert_same(found, wanted)
