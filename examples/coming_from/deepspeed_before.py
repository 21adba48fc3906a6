"""Coming from DeepSpeed: the script before.

deepspeed --num_gpus 2 examples/coming_from/deepspeed_before.py --folder runs/deepspeed --steps 20
"""

import argparse
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from workload import ROWS, LanguageModel, batch, tell

MICROBATCHES, DECAY_STEPS = 2, 100
CONFIG = {
    "train_batch_size": ROWS * MICROBATCHES,
    "gradient_accumulation_steps": MICROBATCHES,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 1e-2, "torch_adam": True}},
    "zero_optimization": {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
}


def main(folder: Path, steps: int) -> None:
    """Train up to a number of steps, from the checkpoint if it is there."""
    deepspeed.init_distributed()
    torch.manual_seed(0)
    engine, *_ = deepspeed.initialize(
        model=LanguageModel(),
        config=CONFIG,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, DECAY_STEPS),
    )
    done = 0
    if (folder / "latest").exists():
        _, client_state = engine.load_checkpoint(folder)
        done = client_state["iteration"]

    for step in range(done, steps):
        losses = []
        for microbatch in range(MICROBATCHES):
            loss = engine(*batch(step * MICROBATCHES + microbatch, engine.device))
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        tell(f"step {step + 1}: loss", torch.stack(losses).mean())
        tell(f"step {step + 1}: gradient norm", torch.as_tensor(engine.get_global_grad_norm(), device=engine.device))

    engine.eval()
    with torch.no_grad():
        tell("held-out loss", engine(*batch(-1, engine.device)))
    engine.save_checkpoint(folder, client_state={"iteration": steps})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--local_rank", type=int)
    arguments = parser.parse_args()
    main(arguments.folder, arguments.steps)
