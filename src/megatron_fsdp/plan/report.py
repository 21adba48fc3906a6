"""Reports of a plan: tables and JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from enum import Enum
from itertools import groupby
from typing import Any

import torch

from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import Offload
from megatron_fsdp.config.precision import resolve_precision
from megatron_fsdp.describe.text import in_bytes
from megatron_fsdp.plan.machine import Machine
from megatron_fsdp.plan.planning import Plan, Recommendation, ranks_that_fit
from megatron_fsdp.plan.setup import Setup

Row = tuple[str, ...]
Table = tuple[Row, list[Row]]
"""The titles of the columns, and the cells of each row."""


def plan_dict(plan: Plan, tried: Recommendation | None = None) -> dict[str, Any]:
    """Return the plan, and the others that were tried, as JSON values in bytes, seconds and elements."""
    memory, setup, work = plan.memory, plan.setup, plan.workload
    fields: dict[str, Any] = {
        "model": {
            "name": work.name,
            "class": work.class_name,
            "parameters": work.total_numel,
            "parameters_of_rank": plan.model.numel,
            "units": len(plan.model.units) - 1,
            "units_found_by": plan.model.source,
            "padding_fraction": plan.model.padding_fraction,
        },
        "setup": setup_dict(setup),
        "machine": asdict(plan.machine),
        "workload": {"tokens_per_rank_and_microbatch": work.tokens, "notes": list(plan.notes)},
        "memory": {
            "held": {**memory.held, "total": memory.held_bytes},
            "offloaded": memory.offloaded_bytes,
            "inputs": memory.input_bytes,
            "pool": [] if plan.model.memory.pool is None else list(map(str, plan.model.memory.pool.blocks)),
            "peak": {**vars(memory.peak), "total": memory.peak_bytes},
            "activations_kept_for_backward": plan.profile.kept_bytes,
            "host_bytes_of_a_save_in_the_background": memory.saving_bytes,
            "usable": plan.machine.usable_bytes,
            "fits": plan.fits,
        },
        "traffic_per_step": [asdict(axis) for axis in plan.traffic],
        "time": {
            "step_s": plan.step_s,
            "exposed_s": plan.step.exposed_s,
            "exposed_fraction": plan.exposed_fraction,
            "tokens_per_s": plan.tokens_per_s,
            "tokens_per_s_per_rank": plan.tokens_per_s / setup.ranks.world,
            "model_flops_utilisation": plan.utilisation,
            "communication_hides_from_tokens": plan.hidden_from_tokens,
            "host_step_s": plan.host_step_s,
            "offload_hides_from_tokens": plan.hides_offload_from_tokens,
        },
        "timeline": [{**vars(moment), "total_bytes": moment.total_bytes} for moment in plan.step.moments],
        "flags": flags(plan),
        "without_flags": without_flags(plan),
    }
    if tried is not None:
        fields["tried"] = [
            {
                "setup": setup_dict(each.setup),
                "peak_bytes": each.memory.peak_bytes,
                "fits": each.fits,
                "step_s": each.step_s,
                "exposed_fraction": each.exposed_fraction,
            }
            for each in tried.plans
        ]
    return fields


def setup_dict(setup: Setup) -> dict[str, Any]:
    """Return the setup as JSON values."""
    fields = asdict(setup, dict_factory=lambda items: {name: _plain(value) for name, value in items})
    return {**fields, "ranks": {**fields["ranks"], "world": setup.ranks.world}, "optimizer": setup.optimizer.name}


def _plain(value: Any) -> Any:
    """Return a JSON value: enumeration members and dtypes by name."""
    if isinstance(value, Enum):
        return value.name
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def tried_table(tried: Recommendation) -> Table:
    """List the plans that were tried; the best is marked."""
    rows: list[Row] = []
    for plan in tried.plans:
        setup, ranks = plan.setup, plan.setup.ranks
        rows.append(
            (
                "*" if plan is tried.best else "",
                setup.strategy.name,
                setup.outer.name if setup.outer is not None else "",
                f"{ranks.dp_outer} x {ranks.inner}" if ranks.dp_outer > 1 else str(ranks.inner),
                setup.recompute,
                in_bytes(plan.memory.offloaded_bytes) if plan.memory.offloaded_bytes else "",
                in_bytes(plan.memory.peak_bytes),
                "yes" if plan.fits else "no",
                f"{plan.step_s:.3f} s",
                f"{100 * plan.exposed_fraction:.1f} %",
            )
        )
    return ("", "strategy", "outer", "ranks", "recompute", "host", "peak", "fits", "step", "exposed"), rows


def facts(plan: Plan) -> list[tuple[str, str]]:
    """List the subject of the plan, as names and values."""
    setup, ranks, work, pool = plan.setup, plan.setup.ranks, plan.workload, plan.model.memory.pool
    sizes = " x ".join(f"{name} {size}" for name, size in vars(ranks).items() if size > 1 and name != "ep") or "1 rank"
    experts = f", experts over {ranks.ep}" if ranks.ep > 1 else ""
    outer = f", outer {setup.outer.name}" if setup.outer is not None else ""
    own = "" if plan.model.numel == work.total_numel else f", {plan.model.numel:,} of them on the place of a rank"
    batches = "1 microbatch" if setup.microbatches == 1 else f"{setup.microbatches} microbatches"
    found = [
        ("model", f"{work.name} ({work.class_name}): {work.total_numel:,} parameters{own}"),
        ("units", f"{len(plan.model.units) - 1} besides the root ({plan.model.source})"),
        ("ranks", f"{ranks.world:,}: {sizes}{experts}"),
        ("strategy", f"{setup.strategy.name}{outer}; recompute {setup.recompute}; {setup.optimizer.name}"),
        ("batch", f"{work.tokens:,} tokens per rank and microbatch, {batches} per step"),
    ]
    if setup.policy.weight_formats:
        formats = ", ".join(f"{form} ({pattern})" for pattern, form in setup.policy.weight_formats.items())
        found.append(("weights", f"gathered as {formats}"))
    if setup.offload:
        found.append(("offload", str(setup.offload)))
    if pool is not None:
        sizes_of = Counter[str]()
        for block in pool.blocks:
            sizes_of[block.use.value] += block.num_bytes
        uses = ", ".join(f"{use} {in_bytes(size)}" for use, size in sizes_of.items())
        taken = f"{in_bytes(pool.num_bytes)} are taken when wrapping, and keep their addresses: {uses}"
        found.append(("pool", taken))
    found.append(("padding", f"{100 * plan.model.padding_fraction:.4f} % of what is sharded"))
    return [*found, *(("note", note) for note in plan.notes)]


def tables(plan: Plan, *, with_units: bool) -> Iterator[Table]:
    """Yield tables: units if wanted, memory at the peak, and traffic if any; only the column "class" holds words."""
    if with_units:
        rows: list[Row] = []
        same = groupby(plan.model.units, key=lambda unit: (unit.class_name, unit.numel, unit.padding_numel))
        for (class_name, numel, padding), run in same:
            names = [unit.name or "(root)" for unit in run]
            shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
            rows.append((shown, class_name, str(len(names)), f"{numel:,}", f"{padding:,}"))
        yield ("units", "class", "count", "parameters each", "padding each"), rows
    memory, peak = plan.memory, plan.memory.peak
    held = {**memory.held, "main_gradients": peak.gradient_bytes}
    at_peak = {
        **{name.replace("_", " "): count for name, count in held.items() if count},
        "inputs": memory.input_bytes,
        "gathered weights": peak.gathered_bytes,
        "buckets and scratch": peak.reduction_bytes,
        "reductions and casts": peak.passing_bytes,
        f"activations ({moment_words(peak.label)})": peak.activation_bytes,
        "peak": memory.peak_bytes,
        "usable": plan.machine.usable_bytes,
        **({"in host memory": memory.offloaded_bytes} if memory.offloaded_bytes else {}),
    }
    yield ("memory of a rank at the peak", "bytes"), [(name, in_bytes(count)) for name, count in at_peak.items()]
    if plan.traffic:
        columns = ("traffic of a step", "gathers", "reductions", "sent by a rank", "on the wire")
        yield (
            columns,
            [
                (
                    each.axis,
                    f"{each.gathers:,}",
                    f"{each.reductions:,}",
                    in_bytes(each.sent_bytes),
                    f"{1e3 * each.seconds:,.1f} ms",
                )
                for each in plan.traffic
            ],
        )


def moment_words(label: str) -> str:
    """Name a moment of a step: `B0` is the backward of the root, `F3>` the forward of unit 3, `E` after backward."""
    kind, unit = label[:1], label[1:].rstrip("<>+")
    passes = {"F": "forward", "B": "backward"}
    if kind in passes and unit.isdecimal():
        return f"peak: {passes[kind]} of {'the root' if unit == '0' else f'unit {unit}'}"
    return {"E": "peak: end of backward"}.get(label.rstrip("+"), f"peak: {label}")


def time_rows(plan: Plan) -> list[tuple[str, str]]:
    """List the speeds, under the machine's assumptions."""
    hidden, enough, speed = plan.hidden_from_tokens, plan.hides_offload_from_tokens, plan.tokens_per_s
    found = [("step", f"{plan.step_s:.3f} s")]
    if plan.bubble:
        found.append(("pipeline bubble", f"{100 * plan.bubble:.1f} % of the work"))
    found += [
        ("exposed communication", f"{plan.step.exposed_s:.3f} s ({100 * plan.exposed_fraction:.1f} %)"),
        ("communication is hidden from", "nothing is sent" if hidden is None else f"{hidden:,.0f} tokens per rank on"),
    ]
    if enough is not None:
        found += [
            ("step on the host, and copies", f"{plan.host_step_s:.3f} s of each step"),
            ("the host's step takes under 10 % from", f"{enough:,.0f} tokens per rank and step on"),
        ]
    copy = f"{in_bytes(plan.memory.saving_bytes)} of host memory for its copy; none if at once"
    return [
        *found,
        ("tokens per second", f"{speed:,.0f} ({speed / plan.setup.ranks.world:,.0f} per rank)"),
        ("model FLOP utilisation", f"{100 * plan.utilisation:.1f} %"),
        ("save in the background", copy),
    ]


