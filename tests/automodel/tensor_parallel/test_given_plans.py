"""Plans that users give, by styles of torch, names or import path; adapters of peft; styles no small family uses."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from megatron_fsdp.automodel.tensor_parallel import AppliedPlan, parallelize_tensors
from tests.automodel.small_models import VOCABULARY, build
from tests.automodel.tensor_parallel.training import differences, train, with_lora
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of
from tests.support.parity import fixed_seed

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
}


def by_given_plans() -> list[str]:
    wrong = []
    mesh = mesh_of((2,), ("tp",))
    expected = {kind: train(build(kind, **SIZES)) for kind, _, _ in PLANS.values()}
    for case, (kind, plan, splits_tokens) in PLANS.items():
        model = build(kind, **SIZES)
        parallelize_tensors(model, mesh, plan=plan, sequence_parallel=splits_tokens)
        wrong += [f"{case}: {text}" for text in differences(train(model), expected[kind])]
    return wrong


def test_given_plans_equal_one_process(run_ranks: RunRanks) -> None:
    assert run_ranks(2, by_given_plans) == [[], []]


def with_adapters() -> list[str]:
    wrong = []
    cases = {
        "llama": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "lm_head"],
        "llama_tied": ["q_proj", "down_proj"],
        "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "qwen2_moe": ["k_proj", "o_proj", "shared_expert_gate", "shared_expert.down_proj"],
    }
    mesh = mesh_of((2,), ("tp",))
    for kind, targets in cases.items():
        expected = train(with_lora(build(kind, **SIZES), targets))
        for splits_tokens in (False, True):
            model = with_lora(build(kind, **SIZES), targets)
            parallelize_tensors(model, mesh, sequence_parallel=splits_tokens)
            case = f"{kind}, sequence_parallel={splits_tokens}"
            wrong += [f"{case}: {text}" for text in differences(train(model), expected)]
    return wrong


@pytest.mark.full
def test_adapters_of_peft_equal_one_process(run_ranks: RunRanks) -> None:
    assert run_ranks(2, with_adapters) == [[], []]


def gpt_oss() -> nn.Module:
    """Attention sinks by head (local_params), and experts with biases."""
    config = transformers.GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=1,
        sliding_window=6,
    )
    return _random(config)


def opt() -> nn.Module:
    """Attention that counts its heads by an attribute."""
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        word_embed_proj_dim=32,
        dropout=0.0,
    )
    return _random(config)


def _random(config: Any) -> nn.Module:
    with fixed_seed(0):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for param in model.parameters():
                param.copy_(torch.randn(param.shape) * 0.2)
    return model.train()


def other_families() -> list[str]:
    wrong = []
    cases: list[tuple[Callable[[], nn.Module], Any]] = [(gpt_oss, None), (opt, OPT)]
    mesh = mesh_of((2,), ("tp",))
    for build_it, plan in cases:
        expected = train(build_it())
        model = build_it()
        parallelize_tensors(model, mesh, plan=plan)
        wrong += [f"{build_it.__name__}: {text}" for text in differences(train(model), expected)]
    return wrong


@pytest.mark.full
def test_sinks_expert_biases_and_counted_heads_equal_one_process(run_ranks: RunRanks) -> None:
    assert run_ranks(2, other_families) == [[], []]


class OwnParts(nn.Module):
    """Weights that the module owns itself, the second of which makes a sum over the columns of the first."""

    def __init__(self) -> None:
        super().__init__()
        with fixed_seed(5):
            self.up = nn.Parameter(torch.randn(6, 8))
            self.down = nn.Parameter(torch.randn(8, 6))

    def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.relu(tokens @ self.up.T) @ self.down.T * scale


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = OwnParts()
        self.packed = nn.Linear(8, 6, bias=False)
        with fixed_seed(6), torch.no_grad():
            self.packed.weight.normal_()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scale = tokens.sum(-1, keepdim=True)
        return self.part(tokens, scale=scale)


def parts_of_a_module() -> list[str]:
    """A module whose own parameters are cut and whose output is summed; the same stored in parts and used whole."""
    wrong = []
    plans = (
        {"part": "all_reduce", "part.up": "colwise", "part.down": "rowwise"},
        {"part.up": "rowwise", "part.down": "colwise"},
    )
    mesh = mesh_of((2,), ("tp",))
    for plan in plans:
        gradients = []
        for divided in (False, True):
            model = Holder()
            if divided:
                parallelize_tensors(model, mesh, plan=plan)
            tokens = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
            model(tokens).square().sum().backward()
            assert tokens.grad is not None
            up, down = model.part.up.grad, model.part.down.grad
            gradients.append([tokens.grad, *(g.full_tensor() if divided else g for g in (up, down))])
        same = [torch.allclose(mine, right, rtol=1e-4) for right, mine in zip(*gradients, strict=True)]
        wrong += [] if all(same) else [f"{plan}: {same}"]
    return wrong


def test_parameters_that_a_plan_names_equal_one_process(run_ranks: RunRanks) -> None:
    assert run_ranks(2, parts_of_a_module) == [[], []]


def packed_input() -> bool:
    """A linear layer that takes two packed halves of which each rank has a part."""
    mesh = mesh_of((2,), ("tp",))
    model = Holder()
    right = model.packed(torch.arange(8.0))
    parallelize_tensors(model, mesh, plan={"packed": "packed_rowwise"})
    rank = mesh.get_local_rank()
    own = torch.arange(8.0).unflatten(-1, (2, 4))[:, 2 * rank : 2 * rank + 2].flatten()
    is_cut = model.packed.weight.placements == (Shard(1),)
    return is_cut and torch.allclose(model.packed(own), right)


def test_a_packed_input_is_put_together(run_ranks: RunRanks) -> None:
    assert run_ranks(2, packed_input) == [True, True]


def what_was_done() -> AppliedPlan:
    mesh = mesh_of((2,), ("tp",))
    return parallelize_tensors(build("qwen3", num_hidden_layers=1), mesh, sequence_parallel=True)


def test_the_report_names_each_divided_module(run_ranks: RunRanks) -> None:
    done = run_ranks(2, what_was_done)[0]
    assert done.source == "transformers, qwen3"
    assert done.sequence_parallel
    assert done.styles["model.layers.0.self_attn.q_proj"] == "colwise"
    assert done.styles["model.layers.0.input_layernorm"] == "replicated_with_grad_allreduce"
    assert done.styles["lm_head"] == "colwise_gather_output"
