"""What a converted checkpoint must hold, said a second time, from the truth instead of from the file."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from tests.support.torch_dist.common import STEP
from tests.support.torch_dist.gpt import GptSpec, Truth
from tests.support.torch_dist.layout import stack

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


def stored_tensors(truth: Truth, singleton: bool = False) -> dict[str, Tensor]:
    """Key in the source -> tensor in its true shape: bf16 weights, fp32 masters and states."""
    spec: GptSpec = truth.spec
    bf16 = {name: t if "expert_bias" in name else t.to(torch.bfloat16) for name, t in truth.masters.items()}
    found = {key: tensor for key, (tensor, _) in stack(bf16, spec, singleton).items()}
    slots = dict(truth.states)
    if slots:
        optimised = next(iter(slots.values()))
        slots["fp32_param"] = {name: t for name, t in truth.masters.items() if name in optimised}
    for slot, tensors in slots.items():
        found |= {f"optimizer.state.{slot}.{key}": t for key, (t, _) in stack(tensors, spec, singleton).items()}
    return found
