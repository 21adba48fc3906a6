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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
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

    @property
    def homogeneous(self) -> bool:
        """Whether all layers have the same parameters, so that files stack them."""
        return not (self.experts and self.dense_layers)


def parameter_shapes(spec: GptSpec) -> dict[str, Shape]:
    """Live name -> shape, in the order of a model's `named_parameters()`."""
    h, v = spec.hidden, spec.vocabulary
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (v, h)}
    if spec.tower:
        shapes |= _block("vision_model.decoder.layers.0", GptSpec(swiglu=False, hidden=h, ffn=spec.ffn), moe=False)
    for layer in range(spec.layers):
        moe = spec.experts > 0 and layer >= spec.dense_layers
        shapes |= _block(f"decoder.layers.{layer}", spec, moe)
    shapes["decoder.final_layernorm.weight"] = (h,)
    if spec.mtp:
        shapes |= {"mtp.layers.0.enorm.weight": (h,), "mtp.layers.0.hnorm.weight": (h,)}
        shapes |= {"mtp.layers.0.eh_proj.weight": (h, 2 * h)}
        shapes |= _block("mtp.layers.0.transformer_layer", spec, moe=spec.experts > 0)
        shapes |= {"mtp.layers.0.final_layernorm.weight": (h,)}
    if not spec.tied:
        shapes["output_layer.weight"] = (v, h)
    return shapes


def buffers_of(spec: GptSpec) -> set[str]:
    """Names among the parameters that are not optimised: the routers' biases."""
    return {name for name in parameter_shapes(spec) if name.endswith(".expert_bias")}


