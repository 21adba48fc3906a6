"""Strategies from YAML: what a section may say, and that nothing is built but what is in a table."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from megatron_fsdp.automodel.config import DDPConfig, FSDP2Config, MegatronFSDPConfig
from megatron_fsdp.automodel.config_yaml import load_distributed_config, parse_distributed_section
from megatron_fsdp.automodel.pipeline_parallel import PipelineConfig
from megatron_fsdp.errors import ConfigurationError

POLICY = "torch.distributed.fsdp.MixedPrecisionPolicy"

FULL = f"""
distributed:
  strategy: fsdp2
  dp_size: none
  dp_replicate_size: null
  tp_size: 2
  cp_size: 1
  sequence_parallel: true
  activation_checkpointing: True
  autocast_dtype: bfloat16
  mp_policy:
    _target_: {POLICY}
    param_dtype: bfloat16
    reduce_dtype: torch.float32
    output_dtype: FP32
    cast_forward_inputs: false
  offload_policy:
    _target_: torch.distributed.fsdp.CPUOffloadPolicy
    pin_memory: false
model:
  anything: else
"""


def test_whole_section_becomes_config_and_sizes() -> None:
    section = load_distributed_config(FULL)
    assert section.config == FSDP2Config(
        sequence_parallel=True,
        autocast_dtype=torch.bfloat16,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32, False),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    assert section.sizes == {"tp_size": 2, "cp_size": 1}
    recomputed = dataclasses.replace(section.config, activation_checkpointing=True)
    assert section.arguments() == {"distributed_config": recomputed, "tp_size": 2, "cp_size": 1}


def test_file_reads_as_its_text_and_names_itself_in_errors(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(FULL, encoding="utf-8")
    assert load_distributed_config(path) == load_distributed_config(FULL)
    path.write_text("distributed:\n  strategy: zero\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"run.yaml: Unknown strategy 'zero'"):
        load_distributed_config(path)


def test_section_may_stand_alone_and_nothing_said_is_fsdp2() -> None:
    assert load_distributed_config("strategy: ddp\nbackend: gloo\n").config == DDPConfig(backend="gloo")
    assert load_distributed_config("distributed: {}").config == FSDP2Config()
    assert parse_distributed_section({}).sizes == {}


NAMES = {
    **dict.fromkeys(("fsdp2", " FSDP2 ", None), FSDP2Config),
    **dict.fromkeys(("megatron_fsdp", "megatron-fsdp", "mfsdp"), MegatronFSDPConfig),
    **dict.fromkeys(("ddp", "DDP"), DDPConfig),
}


def test_strategy_is_chosen_by_name_or_target() -> None:
    for name, kind in NAMES.items():
        assert type(parse_distributed_section({"strategy": name}).config) is kind
    for module in ("megatron_fsdp.automodel", "nemo_automodel.components.distributed.config"):
        for kind in (FSDP2Config, MegatronFSDPConfig, DDPConfig):
            target = f"{module}.{kind.__name__}"
            section = parse_distributed_section({"_target_": target, "dp_size": 2, "backend": "gloo"})
            assert (section.config, section.sizes) == (kind(backend="gloo"), {"dp_size": 2})
    assert parse_distributed_section({"_recursive_": False, "_convert_": "all"}).config == FSDP2Config()


def test_policies_are_built_with_and_without_targets_or_are_objects_already() -> None:
    values = {"param_dtype": "bf16", "reduce_dtype": torch.float32, "output_dtype": None}
    policy, offload = MixedPrecisionPolicy(torch.bfloat16, torch.float32, None), CPUOffloadPolicy()
    for given in (values, *({"_target_": target, **values} for target in (POLICY, MixedPrecisionPolicy)), policy):
        config: Any = parse_distributed_section({"mp_policy": given, "offload_policy": offload}).config
        assert config.mp_policy == policy
        assert config.offload_policy is offload


def test_values_of_fields_are_passed_on_and_none_is_the_default() -> None:
    values = {"backend": None, "mp_policy": "none", "tp_plan": "None", "fsdp2_forward_prefetch_depth": None}
    assert parse_distributed_section({**values, "autocast_dtype": "none"}).config == FSDP2Config()
    for value in (None, "none", "None", " NONE "):
        assert parse_distributed_section({"tp_size": value, "dp_size": value}).sizes == {}
    config: Any = parse_distributed_section({"offload_policy": {}}).config
    assert config.offload_policy == CPUOffloadPolicy()
    config = load_distributed_config("tp_plan:\n  model.layers.*.mlp.up_proj: colwise\n").config
    assert config.tp_plan == {"model.layers.*.mlp.up_proj": "colwise"}
    config = load_distributed_config("strategy: mfsdp\nmegatron_fsdp_unit_modules: [a.B]\n").config
    assert config.megatron_fsdp_unit_modules == ["a.B"]


PLANTED: list[str] = []


def planted(*_: Any, **__: Any) -> None:
    PLANTED.append("called")


HERE = "tests.automodel.test_config_yaml.planted"


@pytest.mark.parametrize(
    "section",
    [
        {"_target_": "os.system", "command": "false"},
        {"_target_": HERE},
        {"_target_": planted},
        {"mp_policy": {"_target_": HERE}},
        {"mp_policy": {"_target_": planted}},
        {"mp_policy": {"_target_": "torch.distributed.fsdp.CPUOffloadPolicy"}},
        {"offload_policy": {"_target_": HERE}},
        {"offload_policy": {"_target_": ["os.system"]}},
        {"_target_": ["os.system"]},
        {"_target_": {"_target_": HERE}},
        {"pp_size": 2, "pipeline": {"_target_": HERE}},
    ],
)
def test_target_that_is_not_in_the_table_is_neither_imported_nor_called(section: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"_target_="):
        parse_distributed_section(section)
    assert PLANTED == []


def test_target_somewhere_else_is_a_value_and_not_built() -> None:
    config: Any = parse_distributed_section({"tp_plan": {"_target_": HERE}}).config
    assert config.tp_plan == {"_target_": HERE}
    with pytest.raises(ConfigurationError, match=r"activation_checkpointing="):
        parse_distributed_section({"activation_checkpointing": {"_target_": HERE}})
    assert PLANTED == []


UNKNOWN = "^Unknown strategy .*; write fsdp2, megatron_fsdp, ddp$"
FIELD = "^Unknown options for .*"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        *(({"strategy": name}, UNKNOWN) for name in ("zero", "", 3, ["ddp"], True)),
        ({"strategy": "ddp", "_target_": "megatron_fsdp.automodel.DDPConfig"}, "both given; keep one"),
        ({"strategy": "ddp", "zero_dp_strategy": 1}, FIELD + "zero_dp_strategy is a field of MegatronFSDPConfig"),
        ({"strategy": "ddp", "sequence_parallel": True}, FIELD + "of FSDP2Config and MegatronFSDPConfig"),
        ({"strategy": "mfsdp", "enable_compile": True}, FIELD + "enable_compile is a field of FSDP2Config"),
        ({"sequence_paralel": True}, FIELD + "did you mean sequence_parallel by sequence_paralel"),
        ({"tp_sise": 2}, FIELD + "did you mean tp_size by tp_sise"),
        ({"deterministic": "world"}, "FSDP2Config takes no deterministic='world'.*use MegatronFSDPConfig"),
        ({"strategy": "ddp", "tp_plan": {}}, FIELD + "tp_plan is a field of FSDP2Config"),
        ({"zzz": 1, "yyy": 2}, FIELD + r"\['yyy', 'zzz'\]; it has sequence_parallel"),
        ({"zzz": 1, 5: 2}, FIELD + r"\[5, 'zzz'\]"),
        ({"mp_policy": {"param_type": "bf16"}}, FIELD + "MixedPrecisionPolicy.*did you mean param_dtype"),
        ({"offload_policy": {"pin": True}}, FIELD + "CPUOffloadPolicy"),
        ({"pp_size": 2, "pipeline": {"schedule": "1f1b"}}, FIELD + "PipelineConfig"),
        ({"strategy": "mfsdp", "tp_plan": {}}, "takes no tp_plan"),
        ({"sequence_parallel": "yes please"}, "sequence_parallel='yes please'; give True or False"),
        ({"mp_policy": {"param_dtype": "bfloat17"}}, "param_dtype='bfloat17' is not a dtype"),
        (
            {"mp_policy": {"cast_forward_inputs": "false"}},
            "MixedPrecisionPolicy.cast_forward_inputs='false'; give true or false",
        ),
        ({"offload_policy": {"pin_memory": "off"}}, "CPUOffloadPolicy.pin_memory='off'; give true or false"),
        ({"mp_policy": "bfloat16"}, "mp_policy='bfloat16' is a str"),
        ({"offload_policy": True}, "offload_policy=True is a bool"),
        ({"autocast_dtype": 16}, "autocast_dtype='16' is not a dtype"),
        ({"ep_size": 2, "moe": {"backend": "x"}}, FIELD + "MoEParallelizerConfig"),
        ({"ep_size": 2, "moe": 5}, "moe=5; write a mapping"),
        ({"pp_size": 2, "pipeline": 5}, "pipeline=5; write a mapping"),
        *((section, "^the section is a .*; give a mapping") for section in (None, "fsdp2", ["strategy"])),
    ],
)
def test_section_that_cannot_be_honoured_is_refused(section: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        parse_distributed_section(section)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "mapping|YAML") for text in ("distributed: 3", "distributed:", "- a", "distributed: [a", "3")),
        ("distributed:\n  tp_size: 2\n  tp_size: 4\n", "'tp_size' is there twice on line 3"),
    ],
)
def test_text_that_is_no_mapping_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        load_distributed_config(text)


def test_sections_of_axes_of_one_rank_are_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"pipeline is ignored, since pp_size is 1"):
        assert parse_distributed_section({"pipeline": {"pp_schedule": "1f1b"}}).pipeline_config is None
    with pytest.warns(UserWarning, match=r"moe is ignored, since ep_size is 1"):
        parse_distributed_section({"moe": {"backend": "x"}, "ep_size": 1})


@pytest.mark.parametrize("target", [None, "megatron_fsdp.automodel.PipelineConfig"])
def test_section_of_pipelines_is_built(target: Any) -> None:
    values = {"pp_schedule": "gpipe", "pp_microbatch_size": 2, "layers_per_stage": "none"}
    given = values if target is None else {"_target_": target, **values}
    section = parse_distributed_section({"pp_size": 2, "pipeline": given})
    expected: Any = PipelineConfig
    assert section.pipeline_config == expected(pp_schedule="gpipe", pp_microbatch_size=2, dtype=torch.bfloat16)
    assert section.arguments()["pipeline_config"] is section.pipeline_config
