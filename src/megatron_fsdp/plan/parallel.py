"""Formulas for decoder transformers under tensor, sequence, context, pipeline and expert parallelism.

The parameters, activations, compute and communication of one rank follow from the shape of the model, as in

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

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Exchange, Segment
from megatron_fsdp.plan.setup import ParallelRanks, Recompute, Setup

_FP32 = 4
_FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "gpt2")
_CUTS = {  # modules and expert parameters whose outputs (0) or inputs (1) tensor-parallel ranks share
    **dict.fromkeys(("embed_tokens", "wte", "lm_head", "q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj"), 0),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "c_attn", "c_fc"), 0),
    **dict.fromkeys(("o_proj", "down_proj", "c_proj"), 1),
}
_KEY_HEADS = ("k_proj", "v_proj")  # repeated where there are fewer key heads than ranks
_WHOLE = ("gate", "q_a_proj", "kv_a_proj_with_mqa")  # routers and waists, which every rank has
_TRANSPOSED = ("c_attn", "c_fc", "c_proj")  # kept as (inputs, outputs)


class DecoderShape:
    """The widths of a decoder transformer that determine its activations, read from a config of transformers.

    `what` is the request, such as "tp=8", for errors.
    """

    def __init__(self, config: Any, what: str) -> None:
        kind = getattr(config, "model_type", None)
        if kind not in _FAMILIES:
            raise not_modelled(what, f"its architecture is {kind or 'no config of transformers'}")

        def field(*names: str, default: int = 0) -> int:
            return int(next((value for name in names if (value := getattr(config, name, None))), default))

        latent = field("kv_lora_rank")
        self.hidden: int = config.hidden_size
        self.vocabulary: int = config.vocab_size
        self.heads: int = config.num_attention_heads  # of queries
        self.key_heads = field("num_key_value_heads", default=self.heads)  # of keys and values
        width = field("head_dim", default=self.hidden // self.heads)
        # features of a head of queries and keys, and of one of values
        self.score_width: int = config.qk_nope_head_dim + config.qk_rope_head_dim if latent else width
        self.value_width: int = config.v_head_dim if latent else width
        # low-rank widths of latent attention: of queries, and of keys and values; empty: there are none
        self.latent: tuple[int, ...] = (config.q_lora_rank, latent) if latent else ()
        self.inner = field("intermediate_size", "n_inner", default=4 * self.hidden)  # width inside of a dense MLP
        self.is_gated = kind != "gpt2"  # whether the MLP has a gate
        self.experts = field("num_local_experts", "num_experts", "n_routed_experts")  # of a layer, routed; 0: dense
        self.chosen = field("num_experts_per_tok") if self.experts else 0  # experts of a token
        self.expert_inner = field("moe_intermediate_size", default=self.inner)  # width inside of an expert
        self.shared_inner = field("n_shared_experts") * self.expert_inner  # of those that see every token, together

    def score_flops(self, sequence_length: int) -> float:
        """Count the FLOPs of the attention scores and values for one token in one layer's forward."""
        return 2.0 * sequence_length * self.heads * (self.score_width + self.value_width)


def not_modelled(what: str, reason: str) -> ConfigurationError:
    """Build the error for an architecture that the formulas do not cover."""
    return ConfigurationError(
        f"{what} cannot be planned for this model, since {reason}, and the formulas know {', '.join(_FAMILIES)}: "
        "whether it fits is not known. Plan it over data-parallel ranks only"
    )