def machine_table(machines: Iterable[Machine]) -> Table:
    """Return a table of machine presets, with the figures of one device."""
    columns = ("machine", "memory", "of the host", "TFLOP/s", "memory TB/s", "link GB/s", "network GB/s")
    rows: list[Row] = [
        (
            machine.name,
            in_bytes(machine.memory_bytes),
            in_bytes(machine.host_memory_bytes),
            f"{machine.flops / 1e12:,.0f}",
            f"{machine.memory_bytes_per_s / 1e12:.2f}",
            f"{machine.link_bytes_per_s / 1e9:,.0f}",
            f"{machine.network_bytes_per_s / 1e9:,.0f}",
        )
        for machine in machines
    ]
    return columns, rows


def machine_words(machine: Machine) -> str:
    """Describe the machine's assumptions in one line."""
    return (
        f"{machine.name}: {machine.flops / 1e12:,.0f} TFLOP/s x {machine.flops_efficiency:g}, memory "
        f"{machine.memory_bytes_per_s / 1e12:.2f} TB/s x {machine.memory_efficiency:g}, link "
        f"{machine.link_bytes_per_s / 1e9:,.0f} GB/s and network {machine.network_bytes_per_s / 1e9:,.0f} GB/s per "
        f"device x {machine.network_efficiency:g}, {machine.devices_per_node} devices per node of "
        f"{in_bytes(machine.memory_bytes)}, {in_bytes(machine.host_memory_bytes)} of the host for each"
    )


