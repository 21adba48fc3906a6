"""A client as Megatron-Core is one: an adapter around `MegatronFSDP` with a configuration of its own class."""

import logging
import warnings
from dataclasses import field, fields, make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_fsdp import FSDPDistributedIndex, MegatronFSDP, MixedPrecisionPolicy, mixed_precision
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from megatron_fsdp.fully_shard import ShardingStrategy, experimental_api
from megatron_fsdp.mixed_precision import is_blockwise_float8tensor, is_float8tensor
from megatron_fsdp.param_and_grad_buffer import PrefetchOrder, make_fsdp_dtensor
from megatron_fsdp.utils import FSDPDistributedIndex as IndexOfUtils
from megatron_fsdp.utils import (
    contains_submesh,
    find_megatron_fsdp,
    get_cuda_rng_tracker,
    get_mesh_names,
    get_te_version,
    initialize_rng_tracker,
    is_submodule,
    is_te_min_version,
    is_torch_min_version,
    log_single_rank,
    safe_get_rank,
    using_tensor_parallel,
)
from tests.conftest import RunRanks
from tests.support.api_net import Layer, backward, batches, build, largest_difference, own_part, train, weights, wrap
from tests.support.on_ranks import on_ranks

LACKING = ("megatron_fsdp_max_pool_double_buffer", "fsdp_all_gather_in_start_param_sync")

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
        ours, notes = DistributedDataParallelConfig.read_from(theirs)
    assert vars(theirs) == before
    assert ours == DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads",
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        check_for_nan_in_grad=True,
        bucket_size=40_000_000,
    )
    assert [note.partition(" of ")[0] for note in notes] == [
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


@on_ranks(2)
def test_this_packages_config_is_taken_as_cores_class_is() -> None:
    known = {each.name for each in fields(DistributedDataParallelConfig)}
    given = {name: value for name, value in vars(as_always_set("optim_grads_params")).items() if name in known}
    ours = DistributedDataParallelConfig(**given)
    index = FSDPDistributedIndex(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), "dp")
    model = MegatronFSDP(build().bfloat16(), index, ours, disable_bucketing=True)
    assert model.ddp_config is ours
    assert {group.plan.precision.main_grads for group in model.parameter_groups()} == {torch.float32}


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
    blocks = type("Float8BlockwiseQTensor", (quantized,), {"__module__": quantized.__module__})
    found = [is_blockwise_float8tensor(torch.zeros(2).as_subclass(kind)) for kind in (blocks, float8)]
    assert found == [True, False]


def test_names_about_tensors_of_transformer_engine_say_that_there_are_none() -> None:
    assert mixed_precision.HAVE_TE_MXFP8TENSOR is mixed_precision.HAVE_TE is False
    with pytest.raises(NotSupportedYetError, match="fp8_quantize handles tensors of TransformerEngine"):
        mixed_precision.fp8_quantize([], [])
    with pytest.raises(AttributeError, match="has no attribute 'fp9_quantize'"):
        _ = mixed_precision.fp9_quantize
    assert get_te_version() is None
    assert not is_te_min_version("1.0")
    assert mixed_precision.is_te_min_version is is_te_min_version
    number = torch.__version__.partition("+")[0]
    assert [is_torch_min_version(each) for each in ("2.9", "2.11", number, "99.0")] == [True, True, True, False]
    assert not is_torch_min_version(number, check_equality=False)


def test_modules_inside_of_modules() -> None:
    net = build()
    assert is_submodule(net.head, parent_module=net)
    assert is_submodule(net.head, parent=net)
    assert not is_submodule(net, net.head)
    assert [is_submodule(net, net), is_submodule(net, net, strict=False)] == [False, True]


def test_states_of_random_numbers_go_on_where_their_block_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_a_build_for_cuda(check_available: bool = False) -> torch.device | None:
        return None if check_available else torch.device("cuda")

    if not torch.accelerator.is_available():
        monkeypatch.setattr(torch.accelerator, "current_accelerator", of_a_build_for_cuda)
    initialize_rng_tracker(force_reset=True)
    tracker = get_cuda_rng_tracker()
    assert get_cuda_rng_tracker() is tracker
    assert not tracker.is_initialized()
    tracker.add("model", 3)
    saved, outside, drawn = tracker.get_states(), torch.get_rng_state(), []
    for _ in range(2):
        with tracker.fork("model"):
            drawn.append(torch.rand(2))
    assert torch.equal(torch.cat(drawn), torch.rand(4, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), outside)
    tracker.set_states(saved)
    with tracker.fork("model"):
        assert torch.equal(torch.rand(2), drawn[0])
    with pytest.raises(ConfigurationError, match="has a state 'model' already"):
        tracker.add("model", 4)
    with pytest.raises(ConfigurationError, match="has no state 'data'"), tracker.fork("data"):
        pass
    tracker.reset()
    assert tracker.get_states() == {}
    with pytest.raises(NotSupportedYetError, match="only the plain tracker"):
        get_cuda_rng_tracker(use_te_rng_tracker=True)


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
        log_single_rank(logger_=logger, level=logging.INFO, msg="from rank 3", rank=3)
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
    assert contains_submesh(mesh, ("tp", "dp_cp"))
    assert contains_submesh(mesh, "cp")
    found = [contains_submesh(*given) for given in ((mesh, "ep"), (None, "tp"), (mesh, None))]
    assert found == [False] * 3
    without = IndexOfUtils(init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), "dp")
    for names in (without.tp_dim, [without.tp_dim]):
        assert without.get_submesh(mesh_dim_names=names, is_expert_parallel=True).mesh.tolist() == [dist.get_rank()]


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


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_fused_weights_are_split_as_in_megatrons_checkpoints(
    run_ranks: RunRanks, tmp_path: Path, tensor_parallel: int
) -> None:
    """Saved by 2 data-parallel ranks in halves, loaded by 1 and 3 ranks."""
    run_ranks(2 * tensor_parallel, save_halves, tmp_path, tensor_parallel)
    for num_ranks in (1, 3):
        run_ranks(num_ranks, load_halves, tmp_path)


