"""Divided tensors: placements, plans that users give, adapters of peft, styles no small family uses, refusals."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._inductor import config as inductor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.llama.modeling_llama import LlamaMLP

from megatron_fsdp.automodel.tensor_parallel import enable_async_tensor_parallel, parallelize_tensors
from megatron_fsdp.automodel.tensor_parallel.plans import STYLE_NAMES
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.test_adapters import lora, with_adapters
from tests.automodel.training import assert_trained_alike, reference, train
from tests.support.arrangements import mesh_of
from tests.support.language_models import VOCABULARY, batch_of, build
from tests.support.on_ranks import fixed_seed, on_ranks, refusal

SIZES = {"num_hidden_layers": 2}
ATTENTION = "model.layers.*.self_attn"
MLP = "model.layers.*.mlp"

LATENT = {
    f"{ATTENTION}.q_b_proj": "colwise",
    f"{ATTENTION}.kv_b_proj": "colwise",
    f"{ATTENTION}.kv_a_proj_with_mqa": "mla_kv_a_proj",
    f"{ATTENTION}.o_proj": "rowwise",
}
PACKED = {f"{MLP}.gate_up_proj": "packed_colwise", f"{MLP}.down_proj": "rowwise", "lm_head": "rowwise_split_input"}
EMBEDDING_BY_COLUMNS = {f"{MLP}.*_proj": "replicate", "model.embed_tokens": "embedding_colwise"}
OPT_ATTENTION = "model.decoder.layers.*.self_attn"
OPT = {f"{OPT_ATTENTION}.[qkv]_proj": "colwise", f"{OPT_ATTENTION}.out_proj": "rowwise"}


def plan_of_torch() -> Mapping[str, Any]:
    """For Llama; the loss is computed on whole logits."""
    up, down = ColwiseParallel(), RowwiseParallel()
    names = (*(f"{ATTENTION}.{part}_proj" for part in "qkv"), f"{MLP}.gate_proj", f"{MLP}.up_proj")
    rest = {
        f"{ATTENTION}.o_proj": down,
        f"{MLP}.down_proj": down,
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    return dict.fromkeys(names, up) | rest


PLAN_BY_NAMES = {f"{MLP}.gate_proj": "colwise", f"{MLP}.up_proj": "colwise", f"{MLP}.down_proj": "rowwise"}

PLANS: dict[str, tuple[str, Any, bool]] = {
    "path of a function": ("llama", f"{__name__}.plan_of_torch", False),
    "path of a dict": ("llama", f"{__name__}:PLAN_BY_NAMES", True),
    "latent attention": ("deepseek_v3", LATENT, False),
    "packed output": ("phi3", PACKED, True),
    "tied by columns": ("llama_tied", EMBEDDING_BY_COLUMNS, True),
    "sinks by head, and biases of experts": ("gpt_oss", None, False),
}


@on_ranks(2)
def test_given_plans_equal_one_process() -> None:
    mesh = mesh_of((2,), ("tp",))
    for kind, plan, splits_tokens in PLANS.values():
        model = build(kind, **SIZES)
        parallelize_tensors(model, mesh, plan=plan, sequence_parallel=splits_tokens)
        assert_trained_alike(train(model, alone=True), reference(kind, steps=2, changes=SIZES))


@pytest.mark.full(short=["deepseek_v3"])
@pytest.mark.parametrize("kind", ["llama_tied", "gemma3", "deepseek_v3"])
@on_ranks(2)
def test_every_parameter_is_a_dtensor_with_a_gradient_placed_alike(kind: str) -> None:
    for splits_tokens in (False, True):
        model = build(kind, **SIZES)
        tied = sum(1 for _ in model.parameters())
        parallelize_tensors(model, mesh_of((2,), ("tp",)), sequence_parallel=splits_tokens)
        model(**batch_of()).loss.backward()
        params = dict(model.named_parameters())
        assert len(params) == tied
        for name, param in params.items():
            assert isinstance(param, DTensor), name
            assert param.grad is None or param.grad.placements == param.placements, name


@on_ranks(2)
def test_experts_without_tokens_get_a_gradient_of_zero() -> None:
    """One token for two experts of four: some rank's experts get none."""
    gradients = []
    for divided in (False, True):
        model = build("mixtral", **SIZES)
        model.config._experts_implementation = "eager"
        if divided:
            parallelize_tensors(model, mesh_of((2,), ("tp",)))
        model(input_ids=batch_of()["input_ids"][:1, :1], use_cache=False).logits.square().mean().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, right in gradients[0].items():
        torch.testing.assert_close(gradients[1][name].full_tensor(), right, rtol=1e-4, atol=1e-6, msg=name.__add__)


