"""Which group a parameter belongs to and which MLPs are gated: answers, and refusals where there is none."""

import pytest

from megatron_fsdp.checkpoint.convert.groups import Parameter, assign
from megatron_fsdp.checkpoint.convert.names import canonical_name, decide_gating, parse_object_key, pieces
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions, Prefixes
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.support.torch_dist.common import group_map, make_group, param_groups
from tests.support.torch_dist.gpt import GptSpec, buffers_of, parameter_shapes

FC1, FC2 = "decoder.layers.mlp.linear_fc1", "decoder.layers.mlp.linear_fc2"
TOWER = "vision_model.decoder.layers.mlp.linear_fc1"
GATED = {f"{FC1}.weight": (2, 24, 8), f"{FC1}.bias": (2, 24), f"{FC2}.weight": (2, 8, 12)}
PLAIN = {f"{FC1}.weight": (2, 12, 8), f"{FC1}.bias": (2, 12), f"{FC2}.weight": (2, 8, 12)}
WITH_TOWER = GATED | {k.replace("decoder", "vision_model.decoder"): v for k, v in PLAIN.items()}
BOTH = {f"{FC1}.weight", f"{FC1}.bias"}


@pytest.mark.parametrize(
    ("shapes", "scope", "said", "expected"),
    [
        (GATED, "auto", True, BOTH),
        (GATED, "auto", None, BOTH),
        (GATED, "auto", False, set()),
        (PLAIN, "auto", None, set()),
        (WITH_TOWER, "auto", True, BOTH),
        (GATED, "all", None, BOTH),
        (GATED, "none", True, set()),
        (WITH_TOWER, "linear_fc1", None, None),
        (WITH_TOWER, "all", None, None),
        ({f"{FC1}.weight": (2, 24, 8)}, "all", None, {f"{FC1}.weight"}),
        ({f"{FC1}.weight": (2, 24, 8)}, "auto", True, {f"{FC1}.weight"}),
        (
            {f"language.{k}": v for k, v in GATED.items()} | WITH_TOWER,
            "language",
            None,
            {f"language.{k}" for k in BOTH},
        ),
    ],
)
def test_gating(shapes: dict[str, tuple[int, ...]], scope: str, said: bool | None, expected: set[str] | None) -> None:
    if expected is None:
        with pytest.raises(CheckpointError, match=rf"asks to halve {TOWER}.*it is not gated; use --swiglu auto"):
            decide_gating(shapes, scope, said)
    else:
        assert decide_gating(shapes, scope, said).gated == expected


def test_gating_that_nothing_settles_is_asked_for() -> None:
    with pytest.raises(CheckpointError, match=rf"whether {FC1} is gated; say it with --swiglu all or --swiglu none"):
        decide_gating({f"{FC1}.weight": (2, 24, 8)}, "auto", None)


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(CheckpointError, match=rf"'encoder', which is part of no MLP's name; there are \['{FC1}'\]"):
        decide_gating(GATED, "encoder", None)


def parameters(spec: GptSpec) -> list[Parameter]:
    return [Parameter(name, len(shape), name not in buffers_of(spec)) for name, shape in parameter_shapes(spec).items()]


@pytest.mark.parametrize("spec", [GptSpec(), GptSpec(bias=True, swiglu=False), GptSpec(experts=2, expert_bias=True)])
def test_inference_follows_the_default_rule(spec: GptSpec) -> None:
    assert assign(parameters(spec), param_groups(spec), "infer").group_of == group_map(spec)


