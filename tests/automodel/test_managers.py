"""What the managers refuse or warn of, and that DDP by its manager trains as one process does."""

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from megatron_fsdp.automodel import (
    DDPConfig,
    DDPManager,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MegatronFSDPManager,
    create_device_mesh,
)
from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.managers import lists_of_layers
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.megatron_fsdp import MegatronFSDP
from tests.support.language_models import FAMILIES, build, config_of
from tests.support.on_ranks import first_rank_warns, on_ranks, refusal

FSDP2, MEGATRON, DDP = FSDP2Config(backend="gloo"), MegatronFSDPConfig(backend="gloo"), DDPConfig(backend="gloo")
MANAGERS: dict[Any, Any] = {FSDP2Config: FSDP2Manager, MegatronFSDPConfig: MegatronFSDPManager, DDPConfig: DDPManager}


def mesh_for(config: Any, **sizes: int) -> Any:
    return create_device_mesh(config, **sizes)[0]


@on_ranks(2)
def test_config_or_mesh_of_another_strategy_is_refused_alike_on_all_ranks() -> None:
    fsdp2_mesh, megatron_mesh = mesh_for(FSDP2), mesh_for(MEGATRON)
    right = {FSDP2Config: fsdp2_mesh, MegatronFSDPConfig: megatron_mesh, DDPConfig: None}
    wrong = {
        FSDP2Config: [megatron_mesh, fsdp2_mesh["dp_shard"], None],
        MegatronFSDPConfig: [fsdp2_mesh, megatron_mesh["dp"], None],
        DDPConfig: [fsdp2_mesh, megatron_mesh, fsdp2_mesh["tp"]],
    }
    for kind, manager in MANAGERS.items():
        own = next(config for config in (FSDP2, MEGATRON, DDP) if type(config) is kind)
        for config in (FSDP2, MEGATRON, DDP, None, kind):
            if config is not own:
                name = "type" if isinstance(config, type) else type(config).__name__
                told = f"config is a {name}; give {manager.__name__} an? {kind.__name__}"
                assert re.search(told, refusal(manager, config, right[kind]))
        for mesh in wrong[kind]:
            assert "mesh" in refusal(manager, own, mesh)
        assert manager(own, right[kind]).config is own


@on_ranks(1)
def test_model_without_layers_is_refused() -> None:
    megatron_mesh = mesh_for(MEGATRON)
    recomputing = DDPConfig(backend="gloo", activation_checkpointing=True)
    for manager in (
        FSDP2Manager(FSDP2, mesh_for(FSDP2)),
        MegatronFSDPManager(MEGATRON, megatron_mesh),
        DDPManager(recomputing),
    ):
        told = refusal(manager.parallelize, nn.Linear(2, 2))
        assert told.startswith("Linear has no list of layers (an nn.ModuleList such as model.layers)")
    config = MegatronFSDPConfig(backend="gloo", activation_checkpointing=True)
    odd = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))})
    told = refusal(MegatronFSDPManager(config, megatron_mesh).parallelize, odd)
    assert told.startswith("activation_checkpointing=True, but layers.0 (Sequential) has no module called mlp")


@on_ranks(1)
def test_model_that_is_parallel_already_is_refused() -> None:
    fsdp2, ddp = FSDP2Manager(FSDP2, mesh_for(FSDP2)), DDPManager(DDP)
    megatron = MegatronFSDPManager(MEGATRON, mesh_for(MEGATRON))
    for first, second in ((fsdp2, fsdp2), (megatron, megatron), (megatron, fsdp2), (ddp, ddp), (fsdp2, megatron)):
        made = first.parallelize(build("llama"))
        model = made[0] if isinstance(made, tuple) else made
        assert "parallel already" in refusal(second.parallelize, model)


