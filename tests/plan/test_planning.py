"""Plans against published figures, the formulas and figures worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.config.ddp_config import ShardingStrategy
from megatron_fsdp.config.engine_options import Offload
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.optimizer import count_kinds, kinds_of
from megatron_fsdp.plan.machine import GIB, MACHINES, Machine, find_machine
from megatron_fsdp.plan.models import PRESETS
from megatron_fsdp.plan.planning import make_workload, plan, plan_workload, recommend
from megatron_fsdp.plan.replay import INNER, OUTER, Links
from megatron_fsdp.plan.setup import ParallelRanks, Setup, make_setup
from megatron_fsdp.plan.sharded import (
    held_bytes,
    muon_matrices,
    muon_work,
    offloaded_bytes,
    optimizer_bytes,
    plan_model,
)
from tests.support.on_ranks import on_ranks
from tests.support.zoo import TOWER_FEATURES, Floor, Tower, tower_loss
from tools.published_runs import PUBLISHED

BF16 = torch.bfloat16


def _sum(output: torch.Tensor) -> torch.Tensor:
    return output.float().sum()


def _tower(hidden: tuple[int, ...] = (32,) * 6) -> nn.Module:
    with torch.device("meta"):
        return Tower(hidden=hidden).to(BF16)


def _rows(count: int) -> torch.Tensor:
    return torch.empty(count, TOWER_FEATURES, dtype=BF16, device="meta")


@pytest.mark.parametrize(("strategy", "gigabytes"), [(0, 120.0), (2, 16.6), (3, 1.9)])
def test_persistent_bytes_of_the_zero_paper(strategy: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2019, figure 1: 7.5 billion parameters; ZeRO-1's 31.4 GB count a whole gradient."""
    model = nn.Linear(100_000, 75_000, bias=False, dtype=BF16, device="meta")
    inputs = torch.empty(1, 100_000, dtype=BF16, device="meta")
    found = plan(model, 64, strategy, inputs=inputs, loss_fn=_sum, fsdp_unit_modules=[])
    assert round(found.memory.held_bytes / 1e9, 1) == gigabytes


def test_figures_of_a_machine_enter_as_they_should() -> None:
    machine = Machine("toy", 4, 100, 10, 1e3, 1e2, 40.0, 10.0, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0)
    assert machine.usable_bytes == 90
    assert machine.compute_s(1000, 100) == 1000 / 500 + 100 / 50
    assert machine.collective_s(80, 4) == 2.0  # inside of a node
    assert machine.collective_s(80, 8) == 2.0  # four adapters of a node carry a ring each, as fast as the link
    assert machine.collective_s(80, 8, stride=4) == 8.0  # one member per node: its own adapter
    assert machine.collective_s(80, 1) == 0.0
    assert machine.but({"flops": 2e3}).compute_s(1000, 0) == 1.0
    with_hops = machine.but({"link_latency_s": 1.0, "network_latency_s": 10.0})
    assert with_hops.latency_s(4) == 2.0
    assert with_hops.latency_s(5) == 2.0 + 10.0  # one rank on a second node
    assert with_hops.latency_s(3, stride=2) == 1.0 + 10.0
    assert with_hops.latency_s(16) == 2.0 + 20.0
    assert with_hops.latency_s(8, stride=4) == 30.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"speed": 1.0}, "has no 'speed'"),
        ({"memory_bytes": math.inf}, "invalid memory_bytes=inf: give a finite number"),
        ({"flops_efficiency": 5.0}, "flops_efficiency=5.0 of machine 'h100' is a part"),
        ({"reserved_bytes": 1e12}, "leave nothing of"),
    ],
)
def test_figures_that_cannot_be_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        MACHINES["h100"].but(changes)


