"""Realistic `torch_dist` checkpoints of tiny models, written without Megatron, ranks or a GPU.

The truth comes first (one tensor per parameter, as a live model holds them), then how a file lays it out, then the
non-tensor state, then what a conversion must make of it, then the folder.
"""

import argparse
import contextlib
import enum
import json
import math
import pickle
import random
import re
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fsdp.checkpoint.save import save_alone
from megatron_fsdp.sharding.shards import Box

SLOTS = ("exp_avg", "exp_avg_sq")
Shape = tuple[int, ...]


@dataclass(frozen=True)
class GptSpec:
    """What kind of model; sizes divide by four, so that any of them may be cut for tensor parallelism."""

    layers: int = 2
    hidden: int = 8
    ffn: int = 12
    vocabulary: int = 20
    experts: int = 0
    dense_layers: int = 0  # leading layers without experts; more than none makes the layers non-homogeneous
    swiglu: bool = True
    bias: bool = False
    tied: bool = False
    shared_experts: bool = False
    expert_bias: bool = False
    mla: bool = False
    mtp: bool = False
    tower: bool = False  # an image tower with a plain (not gated) MLP


def parameter_shapes(spec: GptSpec) -> dict[str, Shape]:
    """Live name -> shape, in the order of a model's layers."""
    h, v = spec.hidden, spec.vocabulary
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (v, h)}
    if spec.tower:
        shapes |= _block("vision_model.decoder.layers.0", GptSpec(swiglu=False, hidden=h, ffn=spec.ffn), moe=False)
    for layer in range(spec.layers):
        moe = spec.experts > 0 and layer >= spec.dense_layers
        shapes |= _block(f"decoder.layers.{layer}", spec, moe)
    shapes["decoder.final_layernorm.weight"] = (h,)
    if spec.mtp:
        shapes |= {f"mtp.layers.0.{name}.weight": (h,) for name in ("enorm", "hnorm", "final_layernorm")}
        shapes["mtp.layers.0.eh_proj.weight"] = (h, 2 * h)
        shapes |= _block("mtp.layers.0.transformer_layer", spec, moe=spec.experts > 0)
    if not spec.tied:
        shapes["output_layer.weight"] = (v, h)
    return shapes


def buffers_of(spec: GptSpec) -> set[str]:
    """Names among the parameters that are not optimised: the routers' biases."""
    return {name for name in parameter_shapes(spec) if name.endswith(".expert_bias")}