def adapted(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """The model with random adapters of peft."""
    return with_adapters(model, lora(target_modules=targets, init_lora_weights=False, **options))


@pytest.mark.full
@on_ranks(2)
def test_adapters_of_peft_equal_one_process() -> None:
    cases = {
        "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
        "llama_tied": ["q_proj", "down_proj"],
        "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "qwen2_moe": ["k_proj", "o_proj", "shared_expert_gate", "shared_expert.down_proj"],
    }
    mesh = mesh_of((2,), ("tp",))
    for kind, targets in cases.items():
        expected = train(adapted(build(kind, **SIZES), targets), alone=True)
        for splits_tokens in (False, True):
            model = adapted(build(kind, **SIZES), targets)
            parallelize_tensors(model, mesh, sequence_parallel=splits_tokens)
            assert_trained_alike(train(model, alone=True), expected)


class ScaledMLP(LlamaMLP):
    """An MLP with a parameter behind its row-wise layer, which sees the tokens of this rank."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


@pytest.mark.full(short=["the plan"])
@pytest.mark.parametrize("told_by", ["the plan", "a mark"])
@on_ranks(2)
def test_parameters_that_see_divided_tokens_equal_one_process(told_by: str) -> None:
    def scaled() -> nn.Module:
        model = build("llama", **SIZES)
        for mlp in [part for part in model.modules() if isinstance(part, LlamaMLP)]:
            mlp.__class__ = ScaledMLP
            mlp.scale = nn.Parameter(torch.linspace(0.5, 1.5, mlp.hidden_size))
            mlp.scale.sequence_parallel = told_by == "a mark"
        return model

    expected = train(scaled(), alone=True)
    plan = {f"{MLP}.gate_proj": "colwise", f"{MLP}.up_proj": "colwise", f"{MLP}.down_proj": "rowwise"}
    if told_by == "the plan":
        plan[f"{MLP}.scale"] = "sequence_parallel"
    for splits_tokens in (False, True):
        model = scaled()
        parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=plan, sequence_parallel=splits_tokens)
        assert_trained_alike(train(model, alone=True), expected)


def opt(_: nn.Module) -> nn.Module:
    """Attention that counts its heads by an attribute."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    own = {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32, "dropout": 0.0}
    model: nn.Module = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **own))
    with fixed_seed(0), torch.no_grad():
        for param in model.parameters():  # biases start at zero, norms at one: a swap would not be seen
            param.copy_(torch.randn(param.shape) * 0.2)
    return model.train()


@pytest.mark.full
@on_ranks(2)
def test_counted_heads_equal_one_process() -> None:
    model = opt(nn.Module())
    parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=OPT)
    assert_trained_alike(train(model, alone=True), reference("llama", steps=2, edit=opt))


class OwnParts(nn.Module):
    """Weights that the module owns itself, the second of which makes a sum over the columns of the first."""

    def __init__(self) -> None:
        super().__init__()
        with fixed_seed(5):
            self.up = nn.Parameter(torch.randn(6, 8))
            self.down = nn.Parameter(torch.randn(8, 6))

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(tokens @ self.up.T) @ self.down.T * scale


@on_ranks(2)
def test_parameters_that_a_plan_names_equal_one_process() -> None:
    """A module whose own parameters are cut and whose output is summed; the same stored in parts and used whole."""
    for plan in (
        {"part": "all_reduce", "part.up": "colwise", "part.down": "rowwise"},
        {"part.up": "rowwise", "part.down": "colwise"},
    ):
        gradients = []
        for divided in (False, True):
            model: Any = nn.ModuleDict({"part": OwnParts()})
            if divided:
                parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=plan)
            tokens = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
            model["part"](tokens, scale=tokens.sum(-1, keepdim=True)).square().sum().backward()
            up, down = model["part"].up.grad, model["part"].down.grad
            gradients.append([tokens.grad, *(g.full_tensor() if divided else g for g in (up, down))])
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_packed_input_is_put_together() -> None:
    """A linear layer that takes two packed halves of which each rank has a part."""
    mesh = mesh_of((2,), ("tp",))
    with fixed_seed(6):
        model: Any = nn.ModuleDict({"packed": nn.Linear(8, 6, bias=False)})
    right = model["packed"](torch.arange(8.0))
    parallelize_tensors(model, mesh, plan={"packed": "packed_rowwise"})
    rank = mesh.get_local_rank()
    own = torch.arange(8.0).unflatten(-1, (2, 4))[:, 2 * rank : 2 * rank + 2].flatten()
    assert model["packed"].weight.placements == (Shard(1),)
    assert torch.allclose(model["packed"](own), right)


EXPERT_PARALLEL = {"grouped_gemm", "ep_dispatch_experts"}
"""Names of plans for expert parallelism, which are other plans."""


def test_every_style_that_transformers_registers_is_known() -> None:
    assert set(ALL_PARALLEL_STYLES.keys()) - STYLE_NAMES - EXPERT_PARALLEL == set()


NOT_A_PLAN = 3
Q = "model.layers.*.self_attn.q_proj"


def dora() -> nn.Module:
    return adapted(build("llama", num_hidden_layers=1), ["q_proj"], use_dora=True)


def lora_on_a_parameter() -> nn.Module:
    return adapted(build("llama", num_hidden_layers=1), [], target_parameters=["q_proj.weight"])