def test_collectives_of_one_wire_queue_and_only_waiting_is_exposed() -> None:
    links = Links(lambda axis, _is_expert, sent: sent / (10 if axis == INNER else 1))
    first = links.send(INNER, 0, 100, is_gather=True)
    second = links.send(INNER, 1, 50, is_gather=False)
    other = links.send(OUTER, 1, 3, is_gather=True)
    links.now_s += 12.0
    links.wait(first)
    links.wait(other)
    assert (links.now_s, links.exposed_s) == (12.0, 0.0)
    links.wait(second)
    assert (links.now_s, links.exposed_s) == (15.0, 3.0)
    assert [(t.start_s, t.end_s) for t in links.transfers] == [(0.0, 10.0), (10.0, 15.0), (0.0, 3.0)]
    assert links.send(INNER, 0, 0, is_gather=True) == links.now_s
    assert len(links.transfers) == 3


@pytest.mark.full
def test_the_recommendation_is_the_simplest_of_the_fastest_that_fit() -> None:
    workload = plan("llama-3.2-1b", 16, sequence_length=4096).workload
    machine = find_machine("h100")
    found = recommend(workload, Setup(ParallelRanks(16)), machine)
    assert found.best is not None
    assert found.best.fits
    fitting = [each for each in found.plans if each.fits]
    assert found.best.step_s <= 1.02 * min(each.step_s for each in fitting)
    earlier = fitting[: fitting.index(found.best)]
    assert all(each.step_s > 1.02 * min(other.step_s for other in fitting) for each in earlier)
    assert {each.setup.recompute for each in found.plans} == {"none", "full"}
    assert {(each.setup.ranks.dp_outer, each.setup.outer) for each in found.plans} == {
        (1, None),
        (2, ShardingStrategy.no_shard),
        (2, ShardingStrategy.optim),
    }
    small = recommend(workload, Setup(ParallelRanks(16)), machine.but({"memory_bytes": 5 * GIB}))
    assert small.best is None
    assert small.smallest.memory.peak_bytes == min(each.memory.peak_bytes for each in small.plans)


