"""The training loop's own state in a checkpoint: how far a run is, and what decides its numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron_fsdp.train.data.preparation import TokenData
from megatron_fsdp.train.options.job import Job
from megatron_fsdp.train.options.options import Options, flag_for

_OF_OPTIMIZER = {"sgd": ("sgd_momentum",), "adam": ("adam_beta1", "adam_beta2", "adam_eps")}
_NO_ARITHMETIC = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


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
    """The loop's own state; saved as `trainer`.

    Attributes:
        facts: What decides the numbers of a run, by the name of its option.
        progress: How far training is.
        saved_facts: Those of the run that saved.
    """

    facts: dict[str, str]
    progress: Progress = field(default_factory=Progress)
    saved_facts: dict[str, str] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        facts = [list(item) for item in self.facts.items()]  # one object, whatever options later versions have
        return {**asdict(self.progress), "facts": facts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        self.progress = Progress(
            int(state["steps"]), int(state["samples"]), int(state["skipped"]), float(state["elapsed_s"])
        )
        self.saved_facts = {str(name): str(value) for name, value in state["facts"]}

    def changes(self) -> list[str]:
        """Describe what has changed since the checkpoint was saved."""
        return [
            f"{name} was {self.saved_facts[name]} and is {value}"
            for name, value in self.facts.items()
            if name in self.saved_facts and self.saved_facts[name] != value
        ]


def facts_of(job: Job, data: TokenData) -> dict[str, str]:
    """Return what decides the losses of a run, as text, by option; the number of ranks changes only rounding."""
    options, schedule = job.options, job.schedule
    wsd = {"--lr-wsd-decay-iters": str(schedule.wsd_steps)} if schedule.style == "WSD" else {}
    return {
        "--lr": str(schedule.peak),
        "--min-lr": str(schedule.final),
        "--lr-decay-style": schedule.style,
        "--lr-decay-iters": str(schedule.decay_steps),
        "--lr-warmup-iters": str(schedule.warmup_steps),
        "--lr-warmup-init": str(schedule.initial),
        **wsd,
        "--global-batch-size": str(job.batch.total),
        "--seq-length": str(job.seq_length),
        **{flag_for(name): str(options.value(name)) for name in _deciding(options)},
        **_source_facts(options.model.source),
        **_dtype_facts(job),
        "--data-path": f"text with checksum {data.checksum[:16]}",
    }


def _deciding(options: Options) -> Iterator[str]:
    """Yield the options that decide numbers as they were given."""
    yield from ("optimizer", *_OF_OPTIMIZER[options.optimizer.optimizer])
    yield from ("weight_decay", "clip_grad", "calculate_per_token_loss", "seed", "eod_mask_loss")
    if options.model.source is None:  # not visible in the shapes of weights
        yield from ("num_attention_heads", "normalization", "norm_epsilon")
        if options.model.position_embedding_type == "rope":
            yield "rotary_base"
        if options.model.num_experts is not None:
            yield "moe_router_topk"


def _source_facts(source: Path | None) -> dict[str, str]:
    """Return the checksum of a transformers configuration, without fields that change no number."""
    if source is None:
        return {}
    file = source / "config.json" if source.is_dir() else source
    found = json.loads(file.read_bytes())
    said = {name: value for name, value in found.items() if name not in _NO_ARITHMETIC}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
    return {"the configuration of the model": f"one with checksum {digest[:16]}"}


def _dtype_facts(job: Job) -> dict[str, str]:
    """Return the dtypes that decide rounding."""
    found = job.precision
    dtypes = {
        "the dtype of compute": found.compute,
        "the dtype of main weights": found.main_params,
        "the dtype of main gradients": found.main_grads,
        "the dtype that gradients travel in": found.grad_comm,
    }
    return {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()}
