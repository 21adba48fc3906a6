import re

import pytest
import torch
from torch import Tensor

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.models.decoder import Decoder, ModelShape, next_token_loss, recompute, split_for_decay
from tests.support.on_ranks import refusal
from tests.train.models.runs import kept_by_autograd

SHAPE = ModelShape(vocab_size=11, num_layers=2, dim=16, num_heads=2, hidden_dim=24)
OTHER = ModelShape(
    vocab_size=11,
    num_layers=2,
    dim=16,
    num_heads=4,
    hidden_dim=24,
    num_query_groups=2,
    kv_channels=6,
    learned_positions=8,
    normalization="LayerNorm",
    norm_epsilon=1e-3,
    normalizes_query_key=False,
    is_gated=False,
    has_bias=True,
    ties_embeddings=True,
)
SHAPES = [SHAPE, OTHER]


def make_model(shape: ModelShape = SHAPE) -> Decoder:
    torch.manual_seed(0)
    return Decoder(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_depend_on_all_earlier_tokens_and_on_no_later_one(shape: ModelShape) -> None:
    model, tokens = make_model(shape), torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 3] = 9
    before, after = model(tokens)[0], model(changed)[0]
    assert before.shape == (6, 11)
    torch.testing.assert_close(before[:3], after[:3])
    assert (before[3:] - after[3:]).abs().amax(dim=-1).min() > 1e-4
    first, second = model(torch.tensor([[1, 2, 3], [2, 1, 3]]))
    assert (first[-1] - second[-1]).abs().max() > 1e-4  # their order matters


def test_norms_queries_and_keys_by_head() -> None:
    model = make_model()
    attention = model.blocks[0].attention
    with torch.no_grad():
        before = attention(x := torch.randn(1, 5, 16))
        attention.query_key_value.weight[:16] *= 7.0  # queries: their length does not matter
        torch.testing.assert_close(attention(x), before, rtol=1e-3, atol=1e-5)
        attention.query_key_value.weight[32:] *= 7.0  # values: it does
        torch.testing.assert_close(attention(x), 7.0 * before, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((11, 1, 10, 2, 8), "heads of width 5 .*give heads of even width, or --position-embedding-type"),
        ((11, 1, 10, 3, 8), "--hidden-size 10 with --num-attention-heads 3 is not possible"),
        ((11, 1, 16, 4, 8, 3), "--num-query-groups 3 does not divide --num-attention-heads 4"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(sizes: tuple[int, ...], message: str) -> None:
    assert re.search(message, refusal(ModelShape, *sizes, error=ConfigurationError))


def test_norms_biases_and_embeddings_are_not_decayed() -> None:
    for shape, expected in ((SHAPE, 1 + 4 * 2 + 1), (OTHER, 2 + (2 * 2 + 4) * 2 + 2)):
        model = make_model(shape)
        decay, keep = split_for_decay(model)
        assert sorted(decay + keep) == sorted(name for name, _ in model.named_parameters())
        assert all(any(part in name for part in ("norm", "bias", "embedding", "positions")) for name in keep)
        assert len(keep) == expected
        assert not any("norm" in name or "embedding" in name for name in decay)


def saved_and_gradients(granularity: str | None, num_layers: int | None) -> tuple[int, Tensor, dict[str, Tensor]]:
    """Elements that autograd keeps, the loss, and all gradients."""
    model = make_model(ModelShape(11, 3, 16, 2, 24))
    if granularity is not None:
        recompute(model, granularity, num_layers)  # type: ignore[arg-type]
    with kept_by_autograd(model) as kept:
        loss = next_token_loss(model(tokens := torch.arange(8)[None] % 11), tokens)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return sum(kept), loss.detach(), gradients


def test_recomputation_keeps_less_and_changes_nothing() -> None:
    all_kept, loss, gradients = saved_and_gradients(None, None)
    sizes = {}
    for granularity, layers in (("full", 1), ("full", 2), ("full", None), ("selective", None)):
        kept, recomputed_loss, recomputed = saved_and_gradients(granularity, layers)
        sizes[granularity, layers] = kept
        assert torch.equal(recomputed_loss, loss)
        assert recomputed.keys() == gradients.keys()
        assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())
    a_block = all_kept - sizes["full", 1]
    assert a_block > 0.25 * all_kept
    assert sizes["full", 2] == all_kept - 2 * a_block
    assert sizes["full", None] == all_kept - 3 * a_block
    assert sizes["full", None] < sizes["selective", None] < 0.9 * all_kept
