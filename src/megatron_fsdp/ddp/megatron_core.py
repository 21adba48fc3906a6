"""Megatron-Core's form of `DistributedDataParallel`: its constructor, and the calls of Megatron's training loop."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.comm.collectives import default_device
from megatron_fsdp.config.ddp_config import DistributedDataParallelConfig
from megatron_fsdp.ddp.engine import BucketEngine
from megatron_fsdp.ddp.resolve import idle_in_megatron
from megatron_fsdp.engine.engine import Engine
from megatron_fsdp.errors import CallOrderError, ConfigurationError, ScheduleError
from megatron_fsdp.megatron_fsdp import MegatronFSDP

logger = logging.getLogger("megatron_fsdp")

_Init = TypeVar("_Init", bound=Callable[..., None])
_PARAMETERS = ("config", "ddp_config", "module", "disable_bucketing", "pg_collection", "full_param_layout")


class _ProcessGroups(Protocol):
    """The groups of Megatron-Core's `pg_collection` that data parallelism uses; others than these may be missing."""

    dp_cp: dist.ProcessGroup
    tp: dist.ProcessGroup | None
    expt_dp: dist.ProcessGroup | None
    pp: dist.ProcessGroup | None


def takes_core_arguments(init: _Init) -> _Init:
    """Make a constructor accept Megatron-Core's arguments too: `(config, ddp_config, module, ...)` (a decorator)."""

    @functools.wraps(init)
    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        has_module = len(args) > 2 or "module" in kwargs
        is_core = has_module and (
            "ddp_config" in kwargs or hasattr([*args, None, None][1], "use_distributed_optimizer")
        )
        if not is_core:
            init(self, *args, **kwargs)
            return
        given = {**dict(zip(_PARAMETERS, args, strict=False)), **kwargs}
        core, ddp_config = given.pop("config", None), given["ddp_config"]
        init(self, *args[len(_PARAMETERS) :], **_own_arguments(core, given))
        # Megatron reads both of the wrapper; set past `__setattr__`, since the model may have a `config` of its own.
        vars(self).update(config=core, ddp_config=ddp_config)

    return cast("_Init", call)


def _own_arguments(core: object, given: dict[str, Any]) -> dict[str, Any]:
    """Translate Megatron-Core's arguments, without `config`, which is given as `core`."""
    groups: _ProcessGroups | None = given.pop("pg_collection", None)
    if given.pop("full_param_layout", None) is not None:
        logger.info("full_param_layout decides nothing here: every bucket is laid out by this package")
    config = given.pop("ddp_config")
    if not isinstance(config, DistributedDataParallelConfig):
        config, _ = DistributedDataParallelConfig.read_from(config, elsewhere={})
    idle = idle_in_megatron(config)
    for name, reason in idle.items():
        logger.info("%s=%r of ddp_config has no effect %s", name, getattr(config, name), reason)
    config = replace(config, **{name: getattr(DistributedDataParallelConfig(), name) for name in idle})
    if groups is not None and (pipeline := getattr(groups, "pp", None)) is not None and dist.get_rank(pipeline) > 0:
        given["disable_bucketing"] = True  # a later stage begins its backward first and has nothing to overlap with
    if given.get("disable_bucketing"):
        config = replace(config, bucket_size=None, num_buckets=None)
    if groups is not None:
        given |= _meshes_of(groups, given["module"])
    elif given.get("device_mesh") is None:
        sizes = {
            name: getattr(core, name, 1) for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        }
        if several := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
            raise ConfigurationError(
                f"config has {' and '.join(several)}, so that not all ranks are data-parallel; give pg_collection, or "
                "device_mesh and its dimensions"
            )
    given.setdefault("calculate_per_token_loss", getattr(core, "calculate_per_token_loss", False))
    return {"config": config, **given}


def _meshes_of(groups: _ProcessGroups, module: nn.Module) -> dict[str, Any]:
    """Build the mesh of data-parallel (with context-parallel) and tensor-parallel ranks, and that of experts."""
    device_type, tensor_parallel = default_device().type, getattr(groups, "tp", None)
    arguments: dict[str, Any] = {"dp_dim": "dp_cp"}
    if tensor_parallel is None or dist.get_world_size(tensor_parallel) == 1:
        arguments["device_mesh"] = DeviceMesh.from_group(groups.dp_cp, device_type, mesh_dim_names=("dp_cp",))
    else:
        ranks = torch.tensor(gather_objects(dist.get_process_group_ranks(tensor_parallel), groups.dp_cp))
        both = [groups.dp_cp, tensor_parallel]
        mesh = DeviceMesh.from_group(both, device_type, mesh=ranks, mesh_dim_names=("dp_cp", "tp"))
        arguments |= {"device_mesh": mesh, "tp_dim": "tp"}
    if any(not getattr(param, "allreduce", True) for param in module.parameters()):
        experts = getattr(groups, "expt_dp", None)
        if experts is None:
            raise ConfigurationError(
                "the model has expert parameters (param.allreduce is False) and pg_collection no expt_dp; give the "
                "group of the ranks that hold the same experts"
            )
        arguments["expt_device_mesh"] = DeviceMesh.from_group(experts, device_type, mesh_dim_names=("dp_cp",))
    return arguments


