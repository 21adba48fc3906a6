"""Strategies that shard models for Lightning's `Trainer` and for `Fabric`; docs/integrations.md shows both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.fully_shard import fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from megatron_fsdp.optional_packages import require

require("lightning", "megatron_fsdp.contrib.lightning")

from lightning.fabric.strategies.ddp import DDPStrategy as FabricStrategy  # noqa: E402 - checked before
from lightning.fabric.strategies.strategy import _BackwardSyncControl  # noqa: E402
from lightning.pytorch import Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelPruning, StochasticWeightAveraging, WeightAveraging  # noqa: E402
from lightning.pytorch.strategies.ddp import DDPStrategy as TrainerStrategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

_COPY_THE_MODEL = (WeightAveraging, StochasticWeightAveraging, ModelPruning)
"""Callbacks that copy the module or mask its weights before it is sharded, and then compare with the shards."""


class MegatronFSDPStrategy(TrainerStrategy):
    """Shards a `LightningModule`: `Trainer(strategy=MegatronFSDPStrategy(zero_dp_strategy=3))`.

    Ranks, devices, precision plugins, loops and callbacks are Lightning's. A checkpoint is a folder of
    `megatron_fsdp.checkpoint`, with Lightning's own state in it; any number of ranks can read it.

    Args:
        sharding: Arguments of `fully_shard_model`. Without `device_mesh` the model is sharded over all ranks.

    Raises:
        ConfigurationError: At `fit`: the module optimizes by itself (`automatic_optimization=False`, which several
            optimizers need), another trainer has sharded it, a callback averages or prunes weights, or an argument
            cannot be honoured.
    """

    def __init__(self, **sharding: Any) -> None:
        super().__init__()
        self._sharding = sharding
        self._sharded: MegatronFSDP | None = None

    def setup(self, trainer: Trainer) -> None:
        """Shard the module, unless an earlier `fit` of the same trainer did, and build its optimizer."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        _check_callbacks(trainer)
        if self._sharded is None or self._sharded.module is not self.lightning_module:
            if any(hasattr(param, "_megatron_fsdp_model") for param in self.lightning_module.parameters()):
                raise ConfigurationError(
                    f"another trainer has sharded this {type(self.lightning_module).__name__}; use that trainer, or "
                    "give this one a new module and the other's checkpoint (ckpt_path=)"
                )
            module = self.precision_plugin.convert_module(self.lightning_module)
            self._sharding = _with_mesh(self._sharding, self.root_device)
            self._sharded = fully_shard_model(module, **self._sharding)
        self.model = self._sharded
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Build the optimizer on the shards, and connect it."""
        assert self.lightning_module is not None
        if not self.lightning_module.automatic_optimization:
            raise ConfigurationError(
                f"{type(self.lightning_module).__name__} sets automatic_optimization=False, so its backward would run "
                "inside the forward of the sharded model; leave it True, or write the loop with Fabric"
            )
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            fully_shard_optimizer(optimizer)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate without communication, for `accumulate_grad_batches`."""
        assert self._sharded is not None
        with self._sharded.no_sync():
            yield

    def teardown(self) -> None:
        """Release the resources of Lightning; the model stays sharded, on its device."""
        assert self.accelerator is not None
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: checkpoints are read into shards."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` restores the optimizer."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return an empty dict: `save_checkpoint` writes the shards."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:  # noqa: ARG002
        """Return an empty dict: `save_checkpoint` writes the shards."""
        return {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has read the shards."""

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the shards and Lightning's own state in a folder; collective.

        Args:
            checkpoint: Of `Trainer.dump_checkpoint`.
            filepath: The folder.
            storage_options: None.

        Raises:
            CheckpointError: It cannot be saved; nothing is left of it.
            ConfigurationError: `storage_options` is given.
        """
        _refuse_option("storage_options", storage_options)
        assert self._sharded is not None
        rest = {name: value for name, value in checkpoint.items() if name not in ("state_dict", "optimizer_states")}
        save_checkpoint(
            self._sharded,
            self.optimizers[0] if checkpoint.get("optimizer_states") else None,
            self.broadcast(filepath),
            iteration=checkpoint["global_step"],
            extra={"lightning": _Rest(rest)},
            overwrite=True,
            keep_last=1,
        )

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Load the shards, and return the state that Lightning restores; collective. Code in the files is never run.

        Args:
            checkpoint_path: A folder that this strategy has written, with any number of ranks.
            weights_only: Accepted; files are always read as if it were True.

        Raises:
            CheckpointError: It is no such folder, damaged or of another model.
        """
        assert self._sharded is not None
        rest = _Rest({})
        optimizer = self.optimizers[0] if self.optimizers else None
        path = self.broadcast(checkpoint_path)
        load_checkpoint(self._sharded, optimizer, path, extra={"lightning": rest}, with_rng=optimizer is not None)
        return rest.content


class FabricMegatronFSDPStrategy(FabricStrategy):
    """Shards models of `Fabric`: `Fabric(strategy=FabricMegatronFSDPStrategy(zero_dp_strategy=3))`.

    Args:
        sharding: Arguments of `fully_shard_model`. Without `device_mesh` models are sharded over all ranks.
    """

    def __init__(self, **sharding: Any) -> None:
        super().__init__()
        self._sharding = sharding
        self._backward_sync_control = _DeferredReduction()

    def module_to_device(self, module: nn.Module) -> None:
        """Leave the module in place; its shards go to the device later."""

    def setup_module(self, module: nn.Module) -> MegatronFSDP:  # type: ignore[override]  # Fabric takes any module
        """Shard a model; build its optimizer afterwards, for `setup_optimizers`."""
        self._sharding = _with_mesh(self._sharding, self.root_device)
        return fully_shard_model(module, **self._sharding)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Connect an optimizer that was built on a sharded model."""
        return fully_shard_optimizer(optimizer)

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> Any:
        """Shard a model and its optimizer together.

        Raises:
            ConfigurationError: There are several optimizers.
        """
        if len(optimizers) != 1:
            raise ConfigurationError(
                f"Fabric.setup was given {len(optimizers)} optimizers; give it the model alone, build them on its "
                "parameters and call Fabric.setup_optimizers"
            )
        model, optimizer = fully_shard(module, optimizers[0], **_with_mesh(self._sharding, self.root_device))
        return model, [optimizer], scheduler

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: Any = None,  # noqa: A002
    ) -> None:
        """Save a model, its optimizer and other values in a folder; collective.

        Args:
            path: The folder.
            state: By name: one sharded model, at most one optimizer, objects with a `state_dict`, and plain values.
            storage_options: None.
            filter: None.

        Raises:
            CheckpointError: It cannot be saved; nothing is left of it.
            ConfigurationError: `state` has no or several models, or an option is given.
        """
        _refuse_option("storage_options", storage_options)
        _refuse_option("filter", filter)
        model, optimizer, names = _parts(state)
        values = {name: state[name] for name in names}
        rest = _Rest({name: v.state_dict() if hasattr(v, "state_dict") else v for name, v in values.items()})
        extra, path = {"fabric": rest}, self.broadcast(path)
        save_checkpoint(model, optimizer, path, iteration=0, extra=extra, with_rng=False, overwrite=True)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,  # noqa: ARG002
    ) -> dict[str, Any]:
        """Load into a model, its optimizer and other values; collective. Code in the files is never run.

        Args:
            path: A folder that this strategy has written, with any number of ranks.
            state: The model, or as of `save_checkpoint`; plain values are replaced in it.
            strict: Refuse a checkpoint of another model, and one that lacks a name of `state`.
            weights_only: Accepted; files are always read as if it were True.

        Returns:
            What the checkpoint has by other names.

        Raises:
            CheckpointError: It is no such folder, damaged or does not fit.
            ConfigurationError: `state` has no or several models.
        """
        given = {"model": state} if isinstance(state, nn.Module) else state
        model, optimizer, names = _parts(given)
        found = _Rest({})
        load_checkpoint(model, optimizer, self.broadcast(path), extra={"fabric": found}, with_rng=False, strict=strict)
        lacking = [name for name in names if name not in found.content]
        if lacking and strict:
            raise ConfigurationError(
                f"the checkpoint {path} lacks {', '.join(lacking)}; leave that out of the state, or pass strict=False"
            )
        for name in set(names) - set(lacking):
            value = found.content.pop(name)
            if hasattr(given[name], "load_state_dict"):
                given[name].load_state_dict(value)
            else:
                given[name] = value
        return found.content


