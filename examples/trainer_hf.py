"""Fine-tune with `transformers.Trainer` and a model that is sharded already; the strategy is the one argument.

    torchrun --standalone --nproc-per-node 2 examples/trainer_hf.py megatron_fsdp

Or fsdp2, or ddp. A small model and made-up data, so that nothing is downloaded; runs on CPUs where there are no
accelerators.
"""

import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from megatron_fsdp.automodel import AutoModelForCausalLM, DDPConfig, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.automodel.trainer import ShardedTrainer

# Main weights and gradients in float32, whatever the dtype of the model.
IN_FLOAT32 = partial(MegatronFSDPConfig, preserve_fp32_weights=True, grad_reduce_in_fp32=True)
STRATEGIES: dict[str, Any] = {"megatron_fsdp": IN_FLOAT32, "fsdp2": FSDP2Config, "ddp": DDPConfig}
VOCABULARY = 128


def main() -> None:
    """Train as one of torchrun's ranks."""
    strategy = STRATEGIES[sys.argv[1] if len(sys.argv) > 1 else "megatron_fsdp"]
    on_cpu = not torch.accelerator.is_available()
    backend = "gloo" if on_cpu else "nccl"
    if not dist.is_initialized():
        dist.init_process_group(backend)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(shared(own))
        if dist.get_rank() == 0:
            make_small_model(folder / "base")
        dist.barrier()

        model = AutoModelForCausalLM.from_pretrained(folder / "base", distributed_config=strategy(backend=backend))
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "run"),
            use_cpu=on_cpu,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=30,
            learning_rate=3e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=30,
            save_steps=15,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=not on_cpu,
        )
        trainer = ShardedTrainer(model, arguments, train_dataset=Counting(400, 1), eval_dataset=Counting(16, 2))
        trainer.train()  # or trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        if dist.get_rank() == 0:
            plain = transformers.AutoModelForCausalLM.from_pretrained(folder / "run")
            row = Counting(1, 3)[0]["input_ids"][None]
            print(f"plain transformers reads the result: loss {plain(input_ids=row, labels=row).loss.item():.3f}")
        dist.barrier()
    dist.destroy_process_group()


class Counting(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows that count upwards from a random start in steps of one size."""

    def __init__(self, rows: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        steps = torch.randint(1, 4, (rows, 1), generator=generator)
        self._rows = (starts + steps * torch.arange(32)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def make_small_model(folder: Path) -> None:
    """Save a small model with random weights, as if it had been downloaded."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def shared(folder: str) -> str:
    """The first rank's folder."""
    told = [folder]
    dist.broadcast_object_list(told, src=0)
    return told[0]


if __name__ == "__main__":
    main()
