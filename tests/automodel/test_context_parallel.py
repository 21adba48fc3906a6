"""Context parallelism: layouts, batches that are cut, models switched in place, and what is refused."""

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from megatron_fsdp.automodel import create_ring_ulysses_mesh
from megatron_fsdp.automodel.context_parallel import (
    SequenceLayout,
    enable_context_parallel,
    shard_batch,
    unshard_sequence,
)
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.test_adapters import lora, with_adapters
from tests.automodel.test_expert_parallel import Sent
from tests.support.arrangements import mesh_of
from tests.support.language_models import batch_of, build, label_count
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal

SIZES = [(ranks, length) for ranks in (1, 2, 3, 4) for length in (24, 48)]


@pytest.mark.parametrize(("ranks", "length"), SIZES)
def test_balanced_tokens_have_the_order_of_torchs_load_balancer(ranks: int, length: int) -> None:
    layout = SequenceLayout(ranks)
    positions = torch.cat([layout.positions_of(rank, length // ranks) for rank in range(ranks)])
    assert positions.tolist() == _HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()[0].tolist()


@pytest.mark.parametrize(("length", "arithmetic"), [(20, "2 * 4 = 8 equal pieces"), (0, "pad them to 8 tokens")])
def test_lengths_that_do_not_divide_are_refused_with_the_arithmetic(length: int, arithmetic: str) -> None:
    with pytest.raises(ParallelSizeError) as raised:
        SequenceLayout(4).check_length(length)
    assert f"sequences of {length} tokens" in str(raised.value)
    assert arithmetic in str(raised.value)


LENGTH = 8


def tokens() -> Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH)


@on_ranks(2)
def test_labels_are_shifted_before_they_are_cut() -> None:
    mesh = mesh_of((2,), ("cp",))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 6:] = 0
    labels = tokens().masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens(), "labels": labels, "attention_mask": mask, "weights": tokens() * 0.5}
    mine = shard_batch(batch, mesh)
    assert sorted(mine) == ["input_ids", "position_ids", "shift_labels", "weights"]
    assert all(values.is_contiguous() for values in mine.values())
    for name in ("input_ids", "weights"):
        assert torch.equal(unshard_sequence(mine[name], mesh), batch[name])
    hidden = mine["input_ids"][..., None] + torch.zeros(3)
    whole_hidden = unshard_sequence(hidden.transpose(0, 1), mesh, 0)
    assert torch.equal(whole_hidden, tokens().T[..., None] + torch.zeros(3))
    positions, shifted = (
        ([0, 1, 6, 7], [[1, 2, 7, -100], [9, 10, -100, -100]]),
        ([2, 3, 4, 5], [[3, 4, 5, 6], [11, 12, 13, -100]]),
    )[dist.get_rank()]
    assert mine["position_ids"].tolist() == [positions] * 2
    assert torch.equal(mine["input_ids"], tokens()[:, positions])
    assert mine["shift_labels"].tolist() == shifted


