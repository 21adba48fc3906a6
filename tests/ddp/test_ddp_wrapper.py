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
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal
from tests.support.zoo import FEATURES, MODEL_CASES, Ordered, vector_case

Fields = dict[str, Any]


@on_ranks(2)
def test_what_cannot_be_honoured_is_refused_in_words() -> None:
    config = DistributedDataParallelConfig()
    linear = nn.Linear(3, 3)
    wrapped = DistributedDataParallel(config, linear)
    shards = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=3)
    averages = DistributedDataParallelConfig(average_in_collective=True)
    unmatched = DistributedDataParallelConfig(param_name_patterns_for_fp32_local_accumulation=("nothing.*",))
    fresh, kind = nn.Linear(3, 3), ConfigurationError
    named = {"device_mesh": mesh_of((2,), ("dp_shard",)), "dp_dim": "other"}
    refused: list[tuple[str, Any, Any, Any, Fields]] = [
        ("config is a Linear; DistributedDataParallel takes a Distributed", TypeError, fresh, config, {}),
        ("an object of str was given where a model is wanted", TypeError, config, "model", {}),
        ("the model is sharded already (2 of 2 parameters", kind, config, wrapped, {}),
        ("the model is sharded already", kind, config, linear, {}),
        ("use_megatron_fsdp=True, where buckets are made by", kind, config, fresh, {"fsdp_unit_modules": [nn.Linear]}),
        ("num_distributed_optimizer_instances=3 does not divide the 2 data-parallel ranks", kind, shards, fresh, {}),
        ("average_in_collective=True contradicts", kind, averages, fresh, {"calculate_per_token_loss": True}),
        ("'nothing.*', which matches none of the 2 trainable parameters", kind, unmatched, fresh, {}),
        ("other", kind, config, fresh, named),
        ("has no parameters", kind, config, nn.Identity(), {}),
    ]
    for words, error, first, second, options in refused:
        assert words in refusal(DistributedDataParallel, first, second, error=error, **options)


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
@on_ranks(2)
def test_ranks_with_other_configurations_are_all_refused(first: Fields, others: Fields) -> None:
    config = DistributedDataParallelConfig(**(first if dist.get_rank() == 0 else others))
    message = refusal(DistributedDataParallel, config, Ordered(), error=ConfigurationError)
    assert any(name in message for name in {**first, **others} if first.get(name) != others.get(name))


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
    assert model.ddp_config is config
    assert dataclasses.asdict(config) == before
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
    with pytest.raises(ScheduleError, match=r"a gradient arrived after its bucket was reduced.*use_reentrant=False"):
        model(x).sum().backward()
    model.reset()
    model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()


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
    else:
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
            if step != 1 or rank < run.num_ranks - 1:
                run.backward_of(rank, step)
            elif run.sharded is not None:
                run.sharded.take_part().backward()
        run.step()


def test_a_rank_without_data_takes_part(run_ranks: RunRanks) -> None:
    scenario = Scenario(one_rank_without_data, MODEL_CASES["odd_shapes"])
    check_jobs(run_ranks, 2, [(scenario, setting) for setting in (REPLICATED, IN_TURN, TOGETHER)])
