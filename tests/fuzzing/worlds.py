"""Random runs with `deterministic="world"`, each compared bit for bit with a plain loop in one process.

Many cases run in one call of the workers: a case takes a few milliseconds, and starting one in a call of its own more.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.agreement import gather_objects

VOCABULARY, TOKENS, STEPS = 11, 4, 2
FAMILIES = ("plain", "tied", "moe", "lora", "llama")
Named = dict[str, Tensor]


@dataclass(frozen=True)
class World:
    """One run.

    Attributes:
        seed: What it was drawn from.
        family: Of the model.
        width: Of the model.
        layers: Its blocks.
        mesh: Outer and inner ranks; outer 0: one axis.
        strategy: 0 to 3.
        outer_strategy: 0 or 1.
        rounds: Microbatches of each rank, per step.
        samples: Of a microbatch.
        recomputes: Whether blocks are recomputed in backward.
        syncs: Whether gradients are synchronised after every microbatch.
        optimizer: `sgd` or `adamw`.
        max_norm: Clip to this; None: no clipping.
        policy: Dtypes.
        options: Further arguments of `fully_shard`.
    """

    seed: int
    family: str
    width: int
    layers: int
    mesh: tuple[int, int]
    strategy: int
    outer_strategy: int
    rounds: int
    samples: int
    recomputes: bool
    syncs: bool
    optimizer: str
    max_norm: float | None
    policy: MixedPrecisionPolicy
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Processes needed."""
        return max(1, self.mesh[0]) * self.mesh[1]


def draw_world(seed: int, num_ranks: int) -> World:
    """Draw a run on a number of ranks; the same arguments are the same run."""
    rng = random.Random(seed)
    outers = [0, 0, *(outer for outer in range(1, num_ranks + 1) if num_ranks % outer == 0)]
    outer = rng.choice(outers)
    strategy = rng.randrange(4)
    options: dict[str, Any] = {}
    if strategy == 3:
        options = rng.choice(
            [
                {},
                {"weight_allocator": "resize"},
                {"max_gathered_units": 1},
                {"fsdp_double_buffer": True},
                {"max_gathered_units": 4, "forward_prefetch_units": 2, "backward_prefetch_units": 3},
            ]
        )
    family = rng.choice(FAMILIES)
    return World(
        seed=seed,
        family=family,
        width=rng.choice([4, 8]) if family == "llama" else rng.choice([3, 4, 5, 8]),
        layers=rng.choice([1, 2, 2, 3]),
        mesh=(outer, num_ranks // max(1, outer)),
        strategy=strategy,
        outer_strategy=rng.randrange(2) if outer and strategy else 0,
        rounds=rng.choice([1, 2, 3]),
        samples=rng.choice([1, 2]),
        recomputes=rng.random() < 0.4 and family != "llama",
        syncs=rng.random() < 0.4,
        optimizer=rng.choice(["sgd", "adamw", "adamw"]),
        max_norm=rng.choice([None, 0.05]),
        policy=rng.choice(
            [MixedPrecisionPolicy(), MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float64, torch.float64)]
        )
        if family in ("plain", "tied")
        else MixedPrecisionPolicy(),
        options=dict(options),
    )


# ---- models ----------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a trained low-rank one beside it (LoRA)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + self.up(self.down(x)))


class Experts(nn.Module):
    """Three experts on every rank; a token goes to one of them, and some get none."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        total = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            total[mine] = share[mine].unsqueeze(-1) * expert(x[mine])
        return total


class Block(nn.Module):
    """A residual block."""

    def __init__(self, case: World) -> None:
        super().__init__()
        make: dict[str, Callable[[int], nn.Module]] = {"moe": Experts, "lora": Adapted}
        self.norm = nn.LayerNorm(case.width).requires_grad_(case.family != "lora")
        self.core = make.get(case.family, partial(nn.Linear, case.width))(case.width)
        self.recomputes = case.recomputes

    def forward(self, x: Tensor) -> Tensor:
        if self.recomputes and torch.is_grad_enabled():
            return x + cast(Tensor, checkpoint(self._compute, x, use_reentrant=False))
        return x + self._compute(x)

    def _compute(self, x: Tensor) -> Tensor:
        return torch.tanh(self.core(self.norm(x)))


class Net(nn.Module):
    """Embedding, blocks, head; token ids (samples, tokens) -> logits."""

    def __init__(self, case: World) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, case.width).requires_grad_(case.family != "lora")
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.layers))
        self.head = nn.Linear(case.width, VOCABULARY, bias=False)
        if case.family == "tied":
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cast(Tensor, self.head(x))


def build(case: World) -> tuple[nn.Module, list[type[nn.Module]]]:
    """Build the model and return it with the classes of its units."""
    torch.manual_seed(case.seed)
    if case.family != "llama":
        return Net(case), [Block]
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=case.width,
        intermediate_size=2 * case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return LlamaForCausalLM(config), [LlamaDecoderLayer]


def loss_of(case: World, model: nn.Module, step: int, number: int) -> Tensor:
    """Return the share of microbatch `number` of a step in the loss."""
    generator = torch.Generator().manual_seed((case.seed * 97 + step) * 97 + number)
    tokens = torch.randint(VOCABULARY, (case.samples, TOKENS + 1), generator=generator)
    found = model(tokens[:, :-1])
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / (case.rounds * case.num_ranks)


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a run gave: losses by step and microbatch, norms by step, and weights and moments at the end."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    state: Named = field(default_factory=dict)


def make_optimizer(case: World, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer of what is trained."""
    params = [param for param in model.parameters() if param.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-2, foreach=case.seed % 2 == 0)


