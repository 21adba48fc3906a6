"""Translate keys of a `torch_dist` checkpoint, by names and shapes only.

    decoder.layers.mlp.experts.experts.linear_fc1.weight  (L, E, 2F, H)
        -> decoder.layers.<i>.mlp.experts.linear_fc1.weight<e>_w  (F, H)   gate
        -> decoder.layers.<i>.mlp.experts.linear_fc1.weight<e>_v  (F, H)   up

Three rules, each of which picks an index or a range of rows, and which compose: a `layers` without an index is a
stacked axis, `experts.experts` is an axis of experts, and a gated `linear_fc1` has two halves. Files do not say which
MLPs are gated. The arguments of the run do (`args.swiglu`), and the shapes do: fc1 of a gated MLP has twice as many
rows as fc2 has columns, that of any other MLP just as many.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from megatron_fsdp.errors import CheckpointError

_CHAINED = re.compile(r"^chained_\d+\.")
_STATE = re.compile(r"optimizer\.state\.(\w+)\.(.+)")
_OBJECT = re.compile(r"(.+)/shard_[\d.]+_([\d.]+)")
_STACKED_LAYERS = re.compile(r"(?<![^.])layers\.(?!\d+(?:\.|$))")
_STACKED_EXPERTS = re.compile(r"(.*\.experts)\.experts\.(?!\d+\.)(.+\.(?:weight|bias))((?:_[wv])?)")
_NUMBERED_EXPERT = re.compile(r"(.*\.experts)\.(?:experts\.)?(\d+)\.(.+\.(?:weight|bias))((?:_[wv])?)")
_FC1 = re.compile(r".*\blinear_fc1\.(?:weight|bias)\d*")  # may hold two halves; one that is stored alone has _w or _v
_HALF = re.compile(r"(\blinear_fc1\.(?:weight|bias)\d*)_[wv]$")
_LIVE_NAMES = (
    (".mtp_model_layer.", ".transformer_layer."),
    (".input_layernorm.", ".self_attention.linear_qkv.layer_norm_"),  # files have the names of Transformer Engine
    (".pre_mlp_layernorm.", ".mlp.linear_fc1.layer_norm_"),
)
_MAX_PARTS = 1_000_000
_NOT_A_MODEL = ("optimizer.", "rng_state", "rerun_state_machine", "common_state", "opt_param_scheduler", "args")

AUTO, ALL, NONE = "auto", "all", "none"


@dataclass(frozen=True)
class Piece:
    """One tensor of the output (`name`, with `_w` or `_v` for a half), as a box of a source tensor.

    `parameter` is its name without the half, as optimizers call the parameter.
    """

    parameter: str
    name: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...]


def parse_tensor_key(key: str) -> tuple[str, str | None] | None:
    """Split a tensor's key into parameter and slot ("exp_avg"; None: the parameter itself); None for other keys."""
    bare = _CHAINED.sub("", key)
    state = _STATE.fullmatch(bare)
    if state:
        return state[2], state[1]
    if bare != key or "/" in key or key.startswith(_NOT_A_MODEL):
        return None
    return key, None


def parse_object_key(key: str) -> tuple[str, bool]:
    """Return the name in the key of a Megatron object ("" for others), and True if it is the only one of its grid.

    `rng_state/shard_0.1_1.2` is cell (0, 1) of a grid (1, 2).
    """
    found = _OBJECT.fullmatch(key)
    return (found[1], all(int(size) == 1 for size in found[2].split(".") if size)) if found else ("", False)


def is_bucket_space(key: str) -> bool:
    """Return True if a key belongs to the optimizer layout that follows communication buckets, not parameters."""
    return _CHAINED.sub("", key).startswith("optimizer.distributed.")


def leading_axes(model_key: str) -> int:
    """Count the leading axes of a stored tensor that are layers and experts."""
    return len(_STACKED_LAYERS.findall(model_key)) + (_STACKED_EXPERTS.fullmatch(model_key) is not None)


