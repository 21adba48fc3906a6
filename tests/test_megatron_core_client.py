"""A client as Megatron-Core is one: an adapter around `MegatronFSDP` with a configuration of its own class."""

import logging
import warnings
from dataclasses import field, fields, make_dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP, MixedPrecisionPolicy
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from megatron_fsdp.fully_shard import ShardingStrategy, experimental_api
from megatron_fsdp.mixed_precision import is_float8tensor
from megatron_fsdp.param_and_grad_buffer import make_fsdp_dtensor
from megatron_fsdp.utils import FSDPDistributedIndex as IndexOfUtils
from megatron_fsdp.utils import (
    find_megatron_fsdp,
    get_mesh_names,
    log_single_rank,
    safe_get_rank,
    using_tensor_parallel,
)
from tests.support.api_net import Layer, batches, build, largest_difference, own_part, train, weights
from tests.support.on_ranks import on_ranks

LACKING = (
    "megatron_fsdp_max_pool_double_buffer",
    "fsdp_all_gather_in_start_param_sync",
)

CoreConfig: Any = make_dataclass(
    "CoreConfig",
    [
        *((each.name, Any, each.default) for each in fields(DistributedDataParallelConfig) if each.name not in LACKING),
        ("of_a_later_version", int, 0),
        ("names_of_a_later_version", list[str], field(default_factory=list)),
    ],
)
"""A class that shares nothing with ours but names, without fields of newer versions and with some of its own."""


def as_always_set(strategy: str, **more: Any) -> Any:
    """What Megatron-LM makes of its flags by default."""
    return CoreConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        align_param_gather=True,
        use_distributed_optimizer=True,
        check_for_nan_in_grad=True,
        bucket_size=40_000_000,
        use_megatron_fsdp=True,
        data_parallel_sharding_strategy=strategy,
        **more,
    )


class Adapter(nn.Module):
    """Wraps a model, and shows what training loops call on itself."""

    def __init__(self, ddp_config: Any, module: nn.Module, disable_bucketing: bool, **more: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("dp_cp", "tp"))
        self.ddp_config = ddp_config
        self.dist_index = FSDPDistributedIndex(device_mesh=mesh, dp_shard_dim="dp_cp", tp_dim="tp")
        self.module = MegatronFSDP(
            ddp_config=ddp_config,
            module=module,
            mixed_precision_policy=MixedPrecisionPolicy(
                main_params_dtype=ddp_config.megatron_fsdp_main_params_dtype,
                main_grads_dtype=ddp_config.megatron_fsdp_main_grads_dtype,
                grad_comm_dtype=ddp_config.megatron_fsdp_grad_comm_dtype,
            ),
            fsdp_unit_modules=[Layer],
            disable_bucketing=disable_bucketing,
            device=torch.device("cpu"),
            dist_index=self.dist_index,
            calculate_per_token_loss=False,
            init_model_with_meta_device=False,
            enable_fine_grained_param_gather_hook=False,
            **more,
        )
        for name in ("no_sync", "start_param_sync", "finish_grad_sync", "zero_grad_buffer", "scale_gradients"):
            setattr(self, name, getattr(self.module, name))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.module(*inputs, **named)


def train_as_core_does(adapter: Any, steps: int) -> None:
    """Two microbatches a step, the first in `no_sync`; the optimizer is not connected, and installed by hand."""
    fsdp = find_megatron_fsdp(adapter)
    assert fsdp is adapter.module
    named = fsdp.param_and_grad_buffer.optimizer_named_parameters
    optimizer = torch.optim.AdamW([param for _, param in named], lr=1e-2)
    for index, (inputs, targets) in enumerate(batches(steps)):
        adapter.zero_grad_buffer()
        adapter.start_param_sync()
        halves = list(zip(own_part(inputs).chunk(2), own_part(targets).chunk(2), strict=True))
        with adapter.no_sync():
            half_of_the_loss(adapter, *halves[0]).backward()
        fsdp.is_last_microbatch = True
        half_of_the_loss(adapter, *halves[1]).backward()
        adapter.finish_grad_sync()
        optimizer.step()
        fsdp.install_optimized_model_weights()
        assert fsdp.ddp_config is adapter.ddp_config, index


