"""NeMo AutoModel's present interface: its classes, the dictionary of its YAML section, and its parallelizer."""

import dataclasses
import re
from collections import UserList
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.utils.flop_counter import FlopCounterMode

from megatron_fsdp.automodel import (
    AutoModelForCausalLM,
    CpVisionFrameShardingConfig,
    DDPConfig,
    DistributedSetup,
    FSDP2Config,
    FSDP2Manager,
    MegatronFSDPConfig,
    MeshAxisName,
    MeshContext,
    ModelParallelizer,
    MoEParallelizerConfig,
    MultimodalDistributedConfig,
    MultimodalVisionConfig,
    ParallelismSizes,
    PipelineConfig,
    clip_grad_by_total_norm_,
    compile_parallelized_model,
    create_device_mesh,
    create_distributed_setup_from_config,
    create_ring_ulysses_mesh,
    derive_unit_modules,
    fully_shard_optimizer,
    get_grad_norm,
    get_model_parallelizer,
    initialize_distributed,
    maybe_shard_optimizer,
    normalize_activation_checkpointing_scope,
    parallelize_model,
    parse_distributed_section,
)
from megatron_fsdp.automodel.managers import MegatronFSDPManager
from megatron_fsdp.errors import ConfigurationError, NotSupportedYetError
from tests.automodel.test_auto_model_files import image_batch, small_llava
from tests.automodel.training import assert_trained_alike, gradients_of, managed, reference, saved, strategy, train
from tests.support.language_models import batch_of, build
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal

Section = dict[str, Any]


# ---- classes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ("all",)),
        ("default", ("all",)),
        ("Auto", ("all",)),
        ("language+Vision", ("language", "vision")),
        (["audio", "language,vision"], ("audio", "language", "vision")),
        (UserList(["vision", "audio"]), ("vision", "audio")),
    ],
)
def test_scopes_of_recomputation(given: Any, expected: tuple[str, ...]) -> None:
    assert normalize_activation_checkpointing_scope(given) == expected
    for kind in (FSDP2Config, DDPConfig):
        assert kind(activation_checkpointing_scope=given).activation_checkpointing_scope == expected


@pytest.mark.parametrize("given", ["words", ["all", "vision"], [], [3], 3, {"vision": True}])
def test_scopes_that_mean_nothing_are_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="activation_checkpointing_scope"):
        FSDP2Config(activation_checkpointing_scope=given)


def test_options_of_towers_are_checked_with_their_paths() -> None:
    assert MultimodalDistributedConfig(frozen_sharding="per-layer").frozen_sharding == "per_layer"
    assert FSDP2Config().multimodal.vision.frame_sharding == CpVisionFrameShardingConfig()
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"distributed.multimodal.frozen_sharding='x'", lambda: MultimodalDistributedConfig("x")),
        (TypeError, r"distributed.multimodal.vision is a int", lambda: MultimodalDistributedConfig(vision=3)),
        (TypeError, "vision.frame_sharding is a dict", lambda: MultimodalVisionConfig(frame_sharding={})),
        (TypeError, "mesh_dims is a list", lambda: CpVisionFrameShardingConfig(mesh_dims=["cp"])),
        (TypeError, "min_frames is a bool", lambda: CpVisionFrameShardingConfig(min_frames=True)),
        (ValueError, "min_tokens=0; give 1 or more", lambda: CpVisionFrameShardingConfig(min_tokens=0)),
        (NotSupportedYetError, "frame_sharding.enabled=True", lambda: CpVisionFrameShardingConfig(enabled=True)),
        (TypeError, "FSDP2Config.multimodal is a dict", lambda: FSDP2Config(multimodal={})),
    ]
    for kind, words, make in cases:
        assert re.search(words, refusal(make, error=kind))