def _block(prefix: str, spec: GptSpec, moe: bool) -> dict[str, Shape]:
    h = spec.hidden
    shapes: dict[str, Shape] = {}
    if spec.mla:
        shapes["input_layernorm.weight"] = (h,)
        for down, up in (("linear_q_down_proj", "linear_q_up_proj"), ("linear_kv_down_proj", "linear_kv_up_proj")):
            shapes |= _linear(f"self_attention.{down}", h // 2, h)
            shapes |= _linear(f"self_attention.{up}", 2 * h, h // 2, norm=True)
    else:
        shapes |= _linear("self_attention.linear_qkv", 3 * h, h, spec.bias, norm=True)
    shapes |= _linear("self_attention.linear_proj", h, h, spec.bias and not spec.mla)
    if moe:
        shapes |= {"pre_mlp_layernorm.weight": (h,), "mlp.router.weight": (spec.experts, h)}
        if spec.expert_bias:
            shapes["mlp.router.expert_bias"] = (spec.experts,)
        for expert in range(spec.experts):
            shapes |= {f"{name}{expert}": shape for name, shape in _mlp("mlp.experts", spec).items()}
        if spec.shared_experts:
            shapes |= _mlp("mlp.shared_experts", spec)
    else:
        shapes |= _mlp("mlp", spec, spec.bias, norm=True)
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _mlp(prefix: str, spec: GptSpec, bias: bool = False, norm: bool = False) -> dict[str, Shape]:
    rows = 2 * spec.ffn if spec.swiglu else spec.ffn
    first = _linear(f"{prefix}.linear_fc1", rows, spec.hidden, bias, norm)
    return first | _linear(f"{prefix}.linear_fc2", spec.hidden, spec.ffn, bias)


def _linear(name: str, rows: int, columns: int, bias: bool = False, norm: bool = False) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {f"{name}.layer_norm_weight": (columns,)} if norm else {}
    return shapes | {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


@dataclass(frozen=True)
class Truth:
    """What a training run held when it saved."""

    spec: GptSpec
    masters: dict[str, Tensor]  # live name -> fp32 weight
    states: dict[str, dict[str, Tensor]]  # slot ("exp_avg", ...) -> live name -> fp32 tensor; buffers have none


def make_truth(spec: GptSpec, slots: tuple[str, ...] = SLOTS) -> Truth:
    """Random weights around the usual size, and optimizer state."""
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(spec)
    masters = {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    masters = {name: 1 + drawn / 3 if "norm" in name else drawn for name, drawn in masters.items()}
    optimised = shapes.keys() - buffers_of(spec)
    states = {
        slot: {name: 0.01 * torch.rand(shapes[name], generator=generator) for name in shapes if name in optimised}
        for slot in slots
    }
    return Truth(spec, masters, states)


_ROW_CUT = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)$")
_COLUMN_CUT = re.compile(r"(linear_proj|linear_fc2)\.weight$")


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it, in chunks."""

    tensor: Tensor
    boxes: tuple[Box, ...]
    original_shape: Shape | None = None  # the true one, where the file holds flattened cells


def stack(tensors: Mapping[str, Tensor], spec: GptSpec, singleton: bool) -> dict[str, tuple[Tensor, int]]:
    """Live tensors as a file groups them: key -> (tensor, how many of its axes are layers and experts).

    With `singleton` layers and experts keep their index in the key (Megatron's `singleton_local_shards`).
    """
    stacks_layers = not (singleton or (spec.experts and spec.dense_layers))
    members: dict[str, dict[tuple[int, ...], Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        key, indices = name, []
        layer = re.match(r"(decoder\.layers)\.(\d+)\.(.*)", key)
        if layer and stacks_layers:
            key = f"{layer[1]}.{layer[3]}"
            indices.append(int(layer[2]))
        expert = re.match(r"(.*\.experts)\.(linear_fc[12])\.weight(\d+)$", key)
        if expert and singleton:
            key = f"{expert[1]}.{expert[3]}.{expert[2]}.weight"
            if spec.swiglu and expert[2] == "linear_fc1":
                members[f"{key}_w"][()], members[f"{key}_v"][()] = tensor.chunk(2)
                continue
        elif expert:
            key = f"{expert[1]}.experts.{expert[2]}.weight"
            indices.append(int(expert[3]))
        members[key][tuple(indices)] = tensor
    return {key: _join(parts) for key, parts in members.items()}


def _join(parts: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, int]:
    lead = tuple(index + 1 for index in max(parts))
    assert len(parts) == math.prod(lead)
    ordered = [parts[index] for index in sorted(parts)]
    return torch.stack(ordered).reshape(*lead, *ordered[0].shape), len(lead)


def grid_of(key: str, tensor: Tensor, leading: int, tp: int, gated: bool) -> Shape:
    """Into how many parts each axis is cut."""
    grid = [*tensor.shape[:leading], *(1 for _ in tensor.shape[leading:])]
    if re.search(r"linear_fc1\.(weight|bias)$", key):
        grid[leading] = 2 * tp if gated and "vision_model" not in key else tp
    elif _ROW_CUT.search(key):
        grid[leading] = tp
    elif _COLUMN_CUT.search(key):
        grid[leading + 1] = tp
    return tuple(grid)


def boxes_of_grid(shape: Shape, grid: Shape) -> tuple[Box, ...]:
    lengths = tuple(size // parts for size, parts in zip(shape, grid, strict=True))
    return tuple(
        Box(tuple(i * n for i, n in zip(cell, lengths, strict=True)), lengths) for cell in product(*map(range, grid))
    )


def plain(tensor: Tensor, grid: Shape | None = None) -> Stored:
    """Stored in its own shape, in the cells of a grid or in one chunk."""
    return Stored(tensor, boxes_of_grid(tuple(tensor.shape), grid or (1,) * tensor.ndim))


def flattened_cells(tensor: Tensor, grid: Shape, dp: int) -> Stored:
    """Stored as the cells of a grid, each flat and cut over data-parallel ranks at places that fit nothing."""
    shape = tuple(tensor.shape)
    cells = [tensor[box.indices].reshape(-1) for box in boxes_of_grid(shape, grid)]
    stored = torch.stack(cells).reshape(*grid, -1)
    flat = stored.shape[-1]
    cuts = sorted({0, flat, *(min(flat, flat * rank // dp + 1) for rank in range(1, dp))})
    boxes = [
        Box((*cell, start), (*(1 for _ in cell), stop - start))
        for cell in product(*map(range, grid))
        for start, stop in pairwise(cuts)
    ]
    return Stored(stored, tuple(boxes), shape)


STEP = 7


@contextlib.contextmanager
def classes_of_megatron() -> Iterator[tuple[Any, Any]]:
    """An enum and metadata that pickle under Megatron's names; inside the block their modules exist, to be written."""
    enums, strategies = "megatron.core.transformer.enums", "megatron.core.dist_checkpointing.strategies.torch"
    backend: Any = enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module=enums)  # type: ignore[misc]  # its name
    metadata: Any = type("MCoreMetadata", (Metadata,), {"__module__": strategies})
    paths = (made.__module__.split(".") for made in (backend, metadata))
    modules = {name: types.ModuleType(name) for path in paths for name in accumulate(path, "{}.{}".format)}
    for made in (backend, metadata):
        setattr(modules[made.__module__], made.__name__, made)
    assert not modules.keys() & sys.modules.keys()
    sys.modules.update(modules)
    try:
        yield backend, metadata
    finally:
        for name in modules:
            del sys.modules[name]


def group_map(spec: GptSpec) -> dict[str, int]:
    """Live name -> group, by Megatron's default rule: dense groups first; biases and 1-d tensors do not decay."""
    shapes, buffers = parameter_shapes(spec).items(), buffers_of(spec)
    dense = {name: 0 if len(shape) > 1 else 1 for name, shape in shapes if name not in buffers}
    return {name: 2 if ".experts." in name else group for name, group in dense.items()}


def param_groups(spec: GptSpec) -> list[dict[str, Any]]:
    """The groups of `group_map`, as files keep them: without their parameters."""
    return [make_group(0.1), make_group(0.0), *([make_group(0.1, expert=True)] if spec.experts else [])]


def make_group(weight_decay: float, expert: bool = False, **fields: Any) -> dict[str, Any]:
    multipliers = {"wd_mult": 1.0 if weight_decay else 0.0, "lr_mult": 1.0}
    kind = {"is_expert_parallel": expert, "is_decoupled_lr": False, "default_config": True}
    rates = {"max_lr": 1e-2, "min_lr": 1e-3, "lr": 0.005, "weight_decay": weight_decay}
    adam = {"betas": (0.9, 0.95), "eps": 1e-8, "bias_correction": True, "step": STEP}
    return {**multipliers, **kind, **rates, **adam, **fields}


def optimizer_state(groups: Sequence[dict[str, Any]], kind: str) -> dict[Any, Any]:
    """The optimizer part of the common dict: one optimizer, or one for dense and one for expert parameters."""
    if kind == "plain":
        without_step = [{k: v for k, v in group.items() if k != "step"} for group in groups]
        return {"param_groups": without_step, "state": {"common_step": STEP}}
    parts = [[group for group in groups if group["is_expert_parallel"] == expert] for expert in (False, True)]
    chained = [{"optimizer": {"param_groups": part}, "param_state_sharding_type": kind} for part in parts if part]
    return chained[0] if len(chained) == 1 else dict(enumerate(chained))


def common_state(
    spec: GptSpec, kind: str, groups: Sequence[dict[str, Any]] | None = None, backend: Any = None
) -> dict[str, Any]:
    """The whole common dict: a few of Megatron's arguments, one of a class that only Megatron has, and the state."""
    sizes = {"num_layers": spec.layers, "hidden_size": spec.hidden, "ffn_hidden_size": spec.ffn}
    form = {"swiglu": spec.swiglu, "untie_embeddings_and_output_weights": not spec.tied, "attention_backend": backend}
    is_plain = kind == "plain"
    dtypes = {"bf16": not is_plain, "fp16": False, "params_dtype": torch.float32 if is_plain else torch.bfloat16}
    args = argparse.Namespace(num_experts=spec.experts or None, **sizes, **form, **dtypes)
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 28, "lr_decay_style": "cosine"},
        "rerun_state_machine": {"mode": "disabled", "state": "not_running_yet", "current_iteration": -1},
        "num_floating_point_operations_so_far": 12345,
        "content_metadata": {"distrib_optim_sharding_type": kind, "singleton_local_shards": False},
    }
    if kind != "none":
        state["optimizer"] = optimizer_state(param_groups(spec) if groups is None else groups, kind)
    return state


def rng_state(seed: int) -> list[dict[str, Any]]:
    """What one cell of the rng_state grid holds: a list over data-parallel ranks, of length 1."""
    return [
        {
            "random_rng_state": random.Random(seed).getstate(),
            "np_rng_state": np.random.RandomState(seed).get_state(),
            "torch_rng_state": torch.Generator().manual_seed(seed).get_state(),
            "cuda_rng_state": torch.arange(16, dtype=torch.uint8) + seed,
            "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
        }
    ]


def split_halves(tensors: Mapping[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Live tensors with every gated fc1 as two."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        is_fc1 = re.search(r"\.linear_fc1\.(weight|bias)\d*$", name)
        if gated and is_fc1 and not name.startswith("vision_model"):
            found[f"{name}_w"], found[f"{name}_v"] = tensor.chunk(2)
        else:
            found[name] = tensor
    return found


def expected_tensors(truth: Truth, state_prefix: str = "optimizer.state.module.module.module") -> dict[str, Tensor]:
    """Key in the output -> tensor, for weights from fp32 masters, optimizer state and steps."""
    gated = truth.spec.swiglu
    found = {f"model.module.{name}": tensor for name, tensor in split_halves(truth.masters, gated).items()}
    for slot, tensors in truth.states.items():
        for name, tensor in split_halves(tensors, gated).items():
            found[f"{state_prefix}.{name}.{slot}"] = tensor
            found[f"{state_prefix}.{name}.step"] = torch.tensor(float(STEP))
    return found


Change = Callable[[dict[str, Any]], Any]
_DATA_RANKS = 2  # which cut the cells of generation 1


@dataclass(frozen=True)
class WriteOptions:
    kind: str = "fully_reshardable"  # or "plain" (an fp32 model and optimizer), "dp_reshardable", "none" (only weights)
    generation: int = 3  # 1 (flattened optimizer cells, common.pt), 2 (common.pt) or 3 (common state in DCP)
    tp: int = 1
    singleton: bool = False  # layers and experts keep their indices in the keys
    chained_prefix: bool = False  # optimizer keys begin with "chained_<n>.", as they once did
    change_common: Change = lambda _: None  # changes the common dict before it is written
    change_tensors: Change = lambda _: None  # changes the tensors (key -> Stored) before they are written
    groups: list[dict[str, Any]] | None = None  # instead of the default parameter groups
    one_chunk: bool = False  # everything in one chunk per tensor


def write_torch_dist(folder: Path, truth: Truth, options: WriteOptions | None = None) -> Path:
    """Write a checkpoint; returns its folder."""
    options = options or WriteOptions()
    tensors = stored_tensors(truth, options)
    options.change_tensors(tensors)
    with classes_of_megatron() as (backend, metadata_class):
        common = common_state(truth.spec, options.kind, options.groups, backend.auto)
        options.change_common(common)
        state = {key: chunked(stored) for key, stored in tensors.items()} | _objects(truth, options)
        if options.generation == 3:
            state["common_state/shard_0_1"] = [common]
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save_alone(state, checkpoint_id=folder, planner=planner)
        if options.generation < 3:
            torch.save(common, folder / "common.pt")
        _rewrite_metadata(folder / ".metadata", tensors, options.generation, metadata_class)
    marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(marker))
    return folder


def chunked(stored: Stored) -> Tensor:
    """A tensor that DCP saves in these chunks."""
    tensor: Any = stored.tensor.clone()
    chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in stored.boxes]
    parts = {chunk.offsets: tensor[box.indices] for chunk, box in zip(chunks, stored.boxes, strict=True)}
    written = [TensorWriteData(each, TensorProperties.create_from_tensor(tensor), tensor.shape) for each in chunks]
    tensor.__create_write_items__ = lambda fqn, _: [
        WriteItem(MetadataIndex(fqn, data.chunk.offsets), WriteItemType.SHARD, None, data) for data in written
    ]
    tensor.__create_chunk_list__ = lambda: chunks
    tensor.__get_tensor_shard__ = lambda index: parts[index.offset]
    return tensor


def stored_tensors(truth: Truth, options: WriteOptions) -> dict[str, Stored]:
    """Key in the folder -> tensor: weights in the dtype of the model, fp32 masters and states."""
    spec, kind = truth.spec, options.kind

    def lay_out(tensors: Mapping[str, Tensor], legacy: bool) -> dict[str, Stored]:
        laid: dict[str, Stored] = {}
        for key, (tensor, leading) in stack(tensors, spec, options.singleton).items():
            grid = (1,) * tensor.ndim if options.one_chunk else grid_of(key, tensor, leading, options.tp, spec.swiglu)
            laid[key] = flattened_cells(tensor, grid, _DATA_RANKS) if legacy else plain(tensor, grid)
        return laid

    buffers = buffers_of(spec) if kind != "plain" else truth.masters.keys()
    found = lay_out({k: v if k in buffers else v.bfloat16() for k, v in truth.masters.items()}, False)
    if kind in ("fully_reshardable", "plain"):
        slots = dict(truth.states)
        if kind != "plain" and slots:
            optimised = next(iter(slots.values()))
            slots["fp32_param"] = {k: v for k, v in truth.masters.items() if k in optimised}
        for slot, tensors in slots.items():
            for key, stored in lay_out(tensors, options.generation == 1).items():
                chain = f"chained_{int('.experts.' in key)}." if options.chained_prefix else ""
                found[f"{chain}optimizer.state.{slot}.{key}"] = stored
    if kind == "dp_reshardable":
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        chunks = tuple(Box((start,), (numel,)) for start, numel in ((0, 6), (6, 4), (10, 8)))
        found |= {f"{bucket}.{slot}": Stored(torch.rand(18), chunks) for slot in ("param", *SLOTS)}
    return found


def _objects(truth: Truth, options: WriteOptions) -> dict[str, Any]:
    layers = truth.spec.layers
    found: dict[str, Any] = {
        f"decoder.layers.self_attention.linear_qkv._extra_state/shard_{i}_{layers}": [None] for i in range(layers)
    }
    for rank in range(options.tp):
        found[f"rng_state/shard_0.{rank}_1.{options.tp}"] = [rng_state(rank)]
        found[f"rerun_state_machine_state/shard_{rank}_{options.tp}"] = [{"last_loss": 1.5, "rank": rank}]
    if options.kind == "dp_reshardable":
        found["optimizer.distributed.dp_group_idx_0.per_bucket_numel/shard_0_1"] = [{"numel": [18]}]
    return found


def _rewrite_metadata(path: Path, tensors: dict[str, Stored], generation: int, metadata_class: Any) -> None:
    metadata: Any = pickle.loads(path.read_bytes())  # our own, a moment ago
    metadata.planner_data = None
    if generation == 3:
        metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO)])]
    if generation == 1:
        metadata = metadata_class(**vars(metadata))
        metadata.mcore_data = {
            key: {"nd_reformulated_orig_global_shape": stored.original_shape}
            for key, stored in tensors.items()
            if stored.original_shape is not None
        }
    path.write_bytes(pickle.dumps(metadata))