def half_of_the_loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(inputs), targets) / 2


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@on_ranks(2)
def test_the_adapter_trains_as_one_process(strategy: str) -> None:
    reference = build()
    train(reference, torch.optim.AdamW(reference.parameters(), lr=1e-2), 3)
    disable_bucketing = strategy == "optim"
    adapter = Adapter(as_always_set(strategy), build(), disable_bucketing)
    train_as_core_does(adapter, 3)
    found = weights(adapter.module)
    assert largest_difference(found, weights(reference)) < 2e-6


@pytest.mark.parametrize(
    ("policy", "asks_for_fp32", "expected"),
    [
        (MixedPrecisionPolicy(), True, torch.float32),
        (MixedPrecisionPolicy(main_grads_dtype=torch.bfloat16), True, torch.bfloat16),
    ],
)
@on_ranks(2)
def test_float32_gradients_of_the_config_hold_where_the_policy_follows(
    policy: MixedPrecisionPolicy, asks_for_fp32: bool, expected: torch.dtype
) -> None:
    config = CoreConfig(data_parallel_sharding_strategy="optim_grads_params", grad_reduce_in_fp32=asks_for_fp32)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = MegatronFSDP(build().bfloat16(), FSDPDistributedIndex(mesh, "dp"), config, policy)
    precisions = [group.plan.precision for group in model.parameter_groups()]
    assert {precision.main_grads for precision in precisions} == {expected}
    assert {precision.grad_comm for precision in precisions} == {expected}


def test_a_foreign_config_is_read_with_defaults_for_what_it_lacks_and_left_as_it_is() -> None:
    theirs = as_always_set("optim_grads", names_of_a_later_version=["a"])
    before = dict(vars(theirs))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours, notices = DistributedDataParallelConfig.read_from(theirs)
    assert vars(theirs) == before
    assert ours == DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        check_for_nan_in_grad=True,
        bucket_size=40_000_000,
    )
    assert [notice.partition(" of ")[0] for notice in notices] == [
        "grad_reduce_in_fp32=True",
        "use_distributed_optimizer=True",
        "align_param_gather=True",
        "use_megatron_fsdp=True",
    ]


def test_what_no_version_here_knows_is_warned_of_and_what_is_no_config_refused() -> None:
    with pytest.warns(UserWarning, match="of_a_later_version=3 of CoreConfig has no effect in this version"):
        DistributedDataParallelConfig.read_from(CoreConfig(of_a_later_version=3))
    with pytest.raises(TypeError, match="a dict was given as ddp_config, which has no data_parallel_sharding_strategy"):
        DistributedDataParallelConfig.read_from({"bucket_size": 3})
    with pytest.raises(ConfigurationError, match="bucket_size='many' is not a positive whole number"):
        DistributedDataParallelConfig.read_from(SimpleNamespace(data_parallel_sharding_strategy=3, bucket_size="many"))


def test_what_cannot_be_honoured_is_refused_in_a_foreign_config_too() -> None:
    index = FSDPDistributedIndex.__new__(FSDPDistributedIndex)
    with pytest.raises(NotSupportedYetError, match=r"reuse_grad_buf_for_mxfp8_param_ag=True \(default False\)"):
        MegatronFSDP(nn.Linear(2, 2), index, CoreConfig(fp8_param_gather=True, reuse_grad_buf_for_mxfp8_param_ag=True))


# ---- names -----------------------------------------------------------------------------------------------------------


def test_names_that_clients_import() -> None:
    assert ShardingStrategy.OPTIM_GRADS_PARAMS is ShardingStrategy.optim_grads_params
    capitals = (ShardingStrategy.NO_SHARD, ShardingStrategy.OPTIM, ShardingStrategy.OPTIM_GRADS)
    assert [(int(strategy), strategy.name) for strategy in capitals] == [
        (0, "no_shard"),
        (1, "optim"),
        (2, "optim_grads"),
    ]
    assert len(ShardingStrategy) == 4
    assert experimental_api(build) is build
    assert experimental_api(Adapter) is Adapter
    quantized = type("QuantizedTensor", (Tensor,), {"__module__": "transformer_engine.pytorch.tensor.quantized_tensor"})
    float8 = type("MXFP8Tensor", (quantized,), {"__module__": "transformer_engine.pytorch.tensor.mxfp8_tensor"})
    assert is_float8tensor(torch.zeros(2).as_subclass(float8))
    assert not is_float8tensor(torch.zeros(2).as_subclass(quantized))
    assert not is_float8tensor(torch.zeros(2, dtype=torch.float8_e4m3fn))