def local_shape(name: str, shape: Sequence[int], tp: int, key_heads: int) -> tuple[int, ...]:
    """Return a parameter's shape on the first tensor-parallel rank, which has the largest part.

    A parameter not known to be divided is whole on every rank; projections to keys and values have at most `key_heads`
    parts.
    """
    *_, module, own = f".{name}".split(".")
    if own in _CUTS:  # one tensor holds the matrices of all experts
        dim: int | None = 1 + _CUTS[own]
    elif module not in _CUTS:
        dim = None
    elif len(shape) == 1:  # a bias belongs to the outputs
        dim = None if _CUTS[module] else 0
    else:
        dim = 1 - _CUTS[module] if module in _TRANSPOSED else _CUTS[module]
    parts = min(tp, key_heads) if module in _KEY_HEADS else tp
    return tuple(-(-size // parts) if place == dim else size for place, size in enumerate(shape))


class _Product(NamedTuple):
    """The product of one token with the weight `name` on one rank: its FLOPs and its number of results."""

    name: str
    flops: float
    width: float


# ---- one rank's share ----------------------------------------------------------------------------------------------


def layers_of_stage(num_layers: int, stages: int, stage: int) -> range:
    """Return the layers of a pipeline stage.

    If embedding and head count as a layer each and the sum divides evenly, the ends have one layer less (Llama 3);
    otherwise earlier stages take the remainder.
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
    """Return the number of microbatches whose activations a stage keeps at one time.

    A stage starts p - s microbatches before its first backward (1F1B), and with v virtual stages 2 (p - s - 1) + (v -
    1) p + 1 parts of a v-th each (Narayanan et al. 2021, section 2.2; Korthikanti et al. 2022, section 4.2).
    """
    stages, virtual = setup.ranks.pp, setup.virtual_stages
    if virtual == 1:
        return float(min(stages - stage, setup.microbatches))
    parts = 2 * (stages - stage - 1) + (virtual - 1) * stages + 1
    return min(parts / virtual, float(setup.microbatches))


@dataclass
class DecoderShare:
    """The share of the first tensor- and context-parallel rank of a pipeline stage in a microbatch."""

    model: nn.Module  # the whole one, on the meta device
    ranks: ParallelRanks  # along each axis
    micro_batch: int  # sequences
    sequence_length: int  # tokens of a sequence, over all context-parallel ranks
    stage: int = 0  # of the pipeline

    def __post_init__(self) -> None:
        ranks, stage = self.ranks, self.stage
        what = next((f"{axis}={size}" for axis, size in ranks.divided.items()), "this")
        self.shape = shape = DecoderShape(getattr(self.model, "config", None), what)
        is_gpt2 = hasattr(self.model, "transformer")
        self.layer_path = "transformer.h" if is_gpt2 else "model.layers"
        self.embedding_path = "transformer.wte" if is_gpt2 else "model.embed_tokens"
        layers = dict(self.model.named_modules()).get(self.layer_path)
        if not isinstance(layers, nn.ModuleList):
            raise not_modelled(what, f"it has no list {self.layer_path}")
        self._all_layers = layers
        # Of each layer, in the order in which they are multiplied with.
        self._matrices: list[dict[str, torch.Size]] = []
        for layer in layers:
            shapes = {name: param.shape for name, param in layer.named_parameters() if param.dim() > 1}
            for name in shapes:
                if not {*name.split(".")[-2:]} & {*_CUTS, *_WHOLE}:
                    raise not_modelled(what, f"its layers have {name}")
            self._matrices.append(
                dict(sorted(shapes.items(), key=lambda item: "experts." in item[0]))
            )  # behind routers
        self.layers = layers_of_stage(len(layers), ranks.pp, stage)
        self.is_first, self.is_last = stage == 0, stage == ranks.pp - 1
        pieces = ranks.cp * (2 if ranks.cp > 1 else 1)
        for counted, count, divisor, by in (
            ("attention heads", shape.heads, ranks.tp, f"tp={ranks.tp}"),
            ("key heads", max(shape.key_heads, ranks.tp), min(shape.key_heads, ranks.tp), f"tp={ranks.tp}"),
            ("experts", shape.experts, ranks.ep, f"ep={ranks.ep}"),
            ("tokens of a sequence", self.sequence_length, pieces, f"2 x cp={ranks.cp}"),
        ):
            if count % divisor or (divisor > 1 and not count):
                raise ParallelSizeError(f"{count} {counted} cannot be divided by {by}; choose a divisor")
        self.dtype = next(self.model.parameters()).dtype
        self.tokens = self.micro_batch * self.sequence_length // ranks.cp
        self.hidden_bytes = self.tokens * shape.hidden * self.dtype.itemsize

    def is_mixture(self, layer: int) -> bool:
        """Return True if a layer has experts."""
        return any(len(shape) == 3 for shape in self._matrices[layer].values())

    def products(self, layer: int, tp: int) -> list[_Product]:
        """List the products of one token with a layer's weights on one rank, in execution order."""
        shape, found = self.shape, []
        for name, size in self._matrices[layer].items():
            used = shape.chosen / shape.experts if len(size) == 3 else 1.0
            local = local_shape(name, size, tp, shape.key_heads)
            outputs = local[1:] if name.split(".")[-2] in _TRANSPOSED else local[:-1]
            found.append(_Product(name, 2 * used * prod(local), used * prod(outputs)))
        return found

    @property
    def model_flops(self) -> float:
        """The FLOPs of a microbatch without recomputation (Chowdhery et al. 2022), shared equally among its ranks."""
        places = range(len(self._all_layers))
        layers = sum(product.flops for layer in places for product in self.products(layer, 1))
        head = 2 * self.shape.vocabulary * self.shape.hidden
        flops = 3 * (layers + len(places) * self.shape.score_flops(self.sequence_length) + head)
        return flops * self.tokens / (self.ranks.tp * self.ranks.pp)

    def module(self) -> nn.Module:
        """Build the stage with local shapes on the meta device."""
        key_heads, kept = self.shape.key_heads, set(self.layers)
        memo: dict[int, Any] = {}
        for name, param in self.model.named_parameters():
            rows, *rest = local_shape(name, param.shape, self.ranks.tp, key_heads)
            rows //= self.ranks.ep if len(rest) == 2 else 1  # a stack of experts
            memo[id(param)] = nn.Parameter(param.new_empty((rows, *rest)))
        memo |= {id(layer): layer for place, layer in enumerate(self._all_layers) if place not in kept}
        stage = copy.deepcopy(self.model, memo)  # except the parts in the memo
        base = stage.get_submodule(self.layer_path.rpartition(".")[0])
        for name, part in list(base.named_children()):
            if isinstance(part, nn.ModuleList):
                setattr(base, name, nn.ModuleList(part[layer] for layer in self.layers))
            elif not (self.is_first if isinstance(part, nn.Embedding) else self.is_last):
                delattr(base, name)
        if not self.is_last:
            del stage.lm_head
        return stage

    def slowdown(self, setup: Setup) -> float:
        """Return the busiest stage's compute over that of this stage."""
        flops: dict[int, float] = {}
        for stage in {self.stage, 1 % self.ranks.pp, self.ranks.pp - 1}:
            share = replace(self, stage=stage)
            layers = sum(_layer_piece(share, setup, layer).flops for layer in share.layers)
            flops[stage] = layers + (_head_piece(share, setup).flops if share.is_last else 0.0)
        return max(flops.values()) / flops[self.stage]

    def notes(self, setup: Setup) -> tuple[str, ...]:
        """List the assumptions."""
        ranks, found = self.ranks, ["Computed by formulas: fused kernels, no dropout (mfsdp docs plan)."]
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


# ---- activations and operations ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """Forward and backward of one layer or end, for a microbatch on one rank."""

    kept: float = 0.0  # bytes saved for backward
    all_kept: float = 0.0  # bytes without recomputation, all of which backward needs at a time
    passing: float = 0.0  # bytes of temporary results
    flops: float = 0.0  # of a forward
    product_flops: float = 0.0  # among them, of products with weights, which 8-bit formats speed up
    repeated: float = 0.0  # of the forward's FLOPs, those that backward computes again
    repeated_products: float = 0.0  # among them, of products with weights
    score_flops: float = 0.0  # of the forward's attention; its backward takes 2.5 times as many, other backwards twice
    moved: float = 0.0  # bytes that elementwise operators read and write in a forward


def _outside(share: DecoderShare, setup: Setup) -> float:
    """Return a token's hidden-state bytes in regions that only sequence parallelism divides."""
    return share.shape.hidden * share.dtype.itemsize / (share.ranks.tp if setup.sequence_parallel else 1)


def _part_bytes(share: DecoderShare, layer: int) -> tuple[float, float, float]:
    """Count the bytes that attention and the MLP save per token besides inputs, and those of attention's result.

    Korthikanti et al. 2022, section 4, for fused attention and gated products.
    """
    shape, tp, itemsize = share.shape, share.ranks.tp, share.dtype.itemsize
    queries = shape.heads * shape.score_width / tp
    keys = shape.key_heads * (shape.score_width + shape.value_width) / min(tp, shape.key_heads)
    waists = 2.0 * sum(shape.latent) + queries if shape.latent else 0.0
    result = shape.heads * shape.value_width / tp * itemsize + _FP32 * shape.heads / tp
    if not share.is_mixture(layer):
        mlp = (3 if shape.is_gated else 2) * shape.inner / tp * itemsize
    else:  # rows that arrive and return, and activations inside of experts
        rows = shape.chosen * (2 * shape.hidden + 3 * shape.expert_inner / tp) * itemsize
        mlp = rows + 3 * shape.shared_inner / tp * itemsize + 2 * _FP32 * shape.experts
    return (queries + keys + waists) * itemsize + result, mlp, result


def _layer_piece(share: DecoderShare, setup: Setup, layer: int) -> _Piece:
    """Describe a layer under the chosen recomputation."""
    shape, tp, tokens = share.shape, share.ranks.tp, share.tokens
    (attention, mlp, result), outside = _part_bytes(share, layer), _outside(share, setup)
    products = share.products(layer, tp)
    flops = [product.flops for product in products]
    out = max(place for place, product in enumerate(products) if "attn." in product.name)
    scores = shape.score_flops(share.sequence_length) / tp
    everything = 4 * outside + attention + mlp  # two norms keep their inputs and outputs
    results = sum(product.width for product in products[::2]) * share.dtype.itemsize
    choices: dict[Recompute, tuple[float, float, float]] = {  # bytes kept, operations repeated: products, attention
        "none": (everything, 0.0, 0.0),
        "full": (outside, sum(flops[:-1]), scores),
        "selective": (everything - result, 0.0, scores),
        "mlp": (everything - mlp, sum(flops[out + 1 : -1]), 0.0),
        "every_second_product": (outside + result + results, sum(flops[1::2]), 0.0),
    }
    kept, again, again_scores = choices[setup.recompute]
    wide = shape.chosen * shape.expert_inner if share.is_mixture(layer) else shape.inner
    return _Piece(
        kept=kept * tokens,
        all_kept=everything * tokens,
        passing=(shape.hidden + 2 * wide / tp) * share.dtype.itemsize * tokens,
        flops=(sum(flops) + scores) * tokens,
        product_flops=sum(flops) * tokens,
        repeated=(again + again_scores) * tokens,
        repeated_products=again * tokens,
        score_flops=scores * tokens,
        moved=(10 * outside + 2 * result + mlp) * tokens,
    )


def _head_piece(share: DecoderShare, setup: Setup) -> _Piece:
    """Describe final norm, logits and their loss in fp32, over a vocabulary divided by tensor parallelism."""
    logits = -(-share.shape.vocabulary // share.ranks.tp)  # of a token on one rank
    itemsize, tokens = share.dtype.itemsize, share.tokens
    flops = 2.0 * logits * share.shape.hidden * tokens
    kept = (2 * _outside(share, setup) + (itemsize + _FP32) * logits) * tokens
    passing = (itemsize + _FP32) * logits * tokens
    moved = (itemsize + 3 * _FP32) * logits * tokens
    return _Piece(kept, kept, passing, flops, product_flops=flops, moved=moved)


def share_profile(share: DecoderShare, setup: Setup, module: nn.Module, unit_names: Sequence[str]) -> ComputeProfile:
    """Compute the profile of a microbatch (events, bytes, FLOPs) of the share's module and its units."""
    own: dict[str, _Piece] = {}
    if share.is_first:
        table = _outside(share, setup) * share.tokens
        own[share.embedding_path] = _Piece(passing=table, moved=2 * table)
    for place, layer in enumerate(share.layers):
        own[f"{share.layer_path}.{place}"] = _layer_piece(share, setup, layer)
    if share.is_last:
        own["lm_head"] = _head_piece(share, setup)
    others = [name for name in unit_names[1:] if name not in own]  # such as a table of positions
    pieces = {**dict.fromkeys(others, _Piece()), **own}
    units = {name: unit for unit, name in enumerate(unit_names)}
    segments: list[Segment] = []
    alive = 0.0

    def begin(event: Event, name: str) -> None:
        """End the open segment and begin another; a name that is no unit is ignored."""
        if name in units:
            segments.append(Segment(event, units[name], int(alive), int(alive)))

    def work(flops: float, products: float, moved: float, more: float, again: float = 0.0) -> None:
        """Add to the open segment."""
        segment = segments[-1]
        segment.flops += int(flops)
        segment.product_flops += int(products)
        segment.recomputed_flops += int(again)
        segment.moved_bytes += int(moved)
        segment.peak_bytes = max(segment.peak_bytes, int(alive + more))

    begin(Event.FORWARD_BEGINS, "")
    for name, piece in pieces.items():
        begin(Event.FORWARD_BEGINS, name)
        work(piece.flops, piece.product_flops, piece.moved, piece.kept + piece.passing)
        alive += piece.kept
        begin(Event.FORWARD_ENDS, name)
    begin(Event.FORWARD_ENDS, "")
    begin(Event.BACKWARD_BEGINS, "")
    rest = dict(module.named_parameters())
    for name, piece in reversed(pieces.items()):
        begin(Event.BACKWARD_BEGINS, name)
        flops = 2 * piece.flops + piece.score_flops / 2 + piece.repeated
        products = 2 * piece.product_flops + piece.repeated_products
        moved = 2 * piece.moved + (piece.moved if piece.repeated else 0.0)
        work(flops, products, moved, piece.all_kept - piece.kept + 2 * piece.passing, piece.repeated)
        alive -= piece.kept
        for parameter in [each for each in rest if each.startswith(f"{name}.")]:
            del rest[parameter]
            segments[-1].gradients.append(parameter)
    segments[-1].gradients.extend(rest)
    for segment in segments:
        segment.multiplied.update(segment.gradients)
    begin(Event.BACKWARD_ENDS, "")
    received = share.hidden_bytes // (share.ranks.tp if setup.sequence_parallel else 1)
    buffers = received * ((not share.is_first) + (not share.is_last))
    token_bytes = torch.int64.itemsize * share.tokens * (share.is_first + share.is_last)
    return ComputeProfile(tuple(unit_names), tuple(segments), token_bytes + buffers)


# ---- communication -------------------------------------------------------------------------------------------------


def share_exchanges(share: DecoderShare, setup: Setup) -> tuple[Exchange, ...]:
    """List the collectives and messages of a microbatch.

    With sequence parallelism an all-gather begins and a reduce-scatter ends each half of a layer, in forward and in
    backward; without it two all-reduces send the same bytes. The gathers that backward repeats for weight gradients
    overlap with it (Korthikanti et al. 2022, section 4.2.2). Messages between stages are sent once per virtual stage, a
    part by each tensor-parallel rank (Narayanan et al. 2021, section 4.1).
    """
    shape, ranks, virtual = share.shape, share.ranks, setup.virtual_stages
    units = [f"{share.layer_path}.{place}" for place in range(len(share.layers))]
    found: list[Exchange] = []

    def both(axis: str, unit: str, sent: int, count: int, **repeats: int) -> None:
        """Add the collectives of forward, backward and recomputation; a single rank sends nothing."""
        if sent:
            found.append(Exchange(axis, unit, sent, False, count))
            found.append(Exchange(axis, unit, sent, True, count + repeats.get(setup.recompute, 0)))

    half = share.hidden_bytes * (ranks.tp - 1) // ranks.tp
    key_width = shape.key_heads * (shape.score_width + shape.value_width) // min(ranks.tp, shape.key_heads)
    keys = (ranks.cp - 1) * share.tokens * key_width * share.dtype.itemsize
    rows = shape.chosen * share.hidden_bytes * (ranks.ep - 1) // ranks.ep
    if share.is_first:
        both("tp", share.embedding_path, half, 1)
    if share.is_last:
        both("tp", "lm_head", half, 1)
    for unit, layer in zip(units, share.layers, strict=True):
        both("tp", unit, half, 4, full=4, mlp=1, every_second_product=2)
        both("cp", unit, keys, 1, full=1, selective=1, every_second_product=1)
        both("ep", unit, rows if share.is_mixture(layer) else 0, 2, full=2, mlp=2, every_second_product=2)
    if ranks.pp > 1:
        sent = share.hidden_bytes // ranks.tp
        found.append(Exchange("pp", units[-1], sent, False, virtual - share.is_last))
        found.append(Exchange("pp", units[0], sent, True, virtual - share.is_first))
    return tuple(exchange for exchange in found if exchange.count)
