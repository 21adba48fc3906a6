"""The plan of one run: what a rank holds, sends and waits for, from a workload, a setup and a machine."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

from megatron_fsdp.plan.activations import profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile
from megatron_fsdp.plan.experts_stand_in import fused_experts
from megatron_fsdp.plan.kernels import Kernels
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.memory import RankMemory, memory_of
from megatron_fsdp.plan.planned_model import PlannedModel, plan_model
from megatron_fsdp.plan.replay import ReplayedStep, replay_step
from megatron_fsdp.plan.setup import Setup
from megatron_fsdp.plan.timing import groups_of, step_costs, tokens_where_hidden
from megatron_fsdp.plan.wires import Transfer, Wire
from megatron_fsdp.plan.workload import Exchange, Workload


@dataclass(frozen=True)
class AxisTraffic:
    """What one rank does on one axis in one step.

    Attributes:
        axis: "dp_shard", "dp_outer", "tp", "cp", "ep" or "pp".
        gathers: Collectives that bring weights (or activations) together.
        reductions: Collectives that add up.
        sent_bytes: By this rank.
        seconds: That they take on the wire.
    """

    axis: str
    gathers: int
    reductions: int
    sent_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """One run on paper.

    Attributes:
        workload: What a rank computes.
        model: Its units and layouts.
        machine: Where.
        profile: Activations and operations of a microbatch.
        step: The replayed step of this rank.
        memory: Its bytes.
        traffic: Per axis.
        hidden_from_tokens: Tokens per rank and microbatch from which communication hides behind compute; None where
            nothing travels.
    """

    workload: Workload
    model: PlannedModel
    machine: Machine
    profile: ComputeProfile
    step: ReplayedStep
    memory: RankMemory
    traffic: tuple[AxisTraffic, ...]
    hidden_from_tokens: float | None

    @property
    def setup(self) -> Setup:
        """What was chosen."""
        return self.model.setup

    @property
    def fits(self) -> bool:
        """Whether the peak fits into what a model can have of a device."""
        return self.memory.peak_bytes <= self.machine.usable_bytes

    @property
    def step_s(self) -> float:
        """Seconds of a step; of the busiest pipeline stage, with the bubble (Huang et al., GPipe, 2019)."""
        setup = self.setup
        bubble = (setup.microbatches + setup.ranks.pp - 1) / setup.microbatches
        return self.step.seconds * bubble

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks together."""
        ranks = self.setup.ranks
        sequences = ranks.data_parallel * ranks.cp
        return self.workload.tokens * sequences * self.setup.microbatches / self.step_s

    @property
    def model_flops(self) -> float:
        """Operations of one microbatch on this rank, recomputation left out (the F of MFU)."""
        return self.profile.forward_flops + self.profile.backward_flops

    @property
    def utilisation(self) -> float:
        """Model operations over what the devices could do in the time of a step (MFU; Chowdhery et al., PaLM, 2022)."""
        return self.model_flops * self.setup.microbatches / (self.step_s * self.machine.flops)

    @property
    def exposed_fraction(self) -> float:
        """Part of the step that waits for data-parallel collectives."""
        return self.step.exposed_s / self.step.seconds if self.step.seconds else 0.0


def plan_workload(workload: Workload, setup: Setup, machine: Machine, profile: ComputeProfile | None = None) -> Plan:
    """Plan a run.

    Args:
        workload: What one rank computes.
        setup: Ranks, strategy and options.
        machine: What it runs on.
        profile: Of this workload under this recomputation, where it is known from an earlier plan; None: find out.

    Raises:
        ConfigurationError: As sharding the model with these options would.
    """
    model = plan_model(workload.module, setup, workload.unit_modules)
    if profile is None:
        profile = profile_workload(workload, model)
    step = replay_step(model, profile, step_costs(model, profile, workload, machine))
    received = setup.microbatches * workload.received_bytes
    return Plan(
        workload,
        model,
        machine,
        profile,
        step,
        memory_of(
            model,
            step,
            profile.input_bytes + received,
            workload.buffer_bytes,
            workload.saved_buffer_bytes,
            profile.used,
        ),
        (*_data_parallel(step.transfers), *_model_parallel(workload.exchanges, setup, machine)),
        tokens_where_hidden(model, profile, workload, machine),
    )


def profile_workload(workload: Workload, model: PlannedModel) -> ComputeProfile:
    """Run a workload once without memory, with the kernels of the back end's devices."""
    setup = model.setup
    kernels: Kernels = "cpu" if setup.backend.is_on_cpu else "cuda"
    may_lack_experts = setup.ranks.pp > 1 and not fused_experts(workload.module)  # as first stages do
    with nullcontext() if workload.surroundings is None else workload.surroundings(kernels):
        return profile_compute(
            workload.module,
            workload.inputs,
            unit_names=[unit.name for unit in model.units],
            loss_fn=workload.loss_fn,
            kernels=kernels,
            recompute=setup.recompute,
            expert_ranks=1 if may_lack_experts else setup.ranks.ep,
        )


def _data_parallel(transfers: tuple[Transfer, ...]) -> list[AxisTraffic]:
    found = []
    for axis, wire in (("dp_shard", Wire.INNER), ("dp_outer", Wire.OUTER)):
        own = [transfer for transfer in transfers if transfer.wire is wire]
        gathers = sum(transfer.purpose.startswith("gather") for transfer in own)
        if own:
            found.append(
                AxisTraffic(
                    axis,
                    gathers,
                    len(own) - gathers,
                    sum(transfer.sent_bytes for transfer in own),
                    sum(transfer.end_s - transfer.start_s for transfer in own),
                )
            )
    return found


def _model_parallel(exchanges: tuple[Exchange, ...], setup: Setup, machine: Machine) -> list[AxisTraffic]:
    groups = groups_of(setup.ranks)
    found = []
    for axis in dict.fromkeys(exchange.axis for exchange in exchanges):
        own = [exchange for exchange in exchanges if exchange.axis == axis]
        repeats = [setup.microbatches * sum(exchange.runs(setup.recompute)) for exchange in own]
        seconds = [machine.collective_s(exchange.sent_bytes, *groups[axis]) for exchange in own]
        found.append(
            AxisTraffic(
                axis,
                0,
                sum(repeats),
                sum(count * exchange.sent_bytes for count, exchange in zip(repeats, own, strict=True)),
                sum(count * each for count, each in zip(repeats, seconds, strict=True)),
            )
        )
    return found
