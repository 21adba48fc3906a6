"""Context parallelism: the ranks of one mesh dimension share the tokens of every sequence.

`shard_batch` gives each rank its tokens. Causal attention gathers the keys and values of all ranks, or exchanges tokens
for heads (Ulysses), or both. Rows may be packed: a token then attends to its own document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _disable_current_modes

from megatron_fsdp.automodel.architecture import IGNORED_LABEL, find_layers, text_config
from megatron_fsdp.checkpoint.hf.live import own_class
from megatron_fsdp.comm.agreement import Groups, all_agree, default_if_all, device_over, raise_together
from megatron_fsdp.comm.fingerprint import fingerprint
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError, shortened

_EMBEDDINGS = "inputs_embeds"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
NAME = "megatron_fsdp_context_parallel"
"""The name of this attention in transformers' registry."""

STARTS = "document_starts"
"""The key of packed batches, and the argument of attention: where in the whole sequence a token's document begins."""

_OF_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keys of packed batches beside or instead of `position_ids`, by which collators mark the documents."""

ATTRIBUTE = "context_parallel"
"""The attribute of attention modules that holds their `ContextParallel`."""

_CHANGES_THE_MATH = (
    "position_bias",
    "cache",
    "block_table",
    "cu_seq_lens_q",
    "head_mask",
    "output_attentions",
)
"""Arguments that some models pass to their attention function and this one does not support."""

_WRONG_POSITIONS = "position_ids are not those of shard_batch for these ranks; cut every batch by shard_batch"

_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd
"""Gather forward, reduce-scatter of the sum backward; torch has renamed it."""

_BY_LENGTH = {"dynamic", "longrope"}
"""Kinds of rope that choose their frequencies by the largest position they are shown."""


@dataclass(frozen=True)
class SequenceLayout:
    """The division of sequences over ranks.

    With causal attention a token costs as much as there are tokens before it. So the sequence is cut into 2 * ranks
    pieces, and rank r has the pieces r and 2 * ranks - 1 - r, one cheap and one expensive: all ranks have the same
    work. This is the order of torch's `_HeadTailLoadBalancer`.
    """

    ranks: int

    def check_length(self, length: int) -> None:
        """Raise for a length of whole sequences that does not divide into equal pieces."""
        num_pieces = 2 * self.ranks
        if length > 0 and length % num_pieces == 0:
            return
        padded = max(-(-length // num_pieces), 1) * num_pieces
        raise ParallelSizeError(
            f"sequences of {length} tokens cannot be cut into 2 * {self.ranks} = {num_pieces} equal pieces for "
            f"cp_size={self.ranks}; pad them to {padded} tokens with labels of -100"
        )

    def pieces_of(self, rank: int) -> tuple[int, int]:
        """Return the numbers of a rank's pieces, in their order on the rank."""
        return rank, 2 * self.ranks - 1 - rank

    def ranges_of(self, rank: int, local_length: int) -> list[tuple[int, int]]:
        """Return (first, last + 1) in the whole sequence for each piece of a rank with `local_length` tokens."""
        size = local_length // 2
        return [(piece * size, (piece + 1) * size) for piece in self.pieces_of(rank)]

    def positions_of(self, rank: int, local_length: int, device: torch.device | None = None) -> Tensor:
        """Return the position in the whole sequence of each token of a rank, int64, (local_length,)."""
        ranges = self.ranges_of(rank, local_length)
        return torch.cat([torch.arange(start, end, device=device) for start, end in ranges])

    def cut(self, whole: Tensor, rank: int, dim: int) -> Tensor:
        """Copy a rank's tokens out of a tensor whose dimension `dim` is the whole sequence."""
        ranges = self.ranges_of(rank, whole.shape[dim] // self.ranks)
        return torch.cat([whole.narrow(dim, start, end - start) for start, end in ranges], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Join the parts of all ranks into the whole sequence, in order; the reverse of `cut`."""
        found: dict[int, Tensor] = {}
        for rank, part in enumerate(parts):
            found.update(zip(self.pieces_of(rank), part.chunk(2, dim), strict=True))
        return torch.cat([found[piece] for piece in range(2 * self.ranks)], dim)


def shard_batch(batch: Mapping[str, Any], cp_mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return this context-parallel rank's part of a batch that all ranks hold whole.

    The ranks compare their batches first (one small collective): a data loader that gives them different ones is an
    easy mistake that no later step would detect.

    Args:
        batch: `input_ids` (or `inputs_embeds`, of three dimensions) and other tensors of (batch, sequence). `labels` as
            transformers takes them, not shifted; or `shift_labels`. An `attention_mask` may pad on the right where
            labels are -100, which causal attention needs no mask for. Rows are packed where `position_ids` begin again,
            or `cu_seq_lens_q` says so (one row), as collators of transformers and trl give them.
        cp_mesh: One dimension, the ranks that share sequences, which must divide by twice their number: every rank has
            the same work (see `SequenceLayout`).

    Returns:
        The same keys, (batch, sequence / ranks, ...), contiguous, but: `labels` became `shift_labels`, shifted before
        cutting, since the next token may lie on another rank; `position_ids`, int64, count in the whole sequence, or
        in the document; packed rows have `document_starts`, too, int64; `attention_mask` is left out.

    Raises:
        ParallelSizeError: The sequence length does not divide.
        ConfigurationError: A tensor cannot be cut, documents do not begin at 0, padding is not on the right or is
            counted, or the ranks hold different batches. All errors are raised on every rank.
    """
    with all_agree("cutting a batch", _ranks_of(cp_mesh)) as facts:
        layout = SequenceLayout(cp_mesh.size())
        of_packing = {name: batch[name] for name in _OF_PACKING if name in batch}
        batch = {name: each for name, each in batch.items() if name not in of_packing and each is not None}
        _check(batch, layout)
        starts = _document_starts(batch, of_packing)
        facts |= {
            name: f"{tuple(values.shape)} {values.dtype} with the checksum {int(fingerprint(values))}"
            for name, values in sorted({**batch, STARTS: starts}.items())
        }
    length = starts.shape[1]
    whole = {name: values for name, values in batch.items() if name not in ("labels", "attention_mask")}
    if "labels" in batch:
        whole["shift_labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED_LABEL)
    whole["position_ids"] = torch.arange(length, device=starts.device) - starts
    if bool(starts.any()):
        whole[STARTS] = starts
    return {name: layout.cut(values, cp_mesh.get_local_rank(), 1).contiguous() for name, values in whole.items()}


def _ranks_of(cp_mesh: object) -> Groups:
    return default_if_all(cp_mesh.get_all_groups() if isinstance(cp_mesh, DeviceMesh) else ())


def unshard_sequence(tensor: Tensor, cp_mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Gather a sequence that is divided over the ranks, such as logits, on every rank; detached.

    `cp_mesh` is as for `shard_batch`, `dim` that of the sequence; this rank's part has the same shape on every rank.

    Raises:
        ConfigurationError: The ranks' parts have different shapes; on every rank.
    """
    with all_agree("gathering a sequence", _ranks_of(cp_mesh)) as facts:
        layout = SequenceLayout(cp_mesh.size())
        mine = tensor.detach().contiguous()
        facts["a part"] = f"{tuple(mine.shape)} {mine.dtype}, divided along dimension {range(mine.ndim)[dim]}"
    parts = [torch.empty_like(mine) for _ in range(cp_mesh.size())]
    dist.all_gather(parts, mine, group=cp_mesh.get_group())
    return layout.join(parts, dim)


def _reference(batch: Mapping[str, Tensor]) -> Tensor:
    return batch[_EMBEDDINGS] if "input_ids" not in batch else batch["input_ids"]


def _check(batch: Mapping[str, Tensor], layout: SequenceLayout) -> None:
    for name, values in batch.items():
        if not isinstance(values, Tensor):
            raise ConfigurationError(f"{name} is a {type(values).__name__}; give tensors of (batch, sequence) only")
    if "input_ids" not in batch and _EMBEDDINGS not in batch:
        raise ConfigurationError(f"the batch has {sorted(batch)}; it needs input_ids or {_EMBEDDINGS}")
    shape = tuple(_reference(batch).shape[:2])
    for name, values in batch.items():
        given = tuple(values.shape)
        if len(given) != (3 if name == _EMBEDDINGS else 2) or given[:2] != shape:
            raise ConfigurationError(
                f"{name} of shape {given} cannot be cut along the sequence; give tensors of (batch, sequence) = "
                f"{shape} only, without images"
            )
    layout.check_length(shape[1])
    if "labels" in batch and "shift_labels" in batch:
        raise ConfigurationError("the batch has labels and shift_labels; give one of them")
    if "attention_mask" in batch:
        _check_padding(batch)


def _document_starts(batch: Mapping[str, Tensor], of_packing: Mapping[str, Any]) -> Tensor:
    """Return where each token's document begins in its row, int64, (rows, length); zeros where rows are not packed."""
    reference = _reference(batch)
    rows, length = reference.shape[:2]
    at = torch.arange(length, device=reference.device).expand(rows, length)
    is_real = batch["attention_mask"].bool() if "attention_mask" in batch else torch.ones_like(at, dtype=torch.bool)
    begins: dict[str, Tensor] = {}  # True where a document begins, by what says so
    if "position_ids" in batch:
        starts = at - batch["position_ids"].to(at)
        begins["position_ids"] = starts == at
        goes_on = F.pad(starts[:, 1:] == starts[:, :-1], (1, 0), value=False)
        wrong = (is_real & ~begins["position_ids"] & ~goes_on).nonzero()
        if wrong.numel():
            row, token = wrong[0].tolist()
            raise ConfigurationError(
                f"position_ids are {int(batch['position_ids'][row, token])} at token {token} of row {row}, where they "
                "neither go on nor begin at 0; give documents one after another, each numbered from 0, and padding last"
            )
    for name, given in of_packing.items():
        if given is None or name.startswith("max_length"):
            continue
        try:
            marks = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError):
            raise ConfigurationError(
                f"{name} is {shortened(repr(given), 80)}; give a tensor of whole numbers"
            ) from None
        if name == "seq_idx":
            if marks.shape != at.shape:
                raise ConfigurationError(
                    f"seq_idx has the shape {tuple(marks.shape)}; give the number of each token's document, {rows} "
                    f"rows of {length}"
                )
            begins[name] = F.pad(marks.to(at).diff(dim=1) != 0, (1, 0), value=True)
            continue
        is_list = rows == marks.ndim == 1 and not marks.is_floating_point() and marks[:1].tolist() == [0]
        if not is_list or marks[-1] != length or (marks.diff() < 1).any():
            raise ConfigurationError(
                f"{name}={marks.tolist()} with {rows} rows of {length} tokens; give one row, and increasing ends "
                f"of its documents, whole numbers from 0 to {length}"
            )
        begins[name] = torch.isin(at, marks.to(at))
    if of_packing and not begins:
        raise ConfigurationError(
            f"the batch has {', '.join(of_packing)} without position_ids, cu_seq_lens_q or seq_idx, which say where "
            "documents begin; give one of these"
        )
    first = next(iter(begins), "")
    for name, other in begins.items():
        if bool(((other != begins[first]) & is_real).any()):
            raise ConfigurationError(f"{first} and {name} begin documents at different tokens; give one of them")
    found = begins[first] & is_real if begins else torch.zeros_like(is_real)
    return torch.where(found, at, 0).cummax(1).values  # padding belongs to the last document


def _check_padding(batch: Mapping[str, Tensor]) -> None:
    """Allow only trailing padding, without labels."""
    real = batch["attention_mask"].bool()
    if bool((batch["attention_mask"] != real).any()):
        raise ConfigurationError(
            "attention_mask has values besides 0 and 1; say where documents begin by position_ids or seq_idx"
        )
    if bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ConfigurationError(
            "attention_mask has holes or pads on the left, which context parallelism does not support; pad on the right"
        )
    for name in ("labels", "shift_labels"):
        if name in batch and bool((batch[name][~real] != IGNORED_LABEL).any()):
            raise ConfigurationError(f"{name} has labels where attention_mask is 0; set them to {IGNORED_LABEL} there")


def enable_context_parallel(model: nn.Module, cp_mesh: DeviceMesh) -> None:
    """Divide the tokens of every sequence over the ranks of a mesh dimension; in place, before or after sharding.

    The model (a causal one of transformers, or of peft around one; may be on the meta device) is then called with the
    result of `shard_batch`: `model(input_ids=..., position_ids=...)`. It returns logits of this rank's tokens;
    `unshard_sequence` joins them. Gradients are those of the rank's tokens, so they have to be averaged over the
    context-parallel and the data-parallel ranks together.

    All state is in the model: its attention modules know their process group, and models on different meshes work side
    by side. Only the name of the attention function stays registered with transformers.

    Args:
        model: As above.
        cp_mesh: The ranks that share sequences: one dimension, whose ranks gather keys and values; or two, "ring" and
            "ulysses" of `create_ring_ulysses_mesh`, where those of "ulysses" exchange tokens for heads before.
    """
    from transformers import AttentionInterface, PreTrainedModel

    if cp_mesh.ndim != 1 and cp_mesh.mesh_dim_names != ("ring", "ulysses"):
        raise ConfigurationError(
            f"cp_mesh has the dimensions {cp_mesh.mesh_dim_names}; give the one of the ranks that share sequences, "
            'such as mesh["cp"], or what create_ring_ulysses_mesh makes of it'
        )
    exchange = HeadExchange(cp_mesh["ulysses"].get_group()) if cp_mesh.ndim == 2 else None
    ring = cp_mesh if exchange is None else cp_mesh["ring"]
    whole = cp_mesh if exchange is None else cp_mesh._flatten()
    layout = SequenceLayout(cp_mesh.size())
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    if inner is None:
        raise ConfigurationError(
            f"a {type(model).__name__} has no transformers model inside, so its attention cannot be made context "
            "parallel; use cp_size=1"
        )
    _refuse_unfit(inner)
    windows = getattr(text_config(inner), "sliding_window", None) is not None
    shared = ContextParallel(whole.get_group(), whole.get_local_rank(), layout, windows, ring.get_group(), exchange)
    config = text_config(inner)
    heads = config.num_attention_heads
    shared.check_heads(heads, getattr(config, "num_key_value_heads", None) or heads)
    AttentionInterface.register(NAME, context_parallel_attention)
    inner.set_attn_implementation(NAME)
    for layer in find_layers(inner).modules():
        for part in layer.modules():
            if hasattr(part, "config"):  # where transformers looks up the attention function
                setattr(part, ATTRIBUTE, shared)
    _pass_last_position(inner, shared)
    model.register_forward_pre_hook(partial(_before_forward, shared), with_kwargs=True)
    model.register_forward_hook(partial(_after_forward, shared), always_call=True)
    model.__dict__[ATTRIBUTE] = shared


def check_call(model: nn.Module, arguments: dict[str, Any]) -> None:
    """Raise, before a forward, the errors of a context-parallel model's forward; collective.

    For pipelines, in which a forward that raises leaves the other stages waiting.
    """
    shared = model.__dict__.get(ATTRIBUTE)
    if shared is not None:
        _before_forward(shared, model, (), arguments)


def _refuse_unfit(model: Any) -> None:
    """Raise for models that mix tokens without this library's attention."""
    config = text_config(model)
    kinds = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    convolutions = {type(part).__name__ for part in model.modules() if isinstance(part, nn.Conv1d)}
    findings = {
        "its attention is not looked up in transformers' AttentionInterface": not model._supports_attention_backend
        or not model._can_set_attn_implementation(),
        "it has parts beside the language model": config is not model.config,
        "it is an encoder and decoder": bool(getattr(config, "is_encoder_decoder", False)),
        "its attention is not causal": not getattr(config, "is_causal", True)
        or bool(getattr(config, "use_bidirectional_attention", False)),
        "it attends inside chunks (attention_chunk_size)": getattr(config, "attention_chunk_size", None) is not None,
        "its head looks at one token of the sequence, which one rank has": "Classification"
        in own_class(model).__name__,
        f"it has layers of the kinds {sorted(kinds)}": bool(kinds),
        f"its layers mix tokens by {sorted(convolutions)}": bool(convolutions),
    }
    reason = next((text for text, found in findings.items() if found), None)
    if reason is not None:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be trained with context parallelism, since {reason}; use cp_size=1"
        )


def _before_forward(
    shared: ContextParallel, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Raise for calls that would be silently wrong on a part of the sequence; on all ranks."""
    groups, error = (shared.group,), None
    counts = torch.tensor([1, 0, 0, 0], device=device_over(groups))
    try:
        _check_arguments(module, args, kwargs)
        counts = _counts_of(shared, kwargs["position_ids"], kwargs.get(STARTS))
    except ConfigurationError as met:
        error = met
    shared.is_packed = kwargs.get(STARTS) is not None
    # All ranks together compare their positions with the layout; one all-reduce of a few numbers.
    dist.all_reduce(counts, dist.ReduceOp.MAX, group=shared.group)
    num_wrong, shared.last_position, largest, smallest = counts.unbind()
    is_right = (num_wrong == 0) & (largest == -smallest)
    if counts.device.type == "cpu":
        if not is_right:
            given = {name: kwargs.get(name) for name in ("position_ids", STARTS)}
            facts = None if error else {name: f"{None if t is None else tuple(t.shape)}" for name, t in given.items()}
            raise_together(error, "calling a context-parallel model", groups, facts)
    elif error is not None:
        raise error
    else:  # without making the host wait for the device
        torch._assert_async(is_right, _WRONG_POSITIONS)
    return args, {**kwargs, "use_cache": False}


def _check_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    call = f"{type(module).__name__} is context parallel: call it with what shard_batch returns, by keyword"
    positions = kwargs.get("position_ids")
    if len(args) > 1 or not isinstance(positions, Tensor):
        raise ConfigurationError(f"{call}; position_ids is missing, so each rank would number its tokens from 0")
    for name in ("attention_mask", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ConfigurationError(f"{call}; {name} is for whole sequences; leave it out")
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        raise ConfigurationError(
            f"{call}; labels alone would be shifted within this rank's tokens; give "
            'labels=batch["shift_labels"] and shift_labels=batch["shift_labels"], or compute the loss outside'
        )
    if kwargs.get("use_cache"):
        raise ConfigurationError(f"{call}; use_cache=True is for generation; leave it out")


def _counts_of(shared: ContextParallel, positions: Tensor, starts: Tensor | None) -> Tensor:
    """Return numbers to compare, int64: wrong calls, the last position, one of the call, and minus that."""
    length = positions.shape[-1]
    if length == 0 or length % 2 or (starts is not None and starts.shape[-1] != length):
        raise ConfigurationError(_WRONG_POSITIONS)
    expected = shared.layout.positions_of(shared.rank, length, positions.device)
    wrong = (positions != (expected if starts is None else expected - starts)).any()
    if wrong.device.type == "cpu" and bool(wrong):
        raise ConfigurationError(_WRONG_POSITIONS)
    own = torch.full((1,), 2 * positions.numel() + (starts is not None), device=positions.device)
    return torch.cat([torch.stack([wrong.long(), positions.max().long()]), own, -own])


def _after_forward(shared: ContextParallel, *_: object) -> None:
    shared.is_packed = False  # layers that are recomputed in backward have the arguments of their own forward


@dataclass(frozen=True)
class HeadExchange:
    """Ulysses' exchange: each rank gives its tokens of some heads away, and gets all tokens of its own heads."""

    group: dist.ProcessGroup

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return dist.get_world_size(self.group)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Exchange (batch, heads, tokens, size) for (batch, heads / ranks, ranks * tokens, size), by rank."""
        batch, heads, tokens, size = tensor.shape
        parts = tensor.view(batch, self.ranks, heads // self.ranks, tokens, size).transpose(0, 1)
        return self._exchanged(parts).permute(1, 2, 0, 3, 4).reshape(batch, -1, self.ranks * tokens, size)

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Reverse `to_heads`."""
        batch, heads, tokens, size = tensor.shape
        parts = tensor.view(batch, heads, self.ranks, tokens // self.ranks, size).permute(2, 0, 1, 3, 4)
        return self._exchanged(parts).transpose(0, 1).reshape(batch, self.ranks * heads, -1, size)

    def _exchanged(self, parts: Tensor) -> Tensor:
        found: Tensor = collectives.all_to_all_single_autograd(parts.contiguous(), None, None, self.group)
        return found


@dataclass(eq=False)
class ContextParallel:
    """The context-parallel ranks of one model, for its attention modules."""

    group: dist.ProcessGroup  # all of them
    rank: int
    layout: SequenceLayout
    has_windows: bool  # some layers attend to a sliding window
    ring: dist.ProcessGroup  # ranks that gather keys and values
    exchange: HeadExchange | None  # between ranks that come one after another in `group`
    is_packed: bool = False  # the rows of the forward that runs
    last_position: Tensor | None = None  # the largest of the whole batch

    @property
    def queried_ranks(self) -> range:
        """The ranks whose tokens this rank attends from."""
        size = 1 if self.exchange is None else self.exchange.ranks
        first = self.rank // size * size
        return range(first, first + size)

    def check_heads(self, heads: int, groups: int) -> None:
        """Raise if heads, of queries and of keys and values, do not divide over the ranks that exchange them."""
        ranks = len(self.queried_ranks)
        if heads % ranks or (groups % ranks and ranks % groups):
            raise ParallelSizeError(
                f"{heads} heads with {groups} of keys and values cannot be divided over {ranks} ranks of ulysses; give "
                "an ulysses_degree that divides both, or a multiple of the second that divides the first"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextParallel:
        """Share this between copies of a model: process groups cannot be copied."""
        return self


@dataclass(frozen=True)
class _Math:
    """The numerics from scores to outputs, equal for all pieces."""

    scale: float
    dropout: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None  # for each head a score besides those of the keys, which has no value


def context_parallel_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend from this rank's tokens to all earlier tokens, on any rank.

    Keys and values travel together: one gather in the forward, one reduce-scatter in the backward. There is no mask of
    the whole sequence: each of the rank's pieces attends to the keys up to its own end, so that fused kernels do no
    unnecessary work.

    Called by transformers with query (batch, heads, tokens of this rank, head size), rotated by positions in the whole
    sequence, and key and value of as many or fewer heads, which divide them. `sliding_window` is the number of tokens
    that a token sees, itself included; `softcap` makes scores `softcap * tanh(scores / softcap)`; `s_aux` has a
    sink of each head. Other `kwargs` that would change the result raise. Returns (batch, tokens of this rank, heads,
    value size), and None for the weights.
    """
    shared = getattr(module, ATTRIBUTE, None)
    if not isinstance(shared, ContextParallel):
        raise ConfigurationError(
            f"a {type(module).__name__} uses the attention of context parallelism but was not prepared for it; call "
            "enable_context_parallel on its model, and give models that share a config a copy each"
        )
    _refuse(module, shared, attention_mask, {**kwargs, "sliding_window": sliding_window})
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    starts, tokens, exchange = kwargs.get(STARTS), query.shape[2], shared.exchange
    pairs = torch.cat([key, value], -1)
    if exchange is not None:
        shared.check_heads(query.shape[1], pairs.shape[1])  # fewer than in the config where tensors are divided, too
        if pairs.shape[1] % exchange.ranks:
            pairs = pairs.repeat_interleave(exchange.ranks // pairs.shape[1], 1)
        query, pairs = exchange.to_heads(query), exchange.to_heads(pairs)
        if s_aux is not None:
            s_aux = s_aux.chunk(exchange.ranks)[dist.get_rank(exchange.group)]
        if starts is not None:
            starts = torch.cat(_gather(starts, 0, exchange.group).chunk(exchange.ranks), 1)
    gathered = _gather(pairs, 0, shared.ring).chunk(dist.get_world_size(shared.ring), 0)
    parts = [part for of_rank in gathered for part in of_rank.chunk(len(shared.queried_ranks), 2)]
    keys, values = shared.layout.join(parts, 2).split([key.shape[-1], value.shape[-1]], -1)
    ranges = [each for rank in shared.queried_ranks for each in shared.layout.ranges_of(rank, tokens)]
    begins = [None] * len(ranges) if starts is None else starts.chunk(len(ranges), 1)
    math = _Math(scale, dropout, sliding_window, softcap, s_aux)
    out = [
        _attend(piece, keys, values, start, math, documents)
        for piece, (start, _), documents in zip(query.chunk(len(ranges), 2), ranges, begins, strict=True)
    ]
    joined = torch.cat(out, 2) if exchange is None else exchange.to_tokens(torch.cat(out, 2))
    return joined.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, shared: ContextParallel, attention_mask: Tensor | None, given: dict[str, Any]) -> None:
    name = type(module).__name__
    found = [key for key in _CHANGES_THE_MATH if given.get(key) is not None and given[key] is not False]
    if attention_mask is not None:
        found.append("attention_mask")
    if shared.is_packed and given.get(STARTS) is None:
        raise ConfigurationError(
            f"{name} is not given {STARTS} by its model, so tokens of packed rows would attend to other documents; "
            "give one sequence per row"
        )
    if found:
        raise ConfigurationError(
            f"{name} passes {', '.join(found)} to its attention, which context parallelism does not support; use "
            "cp_size=1 for this model or call it without"
        )
    if given.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise ConfigurationError(f"{name} is not causal, and context parallelism is for decoders only; use cp_size=1")
    if shared.has_windows and given["sliding_window"] is None:
        types, index = getattr(getattr(module, "config", None), "layer_types", None), getattr(module, "layer_idx", None)
        if types is None or index is None or types[index] != "full_attention":
            raise ConfigurationError(
                f"the config of {name} has sliding windows, but its attention is not given them; use cp_size=1"
            )


def _attend(query: Tensor, key: Tensor, value: Tensor, start: int, math: _Math, documents: Tensor | None) -> Tensor:
    """Compute causal attention for a contiguous block of queries that starts at `start`; by the starts of documents."""
    end = start + query.shape[2]
    window = math.window if math.window is not None and math.window < end else None
    first = 0 if window is None else max(start - window + 1, 0)
    key, value = key[:, :, first:end], value[:, :, first:end]
    groups = query.shape[1] // key.shape[1]
    is_fused = math.softcap is None and math.sinks is None
    if window is None and is_fused and documents is None:
        bias: Any = _lower_right(query.shape[2], end)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=bias, dropout_p=math.dropout, scale=math.scale, enable_gqa=groups > 1
        )
    if groups > 1:  # fused kernels take a mask or groups of heads, not both
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    distance = torch.arange(start, end, device=query.device)[:, None] - torch.arange(first, end, device=query.device)
    mask = distance >= 0  # who sees whom: (tokens start to end, tokens first to end)
    if window is not None:
        mask &= distance < window
    if documents is not None:  # (batch, 1, tokens start to end, tokens first to end)
        mask = (mask & (torch.arange(first, end, device=query.device) >= documents[:, :, None]))[:, None]
    if is_fused:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=math.dropout, scale=math.scale
        )
    scores = query @ key.transpose(2, 3) * math.scale
    if math.softcap is not None:
        scores = torch.tanh(scores / math.softcap) * math.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if math.sinks is not None:
        scores = torch.cat([scores, math.sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
    return F.dropout(weights, math.dropout) @ value


def _lower_right(queries: int, keys: int) -> Tensor:
    """Align the causal mask of fused kernels with the last key, by torch's tensor subclass without data."""
    if torch.compiler.is_compiling():
        return causal_lower_right(queries, keys)
    with _disable_current_modes():  # it cannot be made under a dispatch mode, such as selective recomputation's
        return causal_lower_right(queries, keys)


def _pass_last_position(model: nn.Module, shared: ContextParallel) -> None:
    """Pass the whole batch's last position to rotary modules that read the largest one; one rank alone has it.

    Otherwise ranks would rotate the tokens of one sequence by different frequencies.
    """

    def append_last(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        in_kwargs = "position_ids" in kwargs
        positions: Tensor = kwargs["position_ids"] if in_kwargs else args[1]
        assert shared.last_position is not None
        longer = torch.cat([positions, shared.last_position.expand_as(positions[..., :1])], -1)
        return (args, {**kwargs, "position_ids": longer}) if in_kwargs else ((args[0], longer, *args[2:]), kwargs)

    for part in model.modules():
        kinds = getattr(part, "rope_type", None)
        found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        if found & _BY_LENGTH:
            part.register_forward_pre_hook(append_last, with_kwargs=True)
            # cosines and sines, (batch, tokens, size)
            part.register_forward_hook(lambda _module, _args, output: tuple(each[:, :-1] for each in output))
