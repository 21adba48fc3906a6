"""Gradients in few bits over the outer axis: an oracle written from the definition, feedback, bytes, faults, bad input.

The oracle is told every rank's gradients and where they lie in flat buffers, and plays all ranks in one process. Its
rounding is its own, block after block.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from math import prod
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from megatron_fsdp import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    MegatronFSDP,
    MixedPrecisionPolicy,
    fully_shard_model,
)
from megatron_fsdp.config.precision import GRADIENT_FORMAT_NAMES
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.setup import ParallelRanks, Setup
from tests.conftest import RunRanks
from tests.parallel.test_expert_parallel import HYBRIDS, TOP1
from tests.support.arrangements import Arrangement, hybrid_arguments, mesh_of, tensor_arguments
from tests.support.counting import ALL_REDUCE, EXCHANGE, GATHER, OpCounts
from tests.support.on_ranks import engine_of, fixed_seed, on_ranks
from tests.support.sharded_run import Run, Scenario, Setting, Tolerance, check_strategies

BF16, FP32, FP64 = torch.bfloat16, torch.float32, torch.float64
BLOCK = 256
BLOCK_BYTES = {"int8": 260, "fp8": 260, "int4": 132}
LARGEST = {"int8": 127.0, "fp8": 448.0, "int4": 7.0}

# ---- a model whose gradients are what it is given --------------------------------------------------------------------

Given = Callable[[str, tuple[int, ...], int, int], Tensor | None]
"""(name, shape, index of the backward, rank) -> the gradient that this rank computes there; None: none."""


class Part(nn.Module):
    """Its loss is linear in its parameters, so that each gradient is the tensor that it is multiplied by."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.values = nn.ParameterList(torch.full(shape, 0.5) for shape in shapes)

    def forward(self, grads: Mapping[str, Tensor], prefix: str) -> Tensor:
        terms = [
            (value * grads[f"{prefix}{i}"]).sum() for i, value in enumerate(self.values) if f"{prefix}{i}" in grads
        ]
        return torch.stack(terms).sum() if terms else torch.zeros(())


