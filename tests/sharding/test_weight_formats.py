"""The quantizers of weight formats: against tables of codes, cut anywhere, and the bytes of real models' blocks."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES
from megatron_fsdp.sharding.placement import plan_layout
from megatron_fsdp.sharding.weight_formats import WEIGHT_FORMATS, WeightFormat, encoded_bytes
from tools.padding_table import groups

E4M3 = sorted(
    {Fraction(m, 8) / 64 for m in range(8)}
    | {Fraction(8 + m, 8) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)}
)
E2M1 = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def test_policies_take_the_names_of_all_formats() -> None:
    assert tuple(WEIGHT_FORMATS) == WEIGHT_FORMAT_NAMES


def nearest(value: float, magnitudes: list[Fraction]) -> Fraction:
    """Round exactly, ties to the even code, to a list of magnitudes in the order of their codes."""
    x = abs(Fraction(value))
    code = min(range(len(magnitudes)), key=lambda i: (abs(magnitudes[i] - x), i % 2))
    return magnitudes[code] * (-1 if value < 0 else 1)


def divided(x: float, scale: np.float32) -> float:
    return float(np.float32(x) / scale)


def scale_of(largest: float, most: float) -> np.float32:
    return max(np.float32(largest) / np.float32(most), np.float32(2.0**-126))


def expected(name: str, weight: torch.Tensor) -> list[float]:
    """Round a matrix by the definition of a format, element by element."""
    values = weight.float().reshape(-1).numpy()
    if name.removesuffix("_compute") == "fp8":
        scale = scale_of(np.abs(values).max(), 448)
        return [float(np.float32(float(nearest(divided(x, scale), E4M3))) * scale) for x in values]
    found: list[float] = []
    size = 32 if name == "mxfp8" else 16
    whole = scale_of(np.abs(values).max(), 6 * 448)
    for first in range(0, values.size, size):
        block = values[first : first + size]
        largest = np.abs(block).max()
        if name == "mxfp8":
            share = Fraction(float(largest / np.float32(448)))
            power = -126
            while Fraction(2) ** power < share:
                power += 1
            found += [float(nearest(float(x) * 2.0**-power, E4M3)) * 2.0**power for x in block]
            continue
        share = np.float32(largest / np.float32(6)) / whole
        scale = max(np.float32(float(nearest(float(share), E4M3))) * whole, np.float32(2.0**-126))
        found += [float(np.float32(float(nearest(divided(x, scale), E2M1))) * scale) for x in block]
    return found


def encode(form: WeightFormat, shard: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    out = torch.empty(encoded_bytes(form, shard.numel()), dtype=torch.uint8)
    form.encode(shard, scale, out)
    return out


def rounded(form: WeightFormat, weight: torch.Tensor) -> torch.Tensor:
    flat = weight.reshape(-1)
    scale = form.scales(form.amax(flat))
    out = torch.empty_like(flat)
    form.decode(encode(form, flat, scale), scale, out)
    return out.view(weight.shape)


def weights() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    spread = torch.randn(130, 5, generator=draw) * torch.logspace(-6, 3, 130)[:, None]
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4, [17.0, 18.0, 19.0, 448.0] * 8])
    return {
        "spread": spread,
        "wide": torch.randn(3, 140, generator=draw),
        "ties": ties,
        "signs of ties": -ties,
        "zeros": torch.zeros(2, 40),
        "one element": torch.tensor([[-3.3]]),
        "a block of zeros": torch.cat([torch.zeros(1, 32), torch.full((1, 32), 0.3)]),
        "from least to largest of e4m3": torch.tensor([[448.0, 2.0**-9, 3 * 2.0**-9, 1.0] * 8]),
        "subnormal": torch.full((2, 16), 1e-41),
        "huge": torch.tensor([[3e38, -3e38, 1.0, 1e-38]]),
        "experts": torch.randn(2, 9, 7, generator=draw),
    }


@pytest.mark.full(short=["fp8", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_values_are_those_of_the_definition(name: str) -> None:
    for kind, weight in weights().items():
        found = rounded(WEIGHT_FORMATS[name], weight)
        assert found.reshape(-1).tolist() == expected(name, weight), kind
        half = rounded(WEIGHT_FORMATS[name], weight.bfloat16())
        assert torch.equal(half, torch.tensor(expected(name, weight.bfloat16())).bfloat16().view(weight.shape)), kind


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
@given(st.data())
def test_cut_shards_encode_to_cut_bytes(name: str, data: st.DataObject) -> None:
    form = WEIGHT_FORMATS[name]
    numel = data.draw(st.integers(1, 45_000))
    blocks = -(-numel // form.block_numel)
    inner = data.draw(st.lists(st.integers(0, blocks), max_size=7))
    ends = [0, *(min(numel, cut * form.block_numel) for cut in sorted(inner)), numel]
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9))))
    shards = [weight[start:stop] for start, stop in itertools.pairwise(ends)]
    agreed = torch.stack([form.amax(shard) for shard in shards]).amax(dim=0)
    assert torch.equal(agreed, form.amax(weight))
    scale = form.scales(agreed)
    assert torch.equal(torch.cat([encode(form, shard, scale) for shard in shards]), encode(form, weight, scale))


def test_no_largest_element_needs_to_be_clamped() -> None:
    """Rounding takes it beyond 448, but not as far as 464, which would become NaN; each has its own scale."""
    fractions = torch.randint(1 << 23, (255, 4000), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    values = ((torch.arange(255, dtype=torch.int32)[:, None] << 23) + fractions).view(torch.float32).view(-1)
    form = WEIGHT_FORMATS["fp8"]
    scales = form.scales(values)
    assert (values / scales).max() > 448
    assert encode(form, values, scales).view(torch.float8_e4m3fn).float().max() == 448


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_what_is_not_finite_shows_in_the_magnitudes(name: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        shard = torch.ones(64)
        shard[40] = bad
        assert WEIGHT_FORMATS[name].amax(shard).isinf().all()


RATIOS = {"mxfp8": 33 / 64, "nvfp4": 9 / 32}


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_bytes_of_real_blocks(name: str) -> None:
    """The matrices of twelve groups of known models, on 8 to 1,024 ranks: at most 1 % of padding."""
    form, blocks = WEIGHT_FORMATS[name], [group for group in groups() if "embedding" not in group.name]
    assert len(blocks) == 12
    wanted = RATIOS.get(name, 0.5)
    for block, ranks in itertools.product(blocks, (8, 16, 32, 64, 128, 256, 512, 1024)):
        shapes = [shape for shape in block.shapes if len(shape) > 1]
        layout = plan_layout(shapes, ranks, alignment_numel=math.lcm(16, form.block_numel))
        in_bf16 = 2 * sum(math.prod(shape) for shape in shapes)
        assert wanted <= encoded_bytes(form, layout.numel) / in_bf16 <= 1.01 * wanted, (block.name, ranks)
