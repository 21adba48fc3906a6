"""A tiny GPT in plain torch whose parameters have Megatron's names; gated MLPs hold their halves as two parameters.

A converted checkpoint has each gated fc1 as `weight_w` and `weight_v`, so that it loads here key for key. With
`split=False` the model holds one `weight`, as Megatron's live model does: for the loss before the conversion.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.torch_dist.gpt import GptSpec


class NormedLinear(nn.Module):
    """A linear map after an RMS norm, with both weights in one module."""

    def __init__(self, inputs: int, outputs: int, split: bool = False, norm: bool = True) -> None:
        super().__init__()
        if norm:
            self.layer_norm_weight = nn.Parameter(torch.ones(inputs))
        names = ("weight_w", "weight_v") if split else ("weight",)
        for name in names:
            setattr(self, name, nn.Parameter(torch.zeros(outputs // len(names), inputs)))
        self._names = names

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "layer_norm_weight"):
            x = F.rms_norm(x, (x.shape[-1],), self.layer_norm_weight)
        return torch.cat([F.linear(x, getattr(self, name)) for name in self._names], dim=-1)


class Experts(nn.Module):
    """All experts' weights in two modules, as grouped kernels want them: weight0, weight1, ..."""

    def __init__(self, spec: GptSpec, split: bool) -> None:
        super().__init__()
        self.linear_fc1, self.linear_fc2 = nn.Module(), nn.Module()
        halves = ("_w", "_v") if split and spec.swiglu else ("",)
        rows = (2 if spec.swiglu else 1) * spec.ffn // len(halves)
        for expert in range(spec.experts):
            for half in halves:
                self.linear_fc1.register_parameter(
                    f"weight{expert}{half}", nn.Parameter(torch.zeros(rows, spec.hidden))
                )
            self.linear_fc2.register_parameter(f"weight{expert}", nn.Parameter(torch.zeros(spec.hidden, spec.ffn)))
        self._halves, self._gated = halves, spec.swiglu

    def forward(self, x: Tensor, expert: int) -> Tensor:
        rows = [F.linear(x, getattr(self.linear_fc1, f"weight{expert}{half}")) for half in self._halves]
        return F.linear(activate(torch.cat(rows, -1), self._gated), getattr(self.linear_fc2, f"weight{expert}"))


class Mlp(nn.Module):
    """Dense, or a mixture of experts weighted by a router (all experts see all tokens)."""

    def __init__(self, spec: GptSpec, split: bool) -> None:
        super().__init__()
        self._spec = spec
        if spec.experts:
            self.router = NormedLinear(spec.hidden, spec.experts, norm=False)
            self.experts = Experts(spec, split)
        else:
            gates = 2 if spec.swiglu else 1
            self.linear_fc1 = NormedLinear(spec.hidden, gates * spec.ffn, split and spec.swiglu)
            self.linear_fc2 = NormedLinear(spec.ffn, spec.hidden, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self._spec.experts:
            return self.linear_fc2(activate(self.linear_fc1(x), self._spec.swiglu))
        shares = self.router(x).softmax(-1)
        return sum(shares[..., e : e + 1] * self.experts(x, e) for e in range(self._spec.experts))


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear_qkv = NormedLinear(hidden, 3 * hidden)
        self.linear_proj = NormedLinear(hidden, hidden, norm=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear_qkv(x).chunk(3, dim=-1)
        return self.linear_proj(F.scaled_dot_product_attention(query, key, value, is_causal=True))


class MegatronLayer(nn.Module):
    """One transformer layer."""

    def __init__(self, spec: GptSpec, split: bool) -> None:
        super().__init__()
        self.self_attention = Attention(spec.hidden)
        if spec.experts:
            self.pre_mlp_layernorm = nn.RMSNorm(spec.hidden)
        self.mlp = Mlp(spec, split)
        self._normed = spec.experts > 0

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(x)
        return x + self.mlp(self.pre_mlp_layernorm(x) if self._normed else x)


class Embedding(nn.Module):
    def __init__(self, spec: GptSpec) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(spec.vocabulary, spec.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.word_embeddings(tokens)


class Decoder(nn.Module):
    def __init__(self, spec: GptSpec, split: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MegatronLayer(spec, split) for _ in range(spec.layers))
        self.final_layernorm = nn.RMSNorm(spec.hidden)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class MegatronGpt(nn.Module):
    """int64 tokens (samples, tokens) -> logits."""

    def __init__(self, spec: GptSpec, split: bool = True) -> None:
        super().__init__()
        self.embedding = Embedding(spec)
        self.decoder = Decoder(spec, split)
        self.output_layer = NormedLinear(spec.hidden, spec.vocabulary, norm=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output_layer(self.decoder(self.embedding(tokens)))


def activate(x: Tensor, gated: bool) -> Tensor:
    """SwiGLU of [gate ; up], or GELU."""
    if not gated:
        return F.gelu(x)
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