FUSED = torch.arange(80.0).view(16, 5)
"""The rows of gate and up, which lie one above the other on each tensor-parallel rank."""


def save_halves(folder: Path, tensor_parallel: int) -> None:
    mesh = init_device_mesh("cpu", (2, tensor_parallel), mesh_dim_names=("dp", "tp"))
    module = nn.Linear(5, 16 // tensor_parallel, bias=False)
    raw: Any = module.weight
    raw.tensor_model_parallel, raw.partition_dim, raw.partition_stride = tensor_parallel > 1, 0, 1
    gate, up = (half.chunk(tensor_parallel)[mesh["tp"].get_local_rank()] for half in FUSED.chunk(2))
    raw.data.copy_(torch.cat((gate, up)))
    model = MegatronFSDP(module, FSDPDistributedIndex(mesh, "dp", tp_dim="tp"), None, fsdp_unit_modules=[])
    param: Any = model.get_parameter("module.weight")
    local, own, index = param.to_local().flatten(), param.megatron_fsdp_slice, param.megatron_fsdp_dist_index
    assert local.numel() == own.stop - own.start
    assert index.get_submesh([index.tp_dim]).size() == tensor_parallel
    saved, half = {}, module.weight.numel() // tensor_parallel // 2
    for number, name in enumerate(("gate", "up")):
        first, last = max(own.start, number * half), min(own.stop, (number + 1) * half)
        meta: Any = torch.empty(half // 5, 5, device="meta")
        meta.tensor_model_parallel, meta.partition_dim = param.tensor_model_parallel, param.partition_dim
        part = local[first - own.start : max(first, last) - own.start]
        saved[name] = make_fsdp_dtensor(part, meta, index, run_check=True, update_uneven_dtensor_chunk_meta=True)
    dcp.save(saved, checkpoint_id=folder)


def load_halves(folder: Path) -> None:
    loaded = {name: torch.zeros(8, 5) for name in ("gate", "up")}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(torch.cat([loaded["gate"], loaded["up"]]), FUSED)


@on_ranks(2)
def test_pipelines_take_the_published_keywords_and_numbers_of_buckets() -> None:
    reference, model = build(), wrap(sync_model_each_microbatch=False)
    gathers, reductions = model.all_gather_pipeline, model.grad_reduce_pipeline
    units, params = model._engine.units, list(model.module.layers[0].parameters())

    def held() -> list[bool]:
        return [model._engine.scheduler.is_gathered(unit.index) for unit in units]

    assert gathers.num_buckets == reductions.num_buckets == len(model.parameter_groups()) == 3
    gathers.all_gather_params(params)
    assert held() == [False, True, False]
    order = PrefetchOrder.FORWARD_PASS_ORDER
    gathers.all_gather_params(params, prefetch=True, prefetch_order=order, async_param_gather=False, bwd=False)
    assert held() == [False, True, True]
    assert not units[1].works
    gathers.reset()
    assert held() == [False] * 3
    gathers.all_gather_params(params, True, PrefetchOrder.BACKWARD_PASS_ORDER, suggested_AG_prefetch_size=10_000)
    assert held() == [True, True, False]
    gathers.reset(preserve_non_fsdp_units=False)
    with pytest.raises(ValueError, match="bucket 1 is not being gathered; call async_bucket_gather"):
        gathers.wait_bucket_ready(1, bwd=False)
    gathers.wait_bucket_ready(1, bwd=False, empty_ok=True)
    assert held() == [False] * 3
    gathers.async_bucket_gather(1, bwd=False)
    gathers.wait_bucket_ready(1, bwd=False)
    full = dict(zip(units[1].groups[0].names, units[1].groups[0].full, strict=True))
    assert torch.equal(full["layers.0.linear.weight"], reference.layers[0].linear.weight)
    gathers.release_bucket(1, bwd=False, lazy=False)
    assert held() == [False] * 3
    with pytest.raises(ConfigurationError, match="bucket_id=3 is none of the model's; give 0 to 2"):
        gathers.release_bucket(3, bwd=False)
    batch = next(iter(batches(1)))
    backward(model, batch)
    reductions.reduce_gradients(params, suggested_queue_capacity=1, outer_fsdp_group_grad_reduce=True)
    reductions.wait_for_previous_grad_reduce(suggested_queue_size=0, suggested_queue_capacity=None)
    reductions.reset()
    model.finish_grad_sync()
    backward(reference, batch)
    found = model.full_gradients()["layers.0.linear.weight"]
    assert torch.allclose(found, reference.layers[0].linear.weight.grad)
