"""Every causal type of transformers that has a tensor-parallel plan: each gradient equals that of one process.

Models have norms, biases and parts that their configs can switch on, since what a plan leaves out stands there.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from megatron_fsdp.automodel.tensor_parallel import parallelize_tensors
from megatron_fsdp.automodel.tensor_parallel.parallelize import SEQUENCE_PARALLEL_TYPES, sequence_region
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.training import managed, strategy
from tests.support.arrangements import mesh_of
from tests.support.language_models import NO_DROPOUT
from tests.support.on_ranks import fixed_seed, on_ranks, refusal

SIZES: dict[str, Any] = {
    field: value
    for value, fields in {
        True: "use_qk_norm qk_norm qk_layernorm attention_bias mlp_bias qkv_bias use_bias bias use_qkv_bias",
        False: "tie_word_embeddings use_sliding_window",
        64: "vocab_size vocab_size_per_layer_input",
        32: "hidden_size intermediate_size ffn_hidden_size intermediate_size_mlp max_position_embeddings",
        16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size expert_ffn_hidden_size "
        "q_lora_rank mamba_d_head mamba_head_dim",
        8: "head_dim query_pre_attn_scalar kv_lora_rank v_head_dim qk_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_d_state ssm_state_size index_head_dim index_topk "
        "hidden_size_per_layer_input global_head_dim",
        6: "sliding_window",
        4: "num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads "
        "qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads index_n_heads",
        3: "conv_L_cache",
        2: "num_hidden_layers num_layers num_key_value_heads num_global_key_value_heads num_experts_per_tok moe_k "
        "moe_topk num_experts_per_token zero_expert_num linear_num_key_heads mamba_n_groups n_groups eos_token_id",
        "1": "n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace num_dense_layers "
        "n_group topk_group bos_token_id",
        "0": "pad_token_id num_kv_shared_layers aux_loss_alpha",
    }.items()
    for field in fields.split()
}
SIZES = {field: int(value) if isinstance(value, str) else value for field, value in SIZES.items()}
"""What is given to each config that has such a field."""

OWN: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        }
    },
    "dots3_note_text": {
        "shared_experts_intermediate_size": 16,
        "num_key_value_heads": 4,
        **{f"swa_{name}": 2 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "head_dim", "v_head_dim")},
        "swa_qk_nope_head_dim": 6,
    },
    "longcat_flash": {"head_dim": 4},
    "jamba": {"attn_layer_offset": 0, "attn_layer_period": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
}
"""What differs for one type."""


def types_with_plans() -> list[str]:
    """The causal types whose own config has a plan."""
    known = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    return [kind for kind in known if getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None)]


def config_of(kind: str) -> Any:
    config_class: Any = CONFIG_MAPPING[kind]
    usual = config_class()
    fields = {*vars(usual), *config_class.attribute_map}
    given = {key: value for key, value in SIZES.items() if key in fields}
    if "kv_lora_rank" in fields:
        given["num_key_value_heads"] = 4
        given.pop("head_dim", None)
    for key in ("layer_types", "mlp_layer_types", "layers_block_type"):  # each kind of layer once, two at least
        if key in vars(usual) and vars(usual)[key]:
            kinds = list(dict.fromkeys(vars(usual)[key]))
            given[key] = kinds * 2 if len(kinds) == 1 else kinds
    given |= OWN.get(kind, {})
    given["num_hidden_layers"] = max((len(value) for value in given.values() if isinstance(value, list)), default=2)
    config = config_class(**given, use_cache=False)
    for field in (*NO_DROPOUT, "hidden_dropout_prob", "dropout", "residual_dropout", "resid_dropout"):
        if hasattr(config, field):
            setattr(config, field, 0.0)
    return config


def build(kind: str) -> Any:
    """A model with random weights, norms and biases included."""
    factory: Any = transformers.AutoModelForCausalLM
    config = config_of(kind)
    with torch.device("meta"):
        numel = sum(param.numel() for param in factory.from_config(config).parameters())
    assert numel < 50_000_000, f"{kind} has {numel} elements; SIZES lacks a size"
    with fixed_seed(0), torch.no_grad():
        model = factory.from_config(config, dtype=torch.float32)
        for param in model.parameters():
            param.add_(torch.randn(param.shape) * 0.1)
    return model.train()


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    with fixed_seed(1):  # routers may draw numbers, too
        ids = torch.randint(3, 64, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in grads.items()}


def wrong_gradients(kind: str, *, splits_tokens: bool = False) -> list[str]:
    """The parameters whose gradient on two tensor-parallel ranks is not that of one process."""
    expected = gradients_of(build(kind))
    model = build(kind)
    parallelize_tensors(model, mesh_of((2,), ("tp",)), sequence_parallel=splits_tokens)
    found = gradients_of(model)
    largest = max(float(grad.abs().max()) for grad in expected.values() if grad is not None)
    wrong = []
    for name, right in expected.items():
        mine = found[name]
        if right is None or mine is None:
            if (mine is None or not mine.any()) is not (right is None or not right.any()):
                wrong.append(f"{name} (none)")
        elif not torch.allclose(mine, right, rtol=1e-3, atol=1e-6 * largest + 1e-4 * float(right.abs().max())):
            wrong.append(f"{name} ({float((mine - right).norm() / right.norm()):.2g})")
    return wrong


def problems(kinds: list[str], splits_tokens: bool) -> dict[str, str]:
    """What is wrong with each type, in words; right ones are left out."""
    found = {}
    for kind in kinds:
        try:
            wrong = wrong_gradients(kind, splits_tokens=splits_tokens)
        except (ConfigurationError, RuntimeError) as error:
            wrong = [f"{type(error).__name__}: {error}"]
        found.update({kind: "; ".join(wrong)} if wrong else {})
    return found


TOO_LARGE = {"llama4", "phi4_multimodal", "qwen4_exp_text"}
"""Types of several modalities whose text model is another type, or that have no small sizes."""

SHARDS = 6


def assert_right(kinds: list[str], splits_tokens: bool) -> None:
    assert problems([kind for kind in kinds if kind not in TOO_LARGE], splits_tokens) == {}


@pytest.mark.parametrize("splits_tokens", [False, True])
@on_ranks(2)
def test_gradients_of_some_types_equal_one_process(splits_tokens: bool) -> None:
    """Parameters of an activation, norms of queries and keys beside experts, norms by head.

    Layers of Dots 3 have other numbers of heads.
    """
    kinds = ["cohere", "qwen3"] if splits_tokens else ["apertus", "glm4_moe", "cohere", "dots3_note_text"]
    assert_right(kinds, splits_tokens)


@on_ranks(2)
def test_a_plan_that_leaves_norms_of_heads_whole_is_refused() -> None:
    model = build("cohere")
    mesh, plan = mesh_of((2,), ("tp",)), model._tp_plan
    text = refusal(parallelize_tensors, model, mesh, error=ConfigurationError, plan=plan)
    assert re.search(r"q_norm \(CohereLayerNorm, weight \[4, 8\]\) fails .*leaves .*q_proj \(colwise\)", text)


@pytest.mark.parametrize("kind", ["doge", "dots3_note_text"])
def test_types_whose_tokens_cannot_be_divided_are_refused(kind: str) -> None:
    told = refusal(sequence_region, build(kind), {}, error=ConfigurationError)
    assert re.search(rf"not offered for \w+ \({kind}\), but for .*; set it to False, and give", told)


@pytest.mark.full
@pytest.mark.parametrize("shard", range(SHARDS))
@on_ranks(2)
def test_gradients_of_every_type_equal_one_process(shard: int) -> None:
    kinds = types_with_plans()
    assert len(kinds) > 90
    assert_right(kinds[shard::SHARDS], splits_tokens=False)


@pytest.mark.full
@on_ranks(2)
def test_gradients_under_sequence_parallelism_equal_one_process() -> None:
    assert_right(sorted(SEQUENCE_PARALLEL_TYPES), splits_tokens=True)


MLP = "model.layers.*.mlp"


class OwnColumns(ColwiseParallel):
    """What a style of one's own does, no trial can know."""


