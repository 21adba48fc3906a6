"""trl's `SFTTrainer`, unmodified, behind `ShardedTrainer`: beside itself on one process, whole models and adapters."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.automodel.training import parameters_of, strategy
from tests.clients.test_accelerate import forget_accelerate, started
from tests.conftest import RunRanks
from tests.support.language_models import VOCABULARY, build
from tests.support.on_ranks import assert_equal_tensors, fixed_seed

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

ROWS, STEPS = 4, 3


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


def arguments(folder: str, ranks: int) -> Any:
    return trl.SFTConfig(
        folder,
        use_cpu=True,
        per_device_train_batch_size=ROWS // ranks,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-2,
        max_grad_norm=0.5,
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def adapters() -> Any:
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"])


def logged(trainer: Any) -> list[tuple[float, float]]:
    return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def train_beside_one_process(folder: str, with_adapters: bool) -> None:
    from megatron_fsdp.automodel import AutoModelForCausalLM
    from megatron_fsdp.automodel.trainer import ShardedTrainer

    class ShardedSFTTrainer(ShardedTrainer, trl.SFTTrainer):
        pass

    data: dict[str, Any] = {"train_dataset": conversations(), "processing_class": tokenizer()}
    with started(by_torchrun=False):
        plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(5)
        model = peft.get_peft_model(plain, adapters()) if with_adapters else plain
        alone = trl.SFTTrainer(model, arguments(f"{folder}/alone-{dist.get_rank()}", 1), **data)
        alone.train()
    expected = {name: param.detach() for name, param in alone.model.named_parameters()}
    with started():
        for resume in (None, f"{folder}/sharded/checkpoint-2"):
            forget_accelerate()
            torch.manual_seed(5)
            sharded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                distributed_config=strategy("megatron_fsdp"),
                dtype=torch.float32,
                peft_config=adapters() if with_adapters else None,
            )
            trainer = ShardedSFTTrainer(sharded, arguments(f"{folder}/sharded", dist.get_world_size()), **data)
            trainer.train(resume_from_checkpoint=resume)
            for found, wanted in zip(logged(trainer), logged(alone), strict=True):
                assert found == pytest.approx(wanted, rel=1e-4)
            assert_equal_tensors(parameters_of(sharded), expected, 2e-4, 2e-4)
        trainer.save_model()
        if not with_adapters:
            again = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/sharded", dtype=torch.float32)
            assert_equal_tensors(dict(again.named_parameters()), parameters_of(sharded))
        dist.barrier()


def train_quietly(folder: str, with_adapters: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # trl and peft warn of tokens that the configs lack, and of names of theirs
        train_beside_one_process(folder, with_adapters)


@pytest.mark.full(short=["model"])
@pytest.mark.parametrize("with_adapters", [False, True], ids=["model", "adapters"])
def test_sft_trains_as_one_process_and_goes_on(run_ranks: RunRanks, tmp_path: Path, with_adapters: bool) -> None:
    build("llama").save_pretrained(tmp_path)
    run_ranks(2, train_quietly, str(tmp_path), with_adapters, timeout_s=300.0)
