"""The non-tensor state of a `torch_dist` checkpoint: arguments, parameter groups, scheduler, generators."""

import argparse
import contextlib
import enum
import random
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata

from tests.support.torch_dist.gpt import GptSpec, buffers_of, parameter_shapes

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
    kinds: list[tuple[bool, bool]] = []
    found: dict[str, tuple[bool, bool]] = {}
    for name, shape in parameter_shapes(spec).items():
        if name not in buffers_of(spec):
            found[name] = (is_expert(name), len(shape) == 1 or name.endswith(".bias"))
            kinds += [found[name]] if found[name] not in kinds else []
    kinds.sort(key=lambda kind: kind[0])
    return {name: kinds.index(kind) for name, kind in found.items()}


def param_groups(spec: GptSpec) -> list[dict[str, Any]]:
    """The groups of `group_map`, as files keep them: without their parameters."""
    kinds: dict[int, tuple[bool, bool]] = {}
    shapes = parameter_shapes(spec)
    for name, index in group_map(spec).items():
        kinds[index] = (is_expert(name), len(shapes[name]) == 1 or name.endswith(".bias"))
    return [make_group(0.0 if kinds[i][1] else 0.1, kinds[i][0]) for i in sorted(kinds)]


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
    chained = [_one(part, kind) for part in (dense, experts) if part]
    return chained[0] if len(chained) == 1 else dict(enumerate(chained))


def _one(groups: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {"optimizer": {"param_groups": groups}, "param_state_sharding_type": kind}


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
