"""Fine-tune a model of transformers on a folder of text; the strategy is one line of finetune_hf.yaml.

    torchrun --standalone --nproc-per-node 2 examples/finetune_hf.py examples/finetune_hf.yaml

A second argument replaces that line: `... examples/finetune_hf.yaml megatron_fsdp`. A model's folder brings its
tokenizer; the small model that is made where no folder is named takes bytes as tokens.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import yaml

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    accumulation_context,
    clip_grad_norm_,
    connect_optimizer,
    parse_distributed_section,
)

VOCABULARY = 256


def main() -> None:
    """Train as one of torchrun's ranks."""
    settings = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
    if len(sys.argv) > 2:
        settings["distributed"]["strategy"] = sys.argv[2]
    if settings["distributed"]["strategy"] == "megatron_fsdp":  # else it trains weights in the dtype of the files
        settings["distributed"] |= {"preserve_fp32_weights": True, "grad_reduce_in_fp32": True}
    section = parse_distributed_section(settings["distributed"])
    training = settings["training"]

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as temporary:
        folder = training["model"] or make_small_model(Path(temporary) / "small-llama")
        model: Any = AutoModelForCausalLM.from_pretrained(folder, **section.arguments())
        context = model.mesh_context
        optimizer = connect_optimizer(model, torch.optim.AdamW(model.parameters(), lr=float(training["learning_rate"])))
        if training["batch"] % context.sizes.dp:  # else ranks would have different numbers of rows to average over
            raise SystemExit(f"training.batch={training['batch']} is no multiple of {context.sizes.dp} ranks")
        tokens = read_tokens(Path(training["text"]), training["model"])

        generator = torch.Generator().manual_seed(0)  # the same on every rank: together they read one batch
        for step in range(training["steps"]):
            losses = []
            for microbatch in range(training["microbatches"]):
                starts = torch.randint(len(tokens) - training["sequence"], (training["batch"],), generator=generator)
                own = starts.chunk(context.sizes.dp)[context.data_rank]
                ids = torch.stack([tokens[start : start + training["sequence"]] for start in own]).to(context.device)
                is_last = microbatch == training["microbatches"] - 1
                with accumulation_context(model, is_last):
                    loss = model(input_ids=ids, labels=ids).loss
                    (loss / training["microbatches"]).backward()
                losses.append(loss.detach())
            norm = clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean = torch.stack(losses).mean()
            dist.all_reduce(mean)
            if dist.get_rank() == 0 and (step + 1) % 10 == 0:
                print(f"step {step + 1}: loss {mean.item() / dist.get_world_size():.4f}, gradient norm {norm:.3f}")

        output = Path(training["output"] or Path(shared(temporary)) / "trained")
        model.save_pretrained(output)
        if dist.get_rank() == 0:
            plain = transformers.AutoModelForCausalLM.from_pretrained(output)
            with torch.no_grad():
                loss = plain(input_ids=tokens[None, :256], labels=tokens[None, :256]).loss
            print(f"plain transformers reads {plain.num_parameters():,} parameters, loss {loss:.4f}")
        dist.barrier()
    dist.destroy_process_group()


def make_small_model(folder: Path) -> str:
    """Save a small model with random weights, as if it had been downloaded; returns its folder."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        dtype="float32",
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def read_tokens(folder: Path, model: str | None) -> torch.Tensor:
    """Return all text below a folder as one row of tokens of the model's tokenizer, or of bytes without a model."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
    text = b"\n\n".join(path.read_bytes() for path in files)
    if not text:
        raise SystemExit(f"{folder} has no .md or .txt file; name a folder that has, as training.text")
    if model is None:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
    return torch.tensor(tokenizer(text.decode("utf-8", errors="replace"))["input_ids"])


def shared(folder: str) -> str:
    """The first rank's folder."""
    told = [folder]
    dist.broadcast_object_list(told, src=0)
    return told[0]


if __name__ == "__main__":
    main()