class MegatronCalls(MegatronFSDP):
    """Calls of Megatron's training loop that `MegatronFSDP` does not have.

    Attributes:
        force_all_reduce: Set by Megatron for iterations that save gradients; here gradients stay as the strategy has
            them, and `full_gradients()` gathers them.
        overlap_param_gather_with_optimizer_step: False.
    """

    force_all_reduce = False
    overlap_param_gather_with_optimizer_step = False
    _gathers_by_hooks = True

    @property
    def use_forward_hook(self) -> bool:
        """True if weights are gathered during the forward (`overlap_param_gather`)."""
        return self._config.overlap_param_gather

    def enable_forward_pre_hook(self) -> None:
        """Gather weights during the forward again, after `disable_forward_pre_hook`.

        Raises:
            CallOrderError: They are gathered so already, or `overlap_param_gather` is off; also an AssertionError.
        """
        self._gather_by_hooks(True, "enable_forward_pre_hook")

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Gather all weights before a forward from now on, and not during it.

        Args:
            param_sync: Gather them here, too: `raw_param` may then be read without a forward.

        Raises:
            CallOrderError: They are gathered so already, or `overlap_param_gather` is off; also an AssertionError.
        """
        self._gather_by_hooks(False, "disable_forward_pre_hook")
        if param_sync:
            self.start_param_sync(force_sync=True)

    def _gather_by_hooks(self, wanted: bool, call: str) -> None:
        if not self.use_forward_hook:
            raise CallOrderError(f"{call}() needs overlap_param_gather=True in the configuration; leave the call out")
        if self._gathers_by_hooks is wanted:
            raise CallOrderError(f"{call}() was called twice; call it once, and its counterpart in between")
        self._gathers_by_hooks = wanted
        if isinstance(self._engine, BucketEngine):
            self._engine.gathers_at_once = not wanted

    def reset_param_sync_dispatch_state(self) -> None:
        """Install and gather all weights anew in the next forward, as after the replay of a CUDA graph.

        Raises:
            CallOrderError: A gather is in flight; also an AssertionError.
        """
        if any(unit.works for unit in self._engine.units):
            raise CallOrderError(
                "reset_param_sync_dispatch_state() was called while weights are being gathered; call "
                "synchronize_param_gather() first"
            )
        self._engine.stepped = True

    def free_overlap_buffers(self) -> None:
        """Wait for gathers, reshard all units and free the memory of gathered weights and gradient buckets.

        Raises:
            ScheduleError: Inside a forward or backward.
        """
        engine = self._between_passes("free_overlap_buffers")
        engine.executor.retire_all()
        engine.await_weights()
        engine.executor.run(engine.scheduler.weights_may_have_changed())
        if engine.executor.weight_memory.empty():
            for unit in engine.units:
                unit.reshard(loses_memory=True)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Free the memory of gradients, which are lost, until `restore_grad_buffers`.

        Args:
            synchronize: Wait for the accelerator first.
            empty_cache: Give the memory back to the accelerator.

        Raises:
            ConfigurationError: Gradients are not in buckets (`use_megatron_fsdp`), or a CUDA graph writes them.
            ScheduleError: Inside a forward or backward.
        """
        engine = self._between_passes("offload_grad_buffers")
        if not isinstance(engine, BucketEngine) or engine.keeps_gradients:
            raise ConfigurationError(
                "offload_grad_buffers() frees the buckets of gradients, which use_megatron_fsdp=True does not have and "
                "a CUDA graph keeps; zero_grad() frees gradients without a bucket"
            )
        on_accelerator = self.device.type != "cpu"
        if synchronize and on_accelerator:
            torch.accelerator.synchronize(self.device)
        engine.clear_gradients()
        engine.free_cleared_gradients()
        engine.takes_gradients = False
        if empty_cache and on_accelerator:
            torch.accelerator.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:  # noqa: ARG002
        """Take gradients again after `offload_grad_buffers`; each is None, as after `zero_grad`.

        Args:
            synchronize: Accepted for callers that pass it; memory is taken in the next backward.
        """
        if isinstance(self._engine, BucketEngine):
            self._engine.takes_gradients = True

    def _between_passes(self, call: str) -> Engine:
        """Return the engine; raise inside a forward or backward."""
        engine = self._engine
        engine.refuse_open_iteration(f"{call}() was called")
        if engine.scheduler.in_forward or engine.scheduler.in_backward:
            raise ScheduleError(f"{call}() was called inside a forward or backward; call it between steps")
        return engine

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Mapping[str, Any]:
        """Return the state dict of the wrapped model, whose keys do not begin with `module.`."""
        own = self.state_dict(keep_vars=keep_vars)
        return {prefix + name.removeprefix("module."): value for name, value in own.items()}