@on_ranks(2)
def test_the_first_backward_finds_gradients_of_which_ranks_have_a_part() -> None:
    plan = {f"{MLP}.up_proj": OwnColumns(), f"{MLP}.down_proj": RowwiseParallel()}
    model = build("apertus")
    parallelize_tensors(model, mesh_of((2,), ("tp",)), plan=plan)
    text = refusal(gradients_of, model, error=ConfigurationError)
    assert text.startswith("4 parameters are whole on every tensor-parallel rank, but their gradients differ")
    assert "model.layers.1.mlp.act_fn.alpha_n (norms from" in text
    assert "replicated_with_grad_allreduce" in text


STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x * x.square().mean(-1, keepdim=True).rsqrt(),
    "_softmax": lambda x: x.softmax(-1),
    "amax": lambda x: x / x.abs().amax(-1, keepdim=True),
    "linalg_vector_norm": lambda x: x / x.norm(dim=-1, keepdim=True),
    "topk": lambda x: x.where(x >= x.topk(2).values[..., -1:], 0.0),
}


@on_ranks(2)
def test_statistics_of_divided_features_are_refused() -> None:
    """Ranks would compute the same wrong values, which comparing them cannot find."""
    for name, compute in STATISTICS.items():
        model = build("llama")
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Module()
            layer.mlp.act_fn.forward = compute
        told = refusal(parallelize_tensors, model, mesh_of((2,), ("tp",)), error=ConfigurationError)
        assert re.search(rf": {name} in model.layers.0.mlp.act_fn .* a part of \[", told)


@on_ranks(4)
def test_managers_give_gradients_of_one_process_and_ranks_compare_them() -> None:
    expected = gradients_of(build("apertus"))
    for name in ("fsdp2", "megatron_fsdp"):
        model = managed(strategy(name), build("apertus"), tp_size=2)
        found = {key.removeprefix("module."): grad for key, grad in gradients_of(model).items()}
        for key, right in expected.items():
            torch.testing.assert_close(found[key], right, rtol=1e-3, atol=1e-5)
    plan = {f"{MLP}.up_proj": OwnColumns(), f"{MLP}.down_proj": RowwiseParallel()}
    model = managed(strategy("fsdp2", tp_plan=plan), build("apertus"), tp_size=2)
    assert "model.layers.1.mlp.act_fn.alpha_n" in refusal(gradients_of, model, error=ConfigurationError)
