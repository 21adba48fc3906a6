"""The part of the wrapper that shows what is there: parameters, gradients, sizes and traffic."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megatron_fsdp.accounting import GroupFootprint
from megatron_fsdp.buffer.collectives import Traffic
from megatron_fsdp.description import Description
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.distributed_index import FSDPDistributedIndex
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.watch import HangLog
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.runtime.agreement import agree_over
from megatron_fsdp.runtime.assemble import Assembly, Switches
from megatron_fsdp.runtime.describe_model import Subject, describe_model
from megatron_fsdp.runtime.engine import Engine
from megatron_fsdp.runtime.footprint import MemoryUse, footprints_of, memory_of
from megatron_fsdp.runtime.hang_settings import check_timeout
from megatron_fsdp.runtime.inspect import full_gradients, full_parameters
from megatron_fsdp.runtime.observer import Observer, Phase
from megatron_fsdp.runtime.schedule import ROOT
from megatron_fsdp.runtime.sync import SyncMode
from megatron_fsdp.unit.grad_slot import GRAD
from megatron_fsdp.unit.param_group import ParameterGroup


class Reports:
    """Read-only views of a sharded model."""

    _engine: Engine
    _assembly: Assembly
    _switches: Switches
    _mode: SyncMode
    _bucket_numel: int | None
    _gathers_at_once: bool
    module: nn.Module
    dist_index: FSDPDistributedIndex
    _config: DistributedDataParallelConfig
    mp_policy: MixedPrecisionPolicy
    fsdp_unit_modules: Sequence[type[nn.Module] | str] | str | None
    _hang_log: HangLog | None = None

    @property
    def raw_param(self) -> dict[str, nn.Parameter]:
        """The full compute parameters by canonical name; their values are valid while their unit is gathered."""
        return {
            name: param for group in self._engine.groups() for name, param in zip(group.names, group.full, strict=True)
        }

    @property
    def param_to_name(self) -> dict[nn.Parameter, str]:
        """Canonical name of every parameter object, sharded and full."""
        return {
            param: name
            for group in self._engine.groups()
            for params in (group.full, group.sharded)
            for name, param in zip(group.names, params, strict=True)
        }

    @property
    def decouples_gradients(self) -> bool:
        """Whether parameters show their gradients as `.decoupled_grad`."""
        return any(group.grad_attribute != GRAD for group in self._engine.groups())

    def parameter_groups(self) -> list[ParameterGroup]:
        """All parameter groups, in unit order."""
        return self._engine.groups()

    def sharded_names(self) -> dict[int, str]:
        """Canonical name of each sharded parameter by its id."""
        return {
            id(param): name
            for group in self._engine.groups()
            for name, param in zip(group.names, group.sharded, strict=True)
        }

    def shard_like(self, param: torch.Tensor, full: torch.Tensor) -> DTensor:
        """This rank's piece of a full tensor, sharded as a sharded parameter is; a copy, in the tensor's dtype."""
        group, index = self._engine.places[id(param)]
        return group.shard_like(index, full)

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """All main weights, whole, by canonical name, on every rank. Collective."""
        with self._engine.observers.during(Phase.WHOLE, ROOT):
            return full_parameters(self._engine)

    def full_gradients(self) -> dict[str, torch.Tensor | None]:
        """All gradients, whole, by canonical name, on every rank; None where `.grad` is None. Collective."""
        with self._engine.observers.during(Phase.WHOLE, ROOT):
            return full_gradients(self._engine)

    # ---- watching ----------------------------------------------------------------------------------------------

    def observe(self, observer: Observer) -> None:
        """Tell somebody of every phase and every collective of this model on this rank, until `stop_observing`."""
        self._engine.observers.add(observer)

    def stop_observing(self, observer: Observer) -> None:
        """Tell them no longer."""
        self._engine.observers.remove(observer)

    def check_lifetimes(self) -> None:
        """Check every use of borrowed memory from now on, and poison what is released; for debugging (lifetimes.md).

        Results stay the same, bit for bit. Weights that are gathered now are gathered again at their next use.

        Raises:
            ScheduleError: A forward or backward is under way.
        """
        self._engine.check_lifetimes()

    def log_for_hangs(self, folder: str | os.PathLike[str], *, timeout_s: float | None = None) -> None:
        """Keep a log of what this rank does last, so that a hang can be explained: see `docs/hangs.md`. Collective.

        Args:
            folder: Where the logs of all ranks go, one file each; one that all ranks see, where there is one. `mfsdp
                hang FOLDER` reads it, at any time and from any machine.
            timeout_s: Print the explanation when nothing has happened for so many seconds while a rank communicates;
                training is not stopped. None: only when asked, and with errors of communication.

        Raises:
            ConfigurationError: On every rank, where one cannot write, or `timeout_s` is no time; or this model keeps a
                log already.
        """
        if self._hang_log is not None:
            raise ConfigurationError(
                f"this model keeps a log for hangs in {self._hang_log.folder} already; call stop_logging_for_hangs() "
                "first"
            )
        log, problem = None, None
        try:
            check_timeout(timeout_s)
            log = HangLog(Path(folder), self._engine, timeout_s)
        except ConfigurationError as error:
            problem = error
        try:
            agree_over(self._engine.reaching_all, problem)
        except BaseException:
            if log is not None:
                log.withdraw()
            raise
        assert log is not None
        self._hang_log = log
        self.observe(log)

    def stop_logging_for_hangs(self) -> None:
        """Say goodbye in the log, if there is one, and write no more."""
        log, self._hang_log = self._hang_log, None
        if log is not None:
            self.stop_observing(log)
            log.close()

    def _log_as_told(self) -> None:
        """Keep a log where the environment says so; that it says the same everywhere was agreed before."""
        settings = self._assembly.hang_settings
        if settings is not None:
            self.log_for_hangs(settings.folder, timeout_s=settings.timeout_s)

    # ---- reports ------------------------------------------------------------------------------------------------

    def describe(self) -> Description:
        """What was made of model, ranks and options, read off the live objects; on this rank, without communication.

        `print(model.describe())` is for people, `.to_dict()` for programs (docs/describe.md).
        """
        return describe_model(self._subject())

    def _subject(self) -> Subject:
        return Subject(
            wrapper=type(self).__name__,
            module=self.module,
            assembly=self._assembly,
            switches=self._switches,
            index=self.dist_index,
            config=self._config,
            policy=self.mp_policy,
            auto_sync=self._mode.auto_sync,
            bucket_numel=self._bucket_numel,
            unit_modules=self.fsdp_unit_modules,
            gathers_at_once=self._gathers_at_once,
        )

    def unit_plan_lines(self) -> tuple[str, ...]:
        """The units and their sizes, for people."""
        return self._assembly.plan_lines

    def footprints(self) -> tuple[GroupFootprint, ...]:
        """One entry per parameter group, as the formulas of `megatron_fsdp.accounting` take them."""
        return footprints_of(self._engine)

    def traffic(self) -> Traffic:
        """What this rank has sent for this model so far."""
        return self._engine.traffic.copy()

    def traffic_by_axis(self) -> dict[str, Traffic]:
        """What this rank has sent along each data-parallel axis so far, by the name of its mesh dimension."""
        return {name: traffic.copy() for name, traffic in self._engine.traffic_by_axis.items()}

    def memory(self) -> MemoryUse:
        """What the engine holds on this rank now."""
        return memory_of(self._engine)
