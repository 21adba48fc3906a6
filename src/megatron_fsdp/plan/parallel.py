"""Formulas for decoder transformers under tensor, sequence, context, pipeline and expert parallelism.

What one rank holds, keeps, computes and sends follows from the shape of the model, as in

* Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021: tensor and
  pipeline parallelism, interleaved stages;
* Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022: activations of a layer with
  sequence parallelism and recomputation;
* Dubey et al., "The Llama 3 Herd of Models", 2024: context parallelism by all-gather, lighter ends of a pipeline.

The result is a module with the local shapes and a compute profile, which are sharded and replayed as any other model
is. Assumed are fused kernels (attention, norms, gated activations), causal attention that counts as if every query saw
every key (kernels skip half and reach about half the speed of products), balanced routing and no dropout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Exchange, Segment
from megatron_fsdp.plan.setup import ParallelRanks, Recompute, Setup

_FP32 = 4
_FAMILIES: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "mixtral": {},
    "qwen2": {"has_query_bias": True},
    "qwen3": {"has_head_norms": True},
    "qwen3_moe": {"has_head_norms": True},
    "deepseek_v3": {},
    "gpt2": {"is_gated": False, "has_biases": True},
}


@dataclass(frozen=True)
class LatentAttention:
    """The low-rank widths of DeepSeek's attention: of queries, of keys and values, and of the rotated part."""

    query: int
    key_value: int
    rotary: int