def test_options_of_experts_and_stages_are_taken_or_refused() -> None:
    assert MoEParallelizerConfig().to_dict() == {
        "ignore_router_for_ac": True,
        "reshard_after_forward": False,
        "lm_head_precision": None,
        "wrap_outer_model": True,
        "mp_policy": None,
    }
    given = PipelineConfig(pp_seq_len=7, dtype=torch.bfloat16, patch_inner_model=True)
    assert (given.to_dict()["pp_seq_len"], len(given.to_dict())) == (7, 14)
    refused: list[tuple[Any, Section]] = [
        (MoEParallelizerConfig, {"lm_head_precision": torch.float32}),
        (MoEParallelizerConfig, {"wrap_outer_model": False}),
        (PipelineConfig, {"pp_schedule_csv": "a.csv"}),
        (PipelineConfig, {"round_virtual_stages_to_pp_multiple": "up"}),
        (PipelineConfig, {"module_fqns_per_model_part": [["a"]]}),
        (PipelineConfig, {"patch_causal_lm_model": False}),
        (PipelineConfig, {"patch_stage_backward_maybe_with_nosync": True}),
    ]
    for kind, fields in refused:
        assert re.search(next(iter(fields)), refusal(kind, error=NotSupportedYetError, **fields))
    with pytest.raises(ConfigurationError, match="ignore_router_for_ac='no'; give True or False"):
        MoEParallelizerConfig(ignore_router_for_ac="no")
    assert "pp_seq_len is 0" in refusal(PipelineConfig, error=ConfigurationError, pp_seq_len=0)


# ---- contexts --------------------------------------------------------------------------------------------------------


def sizes_of(context: MeshContext) -> tuple[int | None, ...]:
    names = ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "dp_shard")
    return tuple(getattr(context, f"{name}_size") for name in names)


def test_a_context_without_meshes() -> None:
    for context in (MeshContext(), MeshContext.from_meshes(None), MeshContext.from_meshes(None, None)):
        assert sizes_of(context) == (1, 1, 1, 1, None, None, 1)
        assert not context.pp_enabled
        assert (context.strategy_config, context.process_group, context.activation_checkpointing) == (None, None, False)
        assert context.pipeline_axis_kwargs() == {
            "dp_axis_names": ("dp_shard_cp",),
            **dict.fromkeys(["cp_axis_name", "tp_axis_name", "ep_axis_name", "ep_shard_axis_names", "pp_axis_name"]),
        }
    assert len(MeshAxisName) == 10
    assert MeshAxisName.DP_SHARD_CP == "dp_shard_cp" == str(MeshAxisName.DP_SHARD_CP)
    assert {MeshAxisName.TP: 1}["tp"] == 1
    for name in ("fsdp2", "ddp"):
        assert "Unknown distributed strategy config type" in refusal(MeshContext.build, name, error=ValueError)