class Parts(nn.Module):
    """A root with a number, and three units, one without elements: no size is a multiple of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.own = Part((), (7,))
        self.first = Part((23, 31), (5,))
        self.empty = Part((0, 3))
        self.second = Part((2, 300), (1, 3), (3, 3, 3))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = sum(getattr(self, n)(grads, f"{n}.values.") for n in ("first", "empty", "second", "own"))  # type: ignore[assignment]
        return found


def drawn(name: str, shape: tuple[int, ...], index: int, rank: int) -> Tensor:
    """Numbers of very different size."""
    seed = sum(map(ord, name)) + 1009 * index + 31 * rank
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws) * torch.randn(shape, generator=draws).mul(3).exp()


@dataclass(frozen=True)
class Job:
    """Ranks and options; each entry of `microbatches` is a step."""

    form: str | None = "int8"
    outer: int = 2
    inner: int = 2
    strategy: int = 3
    outer_strategy: int = 0
    main_grads: torch.dtype = FP32
    comm: torch.dtype = FP32  # over the inner axis
    microbatches: tuple[int, ...] = (1, 1, 1)
    defers: bool = False  # the outer reduction of all microbatches but the last
    clears: bool = True  # gradients after each step
    given: Given = drawn
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.outer * self.inner

    @property
    def sums_first(self) -> bool:
        """Whether a rank adds up the gradients of all microbatches before any are reduced."""
        return self.defers and self.strategy < 2


Found = list[dict[str, Tensor | None]]
"""Whole gradients of each step."""


def wrap(job: Job) -> MegatronFSDP:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(nothing is registered|nothing can be captured)")
        return fully_shard_model(
            Parts(),
            zero_dp_strategy=job.strategy,
            outer_dp_sharding_strategy=job.outer_strategy,
            fsdp_unit_modules=[Part],
            mixed_precision_policy=MixedPrecisionPolicy(
                FP32, job.main_grads, job.comm, outer_grad_comm_format=job.form
            ),
            **{**hybrid_arguments(job.outer, job.inner), **job.options},
        )


def grads_of(job: Job, index: int, rank: int) -> dict[str, Tensor]:
    shapes = {name: tuple(param.shape) for name, param in Parts().named_parameters()}
    found = {name: job.given(name, shape, index, rank) for name, shape in shapes.items()}
    return {name: grad for name, grad in found.items() if grad is not None}


def backward(model: MegatronFSDP, job: Job, index: int) -> None:
    model(grads_of(job, index, dist.get_rank())).backward()


def backwards(job: Job) -> Iterator[list[int]]:
    """The numbers of the backwards of each step."""
    first = 0
    for count in job.microbatches:
        yield list(range(first, first + count))
        first += count


def arrived(job: Job) -> Found:
    """What a rank finds in `.grad` after each step."""
    model, found = wrap(job), []
    for indices in backwards(job):
        for index in indices:
            model.set_model_auto_sync(not job.defers or index == indices[-1])
            backward(model, job, index)
        found.append({name: None if grad is None else grad.clone() for name, grad in model.full_gradients().items()})
        if job.clears:
            model.zero_grad()
    return found


# ---- the oracle ------------------------------------------------------------------------------------------------------


def rounded(row: Tensor, form: str) -> Tensor:
    """One row, encoded and decoded."""
    found = [row[:0]]
    for block in row.split(BLOCK) if row.numel() else ():
        scale = torch.clamp(block.abs().max() / LARGEST[form], min=2.0**-126)
        if not block.isfinite().all():
            found.append(torch.full_like(block, torch.nan))
        elif form == "fp8":
            found.append((block / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
        else:
            found.append((block / scale).round().clamp(-LARGEST[form], LARGEST[form]) * scale)
    return torch.cat(found)


def lost_by(exact: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept.isfinite(), exact - kept, 0.0)


@dataclass
class Place:
    """A parameter group: names of its parameters, and where each lies in its flat buffer."""

    names: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[int]
    numel: int
    is_cut: bool
    is_cut_outside: bool

    def flat(self, grads: Mapping[str, Tensor]) -> Tensor:
        flat = torch.zeros(self.numel)
        for name, shape, offset in zip(self.names, self.shapes, self.offsets, strict=True):
            if name in grads:
                flat[offset : offset + prod(shape)] = grads[name].flatten()
        return flat

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        places = zip(self.names, self.shapes, self.offsets, strict=True)
        return {name: flat[offset : offset + prod(shape)].view(shape) for name, shape, offset in places}


def places_of(job: Job) -> list[Place]:
    """Where parameters lie; run on a rank."""
    return [
        Place(
            list(group.names),
            [tuple(shape) for shape in group.plan.layout.shapes],
            list(group.plan.layout.offsets),
            group.plan.layout.numel,
            group.plan.needs_all_gather,
            group.plan.gathers_outer,
        )
        for group in engine_of(wrap(job)).groups()
    ]


class Oracle:
    """All ranks of one parameter group."""

    def __init__(self, job: Job, place: Place) -> None:
        self.job, self.place, self.form = job, place, job.form
        self.parts = job.inner if place.is_cut else 1
        self.length = -(-place.numel // self.parts // job.outer)  # of a row
        shape = (self.parts, job.outer, self.length)
        self.lost = [torch.zeros(shape) for _ in range(job.outer)]  # by sender
        self.lost_of_sum = torch.zeros(shape)  # by owner

    def sync(self, sums: Sequence[Tensor]) -> Tensor:
        """Reduce the sums of each outer rank over its inner ranks, (numel,)."""
        numel = self.place.numel // self.parts
        result = torch.empty(self.parts, numel)
        for part in range(self.parts):
            total = torch.zeros(self.job.outer, self.length)
            for sender in range(self.job.outer):
                flat = torch.zeros(self.job.outer * self.length)
                flat[:numel] = sums[sender].view(self.parts, -1)[part]
                exact = self.lost[sender][part] + flat.view(self.job.outer, -1)
                kept = torch.stack([self._rounded(row) for row in exact])
                self.lost[sender][part] = lost_by(exact, kept)
                total = kept if sender == 0 else total + kept
            if not self.place.is_cut_outside:
                exact = self.lost_of_sum[part] + total
                total = torch.stack([self._rounded(row) for row in exact])
                self.lost_of_sum[part] = lost_by(exact, total)
            result[part] = total.view(-1)[:numel]
        return result.view(-1)

    def _rounded(self, row: Tensor) -> Tensor:
        return row if self.form is None else rounded(row, self.form)


def in_order(summands: Iterable[Tensor]) -> Tensor:
    return reduce(torch.add, summands)


def sums_of_rank(job: Job, place: Place, indices: Sequence[int], rank: int) -> Tensor:
    return in_order(place.flat(grads_of(job, index, rank)) for index in indices).to(job.comm).float()


def expected(job: Job, places: Sequence[Place]) -> list[dict[str, Tensor]]:
    """The same by the definition."""
    found: list[dict[str, Tensor]] = [{} for _ in job.microbatches]
    for place in places:
        oracle, main = Oracle(job, place), None
        for step, indices in enumerate(backwards(job)):
            pending = [torch.zeros(place.numel, dtype=job.main_grads) for _ in range(job.outer)]
            for together in [indices] if job.sums_first else [[index] for index in indices]:
                for outer, sums in enumerate(pending):
                    ranks = range(outer * job.inner, (outer + 1) * job.inner)
                    total = in_order(sums_of_rank(job, place, together, rank) for rank in ranks)
                    sums.add_(total if place.is_cut else total.to(job.comm))  # as an all-reduce leaves it
                if job.defers and together[-1] != indices[-1]:
                    continue
                mean = oracle.sync([sums.float() for sums in pending])
                if main is None:
                    main = (mean * (1 / job.ranks)).to(job.main_grads)
                else:
                    main = main.clone().add_(mean, alpha=1 / job.ranks)
                pending = [torch.zeros_like(sums) for sums in pending]
            assert main is not None
            found[step] |= place.views(main.float())
            main = None if job.clears else main
    return found


def assert_as_expected(found: Sequence[Found], job: Job, places: Sequence[Place]) -> None:
    """Assert that every rank has the oracle's bits; NaN where it has NaN."""
    for step, grads in enumerate(expected(job, places)):
        for rank in found:
            assert rank[step].keys() == grads.keys()
            for name, grad in grads.items():
                torch.testing.assert_close(rank[step][name], grad, rtol=0, atol=0, equal_nan=True, msg=f"{step} {name}")


