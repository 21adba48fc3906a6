"""Write a `torch_dist` folder from a truth: any generation, any grid, one process."""

import json
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_fsdp.checkpoint.save import save_alone
from tests.support.torch_dist.common import (
    classes_of_megatron,
    common_state,
    is_expert,
    make_args,
    optimizer_state,
    param_groups,
    rng_state,
)
from tests.support.torch_dist.gpt import Truth
from tests.support.torch_dist.layout import Stored, flattened_cells, grid_of, irregular, plain, stack

Change = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class WriteOptions:
    """How a run saved.

    Attributes:
        kind: "fully_reshardable", "plain" (an fp32 model and optimizer), "dp_reshardable" or "none" (weights only).
        generation: 1 (flattened optimizer cells, common.pt), 2 (common.pt) or 3 (common state in DCP).
        tp: Tensor-parallel size.
        dp: Data-parallel size, which cuts the cells of generation 1.
        singleton: Layers and experts keep their indices in the keys.
        chained_prefix: Optimizer keys begin with "chained_<n>.", as they once did.
        says_swiglu: The arguments say whether MLPs are gated.
        change_common: Changes the common dict before it is written.
        change_tensors: Changes the tensors (key -> Stored) before they are written.
        groups: Parameter groups instead of the default ones.
        pipeline: Pipeline size, which only the generators' grid shows.
        one_chunk: Everything in one chunk per tensor.
    """

    kind: str = "fully_reshardable"
    generation: int = 3
    tp: int = 1
    dp: int = 2
    singleton: bool = False
    chained_prefix: bool = False
    says_swiglu: bool = True
    change_common: Change | None = None
    change_tensors: Change | None = None
    groups: list[dict[str, Any]] | None = None
    pipeline: int = 1
    one_chunk: bool = False


def write_torch_dist(folder: Path, truth: Truth, options: WriteOptions | None = None) -> Path:
    """Write a checkpoint; returns its folder."""
    options = options or WriteOptions()
    tensors = _tensors(truth, options)
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
        part = stored.tensor
        offsets = tuple(index.offset or ())
        for axis, (start, length) in enumerate(zip(offsets, lengths[offsets], strict=True)):
            part = part.narrow(axis, start, length)
        return part

    tensor.__create_write_items__ = write_items  # type: ignore[attr-defined]
    tensor.__create_chunk_list__ = lambda: [item.tensor_data.chunk for item in write_items("", None)]  # type: ignore[attr-defined, union-attr]
    tensor.__get_tensor_shard__ = shard  # type: ignore[attr-defined]
    return tensor


def _tensors(truth: Truth, options: WriteOptions) -> dict[str, Stored]:
    spec = truth.spec
    model_dtype = torch.float32 if options.kind == "plain" else torch.bfloat16

    def gated(key: str) -> bool:
        return spec.swiglu and "vision_model" not in key

    def lay_out(tensors: dict[str, Tensor], legacy: bool) -> dict[str, Stored]:
        laid: dict[str, Stored] = {}
        for key, (tensor, leading) in stack(tensors, spec, options.singleton).items():
            grid = grid_of(key, tensor, leading, options.tp, gated)
            grid = tuple(1 for _ in grid) if options.one_chunk else grid
            laid[key] = flattened_cells(tensor, grid, options.dp) if legacy else plain(tensor, grid)
        return laid

    found = lay_out({k: v if "expert_bias" in k else v.to(model_dtype) for k, v in truth.masters.items()}, False)
    if options.kind in ("fully_reshardable", "plain"):
        slots = dict(truth.states)
        if options.kind != "plain" and slots:
            optimised = next(iter(slots.values()))
            slots["fp32_param"] = {k: v for k, v in truth.masters.items() if k in optimised}
        for slot, tensors in slots.items():
            for key, stored in lay_out(tensors, options.generation == 1).items():
                found[f"{_chain(key, options)}optimizer.state.{slot}.{key}"] = stored
    if options.kind == "dp_reshardable":
        bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
        for slot in ("param", "exp_avg", "exp_avg_sq"):
            found[f"{bucket}.{slot}"] = irregular(torch.rand(18), (6, 4, 8))
    return found


def _chain(key: str, options: WriteOptions) -> str:
    return f"chained_{int(is_expert(key))}." if options.chained_prefix else ""


def _common(truth: Truth, options: WriteOptions, classes: Any) -> dict[str, Any]:
    args = make_args(truth.spec, options.kind != "plain", options.says_swiglu, classes)
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
    for pp in range(options.pipeline):
        for tp in range(options.tp):
            found[f"rng_state/shard_{pp}.{tp}_{options.pipeline}.{options.tp}"] = [rng_state(10 * pp + tp)]
    world = options.tp * options.pipeline
    for rank in range(world):
        found[f"rerun_state_machine_state/shard_{rank}_{world}"] = [{"last_loss": 1.5, "rank": rank}]
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
