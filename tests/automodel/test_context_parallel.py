"""Context parallelism: layouts, batches that are cut, models switched in place, and what is refused."""

import copy
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from megatron_fsdp.automodel.context_parallel import (
    SequenceLayout,
    enable_context_parallel,
    shard_batch,
    unshard_sequence,
)
from megatron_fsdp.errors import ConfigurationError, ParallelSizeError
from tests.automodel.test_expert_parallel import Sent
from tests.conftest import RunRanks
from tests.support.arrangements import mesh_of
from tests.support.language_models import batch_of, build, label_count
from tests.support.on_ranks import assert_equal_tensors, on_ranks, same_on_ranks

SIZES = [(ranks, length) for ranks in (1, 2, 3, 4) for length in (24, 48)]


@pytest.mark.parametrize(("ranks", "length"), SIZES)
def test_balanced_tokens_have_the_order_of_torchs_load_balancer(ranks: int, length: int) -> None:
    layout = SequenceLayout(ranks)
    positions = torch.cat([layout.positions_of(rank, length // ranks) for rank in range(ranks)])
    assert positions.tolist() == _HeadTailLoadBalancer(length, ranks, "cpu")._generate_indices()[0].tolist()


@pytest.mark.parametrize(("ranks", "length"), SIZES)
def test_joining_undoes_cutting(ranks: int, length: int) -> None:
    layout = SequenceLayout(ranks)
    whole = torch.arange(2 * length * 3).view(2, length, 3)
    parts = [layout.cut(whole, rank, 1) for rank in range(ranks)]
    assert torch.equal(layout.join(parts, 1), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, whole[:, layout.positions_of(rank, length // ranks)])


@pytest.mark.parametrize(("length", "arithmetic"), [(20, "2 * 4 = 8 equal pieces"), (0, "pad them to 8 tokens")])
def test_lengths_that_do_not_divide_are_refused_with_the_arithmetic(length: int, arithmetic: str) -> None:
    with pytest.raises(ParallelSizeError) as raised:
        SequenceLayout(4).check_length(length)
    assert f"sequences of {length} tokens" in str(raised.value)
    assert arithmetic in str(raised.value)


LENGTH = 8


def tokens() -> Tensor:
    return torch.arange(2 * LENGTH).view(2, LENGTH)


def cut() -> dict[str, list[Any]]:
    mesh = mesh_of((2,), ("cp",))
    mask = torch.ones(2, LENGTH, dtype=torch.int64)
    mask[1, 6:] = 0
    labels = tokens().masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens(), "labels": labels, "attention_mask": mask, "weights": tokens() * 0.5}
    mine = shard_batch(batch, mesh)
    assert all(values.is_contiguous() for values in mine.values())
    for name, whole in batch.items():
        if name in mine:
            assert torch.equal(unshard_sequence(mine[name], mesh), whole)
    hidden = mine["input_ids"][..., None] + torch.zeros(3)
    whole_hidden = unshard_sequence(hidden.transpose(0, 1), mesh, 0)
    assert torch.equal(whole_hidden, tokens().T[..., None] + torch.zeros(3))
    return {name: values.tolist() for name, values in mine.items()}


def test_labels_are_shifted_before_they_are_cut(run_ranks: RunRanks) -> None:
    first, second = run_ranks(2, cut)
    assert first["position_ids"] == [[0, 1, 6, 7]] * 2
    assert second["position_ids"] == [[2, 3, 4, 5]] * 2
    assert first["input_ids"] == [[0, 1, 6, 7], [8, 9, 14, 15]]
    assert first["shift_labels"] == [[1, 2, 7, -100], [9, 10, -100, -100]]
    assert second["shift_labels"] == [[3, 4, 5, 6], [11, 12, 13, -100]]
    assert sorted(first) == ["input_ids", "position_ids", "shift_labels", "weights"]


def refusal(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call that must be refused is told."""
    with pytest.raises(ConfigurationError) as raised:
        call(*args, **kwargs)
    return str(raised.value)


@on_ranks(2)
def test_batches_that_cannot_be_cut_are_refused_on_all_ranks() -> None:
    mesh, here = mesh_of((2,), ("cp",)), dist.get_rank()
    ids, ones = {"input_ids": tokens()}, torch.ones(2, LENGTH)
    hole, left, padded = ones.clone(), ones.clone(), ones.clone()
    hole[0, 3], left[0, 0], padded[0, 7] = 0, 0, 0
    batches: dict[str, dict[str, Tensor]] = {
        "length": {"input_ids": tokens()[:, :6]},
        "nothing": {"labels": tokens()},
        "square": {**ids, "attention_mask": ones[:, None, None]},
        "one dimension": {**ids, "cu_seq_lens_q": torch.tensor([0, 4, 8])},
        "image": {**ids, "pixel_values": torch.ones(2, 3, 4, 4)},
        "hole": {**ids, "attention_mask": hole},
        "left": {**ids, "attention_mask": left},
        "counted": {**ids, "attention_mask": padded, "labels": tokens()},
        "packed": {**ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]] * 2)},
        "twice": {**ids, "labels": tokens(), "shift_labels": tokens()},
        "other rows": {"input_ids": tokens() + here},
        "hole on one rank": {**ids, "attention_mask": hole if here == 1 else ones},
    }
    first = same_on_ranks({name: refusal(shard_batch, batch, mesh) for name, batch in batches.items()})
    parts = {
        "length": "sequences of 6 tokens cannot be cut into 2 * 2 = 4 equal pieces",
        "nothing": "needs input_ids or inputs_embeds",
        "square": "attention_mask of shape (2, 1, 1, 8)",
        "one dimension": "cu_seq_lens_q of shape (3,)",
        "image": "pixel_values of shape (2, 3, 4, 4)",
        "hole": "has holes or pads on the left",
        "left": "has holes or pads on the left",
        "counted": "labels has labels where attention_mask is 0",
        "packed": "sequences are packed",
        "twice": "labels and shift_labels",
        "other rows": "ranks differ: input_ids is (2, 8) torch.int64 with the checksum ",
        "hole on one rank": "cutting a batch failed (rank 1: ConfigurationError: attention_mask has holes",
    }
    assert {name: part for name, part in parts.items() if part not in first[name]} == {}


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


@pytest.mark.parametrize("rope", list(LONG))
@on_ranks(2)
def test_rotary_frequencies_that_depend_on_the_length_see_the_whole_of_it(rope: str) -> None:
    """One rank alone has a position beyond the original length, in either order."""
    kind = "phi3" if rope == "longrope" else "llama"
    changes = {"rope_parameters": LONG[rope], "max_position_embeddings": 12, "original_max_position_embeddings": 12}
    if rope == "dynamic":
        del changes["original_max_position_embeddings"]
    mesh = mesh_of((2,), ("cp",))
    model = build(kind, **changes)
    wanted = build(kind, **changes)(input_ids=batch_of()["input_ids"]).logits
    enable_context_parallel(model, mesh)
    torch.testing.assert_close(logits_of(model, mesh), wanted, rtol=1e-4, atol=1e-5)


# ---- adapters --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_models_with_adapters_are_switched_too() -> None:
    pytest.importorskip("peft")
    peft = pytest.importorskip("peft")
    mesh = mesh_of((2,), ("cp",))
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an old name
        model = peft.get_peft_model(build("llama_gqa"), lora)
    enable_context_parallel(model, mesh)
    wanted = build("llama_gqa")(input_ids=batch_of()["input_ids"]).logits
    torch.testing.assert_close(logits_of(model, mesh), wanted, rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigurationError, match="position_ids is missing"):
        model(input_ids=batch_of()["input_ids"])


# ---- padding ---------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_padding_on_the_right_changes_no_gradient() -> None:
    """The loss over real tokens, and its gradients, do not see that padding is no longer masked."""
    mesh = mesh_of((2,), ("cp",))
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 11:], mask[2, 5:] = 0, 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    whole, model = build("mistral"), build("mistral")
    count = label_count(labels)
    whole(input_ids=batch["input_ids"], attention_mask=mask, labels=labels, num_items_in_batch=count).loss.backward()
    enable_context_parallel(model, mesh)
    mine = shard_batch({"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}, mesh)
    model(**mine, labels=mine["shift_labels"], num_items_in_batch=count).loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for grad in gradients.values():
        dist.all_reduce(grad)
    assert_equal_tensors(gradients, {n: p.grad for n, p in whole.named_parameters()}, rtol=1e-4, atol=1e-5)


# ---- refusals --------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_calls_that_would_be_silently_wrong_are_refused_on_all_ranks() -> None:
    mesh = mesh_of((2,), ("cp",))
    model = build("llama")
    enable_context_parallel(model, mesh)
    batch = shard_batch(batch_of(), mesh)
    ids, positions = batch["input_ids"], batch["position_ids"]
    other = positions.flip(1)
    here = dist.get_rank() == 1
    calls: dict[str, dict[str, Any]] = {
        "whole": {"input_ids": batch_of()["input_ids"]},
        "mask": {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)},
        "labels": {"input_ids": ids, "position_ids": positions, "labels": ids},
        "cache": {"input_ids": ids, "position_ids": positions, "use_cache": True},
        "order": {"input_ids": ids, "position_ids": other},
        "order on one rank": {"input_ids": ids, "position_ids": positions + 1 if here else positions},
    }
    first = same_on_ranks({name: refusal(model, **arguments) for name, arguments in calls.items()})
    parts = {
        "whole": "position_ids is missing",
        "mask": "attention_mask is for whole sequences",
        "labels": "labels alone would be shifted within",
        "cache": "use_cache=True is for generation",
        "order": "position_ids are not those of shard_batch",
        "order on one rank": "cut every batch by shard_batch",
    }
    assert {name: part for name, part in parts.items() if part not in first[name]} == {}


def refused_models() -> dict[str, str]:
    mesh = mesh_of((1,), ("cp",))
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    chunked = build("llama")
    chunked.config.attention_chunk_size = 4
    bidirectional = build("gemma3")
    bidirectional.config.use_bidirectional_attention = True
    linear = build("qwen3")
    linear.config.layer_types = ["linear_attention", "full_attention"] * 2
    with torch.device("meta"):
        bloom = transformers.BloomForCausalLM(
            transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=2, n_head=2)
        )
        mamba = transformers.MambaForCausalLM(transformers.MambaConfig(**small, state_size=4))
        t5 = transformers.T5ForConditionalGeneration(
            transformers.T5Config(vocab_size=32, d_model=16, d_ff=16, num_layers=2, num_heads=2, d_kv=8)
        )
    models = {"bloom": bloom, "mamba": mamba, "t5": t5, "chunked": chunked, "both ways": bidirectional}
    models |= {"linear": linear, "plain": nn.Linear(2, 2)}
    told = {name: refusal(enable_context_parallel, model, mesh) for name, model in models.items()}
    windows = build("qwen2_moe")
    windows.config.sliding_window, windows.config.layer_types = 6, ["sliding_attention", "full_attention"] * 2
    enable_context_parallel(windows, mesh)
    return {**told, "windows": refusal(logits_of, windows, mesh)}


def test_models_whose_tokens_meet_elsewhere_are_refused(run_ranks: RunRanks) -> None:
    (told,) = run_ranks(1, refused_models)
    parts = {
        "bloom": "its attention is not looked up in transformers' AttentionInterface",
        "mamba": "MambaForCausalLM cannot be trained with context parallelism",
        "t5": "T5ForConditionalGeneration cannot be trained with context parallelism",
        "chunked": "attends inside chunks",
        "both ways": "its attention is not causal",
        "linear": "it has layers of the kinds ['linear_attention']",
        "plain": "a Linear has no transformers model inside",
        "windows": "has sliding windows, but its attention is not given them",
    }
    assert {name: part for name, part in parts.items() if part not in told[name]} == {}
