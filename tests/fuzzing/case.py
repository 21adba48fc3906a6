"""What one fuzz case is made of, and how it is drawn from a seed. Pure: the same seed is the same case everywhere."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from megatron_fsdp import MixedPrecisionPolicy

SAMPLES = 12
"""Samples of a whole batch; 1, 2, 3 and 4 data-parallel ranks divide it."""

STEPS = 3


@dataclass(frozen=True)
class BlockPlan:
    """One block of the model."""

    kind: str  # `mlp`, `attention`, `conv` or `wide` (few huge rows)
    hidden: int  # inner width
    calls: int  # how often the model calls the block, one call after another
    scalar: bool  # whether it has a 0-d parameter
    frozen: bool  # whether it has a frozen layer
    unused: bool  # whether it has a layer that nothing uses
    sometimes: bool  # whether it has a layer that only some batches use
    mixed: torch.dtype | None  # in which one of its parameters is stored, unlike the others
    checkpoint: str  # activation checkpointing: `none`, `reentrant` or `plain`


@dataclass(frozen=True)
class MeshPlan:
    """Ranks per mesh dimension; 0 where there is no such dimension."""

    shard: int
    outer: int = 0
    tensor: int = 0

    @property
    def num_ranks(self) -> int:
        return self.data_parallel * max(1, self.tensor)

    @property
    def data_parallel(self) -> int:
        return self.shard * max(1, self.outer)


@dataclass(frozen=True)
class Case:
    """Everything about one run."""

    seed: int  # what it was drawn from
    dim: int  # width of the model
    blocks: tuple[BlockPlan, ...]  # its blocks
    tied: bool  # whether embedding and head share their weight
    wrap: str  # units: `blocks`, `auto`, `none` or `everything` (blocks and head, and what `doors.py` says)
    mesh: MeshPlan  # ranks
    strategy: int  # 0 to 3
    outer_strategy: int  # 0 or 1
    compute: torch.dtype  # of the model
    policy: MixedPrecisionPolicy  # dtypes of the rest
    microbatches: int  # backwards per step
    mode: str  # `plain`, `auto`, `no_sync`, `last` or `mixed`: who says when gradients are synchronised
    optimizer: str  # `sgd`, `adamw`, `adamw-foreach` or `adamw-fused`
    max_norm: float | None  # clip to this; None: no clipping
    torch_clip: bool  # clip with torch's own function
    zero: str  # how gradients are cleared: `none`, `zeros`, `module` or `never` (they add up over steps)
    evaluate: bool  # run an evaluation between the steps
    reload: bool  # load the own state dict between the steps
    options: dict[str, Any] = field(default_factory=dict)  # further arguments of the door
    door: str = "wrapper"  # by which it is sharded: a key of `doors.DOORS`
    message_bytes: int | None = None  # up to which small units are merged; None: as the environment says

    @property
    def tolerance(self) -> float:
        """Allowed error, as a part of the largest value of a tensor; more for gradients that travel in 16 bits."""
        return 1e-9 if self == in_float64(self) else 1e-5


def in_float64(case: Case) -> Case | None:
    """Return the same case with everything in float64; None where the door or an option asks for another dtype."""
    config = case.options.get("config", {})
    sums_in_fp32 = "param_name_patterns_for_fp32_local_accumulation" in config
    if case.door == "in place" or case.policy.grad_comm_dtype is torch.bfloat16 or sums_in_fp32:
        return None

    def wide(given: dict[str, Any]) -> dict[str, Any]:
        return {key: torch.float64 if isinstance(value, torch.dtype) else value for key, value in given.items()}

    blocks = tuple(replace(block, **wide({"mixed": block.mixed})) for block in case.blocks)
    policy = MixedPrecisionPolicy(**wide(asdict(case.policy)))
    options = case.options | ({"config": wide(config)} if config else {})
    return replace(case, blocks=blocks, compute=torch.float64, policy=policy, options=options)


_FP64 = (torch.float64, MixedPrecisionPolicy(main_params_dtype=None))
_FP32 = (torch.float32, MixedPrecisionPolicy())
_PRECISIONS = (
    _FP64,
    _FP64,
    _FP32,
    (torch.float32, MixedPrecisionPolicy(torch.float64, torch.float64, torch.float64)),
    (torch.float32, MixedPrecisionPolicy(grad_comm_dtype=torch.bfloat16)),
    (torch.float32, MixedPrecisionPolicy(main_grads_dtype=torch.float64)),
    (torch.float64, MixedPrecisionPolicy(None, torch.float64, torch.float32)),
)


def draw_case(seed: int, max_ranks: int = 4) -> Case:
    """Draw a case of at most so many processes."""
    rng = random.Random(seed)
    mesh = _draw_mesh(rng, max_ranks)
    strategy = rng.randrange(4)
    compute, policy = rng.choice(_PRECISIONS)
    wrap = rng.choice(["blocks", "blocks", "auto", "none", "everything"])
    blocks = tuple(_draw_block(rng, mesh, compute, policy) for _ in range(rng.randint(1, 4)))
    return Case(
        seed=seed,
        dim=rng.choice([4, 6, 8] if mesh.tensor else [3, 4, 5, 7, 8]),
        blocks=blocks,
        tied=rng.random() < 0.3,
        wrap=wrap,
        mesh=mesh,
        strategy=strategy,
        outer_strategy=rng.randrange(2) if mesh.outer and strategy > 0 else 0,
        compute=compute,
        policy=policy,
        microbatches=rng.choice([1, 1, 2, 3]),
        mode=rng.choice(["plain", "auto", "no_sync", "last", "mixed"]),
        optimizer=rng.choice(["sgd", "adamw", "adamw-foreach", "adamw-fused"]),
        max_norm=rng.choice([None, 0.05, 10.0]),
        torch_clip=rng.random() < 0.4,
        zero=rng.choice(["none", "none", "zeros", "module", "never"]),
        evaluate=rng.random() < 0.4,
        reload=rng.random() < 0.3,
        options={
            **_draw_options(rng, strategy),
            # Modules that only some ranks call must not be units of their own.
            **_draw_memory(rng, strategy, wrap, may_refine=not any(block.sometimes for block in blocks)),
        },
    )


def _draw_mesh(rng: random.Random, max_ranks: int) -> MeshPlan:
    hybrid = ((2, 2), (1, 2), (2, 1), (1, 3), (1, 4), (2, 2), (2, 0, 2), (1, 0, 2), (1, 2, 2), (2, 0, 1))
    choices = [MeshPlan(ranks) for ranks in range(1, max_ranks + 1)] + [MeshPlan(*sizes) for sizes in hybrid]
    return rng.choice([mesh for mesh in choices if mesh.num_ranks <= max_ranks])


def _draw_block(rng: random.Random, mesh: MeshPlan, compute: torch.dtype, policy: MixedPrecisionPolicy) -> BlockPlan:
    narrows = policy.main_params_dtype not in (None, torch.float64)  # which the engine warns of
    other = torch.float32 if compute == torch.float64 else torch.float64
    return BlockPlan(
        kind="mlp" if mesh.tensor else rng.choice(["mlp", "mlp", "attention", "conv", "wide"]),
        hidden=rng.choice([4, 8] if mesh.tensor else [1, 4, 5, 11]),
        calls=rng.choice([1, 1, 1, 2]),
        scalar=rng.random() < 0.3,
        frozen=rng.random() < 0.3,
        unused=rng.random() < 0.3,
        sometimes=rng.random() < 0.3,
        mixed=other if rng.random() < 0.15 and not narrows else None,
        checkpoint=rng.choice(["none", "none", "reentrant", "plain"]),
    )


def _draw_options(rng: random.Random, strategy: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.3:
        options["average_in_collective"] = True
    elif rng.random() < 0.3:
        options["calculate_per_token_loss"] = True
    if strategy < 2 and rng.random() < 0.4:
        options["overlap_grad_reduce"] = False
    if strategy < 3 and rng.random() < 0.4:
        options["overlap_param_gather"] = False
    if rng.random() < 0.3:
        options["report_nan_in_param_grad"] = True
    if rng.random() < 0.1:
        options["verify_ranks"] = True
    if rng.random() < 0.5:
        options["find_unused_parameters"] = True
    return options


def _draw_memory(rng: random.Random, strategy: int, wrap: str, may_refine: bool) -> dict[str, Any]:
    """Options that change where and when weights are gathered, and no value."""
    if strategy < 3 or wrap not in ("blocks", "everything"):
        return {}
    choices: list[dict[str, Any]] = [
        {},
        {"weight_allocator": "resize"},
        {"fsdp_double_buffer": True},
        {"fsdp_double_buffer": True, "fsdp_db_use_persist_buf_on_alloc_fail": True},
        {"maxpool_double_buffer": True},
        {"max_gathered_units": 1},
        {"max_gathered_units": 4, "forward_prefetch_units": 2, "backward_prefetch_units": 3},
        {"weight_allocator": "resize", "max_gathered_units": 3, "forward_prefetch_units": 2},
    ]
    options = dict(rng.choice(choices))
    if rng.random() < 0.3 and may_refine:
        options["enable_fine_grained_param_gather"] = True
    return options


# ---- the same program by other doors ---------------------------------------------------------------------------------

_CARRIED_OVER = ("calculate_per_token_loss", "find_unused_parameters", "verify_ranks")


def draw_program(seed: int, max_ranks: int = 4) -> Case:
    """Draw the case of the wrapper, so that most can be expressed by other doors, too."""
    rng = random.Random(seed + 2_000_003)
    program = replace(draw_case(seed, max_ranks), message_bytes=rng.choice([None, 0, 0, 400, 2000]))
    if rng.random() < 0.3:
        return program
    blocks = tuple(replace(block, scalar=False, mixed=None) for block in program.blocks)
    compute, policy = (program.compute, program.policy) if program.compute is torch.float32 else _FP32
    return replace(program, blocks=blocks, compute=compute, policy=policy)


def draw_doors(seed: int, max_ranks: int = 4) -> list[Case]:
    """Draw a program, and return its case for each door that can express it; that of the wrapper first."""
    return cases_of(draw_program(seed, max_ranks), random.Random(seed + 1_000_003))


def cases_of(program: Case, rng: random.Random) -> list[Case]:
    """Return the case of a program for each door that can express it, given that of the wrapper, which comes first."""
    cases = [program, _in_buckets(program, rng)]
    if program.wrap == "everything" and any(block.sometimes and block.checkpoint != "none" for block in program.blocks):
        # A rank's data decide which gradient comes first, and so whether a unit inside is gathered for its backward or
        # by the recomputation: ranks would gather in different orders, which no door can allow.
        return cases
    options, policy, compute = program.options, program.policy, program.compute
    is_plain = not any(block.scalar or block.mixed for block in program.blocks) and not program.mesh.tensor
    if is_plain and compute is torch.float32 and "calculate_per_token_loss" not in options:
        cases.append(replace(program, door="in place", options={}))
    if {policy.main_params_dtype, policy.main_grads_dtype} <= {None, compute}:
        of_torch: dict[str, Any] = {name: options[name] for name in _CARRIED_OVER[:1] if name in options}
        of_torch |= {"reshard_after_forward": rng.choice([None, True, False]), "connects": rng.random() < 0.5}
        of_torch["find_unused_parameters"] = True  # as it always does
        cases.append(replace(program, door="like torch", strategy=3, outer_strategy=0, options=of_torch))
    return cases


def _in_buckets(case: Case, rng: random.Random) -> Case:
    """The case of buckets; its options are those of the class and, under `config`, fields of the configuration."""
    shards = rng.random() < 0.6
    policy = case.policy
    config: dict[str, object] = {
        "use_distributed_optimizer": shards,
        "overlap_grad_reduce": rng.random() < 0.7,
        "average_in_collective": case.options.get("average_in_collective", False),
        "check_for_nan_in_grad": case.options.get("report_nan_in_param_grad", False),
        "bucket_size": rng.choice([None, 1, 20, 60, 200, 1000]),
        "gradient_reduce_div_fusion": rng.random() < 0.7 or case.options.get("average_in_collective", False),
        "pad_buckets_for_high_nccl_busbw": rng.random() < 0.15,
        "megatron_fsdp_main_params_dtype": policy.main_params_dtype,
        "megatron_fsdp_main_grads_dtype": policy.main_grads_dtype,
        "megatron_fsdp_grad_comm_dtype": policy.grad_comm_dtype,
    }
    if any(block.sometimes and block.calls > 1 and block.checkpoint == "reentrant" for block in case.blocks):
        # Gradients of such a layer come once or twice, as data decide, which overlap refuses (docs/ddp.md).
        config["overlap_grad_reduce"] = False
    if shards and case.mesh.outer:
        config["num_distributed_optimizer_instances"] = case.mesh.outer
    if shards and rng.random() < 0.7:
        config["overlap_param_gather"] = True
        config["align_param_gather"] = rng.random() < 0.4
    if case.compute is torch.float32 and rng.random() < 0.2:
        config["param_name_patterns_for_fp32_local_accumulation"] = rng.choice([("all",), ("*.core.*", "*weight")])
    delayable = not case.mesh.tensor and any(block.kind == "mlp" for block in case.blocks)
    config["delay_wgrad_compute"] = delayable and rng.random() < 0.3
    options = {name: case.options[name] for name in _CARRIED_OVER if name in case.options} | {"config": config}
    mesh = MeshPlan(case.mesh.data_parallel, 0, case.mesh.tensor)
    return replace(case, door="buckets", mesh=mesh, strategy=int(shards), outer_strategy=0, options=options)
