"""`transformers.Trainer` for models that are parallel already; docs/transformers_trainer.md is the guide."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME

from megatron_fsdp.automodel.accumulation import accumulation_context
from megatron_fsdp.automodel.gradient_clipping import clip_grad_norm_
from megatron_fsdp.automodel.optimizers import connect_optimizer
from megatron_fsdp.automodel.trainer_checks import check_arguments, check_model
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.agree import decided_by_first
from megatron_fsdp.checkpoint.hf import load_adapter, load_hf
from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.errors import ConfigurationError

STATE_FOLDER = "training_state"
"""In a checkpoint of the trainer: main weights, optimizer and schedule, for any number of ranks."""

_UNFINISHED = ".unfinished"
_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


class ShardedTrainer(transformers.Trainer):
    """A trainer that leaves the model as it is: sharded, or replicated by DDP.

        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=MegatronFSDPConfig())
        trainer = ShardedTrainer(model, TrainingArguments(output_dir=...), train_dataset=...)
        trainer.train(resume_from_checkpoint=None)

    Losses, accumulation, clipping, schedules, logging, evaluation and callbacks are those of transformers. Checkpoints
    hold files that plain transformers (or peft) loads, and the state to go on from.
    """

    def __init__(self, model: nn.Module, args: transformers.TrainingArguments, **options: Any) -> None:
        """Set up; collective.

        Args:
            model: What `from_pretrained` or `from_config` returned, with data parallelism only.
            args: As of transformers; trainer_checks.py lists what is refused.
            options: The other arguments of `transformers.Trainer`.

        Raises:
            ConfigurationError: The model or an argument is not supported.
        """
        check_model(model)
        check_arguments(args, model, options)
        self._parallel: Any = model
        marked: Any = model
        marked._is_accelerate_prepared = True  # accelerate would wrap it in DDP
        super().__init__(model=unwrap(model), args=args, **options)
        self.model_wrapped = model

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """What runs forward, in training and in evaluation."""
        del model, training, dataloader
        wrapped: nn.Module = self._parallel
        return wrapped

    # ---- steps --------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Build it as transformers does, unless one was given, and connect it with the model."""
        super().create_optimizer(*args, **kwargs)
        connect_optimizer(self._parallel, self._own_optimizer())
        optimizer: Any = self.optimizer
        made: torch.optim.Optimizer = optimizer
        return made

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Without accelerate's wrapper."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Forward and backward of one microbatch; gradients are reduced over ranks after the last one of a step."""
        with accumulation_context(self._parallel, self.accelerator.sync_gradients):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """One norm over all ranks' shards."""
        del model
        return clip_grad_norm_(self._parallel, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """The norm before clipping; measured where nothing was clipped."""
        del model
        return clip_grad_norm_(self._parallel, math.inf) if grad_norm is None else grad_norm

    # ---- files --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what plain transformers (or peft) loads, in place of an older model there; all ranks call it.

        Args:
            output_dir: Folder that all ranks see; None: that of the arguments.

        Raises:
            CheckpointError: It cannot be saved.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        unfinished = folder / _UNFINISHED
        decided_by_first(lambda: _make_room(unfinished), f"preparing to save {folder}")
        self._parallel.save_pretrained(unfinished)

        def finish() -> None:
            _replace_model(unfinished, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

        decided_by_first(finish, f"saving {folder}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Each rank its shards, with the main weights. Random states are saved by transformers, per rank."""
        save_checkpoint(
            self._parallel,
            self._own_optimizer(),
            Path(output_dir) / STATE_FOLDER,
            iteration=self.state.global_step,
            extra=self._extra(),
            with_rng=False,
            overwrite=True,
        )

    def _extra(self) -> dict[str, Any]:
        """What a checkpoint holds beside model and optimizer."""
        return {"schedule": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Only look whether one can go on from there; weights are loaded with the optimizer, once that exists."""
        del model
        state = Path(resume_from_checkpoint) / STATE_FOLDER
        if not decided_by_first(state.is_dir, f"looking for {state}"):
            raise ConfigurationError(
                f"{resume_from_checkpoint} has no folder {STATE_FOLDER!r}: it was written with save_only_model=True or "
                "by another trainer; load its weights by from_pretrained and start anew"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Weights, optimizer and schedule; any number of ranks and any strategy may have written them."""
        if checkpoint is not None:
            load_checkpoint(
                self._parallel,
                self._own_optimizer(),
                Path(checkpoint) / STATE_FOLDER,
                extra=self._extra(),
                with_rng=False,
            )

    def _load_best_model(self) -> None:
        """Weights of the best checkpoint, from the files for transformers, which have the dtype of the main weights."""
        folder = str(self.state.best_model_checkpoint)
        load = load_adapter if getattr(self.model, "peft_config", None) else load_hf
        load(self._parallel, folder)


def _make_room(folder: Path) -> None:
    """What a save left behind that was killed is in the way."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _replace_model(new: Path, folder: Path) -> None:
    """Put files where those of an older model may be, of which none may stay: transformers would choose."""
    for pattern in _WEIGHT_FILES:
        for old in folder.glob(pattern):
            old.unlink()
    for file in new.iterdir():
        target = folder / file.name
        if target.is_dir():
            shutil.rmtree(target)
        file.replace(target)
    new.rmdir()
