"""What `DistributedDataParallel` refuses, what ranks must have in common, and that the configuration stays as it is."""

import dataclasses
import logging
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.conftest import RunRanks
from tests.ddp.test_ddp_usage import IN_TURN, REPLICATED, TOGETHER, Repeated
from tests.support.arrangements import mesh_of
from tests.support.case import DdpSetting, Run, Scenario, check_jobs
from tests.support.on_ranks import assert_equal_tensors, on_ranks
from tests.support.usage_models import FEATURES, Ordered, vector_case
from tests.support.zoo import MODEL_CASES

Fields = dict[str, Any]


def message_of(config: Any, module: Any, error: type[Exception] = ConfigurationError, **options: Any) -> str:
    try:
        DistributedDataParallel(config, module, **options)
    except error as found:
        return str(found)
    return "not refused"


@on_ranks(2)
def test_what_cannot_be_honoured_is_refused_in_words() -> None:
    config = DistributedDataParallelConfig()
    linear = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(config, linear)
    shards = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=3)
    averages = DistributedDataParallelConfig(average_in_collective=True)
    unmatched = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("nothing.*",))
    found = [
        message_of(nn.Linear(3, 3), config, TypeError),
        message_of(config, "model", TypeError),
        message_of(config, wrapped),
        message_of(config, linear),
        message_of(config, nn.Linear(3, 3), fsdp_unit_modules=[nn.Linear]),
        message_of(shards, nn.Linear(3, 3)),
        message_of(averages, nn.Linear(3, 3), calculate_per_token_loss=True),
        message_of(unmatched, nn.Linear(3, 3)),
        message_of(config, nn.Linear(3, 3), device_mesh=mesh_of((2,), ("dp_shard",)), dp_dim="other"),
        message_of(config, nn.Identity()),
    ]
    expected = (
        "config is a Linear; DistributedDataParallel takes a DistributedDataParallelConfig first",
        "an object of str was given where a model is wanted",
        "the model is sharded already (2 of 2 parameters",
        "the model is sharded already",
        "has no effect without use_megatron_fsdp=True, where buckets are made by size",
        "num_distributed_optimizer_instances=3 does not divide the 2 data-parallel ranks",
        "average_in_collective=True contradicts calculate_per_token_loss=True",
        "'nothing.*', which matches none of the 2 trainable parameters",
        "other",
        "has no parameters",
    )
    for message, words in zip(found, expected, strict=True):
        assert words in message


def differing(first: Fields, others: Fields) -> str:
    fields = first if dist.get_rank() == 0 else others
    return message_of(DistributedDataParallelConfig(**fields), Ordered())


SHARDS: Fields = {"use_distributed_optimizer": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("first", "others"),
    [
        ({"bucket_size": 50}, {"bucket_size": 60}),
        ({"use_distributed_optimizer": True}, {}),
        (SHARDS, {**SHARDS, "num_distributed_optimizer_instances": 2}),
        (SHARDS, {**SHARDS, "fp8_param_gather": True}),
    ],
)
def test_ranks_with_other_configurations_are_all_refused(run_ranks: RunRanks, first: Fields, others: Fields) -> None:
    found = run_ranks(2, differing, first, others)
    assert found[0] == found[1]
    assert "not refused" not in found[0]
    changed = {name for name in {**first, **others} if first.get(name) != others.get(name)}
    assert any(name in found[0] for name in changed)


@on_ranks(2)
def test_the_configuration_is_never_written_to_and_what_was_made_of_it_is_said() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True, num_buckets=2)
    before = dataclasses.asdict(config)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("megatron_fsdp")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = DistributedDataParallel(config, Ordered())
    logger.setLevel(level)
    logger.removeHandler(handler)
    optimizer = fully_shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model(torch.ones(2, FEATURES)).sum().backward()
    optimizer.step()
    same = model.ddp_config is config
    unchanged = dataclasses.asdict(config) == before
    assert same
    assert unchanged
    assert any("in num_buckets=2" in line for line in lines)
    assert any("grad_reduce_in_fp32" in line for line in lines)


# ---- recomputed calls that grow --------------------------------------------------------------------------------------


@on_ranks(2)
def test_more_recomputed_calls_than_before_are_refused_and_learnt_after_a_reset() -> None:
    """One reentrantly recomputed call in a backward, then two, on every rank; then a reset."""
    config = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    model = DistributedDataParallel(config, Repeated(reentrant=True))
    x = torch.ones(2, FEATURES)
    model(x).sum().backward()
    model.module.times = 2  # type: ignore[assignment]
    try:
        model(x).sum().backward()
    except ScheduleError as error:
        message = str(error)
    model.reset()
    model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    assert "a gradient arrived after its bucket was reduced" in message
    assert "use_reentrant=False" in message


# ---- compiled modules ------------------------------------------------------------------------------------------------


def _present(run: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in run.sharded.full_gradients().items() if value is not None}


@pytest.mark.full
@pytest.mark.parametrize("setting", [REPLICATED, IN_TURN])
@pytest.mark.parametrize("how", ["layers", "model"])
@on_ranks(2)
def test_compiled_modules_compute_the_same(how: str, setting: DdpSetting) -> None:
    """Three steps of a model of which some part is compiled, beside the same model as it is."""
    torch._dynamo.reset()
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    scenario = Scenario(lambda _run: None, vector_case(Ordered))
    plain, run = Run(scenario, setting), Run(scenario, setting)
    if how == "layers":
        for layer in run.module.layers:  # type: ignore[union-attr]
            layer.compile(backend="eager")
    elif how == "model":
        run.module.compile(backend="eager")
    for step in range(3):
        for each in (plain, run):
            each.loss(step).backward()
        assert_equal_tensors(_present(run), _present(plain))
        for each in (plain, run):
            each.optimizer.step()
            each.optimizer.zero_grad()
    assert run.recording.losses == plain.recording.losses
    torch._dynamo.reset()


# ---- ranks without data ----------------------------------------------------------------------------------------------


def one_rank_without_data(run: Run) -> None:
    """The last rank has no data in step 1; it takes part, with gradients of zero."""
    for step in range(3):
        for rank in run.ranks_here:
            idle = step == 1 and rank == run.num_ranks - 1
            if idle:
                if run.sharded is not None:
                    run.sharded.take_part().backward()
                continue
            run.backward_of(rank, step)
        run.step()


def test_a_rank_without_data_takes_part(run_ranks: RunRanks) -> None:
    scenario = Scenario(one_rank_without_data, MODEL_CASES["odd_shapes"])
    check_jobs(run_ranks, 2, [(scenario, setting) for setting in (REPLICATED, IN_TURN, TOGETHER)])