@on_ranks(4)
def test_a_context_of_meshes_has_their_sizes_and_axes() -> None:
    built = MeshContext.build(strategy("fsdp2"), ParallelismSizes(dp_replicate_size=2, ep_size=2), timeout_minutes=7)
    mesh, experts = built.device_mesh, built.moe_mesh
    context = MeshContext.from_meshes(mesh, moe_mesh=experts)
    assert sizes_of(context) == sizes_of(built) == (1, 1, 1, 2, 4, 2, 2)
    assert context.sizes == built.sizes
    assert built.strategy_config is not None
    expected = {
        "dp_axis_names": ("dp_replicate", "dp_shard_cp"),
        "cp_axis_name": "cp",
        "tp_axis_name": "tp",
        "ep_axis_name": "ep",
        "ep_shard_axis_names": ("ep_shard",),
    }
    assert context.parallelize_axis_kwargs() == expected
    assert context.pipeline_axis_kwargs() == {**expected, "pp_axis_name": "pp"}
    for group in (mesh.get_group("dp_shard"), mesh._flatten_mapping["dp_cp"].get_group(), experts.get_group("ep")):
        assert group._get_backend(torch.device("cpu")).options._timeout.total_seconds() == 7 * 60
    other = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    assert "unknown axis names ['data']" in refusal(MeshContext, other, error=ValueError)
    config = strategy("megatron_fsdp")
    for words, options in (("there are 4 ranks", {"world_size": 3}), ("ranks=.0, 1. of 4", {"ranks": [0, 1]})):
        with pytest.raises((ConfigurationError, NotSupportedYetError), match=words):
            MeshContext.build(config, **options)
    wide, _ = create_device_mesh(config, cp_size=4)
    ring = create_ring_ulysses_mesh(wide, ring_degree=2, ulysses_degree=2)
    assert (ring.mesh_dim_names, ring.mesh.tolist()) == (("ring", "ulysses"), [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="ring_degree x ulysses_degree = 2 x 3, but cp_size is 4"):
        create_ring_ulysses_mesh(wide, ring_degree=2, ulysses_degree=3)


# ---- setups ----------------------------------------------------------------------------------------------------------


def test_a_setup_has_parts_of_its_own() -> None:
    config = MegatronFSDPConfig(activation_checkpointing=True)
    setup = DistributedSetup.build(config, parallelism_sizes=ParallelismSizes(tp_size=2), world_size=1, ranks=[0])
    assert setup.strategy_config is setup.config is config
    assert setup.activation_checkpointing is False
    assert setup.arguments()["distributed_config"].activation_checkpointing is True
    chosen = DistributedSetup.build(config, activation_checkpointing="selective").arguments()["distributed_config"]
    assert (chosen.activation_checkpointing, config.activation_checkpointing) == ("selective", True)
    both = DistributedSetup.build("MFSDP", ParallelismSizes(), timeout_minutes=3)
    assert (type(both.config), both.timeout_minutes) == (MegatronFSDPConfig, 3)
    staged = DistributedSetup.build(parallelism_sizes=ParallelismSizes(pp_size=2, ep_size=2))
    assert (staged.pipeline_config, staged.moe_parallel_config) == (PipelineConfig(), MoEParallelizerConfig())
    options = {"pipeline_config": {"pp_seq_len": 5}, "moe_parallel_config": {"reshard_after_forward": True}}
    staged = DistributedSetup.build(sizes=ParallelismSizes(pp_size=2, ep_size=2), **options)
    assert (staged["pipeline_config"].pp_seq_len, staged["moe_parallel_config"].reshard_after_forward) == (5, True)
    refused: list[tuple[str, Section]] = [
        ("Unknown strategy 'zero'", {"strategy": "zero"}),
        ("sizes and tp_size are both given", {"sizes": ParallelismSizes(tp_size=2), "tp_size": 2}),
        ("Unknown distributed strategy type int", {"strategy": 3}),
        ("pipeline_config requires pp_size > 1", {"pipeline_config": {}}),
        ("moe_parallel_config requires ep_size > 1", {"moe_parallel_config": MoEParallelizerConfig()}),
        ("activation_checkpointing='some'", {"activation_checkpointing": "some"}),
        ("world_size=3, but there are 1 ranks", {"world_size": 3}),
    ]
    for words, fields in refused:
        assert re.search(words, refusal(DistributedSetup.build, error=ConfigurationError, **fields))
    assert "tp" in refusal(DistributedSetup.build, error=TypeError, tp=2)


# ---- the section of YAML ---------------------------------------------------------------------------------------------


def test_a_section_is_read_as_a_dictionary() -> None:
    section = {"strategy": "ddp", "dp_size": 2, "tp_size": None, "activation_checkpointing": "on", "_recursive_": True}
    parsed = parse_distributed_section(section)
    assert dict(parsed) == {
        "strategy_config": DDPConfig(),
        "pipeline_config": None,
        "moe_parallel_config": None,
        "activation_checkpointing": True,
        "parallelism_sizes": ParallelismSizes(dp_size=2),
        "pp_enabled": False,
        **vars(ParallelismSizes(dp_size=2)),
    }
    assert "strategy_config" in parsed
    with pytest.raises(KeyError):
        _ = parsed["strategy"]
    with pytest.warns(UserWarning, match="pp_size=2 without a section pipeline"):
        assert parse_distributed_section({"pp_size": 2})["pp_enabled"]


WORDS: dict[Any, Any] = {
    **dict.fromkeys(("off", "None", "no", "disabled", "FALSE", False, None), False),
    **dict.fromkeys(("on", "yes", "enabled", "true", "full", True), True),
    "selective": "selective",
}


def test_words_for_recomputation_stay_beside_the_strategy() -> None:
    for word, expected in WORDS.items():
        parsed = parse_distributed_section({"activation_checkpointing": word})
        assert parsed["activation_checkpointing"] == expected, word
        assert parsed.config.activation_checkpointing is False
    whole = parse_distributed_section({"strategy": "mfsdp", "activation_checkpointing": "full"})
    assert whole["activation_checkpointing"] == "full"  # True recomputes less here
    with pytest.raises(ValueError, match="activation_checkpointing='most'"):
        parse_distributed_section({"activation_checkpointing": "most"})


def test_sections_within_the_section() -> None:
    frames = {"mesh_dims": ["cp", "tp"], "min_frames": 4}
    section = {
        "pp_size": 2,
        "ep_size": 2,
        "pipeline": {},
        "moe": {"mp_policy": {"param_dtype": "bf16"}, "ignore_router_for_ac": False},
        "multimodal": {"frozen_sharding": "replicate", "vision": {"frame_sharding": frames}},
        "mp_policy": {"param_dtype": "bf16", "output_dtype": "float32"},
    }
    parsed = parse_distributed_section(section)
    assert parsed["pipeline_config"].dtype is torch.float32
    assert parsed["moe_parallel_config"].mp_policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    towers = parsed["strategy_config"].multimodal
    assert (towers.frozen_sharding, towers.vision.frame_sharding.mesh_dims) == ("replicate", ("cp", "tp"))
    defaults = parse_distributed_section({"multimodal": {"vision": None}})
    assert defaults["strategy_config"].multimodal == MultimodalDistributedConfig()
    with pytest.raises(ValueError, match="Unknown options for MultimodalVisionConfig"):
        parse_distributed_section({"multimodal": {"vision": {"frames": 3}}})


@on_ranks(1)
def test_keywords_win_over_a_configuration() -> None:
    whole = {"distributed": {"strategy": "ddp", "tp_size": 2}, "dist_env": {"timeout_minutes": 5}}
    setup = create_distributed_setup_from_config(whole, 1, strategy="fsdp2", tp_size=1, sequence_parallel=True)
    assert (setup.timeout_minutes, setup.config.sequence_parallel, setup["tp_size"]) == (5, True, 1)
    assert setup.mesh_context.device_mesh is not None
    assert create_distributed_setup_from_config({"strategy": "ddp"}, timeout_minutes=2).timeout_minutes == 2
    assert create_distributed_setup_from_config({"tp_size": 1}, tp_size=None)["tp_size"] == 1
    with pytest.raises(ValueError, match="world_size=2, but there are 1 ranks"):
        create_distributed_setup_from_config(None, 2)


# ---- parallelizers, managers, optimizers -----------------------------------------------------------------------------


class Own:
    def parallelize(self, model: nn.Module, _: MeshContext, /) -> nn.Module:
        return nn.Sequential(model)


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", ["fsdp2", "megatron_fsdp", "ddp"])
@on_ranks(2)
def test_a_model_is_made_parallel_by_its_context(name: str) -> None:
    config, frozen = strategy(name), []
    sizes = ParallelismSizes()
    context = dataclasses.replace(
        MeshContext.build(config, sizes), activation_checkpointing=True, reapply_trainability=frozen.append
    )
    model = parallelize_model(build("llama"), context)
    assert frozen == [model]
    assert compile_parallelized_model(model, context) is model
    truth = reference("llama", steps=1)
    assert_trained_alike(train(model, steps=1), truth)
    assert "strategy_config is a NoneType" in refusal(parallelize_model, build("llama"), MeshContext(), error=TypeError)
    if name != "ddp":
        with pytest.raises(ValueError, match="needs a device_mesh, and the context has none"):
            parallelize_model(build("llama"), MeshContext(strategy_config=config))


def test_a_class_may_have_a_parallelizer_of_its_own() -> None:
    assert [name for name in vars(ModelParallelizer) if not name.startswith("_")] == ["parallelize"]
    owner = type("Owner", (nn.Linear,), {"parallelizer": Own()})(2, 2)
    assert get_model_parallelizer(owner) is type(owner).parallelizer
    assert isinstance(parallelize_model(owner, MeshContext()), nn.Sequential)
    assert isinstance(get_model_parallelizer(nn.Linear(2, 2)), ModelParallelizer)
    with pytest.raises(TypeError, match=r"Owner\.parallelizer is a int without parallelize"):
        get_model_parallelizer(type("Owner", (nn.Linear,), {"parallelizer": 3})(2, 2))


def test_units_are_the_classes_that_a_model_names() -> None:
    model: Any = build("llama")
    assert [kind.__name__ for kind in derive_unit_modules(model)] == ["LlamaDecoderLayer"]
    for names in (None, [], {"Other"}):
        model._no_split_modules = names
        with pytest.raises(ValueError, match="has no module of the classes in _no_split_modules"):
            derive_unit_modules(model)


@on_ranks(2)
def test_managers_show_their_configuration_and_optimizers_are_connected() -> None:
    config = strategy("megatron_fsdp", report_nan_in_param_grad=True, check_for_nan_in_grad=False)
    mesh, _ = create_device_mesh(config)
    manager = MegatronFSDPManager(config, mesh)
    assert (manager.zero_dp_strategy, manager.rank, manager.world_size) == (3, dist.get_rank(), 2)
    with pytest.raises(AttributeError, match="has no attribute 'tp_axes'"):
        _ = manager.tp_axes
    looks = {"check_for_nan_in_grad": (True, False, False), "report_nan_in_param_grad": (False, True, False)}
    for index, expected in enumerate((True, True, False)):
        fields = {name: values[index] for name, values in looks.items()}
        found = MegatronFSDPManager(MegatronFSDPConfig(**fields), mesh).engine_arguments()
        assert found["report_nan_in_param_grad"] is expected
    model, _ = manager.parallelize(build("llama"))
    for param in model.parameters():
        del param._megatron_fsdp_model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "allow=False" in refusal(maybe_shard_optimizer, model, optimizer, config, error=AssertionError, allow=False)
    assert maybe_shard_optimizer(model, optimizer, strategy("fsdp2"), allow=False) is optimizer
    assert maybe_shard_optimizer(model, optimizer, config) is optimizer
    assert model.parameter_digests() == (before := model.parameter_digests())
    model(**batch_of(), use_cache=False).loss.backward()
    optimizer.step()
    assert model.parameter_digests() != before
    plain = nn.Linear(2, 2)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    assert fully_shard_optimizer(plain, other) is other


@on_ranks(2)
def test_norms_count_once_what_every_rank_has() -> None:
    model = managed(strategy("fsdp2"), build("llama"))
    plain = build("llama")
    for each in (model, plain):
        each(**batch_of(), use_cache=False).loss.backward()
    params = list(plain.parameters())
    for norm_type in (2.0, float("inf")):
        expected = nn.utils.get_total_norm([param.grad for param in params], norm_type).item()
        group = dist.group.WORLD
        assert get_grad_norm(list(model.parameters()), group, group, norm_type) == pytest.approx(expected, rel=1e-5)
    norm = get_grad_norm(list(model.parameters()))
    clip_grad_by_total_norm_(list(model.parameters()), 2 * norm, norm)
    assert_equal_tensors(gradients_of(model), gradients_of(plain), 1e-4, 1e-6)
    clip_grad_by_total_norm_(model.parameters(), norm / 2, norm)
    assert get_grad_norm(list(model.parameters())) == pytest.approx(norm / 2, rel=1e-4)


def parameter(*gradient: float) -> Any:
    made = nn.Parameter(torch.zeros(2))
    made.grad = torch.tensor(gradient) if gradient else None
    return made


def test_plain_gradients_are_measured_and_clipped() -> None:
    params = [parameter(3.0, -4.0), parameter()]
    assert [get_grad_norm(params, None, None, kind) for kind in (2.0, float("inf"), "inf")] == [5.0, 4.0, 4.0]
    assert get_grad_norm([parameter()]) == 0.0
    for limit, expected in ((10.0, [3.0, -4.0]), (1.0, [0.6, -0.8])):
        clip_grad_by_total_norm_(params, limit, 5.0)
        torch.testing.assert_close(params[0].grad, torch.tensor(expected))
    clip_grad_by_total_norm_(params[0], 0.5, 1.0)
    torch.testing.assert_close(params[0].grad, torch.tensor([0.3, -0.4]))


@on_ranks(2)
def test_a_group_that_exists_is_taken_as_it_is() -> None:
    info = initialize_distributed("nccl", timeout_minutes=3)
    assert dataclasses.astuple(info) == ("gloo", dist.get_rank(), 2, None, dist.get_rank() == 0)


# ---- towers and experts ----------------------------------------------------------------------------------------------


@pytest.mark.full(short=["replicate-0"])
@pytest.mark.parametrize(("where", "units"), [("root", 0), ("per_layer", 2), ("replicate", 0)])
@on_ranks(2)
def test_frozen_towers_train_as_in_one_process(where: str, units: int) -> None:
    def freeze(model: Any) -> Any:
        model.model.vision_tower.requires_grad_(False)
        return model

    plain, model = freeze(small_llava()), freeze(small_llava())
    config = strategy("fsdp2", multimodal=MultimodalDistributedConfig(where), activation_checkpointing=True)
    model = managed(config, model)
    tower = model.model.vision_tower
    assert sum(isinstance(part, FSDPModule) for part in tower.modules()) == units
    assert {type(param).__name__ for param in tower.parameters()} == {
        "Parameter" if where == "replicate" else "DTensor"
    }
    plain(**image_batch(plain), use_cache=False).logits.square().mean().backward()
    own = {key: value.chunk(2)[dist.get_rank()] for key, value in image_batch(plain).items()}
    model(**own, use_cache=False).logits.square().mean().backward()
    assert_equal_tensors(gradients_of(model), gradients_of(plain), 1e-4, 1e-6)
    if where == "replicate":
        narrow = FSDP2Config(backend="gloo", multimodal=MultimodalDistributedConfig(where))
        words = "keeps frozen towers in torch.float32"
        assert words in refusal(managed, narrow, freeze(small_llava()), error=ConfigurationError)


@on_ranks(1)
def test_scopes_choose_layers_that_train() -> None:
    mesh, _ = create_device_mesh(strategy("fsdp2"))
    for frozen, scope, towers, decoder in (
        (False, "all", True, True),
        (False, "vision", True, False),
        (False, "language", False, True),
        (True, "all", False, True),
    ):
        model: Any = small_llava()
        model.model.vision_tower.requires_grad_(not frozen)
        config = strategy("fsdp2", activation_checkpointing=True, activation_checkpointing_scope=scope)
        FSDP2Manager(config, mesh).parallelize(model)
        layers = model.model.vision_tower.encoder.layers, model.model.language_model.layers
        found = tuple(all("forward" in vars(layer) for layer in each) for each in layers)
        assert found == (towers, decoder), (frozen, scope)
    config = strategy("fsdp2", activation_checkpointing=True, activation_checkpointing_scope="audio")
    message = refusal(FSDP2Manager(config, mesh).parallelize, small_llava(), error=ConfigurationError)
    assert "has no such layers that train" in message


@on_ranks(2)
def test_options_of_experts_have_their_effect_and_train_as_one_process() -> None:
    config, flops = strategy("fsdp2", activation_checkpointing=True), []
    truth = reference("mixtral", steps=1)
    for options in ({"ignore_router_for_ac": False, "reshard_after_forward": True}, {}):
        context = MeshContext.build(config, ParallelismSizes(ep_size=2))
        context.moe_parallel_config = MoEParallelizerConfig(**options)
        model: Any = parallelize_model(build("mixtral"), context)
        experts = [part for part in model.modules() if type(part).__name__.startswith("FSDPDivided")]
        state = experts[0]._get_fsdp_state()._fsdp_param_group
        assert state._reshard_after_forward is options.get("reshard_after_forward", False)
        model.mesh_context = context
        assert_trained_alike(train(model, steps=1), truth)
        loss = model(**batch_of(), use_cache=False).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        flops.append(counter.get_total_flops())
    assert flops[1] < flops[0]  # results of routers are kept


@on_ranks(2)
def test_stages_send_their_dtype_and_take_their_length(tmp_path: Path) -> None:
    folder, config = saved("llama", tmp_path), strategy("fsdp2", mp_policy=None)
    batch = batch_of()
    length = batch["input_ids"].shape[1]

    def staged(**options: Any) -> Any:
        setup = DistributedSetup.build(config, ParallelismSizes(pp_size=2), PipelineConfig(**options))
        return AutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup)

    words = refusal(staged, dtype=torch.float32, error=ConfigurationError)
    assert "dtype=torch.float32, but mp_policy makes stages send torch.bfloat16" in words
    model = staged(pp_seq_len=length, dtype=torch.bfloat16)
    assert model.step(batch["input_ids"], batch["labels"]).isfinite()
    shorter = [batch[name][:, 1:] for name in ("input_ids", "labels")]
    assert f"but pp_seq_len={length}" in refusal(model.step, *shorter, error=ConfigurationError)