def check(run_ranks: RunRanks, job: Job) -> None:
    (places, *_) = run_ranks(job.ranks, places_of, job)
    assert_as_expected(run_ranks(job.ranks, arrived, job), job, places)


MESHES: Mapping[str, dict[str, int]] = {
    "HSDP": {},
    "HFSDP": {"outer_strategy": 1},
    "2x1": {"inner": 1},
    "2x1 HFSDP": {"inner": 1, "outer_strategy": 1},
    "3x1": {"inner": 1, "outer": 3},
    "ZeRO-1": {"strategy": 1},
    "ZeRO-2 HFSDP": {"strategy": 2, "outer_strategy": 1},
    "whole": {"strategy": 0},
}
WAYS: Mapping[str, dict[str, Any]] = {
    "each step": {},
    "deferred": {"microbatches": (2, 3), "defers": True},
    "each microbatch": {"microbatches": (2, 2)},
    "not cleared": {"clears": False},
    "bf16 sums": {"main_grads": BF16},
    "bf16 inside": {"comm": BF16},
    "averaged": {"options": {"average_in_collective": True}},
    "kept memory": {"options": {"nccl_ub": True}},
    "captured": {"options": {"cuda_graph_mode": True}},
    "on the host": {"options": {"homes": {"main_gradients": "host", "main_weights": "host"}}},
}


