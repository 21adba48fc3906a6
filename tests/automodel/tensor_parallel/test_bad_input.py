"""What cannot be done is refused in a sentence, on every rank alike, before anything is changed."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel

from megatron_fsdp.automodel.tensor_parallel import enable_async_tensor_parallel, parallelize_tensors
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.small_models import build
from tests.automodel.tensor_parallel.training import with_lora
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of

NOT_A_PLAN = 3
Q = "model.layers.*.self_attn.q_proj"


def dora() -> nn.Module:
    return with_lora(build("llama", num_hidden_layers=1), ["q_proj"], use_dora=True)


def without_plan() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


CASES: dict[str, tuple[Any, dict[str, Any], type[Exception], str]] = {
    "no plan": ("gpt2", {}, ConfigurationError, r"no tensor-parallel plan for GPT2LMHeadModel \(gpt2\); give tp_plan"),
    "no model of transformers": (
        without_plan,
        {},
        ConfigurationError,
        r"no plan|no tensor-parallel plan",
    ),
    "empty plan": ("llama", {"plan": {}}, ConfigurationError, r"not empty"),
    "path to a number": ("llama", {"plan": f"{__name__}.NOT_A_PLAN"}, ConfigurationError, r"leads to 3"),
    "wrong path": ("llama", {"plan": f"{__name__}.PLAM"}, ConfigurationError, r"has no 'PLAM'"),
    "unknown style": ("llama", {"plan": {Q: "colwize"}}, ConfigurationError, r"did you mean 'colwise'\?"),
    "style of no kind": ("llama", {"plan": {Q: 3}}, ConfigurationError, r"allowed are a ParallelStyle of torch and"),
    "names nothing": (
        "llama",
        {"plan": {Q: "colwise", "model.layers.*.self_attn.qproj": "colwise"}},
        ConfigurationError,
        r"names no module of this model; the nearest names are model\.layers\.\*\.self_attn\.\w_proj",
    ),
    "two styles": (
        "llama",
        {"plan": {"model.layers.*.*.q_proj": "rowwise", "model.*.*.self_attn.q_proj": "colwise"}},
        ConfigurationError,
        r"two styles",
    ),
    "style of torch on a parameter": (
        "llama",
        {"plan": {"lm_head.weight": ColwiseParallel()}},
        ConfigurationError,
        r"the parameter lm_head\.weight a style of torch",
    ),
    "not a linear layer": (
        "gpt2",
        {"plan": {"transformer.h.*.attn.c_attn": "colwise"}},
        ConfigurationError,
        r"a Conv1D",
    ),
    "not an embedding": ("llama", {"plan": {Q: "embedding_rowwise"}}, ConfigurationError, r"is for an nn\.Embedding"),
    "no rotary width": ("llama", {"plan": {Q: "mla_kv_a_proj"}}, ConfigurationError, r"no qk_rope_head_dim"),
    "heads": ("llama", {"changes": {"num_key_value_heads": 1}}, ParallelSizeError, r"num_key_value_heads=1, which 2"),
    "width": ("llama", {"changes": {"intermediate_size": 47}}, ParallelSizeError, r"\(out_features\) is 47, which 2"),
    "experts": ("mixtral", {"changes": {"num_local_experts": 3}}, ParallelSizeError, r"has 3 experts, which 2"),
    "dora": (dora, {}, ConfigurationError, r"use plain LoRA on linear layers"),
    "tokens of an unknown family": (
        "gpt2",
        {"plan": {"lm_head": "colwise_rep"}, "sequence_parallel": True},
        ConfigurationError,
        r"not offered for GPT2LMHeadModel \(gpt2\), but for",
    ),
    "tokens by styles of torch": (
        "llama",
        {"plan": {Q: ColwiseParallel()}, "sequence_parallel": True},
        ConfigurationError,
        r"cannot change the styles of torch",
    ),
}


def small(kind: Any, changes: dict[str, Any]) -> nn.Module:
    if not isinstance(kind, str):
        return kind()
    return build(kind, **changes) if kind == "gpt2" else build(kind, num_hidden_layers=1, **changes)


def refusals() -> dict[str, tuple[str, str, bool]]:
    """Case -> (type of the error, its text, whether the model is as it was)."""
    mesh = mesh_of((2,), ("tp",))
    found = {}
    for case, (kind, arguments, _, _) in CASES.items():
        model = small(kind, arguments.get("changes", {}))
        options = {key: value for key, value in arguments.items() if key != "changes"}
        try:
            parallelize_tensors(model, mesh, **options)
            found[case] = ("nothing", "", True)
        except Exception as error:  # noqa: BLE001 # what it is, is asserted
            is_whole = not any(isinstance(param, DTensor) for param in model.parameters())
            found[case] = (type(error).__name__, str(error), is_whole)
    return found


def test_bad_plans_and_sizes_are_refused_alike_on_every_rank(run_ranks: RunRanks) -> None:
    outcomes = run_ranks(2, refusals)
    assert outcomes[0] == outcomes[1]
    for case, (_, _, error, pattern) in CASES.items():
        name, text, is_whole = outcomes[0][case]
        assert name == error.__name__, (case, name, text)
        with pytest.raises(AssertionError, match=pattern):
            raise AssertionError(text)
        assert is_whole, case


def uneven_rows() -> str:
    model = build("llama", num_hidden_layers=1)
    parallelize_tensors(model, mesh_of((2,), ("tp",)), sequence_parallel=True)
    try:
        model(input_ids=torch.arange(15)[None])
    except ParallelSizeError as error:
        return str(error)
    return "nothing"


def test_rows_that_the_ranks_do_not_divide_are_refused_in_forward(run_ranks: RunRanks) -> None:
    for text in run_ranks(2, uneven_rows):
        assert text.startswith("the batch has 15 tokens in a row, which 2 tensor-parallel ranks cannot share")


def two_dimensions() -> str:
    with pytest.raises(ConfigurationError, match="one-dimensional") as caught:
        parallelize_tensors(build("llama", num_hidden_layers=1), mesh_of((1, 2), ("dp", "tp")))
    return str(caught.value)


def test_a_mesh_of_two_dimensions_is_refused(run_ranks: RunRanks) -> None:
    assert all("('dp', 'tp')" in text for text in run_ranks(2, two_dimensions))


def asynchronous_on_cpus() -> tuple[bool, str, bool]:
    before = inductor._micro_pipeline_tp
    with pytest.warns(UserWarning, match="asynchronous") as caught:
        is_on = enable_async_tensor_parallel(mesh_of((2,), ("tp",)))
    assert len(caught) == 1
    return is_on, str(caught[0].message), inductor._micro_pipeline_tp == before


def test_asynchronous_tensor_parallelism_says_that_cpus_cannot(run_ranks: RunRanks) -> None:
    for is_on, text, is_unchanged in run_ranks(2, asynchronous_on_cpus):
        assert not is_on
        assert is_unchanged
        assert text.endswith("training goes on without it")


def test_a_plan_may_name_what_a_pipeline_stage_gave_away(run_ranks: RunRanks) -> None:
    assert run_ranks(2, stage_without_head) == [["model.layers.0.self_attn.q_proj"]] * 2


def stage_without_head() -> list[str]:
    model: transformers.PreTrainedModel = build("llama", num_hidden_layers=1)
    model.lm_head = None
    plan = {Q: "colwise", "lm_head": "colwise_gather_output"}
    return list(parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=plan).styles)