def without_plan() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4))


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no plan": ("gpt2", {}, r"no tensor-parallel plan for GPT2LMHeadModel \(gpt2\); give tp_plan"),
    "no model of transformers": (without_plan, {}, r"no plan|no tensor-parallel plan"),
    "empty plan": ("llama", {"plan": {}}, r"not empty"),
    "path to a number": ("llama", {"plan": f"{__name__}.NOT_A_PLAN"}, r"leads to 3"),
    "wrong path": ("llama", {"plan": f"{__name__}.PLAM"}, r"has no 'PLAM'"),
    "unknown style": ("llama", {"plan": {Q: "colwize"}}, r"did you mean 'colwise'\?"),
    "style of no kind": ("llama", {"plan": {Q: 3}}, r"allowed are a ParallelStyle of torch and"),
    "names nothing": (
        "llama",
        {"plan": {Q: "colwise", "model.layers.*.self_attn.qproj": "colwise"}},
        r"names no module of this model; the nearest names are model\.layers\.\*\.self_attn\.\w_proj",
    ),
    "two styles": (
        "llama",
        {"plan": {"model.layers.*.*.q_proj": "rowwise", "model.*.*.self_attn.q_proj": "colwise"}},
        r"two styles",
    ),
    "style of torch on a parameter": (
        "llama",
        {"plan": {"lm_head.weight": ColwiseParallel()}},
        r"the parameter lm_head\.weight a style of torch",
    ),
    "not a linear layer": ("gpt2", {"plan": {"transformer.h.*.attn.c_attn": "colwise"}}, r"a Conv1D"),
    "not an embedding": ("llama", {"plan": {Q: "embedding_rowwise"}}, r"is for an nn\.Embedding"),
    "no rotary width": ("llama", {"plan": {Q: "mla_kv_a_proj"}}, r"no qk_rope_head_dim"),
    "heads": ("llama", {"changes": {"num_key_value_heads": 1}}, r"num_key_value_heads=1, which 2"),
    "width": ("llama", {"changes": {"intermediate_size": 47}}, r"\(out_features\) is 47, which 2"),
    "experts": ("mixtral", {"changes": {"num_local_experts": 3}}, r"has 3 experts, which 2"),
    "dora": (dora, {}, r"use plain LoRA on linear layers"),
    "lora on a parameter": (lora_on_a_parameter, {}, r"q_proj is a ParamWrapper of peft, which"),
    "tokens of an unknown family": (
        "gpt2",
        {"plan": {"lm_head": "colwise_rep"}, "sequence_parallel": True},
        r"not offered for GPT2LMHeadModel \(gpt2\), but for",
    ),
    "tokens by styles of torch": (
        "llama",
        {"plan": {Q: ColwiseParallel()}, "sequence_parallel": True},
        r"cannot change the styles of torch",
    ),
}


def small(kind: Any, changes: dict[str, Any]) -> nn.Module:
    if not isinstance(kind, str):
        return kind()
    return build(kind, **changes) if kind == "gpt2" else build(kind, num_hidden_layers=1, **changes)


@on_ranks(2)
def test_bad_plans_and_sizes_are_refused_alike_on_every_rank() -> None:
    mesh = mesh_of((2,), ("tp",))
    for case, (kind, arguments, pattern) in CASES.items():
        options = dict(arguments)
        changes = options.pop("changes", {})
        model = small(kind, changes)
        kind_of_error = ParallelSizeError if changes else ConfigurationError
        assert re.search(pattern, refusal(parallelize_tensors, model, mesh, error=kind_of_error, **options)), case
        assert not any(isinstance(param, DTensor) for param in model.parameters()), case


@on_ranks(2)
def test_rows_that_the_ranks_do_not_divide_are_refused_in_forward() -> None:
    model = build("llama", num_hidden_layers=1)
    parallelize_tensors(model, mesh_of((2,), ("tp",)), sequence_parallel=True)
    told = refusal(model, input_ids=torch.arange(15)[None], error=ParallelSizeError)
    assert told.startswith("the batch has 15 tokens in a row, which 2 tensor-parallel ranks can")


@on_ranks(2)
def test_a_mesh_of_two_dimensions_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"one-dimensional.*\('dp', 'tp'\)|\('dp', 'tp'\).*one-dimensional"):
        parallelize_tensors(build("llama", num_hidden_layers=1), mesh_of((1, 2), ("dp", "tp")))


@on_ranks(2)
def test_asynchronous_tensor_parallelism_says_that_cpus_cannot() -> None:
    before = inductor._micro_pipeline_tp
    with pytest.warns(UserWarning, match="asynchronous.*training continues without it$") as caught:
        assert not enable_async_tensor_parallel(mesh_of((2,), ("tp",)))
    assert len(caught) == 1
    assert inductor._micro_pipeline_tp == before


@on_ranks(2)
def test_a_plan_may_name_what_a_pipeline_stage_gave_away() -> None:
    model: transformers.PreTrainedModel = build("llama", num_hidden_layers=1)
    model.lm_head = None
    plan = {Q: "colwise", "lm_head": "colwise_gather_output"}
    parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=plan)
    assert [name for name, param in model.named_parameters() if param.placements == (Shard(0),)] == [
        "model.layers.0.self_attn.q_proj.weight"
    ]