def test_without_process_groups_the_environment_tells_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert safe_get_rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert safe_get_rank() == 3
    logger = logging.getLogger("a client")
    with caplog.at_level(logging.INFO):
        log_single_rank(logger, logging.INFO, "from %s", "rank 0")
        log_single_rank(logger, logging.INFO, "from %s", "rank 3", rank=3)
    assert [record.getMessage() for record in caplog.records] == ["from rank 3"]
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(ConfigurationError, match="RANK='first'; give the number of this process"):
        safe_get_rank()


@on_ranks(4)
def test_names_of_meshes_and_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "cp", "tp"))
    mesh["dp", "cp"]._flatten("dp_cp")
    index = IndexOfUtils(mesh, "dp_cp", tp_dim="tp")
    alone = IndexOfUtils(init_device_mesh("cpu", (4, 1), mesh_dim_names=("dp", "tp")), "dp", tp_dim="tp")
    assert safe_get_rank() == dist.get_rank()
    assert get_mesh_names(mesh) == ["dp", "cp", "tp", "dp_cp"]
    assert get_mesh_names(mesh, only_submesh_dims=True) == ["dp", "cp", "tp"]
    assert get_mesh_names(mesh["tp"], only_submesh_dims=True) == ["tp"]
    assert get_mesh_names() == []
    assert using_tensor_parallel(index)
    assert not using_tensor_parallel(alone)
    assert not using_tensor_parallel(index, True)


@pytest.mark.parametrize("tensor_dim", [None, 0])
@on_ranks(4)
def test_shards_are_described_as_dtensors(tensor_dim: int | None) -> None:
    """Shards of uneven length, one of them empty, on 2 data-parallel x 2 tensor-parallel ranks."""
    index = IndexOfUtils(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "dp", tp_dim="tp")
    dp, tp = dist.get_rank(index.fsdp_group), dist.get_rank() % 2
    whole = torch.arange(24.0).view(6, 4)
    own = whole if tensor_dim is None else whole.chunk(2, tensor_dim)[tp]
    param: Any = nn.Parameter(torch.empty_like(own))
    if tensor_dim is not None:
        param.tensor_model_parallel, param.partition_dim = True, tensor_dim
    edge = {None: 5, 0: 12, 1: 4}[tensor_dim]  # inside a row, at the end, at a row
    local = own.reshape(-1)[:edge] if dp == 0 else own.reshape(-1)[edge:]
    made = make_fsdp_dtensor(local.clone(), param, index, update_uneven_dtensor_chunk_meta=True)
    parts = [isinstance(made, DTensor), made.shape == whole.shape, torch.equal(made.full_tensor(), whole)]
    kept = make_fsdp_dtensor(own.clone() + tp, param, index, False, force_sync_tp_duplicated_param=tensor_dim is None)
    parts.append(torch.equal(kept.to_local(), own if tensor_dim is None else own + tp))
    with pytest.raises(ConfigurationError, match=r"the ranks hold \d+ elements of a parameter of shape"):
        make_fsdp_dtensor(local[: local.numel() - 1], param, index)
    assert parts == [True] * 4


@pytest.mark.parametrize("shares_optimizer", [False, True])
@on_ranks(4)
def test_hybrid_shards_are_described_as_dtensors(shares_optimizer: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    index = IndexOfUtils(
        mesh, "inner", "outer", hybrid_fsdp_group=dist.group.WORLD, hsdp_outer_dp_shard=shares_optimizer
    )
    outer, inner = mesh.get_coordinate() or (0, 0)
    whole = torch.arange(8.0)
    own = whole.chunk(2)[inner].chunk(2)[outer] if shares_optimizer else whole.chunk(2)[inner]
    made = make_fsdp_dtensor(own, nn.Parameter(torch.empty(8)), index)
    assert made.shape == (8,)
    assert made.to_local().data_ptr() == own.data_ptr()
    assert torch.equal(made.full_tensor(), whole)