class _DeferredReduction(_BackwardSyncControl):
    """`Fabric.no_backward_sync`."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        if not isinstance(module, MegatronFSDP):
            raise ConfigurationError(
                f"no_backward_sync was given a {type(module).__name__}; give it what Fabric.setup has returned"
            )
        return module.no_sync() if enabled else nullcontext()


class _Rest:
    """The entries of a checkpoint beside model and optimizer, as one stateful object."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return [self.content]

    def load_state_dict(self, state: Any) -> None:
        (self.content,) = state


def _check_callbacks(trainer: Trainer) -> None:
    """Refuse callbacks that hold whole weights of their own."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined] # set by a connector
    refused = [type(each).__name__ for each in callbacks if isinstance(each, _COPY_THE_MODEL)]
    if refused and trainer.state.fn == TrainerFn.FITTING:
        raise ConfigurationError(
            f"{', '.join(refused)} copies or masks whole weights, of which each rank has a shard; leave it out. An "
            'average over steps is kept by the eight lines under "An average of the weights" of mfsdp docs integrations'
        )


def _with_mesh(sharding: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Add a mesh of all ranks, on the devices that Lightning chose."""
    if sharding.get("device_mesh") is not None:
        return dict(sharding)
    return {**sharding, "device_mesh": init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("dp",))}


def _parts(state: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer | None, list[str]]:
    """Return the model, the optimizer and the names of the rest."""
    items = state.items() if isinstance(state, dict) else ()
    models = [value for _, value in items if isinstance(value, MegatronFSDP)]
    optimizers = [value for _, value in items if isinstance(value, torch.optim.Optimizer)]
    if len(models) != 1 or len(optimizers) > 1:
        raise ConfigurationError(
            f"the state has {len(models)} sharded models and {len(optimizers)} optimizers; give a dict with one model "
            "that Fabric.setup has returned and its optimizer"
        )
    names = [name for name, value in items if not isinstance(value, nn.Module | torch.optim.Optimizer)]
    return models[0], next(iter(optimizers), None), names


def _refuse_option(name: str, value: object) -> None:
    if value is not None:
        raise ConfigurationError(f"{name} has no effect on checkpoints of sharded models; leave it out")
