"""Buckets equal one process: every model, Megatron's schedule, other meshes, and whatever else a loop may do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig
from tests.conftest import RunRanks
from tests.engine.test_parity import OPTIMIZERS, SCRIPTS
from tests.meshes.test_expert_parallel import EXPERTS, TOP2
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.case import (
    FP32,
    IN_TURN,
    ONE_RANK,
    REPLICATED,
    TOGETHER,
    DdpSetting,
    Run,
    Scenario,
    Tolerance,
    check_jobs,
    check_strategies,
    ddp,
    defer_two_of_three,
    each_half,
)
from tests.support.on_ranks import engine_of, on_ranks
from tests.support.zoo import (
    ATTENTION,
    DENSE,
    ENCODER,
    FEATURES,
    MODEL_CASES,
    READING,
    Layer,
    ModelCase,
    Nested,
    vector_case,
)

RANKS = (1, 2, 3)
_BF16 = Tolerance(rtol=2**-5, atol=2**-6)

CASES: dict[str, ModelCase] = {
    **MODEL_CASES,
    "attention": ATTENTION,
    "encoder": ENCODER,
    "reading": READING,
    "nested": vector_case(Nested),
}

BUCKETS: tuple[dict[str, Any], ...] = (
    {"bucket_size": 1},
    {"bucket_size": 60},
    {"num_buckets": 3},
    {"bucket_size": 10_000_000},
    {},
)
GATHERS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_param_gather": True},
    {"overlap_param_gather": True, "align_param_gather": True},
)


WAYS = ((False, False), (False, True), (True, False), (True, True))
"""use_distributed_optimizer, overlap_grad_reduce."""

_OPTIMIZERS = (OPTIMIZERS[0], OPTIMIZERS[1], OPTIMIZERS[3])
"""RMSprop is left out: it divides by a tenth of the gradient, so rounding of 1e-8 shows."""


def setting_of(way: int, turn: int, own_dtypes: bool) -> DdpSetting:
    """One of the four ways; the other fields are dealt out by turn."""
    shards, overlaps = WAYS[way]
    dtypes: dict[str, Any] = {"megatron_fsdp_main_params_dtype": None} if own_dtypes else {}
    return ddp(
        connects=turn % 3 != 0,
        use_distributed_optimizer=shards,
        overlap_grad_reduce=overlaps,
        average_in_collective=turn % 4 == 1,
        gradient_reduce_div_fusion=turn % 5 != 2 or turn % 4 == 1,  # a collective that averages divides by itself
        **BUCKETS[(turn // 2 + turn) % len(BUCKETS)],
        **(GATHERS[turn // 2 % len(GATHERS)] if shards else {}),
        **dtypes,
    )


def jobs_of(num_ranks: int, number: int) -> list[tuple[str, Scenario, DdpSetting]]:
    """What so many ranks train: every model in the first or second of two ways, the others with one rank more."""
    jobs = []
    for position, (name, case) in enumerate(CASES.items()):
        turn = 2 * position + 5 * num_ranks + number
        own_dtypes = name in ("fp32_fp64_norm", "bf16_fp32_norm")
        setting = setting_of((num_ranks + position + 2 * number) % 4, turn, own_dtypes)
        script = SCRIPTS[(position + number + num_ranks // 2) % 2][(position + num_ranks) // 2 % 2]
        jobs.append((name, Scenario(script, case, _OPTIMIZERS[turn % len(_OPTIMIZERS)]), setting))
    return jobs


def _tolerance(name: str, num_ranks: int) -> Tolerance:
    if num_ranks == 1:
        return ONE_RANK
    return _BF16 if name == "bf16_fp32_norm" else FP32


@pytest.mark.full(short=["0-2"])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("number", [0, 1])
def test_training_equals_one_process_on_the_whole_batch(run_ranks: RunRanks, num_ranks: int, number: int) -> None:
    names, *jobs = zip(*jobs_of(num_ranks, number), strict=True)
    tolerances = [_tolerance(name, num_ranks) for name in names]
    check_jobs(run_ranks, num_ranks, list(zip(*jobs, strict=True)), tolerances)


@pytest.mark.unmerged
@pytest.mark.full(short=["optim_grads_params"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_delayed_units_are_reduced_once_each_out_of_two_buckets(strategy: str) -> None:
    found = []
    for delays in (False, True):
        config = DistributedDataParallelConfig(
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=strategy,
            overlap_grad_reduce=True,
            delay_wgrad_compute=delays,
        )
        linears = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        model = DistributedDataParallel(config, linears, fsdp_unit_modules=[nn.Linear])
        early: list[bool] = []
        inputs = torch.ones(2, 4, requires_grad=True)
        held = [group.gradients.filled for group in model.parameter_groups() if group.gradients]
        inputs.register_hook(lambda _grad, held=held, early=early: early.extend(map(any, held)))  # type: ignore[misc]
        before = model.traffic()
        model(inputs).sum().backward()
        assert any(early) is not delays  # whether linears reached their buckets before the end
        found.append((model.traffic().since(before), model.memory().transient_peak_bytes))
    assert found[0] == found[1]
    assert found[0][0].reductions == 6


SHARDS: dict[str, Any] = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 60}
OVERLAPPED: dict[str, Any] = {**SHARDS, "overlap_param_gather": True}
SETTINGS: tuple[dict[str, Any], ...] = (
    {"overlap_grad_reduce": True, "bucket_size": 60},
    {"use_distributed_optimizer": True},
    OVERLAPPED,
    {**OVERLAPPED, "align_param_gather": True},
    {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
)


# ---- Megatron's schedule ---------------------------------------------------------------------------------------------


def megatron_steps(run: Run) -> None:
    """`no_sync` for all but the last microbatch; gradients are final when `finish_grad_sync` returns."""
    model = run.sharded
    for step in range(3):
        if model is not None:
            model.zero_grad_buffer()
        run.optimizer.zero_grad()
        for microbatch in range(2):
            with run.no_sync():
                run.loss(10 * step + microbatch).backward()
        run.loss(10 * step + 2).backward()
        if model is not None:
            if step == 1:
                model.start_grad_sync()
            model.finish_grad_sync()
            if step == 2:
                model.finish_grad_sync(force_all_reduce=True)  # once more changes nothing
        run.scale(1 / 3)
        run.note_gradients()
        run.optimizer.step()
        if model is not None and step < 2:
            model.start_param_sync(force_sync=step == 1)
        run.note_parameters()


@pytest.mark.full(short=["True-2-settings0", "False-2-settings1"])
@pytest.mark.parametrize(
    ("auto", "num_ranks", "settings"),
    [(True, 2, SETTINGS[1::2]), (False, 2, SETTINGS[::2]), (True, 1, SETTINGS[::2]), (False, 3, SETTINGS[1::2])],
)
def test_megatrons_schedule_equals_one_process(
    run_ranks: RunRanks, num_ranks: int, auto: bool, settings: tuple[dict[str, Any], ...]
) -> None:
    scenario = Scenario(megatron_steps, MODEL_CASES["tied" if auto else "unused"])
    options = {"sync_model_each_microbatch": auto}
    check_jobs(run_ranks, num_ranks, [(scenario, ddp(options, **fields)) for fields in settings])


def defer_and_finish(run: Run) -> None:
    """Nothing is said of microbatches: every backward is deferred until `finish_grad_sync`."""
    for step in range(2):
        for microbatch in range(3):
            run.loss(10 * step + microbatch).backward()
        if run.sharded is not None:
            assert run.sharded.has_unreduced_gradients
            run.sharded.start_grad_sync()
            run.sharded.finish_grad_sync()
            run.sharded.finish_grad_sync()
            assert not run.sharded.has_unreduced_gradients
        run.step()
    if run.sharded is not None:
        run.sharded.broadcast_params()
        run.sharded.start_param_sync()
        run.sharded.finish_grad_sync()
    run.note_parameters("after broadcasting")
    for microbatch in range(2):
        run.loss(50 + microbatch).backward()
        if run.sharded is not None:
            run.sharded.zero_grad_buffer()
        else:
            run.optimizer.zero_grad()
    run.loss(60).backward()
    if run.sharded is not None:
        run.sharded.finish_grad_sync()
    run.step()


def test_gradients_wait_for_finish_grad_sync(run_ranks: RunRanks) -> None:
    options = {"sync_model_each_microbatch": False}
    jobs = [(Scenario(defer_and_finish, READING), ddp(options, **fields)) for fields in SETTINGS[:4]]
    instances = ddp(options, **OVERLAPPED, num_distributed_optimizer_instances=2)
    check_jobs(run_ranks, 2, [*jobs, (Scenario(defer_and_finish, READING), instances)])


def per_token(run: Run) -> None:
    """The loss of a rank is its part of the sum over all samples; gradients are summed without a factor."""
    for step in range(3):
        loss = run.case.loss(run.model, run.batch(step))
        run.note_loss(loss)
        (loss if run.sharded is None else loss / run.num_ranks).backward()
        run.step()


def test_per_token_losses_are_summed(run_ranks: RunRanks) -> None:
    options = {"calculate_per_token_loss": True}
    jobs = [(Scenario(per_token, MODEL_CASES["odd_shapes"]), ddp(options, **fields)) for fields in SETTINGS]
    check_jobs(run_ranks, 2, jobs)


# ---- other meshes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("averages", "number"), [(True, 0), (False, 2)])
def test_experts_are_reduced_over_their_own_ranks(run_ranks: RunRanks, averages: bool, number: int) -> None:
    fields = {**SETTINGS[number], "average_in_collective": averages}
    check_jobs(run_ranks, 4, [(Scenario(defer_two_of_three, TOP2), ddp(arrangement=EXPERTS, **fields))])


@on_ranks(4)
def test_a_number_of_buckets_counts_the_parts_of_tensor_parallel_ranks() -> None:
    """Each rank cuts what it holds into so many buckets, not what all tensor-parallel ranks hold together."""
    setting = ddp(arrangement=tensor_parallel(divide_tensors), num_buckets=4, overlap_grad_reduce=True)
    run = Run(Scenario(defer_two_of_three, DENSE), setting)
    assert sum(unit.is_trainable for unit in engine_of(run.sharded).units) in (3, 4)


# ---- everything a loop may do ----------------------------------------------------------------------------------------


LATE = ddp(use_distributed_optimizer=True)
ALL = (REPLICATED, LATE, IN_TURN, TOGETHER)
Settings = tuple[DdpSetting, ...]


class TwoHeads(nn.Module):
    """Two outputs, of which a loop may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Layer()
        self.left = nn.Linear(FEATURES, FEATURES)
        self.right = nn.Linear(FEATURES, FEATURES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.left(x), self.right(x)


def backward_of_one_output(run: Run) -> None:
    for step, used in enumerate([(0, 1), (0,), (1,), (0, 1)]):
        batch = run.batch(step)
        outputs = run.model(batch.inputs)
        for position in used:
            loss = F.mse_loss(outputs[position], batch.targets)
            run.note_loss(loss)
            loss.backward(retain_graph=True)
        run.note_gradients()
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
        run.note_parameters()


def call_parts(run: Run) -> None:
    """Parts of the model are called on their own, with and without gradients, right after a step."""
    for step in range(3):
        batch = run.batch(step)
        with torch.no_grad():
            run.note("head", {"head": run.module.right(run.whole_batch(step).inputs)})  # type: ignore[operator]
        hidden = run.module.body(batch.inputs)  # type: ignore[operator]
        loss = F.mse_loss(run.module.left(hidden), batch.targets)  # type: ignore[operator]
        run.note_loss(loss)
        loss.backward()
        other = F.mse_loss(run.model(batch.inputs)[1], batch.targets)
        other.backward()
        run.step()


@each_half(ALL)
def test_parts_of_outputs_and_parts_of_models(run_ranks: RunRanks, settings: Settings) -> None:
    check_strategies(run_ranks, 2, Scenario(call_parts, vector_case(TwoHeads)), settings)
    check_strategies(run_ranks, 2, Scenario(backward_of_one_output, vector_case(TwoHeads)), settings)


def one_rank_without_data(run: Run) -> None:
    """The last rank has no data in step 1; it takes part, with gradients of zero."""
    for step in range(3):
        for rank in run.ranks_here:
            if step != 1 or rank < run.num_ranks - 1:
                run.backward_of(rank, step)
            elif run.sharded is not None:
                run.sharded.take_part().backward()
        run.step()


def test_a_rank_without_data_takes_part(run_ranks: RunRanks) -> None:
    scenario = Scenario(one_rank_without_data, MODEL_CASES["odd_shapes"])
    check_strategies(run_ranks, 2, scenario, (REPLICATED, IN_TURN, TOGETHER))