def _block(prefix: str, spec: GptSpec, moe: bool) -> dict[str, Shape]:
    h = spec.hidden
    shapes = _mla(h) if spec.mla else _attention(h, spec.bias)
    if moe:
        shapes |= {"pre_mlp_layernorm.weight": (h,), "mlp.router.weight": (spec.experts, h)}
        if spec.expert_bias:
            shapes["mlp.router.expert_bias"] = (spec.experts,)
        for expert in range(spec.experts):
            shapes |= {f"mlp.experts.{k}{expert}": v for k, v in _mlp(spec, bias=False).items()}
        if spec.shared_experts:
            shapes |= {f"mlp.shared_experts.{k}": v for k, v in _mlp(spec, bias=False).items()}
    else:
        shapes["mlp.linear_fc1.layer_norm_weight"] = (h,)
        shapes |= {f"mlp.{k}": v for k, v in _mlp(spec, spec.bias).items()}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _attention(h: int, bias: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {
        "self_attention.linear_qkv.layer_norm_weight": (h,),
        "self_attention.linear_qkv.weight": (3 * h, h),
        "self_attention.linear_proj.weight": (h, h),
    }
    if bias:
        shapes |= {"self_attention.linear_qkv.bias": (3 * h,), "self_attention.linear_proj.bias": (h,)}
    return shapes


def _mla(h: int) -> dict[str, Shape]:
    return {
        "input_layernorm.weight": (h,),
        "self_attention.linear_q_down_proj.weight": (h // 2, h),
        "self_attention.linear_q_up_proj.layer_norm_weight": (h // 2,),
        "self_attention.linear_q_up_proj.weight": (2 * h, h // 2),
        "self_attention.linear_kv_down_proj.weight": (h // 2, h),
        "self_attention.linear_kv_up_proj.layer_norm_weight": (h // 2,),
        "self_attention.linear_kv_up_proj.weight": (2 * h, h // 2),
        "self_attention.linear_proj.weight": (h, h),
    }


def _mlp(spec: GptSpec, bias: bool) -> dict[str, Shape]:
    rows = 2 * spec.ffn if spec.swiglu else spec.ffn
    shapes: dict[str, Shape] = {}
    for name, shape in (("linear_fc1", (rows, spec.hidden)), ("linear_fc2", (spec.hidden, spec.ffn))):
        shapes |= {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})
    return shapes


@dataclass(frozen=True)
class Truth:
    """What a training run held when it saved.

    Attributes:
        masters: Live name -> fp32 weight.
        states: Slot ("exp_avg", ...) -> live name -> fp32 tensor; buffers have none.
    """

    spec: GptSpec
    masters: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def make_truth(spec: GptSpec, slots: tuple[str, ...] = SLOTS) -> Truth:
    """Random weights around the usual size, and optimizer state."""
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(spec)

    def weight(name: str, shape: Shape) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        return 1 + 0.1 * drawn if "norm" in name else 0.3 * drawn

    masters = {name: weight(name, shape) for name, shape in shapes.items()}
    optimised = [name for name in shapes if name not in buffers_of(spec)]
    states = {
        slot: {name: 0.01 * torch.rand(shapes[name], generator=generator) for name in optimised} for slot in slots
    }
    return Truth(spec, masters, states)


# ---- how a file lays live parameters out: global keys, stacked layers and experts, grids of chunks -------------------

_ROW_CUT = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_q_up_proj|linear_kv_up_proj)\.(weight|bias)$")
_COLUMN_CUT = re.compile(r"(linear_proj|linear_fc2)\.weight$")


@dataclass(frozen=True)
class Stored:
    """One tensor as a file holds it.

    Attributes:
        tensor: Of the shape in the file.
        boxes: Its chunks.
        original_shape: The true shape where the file holds flattened cells; None where it holds plain shapes.
    """

    tensor: Tensor
    boxes: tuple[Box, ...]
    original_shape: tuple[int, ...] | None = None


def file_key(name: str, spec: GptSpec, singleton: bool = False) -> tuple[str, tuple[int, ...]]:
    """The key of a live parameter and its indices on the leading axes.

    Args:
        name: Live name.
        spec: Of the model.
        singleton: Layers and experts keep their index in the key (Megatron's `singleton_local_shards`).
    """
    indices: list[int] = []
    stacks_layers = spec.homogeneous and not singleton
    layer = re.match(r"(decoder\.layers)\.(\d+)\.(.*)", name)
    if layer and stacks_layers:
        name = f"{layer[1]}.{layer[3]}"
        indices.append(int(layer[2]))
    expert = re.match(r"(.*\.experts)\.(linear_fc[12])\.weight(\d+)$", name)
    if expert and singleton:
        name = f"{expert[1]}.{expert[3]}.{expert[2]}.weight"
    elif expert:
        name = f"{expert[1]}.experts.{expert[2]}.weight"
        indices.append(int(expert[3]))
    return name, tuple(indices)


def stack(tensors: Mapping[str, Tensor], spec: GptSpec, singleton: bool = False) -> dict[str, tuple[Tensor, int]]:
    """Live tensors as a file groups them: key -> (tensor, how many of its axes are layers and experts)."""
    members: dict[str, dict[tuple[int, ...], Tensor]] = {}
    for name, tensor in tensors.items():
        if singleton and spec.swiglu and re.search(r"\.experts\.linear_fc1\.weight\d+$", name):
            key, indices = file_key(name, spec, singleton)
            half = len(tensor) // 2
            members[f"{key}_w"], members[f"{key}_v"] = {indices: tensor[:half]}, {indices: tensor[half:]}
            continue
        key, indices = file_key(name, spec, singleton)
        members.setdefault(key, {})[indices] = tensor
    return {key: _join(parts) for key, parts in members.items()}


def _join(parts: dict[tuple[int, ...], Tensor]) -> tuple[Tensor, int]:
    lead = tuple(max(index[axis] for index in parts) + 1 for axis in range(len(next(iter(parts)))))
    assert len(parts) == math.prod(lead)
    ordered = [parts[index].clone() for index in sorted(parts)]
    return torch.stack(ordered).reshape(*lead, *ordered[0].shape) if lead else ordered[0], len(lead)


def grid_of(key: str, tensor: Tensor, leading: int, tp: int, gated: Callable[[str], bool]) -> tuple[int, ...]:
    """Into how many parts each axis is cut."""
    grid = [*tensor.shape[:leading], *(1 for _ in tensor.shape[leading:])]
    if re.search(r"linear_fc1\.(weight|bias)$", key):
        grid[leading] = 2 * tp if gated(key) else tp
    elif _ROW_CUT.search(key):
        grid[leading] = tp
    elif _COLUMN_CUT.search(key):
        grid[leading + 1] = tp
    return tuple(grid)


def boxes_of_grid(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[Box, ...]:
    """The cells of a grid."""
    lengths = tuple(size // parts for size, parts in zip(shape, grid, strict=True))
    return tuple(
        Box(tuple(i * n for i, n in zip(cell, lengths, strict=True)), lengths)
        for cell in product(*(range(parts) for parts in grid))
    )


def plain(tensor: Tensor, grid: tuple[int, ...] | None = None) -> Stored:
    """Stored in its own shape, in the cells of a grid or in one chunk."""
    return Stored(tensor, boxes_of_grid(tuple(tensor.shape), grid or (1,) * tensor.ndim))


def flattened_cells(tensor: Tensor, grid: tuple[int, ...], dp: int) -> Stored:
    """Stored as the cells of a grid, each flat and cut over data-parallel ranks at places that fit nothing."""
    shape = tuple(tensor.shape)
    cells = [tensor[box.indices].reshape(-1) for box in boxes_of_grid(shape, grid)]
    stored = torch.stack(cells).reshape(*grid, -1)
    flat = stored.shape[-1]
    cuts = sorted({0, flat, *(min(flat, flat * rank // dp + 1) for rank in range(1, dp))})
    boxes = [
        Box((*cell, start), (*(1 for _ in cell), stop - start))
        for cell in product(*(range(parts) for parts in grid))
        for start, stop in pairwise(cuts)
    ]
    return Stored(stored, tuple(boxes), shape)


# ---- the non-tensor state: arguments, parameter groups, scheduler, generators ----------------------------------------

STEP = 7
STRATEGIES = "megatron.core.dist_checkpointing.strategies.torch"


@contextlib.contextmanager
def classes_of_megatron() -> Iterator[Mapping[str, Any]]:
    """Classes that pickle under Megatron's names; inside the block the modules exist, so that they can be written."""
    made: dict[str, Any] = {
        "AttnBackend": enum.Enum("AttnBackend", {"flash": 1, "auto": 5}, module="megatron.core.transformer.enums"),
        "MCoreMetadata": type("MCoreMetadata", (Metadata,), {"__module__": STRATEGIES}),
    }
    names = {"megatron"}
    for thing in made.values():
        pieces = thing.__module__.split(".")
        names |= {".".join(pieces[: end + 1]) for end in range(len(pieces))}
    modules = {name: types.ModuleType(name) for name in names}
    for name, thing in made.items():
        thing.__qualname__ = name
        setattr(modules[thing.__module__], name, thing)
    assert not modules.keys() & sys.modules.keys()
    sys.modules.update(modules)
    try:
        yield made
    finally:
        for name in modules:
            del sys.modules[name]


def make_args(spec: GptSpec, bf16: bool, says_swiglu: bool, enums: Mapping[str, Any]) -> argparse.Namespace:
    """A few of Megatron's arguments, one of them of a class that only Megatron has."""
    args = argparse.Namespace(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_experts=spec.experts or None,
        bf16=bf16,
        fp16=False,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        attention_backend=enums["AttnBackend"].auto,
        untie_embeddings_and_output_weights=not spec.tied,
    )
    if says_swiglu:
        args.swiglu = spec.swiglu
    return args


def is_expert(name: str) -> bool:
    """Whether a live name is an expert's."""
    return ".experts." in name


def group_map(spec: GptSpec) -> dict[str, int]:
    """Live name -> group, by Megatron's default rule: dense groups first; biases and 1-d tensors do not decay."""
    kinds = _group_kinds(spec)
    order = _in_order(kinds)
    return {name: order.index(kind) for name, kind in kinds.items()}


def param_groups(spec: GptSpec) -> list[dict[str, Any]]:
    """The groups of `group_map`, as files keep them: without their parameters."""
    return [make_group(0.1 if decays else 0.0, expert) for expert, decays in _in_order(_group_kinds(spec))]


def _group_kinds(spec: GptSpec) -> dict[str, tuple[bool, bool]]:
    """Live name -> whether it is an expert's, and whether it decays."""
    shapes, buffers = parameter_shapes(spec).items(), buffers_of(spec)
    return {
        name: (is_expert(name), len(shape) > 1 and not name.endswith(".bias"))
        for name, shape in shapes
        if name not in buffers
    }


def _in_order(kinds: Mapping[str, tuple[bool, bool]]) -> list[tuple[bool, bool]]:
    return sorted(dict.fromkeys(kinds.values()), key=lambda kind: kind[0])


def make_group(weight_decay: float, expert: bool = False, **fields: Any) -> dict[str, Any]:
    """One parameter group of Adam."""
    return {
        "wd_mult": 1.0 if weight_decay else 0.0,
        "lr_mult": 1.0,
        "is_expert_parallel": expert,
        "is_decoupled_lr": False,
        "default_config": True,
        "max_lr": 1e-2,
        "min_lr": 1e-3,
        "lr": 0.005,
        "weight_decay": weight_decay,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "bias_correction": True,
        "step": STEP,
        **fields,
    }


def optimizer_state(groups: Sequence[dict[str, Any]], kind: str) -> dict[Any, Any]:
    """The optimizer part of the common dict: one optimizer, or one for dense and one for expert parameters."""
    if kind == "plain":
        without_step = [{k: v for k, v in group.items() if k != "step"} for group in groups]
        return {"param_groups": without_step, "state": {"common_step": STEP}}
    dense = [group for group in groups if not group["is_expert_parallel"]]
    experts = [group for group in groups if group["is_expert_parallel"]]
    chained = [
        {"optimizer": {"param_groups": part}, "param_state_sharding_type": kind} for part in (dense, experts) if part
    ]
    return chained[0] if len(chained) == 1 else dict(enumerate(chained))


def common_state(args: argparse.Namespace, optimizer: dict[Any, Any] | None, kind: str) -> dict[str, Any]:
    """The whole common dict."""
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEP,
        "opt_param_scheduler": {"max_lr": 1e-2, "num_steps": 28, "lr_decay_style": "cosine"},
        "rerun_state_machine": {"mode": "disabled", "state": "not_running_yet", "current_iteration": -1},
        "num_floating_point_operations_so_far": 12345,
        "content_metadata": {"distrib_optim_sharding_type": kind, "singleton_local_shards": False},
    }
    if optimizer is not None:
        state["optimizer"] = optimizer
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


# ---- what a converted checkpoint must hold, said a second time, from the truth instead of from the file --------------

_FC1 = re.compile(r"\.linear_fc1\.(weight|bias)\d*$")


def split_halves(tensors: Mapping[str, Tensor], gated: bool) -> dict[str, Tensor]:
    """Live tensors with every gated fc1 as two."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if gated and _FC1.search(name) and not name.startswith("vision_model"):
            half = len(tensor) // 2
            found |= {f"{name}_w": tensor[:half], f"{name}_v": tensor[half:]}
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


# ---- the folder: any generation, any grid, one process ---------------------------------------------------------------

Change = Callable[[dict[str, Any]], None]
_DATA_RANKS = 2  # which cut the cells of generation 1


@dataclass(frozen=True)
class WriteOptions:
    """How a run saved.

    Attributes:
        kind: "fully_reshardable", "plain" (an fp32 model and optimizer), "dp_reshardable" or "none" (weights only).
        generation: 1 (flattened optimizer cells, common.pt), 2 (common.pt) or 3 (common state in DCP).
        tp: Tensor-parallel size.
        singleton: Layers and experts keep their indices in the keys.
        chained_prefix: Optimizer keys begin with "chained_<n>.", as they once did.
        change_common: Changes the common dict before it is written.
        change_tensors: Changes the tensors (key -> Stored) before they are written.
        groups: Parameter groups instead of the default ones.
        one_chunk: Everything in one chunk per tensor.
    """

    kind: str = "fully_reshardable"
    generation: int = 3
    tp: int = 1
    singleton: bool = False
    chained_prefix: bool = False
    change_common: Change | None = None
    change_tensors: Change | None = None
    groups: list[dict[str, Any]] | None = None
    one_chunk: bool = False


def write_torch_dist(folder: Path, truth: Truth, options: WriteOptions | None = None) -> Path:
    """Write a checkpoint; returns its folder."""
    options = options or WriteOptions()
    tensors = stored_tensors(truth, options)
    if options.change_tensors is not None:
        options.change_tensors(tensors)
    state: dict[str, Any] = {key: chunked(stored) for key, stored in tensors.items()}
    with classes_of_megatron() as classes:
        common = _common(truth, options, classes)
        state |= _objects(truth, options)
        if options.generation == 3:
            state["common_state/shard_0_1"] = [common]
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        save_alone(state, checkpoint_id=folder, planner=planner)
        if options.generation < 3:
            torch.save(common, folder / "common.pt")
        _rewrite_metadata(folder, tensors, options.generation, classes)
    marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    (folder / "metadata.json").write_text(json.dumps(marker))
    return folder


def chunked(stored: Stored) -> Tensor:
    """A tensor that DCP saves in these chunks."""
    tensor = stored.tensor.clone()
    shape, properties = tensor.shape, TensorProperties.create_from_tensor(tensor)
    lengths = {box.offsets: box.lengths for box in stored.boxes}

    def write_items(fqn: str, _: object) -> list[WriteItem]:
        chunks = [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths)) for box in stored.boxes]
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, None, TensorWriteData(chunk, properties, shape)
            )
            for chunk in chunks
        ]

    def shard(index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        return stored.tensor[Box(offsets, lengths[offsets]).indices]

    tensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
    tensor.__create_chunk_list__ = lambda: [item.tensor_data.chunk for item in write_items("", None)]  # type: ignore[attr-defined, union-attr]
    tensor.__get_tensor_shard__ = shard  # type: ignore[attr-defined]
    return tensor


def stored_tensors(truth: Truth, options: WriteOptions) -> dict[str, Stored]:
    """Key in the folder -> tensor: weights in the dtype of the model, fp32 masters and states."""
    spec = truth.spec
    model_dtype = torch.float32 if options.kind == "plain" else torch.bfloat16

    def gated(key: str) -> bool:
        return spec.swiglu and "vision_model" not in key

    def lay_out(tensors: dict[str, Tensor], legacy: bool) -> dict[str, Stored]:
        laid: dict[str, Stored] = {}
        for key, (tensor, leading) in stack(tensors, spec, options.singleton).items():
            grid = (1,) * tensor.ndim if options.one_chunk else grid_of(key, tensor, leading, options.tp, gated)
            laid[key] = flattened_cells(tensor, grid, _DATA_RANKS) if legacy else plain(tensor, grid)
        return laid

    found = lay_out({k: v if "expert_bias" in k else v.to(model_dtype) for k, v in truth.masters.items()}, False)
    if options.kind in ("fully_reshardable", "plain"):
        slots = dict(truth.states)
        if options.kind != "plain" and slots:
            optimised = next(iter(slots.values()))
            slots["fp32_param"] = {k: v for k, v in truth.masters.items() if k in optimised}
        for slot, tensors in slots.items():
            for key, stored in lay_out(tensors, options.generation == 1).items():
                chain = f"chained_{int(is_expert(key))}." if options.chained_prefix else ""
                found[f"{chain}optimizer.state.{slot}.{key}"] = stored
    if options.kind == "dp_reshardable":
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            chunks = tuple(Box((start,), (numel,)) for start, numel in ((0, 6), (6, 4), (10, 8)))
            found[f"{bucket}.{slot}"] = Stored(torch.rand(18), chunks)
    return found


def _common(truth: Truth, options: WriteOptions, classes: Any) -> dict[str, Any]:
    args = make_args(truth.spec, options.kind != "plain", True, classes)
    groups = options.groups if options.groups is not None else param_groups(truth.spec)
    optimizer = None if options.kind == "none" else optimizer_state(groups, options.kind)
    common = common_state(args, optimizer, options.kind)
    if options.change_common is not None:
        options.change_common(common)
    return common


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


def _rewrite_metadata(folder: Path, tensors: dict[str, Stored], generation: int, classes: Any) -> None:
    path = folder / ".metadata"
    metadata: Metadata = pickle.loads(path.read_bytes())  # our own, a moment ago
    metadata.planner_data = None
    if generation == 3:
        metadata.all_local_plans = [SavePlan([WriteItem(MetadataIndex("a"), WriteItemType.BYTE_IO)])]  # type: ignore[attr-defined]
    if generation == 1:
        old = classes["MCoreMetadata"](**vars(metadata))
        old.mcore_data = {
            key: {"nd_reformulated_orig_global_shape": stored.original_shape}
            for key, stored in tensors.items()
            if stored.original_shape is not None
        }
        metadata = old
    path.write_bytes(pickle.dumps(metadata))
