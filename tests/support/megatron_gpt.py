"""A tiny GPT in plain torch whose parameters have Megatron's names; gated MLPs hold their halves as two parameters.

A converted checkpoint has each gated fc1 as `weight_w` and `weight_v`, so that it loads here key for key. With
`split=False` the model holds one `weight`, as Megatron's live model does: for the loss before the conversion.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.torch_dist import GptSpec, parameter_shapes, split_halves


class Named(nn.Module):
    """A module that reads parameters below it by name."""

    def __init__(self, spec: GptSpec) -> None:
        super().__init__()
        self.spec = spec

    def weight(self, name: str) -> Tensor:
        """A parameter below this module; of a gated fc1 both halves."""
        owner, _, last = name.rpartition(".")
        module = self.get_submodule(owner)
        if hasattr(module, last):
            return getattr(module, last)
        return torch.cat([getattr(module, f"{last}_w"), getattr(module, f"{last}_v")])

    def normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight(name))


class MegatronLayer(Named):
    """One transformer layer."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x, "self_attention.linear_qkv.layer_norm_weight")
        query, key, value = F.linear(normed, self.weight("self_attention.linear_qkv.weight")).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.linear(attended, self.weight("self_attention.linear_proj.weight"))
        if not self.spec.experts:
            return x + self.feed_forward(self.normed(x, "mlp.linear_fc1.layer_norm_weight"), "mlp")
        normed = self.normed(x, "pre_mlp_layernorm.weight")
        shares = F.linear(normed, self.weight("mlp.router.weight")).softmax(-1)  # all experts see all tokens
        for expert in range(self.spec.experts):
            x = x + shares[..., expert : expert + 1] * self.feed_forward(normed, "mlp.experts", str(expert))
        return x

    def feed_forward(self, x: Tensor, prefix: str, expert: str = "") -> Tensor:
        """SwiGLU of [gate ; up], or GELU."""
        hidden = F.linear(x, self.weight(f"{prefix}.linear_fc1.weight{expert}"))
        if self.spec.swiglu:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden)
        return F.linear(hidden, self.weight(f"{prefix}.linear_fc2.weight{expert}"))


class MegatronGpt(Named):
    """int64 tokens (samples, tokens) -> logits."""

    def __init__(self, spec: GptSpec, split: bool = True) -> None:
        super().__init__(spec)
        tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(spec).items()}
        for name, tensor in split_halves(tensors, split and spec.swiglu).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for depth, step in enumerate(path):
                if not hasattr(module, step):
                    is_layer = path[:2] == ["decoder", "layers"] and depth == 2
                    module.add_module(step, MegatronLayer(spec) if is_layer else nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(tensor.clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight("embedding.word_embeddings.weight"))
        for layer in self.get_submodule("decoder.layers").children():
            x = layer(x)
        return F.linear(self.normed(x, "decoder.final_layernorm.weight"), self.weight("output_layer.weight"))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