def test_decoupled_learning_rates_are_told_apart() -> None:
    groups = [*param_groups(GptSpec()), make_group(0.1, is_decoupled_lr=True)]
    found = assign(parameters(GptSpec()), groups, "infer").group_of
    decoupled = {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert found == group_map(GptSpec()) | dict.fromkeys(decoupled, 2)


def test_a_single_group_has_all_that_is_optimised() -> None:
    spec = GptSpec(experts=2)
    frozen = Parameter("frozen.weight", 2, has_state=False)
    for group in param_groups(spec):  # whatever its options say
        found = assign([*parameters(spec), frozen], [group], "infer").group_of
        assert found == dict.fromkeys(group_map(spec), 0)


def test_inference_refuses_groups_that_do_not_fit_one_to_one() -> None:
    twice = [*param_groups(GptSpec()), make_group(0.2)]
    with pytest.raises(CheckpointError, match=r"groups \[\d, 2\] all fit embedding.*--param-to-param-group-map-json"):
        assign(parameters(GptSpec()), twice, "infer")
    with pytest.raises(CheckpointError, match=r"no parameter group fits .*experts"):
        assign(parameters(GptSpec(experts=2)), param_groups(GptSpec()), "infer")


@pytest.mark.parametrize(
    "spell",
    [
        lambda name: f"model.module.{name}",
        lambda name: f"module.module.{name}",
        lambda name: f"{name}_w" if "linear_fc1.weight" in name else name,
        lambda name: name.replace(".transformer_layer.", ".mtp_model_layer."),
        lambda name: name.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        lambda name: name.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        lambda name: (
            name.replace("experts.linear_fc2.weight", "experts.local_experts.") + ".linear_fc2.weight"
            if "experts.linear_fc2" in name
            else name
        ),
    ],
)
def test_maps_of_live_models_are_understood(spell: object) -> None:
    spec = GptSpec(experts=2, dense_layers=1, mtp=True, expert_bias=True)
    written = {spell(name): index for name, index in group_map(spec).items()}  # type: ignore[operator]
    assignment = assign(parameters(spec), param_groups(spec), "map", written)
    assert assignment.group_of == group_map(spec)
    assert assignment.notes == ()


def test_a_map_that_lacks_a_parameter_or_names_a_group_too_many_is_refused() -> None:
    spec = GptSpec()
    short = {name: index for name, index in group_map(spec).items() if name != "output_layer.weight"}
    with pytest.raises(CheckpointError, match=r"no group for output_layer\.weight; dump it again"):
        assign(parameters(spec), param_groups(spec), "map", short)
    with pytest.raises(CheckpointError, match=r"\(it has 2\): output_layer\.weight -> 2"):
        assign(parameters(spec), param_groups(spec), "map", group_map(spec) | {"output_layer.weight": 2})


def test_a_map_that_puts_two_halves_into_different_groups_is_refused() -> None:
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    apart = group_map(GptSpec()) | {f"{name}_w": 0, f"{name}_v": 1}
    with pytest.raises(CheckpointError, match=rf"different groups under several names: {name}_v"):
        assign(parameters(GptSpec()), param_groups(GptSpec()), "map", apart)


def test_a_map_that_names_more_is_noted() -> None:
    spec = GptSpec()
    assignment = assign(parameters(spec), param_groups(spec), "map", group_map(spec) | {"other.weight": 0})
    assert assignment.notes == ("the map names what the checkpoint lacks: other.weight",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups": "some"}, "use infer, map or none"),
        ({"groups": "map"}, "needs --param-to-param-group-map-json"),
        ({"groups": "none", "param_to_group": {}}, "leave one of them out"),
        ({"masters": "fp16"}, "use fp32 or model"),
        ({"swiglu": ""}, "use auto, all, none"),
        ({"model_prefix": "model."}, "names joined by single dots"),
        ({"optimizer_prefix": ""}, "names joined by single dots"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        ConvertOptions(**arguments)  # type: ignore[arg-type]


def test_prefixes_follow_the_wrappers() -> None:
    half, full = Prefixes.of(ConvertOptions(), is_fp32=False), Prefixes.of(ConvertOptions(), is_fp32=True)
    assert half.of_state("w", "exp_avg") == ("optimizer", "state", "module.module.module.w", "exp_avg")
    assert full.of_group("w") == ("optimizer", "param_to_group_meta", "module.module.w")
    assert half.of_weight("w") == ("model", "module.w")


def test_names_of_objects_and_wrapped_parameters() -> None:
    found = parse_object_key("rng_state/shard_0.1_1.2")
    assert found is not None
    assert (found.key, found.cell, found.grid) == ("rng_state", (0, 1), (1, 2))
    assert parse_object_key("args") is None
    assert canonical_name("module.module.a.experts.local_experts.3.linear_fc1.bias") == "a.experts.linear_fc1.bias3"


def test_shapes_that_lack_the_axes_of_their_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="needs 2 leading axes"):
        list(pieces("decoder.layers.mlp.experts.experts.linear_fc2.weight", (4,), gated=False))
    with pytest.raises(CheckpointError, match="too many layers and experts"):
        list(pieces("decoder.layers.mlp.linear_fc2.weight", (10**12, 0), gated=False))
    with pytest.raises(CheckpointError, match="3 rows, which do not divide"):
        list(pieces("decoder.layers.0.mlp.linear_fc1.weight", (3, 2), gated=True))


def test_biases_of_routers_need_no_group_even_where_they_have_state() -> None:
    bias = Parameter("decoder.layers.0.mlp.router.expert_bias", 1, has_state=True)
    written = group_map(GptSpec())
    assert assign([*parameters(GptSpec()), bias], param_groups(GptSpec()), "map", written).group_of == written


@pytest.mark.parametrize("how", ["map", "infer"])
def test_parameters_without_state_need_no_group(how: str) -> None:
    frozen = Parameter("vision_model.conv1.weight", 4, has_state=False)
    written = group_map(GptSpec()) if how == "map" else None
    found = assign([*parameters(GptSpec()), frozen], param_groups(GptSpec()), how, written).group_of
    assert found == group_map(GptSpec())