def advice(plan: Plan) -> str:
    """Suggest changes for a plan that does not fit."""
    ranks = ranks_that_fit(plan)
    offloaded, room = plan.memory.offloaded_bytes, in_bytes(plan.machine.host_memory_bytes)
    host = "offload state to the host (--offload main_weights)"
    if not plan.fits_host:
        host = (
            f"give the host more memory ({in_bytes(offloaded)} are offloaded to it, and it has {room} for each device; "
            f"if yours has more, say so: --host-memory {math.ceil(offloaded / 1e9)}GB)"
        )
    more = f"use more ranks (about {ranks:,} with every rank holding a share), d" if ranks else "d"
    return (
        f"Nothing fits; what follows is the arrangement that takes least. To fit, {more}ivide the model further (--tp, "
        f"--pp, --ep), {host}, shorten or divide sequences (--sequence-length, --cp), recompute more (--recompute "
        "full), or use devices with more memory (--machine)."
    )


def verdict(plan: Plan) -> str:
    """Return one sentence: the plan fits, or the bytes it lacks."""
    usable, offloaded = plan.machine.usable_bytes, plan.memory.offloaded_bytes
    left = usable - plan.memory.peak_bytes
    room = in_bytes(plan.machine.host_memory_bytes)
    host = f"{in_bytes(offloaded)} are offloaded to the host, which has {room} for a device" if offloaded else ""
    if left < 0:
        return f"It does not fit: {in_bytes(-left)} too much at the peak{host and f'; {host}'}."
    if not plan.fits_host:
        return f"It does not fit: {host}."
    return f"It fits: {in_bytes(left)} of {in_bytes(usable)} are left at the peak{host and f'; {host}'}."