CASES = [
    (way, mesh, GRADIENT_FORMAT_NAMES[(row + column) % 3])
    for row, way in enumerate(WAYS)
    for column, mesh in enumerate(MESHES)
    if (3 * row + column) % 4 < 2
]
"""Every way on half of the meshes, and every mesh in half of the ways."""


@pytest.mark.full(short=["each step-HSDP-int8", "deferred-HFSDP-int4", "averaged-2x1 HFSDP-int8", "each step-3x1-fp8"])
@pytest.mark.parametrize(("way", "mesh", "form"), CASES)
def test_every_rank_gets_the_bits_of_the_definition(run_ranks: RunRanks, form: str, mesh: str, way: str) -> None:
    check(run_ranks, Job(form, **MESHES[mesh], **WAYS[way]))


def test_without_the_option_the_same_numbers_arrive_in_full(run_ranks: RunRanks) -> None:
    """So that the oracle is known to differ by what is rounded alone."""
    job = Job(None, microbatches=(1,))
    (places, *_) = run_ranks(job.ranks, places_of, job)
    exact = run_ranks(job.ranks, arrived, job)
    assert_as_expected(exact, job, places)
    few = run_ranks(job.ranks, arrived, replace(job, form="int8"))
    for name, grad in exact[0][0].items():
        assert grad is not None
        assert few[0][0][name] is not None
        if grad.numel() > 1:
            assert not torch.equal(few[0][0][name], grad), name


# ---- what models do --------------------------------------------------------------------------------------------------


def poisoned(value: float, name: str, shape: tuple[int, ...], index: int, rank: int) -> Tensor:
    """A number that is not finite, on one rank, in the second step."""
    grad = drawn(name, shape, index, rank)
    if (name, index, rank) == ("first.values.0", 1, 1):
        grad[11, 3] = value
    return grad


@pytest.mark.parametrize(("form", "outer_strategy", "value"), [("int8", 0, torch.nan), ("fp8", 1, torch.inf)])
def test_a_number_that_is_not_finite_arrives_and_is_gone_in_the_next_step(
    run_ranks: RunRanks, form: str, outer_strategy: int, value: float
) -> None:
    job = Job(form, outer_strategy=outer_strategy, given=partial(poisoned, value))
    check(run_ranks, job)
    for grads in (found := run_ranks(job.ranks, arrived, job)):
        bad = [sum(int((~grad.isfinite()).sum()) for grad in step.values() if grad is not None) for step in grads]
        assert bad[::2] == [0, 0]
        assert 0 < bad[1] <= BLOCK
        hit = grads[1]["first.values.0"]
        assert hit is not None
        assert hit[11, 3].isnan()
    assert len(found) == job.ranks


def partly(name: str, shape: tuple[int, ...], index: int, rank: int) -> Tensor | None:
    """A gradient that no rank has, and one that one rank has in the second step alone."""
    if name == "second.values.1" or (name == "first.values.1" and (index, rank) != (1, 2)):
        return None
    return drawn(name, shape, index, rank)


@on_ranks(4)
def test_a_parameter_without_a_gradient_has_none_and_disturbs_no_other() -> None:
    job = Job(given=partly, options={"find_unused_parameters": True})
    places = places_of(job)
    for step, (found, wanted) in enumerate(zip(arrived(job), expected(job, places), strict=True)):
        without = {name for name, grad in found.items() if grad is None}
        assert without == ({"second.values.1", "first.values.1"} if step != 1 else {"second.values.1"})
        for name, grad in found.items():
            assert grad is None or torch.equal(grad, wanted[name]), (step, name)