@pytest.mark.full
def test_predictions_are_near_what_was_measured_and_what_ran_fits() -> None:
    """Speeds of published runs within 15 %, 8 % in the mean; peaks within 16 %."""
    assert {run.name: run.error for run in PUBLISHED if abs(run.error) > 0.15} == {}
    assert sum(abs(run.error) for run in PUBLISHED) / len(PUBLISHED) < 0.08
    assert [run.name for run in PUBLISHED if not run.plan.fits] == []
    measured = [run for run in PUBLISHED if run.memory_gib is not None]
    assert len(measured) == 3
    for run in measured:
        assert run.plan.memory.peak_bytes / GIB == pytest.approx(run.memory_gib, rel=0.16), run.name


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"ranks": 0}, "dp_shard=0"),
        ({"ranks": {"dp_shard": 4, "dp": 2}}, "there is no axis 'dp'"),
        ({"ranks": {"dp_shard": 4, "ep": 3}}, "ep=3 does not divide the 4 ranks"),
        ({"ranks": 4, "outer_strategy": "optim"}, "needs an outer axis"),
        ({"ranks": {"dp_outer": 2, "dp_shard": 2}, "strategy": 0, "outer_strategy": 1}, "shards further"),
        ({"ranks": 4, "optimizer": "adam"}, "optimizer 'adam' is not known"),
        ({"ranks": {"dp_shard": 2, "tp": 2}, "optimizer": "adamw8bit"}, "leave tp and ep at 1"),
        ({"ranks": 4, "microbatches": 0}, "microbatches=0"),
        (
            {"ranks": {"dp_shard": 2, "tp": 2}, "recompute": "half"},
            "recompute='half' is not known; choose one of none, full, sel",
        ),
        ({"ranks": 2.0}, "ranks=2.0; give their number"),
        ({"ranks": 4, "sequence_length": 10**10}, "invalid sequence_length=10000000000: give"),
        ({"ranks": 4, "inputs": True, "micro_batch": 2}, "micro_batch=2 has no effect on inputs of your own"),
        ({"ranks": 4, "inputs": True, "dtype": torch.float16}, "dtype"),
        ({"ranks": 4, "loss_fn": torch.sum}, "loss_fn has no effect without inputs; give both"),
        (
            {"ranks": {"dp_shard": 2, "tp": 2}, "fsdp_unit_modules": ["torch.nn.Linear"]},
            "fsdp_unit_modules has no effect with tp=2",
        ),
        (
            {"ranks": {"dp_shard": 4, "tp": 2}, "inputs": True},
            "tp=2 cannot be planned for this model, since it has inputs of its own",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_is_refused_in_words(arguments: dict[str, object], words: str) -> None:
    given = dict(arguments)
    if given.pop("inputs", None):
        given["inputs"] = _rows(2)
    with pytest.raises(ConfigurationError, match=words):
        plan("llama-3.2-1b" if "inputs" not in given else _tower(), **given)  # type: ignore[arg-type]


def test_parameters_without_gradients_have_no_state() -> None:
    with torch.device("meta"):
        model = Tower(hidden=(32, 32)).to(BF16)
        model.register_module("unused", nn.Linear(TOWER_FEATURES, TOWER_FEATURES, bias=False, dtype=BF16))
    numel = sum(param.numel() for param in model.parameters())
    found = plan(model, 2, inputs=_rows(2), loss_fn=_sum, fsdp_unit_modules=[Floor], optimizer="adamw-fused")
    second = plan_workload(found.workload, replace(found.setup, device_rank=1), found.machine)
    held = [each.memory for each in (found, second)]
    assert [each.compute_weights for each in held] == [2 * numel // 2] * 2
    counters = 2 * 4 * (len(list(model.parameters())) - 1)
    assert sum(each.optimizer for each in held) == 8 * (numel - TOWER_FEATURES**2) + counters


# ---- muon on paper: the balance of published models, memory to the byte, and what a plan says of it ------------------


def test_heads_of_transformers_are_those_that_models_name() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, intermediate_size=64, **sizes))
        gpt2 = transformers.GPT2Model(
            transformers.GPT2Config(vocab_size=96, n_positions=32, n_embd=32, n_layer=1, n_head=4)
        )
        tower = nn.ModuleDict({"text": gpt2, "project": nn.Linear(32, 32, bias=False)})
        alike = transformers.BertForSequenceClassification(
            transformers.BertConfig(vocab_size=64, type_vocab_size=4, num_labels=4, intermediate_size=64, **sizes)
        )
    assert "head 1" in count_kinds(llama.parameters(), llama)
    assert "matrices 14" in count_kinds(llama.parameters(), llama)
    assert kinds_of([tower["project"].weight], tower) == ["matrices"]  # as wide as there are positions
    assert kinds_of([alike.classifier.weight], alike) == ["matrices"]  # as wide as there are types


def test_a_stack_counts_as_its_matrices() -> None:
    work = muon_work([(2, 4, 8), (4, 8)], 2)
    one = 5 * (4 * 4 * 4 * 8 + 2 * 4**3)
    assert (work.matrices, work.numel, work.flops, work.busiest_flops) == (3, 96, 3 * one, 2 * one)
    assert (work.imbalance, work.sent_bytes, work.largest_numel) == (4 / 3, 4 * 96 / 2, 32)


def test_results_go_to_all_replicas() -> None:
    config = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2}
    for arguments, replicas in (({}, 2), ({"outer_strategy": "optim"}, 1), ({"strategy": 0}, 4)):
        work = plan(config, {"dp_outer": 2, "dp_shard": 2}, optimizer="muon", **arguments).model.muon
        assert work is not None
        assert (work.ranks, work.replicas, work.sent_bytes) == (4, replicas, 2 * (1 + replicas) * work.numel / 4)


