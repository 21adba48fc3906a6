"""`transformers.Trainer` for models that are already parallel; docs/integrations.md is the guide."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from transformers.trainer import TRAINING_ARGS_NAME

from megatron_fsdp.automodel.config import MegatronFSDPConfig
from megatron_fsdp.automodel.gradients import accumulation_context, clip_grad_norm_, connect_optimizer
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.checkpoint.hf import load_adapter, load_hf
from megatron_fsdp.checkpoint.hf.live import unwrap
from megatron_fsdp.checkpoint.report import decided_by_first
from megatron_fsdp.errors import ConfigurationError

STATE_FOLDER = "training_state"
"""In a checkpoint of the trainer: main weights, optimizer and schedule, for any number of ranks."""

_UNFINISHED = ".unfinished"
_WEIGHT_FILES = ("model*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
OPTIMIZERS = frozenset({"adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"})
"""Of `TrainingArguments.optim`: those of torch, which update each element by itself."""

_WRAPS = "the model is parallel already; leave it out, and choose by distributed_config of from_pretrained"
_DTYPES = (
    "dtypes are those of the model: give dtype=torch.bfloat16 to from_pretrained, with MegatronFSDPConfig("
    "preserve_fp32_weights=True, grad_reduce_in_fp32=True), or mp_policy or autocast_dtype of FSDP2Config"
)
_DDP = "it has no effect on a model that is wrapped already; leave it out"
_REFUSED: Mapping[str, str] = {
    "deepspeed": _WRAPS,
    "fsdp": _WRAPS,
    "parallelism_config": _WRAPS,
    "fp16": _DTYPES,
    "bf16": _DTYPES,
    "fp16_full_eval": _DTYPES,
    "bf16_full_eval": _DTYPES,
    "activation_checkpointing": "give activation_checkpointing to the strategy's config",
    "gradient_checkpointing": "give activation_checkpointing to the strategy's config",
    "torch_compile": "give enable_compile to FSDP2Config",
    "use_liger_kernel": "layers are changed before sharding; patch the classes of transformers before from_pretrained",
    "auto_find_batch_size": "ranks that run out of memory alone cannot restart; give a batch size that fits",
    "enable_jit_checkpoint": "signals reach ranks at different steps; use save_steps",
    "push_to_hub": "nothing is uploaded; upload the folder that save_model wrote",
    "label_smoothing_factor": "transformers would not know whether labels are to be shifted; give compute_loss_func",
    "neftune_noise_alpha": "it is not tested with sharded embeddings; leave it out",
}
"""Fields that must be off (None, False, empty), with the remedy."""

_MUST_BE_NONE = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph")


class ShardedTrainer(transformers.Trainer):
    """A trainer that keeps the model as it is: sharded, or replicated by DDP.

        config = MegatronFSDPConfig(preserve_fp32_weights=True, grad_reduce_in_fp32=True)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=config)
        trainer = ShardedTrainer(model, TrainingArguments(output_dir=...), train_dataset=...)
        trainer.train(resume_from_checkpoint=None)

    Losses, accumulation, clipping, schedules, logging, evaluation and callbacks are those of transformers. Checkpoints
    hold files that plain transformers (or peft) loads, and the state to resume from.
    """

    def __init__(self, model: nn.Module, args: transformers.TrainingArguments, **options: Any) -> None:
        """Set up; collective.

        Args:
            model: Of `from_pretrained` or `from_config`, with data parallelism only.
            args: As of transformers; `check_arguments` says what is refused.
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
        """Leave the model in place."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Return the module that runs forward, in training and in evaluation."""
        del model, training, dataloader
        wrapped: nn.Module = self._parallel
        return wrapped

    # ---- steps --------------------------------------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Build the optimizer of transformers, unless one was given, and connect it with the model."""
        super().create_optimizer(*args, **kwargs)
        connect_optimizer(self._parallel, self._own_optimizer())
        optimizer: Any = self.optimizer
        made: torch.optim.Optimizer = optimizer
        return made

    def _own_optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer without accelerate's wrapper."""
        optimizer: Any = self.optimizer
        return getattr(optimizer, "optimizer", optimizer)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run forward and backward of one microbatch; gradients are reduced over ranks after the last one of a step."""
        with accumulation_context(self._parallel, self.accelerator.sync_gradients):
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            return loss

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip by one norm over all ranks' shards."""
        del model
        return clip_grad_norm_(self._parallel, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the norm before clipping; computed here if nothing was clipped."""
        del model
        return clip_grad_norm_(self._parallel, math.inf) if grad_norm is None else grad_norm

    # ---- files --------------------------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save in the format of plain transformers (or peft), replacing an older model; all ranks call it.

        Args:
            output_dir: Folder that all ranks see; None: that of the arguments.

        Raises:
            CheckpointError: It cannot be saved.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        unfinished = folder / _UNFINISHED
        decided_by_first(lambda: _remove_leftovers(unfinished), f"preparing to save {folder}")
        self._parallel.save_pretrained(unfinished)

        def finish() -> None:
            _replace_model(unfinished, folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / TRAINING_ARGS_NAME)

        decided_by_first(finish, f"saving {folder}")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save each rank's shards, with the main weights. transformers saves random states, per rank."""
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
        """Return the entries of a checkpoint beside model and optimizer, by name."""
        return {"schedule": self.lr_scheduler}

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Check that the state exists; weights are loaded with the optimizer, once that exists."""
        del model
        state = Path(resume_from_checkpoint) / STATE_FOLDER
        if not decided_by_first(state.is_dir, f"looking for {state}"):
            raise ConfigurationError(
                f"{resume_from_checkpoint} has no folder {STATE_FOLDER!r}: it was written with save_only_model=True or "
                "by another trainer; load its weights by from_pretrained and start a new run"
            )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load weights, optimizer and schedule, written on any number of ranks with any strategy."""
        if checkpoint is not None:
            load_checkpoint(
                self._parallel,
                self._own_optimizer(),
                Path(checkpoint) / STATE_FOLDER,
                extra=self._extra(),
                with_rng=False,
            )

    def _load_best_model(self) -> None:
        """Load the best weights from the files for transformers, which have the dtype of the main weights."""
        folder = str(self.state.best_model_checkpoint)
        load = load_adapter if getattr(self.model, "peft_config", None) else load_hf
        load(self._parallel, folder)


def _remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of a killed save."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)


def _replace_model(new: Path, folder: Path) -> None:
    """Move files over an older model, none of whose files may stay: transformers would choose between them."""
    for pattern in _WEIGHT_FILES:
        for old in folder.glob(pattern):
            old.unlink()
    for file in new.iterdir():
        target = folder / file.name
        if target.is_dir():
            shutil.rmtree(target)
        file.replace(target)
    new.rmdir()


def _refuse(what: str, advice: str) -> None:
    raise ConfigurationError(f"{what} is not supported: {advice}")


def check_model(model: Any) -> None:
    """Raise for a model not of `from_pretrained` or `from_config`, or whose ranks share data."""
    context = getattr(model, "mesh_context", None)
    if context is None:
        raise ConfigurationError(
            f"model is a {type(model).__name__} without mesh_context; give what from_pretrained or from_config of "
            "megatron_fsdp.automodel returned"
        )
    if context.sizes.dp != dist.get_world_size() or not isinstance(model, nn.Module):
        raise ConfigurationError(
            f"ShardedTrainer shares data out over all {dist.get_world_size()} ranks, and the model has dp_size="
            f"{context.sizes.dp}; leave tp_size, cp_size and pp_size at 1, or write the loop yourself"
        )
    config = model.distributed_config
    if isinstance(config, MegatronFSDPConfig) and config.calculate_per_token_loss:
        raise ConfigurationError(
            "Trainer scales losses for gradients that are averaged, and calculate_per_token_loss=True sums them; set "
            "it to False: losses are per token all the same (average_tokens_across_devices)"
        )


def check_arguments(args: Any, model: Any, options: Mapping[str, Any]) -> None:
    """Raise for arguments of the trainer whose effect would not be the documented one."""
    for name, advice in _REFUSED.items():
        if value := getattr(args, name, None):
            _refuse(f"TrainingArguments.{name}={value!r}", advice)
    for name in _MUST_BE_NONE:
        if (value := getattr(args, name, None)) is not None:
            _refuse(f"TrainingArguments.{name}={value!r}", _DDP)
    if getattr(args.accelerator_config, "gradient_accumulation_kwargs", None):
        _refuse("accelerator_config.gradient_accumulation_kwargs", "give gradient_accumulation_steps")
    if options.get("model_init") is not None:
        _refuse("model_init", "give the model that from_pretrained returned")
    is_own = (
        options.get("optimizer_cls_and_kwargs") is not None or (options.get("optimizers") or (None,))[0] is not None
    )
    optimizer = str(getattr(args.optim, "value", args.optim))
    if not is_own and optimizer not in OPTIMIZERS:
        raise ConfigurationError(
            f"TrainingArguments.optim={optimizer!r} is not supported; give one of {', '.join(sorted(OPTIMIZERS))}, or "
            "optimizers=(an optimizer that is built on model.parameters(), None)"
        )
    if args.n_gpu > 1 or args.world_size != dist.get_world_size():
        raise ConfigurationError(
            f"TrainingArguments sees {args.world_size} processes with {args.n_gpu} devices each, and there are "
            f"{dist.get_world_size()} ranks; start with torchrun, one process per device"
        )
    device = model.mesh_context.device
    if args.device.type != device.type:
        raise ConfigurationError(
            f"TrainingArguments computes on {args.device.type} and the model is on {device.type}; set use_cpu="
            f"{device.type == 'cpu'}"
        )