def pieces(model_key: str, shape: Sequence[int], gated: bool, rename_mtp: bool = False) -> Iterator[Piece]:
    """Yield the output tensors of one source tensor."""
    leading = leading_axes(model_key)
    if len(shape) < leading + gated:
        raise CheckpointError(
            f"{model_key} of shape {tuple(shape)} needs {leading} leading axes for layers and experts"
            f"{' and rows to halve' if gated else ''}; the checkpoint is not laid out as torch_dist is"
        )
    if math.prod(shape[:leading]) > _MAX_PARTS:
        raise CheckpointError(f"{model_key} of shape {tuple(shape)} has too many layers and experts to be true")
    inner = tuple(shape[leading:])
    if gated and inner[0] % 2:
        raise CheckpointError(f"{model_key} has {inner[0]} rows, which do not divide into a gate and an up projection")
    size = (inner[0] // 2, *inner[1:]) if gated else inner
    lengths = (1,) * leading + size
    for index in product(*map(range, shape[:leading])):
        name = _spell(model_key, index, rename_mtp)
        for half, suffix in enumerate(("_w", "_v") if gated else ("",)):
            start = [half * length if dim == 0 else 0 for dim, length in enumerate(size)]
            yield Piece(_HALF.sub(r"\1", name), name + suffix, (*index, *start), lengths, size)


def canonical_name(name: str) -> str:
    """Return a parameter's name without wrappers' and live models' variants.

    Maps of groups are written by live models, whose experts may be a list of modules, whose norms and multi-token
    prediction layers may have other names than in files, and which may hold the halves of an fc1 apart.
    """
    while name.startswith(("module.", "model.")):
        name = name.partition(".")[2]
    for live, stored in _LIVE_NAMES:
        name = name.replace(live, stored)
    name = _HALF.sub(r"\1", name)
    return re.sub(r"\.experts\.local_experts\.(\d+)\.(.+\.(?:weight|bias))$", r".experts.\2\1", name)


def _spell(model_key: str, index: tuple[int, ...], rename_mtp: bool) -> str:
    numbers = iter(index)  # of layers, and then of experts
    name = _STACKED_LAYERS.sub(lambda found: f"{found[0]}{next(numbers)}.", model_key)
    stacked, numbered = _STACKED_EXPERTS.fullmatch(name), _NUMBERED_EXPERT.fullmatch(name)
    if stacked:
        name = f"{stacked[1]}.{stacked[2]}{next(numbers)}{stacked[3]}"
    elif numbered:
        name = f"{numbered[1]}.{numbered[3]}{numbered[2]}{numbered[4]}"
    if rename_mtp:
        name = re.sub(r"(^|\.)(mtp\.layers\.\d+)\.transformer_layer\.", r"\1\2.mtp_model_layer.", name)
    return name


def decide_gating(
    shapes: Mapping[str, Sequence[int]], scope: str, said: bool | None
) -> tuple[frozenset[str], Mapping[str, str]]:
    """Find the gated fc1 layers: by `--swiglu`, the checkpoint's `args.swiglu`, and shapes.

    Returns the keys (in the source's spelling) of fc1 with two halves, and the reason by module.
    """
    module_of = {key: key.rpartition(".")[0] for key in shapes if _FC1.fullmatch(key)}
    modules = sorted(set(module_of.values()))
    answers = {module: _decide(module, shapes, scope, said) for module in modules}
    for part in [] if scope in (AUTO, ALL, NONE) else _parts(scope):
        if not any(_holds(module, part) for module in modules):
            raise CheckpointError(f"--swiglu names {part!r}, which is part of no MLP's name; there are {modules}")
    gated = frozenset(key for key, module in module_of.items() if answers[module][0])
    return gated, {m: f"{'gated' if yes else 'not gated'} ({why})" for m, (yes, why) in answers.items()}


def _parts(scope: str) -> list[str]:
    return list(filter(None, scope.split(",")))


def _decide(module: str, shapes: Mapping[str, Sequence[int]], scope: str, said: bool | None) -> tuple[bool, str]:
    by_shape, rows = _shape_test(module, shapes), "fc1 has the rows of fc2's columns"
    if scope == NONE:
        return False, "--swiglu none"
    if scope == AUTO and said is None:
        if by_shape is None:
            raise CheckpointError(
                f"neither the checkpoint's arguments nor shapes say whether {module} is gated; "
                "say it with --swiglu all or --swiglu none"
            )
        return by_shape, "fc1 has twice the rows of fc2's columns" if by_shape else rows
    if scope == AUTO and said is False:
        return False, "args.swiglu is False"
    if scope == AUTO:
        return by_shape is not False, f"args.swiglu is True{f', but {rows}' if by_shape is False else ''}"
    if scope != ALL and not any(_holds(module, part) for part in _parts(scope)):
        return False, f"not in --swiglu {scope}"
    if by_shape is False:
        raise CheckpointError(
            f"--swiglu {scope} asks to halve {module}, whose fc1 has as many rows as fc2 has columns: it is not gated; "
            "use --swiglu auto, or name the gated modules"
        )
    return True, f"--swiglu {scope}"


def _shape_test(module: str, shapes: Mapping[str, Sequence[int]]) -> bool | None:
    """Return True if fc1 has twice as many rows as fc2 has columns; None if shapes do not decide."""
    fc1_key = f"{module}.weight"
    fc1, fc2 = shapes.get(fc1_key), shapes.get(f"{module.removesuffix('linear_fc1')}linear_fc2.weight")
    if fc1 is None or fc2 is None or len(fc1) != len(fc2) or len(fc1) != leading_axes(fc1_key) + 2:
        return None
    rows, columns = fc1[-2], fc2[-1]
    return rows == 2 * columns if rows in (columns, 2 * columns) else None


def _holds(module: str, part: str) -> bool:
    return f".{part}." in f".{module}."