def flags(plan: Plan) -> list[str]:
    """Return the flags for the trainer and for Megatron-LM's scripts."""
    setup, ranks, policy, recompute = plan.setup, plan.setup.ranks, plan.setup.policy, plan.setup.recompute
    compute, offload = _compute_dtype(plan), _offload_words(setup.offload)
    resolved = resolve_precision(policy, compute)
    is_usual = resolved.main_grads == resolved.grad_comm == torch.float32  # so does the trainer by default
    is_full, is_hybrid = recompute == "full", ranks.dp_outer > 1
    keeps_transposed = setup.keep_fp8_transpose_cache and policy.weight_formats == {"*": "fp8_compute"}
    formats = [f"{pattern}={form or 'none'}" for pattern, form in policy.weight_formats.items()]
    wanted: dict[str, bool | Sequence[object]] = {  # whether they are, or their values
        "--use-megatron-fsdp": True,
        "--data-parallel-sharding-strategy": [setup.strategy.name],
        "--use-distributed-optimizer": setup.strategy is not ShardingStrategy.no_shard,
        "--num-distributed-optimizer-instances": is_hybrid and [ranks.dp_outer],
        "--outer-dp-sharding-strategy": is_hybrid and [setup.outer_strategy.name],
        "--tensor-model-parallel-size": ranks.tp > 1 and [ranks.tp],
        "--pipeline-model-parallel-size": ranks.pp > 1 and [ranks.pp],
        "--context-parallel-size": ranks.cp > 1 and [ranks.cp],
        "--expert-model-parallel-size": ranks.ep > 1 and [ranks.ep],
        "--sequence-parallel": ranks.tp > 1 and setup.sequence_parallel,
        "--bf16": compute is torch.bfloat16,
        "--fp16": compute is torch.float16,
        "--overlap-param-gather": not setup.strategy.shards_compute_weights and setup.memory.forward_prefetch_units > 0,
        "--overlap-grad-reduce": not setup.strategy.shards_gradients and setup.overlap_grad_reduce,
        "--recompute-granularity": recompute in ("full", "selective") and [recompute],
        "--recompute-method": is_full and ["uniform"],
        "--recompute-num-layers": is_full and [1],
        "--optimizer-cpu-offload": offload == ["main_weights"],
        "--megatron-fsdp-offload": offload != ["main_weights"] and offload,
        "--optimizer": setup.optimizer.name in _OF_TRAINER and [_OF_TRAINER[setup.optimizer.name]],
        "--fp8-param-gather": keeps_transposed,
        "--keep-fp8-transpose-cache": keeps_transposed,
        "--megatron-fsdp-weight-format": not keeps_transposed and formats,
        "--megatron-fsdp-main-params-dtype": policy.main_params_dtype is not torch.float32
        and [_dtype_word(policy.main_params_dtype)],
        "--megatron-fsdp-main-grads-dtype": not is_usual and [_dtype_word(policy.main_grads_dtype)],
        "--megatron-fsdp-grad-comm-dtype": not is_usual and [_dtype_word(policy.grad_comm_dtype)],
    }
    return [
        str(word) for flag, values in wanted.items() if values for word in (flag, *(() if values is True else values))
    ]


def _offload_words(offload: Offload) -> list[str]:
    """Return the values of `--megatron-fsdp-offload`; main weights stand for their gradients and state."""
    kinds = ("main_weights", "compute_weights") if offload.main_weights else ("optimizer_state", "compute_weights")
    found = {kind: getattr(offload, kind) for kind in kinds}
    return [kind if part == 1 else f"{kind}={part:g}" for kind, part in found.items() if part]


def without_flags(plan: Plan) -> list[str]:
    """List the parts of a plan for which the trainer has no flag."""
    setup = plan.setup
    is_usual = setup.optimizer.name in ("adamw-fused", *_OF_TRAINER)
    accumulation = "every" if setup.strategy.shards_gradients else "last"
    found = {
        f"--optimizer {setup.optimizer.name} (its AdamW is adamw-fused)": not is_usual,
        f"recompute {setup.recompute}": setup.recompute not in ("none", "full", "selective"),
        "--fp8": setup.fp8,
        "--virtual-stages": setup.virtual_stages > 1,
        "--overlap-exchanges": setup.overlap_exchanges,
        f"--accumulation {setup.accumulation}": setup.microbatches > 1 and setup.accumulation != accumulation,
    }
    return [what for what, is_left_out in found.items() if is_left_out]


def _compute_dtype(plan: Plan) -> torch.dtype:
    """Return the dtype of most compute weights."""
    sizes = Counter[torch.dtype]()
    for group in plan.model.groups:
        sizes[group.precision.compute] += group.layout.payload_numel
    return max(sizes, key=lambda dtype: sizes[dtype])


def _dtype_word(dtype: torch.dtype | None) -> str:
    """Return a dtype in the spelling of the trainer's flags."""
    return "auto" if dtype is None else str(_plain(dtype))


_OF_TRAINER = {"muon": "muon", "adamw8bit": "adamw8bit", "momentum": "sgd", "sgd": "sgd"}
"""Optimizers that the trainer's flag names; AdamW is its default."""
