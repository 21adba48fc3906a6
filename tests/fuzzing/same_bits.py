"""Random runs with `deterministic="world"`, each compared bit for bit with a plain loop in one process.

Many cases run in one call of the workers: a case takes a few milliseconds, and starting one in a call of its own more.
Ranks share out the plain loops. A run may be ended after its first step, and go on from its checkpoint with another
number of ranks and another strategy.
"""

from __future__ import annotations

import math
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard
from megatron_fsdp.comm.agreement import gather_objects
from megatron_fsdp.config.precision import WEIGHT_FORMAT_NAMES

VOCABULARY, TOKENS, STEPS = 11, 4, 2
FAMILIES = ("plain", "tied", "moe", "lora", "llama")
Named = dict[str, Tensor]


@dataclass(frozen=True)
class DeterministicCase:
    """One run."""

    seed: int  # what it was drawn from
    family: str  # of the model
    width: int  # of the model
    layers: int  # its blocks
    mesh: tuple[int, int]  # outer and inner ranks; outer 0: one axis
    strategy: int  # 0 to 3
    outer_strategy: int  # 0 or 1
    rounds: int  # microbatches of each rank, per step
    samples: int  # of a microbatch
    recomputes: bool  # whether blocks are recomputed in backward
    syncs: bool  # whether gradients are synchronised after every microbatch
    optimizer: str  # `sgd` or `adamw`
    max_norm: float | None  # clip to this; None: no clipping
    policy: MixedPrecisionPolicy  # dtypes
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of `fully_shard`
    begins: DeterministicCase | None = None  # where the first step is taken, and saved; None: where the others are

    @property
    def num_ranks(self) -> int:
        return max(1, self.mesh[0]) * self.mesh[1]

    @property
    def microbatches(self) -> int:
        return self.rounds * self.num_ranks

    @property
    def is_plain_alone(self) -> bool:
        """Whether a loop without this package has the same dtypes."""
        return self.policy.main_params_dtype in (None, torch.float32) and self.policy.weight_format is None


_POLICIES = (MixedPrecisionPolicy(), MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.float64, torch.float64))