@dataclass(frozen=True)
class Weight:
    """A parameter's shape and how tensor parallelism divides it.

    Attributes:
        name: Its own.
        shape: On one rank without parallelism.
        cut: The dimension that tensor-parallel ranks share; None: each holds all of it.
        parts: The most parts that it can be cut into (key heads); None: any number.
        used: The fraction of it that one token uses: k of E experts; 0 for tables and vectors.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    parts: int | None = None
    used: float = 1.0

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape on the first tensor-parallel rank, which has the largest part."""
        if self.cut is None:
            return self.shape
        ranks = tp if self.parts is None else min(tp, self.parts)
        return tuple(-(-size // ranks) if dim == self.cut else size for dim, size in enumerate(self.shape))

    def flops(self, tp: int) -> float:
        """Count the FLOPs of one token's product on one rank."""
        return 2 * self.used * prod(self.local_shape(tp)) if len(self.shape) > 1 else 0.0

    def output_width(self, tp: int) -> float:
        """Return how many values the product with one token gives."""
        local = self.local_shape(tp)
        return self.used * prod(local[:-1])


@dataclass(frozen=True)
class DecoderShape:
    """A decoder transformer in numbers.

    Attributes:
        hidden: Width of the residual stream.
        layers: How many.
        heads: Of queries.
        key_heads: Of keys and values.
        score_width: Features of a head of queries and keys.
        value_width: Features of a head of values.
        inner: Width inside of a dense MLP.
        vocabulary: Tokens.
        positions: Learned positions; 0: rotary.
        is_gated: Whether the MLP has a gate, and norms no bias.
        is_tied: Whether embedding and head are one matrix.
        has_biases: Whether all products have biases.
        has_query_bias: Whether queries, keys and values have.
        has_head_norms: Whether heads of queries and keys are normed.
        experts: Routed experts of a layer; 0: dense.
        chosen: Experts of a token.
        expert_inner: Width inside of an expert.
        shared_inner: Of the experts that see every token, together.
        dense_layers: Layers at the front without experts.
        latent: Of latent attention.
    """

    hidden: int
    layers: int
    heads: int
    key_heads: int
    score_width: int
    value_width: int
    inner: int
    vocabulary: int
    positions: int = 0
    is_gated: bool = True
    is_tied: bool = False
    has_biases: bool = False
    has_query_bias: bool = False
    has_head_norms: bool = False
    experts: int = 0
    chosen: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    dense_layers: int = 0
    latent: LatentAttention | None = None

    @property
    def numel(self) -> int:
        """Number of parameters of the whole model."""
        layers = (weight for layer in range(self.layers) for weight in self.layer(layer))
        ends = (*self.embedding(), *self.final_norm(), *(() if self.is_tied else self.head()))
        return sum(prod(weight.shape) for weight in (*layers, *ends))

    def flops(self, sequence_length: int) -> float:
        """Count FLOPs of forward and backward for one token without recomputation (Chowdhery et al., PaLM, 2022)."""
        layers = sum(w.flops(1) for layer in range(self.layers) for w in self.layer(layer))
        scores = self.layers * self.score_flops(sequence_length)
        return 3 * (layers + scores + sum(weight.flops(1) for weight in self.head()))

    def score_flops(self, sequence_length: int) -> float:
        """Count the FLOPs of the attention scores and values for one token in one layer's forward."""
        return 2.0 * sequence_length * self.heads * (self.score_width + self.value_width)

    def is_mixture(self, layer: int) -> bool:
        """Return whether a layer has experts."""
        return self.experts > 0 and layer >= self.dense_layers

    def layer(self, layer: int) -> tuple[Weight, ...]:
        """Return all parameters of a layer, products in the order in which they run."""
        mlp = self._experts() if self.is_mixture(layer) else self._mlp(self.inner)
        return (*self._norm("attention_norm"), *self._attention(), *self._norm("mlp_norm"), *mlp)

    def embedding(self) -> tuple[Weight, ...]:
        """Return the tables of tokens and positions."""
        table = Weight("embedding", (self.vocabulary, self.hidden), 0, used=0.0)
        places = Weight("positions", (self.positions, self.hidden), used=0.0)
        return (table, places) if self.positions else (table,)

    def final_norm(self) -> tuple[Weight, ...]:
        """Return the parameters of the norm behind the last layer."""
        return self._norm("norm")

    def head(self) -> tuple[Weight, ...]:
        """Return the matrix that gives logits."""
        return (Weight("head", (self.vocabulary, self.hidden), 0),)

    def _norm(self, name: str) -> tuple[Weight, ...]:
        scale = Weight(name, (self.hidden,))
        return (scale, Weight(f"{name}_bias", (self.hidden,))) if self.has_biases else (scale,)

    def _attention(self) -> tuple[Weight, ...]:
        out = Weight("out", (self.hidden, self.heads * self.value_width), 1)
        if self.latent is not None:
            return (*self._latent_attention(self.latent), out)
        queries, keys = self.heads * self.score_width, self.key_heads * self.score_width
        found = [
            Weight("query", (queries, self.hidden), 0),
            Weight("key", (keys, self.hidden), 0, self.key_heads),
            Weight("value", (keys, self.hidden), 0, self.key_heads),
            out,
        ]
        if self.has_biases or self.has_query_bias:
            found += [Weight("query_bias", (queries,), 0), Weight("key_bias", (2 * keys,), 0, self.key_heads)]
        if self.has_biases:
            found.append(Weight("out_bias", (self.hidden,)))
        if self.has_head_norms:
            found += [Weight("query_norm", (self.score_width,)), Weight("key_norm", (self.score_width,))]
        return tuple(found)

    def _latent_attention(self, latent: LatentAttention) -> tuple[Weight, ...]:
        plain = self.score_width - latent.rotary
        return (
            Weight("query_down", (latent.query, self.hidden)),
            Weight("query_norm", (latent.query,)),
            Weight("query_up", (self.heads * self.score_width, latent.query), 0),
            Weight("key_value_down", (latent.key_value + latent.rotary, self.hidden)),
            Weight("key_value_norm", (latent.key_value,)),
            Weight("key_value_up", (self.heads * (plain + self.value_width), latent.key_value), 0),
        )

    def _mlp(self, inner: int, prefix: str = "") -> tuple[Weight, ...]:
        up = [Weight(f"{prefix}{name}", (inner, self.hidden), 0) for name in ("gate", "up")[not self.is_gated :]]
        found = [*up, Weight(f"{prefix}down", (self.hidden, inner), 1)]
        if self.has_biases:
            found += [Weight(f"{prefix}up_bias", (inner,), 0), Weight(f"{prefix}down_bias", (self.hidden,))]
        return tuple(found)

    def _experts(self) -> tuple[Weight, ...]:
        share = self.chosen / self.experts
        shared = self._mlp(self.shared_inner, "shared_") if self.shared_inner else ()
        return (
            Weight("router", (self.experts, self.hidden)),
            Weight("experts.gate_up", (self.experts, 2 * self.expert_inner, self.hidden), 1, used=share),
            Weight("experts.down", (self.experts, self.hidden, self.expert_inner), 2, used=share),
            *shared,
        )


def decoder_shape(config: Any, what: str) -> DecoderShape:
    """Read the shape of a decoder from a config of transformers.

    Args:
        config: With a `model_type`.
        what: The request, such as "tp=8", for the error.

    Raises:
        ConfigurationError: The formulas do not know the architecture.
    """
    kind = getattr(config, "model_type", None)
    if kind not in _FAMILIES:
        raise not_modelled(what, f"its architecture is {kind or 'no config of transformers'}")
    heads, hidden = config.num_attention_heads, config.hidden_size
    latent = getattr(config, "kv_lora_rank", None)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim if latent else _head_width(config)
    experts = next((n for key in _EXPERT_COUNTS if (n := getattr(config, key, None))), 0)
    inner = int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden)
    expert_inner = int(getattr(config, "moe_intermediate_size", None) or inner)
    return DecoderShape(
        hidden=hidden,
        layers=config.num_hidden_layers,
        heads=heads,
        key_heads=getattr(config, "num_key_value_heads", None) or heads,
        score_width=width,
        value_width=config.v_head_dim if latent else width,
        inner=inner,
        vocabulary=config.vocab_size,
        positions=config.n_positions if kind == "gpt2" else 0,
        is_tied=bool(getattr(config, "tie_word_embeddings", False)),
        experts=experts,
        chosen=config.num_experts_per_tok if experts else 0,
        expert_inner=expert_inner if experts else 0,
        shared_inner=(getattr(config, "n_shared_experts", 0) or 0) * expert_inner,
        dense_layers=getattr(config, "first_k_dense_replace", 0) or 0,
        latent=LatentAttention(config.q_lora_rank, latent, config.qk_rope_head_dim) if latent else None,
        **_FAMILIES[kind],
    )


_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def not_modelled(what: str, reason: str) -> ConfigurationError:
    """Make the error for an architecture that the formulas do not cover."""
    return ConfigurationError(
        f"{what} cannot be planned for this model, since {reason}, and the formulas know {', '.join(_FAMILIES)}: "
        "whether it fits is not known. Plan it over data-parallel ranks only"
    )


# ---- one rank's share ----------------------------------------------------------------------------------------------


def layers_of_stage(num_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage.

    Where embedding and head count as a layer each and the sum divides evenly, the ends have one layer less (Llama 3);
    else earlier stages take the remainder.

    Raises:
        ParallelSizeError: There are fewer layers than stages, or there is no such stage.
    """
    if not 0 <= stage < stages:
        raise ParallelSizeError(f"stage={stage} does not exist; with pp={stages} there are 0 to {stages - 1}")
    if num_layers < stages:
        raise ParallelSizeError(f"{num_layers} layers cannot be cut into pp={stages} stages; use pp of {num_layers}")
    if stages > 1 and num_layers % stages and not (num_layers + 2) % stages:
        length = (num_layers + 2) // stages
        return range(max(0, stage * length - 1), min(num_layers, (stage + 1) * length - 1))
    length, rest = divmod(num_layers, stages)
    start = stage * length + min(stage, rest)
    return range(start, start + length + (stage < rest))


def microbatches_in_flight(setup: Setup, stage: int) -> float:
    """Count the microbatches whose activations a stage keeps at one time.

    A stage starts p - s microbatches before its first backward (1F1B), and with v virtual stages 2 (p - s - 1) +
    (v - 1) p + 1 parts of a v-th each (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2).
    """
    stages, virtual = setup.ranks.pp, setup.virtual_stages
    if virtual == 1:
        return float(min(stages - stage, setup.microbatches))
    parts = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(parts / virtual, float(setup.microbatches))


@dataclass(frozen=True)
class DecoderShare:
    """What the first tensor- and context-parallel rank of a pipeline stage computes in a microbatch.

    Attributes:
        shape: Of the model.
        ranks: Along each axis.
        micro_batch: Sequences.
        sequence_length: Tokens of each, over all context-parallel ranks.
        dtype: Of weights and activations.
        stage: Of the pipeline.

    Raises:
        ParallelSizeError: The ranks do not divide layers, heads, experts or tokens.
    """

    shape: DecoderShape
    ranks: ParallelRanks
    micro_batch: int
    sequence_length: int
    dtype: torch.dtype = torch.bfloat16
    stage: int = 0

    def __post_init__(self) -> None:
        ranks, shape = self.ranks, self.shape
        layers_of_stage(shape.layers, ranks.pp, self.stage)
        pieces = ranks.cp * (2 if ranks.cp > 1 else 1)
        for what, count, divisor, by in (
            ("attention heads", shape.heads, ranks.tp, f"tp={ranks.tp}"),
            ("key heads", max(shape.key_heads, ranks.tp), min(shape.key_heads, ranks.tp), f"tp={ranks.tp}"),
            ("experts", shape.experts, ranks.ep, f"ep={ranks.ep}"),
            ("tokens of a sequence", self.sequence_length, pieces, f"2 x cp={ranks.cp}"),
        ):
            if count % divisor or (divisor > 1 and not count):
                raise ParallelSizeError(f"{count} {what} cannot be divided by {by}; choose a divisor")

    @property
    def layers(self) -> range:
        """The layers of this stage."""
        return layers_of_stage(self.shape.layers, self.ranks.pp, self.stage)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on this rank."""
        return self.micro_batch * self.sequence_length // self.ranks.cp

    @property
    def is_first(self) -> bool:
        """Whether the stage has the embedding."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the stage has the head and the loss."""
        return self.stage == self.ranks.pp - 1

    @property
    def model_flops(self) -> float:
        """FLOPs of a microbatch, shared equally among the ranks that work on it."""
        ranks = self.ranks
        return self.shape.flops(self.sequence_length) * self.tokens / (ranks.tp * ranks.pp)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden states of a microbatch."""
        return self.tokens * self.shape.hidden * self.dtype.itemsize

    def module(self) -> nn.Module:
        """Build the local shapes as a module on the meta device, with the experts of all expert-parallel ranks."""
        return _Stage(self)

    def slowdown(self, setup: Setup) -> float:
        """Return how many times longer the busiest stage computes than this one."""
        ends = {self.stage, 1 % self.ranks.pp, self.ranks.pp - 1}
        times = {stage: replace(self, stage=stage)._forward_flops(setup) for stage in ends}
        return max(times.values()) / times[self.stage]

    def _forward_flops(self, setup: Setup) -> float:
        layers = sum(_layer_piece(self, setup, layer).flops for layer in self.layers)
        return layers + (_head_piece(self, setup).flops if self.is_last else 0.0)

    def notes(self, setup: Setup) -> tuple[str, ...]:
        """List the assumptions, in words."""
        ranks, found = self.ranks, ["Computed by formulas: fused kernels, no dropout (docs/plan.md)."]
        if ranks.tp > 1:
            which = "with" if setup.sequence_parallel else "without"
            found.append(f"Tensor parallelism {which} sequence parallelism; loss over a divided vocabulary.")
        if ranks.cp > 1:
            found.append("Context-parallel ranks gather keys and values of all ranks in every layer.")
        if ranks.pp > 1:
            kept = microbatches_in_flight(setup, self.stage)
            virtual = f", {setup.virtual_stages} virtual stages each" if setup.virtual_stages > 1 else ""
            found.append(f"Stage {self.stage} of {ranks.pp}{virtual}, 1F1B: {kept:g} microbatches in flight.")
        if ranks.ep > 1:
            found.append("Routing is balanced: each expert-parallel rank gets as many rows as it sends.")
        return tuple(found)


class _Group(nn.Module):
    """A module that only holds parameters of local shapes."""

    def __init__(self, weights: Iterable[Weight], share: DecoderShare) -> None:
        super().__init__()
        for weight in weights:
            group, _, name = weight.name.rpartition(".")
            if group and not hasattr(self, group):
                self.add_module(group, nn.Module())
            shape = weight.local_shape(share.ranks.tp)
            made = nn.Parameter(torch.empty(shape, dtype=share.dtype, device="meta"))
            (getattr(self, group) if group else self).register_parameter(name, made)

    def forward(self) -> None:
        """Refuse to compute: there are shapes only."""
        raise NotImplementedError


class DecoderLayer(_Group):
    """One layer of local shapes."""


class _Stage(_Group):
    """A pipeline stage: ends and layers."""

    _no_split_modules = ("DecoderLayer",)

    def __init__(self, share: DecoderShare) -> None:
        shape, tp = share.shape, share.ranks.tp
        rest = [*(shape.embedding()[1:] if share.is_first else ()), *(shape.final_norm() if share.is_last else ())]
        super().__init__(rest, share)
        rows = -(-shape.vocabulary // tp)
        options: dict[str, Any] = {"dtype": share.dtype, "device": "meta"}
        if share.is_first:
            self.embedding = nn.Embedding(rows, shape.hidden, **options)
        self.layers = nn.ModuleList(DecoderLayer(shape.layer(layer), share) for layer in share.layers)
        if share.is_last:
            self.head = nn.Linear(shape.hidden, rows, bias=False, **options)
            if shape.is_tied and share.is_first:
                self.head.weight = self.embedding.weight


# ---- activations and operations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Forward and backward of one layer or end, for a microbatch on one rank.

    Attributes:
        kept: Bytes saved for backward.
        all_kept: Bytes without recomputation, all of which backward needs at a time.
        passing: Bytes of temporary results.
        flops: Of a forward; those of products that 8-bit formats speed up are `product_flops`.
        repeated: Of the forward, what backward computes again.
        score_flops: Of attention among them; its backward takes 2.5 times as many, other backwards twice.
        moved: Bytes that elementwise operators read and write in a forward.
    """

    kept: float = 0.0
    all_kept: float = 0.0
    passing: float = 0.0
    flops: float = 0.0
    product_flops: float = 0.0
    repeated: float = 0.0
    repeated_products: float = 0.0
    score_flops: float = 0.0
    moved: float = 0.0


def _outside(share: DecoderShare, setup: Setup) -> float:
    """Return bytes of a token's hidden state in regions that only sequence parallelism divides."""
    return share.shape.hidden * share.dtype.itemsize / (share.ranks.tp if setup.sequence_parallel else 1)


def _part_bytes(share: DecoderShare, layer: int) -> tuple[float, float, float]:
    """Count the bytes that attention and the MLP save for one token besides inputs, and those of attention's result.

    Korthikanti et al. 2022, section 4, for fused attention and gated products.
    """
    shape, tp, itemsize = share.shape, share.ranks.tp, share.dtype.itemsize
    queries = shape.heads * shape.score_width / tp
    keys = shape.key_heads * (shape.score_width + shape.value_width) / min(tp, shape.key_heads)
    waists = 0.0 if shape.latent is None else 2.0 * (shape.latent.query + shape.latent.key_value) + queries
    result = shape.heads * shape.value_width / tp * itemsize + _FP32 * shape.heads / tp
    if not shape.is_mixture(layer):
        mlp = (3 if shape.is_gated else 2) * shape.inner / tp * itemsize
    else:  # rows that arrive and return, and activations inside of experts
        rows = shape.chosen * (2 * shape.hidden + 3 * shape.expert_inner / tp) * itemsize
        mlp = rows + 3 * shape.shared_inner / tp * itemsize + 2 * _FP32 * shape.experts
    return (queries + keys + waists) * itemsize + result, mlp, result


def _layer_piece(share: DecoderShare, setup: Setup, layer: int) -> _Piece:
    """Describe a layer under the chosen recomputation."""
    shape, tp, tokens = share.shape, share.ranks.tp, share.tokens
    (attention, mlp, result), outside = _part_bytes(share, layer), _outside(share, setup)
    products = [weight for weight in shape.layer(layer) if weight.flops(tp)]
    flops = [weight.flops(tp) for weight in products]
    out = [weight.name for weight in products].index("out")
    scores = shape.score_flops(share.sequence_length) / tp
    everything = 4 * outside + attention + mlp  # two norms keep their inputs and outputs
    results = sum(weight.output_width(tp) for weight in products[::2]) * share.dtype.itemsize
    choices: dict[Recompute, tuple[float, float, float]] = {  # bytes kept, operations repeated: products, attention
        "none": (everything, 0.0, 0.0),
        "full": (outside, sum(flops[:-1]), scores),
        "attention": (everything - attention, sum(flops[:out]), scores),
        "mlp": (everything - mlp, sum(flops[out + 1 : -1]), 0.0),
        "selective": (outside + result + results, sum(flops[1::2]), 0.0),
    }
    kept, again, again_scores = choices[setup.recompute]
    wide = shape.chosen * shape.expert_inner if shape.is_mixture(layer) else shape.inner
    return _Piece(
        kept * tokens,
        everything * tokens,
        (shape.hidden + 2 * wide / tp) * share.dtype.itemsize * tokens,
        (sum(flops) + scores) * tokens,
        sum(flops) * tokens,
        (again + again_scores) * tokens,
        again * tokens,
        scores * tokens,
        (10 * outside + 2 * result + mlp) * tokens,
    )


def _head_piece(share: DecoderShare, setup: Setup) -> _Piece:
    """Describe final norm, logits and their loss in fp32, over a vocabulary divided by tensor parallelism."""
    shape, itemsize, tokens = share.shape, share.dtype.itemsize, share.tokens
    logits = -(-shape.vocabulary // share.ranks.tp)
    flops = sum(weight.flops(share.ranks.tp) for weight in shape.head()) * tokens
    kept = (2 * _outside(share, setup) + (itemsize + _FP32) * logits) * tokens
    passing = (itemsize + _FP32) * logits * tokens
    return _Piece(kept, kept, passing, flops, flops, moved=(itemsize + 3 * _FP32) * logits * tokens)


class _Pass:
    """Collects the segments of a microbatch: an event ends the open segment and begins another."""

    def __init__(self, unit_names: Sequence[str]) -> None:
        self._units = {name: index for index, name in enumerate(unit_names)}
        self._alive = 0.0
        self._segments: list[Segment] = []

    def event(self, event: Event, name: str, computing: str | None = None) -> None:
        """Begin a segment; a name that is no unit is ignored."""
        if name in self._units:
            now = int(self._alive)
            inside = self._units.get(name if computing is None else computing, 0)
            self._segments.append(Segment(event, self._units[name], inside, now, now, now))

    def forward(self, piece: _Piece) -> None:
        """Compute forward in the open segment."""
        self._work(piece.flops, piece.product_flops, 0.0, piece.moved, piece.kept + piece.passing)
        self._keep(piece.kept)

    def backward(self, piece: _Piece, gradients: Iterable[str]) -> None:
        """Compute backward in the open segment, after recomputing the activations that were not kept."""
        flops = 2 * piece.flops + piece.score_flops / 2 + piece.repeated
        moved = 2 * piece.moved + (piece.moved if piece.repeated else 0.0)
        products = 2 * piece.product_flops + piece.repeated_products
        self._work(flops, products, piece.repeated, moved, piece.all_kept - piece.kept + 2 * piece.passing)
        last = self._segments[-1]
        self._segments[-1] = last.but(gradients=(*last.gradients, *gradients))
        self._keep(-piece.kept)

    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    def _work(self, flops: float, products: float, again: float, moved: float, more: float) -> None:
        open_ = self._segments[-1]
        self._segments[-1] = open_.but(
            flops=open_.flops + int(flops),
            product_flops=open_.product_flops + int(products),
            recomputed_flops=open_.recomputed_flops + int(again),
            moved_bytes=open_.moved_bytes + int(moved),
            peak_bytes=max(open_.peak_bytes, int(self._alive + more)),
        )

    def _keep(self, count: float) -> None:
        self._alive += count
        self._segments[-1] = self._segments[-1].but(end_bytes=int(self._alive))


def share_profile(share: DecoderShare, setup: Setup, unit_names: Sequence[str]) -> ComputeProfile:
    """Compute the profile of a microbatch (events, bytes, FLOPs) for units with these names."""
    names = [name for name, _ in share.module().named_parameters()]
    layers = {f"layers.{place}": _layer_piece(share, setup, layer) for place, layer in enumerate(share.layers)}
    pieces: dict[str, _Piece] = {}
    if share.is_first:
        table = _outside(share, setup) * share.tokens
        pieces["embedding"] = _Piece(passing=table, moved=2 * table)
    pieces |= layers
    if share.is_last:
        pieces["head"] = _head_piece(share, setup)
    found = _Pass(unit_names)
    found.event(Event.FORWARD_BEGINS, "")
    for name, piece in pieces.items():
        found.event(Event.FORWARD_BEGINS, name)
        found.forward(piece)
        found.event(Event.FORWARD_ENDS, name, "")
    found.event(Event.FORWARD_ENDS, "")
    found.event(Event.BACKWARD_BEGINS, "")
    for name, piece in reversed(pieces.items()):
        found.event(Event.BACKWARD_BEGINS, name)
        found.backward(piece, [each for each in names if each.startswith(f"{name}.")])
    found.backward(_Piece(), [each for each in names if each.split(".")[0] not in ("embedding", "layers", "head")])
    found.event(Event.BACKWARD_ENDS, "")
    received = share.hidden_bytes // (share.ranks.tp if setup.sequence_parallel else 1)
    buffers = received * ((not share.is_first) + (not share.is_last))
    token_bytes = torch.int64.itemsize * share.tokens * (share.is_first + share.is_last)
    return ComputeProfile(tuple(unit_names), found.segments(), token_bytes + buffers)


# ---- what is sent --------------------------------------------------------------------------------------------------


def share_exchanges(share: DecoderShare, setup: Setup) -> tuple[Exchange, ...]:
    """List the collectives and messages of a microbatch."""
    layers = [exchange for layer in share.layers for exchange in _layer_exchanges(share, setup, layer)]
    return (*_end_exchanges(share, setup), *layers, *_stage_exchanges(share, setup))


def _layer_exchanges(share: DecoderShare, setup: Setup, layer: int) -> list[Exchange]:
    """List a layer's tensor-parallel, context-parallel and expert-parallel collectives.

    With sequence parallelism an all-gather begins and a reduce-scatter ends each half of a layer, in forward and in
    backward; without it two all-reduces are as many bytes. The gathers that backward repeats for weight gradients run
    behind it (Korthikanti et al. 2022, section 4.2.2).
    """
    shape, ranks, unit = share.shape, share.ranks, f"layers.{layer - share.layers.start}"
    found = []
    if ranks.tp > 1:
        sent = share.hidden_bytes * (ranks.tp - 1) // ranks.tp
        found += _both("tp", unit, sent, 4, {"full": 4, "attention": 1, "mlp": 1, "selective": 2}, setup)
    if ranks.cp > 1:
        width = shape.key_heads * (shape.score_width + shape.value_width) // min(ranks.tp, shape.key_heads)
        sent = (ranks.cp - 1) * share.tokens * width * share.dtype.itemsize
        found += _both("cp", unit, sent, 1, {"full": 1, "attention": 1, "selective": 1}, setup)
    if ranks.ep > 1 and shape.is_mixture(layer):
        sent = shape.chosen * share.hidden_bytes * (ranks.ep - 1) // ranks.ep
        found += _both("ep", unit, sent, 2, {"full": 2, "mlp": 2, "selective": 2}, setup)
    return found


def _both(axis: str, unit: str, sent: int, count: int, repeats: dict[Recompute, int], setup: Setup) -> list[Exchange]:
    again = repeats.get(setup.recompute, 0)
    return [Exchange(axis, unit, sent, False, count), Exchange(axis, unit, sent, True, count + again)]


def _end_exchanges(share: DecoderShare, setup: Setup) -> list[Exchange]:
    """List the reduction behind a tensor-parallel embedding and the gather before a divided head."""
    if share.ranks.tp == 1:
        return []
    sent = share.hidden_bytes * (share.ranks.tp - 1) // share.ranks.tp
    names = [*(["embedding"] if share.is_first else []), *(["head"] if share.is_last else [])]
    return [exchange for name in names for exchange in _both("tp", name, sent, 1, {}, setup)]


def _stage_exchanges(share: DecoderShare, setup: Setup) -> list[Exchange]:
    """List the messages to the next and the previous stage, once for each virtual stage.

    Tensor-parallel ranks send a part each (Narayanan et al. 2021, section 4.1).
    """
    if share.ranks.pp == 1:
        return []
    sent, virtual = share.hidden_bytes // share.ranks.tp, setup.virtual_stages
    first, last = "layers.0", f"layers.{len(share.layers) - 1}"
    forward = Exchange("pp", last, sent, False, virtual - share.is_last)
    backward = Exchange("pp", first, sent, True, virtual - share.is_first)
    return [exchange for exchange in (forward, backward) if exchange.count]