@pytest.mark.full
def test_memory_is_one_value_for_matrices_and_two_for_the_others() -> None:
    config = {**PRESETS["llama-3-8b"], "num_hidden_layers": 2}
    plans = [
        [plan(config, 2, optimizer=kind, sequence_length=512, device_rank=rank) for kind in ("muon", "adamw")]
        for rank in range(2)
    ]
    muon, adamw = plans[0]
    matrices = list(muon_matrices(muon.workload.module).values())
    numel = sum(rows * columns for rows, columns in matrices)
    saved = sum(other.memory.optimizer - one.memory.optimizer for one, other in plans)
    assert saved == 4 * numel + 2 * 4 * len(matrices)  # and the counters of steps
    work = muon.model.muon
    assert work is not None
    assert (work.matrices, work.ranks, work.sent_bytes) == (14, 2, 4 * numel / 2)
    assert muon.step.seconds - adamw.step.seconds == pytest.approx(work.seconds(find_machine("h100")))
    assert adamw.model.muon is None
    assert adamw.notes == ()
    (note,) = muon.notes
    assert note.startswith("Muon: 14 matrices, the busiest of 2 ranks has 1.00 of the mean; ")
    assert "MiB sent by a rank; 5 % of compute at " in note


def test_axes_that_divide_matrices_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="leave tp, pp and ep at 1"):
        plan("llama-3-8b", {"dp_shard": 4, "tp": 2}, optimizer="muon")


# ---- offloaded state: the bytes of a live rank, the seconds by hand, and the choice ----------------------------------

GIVEN: dict[str, Any] = {
    "all": "all",
    "state": ["optimizer_state"],
    "half": {"main_weights": 0.5},
    "shards": ["compute_weights"],
}
BF16_POLICY = MixedPrecisionPolicy(torch.float32, torch.float32)


@pytest.mark.parametrize("given", list(GIVEN))
@on_ranks(1)
def test_a_plan_has_the_bytes_of_a_live_rank(given: str) -> None:
    model = Tower((32, 32, 64)).bfloat16()
    planned = plan_model(model, make_setup(1, policy=BF16_POLICY, offload=GIVEN[given]), [Floor])
    live, optimizer = fully_shard(
        model,
        torch.optim.AdamW(model.parameters()),
        fsdp_unit_modules=[Floor],
        mixed_precision_policy=BF16_POLICY,
        offload=GIVEN[given],
    )
    tower_loss(live, torch.randn(2, TOWER_FEATURES, dtype=torch.bfloat16)).backward()
    optimizer.step()
    memory = live.memory()
    assert held_bytes(planned.groups) == (memory.compute_weight_bytes, memory.main_weight_bytes, memory.main_grad_bytes)
    assert offloaded_bytes(planned) == sum(memory.offloaded.values())
    assert optimizer_bytes(planned) == live.describe().memory.optimizer_bytes
    resident = plan_model(Tower((32, 32, 64)).bfloat16(), make_setup(1, policy=BF16_POLICY), [Floor])
    assert offloaded_bytes(resident) == 0


@pytest.mark.full
def test_state_goes_to_the_host_where_nothing_else_fits_and_not_before() -> None:
    workload = make_workload({**PRESETS["llama-3.2-1b"], "num_hidden_layers": 2}, ParallelRanks(1))
    setup, machine = Setup(ParallelRanks(1)), find_machine("h100")
    resident = plan_workload(workload, setup, machine)
    assert resident.fits
    chosen = recommend(workload, setup, machine).best
    assert chosen is not None
    assert chosen.setup.offload == Offload()
    small = replace(machine, memory_bytes=resident.memory.peak_bytes - 2 * 2**30, reserved_bytes=0)
    found = recommend(workload, setup, small, ("none",)).best
    assert found is not None
    assert found.setup.offload.optimizer_state
    assert found.memory.peak_bytes + found.memory.offloaded_bytes >= resident.memory.peak_bytes
    assert found.hides_offload_from_tokens is not None
    assert recommend(workload, setup, replace(small, host_memory_bytes=1), ("none",)).best is None


def test_compute_weights_that_outer_ranks_write_into_stay() -> None:
    with pytest.raises(ConfigurationError, match="HFSDP"):
        make_setup({"dp_outer": 2, "dp_shard": 2}, outer_strategy="optim", offload=["compute_weights"])
