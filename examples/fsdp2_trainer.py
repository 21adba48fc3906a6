"""Train by transformers' own `Trainer`, on this engine: torchrun --nproc-per-node 2 examples/fsdp2_trainer.py [torch].

`install()` is the line that is added; with the word `torch` it is left out, and PyTorch's own FSDP2 shards.
"""

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import transformers
from on_cpus import ON_CPU, shard_on_cpus

import megatron_fsdp.fsdp2

if "torch" not in sys.argv[1:]:
    megatron_fsdp.fsdp2.install()

shard_on_cpus()

dist.init_process_group("gloo" if ON_CPU else "nccl")
shared: list[Any] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
dist.broadcast_object_list(shared)
sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
torch.manual_seed(0)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=128, pad_token_id=0))
starts = torch.randint(128, (400, 1))
rows = [{"input_ids": row, "labels": row} for row in (starts + torch.arange(32)) % 128]
arguments = transformers.TrainingArguments(
    output_dir=shared[0],
    fsdp=True,  # type: ignore[arg-type]  # its hint is of older versions
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=20,
    logging_steps=4,
    save_steps=10,
    report_to=[],
    disable_tqdm=True,
    use_cpu=ON_CPU,
    dataloader_pin_memory=not ON_CPU,
)
trainer = transformers.Trainer(model, arguments, train_dataset=rows)
trainer.train()  # trainer.train(resume_from_checkpoint=True) resumes from the last checkpoint
trainer.save_model()
if dist.get_rank() == 0:
    for entry in trainer.state.log_history[:-1]:
        print(f"{entry['step']}: loss {entry['loss']:.5f}")
    plain = transformers.AutoModelForCausalLM.from_pretrained(shared[0])  # reads what the trainer has saved
    print(f"plain transformers: loss {plain(rows[0]['input_ids'][None], labels=rows[0]['labels'][None]).loss:.5f}")
dist.barrier()
dist.destroy_process_group()
