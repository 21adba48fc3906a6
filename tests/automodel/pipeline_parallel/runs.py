"""What ranks do in tests of pipelines: train a small model in stages, and give back what a comparison needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron_fsdp.automodel.architecture import find_layers
from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from tests.automodel.process_groups import destroy
from tests.automodel.small_models import batch_of, build, label_count
from tests.automodel.training import whole
from tests.support.op_counts import OpCounts

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """One training run."""

    kind: str
    schedule: str = "1f1b"
    microbatch_size: int = 1
    rows: int = 4
    steps: int = 2
    changes: dict[str, Any] = field(default_factory=dict)
    layers_per_stage: int | None = None
    reshard: bool = False


@dataclass
class StageRun:
    """What one rank saw."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: list[dict[str, Tensor]]
    logits: Tensor | None
    eval_loss: float
    numel: int
    copies: dict[str, str]


def make(case: Case, mesh: DeviceMesh, prepare: Callable[[nn.Module], nn.Module] = lambda part: part) -> Pipeline:
    config = PipelineConfig(case.schedule, case.microbatch_size, layers_per_stage=case.layers_per_stage)
    model = build(case.kind, **case.changes)
    return build_pipeline(model, mesh, config, parallelize_stage=prepare, device=CPU)


def train(pipeline: Pipeline, case: Case, *, dp_rank: int = 0, dp_size: int = 1) -> StageRun:
    """Steps of AdamW as `reference` makes them; each data-parallel rank takes its rows."""
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-2)
    share = slice(dp_rank * case.rows // dp_size, (dp_rank + 1) * case.rows // dp_size)
    first = {name: value[share] for name, value in batch_of(case.rows, seed=1).items()}
    logits = pipeline.forward(first["input_ids"])
    eval_loss = pipeline.eval_step(**first).item()
    numel = sum(param.numel() for param in pipeline.parameters())
    run = StageRun([], [], [], logits, eval_loss, numel, pipeline.tied_copies)
    for step in range(case.steps):
        batch = batch_of(case.rows, seed=1 + step)
        tokens = {"num_label_tokens": label_count(batch["labels"]), "dp_size": dp_size} if dp_size > 1 else {}
        optimizer.zero_grad()
        loss = pipeline.step(batch["input_ids"][share], batch["labels"][share], **tokens)
        run.losses.append(loss.item())
        named = list(pipeline.named_parameters())
        run.gradients.append({name: whole(param.grad) for name, param in named if param.grad is not None})
        optimizer.step()
        run.parameters.append({name: whole(param) for name, param in named})
    return run


def run_cases(cases: list[Case]) -> list[StageRun]:
    """Each case over all ranks as one pipeline."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    return [train(make(case, mesh), case) for case in cases]


def sharder(mesh: DeviceMesh, *, reshard: bool = False, **options: Any) -> Callable[[nn.Module], nn.Module]:
    """FSDP2 on the layers and the whole of a part."""

    def shard(part: nn.Module) -> nn.Module:
        for layer in find_layers(part).modules():
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard, **options)
        return fully_shard(part, mesh=mesh, reshard_after_forward=reshard, **options)

    return shard


@dataclass
class Counted:
    """What one step of sharded stages sent and gave."""

    gathers: int
    reductions: int
    loss: float
    received_dtype: torch.dtype | None
    gradient_dtypes: set[torch.dtype]


def run_sharded(cases: list[Case], counted_rows: tuple[int, ...]) -> tuple[list[StageRun], list[Counted]]:
    """Each case over two pipelines of two ranks, stages sharded by FSDP2; then a step in bf16 for each of rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = {"dp_rank": mesh["dp"].get_local_rank(), "dp_size": 2}
    runs = [train(make(case, mesh["pp"], sharder(mesh["dp"], reshard=case.reshard)), case, **place) for case in cases]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.bfloat16)
    pipeline = build_pipeline(
        build("llama"),
        mesh["pp"],
        PipelineConfig(),
        parallelize_stage=sharder(mesh["dp"], mp_policy=policy),
        device=CPU,
        activation_dtype=torch.bfloat16,
    )
    counted = [count(pipeline, rows) for rows in counted_rows]
    destroy(mesh[name].get_group() for name in ("pp", "dp"))
    return runs, counted


def count(pipeline: Pipeline, rows: int) -> Counted:
    """Collectives of a step; the rows are the same on all ranks."""
    with OpCounts(num_ranks=2) as counts:
        loss = pipeline.step(**batch_of(rows)).item()
    received = pipeline.stages[0].args_recv_info[0][0].buffer
    grads = {param.grad.dtype for param in pipeline.parameters() if param.grad is not None}
    sent = counts.collectives
    return Counted(sent.gathers, sent.reductions, loss, None if received is None else received.dtype, grads)