@on_ranks(4)
def test_after_an_exception_nothing_that_was_lost_is_forgotten() -> None:
    """What the failed backward had reduced counts as sent, as its gradients are there; what it had not was not."""
    job = Job("int4", microbatches=(1, 1, 1, 1))
    model, places, found = wrap(job), places_of(job), []
    for index in range(4):
        if index == 2:
            grads = grads_of(job, 2, dist.get_rank())
            grads["first.values.0"].requires_grad_().register_hook(fail)  # backward comes there last
            with pytest.raises(BrokenError):
                model(grads).backward()
            model.reset()
        else:
            backward(model, job, index)
            found.append({name: grad.clone() for name, grad in model.full_gradients().items() if grad is not None})
        model.zero_grad()

    def left_out(name: str, shape: tuple[int, ...], index: int, rank: int) -> Tensor:
        return drawn(name, shape, (0, 1, 3)[index], rank)

    reduced = [expected(job, places)[index] for index in (0, 1, 3)]
    not_reduced = expected(replace(job, microbatches=(1, 1, 1), given=left_out), places)
    for step, wanted in enumerate(zip(reduced, not_reduced, strict=True)):
        for name, grad in found[step].items():
            assert torch.equal(grad, wanted[name.startswith("first")][name]), (step, name)


class BrokenError(RuntimeError):
    """Raised on purpose."""


def fail(_grad: Tensor) -> None:
    raise BrokenError


def add_up_many(run: Run) -> None:
    run.backward(*[0] * 20)
    run.note_gradients()


@pytest.mark.full(short=["arrangement1"])
@pytest.mark.parametrize("arrangement", HYBRIDS)
def test_experts_are_sent_alike_over_outer_ranks_of_their_own(run_ranks: RunRanks, arrangement: Arrangement) -> None:
    """Sums of 20 equal gradients, which are off by one rounding for each rank."""
    policy = MixedPrecisionPolicy(outer_grad_comm_format="int8")
    settings = [Setting(3, policy, outer_strategy=outer, arrangement=arrangement) for outer in (0, 1)]
    check_strategies(run_ranks, 4, Scenario(add_up_many, TOP1), settings, Tolerance(of_largest=0.02, atol=1e-3))


# ---- bytes -----------------------------------------------------------------------------------------------------------


def sent(job: Job) -> tuple[dict[str, Any], list[Place]]:
    """What one steady step sends over the outer axis, by the library's counters and by what really ran."""
    model = wrap(job)
    backward(model, job, 0)
    model.zero_grad()
    before = model.traffic_by_axis()["dp_outer"]
    group = job.options.get("device_mesh", hybrid_arguments(job.outer, job.inner)["device_mesh"])[
        "dp_outer"
    ].get_group()
    with OpCounts() as counts:
        backward(model, job, 1)
    traffic = model.traffic_by_axis()["dp_outer"].since(before)
    told = model.describe()
    found = {
        "counted": (traffic.gathers, traffic.gather_bytes, traffic.reductions, traffic.reduce_bytes),
        "exchanged": counts.on(group, EXCHANGE),
        "gathered": counts.on(group, GATHER),
        "summed": counts.on(group, ALL_REDUCE),
        "errors": model.memory().outer_error_bytes,
        "rest": model.memory().persistent_bytes - wrap(replace(job, form=None)).memory().persistent_bytes,
        "told": ({group.outer_reduce for unit in told.units for group in unit.groups}, told.memory.outer_error_bytes),
    }
    return found, places_of(job)


