"""Models that are not the plain decoder: Hugging Face's Llama and Mixtral, and one of nothing but small tensors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.workloads import Workload

TINY_TENSORS = 300
"""Parameters of the model that optimizer steps are measured on, as 10 units have them."""

_EXPERTS, _CHOSEN = 4, 2


def build(workload: Workload) -> nn.Module:
    """Build the model of a workload whose kind is not "decoder"; weights are drawn from torch's generator.

    Raises:
        ImportError: It is one of Hugging Face's, and transformers is not installed.
    """
    if workload.kind == "tiny-tensors":
        return TinyTensors(workload)
    return HuggingFaceDecoder(_hugging_face(workload))


class HuggingFaceDecoder(nn.Module):
    """One of transformers' causal models: tokens (samples, tokens) in, logits (samples, tokens, vocabulary) out."""

    def __init__(self, causal: nn.Module) -> None:
        super().__init__()
        self.causal = causal

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers."""
        layers = self.causal.get_submodule("model.layers")
        assert isinstance(layers, nn.ModuleList)
        return layers

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        return self.causal(input_ids=tokens, use_cache=False).logits


def _hugging_face(workload: Workload) -> nn.Module:
    """Built on the spot, so no file is read; attention is torch's `scaled_dot_product_attention`."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    shape = {
        "vocab_size": workload.vocabulary,
        "hidden_size": workload.features,
        "intermediate_size": workload.feed_forward,
        "num_hidden_layers": workload.layers,
        "num_attention_heads": workload.heads,
        "num_key_value_heads": max(1, workload.heads // 2),
        "max_position_embeddings": workload.tokens,
    }
    if workload.kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=_EXPERTS, num_experts_per_tok=_CHOSEN))


class TinyBlock(nn.Module):
    """Small parameters that are added up; there is hardly anything to compute."""

    def __init__(self, count: int, features: int) -> None:
        super().__init__()
        self.shifts = nn.ParameterList(0.01 * torch.randn(features) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        """Return x (..., features), shifted."""
        for shift in self.shifts:
            x = x + shift
        return x


class TinyTensors(nn.Module):
    """Tokens (samples, tokens) in, logits (samples, tokens, features) out; `features` is the vocabulary, too.

    Ten blocks share 300 parameters; with another number of blocks each has one.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        each = TINY_TENSORS // workload.layers if workload.layers == 10 else 1
        self._features = workload.features
        self.blocks = nn.ModuleList(TinyBlock(each, workload.features) for _ in range(workload.layers))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next token at every position."""
        x = F.one_hot(tokens, self._features).to(self.blocks[0].shifts[0].dtype)
        for block in self.blocks:
            x = block(x)
        return x
