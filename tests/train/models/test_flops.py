from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from megatron_fsdp.train.models.decoder import Decoder, ModelShape
from megatron_fsdp.train.models.flops import model_flops, sample_flops
from megatron_fsdp.train.options.command_line import parse_options
from megatron_fsdp.train.options.job import Job, World
from megatron_fsdp.train.options.resolve import resolve


def job_of(*flags: str) -> Job:
    return resolve(parse_options(["--preset", "tiny", *flags]), World(2, "cpu"))


def formula(shape: ModelShape, length: int) -> int:
    """6 operations for each weight of a matrix and token; 12 for each layer, width and pair of positions (PaLM, B)."""
    block = 4 * shape.dim**2 + 3 * shape.dim * shape.hidden_dim
    weights = shape.num_layers * block + shape.dim * shape.vocab_size  # looking up the embedding multiplies nothing
    return 6 * length * weights + 12 * shape.num_layers * shape.dim * length**2


@pytest.mark.parametrize("length", [1, 64, 257])
@pytest.mark.parametrize("shape", [ModelShape(257, 2, 64, 2, 176), ModelShape(1000, 3, 32, 1, 48)])
def test_count_is_that_of_the_formula(shape: ModelShape, length: int) -> None:
    with torch.device("meta"):
        model = Decoder(shape)
    assert sample_flops(model, length) == formula(shape, length)


def test_a_model_may_return_an_object_with_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(tokens))

    shape = ModelShape(100, 1, 16, 1, 16)
    with torch.device("meta"):
        model = Wrapped(Decoder(shape))
    assert sample_flops(model, 8) == formula(shape, 8)


def test_a_job_counts_its_decoder_with_the_vocabulary_as_it_is_rounded_up() -> None:
    job, state = job_of("--make-vocab-size-divisible-by", "128"), torch.get_rng_state()
    assert model_flops(job, 257) == formula(ModelShape(384, 2, 64, 2, 176), 64)
    assert torch.equal(torch.get_rng_state(), state)  # counting draws no numbers


def test_models_of_transformers_count_alike() -> None:
    """Llama has the products of the decoder of its shape; of Mixtral's experts each token takes two, and a router."""
    pytest.importorskip("transformers")
    job = job_of("--transformer-impl", "transformers", "--no-qk-layernorm")
    assert model_flops(job, 257) == formula(ModelShape(384, 2, 64, 2, 176), 64)
    experts = job_of("--transformer-impl", "transformers", "--no-qk-layernorm", "--num-experts", "4")
    two_experts_and_router = 6 * 64 * 2 * (3 * 64 * 176 + 64 * 4)
    assert model_flops(experts, 257) == model_flops(job, 257) + two_experts_and_router