@pytest.mark.full(short=["0-int4", "1-int8"])
@pytest.mark.parametrize("form", GRADIENT_FORMAT_NAMES)
@pytest.mark.parametrize("outer_strategy", [0, 1])
def test_bytes_are_those_of_the_formula(run_ranks: RunRanks, outer_strategy: int, form: str) -> None:
    job = Job(form, outer_strategy=outer_strategy)
    for found, places in run_ranks(job.ranks, sent, job):
        rows = {True: 0, False: 0}  # bytes of a row, by whether the sum stays cut
        errors = 0
        for place in places:
            length = -(-place.numel // (job.inner if place.is_cut else 1) // job.outer)
            rows[place.is_cut_outside] += -(-length // BLOCK) * BLOCK_BYTES[form]
            errors += 4 * length * (job.outer + (not place.is_cut_outside))
        cut = sum(place.is_cut_outside for place in places)
        once, twice = rows[True] * (job.outer - 1), rows[False] * (job.outer - 1)
        assert found["exchanged"] == (len(places), once + twice)
        assert found["gathered"] == (len(places) - cut, twice)
        assert found["summed"] == (0, 0)
        assert found["counted"] == (0, 0, 2 * len(places) - cut, once + 2 * twice)
        assert found["errors"] == found["rest"] == errors
        assert found["told"] == ({form}, errors)


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["int2", 8])
def test_formats_that_do_not_exist_are_refused(given: Any) -> None:
    with pytest.raises(
        ConfigurationError, match=f"outer_grad_comm_format={given!r} does not exist; give one of int8, "
    ):
        MixedPrecisionPolicy(outer_grad_comm_format=given)


REFUSALS: Sequence[tuple[Callable[[], dict[str, Any]], str]] = (
    (lambda: {"device_mesh": mesh_of((4,), ("dp",)), "dp_shard_dim": "dp"}, "needs an outer axis of two ranks"),
    (partial(hybrid_arguments, 1, 4), "needs an outer axis of two ranks or more; pass dp_outer_dim"),
    (partial(tensor_arguments, 2), "would round a parameter that tensor-parallel ranks hold whole differently"),
    (
        lambda: {**hybrid_arguments(2, 2), "deterministic": "world", "calculate_per_token_loss": True},
        'rounds sums of ranks, and deterministic="world" allows none',
    ),
)


@on_ranks(4)
def test_where_it_cannot_take_effect_every_rank_says_so() -> None:
    policy = MixedPrecisionPolicy(outer_grad_comm_format="int8")
    for arguments, told in REFUSALS:
        with pytest.raises(
            ConfigurationError, match=rf"^outer_grad_comm_format='int8' {told}.* leave outer_grad_comm_format"
        ):
            fully_shard_model(Parts(), fsdp_unit_modules=[Part], mixed_precision_policy=policy, **arguments())


@on_ranks(4)
def test_a_field_of_a_configuration_chooses_the_format_with_units_and_with_buckets() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batch = torch.randn(6, 40, generator=torch.Generator().manual_seed(dist.get_rank()))
    units = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
    for options in (units, {"use_distributed_optimizer": True}):
        sums = []
        for form in (None, "int8"):
            with fixed_seed(0):
                net = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20))
            fields = {**options, "num_distributed_optimizer_instances": 2, "megatron_fsdp_outer_grad_comm_format": form}
            model = DistributedDataParallel(DistributedDataParallelConfig(**fields), net, mesh)
            model(batch).square().mean().backward()
            model.finish_grad_sync()
            sums.append([param.grad.full_tensor() for param in model.parameters()])
        largest = max(exact.abs().max() for exact in sums[0])  # parameters share blocks, and ranks' sums are larger
        for exact, found in zip(*sums, strict=True):
            assert not torch.equal(found, exact)
            assert (found - exact).abs().max() <= 2 * largest / 127


@on_ranks(2)
def test_the_format_stays_when_the_policy_changes() -> None:
    job = Job(inner=1)
    model = wrap(job)
    with pytest.raises(ConfigurationError, match="changes outer_grad_comm_format of"):
        model.reset_mixed_precision_policy(MixedPrecisionPolicy(outer_grad_comm_format="int4"))
    model.reset_mixed_precision_policy(MixedPrecisionPolicy(grad_comm_dtype=FP64))
    assert model.mp_policy.outer_grad_comm_format == "int8"
    backward(model, job, 0)
    for name, grad in expected(job, places_of(job))[0].items():
        assert torch.equal(model.full_gradients()[name], grad)  # type: ignore[arg-type]  # each has one


@pytest.mark.parametrize("ranks", [ParallelRanks(4), ParallelRanks(2, 2, tp=2)])
def test_the_planner_refuses_it_where_the_engine_would(ranks: ParallelRanks) -> None:
    with pytest.raises(ConfigurationError, match="outer_grad_comm_format='fp8' needs an outer axis of 2 ranks or more"):
        Setup(ranks, policy=MixedPrecisionPolicy(outer_grad_comm_format="fp8"))
