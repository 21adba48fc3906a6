"""What kind of checkpoint a folder is, told from names alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.safe_read import read_json
from megatron_fsdp.errors import CheckpointError

MARKER = "metadata.json"
COMMON_FILE = "common.pt"
COMMON_KEY = "common_state/shard_0_1"
MANIFEST = "manifest.json"
GROUP_META = "optimizer.param_to_group_meta."

_SLOTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer", ".max_exp_avg_sq", ".fp32_param")


@dataclass(frozen=True)
class Kind:
    """What kind of checkpoint it is.

    Attributes:
        format: `torch_dist` (Megatron-LM), `fsdp_dtensor` (Megatron-FSDP, this library's own too) or `dcp` (any other
            of torch.distributed.checkpoint).
        generation: Of torch_dist: `G1` (flattened ranges in `mcore_data`), `G2` (`common.pt`), `G3` (common state as an
            object), None where there is no common state to tell by; None for other formats.
        optimizer: How optimizer state is laid out: `none`; `model_space` (one tensor per slot and model tensor);
            `bucket_space` (flat buckets, which only the run that wrote them understands); `per_parameter`
            (`<parameter>.<slot>`).
        is_chained: Whether keys carry `chained_<n>.` of several optimizers.
        has_manifest: Whether this library wrote it.
    """

    format: str
    generation: str | None
    optimizer: str
    is_chained: bool
    has_manifest: bool

    @property
    def title(self) -> str:
        """In words."""
        known = {
            "torch_dist": "torch_dist (Megatron-LM)",
            "fsdp_dtensor": "fsdp_dtensor (Megatron-FSDP)",
            "dcp": "torch.distributed.checkpoint",
        }
        parts = [known[self.format]]
        parts += [f"generation {self.generation}"] if self.generation else []
        parts += ["with manifest"] if self.has_manifest else []
        return ", ".join(parts)


def recognise(folder: CheckpointFolder) -> Kind:
    """Tell the kind of an open folder.

    Raises:
        CheckpointError: `metadata.json` is there and is not JSON.
    """
    tensors, objects = folder.tensors.keys(), folder.objects.keys()
    backend = read_marker(folder.path).get("sharded_backend")
    mcore_data = getattr(folder.metadata, "mcore_data", None)
    is_torch_dist = backend == "torch_dist" or COMMON_KEY in objects or (folder.path / COMMON_FILE).is_file()
    generation = None
    if is_torch_dist:
        generation = _generation(bool(mcore_data), (folder.path / COMMON_FILE).is_file(), COMMON_KEY in objects)
        name = "torch_dist"
    else:
        name = "fsdp_dtensor" if _is_fsdp_dtensor(tensors, objects) else "dcp"
    return Kind(
        format=name,
        generation=generation,
        optimizer=optimizer_layout(tensors, name),
        is_chained=any(key.startswith("chained_") for key in tensors),
        has_manifest=(folder.path / MANIFEST).is_file(),
    )


def _generation(has_mcore_data: bool, has_common_file: bool, has_common_object: bool) -> str | None:
    if has_mcore_data:
        return "G1"
    if has_common_object:
        return "G3"
    return "G2" if has_common_file else None


def _is_fsdp_dtensor(tensors: Collection[str], objects: Collection[str]) -> bool:
    return any(key.startswith("model.module.") for key in tensors) or any(key.startswith(GROUP_META) for key in objects)


def optimizer_layout(tensors: Collection[str], format_name: str) -> str:
    """How optimizer state is laid out, told from keys; see `Kind`."""
    if any(".bucket_idx_" in key or "optimizer.distributed." in key for key in tensors):
        return "bucket_space"
    if format_name == "torch_dist":
        return "model_space" if any("optimizer.state." in key for key in tensors) else "none"
    return "per_parameter" if any(key.endswith(_SLOTS) for key in tensors) else "none"


def read_marker(folder: Path) -> dict[str, Any]:
    """What `metadata.json` says; empty where there is none.

    Raises:
        CheckpointError: It is damaged.
    """
    path = folder / MARKER
    if not path.is_file():
        return {}
    found = read_json(path)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds a {type(found).__name__} where an object of names and values should be")
    return found
