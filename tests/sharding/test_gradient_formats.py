"""Gradient formats: what a block is, byte by byte, and what rounding leaves; no ranks."""

import pytest
import torch

from megatron_fsdp.config.precision import GRADIENT_FORMAT_NAMES
from megatron_fsdp.sharding import gradient_formats
from megatron_fsdp.sharding.gradient_formats import GRADIENT_FORMATS, GradientFormat

FORMATS = GRADIENT_FORMATS.values()
each_format = pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])


def encoded(form: GradientFormat, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of rows, and what was lost."""
    lost = values.clone()
    out = torch.full((len(values), form.bytes_of(values.shape[1])), 77, dtype=torch.uint8)
    form.encode(lost, out)
    return out, lost


def decoded(form: GradientFormat, out: torch.Tensor, numel: int) -> torch.Tensor:
    found = torch.full((len(out), numel), torch.nan)
    form.decode(out, found)
    return found


def rows_of(numel: int) -> torch.Tensor:
    """Three rows of different size."""
    draws = torch.Generator().manual_seed(numel)
    return torch.randn(3, numel, generator=draws) * torch.tensor([[1.0], [1e-4], [1e5]])


def test_the_names_are_those_of_the_policy() -> None:
    assert tuple(GRADIENT_FORMATS) == GRADIENT_FORMAT_NAMES


@pytest.mark.parametrize(
    ("name", "codes", "code_of"),
    [
        ("int8", 256, {127.0: 127, -127.0: 129, 0.5: 0, 1.5: 2, -2.5: 254}),
        ("fp8", 256, {448.0: 0x7E, -448.0: 0xFE, 1.0: 0x38, 1.0625: 0x38, 1.1875: 0x3A}),
        ("int4", 128, {7.0: 15, -7.0: 1, 0.5: 8, 1.5: 10, -2.5: 6}),
    ],
)
def test_a_block_is_a_scale_and_codes_to_the_nearest_of_ties_the_even(
    name: str, codes: int, code_of: dict[float, int]
) -> None:
    form = GRADIENT_FORMATS[name]
    assert (form.block_numel, form.block_bytes) == (256, 4 + codes)
    values = torch.zeros(1, 256)
    values[0, : len(code_of)] = 3 * torch.tensor(list(code_of))  # the largest first: the scale is 3
    out, _ = encoded(form, values)
    assert out[0, :4].view(torch.float32).item() == 3.0
    found = out[0, 4:].tolist()
    if name == "int4":
        found = [code for byte in found for code in (byte & 15, byte >> 4)]
    assert found[: len(code_of)] == list(code_of.values())
    assert set(found[len(code_of) :]) == {8 if name == "int4" else 0}


@each_format
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_what_was_kept_and_what_was_lost_are_the_whole(form: GradientFormat, numel: int) -> None:
    values = rows_of(numel)
    out, lost = encoded(form, values)
    kept = decoded(form, out, numel)
    assert torch.equal(values - kept, lost)
    share = {"int8": 0.5 / 127, "fp8": 1 / 16, "int4": 0.5 / 7}[form.name]
    for row, rest in zip(values, lost, strict=True):
        for block, lost_of_block in zip(row.split(256), rest.split(256), strict=True):
            assert lost_of_block.abs().max() <= 1.0001 * share * block.abs().max()
    total = torch.empty(numel)
    form.add_up(out, total)
    assert torch.equal(total, kept[0] + kept[1] + kept[2])


@each_format
def test_chunks_change_nothing(form: GradientFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows_of(5000)
    out, lost = encoded(form, values)
    kept = decoded(form, out, 5000)
    monkeypatch.setattr(gradient_formats, "_CHUNK_NUMEL", 3 * 256 * 2)
    in_chunks, lost_in_chunks = encoded(form, values)
    assert torch.equal(in_chunks, out)
    assert torch.equal(lost_in_chunks, lost)
    assert torch.equal(decoded(form, out, 5000), kept)
    total = torch.empty(5000)
    form.add_up(out, total)
    assert torch.equal(total, kept[0] + kept[1] + kept[2])


@each_format
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_block_that_is_not_finite_is_nan_and_loses_nothing(form: GradientFormat, bad: float) -> None:
    values = rows_of(700)
    values[1, 300] = bad
    out, lost = encoded(form, values)
    kept, without = decoded(form, out, 700), decoded(form, encoded(form, rows_of(700))[0], 700)
    hit = torch.zeros(3, 700, dtype=torch.bool)
    hit[1, 256:512] = True
    assert torch.equal(kept.isnan(), hit)
    assert torch.equal(kept[~hit], without[~hit])
    assert torch.equal(lost[hit], torch.zeros(256))
    assert lost.isfinite().all()


@each_format
def test_zeros_and_the_smallest_numbers_stay_finite(form: GradientFormat) -> None:
    tiny = torch.tensor([[0.0] * 256, [1e-45] * 256, [2.0**-126] * 256, [3e38] * 256])
    out, lost = encoded(form, tiny)
    kept = decoded(form, out, 256)
    assert torch.equal(kept[0], tiny[0])
    assert kept.isfinite().all()
    assert torch.equal(kept + lost, tiny)


@each_format
def test_no_elements_take_no_bytes(form: GradientFormat) -> None:
    assert form.bytes_of(0) == 0
    out, lost = encoded(form, torch.zeros(2, 0))
    assert (out.shape, lost.shape) == ((2, 0), (2, 0))
