"""How far a run is, and what decides its numbers: what the loop itself has to remember in a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.options.job import Job


@dataclass(frozen=True)
class Progress:
    """How far training is, earlier runs included.

    Attributes:
        steps: Steps that were done, skipped ones included.
        samples: Samples that were consumed.
        skipped: Steps that were skipped, since their loss or gradient was not finite.
        elapsed_s: Seconds in training steps; evaluations and saves not counted.
    """

    steps: int = 0
    samples: int = 0
    skipped: int = 0
    elapsed_s: float = 0.0


@dataclass
class TrainingState:
    """What the loop itself has to remember; saved as `trainer`.

    Attributes:
        facts: What decides the numbers of a run, by the name of its option.
        progress: How far training is.
        saved_facts: Those of the run that saved.
    """

    facts: dict[str, str]
    progress: Progress = field(default_factory=Progress)
    saved_facts: dict[str, str] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        facts = [list(item) for item in self.facts.items()]  # one object, whatever options later versions have
        done = self.progress
        return {
            "steps": done.steps,
            "samples": done.samples,
            "skipped": done.skipped,
            "elapsed_s": done.elapsed_s,
            "facts": facts,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Out of a checkpoint."""
        self.progress = Progress(
            int(state["steps"]), int(state["samples"]), int(state["skipped"]), float(state["elapsed_s"])
        )
        self.saved_facts = {str(name): str(value) for name, value in state["facts"]}

    def changes(self) -> list[str]:
        """What is not as it was when the checkpoint was saved, in words."""
        return [
            f"{name} was {self.saved_facts[name]} and is {value}"
            for name, value in self.facts.items()
            if name in self.saved_facts and self.saved_facts[name] != value
        ]


def facts_of(job: Job, data: TokenData) -> dict[str, str]:
    """What decides the losses of a run, as text, by option; the number of ranks only rounds them differently."""
    options, schedule = job.options, job.schedule
    return {
        "--lr": str(schedule.peak),
        "--min-lr": str(schedule.final),
        "--lr-decay-style": schedule.style,
        "--lr-decay-iters": str(schedule.decay_steps),
        "--lr-warmup-iters": str(schedule.warmup_steps),
        "--global-batch-size": str(job.batch.total),
        "--seq-length": str(job.seq_length),
        "--weight-decay": str(options.optimizer.weight_decay),
        "--clip-grad": str(options.optimizer.clip_grad),
        "--calculate-per-token-loss": str(options.training.calculate_per_token_loss),
        "--seed": str(options.training.seed),
        "the dtype of compute": str(job.dtype).removeprefix("torch."),
        "--data-path": f"text with checksum {data.checksum[:16]}",
    }
