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
from tests.clients.test_accelerate import fsdp2_on_cpus, started
from tests.support.doors import assert_same, weights_of
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed, of_ranks, on_ranks, once

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

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
    """Rows of which every other one has labels that do not count, so that ranks have different numbers of tokens."""
    with fixed_seed(3):
        rows = torch.randint(2, VOCABULARY, (24, 10)).tolist()
    labels = [[-100] * (index % 2 * 5) + row[index % 2 * 5 :] for index, row in enumerate(rows)]
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": labels})


def tokenizer() -> Any:
    """Words are the numbers of their tokens."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({str(token): token for token in range(VOCABULARY)}, unk_token="0")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="1", pad_token="1")


def conversations() -> Any:
    """Prompts of which no loss is taken, and completions, of unequal lengths."""
    with fixed_seed(3):
        tokens = torch.randint(2, VOCABULARY, (24, 14)).tolist()
    rows = [row[: 8 + index % 6] for index, row in enumerate(tokens)]
    masks = [[0] * 3 + [1] * (len(row) - 3) for row in rows]
    return datasets.Dataset.from_dict({"input_ids": rows, "completion_mask": masks})


def adapters() -> Any:
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"])


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


def sft_of_adapters(folder: str) -> Any:
    torch.manual_seed(6)
    given, rows = arguments(trl.SFTConfig, folder), conversations()
    return trl.SFTTrainer(
        loaded(folder), given, train_dataset=rows, processing_class=tokenizer(), peft_config=adapters()
    )


def dpo_with_reference(folder: str) -> Any:
    given, rows = arguments(trl.DPOConfig, folder, max_length=16), preferences()
    reference = build("llama", seed=1)
    return trl.DPOTrainer(loaded(folder), reference, given, train_dataset=rows, processing_class=tokenizer())


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
    "SFT of adapters": sft_of_adapters,
    "DPO with a reference": dpo_with_reference,
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
    once(lambda: build("llama").save_pretrained(f"{folder}/base"))
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


def mean_label_logit(found: Any) -> dict[str, float]:
    """Depends on the order in which the ranks' rows are put together."""
    labels = torch.tensor(found.label_ids).clamp(min=0)
    logits = torch.tensor(found.predictions).gather(-1, labels[..., None])[..., 0]
    return {"logit": float((logits * torch.arange(1, len(labels) + 1)[:, None]).mean())}


def best_of(folder: str, with_adapters: bool, **changes: Any) -> Any:
    """Three steps with an evaluation and a checkpoint after each, and the weights of the one with the highest loss."""
    model: Any = build("llama")
    if with_adapters:
        torch.manual_seed(6)
        model = peft.get_peft_model(model, adapters())
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}
    given = arguments(transformers.TrainingArguments, folder, **every_step, greater_is_better=True, **changes)
    rows = {"train_dataset": texts(), "eval_dataset": texts(), "compute_metrics": mean_label_logit}
    trainer = transformers.Trainer(model, given, **rows)
    trainer.train()
    return trainer


@pytest.mark.full(short=["model"])
@pytest.mark.parametrize("with_adapters", [False, True], ids=["model", "adapters"])
@on_ranks(2)
def test_its_log_and_its_best_model_are_those_of_one_process(with_adapters: bool, tmp_path: Path) -> None:
    folder = of_ranks(str(tmp_path))[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs
        with started(by_torchrun=False):
            whole_batch = {"fsdp": None, "fsdp_config": None, "per_device_train_batch_size": 4}
            alone = best_of(f"{folder}/alone-{dist.get_rank()}", with_adapters, **whole_batch)
        with install(), fsdp2_on_cpus():
            ours = best_of(f"{folder}/ours", with_adapters)
            found = weights_of(ours.accelerator.unwrap_model(ours.model))
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_logit")
    logs = [[{name: e[name] for name in names if name in e} for e in each.state.log_history] for each in (ours, alone)]
    assert logs[0] == [pytest.approx(entry, rel=1e-4, abs=1e-5) for entry in logs[1]]
    assert ours.state.best_global_step == alone.state.best_global_step == 1
    if dist.get_rank() == 0:  # the other rank's own run has no files to load: transformers asks for the rank
        assert_equal_tensors(found, weights_of(alone.model), 2e-4, 2e-4)