def draw_deterministic_case(seed: int, num_ranks: int) -> DeterministicCase:
    """Draw a run on a number of ranks; the same arguments are the same run."""
    rng = random.Random(seed)
    place = _draw_place(rng, num_ranks)
    family = rng.choice(FAMILIES)
    case = DeterministicCase(
        seed=seed,
        family=family,
        width=rng.choice([4, 8]) if family == "llama" else rng.choice([3, 4, 5, 8]),
        layers=rng.choice([1, 2, 2, 3]),
        rounds=rng.choice([1, 2, 3]),
        samples=rng.choice([1, 2]),
        recomputes=rng.random() < 0.4,
        syncs=rng.random() < 0.4,
        optimizer=rng.choice(["sgd", "adamw", "adamw"]),
        max_norm=rng.choice([None, 0.05]),
        policy=rng.choice(_POLICIES) if family in ("plain", "tied") else MixedPrecisionPolicy(),
        **place,
    )
    if rng.random() < 0.3:
        fewer = rng.choice([count for count in range(1, num_ranks + 1) if num_ranks % count == 0])
        place = {**_draw_place(rng, fewer), "rounds": case.microbatches // fewer}
        case = replace(case, begins=replace(case, syncs=rng.random() < 0.4, **place))
    formats = random.Random(7 * seed + num_ranks)  # leaves what else the seed draws as it is
    if {case.strategy, (case.begins or case).strategy} == {3} and formats.random() < 0.8:
        policy = replace(case.policy, weight_format=formats.choice(WEIGHT_FORMAT_NAMES))
        case = replace(case, policy=policy, begins=case.begins and replace(case.begins, policy=policy))
    return case


def _draw_place(rng: random.Random, num_ranks: int) -> dict[str, Any]:
    """Draw mesh, strategies and options for a number of ranks."""
    outer = rng.choice([0, 0, *(outer for outer in range(1, num_ranks + 1) if num_ranks % outer == 0)])
    strategy = rng.randrange(4)
    options = rng.choice(_OPTIONS) if strategy == 3 else {}
    return {
        "mesh": (outer, num_ranks // max(1, outer)),
        "strategy": strategy,
        "outer_strategy": rng.randrange(2) if outer and strategy else 0,
        "options": dict(options),
    }


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"weight_allocator": "resize"},
    {"max_gathered_units": 1},
    {"fsdp_double_buffer": True},
    {"max_gathered_units": 4, "forward_prefetch_units": 2, "backward_prefetch_units": 3},
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

    def __init__(self, case: DeterministicCase) -> None:
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

    def __init__(self, case: DeterministicCase) -> None:
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


def build(case: DeterministicCase) -> tuple[nn.Module, list[type[nn.Module]]]:
    """Build the model and return it with the classes of its units."""
    torch.manual_seed(case.seed)
    if case.family != "llama":
        return Net(case), [Block]
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    sizes = {"vocab_size": VOCABULARY, "hidden_size": case.width, "intermediate_size": 2 * case.width}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": TOKENS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, num_hidden_layers=case.layers, use_cache=False))
    for layer in model.model.layers if case.recomputes else ():
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model, [LlamaDecoderLayer]


def loss_of(case: DeterministicCase, model: nn.Module, step: int, number: int) -> Tensor:
    """Return the share of microbatch `number` of a step in the loss."""
    generator = torch.Generator().manual_seed((case.seed * 97 + step) * 97 + number)
    tokens = torch.randint(VOCABULARY, (case.samples, TOKENS + 1), generator=generator)
    found = model(tokens[:, :-1])
    logits = found if isinstance(found, Tensor) else found.logits
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / case.microbatches


# ---- runs ------------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """What a run gave: losses by step and microbatch, norms by step, and weights and moments at the end."""

    losses: dict[tuple[int, int], float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    state: Named = field(default_factory=dict)


def make_optimizer(case: DeterministicCase, model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-2, foreach=case.seed % 2 == 0)


def alone(case: DeterministicCase) -> Trace:
    """Train in a plain loop, one microbatch after another."""
    if not case.is_plain_alone:
        return sharded(replace(case, mesh=(0, 1), rounds=case.microbatches, options={}, outer_strategy=0, begins=None))
    model, _ = build(case)
    optimizer, trace = make_optimizer(case, model), Trace()
    for step in range(STEPS):
        for number in range(case.microbatches):
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


def sharded(case: DeterministicCase) -> Trace:
    """Train this rank's microbatches, on all ranks or on sets of fewer that each do the same."""
    trace = Trace()
    if case.begins is None:
        model, optimizer = _wrapped(case)
        _take_steps(case, model, optimizer, range(STEPS), trace)
    else:
        folder = tempfile.mkdtemp(prefix="cases-") if dist.get_rank() == 0 else ""
        folder = gather_objects(folder)[0]
        try:
            _take_steps(case.begins, *_wrapped(case.begins), range(1), trace, folder)
            model, optimizer = _wrapped(replace(case, seed=case.seed + 1))
            _load(model, optimizer, folder)
        finally:
            gather_objects(None)
            if dist.get_rank() == 0:
                shutil.rmtree(folder)
        _take_steps(case, model, optimizer, range(1, STEPS), trace)
    trace.state = _state(model.module, optimizer)
    return trace


def _wrapped(case: DeterministicCase) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    model, units = build(case)
    found: tuple[MegatronFSDP, torch.optim.Optimizer] = fully_shard(
        model,
        make_optimizer(case, model),
        fsdp_unit_modules=units,
        zero_dp_strategy=case.strategy,
        outer_dp_sharding_strategy=case.outer_strategy,
        mixed_precision_policy=case.policy,
        calculate_per_token_loss=True,
        sync_model_each_microbatch=case.syncs,
        deterministic="world",
        **_places(*case.mesh)[0],
        **case.options,
    )
    return found


def _take_steps(
    case: DeterministicCase, model: MegatronFSDP, optimizer: Any, steps: Sequence[int], trace: Trace, folder: str = ""
) -> None:
    """Take some steps, write down what they gave, and save where a folder is given."""
    ranks = case.num_ranks
    for step in steps:
        for number in range(dist.get_rank() % ranks, case.microbatches, ranks):
            model.set_model_auto_sync(case.syncs or number >= case.microbatches - ranks)
            loss = loss_of(case, model, step, number)
            loss.backward()
            trace.losses[step, number] = loss.item()
        if case.max_norm is not None:
            trace.norms.append(model.clip_grad_norm_(case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    if folder:
        state, group = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, _places(*case.mesh)[1]
        if dist.get_rank() < ranks:
            dcp.save(state, checkpoint_id=folder, process_group=group)
        gather_objects(None)


def _load(model: MegatronFSDP, optimizer: torch.optim.Optimizer, folder: str) -> None:
    state: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


@cache
def _places(outer: int, inner: int) -> tuple[dict[str, Any], dist.ProcessGroup]:
    """Make a mesh once for all cases of a worker, since its groups take longer than a case, and a group of its ranks.

    Fewer ranks than there are form several meshes.
    """
    shape, names = ((outer, inner), ("outer", "inner")) if outer else ((inner,), ("inner",))
    every = init_device_mesh(
        "cpu", (dist.get_world_size() // math.prod(shape), *shape), mesh_dim_names=("sets", *names)
    )
    mesh = every[names]
    group = mesh._flatten("both").get_group() if outer else mesh.get_group()
    hybrid = {"dp_outer_dim": "outer", "hybrid_fsdp_group": group} if outer else {}
    return {"device_mesh": mesh, "dp_shard_dim": "inner", **hybrid}, group


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


def play_deterministic_cases(first_seed: int, cases: int) -> dict[int, str]:
    """For a worker: run cases one after another; return what differed, by seed, on every rank the same."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn = [draw_deterministic_case(seed, ranks) for seed in range(first_seed, first_seed + cases)]
    mine = {case.seed: alone(case) for case in drawn if case.is_plain_alone and case.seed % ranks == rank}
    mine |= {case.seed: alone(case) for case in drawn if not case.is_plain_alone}  # wrapping makes groups: all together
    wanted = {seed: trace for traces in gather_objects(mine) for seed, trace in traces.items()}
    told = {case.seed: _differing(sharded(case), wanted[case.seed]) for case in drawn}
    everyone = gather_objects(told)
    found = [(case, sorted({text for of_rank in everyone for text in of_rank[case.seed]})) for case in drawn]
    return {case.seed: f"{case}: {', '.join(texts[:5])}" for case, texts in found if texts}


def _differing(found: Trace, wanted: Trace) -> list[str]:
    """Say what differs from the plain loop."""
    names = [name for name in wanted.state if name in found.state]
    told = [name for name in names if not torch.equal(found.state[name], wanted.state[name])]
    told += ["names"] if wanted.state.keys() != found.state.keys() else []
    told += ["norms"] if found.norms != wanted.norms else []
    return told + [f"loss {place}" for place, loss in found.losses.items() if loss != wanted.losses[place]]
