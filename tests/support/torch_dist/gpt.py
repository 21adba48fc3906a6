"""Tiny GPT-like models as plain tensors: what parameters there are, under a live model's names."""

from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = ("exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class GptSpec:
    """What kind of model; sizes divide by four, so that any of them may be cut for tensor parallelism."""

    layers: int = 2
    hidden: int = 8
    ffn: int = 12
    vocabulary: int = 20
    experts: int = 0
    dense_layers: int = 0  # leading layers without experts; more than none makes the layers non-homogeneous
    swiglu: bool = True
    bias: bool = False
    tied: bool = False
    shared_experts: bool = False
    expert_bias: bool = False
    mla: bool = False
    mtp: bool = False
    tower: bool = False  # an image tower with a plain (not gated) MLP

    @property
    def homogeneous(self) -> bool:
        """Whether all layers have the same parameters, so that files stack them."""
        return not (self.experts and self.dense_layers)


def parameter_shapes(spec: GptSpec) -> dict[str, Shape]:
    """Live name -> shape, in the order of a model's `named_parameters()`."""
    h, v = spec.hidden, spec.vocabulary
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (v, h)}
    if spec.tower:
        shapes |= _block("vision_model.decoder.layers.0", GptSpec(swiglu=False, hidden=h, ffn=spec.ffn), moe=False)
    for layer in range(spec.layers):
        moe = spec.experts > 0 and layer >= spec.dense_layers
        shapes |= _block(f"decoder.layers.{layer}", spec, moe)
    shapes["decoder.final_layernorm.weight"] = (h,)
    if spec.mtp:
        shapes |= {"mtp.layers.0.enorm.weight": (h,), "mtp.layers.0.hnorm.weight": (h,)}
        shapes |= {"mtp.layers.0.eh_proj.weight": (h, 2 * h)}
        shapes |= _block("mtp.layers.0.transformer_layer", spec, moe=spec.experts > 0)
        shapes |= {"mtp.layers.0.final_layernorm.weight": (h,)}
    if not spec.tied:
        shapes["output_layer.weight"] = (v, h)
    return shapes


def buffers_of(spec: GptSpec) -> set[str]:
    """Names among the parameters that are not optimised: the routers' biases."""
    return {name for name in parameter_shapes(spec) if name.endswith(".expert_bias")}


def _block(prefix: str, spec: GptSpec, moe: bool) -> dict[str, Shape]:
    h = spec.hidden
    shapes = _mla(h) if spec.mla else _attention(h, spec.bias)
    if moe:
        shapes |= {"pre_mlp_layernorm.weight": (h,), "mlp.router.weight": (spec.experts, h)}
        if spec.expert_bias:
            shapes["mlp.router.expert_bias"] = (spec.experts,)
        for expert in range(spec.experts):
            shapes |= {f"mlp.experts.{k}{expert}": v for k, v in _mlp(spec, bias=False).items()}
        if spec.shared_experts:
            shapes |= {f"mlp.shared_experts.{k}": v for k, v in _mlp(spec, bias=False).items()}
    else:
        shapes["mlp.linear_fc1.layer_norm_weight"] = (h,)
        shapes |= {f"mlp.{k}": v for k, v in _mlp(spec, spec.bias).items()}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _attention(h: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "self_attention.linear_qkv.layer_norm_weight": (h,),
        "self_attention.linear_qkv.weight": (3 * h, h),
        "self_attention.linear_proj.weight": (h, h),
    }
    if bias:
        shapes |= {"self_attention.linear_qkv.bias": (3 * h,), "self_attention.linear_proj.bias": (h,)}
    return shapes


def _mla(h: int) -> dict[str, Shape]:
    return {
        "input_layernorm.weight": (h,),
        "self_attention.linear_q_down_proj.weight": (h // 2, h),
        "self_attention.linear_q_up_proj.layer_norm_weight": (h // 2,),
        "self_attention.linear_q_up_proj.weight": (2 * h, h // 2),
        "self_attention.linear_kv_down_proj.weight": (h // 2, h),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (h // 2,),
        "self_attention.linear_kv_up_proj.weight": (2 * h, h // 2),
        "self_attention.linear_proj.weight": (h, h),
    }


def _mlp(spec: GptSpec, bias: bool) -> dict[str, Shape]:
    rows = 2 * spec.ffn if spec.swiglu else spec.ffn
    shapes: dict[str, Shape] = {"linear_fc1.weight": (rows, spec.hidden)}
    if bias:
        shapes["linear_fc1.bias"] = (rows,)
    shapes["linear_fc2.weight"] = (spec.hidden, spec.ffn)
    if bias:
        shapes["linear_fc2.bias"] = (spec.hidden,)
    return shapes


@dataclass(frozen=True)
class Truth:
    """What a training run held when it saved.

    Attributes:
        masters: Live name -> fp32 weight.
        states: Slot ("exp_avg", ...) -> live name -> fp32 tensor; buffers have none.
    """

    spec: GptSpec
    masters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def make_truth(spec: GptSpec, seed: int = 0, slots: tuple[str, ...] = SLOTS) -> Truth:
    """Random weights around the usual size, and optimizer state."""
    generator = torch.Generator().manual_seed(seed)
    shapes = parameter_shapes(spec)

    def weight(name: str, shape: Shape) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return 1 + 0.1 * drawn if "norm" in name else 0.3 * drawn

    masters = {name: weight(name, shape) for name, shape in shapes.items()}
    optimised = [name for name in shapes if name not in buffers_of(spec)]
    states = {
        slot: {name: 0.01 * torch.rand(shapes[name], generator=generator) for name in optimised} for slot in slots
    }
    return Truth(spec, masters, states)