@on_ranks(2)
def test_deterministic_sums_are_passed_on_or_refused() -> None:
    config = MegatronFSDPConfig(backend="gloo", deterministic="world", calculate_per_token_loss=True)

    def parallel(**sizes: int) -> MegatronFSDP:
        return MegatronFSDPManager(config, mesh_for(config, **sizes)).parallelize(build("llama"))[0]

    assert "context parallelism cuts the sums over a sequence" in refusal(parallel, cp_size=2)
    assert "tensor parallelism cuts the sums inside of matrix products" in refusal(parallel, tp_size=2)
    model = parallel()
    assert "no_sync cannot be used with deterministic" in refusal(model.no_sync().__enter__)


@on_ranks(1)
def test_options_of_tensor_parallelism_without_it_warn_at_the_caller() -> None:
    for config, message in (
        (FSDP2Config(backend="gloo", sequence_parallel=True), "sequence_parallel of FSDP2Config: no effect"),
        (FSDP2Config(backend="gloo", tp_plan={"*": "colwise"}), "tp_plan of FSDP2Config: no effect with tp_size=1"),
        (
            FSDP2Config(backend="gloo", sequence_parallel=True, enable_async_tensor_parallel=True),
            "sequence_parallel and enable_async_tensor_parallel of FSDP2Config: no effect",
        ),
        (MegatronFSDPConfig(backend="gloo", sequence_parallel=True), "sequence_parallel of MegatronFSDPConfig: no"),
    ):
        manager = MANAGERS[type(config)](config, mesh_for(config))
        with first_rank_warns(message) as caught:
            manager.parallelize(build("llama"))
        assert {each.filename for each in caught} <= {__file__}


@on_ranks(2)
def test_replicas_start_with_the_first_ranks_weights() -> None:
    mesh = dist.init_device_mesh("cpu", (2,))
    model = DDPManager(DDPConfig(backend="gloo"), mesh).parallelize(build("llama", seed=dist.get_rank()))
    expected = dict(build("llama", seed=0).named_parameters())
    for name, param in model.module.named_parameters():
        assert torch.equal(param, expected[name])


# ---- where a model has its layers, and which lists FSDP2 takes apart -------------------------------------------------


def on_meta(kind: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForCausalLM.from_config(config_of(kind))
    return model


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_has_its_four_layers_where_it_computes_them(kind: str) -> None:
    model = on_meta(kind)
    found = find_layers(model)
    assert found.path == ("transformer.h" if kind == "gpt2" else "model.layers")
    assert found.modules() == list(model.get_submodule(found.path).children())
    assert [name for name, _ in found.named()] == [f"{found.path}.{index}" for index in range(4)]
    assert [model.get_submodule(name) for name, _ in found.named()] == found.modules()
    assert [list(layers.children()) for layers in lists_of_layers(model)] == [found.modules()]


def test_longest_list_is_taken_where_the_path_is_not_known() -> None:
    shorter, longest = (nn.ModuleList(nn.Linear(1, 1) for _ in range(count)) for count in (2, 3))
    model = nn.ModuleDict({"heads": shorter, "inside": nn.ModuleDict({"stack": longest})})
    assert find_layers(model).path == "inside.stack"
    assert list(lists_of_layers(model)) == [shorter, longest]


def test_lists_of_lists_are_taken_apart_and_lists_inside_of_layers_are_not() -> None:
    model, layer = nn.Module(), nn.Module()
    layer.experts = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
    model.towers = nn.ModuleList([nn.ModuleList([layer]), nn.ModuleList([nn.Linear(1, 1)])])
    model.nothing = nn.ModuleList([nn.ReLU()])
    assert list(lists_of_layers(model)) == list(model.towers)


@pytest.mark.parametrize("model", [nn.Linear(1, 1), nn.Sequential(nn.ModuleList())])
def test_a_model_without_a_list_has_no_layers(model: nn.Module) -> None:
    told = refusal(find_layers, model, error=ConfigurationError)
    assert told.startswith(f"{type(model).__name__} has no list of layers ")
    assert told.endswith("fully_shard_model")
