"""One pipeline stage on paper against the stage that automodel cuts, and against arithmetic."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from megatron_fsdp.automodel.pipeline_parallel.pipeline import build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig, split_layers
from megatron_fsdp.automodel.pipeline_parallel.stages import cut_stage
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.decoder_parts import copy_of_modules
from megatron_fsdp.plan.machine import find_machine
from megatron_fsdp.plan.pipeline_share import Stage, layers_of_stage
from megatron_fsdp.plan.planning import plan_workload
from megatron_fsdp.plan.setup import Backend, ParallelRanks, Setup
from megatron_fsdp.plan.timing import saved_microbatches
from tests.automodel.small_models import FAMILIES, build
from tests.conftest import RunRanks
from tests.plan.shares import ROWS, SEQUENCE, WIDER, profile, share, without_memory
from tests.support.arrangements import mesh_of
from tests.support.live_bytes import LiveBytes

STAGES = 3  # of four layers: two, one, one


@given(num_layers=st.integers(1, 200), stages=st.integers(1, 40))
def test_layers_are_divided_as_in_pipelines(num_layers: int, stages: int) -> None:
    if num_layers < stages:
        with pytest.raises(ParallelSizeError, match=f"pp={stages}"):
            layers_of_stage(num_layers, Stage(0, stages))
        return
    found = tuple(layers_of_stage(num_layers, Stage(index, stages)) for index in range(stages))
    assert found == split_layers(num_layers, stages)


@pytest.mark.parametrize("kind", FAMILIES)
def test_parameters_are_those_of_a_real_stage(kind: str) -> None:
    model = without_memory(kind)
    for stage in range(STAGES):
        start, stop = split_layers(4, STAGES)[stage]
        real = cut_stage(copy_of_modules(model), start, stop, stage == 0, stage == STAGES - 1)
        found = share(model, stage, pp=STAGES).module
        assert _shapes(found) == _shapes(real)


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in module.named_parameters()}


def _real_peak(kind: str, stage: int) -> int:
    model = build(kind)
    hidden = model.config.hidden_size
    start, stop = split_layers(4, STAGES)[stage]
    is_last = stage == STAGES - 1
    part: Any = cut_stage(model, start, stop, stage == 0, is_last)
    for param in part.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    tokens = torch.arange(ROWS * SEQUENCE).view(ROWS, SEQUENCE) % 96
    received = tokens if stage == 0 else torch.zeros(ROWS, SEQUENCE, hidden, requires_grad=True)
    gradient = torch.zeros(ROWS, SEQUENCE, hidden)
    with LiveBytes() as live:
        output = part(received)
        if is_last:
            loss = nn.functional.cross_entropy(output.float()[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        else:
            output.backward(gradient)
    return live.peak_bytes


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("stage", range(STAGES))
def test_peaks_are_those_of_a_real_stage(kind: str, stage: int) -> None:
    """Live bytes within 3 %; schedules hold what a stage gave until its backward is over."""
    planned = profile(share(without_memory(kind), stage, pp=STAGES), Backend.GLOO, pp=STAGES)
    assert planned.peak_bytes == pytest.approx(_real_peak(kind, stage), rel=0.03)


def _peaks_of_pipeline(count: int) -> tuple[int, int]:
    """Live bytes of the first step, which makes buffers, and of the second."""
    mesh = mesh_of((2,), ("pp",))
    config = PipelineConfig("1f1b", pp_microbatch_size=ROWS)
    pipeline = build_pipeline(
        build("llama", **WIDER), mesh, config, parallelize_stage=lambda part: part, device=torch.device("cpu")
    )
    for param in pipeline.parameters():
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    tokens = torch.arange(count * ROWS * SEQUENCE).view(count * ROWS, SEQUENCE) % 96
    peaks = []
    for _ in range(2):
        with LiveBytes() as live:
            pipeline.step(tokens, tokens)
        peaks.append(live.peak_bytes)
    return peaks[0], peaks[1]


def test_memory_is_that_of_a_real_pipeline(run_ranks: RunRanks) -> None:
    """1F1B with four microbatches: live bytes of a step within 3 %, buffers to the byte."""
    count, model = 4, without_memory("llama", **WIDER)
    setup = Setup(ParallelRanks(1, pp=2), microbatches=count, backend=Backend.GLOO)
    for stage, (first, later) in enumerate(run_ranks(2, _peaks_of_pipeline, count)):
        workload = share(model, stage, pp=2)
        planned = profile(workload, Backend.GLOO, pp=2)
        sending = planned.input_bytes if stage else 0
        found = planned.peak_bytes + saved_microbatches(setup, stage) * planned.kept_bytes + sending
        assert found == pytest.approx(later, rel=0.03)
        assert first - later == count * workload.received_bytes


@pytest.mark.full(short=["gemma3"])
@pytest.mark.parametrize("kind", ["llama_tied", "gemma3", "deepseek_v3"])
def test_stages_together_compute_what_one_rank_does(kind: str) -> None:
    model = without_memory(kind)
    whole = profile(share(model), Backend.NCCL)
    parts = [profile(share(model, stage, pp=STAGES), Backend.NCCL, pp=STAGES) for stage in range(STAGES)]
    assert sum(part.forward_flops for part in parts) == whole.forward_flops
    assert sum(part.backward_flops for part in parts) == whole.backward_flops


def test_what_stages_send() -> None:
    sent = ROWS * SEQUENCE * 32 * 4
    found = [
        [
            (x.axis, x.unit, x.sent_bytes, x.in_backward, x.count)
            for x in share(without_memory("llama"), s, pp=3).exchanges
        ]
        for s in range(3)
    ]
    assert found == [
        [("pp", "model.layers.1", sent, False, 1)],
        [("pp", "model.layers.2", sent, False, 1), ("pp", "model.layers.2", sent, True, 1)],
        [("pp", "model.layers.3", sent, True, 1)],
    ]


def test_sizes_of_stages_and_of_the_whole() -> None:
    model = without_memory("llama_tied")
    workloads = [share(model, stage, pp=2) for stage in range(2)]
    own = [sum(param.numel() for param in workload.module.parameters()) for workload in workloads]
    total = sum(param.numel() for param in model.parameters())
    assert [workload.total_numel for workload in workloads] == [total, total]
    assert sum(own) == total + 96 * 32  # both ends hold the tied matrix


@pytest.mark.parametrize(("stage", "microbatches", "saved"), [(0, 8, 3), (1, 8, 2), (3, 8, 0), (0, 2, 1), (2, 2, 1)])
def test_microbatches_in_flight(stage: int, microbatches: int, saved: int) -> None:
    setup = Setup(ParallelRanks(1, pp=4), microbatches=microbatches)
    assert saved_microbatches(setup, stage) == saved


def test_memory_of_a_stage_holds_the_microbatches_in_flight() -> None:
    model = without_memory("llama")
    for stage in range(2):
        plans = [
            plan_workload(
                share(model, stage, pp=2), Setup(ParallelRanks(1, pp=2), microbatches=n), find_machine("h100")
            )
            for n in (1, 2)
        ]
        more = plans[1].memory.peak.activation_bytes - plans[0].memory.peak.activation_bytes
        assert more == (plans[0].profile.kept_bytes if stage == 0 else 0)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ParallelSizeError, match="4 layers cannot be cut into pp=5 stages"):
        share(without_memory("llama"), pp=5)
    with pytest.raises(ParallelSizeError, match="stage=2 does not exist; with pp=2"):
        share(without_memory("llama"), 2, pp=2)
    model = without_memory("llama")
    model.adapter = nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigurationError, match=r"parts of no known place \(adapter\); use pp=1"):
        share(model, pp=2)
