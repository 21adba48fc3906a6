"""File tensors as parts of model tensors: what they say lies where is what torch and transformers do."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from megatron_fsdp.checkpoint.hf.files import portions
from megatron_fsdp.checkpoint.hf.live import CannotFollowError, FileTensor, Followed, map_keys
from megatron_fsdp.errors import CheckpointError, ConfigurationError

transformers = pytest.importorskip("transformers")


def put_together(tensor: FileTensor, models: dict[str, Tensor]) -> Tensor:
    """The file tensor by its parts alone; -1 where no part is."""
    made = torch.full(tensor.shape, -1)
    for part in tensor.parts:
        assert (made[part.target.indices] == -1).all()
        made[part.target.indices] = models[part.key][part.source.indices].reshape(part.target.lengths)
    return made


def follow(values: list[Any], steps: list[tuple[str, int, int]]) -> list[Any]:
    """A chain of what conversions do; the same for tensors and file tensors."""
    for step, dim, count in steps:
        first = values[0]
        dim = dim % len(first.shape) if first.shape else 0
        if step == "stack" and all(v.shape == first.shape for v in values) and len(first.shape) < 4:
            values = [torch.stack(values, dim=dim)]
        elif not first.shape:
            continue
        elif step == "chunk":
            values = [*torch.chunk(first, count, dim=dim), *values[1:]]
        elif step == "unbind" and first.shape[dim] < 5 and len(first.shape) > 1:
            values = [*torch.unbind(first, dim), *values[1:]]
        elif step == "squeeze":
            values = [first.squeeze(dim).contiguous(), *values[1:]]
        elif step == "cat":
            fitting = [v for v in values if len(v.shape) == len(first.shape) and _fits(v.shape, first.shape, dim)]
            values = [torch.cat(fitting, dim=dim)]
    return values


def _fits(one: Any, other: Any, dim: int) -> bool:
    return all(a == b for i, (a, b) in enumerate(zip(one, other, strict=True)) if i != dim)


STEPS = st.tuples(st.sampled_from(["chunk", "unbind", "squeeze", "cat", "stack"]), st.integers(0, 3), st.integers(1, 4))


@given(
    shapes=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3),
    steps=st.lists(STEPS, max_size=6),
)
def test_file_tensors_follow_torch(shapes: list[list[int]], steps: list[tuple[str, int, int]]) -> None:
    models, start = {}, 0
    for i, shape in enumerate(shapes):
        numel = torch.Size(shape).numel()
        models[f"m{i}"] = torch.arange(start, start + numel).view(shape)
        start += numel
    wanted = follow(list(models.values()), steps)
    with Followed({name: tensor.shape for name, tensor in models.items()}) as followed:
        made = follow(list(followed.tensors.values()), steps)
    try:
        found = [followed.file_tensor(tensor) for tensor in made]
    except CannotFollowError:
        assert {"cat", "stack"} & {step for step, _, _ in steps[:-1]}  # of what was put together no slices are taken
        return
    assert [value.shape for value in found] == [tuple(value.shape) for value in wanted]
    for tensor, values in zip(found, wanted, strict=True):
        assert torch.equal(put_together(tensor, models), values)
        for part in tensor.parts:
            assert part.to_target(part.source) == part.target
            for box in portions(part.target, 1, 2):
                inside = part.to_source(box)
                assert torch.equal(models[part.key][inside.indices].reshape(box.lengths), values[box.indices])
                assert part.to_target(inside) == box


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.transpose(0, 1),
        lambda w: w.reshape(24),
        lambda w: w.view(2, 2, 6),
        lambda w: w[:, ::2],
        lambda w: w.t().reshape(4, 6),
        lambda w: w + 1,
        lambda w: w.flatten()[3:9],
        lambda w: w[:1].expand(4, 6),
        lambda w: torch.cat([w, w]).chunk(4)[1],
    ],
)
def test_what_is_more_than_slices_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    with Followed({"w": (4, 6)}) as followed:
        made = change(followed.tensors["w"])
    with pytest.raises(CannotFollowError, match="slice"):
        followed.file_tensor(made)


# ---- names ---------------------------------------------------------------------------------------------------------


def test_keys_are_mapped() -> None:
    keys = ["transformer.h.0.w", "head"]
    assert map_keys(keys, None) == {key: key for key in keys}
    assert map_keys(keys, {r"^transformer\.h\.(\d+)": r"layers.\1", "head$": "lm_head"}) == {
        "layers.0.w": "transformer.h.0.w",
        "lm_head": "head",
    }
    assert map_keys(keys, str.upper) == {"TRANSFORMER.H.0.W": keys[0], "HEAD": keys[1]}
    with pytest.raises(CheckpointError, match="the same name 'x'"):
        map_keys(keys, {".*": "x"})
    with pytest.raises(ConfigurationError, match="no set of regular expressions"):
        map_keys(keys, {"(": "x"})
    with pytest.raises(ConfigurationError, match="key_mapping is a list"):
        map_keys(keys, ["a"])  # type: ignore[arg-type]
