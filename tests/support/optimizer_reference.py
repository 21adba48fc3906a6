"""A sharded optimizer beside one in a single process: the same gradients, the same bits."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_map

from megatron_fsdp import MegatronFSDP, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.dtensor.tensor import UnevenDTensor
from tests.support.arrangements import hybrid_arguments, mesh_of
from tests.support.on_ranks import fixed_seed


class Matrices(nn.Module):
    """Matrices of odd shapes, three in the root; some have fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 3, bias=False), nn.Linear(3, 11, bias=False)])
        self.row = nn.Parameter(torch.randn(1, 5))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.square = nn.Parameter(torch.randn(9, 9))


def matrices() -> nn.Module:
    with fixed_seed(3):
        return Matrices()


def drawn(shape: torch.Size, step: int, index: int, dtype: torch.dtype | None = None) -> Tensor:
    """The gradient of a parameter in a step, the same wherever it is drawn."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + index), dtype=dtype)


class Lion(torch.optim.Optimizer):
    """As third parties write them: a moment, a Python counter and a tensor of another shape, made in the first step."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Follow the sign of the moment and the gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(moment=torch.zeros_like(param), count=0, last=torch.zeros(()))
                state["count"] += 1
                state["last"] += group["lr"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(state["moment"] * 0.9 + param.grad * 0.1), alpha=-group["lr"])
                state["moment"].lerp_(param.grad, 0.01)


Make = Callable[[Sequence[Any]], torch.optim.Optimizer]


class ReferencePair:
    """A sharded optimizer and one on whole copies of the same parameters, given the same gradients."""

    def __init__(self, model: nn.Module, make: Make, arguments: dict[str, Any]) -> None:
        self.model: MegatronFSDP = fully_shard_model(model, **{"fsdp_unit_modules": [nn.Linear], **arguments})
        self.params = list(self.model.parameters())
        self.optimizer = fully_shard_optimizer(make(self.params))
        self.copies = [nn.Parameter(param.full_tensor().detach().clone()) for param in self.params]  # type: ignore[attr-defined]
        self.reference = make(self.copies)

    def step(self, step: int, without: int | None = None) -> None:
        for index, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            grad = None if index == without else drawn(copy.shape, step, index).to(copy.dtype)
            copy.grad = grad
            spec = param.shard_spec  # type: ignore[attr-defined]
            param.grad = None if grad is None else UnevenDTensor.wrap(spec.take(grad).clone(), spec)
        self.optimizer.step()
        self.reference.step()

    def differing(self) -> list[str]:
        """What differs in any bit; empty is right."""
        found = []
        for index, (param, copy) in enumerate(zip(self.params, self.copies, strict=True)):
            ours, theirs = {"weight": param, **self.optimizer.state[param]}, self.reference.state[copy]
            whole = tree_map(lambda v: v.full_tensor() if isinstance(v, DTensor) else v, ours)
            expected = {"weight": copy, **theirs}
            found += [f"{key} of {index}" for key in whole.keys() ^ expected.keys()]
            found += [f"{key} of {index}" for key, v in whole.items() if not _equal(v, expected.get(key))]
        return found

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this package, and one by torch's own functions."""
        save_checkpoint(self.model, self.optimizer, folder / "ours", iteration=2)
        save(self._state(), checkpoint_id=folder / "torch")

    def _state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def goes_on(self, pair: "ReferencePair", folder: Path | None = None) -> list[str]:
        """Load one of those and make the third step beside the single process of others; what differs then."""
        if folder is not None and folder.name == "torch":
            state = self._state()
            load(state, checkpoint_id=folder)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optim"])
        elif folder is not None:
            load_checkpoint(self.model, self.optimizer, folder)
        self.copies, self.reference = pair.copies, pair.reference
        self.step(2)
        return self.differing()


def three_steps(model: nn.Module, make: Make, arguments: dict[str, Any], without: int) -> ReferencePair:
    """Assert the bits of one process after each of three steps, in the first of which one parameter has no gradient."""
    pair = ReferencePair(model, make, arguments)
    for step in range(3):
        pair.step(step, without=without if step == 0 else None)
        assert pair.differing() == [], f"step {step}"
    return pair


def flat(strategy: int) -> dict[str, Any]:
    mesh = mesh_of((dist.get_world_size(),), ("dp",))
    return {"device_mesh": mesh, "dp_shard_dim": "dp", "zero_dp_strategy": strategy}


def hybrid(strategy: int, outer: str) -> dict[str, Any]:
    meshes = hybrid_arguments(2, dist.get_world_size() // 2)
    return {**meshes, "zero_dp_strategy": strategy, "outer_dp_sharding_strategy": outer}


def _equal(left: Any, right: Any) -> bool:
    """Whether the values inside of two nested ones are equal, in tensors bit for bit."""
    ours, theirs = tree_flatten(left)[0], tree_flatten(right)[0]
    return len(ours) == len(theirs) and all(
        torch.equal(a, b) if isinstance(b, Tensor) else a == b for a, b in zip(ours, theirs, strict=True)
    )
