"""Which group a parameter belongs to, by rule or by a map, and which MLPs are gated; refusals where nothing says it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp.checkpoint.convert.groups import (
    Parameter,
    assign,
    dump_param_to_param_group_map,
    export_group_map_json,
    read_group_map,
    read_group_map_json,
)
from megatron_fsdp.checkpoint.convert.groups import group_map as map_of
from megatron_fsdp.checkpoint.convert.names import decide_gating, pieces
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions
from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from tests.support.on_ranks import on_ranks, same_on_ranks
from tests.support.torch_dist import GptSpec, buffers_of, group_map, make_group, param_groups, parameter_shapes

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
            "language,",
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
        assert decide_gating(shapes, scope, said)[0] == expected


@pytest.mark.parametrize(
    ("scope", "message"),
    [
        ("auto", rf"whether {FC1} is gated; say it with --swiglu all or --swiglu none"),
        ("encoder", rf"'encoder', which is part of no MLP's name; there are \['{FC1}'\]"),
    ],
)
def test_gating_that_nothing_settles_or_of_no_module(scope: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        decide_gating({f"{FC1}.weight": (2, 24, 8)}, scope, None)


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


HALF = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_layer.weight": None}, r"no group for output_layer\.weight; dump it again"),
        ({"output_layer.weight": 2}, r"\(it has 2\): output_layer\.weight -> 2"),
        ({f"{HALF}_w": 0, f"{HALF}_v": 1}, rf"different groups under several names: {HALF}_v"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(changes: dict[str, int | None], message: str) -> None:
    changed = group_map(GptSpec()) | changes
    with pytest.raises(CheckpointError, match=message):
        assign(
            parameters(GptSpec()), param_groups(GptSpec()), "map", {k: v for k, v in changed.items() if v is not None}
        )


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


def test_shapes_that_lack_the_axes_of_their_name_are_refused() -> None:
    with pytest.raises(CheckpointError, match="needs 2 leading axes"):
        list(pieces("decoder.layers.mlp.experts.experts.linear_fc2.weight", (4,), gated=False))
    with pytest.raises(CheckpointError, match="too many layers and experts"):
        list(pieces("decoder.layers.mlp.linear_fc2.weight", (10**12, 0), gated=False))
    with pytest.raises(CheckpointError, match="3 rows, which do not divide"):
        list(pieces("decoder.layers.0.mlp.linear_fc1.weight", (3, 2), gated=True))


@pytest.mark.parametrize("how", ["map", "infer"])
@pytest.mark.parametrize(
    ("name", "dims", "has_state"),
    [("decoder.layers.0.mlp.router.expert_bias", 1, True), ("vision_model.conv1.weight", 4, False)],
)
def test_biases_of_routers_and_parameters_without_state_need_no_group(
    how: str, name: str, dims: int, has_state: bool
) -> None:
    written = group_map(GptSpec()) if how == "map" else None
    found = assign([*parameters(GptSpec()), Parameter(name, dims, has_state)], param_groups(GptSpec()), how, written)
    assert found.group_of == group_map(GptSpec())


# ---- the map that a run has dumped -----------------------------------------------------------------------------------


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))


def test_groups_count_on_from_one_optimizer_to_the_next() -> None:
    model = two_layers()
    first = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[0].bias]}], lr=0.1)
    second = torch.optim.Adam([model[1].weight])
    assert map_of(model, [first, second]) == {"0.weight": 0, "0.bias": 1, "1.weight": 2}
    assert map_of(model, second) == {"1.weight": 0}


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"holds 3 parameters that are not the model's"):
        map_of(two_layers(), torch.optim.SGD(two_layers().parameters(), lr=0.1))


@on_ranks(2)
def test_ranks_with_other_experts_dump_all_of_them_and_those_that_disagree_are_refused(tmp_path: Path) -> None:
    """Each rank has one expert, which it calls 0."""
    rank = dist.get_rank()
    model = nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2, bias=False)]), "norm": nn.LayerNorm(2)})
    groups = [{"params": [*model[name].parameters()]} for name in ("norm", "experts")]

    def dump(groups: list[dict[str, Any]], folder: Path) -> None:
        optimizer = torch.optim.SGD(groups, lr=0.1)
        names = lambda name: name.replace("experts.0.", f"experts.{rank}.")  # noqa: E731
        dump_param_to_param_group_map(model, optimizer, folder, global_name=names)

    dump(groups, tmp_path / "map")
    expected = {"experts.0.weight": 1, "experts.1.weight": 1, "norm.weight": 0, "norm.bias": 0}
    assert read_group_map(tmp_path / "map") == expected
    with pytest.raises(
        CheckpointError, match=r"ranks put norm\.weight, norm\.bias into different parameter gr"
    ) as raised:
        dump(groups if rank == 0 else groups[::-1], tmp_path / "never")
    same_on_ranks(str(raised.value))
    assert not (tmp_path / "never").exists()


def test_indices_that_are_tensors_are_numbers(tmp_path: Path) -> None:
    save_alone({"module.module.w": torch.tensor(3), "module.module.b": 0}, checkpoint_id=tmp_path)
    assert read_group_map_json(export_group_map_json(tmp_path)) == {"model.module.w": 3, "model.module.b": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 200_000, "cannot read the map of parameter groups from .*map.json"),
        ("[1]", "a JSON list"),
        ("{", "cannot read the map"),
        ('{"w": 1.5}', "w: 1.5"),
        ('{"w": -2}', "w: -2"),
    ],
)
def test_json_that_is_no_map_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "map.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_group_map_json(tmp_path / "map.json")
