import pytest
import torch
from megatron_fsdp.train.model import Block, Decoder, ModelShape, next_token_loss, rotate, split_for_decay
from megatron_fsdp.train.presets import PRESETS, find_preset, model_shape
from torch import nn

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.generate import generate

SHAPE = ModelShape(vocab_size=11, num_layers=2, dim=16, num_heads=2, hidden_dim=24)


def make_model() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SHAPE)


def test_logits_have_one_row_per_position() -> None:
    assert make_model()(torch.zeros(3, 5, dtype=torch.int64)).shape == (3, 5, 11)


def test_later_token_does_not_change_earlier_logits() -> None:
    model, tokens = make_model(), torch.tensor([[1, 2, 3, 4, 5, 6]])
    changed = tokens.clone()
    changed[0, 3] = 9
    before, after = model(tokens)[0], model(changed)[0]
    torch.testing.assert_close(before[:3], after[:3])
    assert (before[3:] - after[3:]).abs().amax(dim=-1).min() > 1e-4


def test_order_of_earlier_tokens_matters() -> None:
    model = make_model()
    first, second = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert (first[0, -1] - second[0, -1]).abs().max() > 1e-4


def test_rotation_keeps_lengths_and_leaves_position_zero() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64)
    turned = rotate(x)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(turned[:, :, 0], x[:, :, 0])


def test_rotated_products_depend_on_distance_only() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(8, dtype=torch.float64).expand(1, 1, 6, 8) for _ in range(2))
    products = rotate(query)[0, 0] @ rotate(key)[0, 0].T
    torch.testing.assert_close(products[2, 0], products[5, 3], rtol=1e-6, atol=1e-9)
    assert abs(products[2, 0] - products[3, 0]) > 1e-3


def test_parameter_formula_equals_the_parameters() -> None:
    assert sum(parameter.numel() for parameter in make_model().parameters()) == SHAPE.parameter_numel


@pytest.mark.parametrize(
    ("name", "expected"),
    [("tiny", 133_568), ("cpu-small", 9_982_400), ("gpu-125m", 125_721_984), ("gpu-1b", 1_013_013_504)],
)
def test_presets_have_their_number_of_parameters(name: str, expected: int) -> None:
    shape = model_shape(PRESETS[name], vocab_size=256)
    with torch.device("meta"):
        model = Decoder(shape)
    assert shape.parameter_numel == sum(parameter.numel() for parameter in model.parameters()) == expected
    assert sum(isinstance(module, Block) for module in model.modules()) == PRESETS[name].num_layers


def test_unknown_preset_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigurationError, match="preset 'huge' does not exist: choose one of tiny, cpu-small"):
        find_preset("huge")


def test_heads_of_odd_width_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="dim 10 with 2 heads"):
        ModelShape(vocab_size=11, num_layers=1, dim=10, num_heads=2, hidden_dim=8)


def test_norms_and_embedding_are_not_decayed() -> None:
    model = make_model()
    decay, keep = split_for_decay(model)
    assert sorted(decay + keep) == sorted(name for name, _ in model.named_parameters())
    assert keep[0] == "embedding.weight"
    assert all("norm" in name for name in keep[1:])
    assert len(keep) == 1 + 4 * SHAPE.num_layers + 1
    assert not any("norm" in name or "embedding" in name for name in decay)


def test_loss_of_equal_logits_is_the_logarithm_of_the_vocabulary() -> None:
    loss = next_token_loss(torch.zeros(2, 3, 11, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, torch.tensor(11.0).log())


class Successor(nn.Module):
    """Puts its whole weight on the token after the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(50.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scale * nn.functional.one_hot((tokens + 1) % 7, 7).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@torch.no_grad()
def test_generation_continues_the_prompt(temperature: float) -> None:
    ids = generate(Successor(), [4, 5], num_tokens=4, context_length=3, temperature=temperature, seed=0)
    assert ids == [4, 5, 6, 0, 1, 2]


@torch.no_grad()
def test_sampling_repeats_with_the_seed_and_sees_only_the_context() -> None:
    model = make_model()
    runs = [
        generate(model, prompt, num_tokens=20, context_length=2, temperature=1.0, seed=seed)[len(prompt) :]
        for prompt, seed in [([1, 2], 0), ([1, 2], 0), ([9, 8, 1, 2], 0), ([1, 2], 1)]
    ]
    assert runs[0] == runs[1] == runs[2]
    assert runs[0] != runs[3]