def alone(case: World) -> Trace:
    """Train in a plain loop, one microbatch after another."""
    model, _ = build(case)
    dtype = case.policy.main_params_dtype
    if dtype is not None and dtype != torch.float32:
        return sharded(case, None)
    optimizer, trace = make_optimizer(case, model), Trace()
    for step in range(STEPS):
        for number in range(case.rounds * case.num_ranks):
            loss = loss_of(case, model, step, number)
            loss.backward()
            trace.losses[step, number] = loss.item()
        if case.max_norm is not None:
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            exact = math.sqrt(math.fsum(x * x for grad in grads for x in grad.reshape(-1).tolist()))
            norm = torch.tensor(exact)
            torch._foreach_mul_(grads, torch.clamp(case.max_norm / (norm + 1e-6), max=1.0))
            trace.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
    trace.state = _state(model, optimizer)
    return trace


def sharded(case: World, mesh: tuple[int, int] | None) -> Trace:
    """Train this rank's microbatches; without a mesh on this rank alone, all of them."""
    model, units = build(case)
    outer, inner = mesh if mesh is not None else (0, 1)
    places, ranks, rank = _places(outer, inner) if mesh is not None else _alone(), case.num_ranks, dist.get_rank()
    if mesh is None:
        ranks, rank = 1, 0
    sharded_model, optimizer = fully_shard(
        model,
        make_optimizer(case, model),
        fsdp_unit_modules=units,
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer_strategy if outer else 0,
        mixed_precision_policy=case.policy,
        calculate_per_token_loss=True,
        sync_model_each_microbatch=case.syncs,
        deterministic="world",
        **places,
        **case.options,
    )
    trace, last = Trace(), case.rounds * case.num_ranks - ranks
    for step in range(STEPS):
        for number in range(rank, case.rounds * case.num_ranks, ranks):
            sharded_model.set_model_auto_sync(case.syncs or number >= last)
            loss = loss_of(case, sharded_model, step, number)
            loss.backward()
            trace.losses[step, number] = loss.item()
        if case.max_norm is not None:
            trace.norms.append(sharded_model.clip_grad_norm_(case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    trace.state = _state(sharded_model.module, optimizer)
    return trace


@cache
def _mesh(outer: int, inner: int) -> tuple[DeviceMesh, dist.ProcessGroup | None]:
    """Make a mesh once for all cases of a worker: its groups take longer than a case."""
    if not outer:
        return init_device_mesh("cpu", (inner,), mesh_dim_names=("inner",)), None
    mesh = init_device_mesh("cpu", (outer, inner), mesh_dim_names=("outer", "inner"))
    return mesh, mesh._flatten("both").get_group()


def _places(outer: int, inner: int) -> dict[str, Any]:
    mesh, group = _mesh(outer, inner)
    return {
        "device_mesh": mesh,
        "dp_shard_dim": "inner",
        **({"dp_outer_dim": "outer", "hybrid_fsdp_group": group} if outer else {}),
    }


def _alone() -> dict[str, Any]:
    """Return a mesh of one rank, out of one in which each rank is alone along a dimension."""
    return {"device_mesh": _lonely(), "dp_shard_dim": "alone"}


@cache
def _lonely() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("others", "alone"))["alone"]


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Named:
    found = {}
    for name, param in model.named_parameters():
        found[name] = _full(param)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor):
                found[f"{name} {key}"] = _full(value)
    return found


def _full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def differing(case: World) -> list[str]:
    """For a worker: say what differs from the plain loop, on every rank the same."""
    wanted, found = alone(case), sharded(case, case.mesh)
    told = [f"{name}" for name in wanted.state if not torch.equal(found.state[name], wanted.state[name])]
    told += ["names"] if wanted.state.keys() != found.state.keys() else []
    told += ["norms"] if found.norms != wanted.norms else []
    told += [f"loss {place}" for place, loss in found.losses.items() if loss != wanted.losses[place]]
    return sorted({text for texts in gather_objects(told) for text in texts})


def play_worlds(first_seed: int, cases: int) -> dict[int, str]:
    """For a worker: run cases one after another; return what differed, by seed."""
    failed: dict[int, str] = {}
    for seed in range(first_seed, first_seed + cases):
        case = draw_world(seed, dist.get_world_size())
        if told := differing(case):
            failed[seed] = f"{case}: {', '.join(told[:5])}"
    return failed