@on_ranks(2)
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    mesh, here = mesh_of((2,), ("cp",)), dist.get_rank()
    ids, ones = {"input_ids": tokens()}, torch.ones(2, LENGTH)
    halves = {"input_ids": tokens()[:1], "position_ids": torch.arange(4).repeat(1, 2)}
    hole, left, padded = ones.clone(), ones.clone(), ones.clone()
    hole[0, 3], left[0, 0], padded[0, 7] = 0, 0, 0
    batches: list[tuple[str, dict[str, Tensor]]] = [
        ("sequences of 6 tokens cannot be cut into 2 * 2 = 4 equal pieces", {"input_ids": tokens()[:, :6]}),
        ("needs input_ids or inputs_embeds", {"labels": tokens()}),
        ("attention_mask of shape (2, 1, 1, 8)", {**ids, "attention_mask": ones[:, None, None]}),
        ("the batch has max_length_q without position_ids", {**ids, "max_length_q": torch.tensor(4)}),
        ("seq_idx has the shape (8,); give the number", {**ids, "seq_idx": tokens()[0] // 4}),
        ("cu_seq_lens_q is 'twice'; give a tensor of whole numbers", {**ids, "cu_seq_lens_q": "twice"}),
        ("cu_seq_lens_q=[0, 4, 8] with 2 rows of 8 tokens", {**ids, "cu_seq_lens_q": torch.tensor([0, 4, 8])}),
        ("pixel_values of shape (2, 3, 4, 4)", {**ids, "pixel_values": torch.ones(2, 3, 4, 4)}),
        ("has holes or pads on the left", {**ids, "attention_mask": hole}),
        ("has holes or pads on the left", {**ids, "attention_mask": left}),
        ("labels has labels where attention_mask is 0", {**ids, "attention_mask": padded, "labels": tokens()}),
        (
            "are 1 at token 4 of row 1, where",
            {**ids, "position_ids": torch.tensor([[*range(8)], [0, 1, 2, 3] + [1] * 4])},
        ),
        ("are 5 at token 0 of row 0, where", {**ids, "position_ids": torch.tensor([[5, 6, 7, 8, 0, 1, 2, 3]] * 2)}),
        *(
            (f"position_ids and {name} begin documents at different tokens", {**halves, name: torch.tensor(marks)})
            for name, marks in {"cu_seq_lens_q": [0, 3, 8], "cu_seq_lens_k": [0, 8], "seq_idx": [[0] * 8]}.items()
        ),
        *(
            (f"cu_seq_lens_q={ends} with 1 rows of 8 tokens", {**halves, "cu_seq_lens_q": torch.tensor(ends)})
            for ends in ([], [0.0, 4.5, 8.0])
        ),
        ("attention_mask has values besides 0 and 1", {**ids, "attention_mask": 1 + tokens() // 4}),
        ("labels is a list; give tensors of", {**ids, "labels": tokens().tolist(), "attention_mask": None}),
        ("labels and shift_labels", {**ids, "labels": tokens(), "shift_labels": tokens()}),
        ("ranks differ: input_ids is (2, 8) torch.int64 with the checksum ", {"input_ids": tokens() + here}),
        (
            "cutting a batch failed (rank 1: ConfigurationError: attention_mask has holes",
            {**ids, "attention_mask": hole if here == 1 else ones},
        ),
    ]
    for words, batch in batches:
        assert words in refusal(shard_batch, batch, mesh, error=ConfigurationError)


transformers = pytest.importorskip("transformers")


def logits_of(model: nn.Module, mesh: Any) -> Tensor:
    batch = shard_batch({"input_ids": batch_of()["input_ids"]}, mesh)
    return unshard_sequence(model(**batch).logits, mesh, 1)


# ---- side by side ----------------------------------------------------------------------------------------------------


@pytest.mark.full
@on_ranks(4)
def test_models_on_different_meshes_work_side_by_side() -> None:
    """Models over all ranks, over pairs, and over none, in one process; the forwards take turns."""
    grid = mesh_of((2, 2), ("dp", "cp"))
    wanted = build("llama_gqa")(input_ids=batch_of()["input_ids"]).logits
    everywhere, pairs = build("llama_gqa"), build("llama_gqa")
    enable_context_parallel(everywhere, mesh_of((4,), ("all",)))
    enable_context_parallel(pairs, grid["cp"])
    copied = copy.deepcopy(pairs)
    for _ in range(2):
        for model, mesh in [(everywhere, mesh_of((4,), ("all",))), (pairs, grid["cp"]), (copied, grid["cp"])]:
            torch.testing.assert_close(logits_of(model, mesh), wanted, rtol=1e-4, atol=1e-5)
    assert "context_parallel" not in json.dumps(pairs.config.to_dict(), default=str)


# ---- traffic ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama_gqa", "deepseek_v3"])
@on_ranks(2)
def test_each_layer_gathers_once_and_scatters_once(kind: str) -> None:
    """Collectives of the forward and of the backward."""
    mesh = mesh_of((2,), ("cp",))
    model = build(kind)
    enable_context_parallel(model, mesh)
    batch = shard_batch({"input_ids": batch_of()["input_ids"]}, mesh)
    with Sent() as forward:
        loss = model(**batch).logits.sum()
    with Sent() as backward:
        loss.backward()
    forward, backward = [dict(Counter(name for name, _, _ in sent.calls)) for sent in (forward, backward)]
    assert forward == {"all_gather_into_tensor": 4, "allreduce_": 1}  # four layers; positions are compared once
    assert backward == {"reduce_scatter_tensor": 4}


# ---- lengths ---------------------------------------------------------------------------------------------------------

LONG = {
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.5, 2.0, 3.0, 4.0],
        "original_max_position_embeddings": 12,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
}


SHORTER = {"max_position_embeddings": 12}
MODELS: dict[str, Callable[[], Any]] = {
    "longrope": partial(
        build, "phi3", rope_parameters=LONG["longrope"], original_max_position_embeddings=12, **SHORTER
    ),
    "dynamic": partial(build, "llama", rope_parameters=LONG["dynamic"], **SHORTER),
    "adapters": lambda: with_adapters(build("llama_gqa"), lora(init_lora_weights=False)),
}
"""Rotary frequencies that depend on the whole length (one rank alone has a position beyond the original), and peft."""


@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_logits_are_those_of_one_process(name: str) -> None:
    mesh, model = mesh_of((2,), ("cp",)), MODELS[name]()
    wanted = MODELS[name]()(input_ids=batch_of()["input_ids"]).logits
    enable_context_parallel(model, mesh)
    torch.testing.assert_close(logits_of(model, mesh), wanted, rtol=1e-4, atol=1e-5)
    assert "position_ids is missing" in refusal(model, input_ids=batch_of()["input_ids"], error=ConfigurationError)


# ---- packed rows, and Ulysses ----------------------------------------------------------------------------------------


def packed_rows() -> dict[str, Tensor]:
    """Three rows of documents of several lengths, one of them whole, one with padding behind."""
    batch = batch_of()
    rows, length = batch["input_ids"].shape
    positions = torch.arange(length).repeat(rows, 1)
    for row, begin in ((0, 3), (0, 8), (2, 1), (2, length - 5), (2, length - 2)):
        positions[row, begin:] = torch.arange(length - begin)
    labels = batch["labels"].masked_fill(positions == 0, -100)
    labels[2, -2:] = -100
    return {"input_ids": batch["input_ids"], "labels": labels, "position_ids": positions}


def padded_rows() -> dict[str, Tensor]:
    """Two rows with padding on the right, which is masked on one process only."""
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 11:], mask[2, 5:] = 0, 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


@pytest.mark.full(
    short=["packed_rows-llama_gqa-2-1-False", "packed_rows-mistral-1-2-True", "padded_rows-mistral-2-1-False"]
)
@pytest.mark.parametrize(
    ("rows", "kind", "ring", "ulysses", "recomputes"),
    [
        (packed_rows, "llama_gqa", 2, 1, False),
        (packed_rows, "mistral", 1, 2, True),
        (packed_rows, "gemma2", 2, 2, False),
        (packed_rows, "gpt2", 4, 1, True),
        (packed_rows, "deepseek_v3", 1, 4, False),
        (padded_rows, "mistral", 2, 1, False),
    ],
)
@on_ranks(4)
def test_packed_rows_train_as_on_one_process(
    rows: Callable[[], dict[str, Tensor]], kind: str, ring: int, ulysses: int, recomputes: bool
) -> None:
    """Keys are gathered by `ring` ranks, heads exchanged by `ulysses`; gradients are those of the whole batch."""
    mesh = mesh_of((4 // (ring * ulysses), ring * ulysses), ("dp", "cp"))
    meeting = mesh["cp"] if ulysses == 1 else create_ring_ulysses_mesh(mesh, ring_degree=ring, ulysses_degree=ulysses)
    batch = rows()
    whole, model = build(kind), build(kind)
    count = label_count(batch["labels"])
    # With a cache it takes rows as one document.
    wanted = whole(**batch, num_items_in_batch=count, use_cache=False).loss
    wanted.backward()
    enable_context_parallel(model, meeting)
    if recomputes:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # it has a newer name
            model.gradient_checkpointing_enable()
        model.train()
    mine = shard_batch(batch, mesh["cp"])
    loss = model(**mine, labels=mine["shift_labels"], num_items_in_batch=count).loss
    model(**shard_batch({"input_ids": batch["input_ids"]}, mesh["cp"]))  # another forward before the backward
    loss.backward()
    loss = loss.detach()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for each in (loss, *gradients.values()):
        dist.all_reduce(each, group=mesh["cp"].get_group())
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-6)
    assert_equal_tensors(gradients, {n: p.grad for n, p in whole.named_parameters()}, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_packed_rows_of_a_collator_are_those_of_their_positions() -> None:
    mesh = mesh_of((2,), ("cp",))
    rows = [{"input_ids": list(range(2, 2 + size))} for size in (3, 5, 8)]
    flat = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(rows)
    mine = shard_batch(flat, mesh)
    by_ends, by_index = (
        shard_batch({name: flat[name] for name in ("input_ids", "labels", mark)}, mesh)
        for mark in ("cu_seq_lens_q", "seq_idx")
    )
    ends = [0, 3, 8, 16]
    listed = shard_batch({**flat, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "attention_mask": None}, mesh)
    assert "attention_mask" not in listed
    assert mine.keys() == {"input_ids", "shift_labels", "position_ids", "document_starts"}
    for other in (by_ends, by_index):
        assert_equal_tensors(other, mine)
    starts = unshard_sequence(mine["document_starts"], mesh)
    assert starts.tolist() == [[0] * 3 + [3] * 5 + [8] * 8]
    assert unshard_sequence(mine["shift_labels"], mesh)[0, [2, 7, 15]].tolist() == [-100] * 3


@on_ranks(2)
def test_heads_that_do_not_divide_and_models_without_documents_are_refused() -> None:
    mesh = mesh_of((2,), ("cp",))
    exchanging = create_ring_ulysses_mesh(mesh, ring_degree=1, ulysses_degree=2)
    odd = build("llama", num_attention_heads=3, num_key_value_heads=3, hidden_size=24)
    words = "3 heads with 3 of keys and values cannot be divided over 2 ranks of ulysses"
    assert words in refusal(enable_context_parallel, odd, exchanging, error=ParallelSizeError)
    odd.config.num_attention_heads = odd.config.num_key_value_heads = 4  # of all tensor-parallel ranks, say
    enable_context_parallel(odd, exchanging)
    mine = shard_batch({"input_ids": batch_of()["input_ids"]}, mesh)
    assert words in refusal(odd, **mine, error=ParallelSizeError)
    model = build("llama")
    enable_context_parallel(model, mesh)
    batch = shard_batch(packed_rows(), mesh)
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, "document_starts": None})
    batch.pop("shift_labels")
    assert "is not given document_starts by its model" in refusal(model, error=ConfigurationError, **batch)
    attention.forward = forward
    starts = batch.pop("document_starts")
    assert "are not those of shard_batch" in refusal(model, error=ConfigurationError, **batch)
    assert model(**batch, document_starts=starts).logits.isfinite().all()


# ---- refusals --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_calls_that_would_be_silently_wrong_are_refused_on_all_ranks() -> None:
    mesh = mesh_of((2,), ("cp",))
    model = build("llama")
    enable_context_parallel(model, mesh)
    batch = shard_batch(batch_of(), mesh)
    ids, positions = batch["input_ids"], batch["position_ids"]
    mine = {"input_ids": ids, "position_ids": positions}
    calls: dict[str, dict[str, Any]] = {
        "position_ids is missing": {"input_ids": batch_of()["input_ids"]},
        "attention_mask is for whole sequences": {**mine, "attention_mask": torch.ones_like(ids)},
        "labels alone would be shifted within": {**mine, "labels": ids},
        "use_cache=True is for generation": {**mine, "use_cache": True},
        "position_ids are not those of shard_batch": {"input_ids": ids, "position_ids": positions.flip(1)},
        "cut every batch by shard_batch": {"input_ids": ids, "position_ids": positions + dist.get_rank()},
    }
    for words, arguments in calls.items():
        assert words in refusal(model, error=ConfigurationError, **arguments)
        here_only = arguments if dist.get_rank() == 1 else mine
        assert words in refusal(model, error=ConfigurationError, **here_only)
    shorter = shard_batch(batch_of(sequence=12), mesh)
    words = "position_ids is (4, 8) on rank 0, (4, 6) on rank 1"
    assert words in refusal(
        model, error=ConfigurationError, **({**shorter, "shift_labels": None} if dist.get_rank() else mine)
    )
    # All tokens of the second rank are of the first document, so its positions are as in rows that are not packed.
    ends = torch.cat([torch.arange(12), torch.arange(4)]).expand_as(batch_of()["input_ids"])
    packed = shard_batch({"input_ids": batch_of()["input_ids"], "position_ids": ends}, mesh)
    if dist.get_rank() == 1:
        assert not packed.pop("document_starts").any()
    words = "document_starts is (4, 8) on rank 0, None on rank 1"
    assert words in refusal(model, error=ConfigurationError, **packed)


@on_ranks(1)
def test_models_whose_tokens_meet_elsewhere_are_refused() -> None:
    mesh = mesh_of((1,), ("cp",))
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    encoder_decoder = {"vocab_size": 32, "d_model": 16, "d_ff": 16, "num_layers": 2, "num_heads": 2, "d_kv": 8}
    chunked, bidirectional, linear, windows = (build(kind) for kind in ("llama", "gemma3", "qwen3", "qwen2_moe"))
    chunked.config.attention_chunk_size = 4
    bidirectional.config.use_bidirectional_attention = True
    linear.config.layer_types = ["linear_attention", "full_attention"] * 2
    with torch.device("meta"):
        bloom = transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2)
        )
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))
        t5 = transformers.T5ForConditionalGeneration(transformers.T5Config(**encoder_decoder))
    models = {
        "its attention is not looked up in transformers' AttentionInterface": bloom,
        "MambaForCausalLM cannot be trained with context parallelism": mamba,
        "T5ForConditionalGeneration cannot be trained with context parallelism": t5,
        "attends inside chunks": chunked,
        "its attention is not causal": bidirectional,
        "it has layers of the kinds ['linear_attention']": linear,
        "a Linear has no transformers model inside": nn.Linear(2, 2),
    }
    for words, model in models.items():
        assert words in refusal(enable_context_parallel, model, mesh, error=ConfigurationError)
    windows.config.sliding_window, windows.config.layer_types = 6, ["sliding_attention", "full_attention"] * 2
    enable_context_parallel(windows, mesh)
    words = "has sliding windows, but its attention is not given them"
    assert words in refusal(logits_of, windows, mesh, error=ConfigurationError)
