"""Fine-tune a folder of Hugging Face on conversations: trl's `SFTTrainer` on this engine.

    torchrun --nproc-per-node 2 examples/sft.py MODEL DATA.jsonl OUTPUT [--lora 16] [--packing] [--eval-data X.jsonl]

A row of the data has `messages`, or `prompt` and `completion`, as texts or as messages, which the tokenizer's chat
template turns into text. The loss is that of answers only. Main weights are float32, whatever the folder has. Started
again with the same output, it resumes from the last checkpoint. OUTPUT/final is read by `from_pretrained`.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import torch
import torch.distributed as dist
import transformers
import trl
from on_cpus import ON_CPU, shard_on_cpus

import megatron_fsdp.fsdp2


def arguments(kind: Any, given: argparse.Namespace, **more: Any) -> Any:
    """Return trl's configuration of a run."""
    return kind(
        output_dir=str(given.output),
        fsdp=True,
        fsdp_config={"version": 2},
        bf16=not ON_CPU,  # the dtype of compute; main weights stay in float32
        use_cpu=ON_CPU,
        dataloader_pin_memory=not ON_CPU,
        learning_rate=given.learning_rate,
        per_device_train_batch_size=given.batch,
        gradient_accumulation_steps=given.accumulation,
        num_train_epochs=given.epochs,
        max_steps=given.steps,
        max_length=given.length,
        logging_steps=10,
        save_steps=given.save_steps,
        eval_strategy="steps" if given.eval_data else "no",
        eval_steps=given.save_steps,
        report_to=[],
        **more,
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options that every kind of fine-tuning has."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("model", help="a folder of Hugging Face: weights and tokenizer")
    found.add_argument("data", help="a file of JSON lines")
    found.add_argument("output", type=Path)
    found.add_argument("--eval-data", help="JSON lines to evaluate on, at every save")
    found.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank only")
    found.add_argument("--learning-rate", type=float, default=2e-5)
    found.add_argument("--batch", type=int, default=2, help="rows per rank")
    found.add_argument("--accumulation", type=int, default=1)
    found.add_argument("--epochs", type=float, default=1.0)
    found.add_argument("--steps", type=int, default=-1, help="instead of epochs")
    found.add_argument("--save-steps", type=int, default=200)
    found.add_argument("--length", type=int, default=2048, help="the most tokens of a row")
    return found


def answers(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield one row per answer of a conversation, with what comes before it as the prompt."""
    if "messages" not in row:
        yield {"prompt": row["prompt"], "completion": row["completion"]}
    for at, message in enumerate(row.get("messages", ())):
        if message["role"] == "assistant":
            yield {"prompt": row["messages"][:at], "completion": [message]}


def rows_of(path: str | None) -> datasets.Dataset | None:
    """Return the prompts and answers of a file."""
    if path is None:
        return None
    rows = datasets.load_dataset("json", data_files=path, split="train")
    return datasets.Dataset.from_list([answer for row in rows for answer in answers(row)])


def train(trainer: Any, output: Path) -> None:
    """Train, from the last checkpoint if there is one, and save what `from_pretrained` reads."""
    trainer.train(resume_from_checkpoint=transformers.trainer_utils.get_last_checkpoint(str(output)))
    trainer.save_model(str(output / "final"))


def adapters(rank: int) -> Any:
    """Return peft's configuration of adapters on all linears; None for rank 0."""
    if not rank:
        return None
    import peft

    return peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")


def load(folder: str) -> tuple[Any, Any]:
    """Return model and tokenizer of a folder, the weights in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(folder)


def main() -> None:
    """Train on conversations."""
    options = parser(__doc__)
    options.add_argument("--packing", action="store_true", help="several short rows in one")
    given = options.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    model, tokenizer = load(given.model)
    trainer = trl.SFTTrainer(
        model,
        arguments(trl.SFTConfig, given, packing=given.packing),
        train_dataset=rows_of(given.data),
        eval_dataset=rows_of(given.eval_data),
        processing_class=tokenizer,
        peft_config=adapters(given.lora),
    )
    train(trainer, given.output)


def run(program: Callable[[], None]) -> None:
    """Run a program as one of torchrun's ranks, with this engine instead of torch's FSDP2."""
    megatron_fsdp.fsdp2.install()
    shard_on_cpus()
    dist.init_process_group("gloo" if ON_CPU else "nccl")
    program()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
