"""What a step may be given: masks, positions, losses, several batches before an update, other shapes, frozen stages."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from tests.automodel.pipeline_parallel.runs import CPU
from tests.automodel.small_models import batch_of, build, label_count, token_loss_sum
from tests.conftest import RunRanks


def pipeline_of(
    kind: str, mesh: DeviceMesh, prepare: Callable[[nn.Module], nn.Module] = lambda part: part, **options: Any
) -> Pipeline:
    return build_pipeline(build(kind), mesh, PipelineConfig(**options), parallelize_stage=prepare, device=CPU)


def truth_of(model: nn.Module, batch: dict[str, Tensor], **inputs: Tensor) -> float:
    """Loss of one process, gradients added to the model's."""
    logits = model(input_ids=batch["input_ids"], use_cache=False, **inputs).logits
    loss = token_loss_sum(logits, batch["labels"]) / label_count(batch["labels"])
    loss.backward()
    return loss.item()


def assert_gradients(pipeline: Pipeline, model: nn.Module, scale: float = 1.0) -> None:
    seen = 0
    for name, param in pipeline.named_parameters():
        expected = model.get_parameter(pipeline.tied_copies.get(name, name)).grad
        assert (param.grad is None) == (not param.requires_grad), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad, expected * scale, rtol=1e-4, atol=1e-6, msg=name.__add__)
            seen += 1
    assert seen


def masks_and_positions(mesh: DeviceMesh) -> None:
    batch = batch_of()
    mask = torch.ones_like(batch["input_ids"])
    for row, padding in enumerate((0, 3, 5, 1)):
        mask[row, 16 - padding :] = 0
    packed = torch.cat([torch.arange(7), torch.arange(9)])
    for kind, inputs in (
        ("gemma3", {"attention_mask": mask}),
        ("mistral", {"attention_mask": mask}),
        ("qwen3", {"position_ids": packed.expand(4, -1)}),
        ("llama", {"position_ids": packed.unsqueeze(0) + 2}),
    ):
        pipeline, model = pipeline_of(kind, mesh), build(kind)
        loss = truth_of(model, batch, **inputs)
        torch.testing.assert_close(
            pipeline.step(**batch, **inputs, inputs_of_others=None).item(), loss, rtol=1e-5, atol=0.0
        )
        assert_gradients(pipeline, model)
        plain = build(kind)
        assert abs(truth_of(plain, batch) - loss) > 1e-4, kind  # the inputs matter


def mean_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def label_smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1)


def losses(mesh: DeviceMesh) -> None:
    batch = batch_of()
    shifted = torch.full_like(batch["labels"], -100)
    shifted[:, :-1] = batch["labels"][:, 1:]
    pipeline, model = pipeline_of("llama", mesh, pp_microbatch_size=2, pp_batch_size=4), build("llama")
    loss = truth_of(model, batch)
    assert abs(pipeline.step(batch["input_ids"], shift_labels=shifted).item() - loss) < 1e-5
    assert_gradients(pipeline, model)

    # Means of microbatches, averaged.
    pipeline, model = pipeline_of("llama", mesh, loss_fn=mean_of_labels, scale_grads_in_schedule=True), build("llama")
    logits = model(batch["input_ids"], use_cache=False).logits
    rows = [slice(row, row + 1) for row in range(4)]
    means = torch.stack([mean_of_labels(logits[row], shifted[row]) for row in rows])
    means.mean().backward()
    torch.testing.assert_close(pipeline.step(**batch), means.mean().detach(), rtol=1e-5, atol=0.0)
    assert_gradients(pipeline, model)

    # A sum of the user's own is divided by the number of labels.
    pipeline, model = pipeline_of("llama", mesh, loss_fn=label_smoothed), build("llama")
    total = label_smoothed(model(batch["input_ids"], use_cache=False).logits, shifted) / label_count(batch["labels"])
    total.backward()
    torch.testing.assert_close(pipeline.step(**batch), total.detach(), rtol=1e-5, atol=0.0)
    assert_gradients(pipeline, model)


def several_batches(mesh: DeviceMesh) -> None:
    """Gradients of batches of other shapes add up, those of tied embeddings too, and evaluation between leaves them."""
    pipeline, model = pipeline_of("llama_tied", mesh), build("llama_tied")
    for rows, sequence in ((4, 16), (2, 12), (2, 12), (4, 16)):
        batch = batch_of(rows, sequence, seed=sequence + rows)
        loss = truth_of(model, batch)
        assert abs(pipeline.eval_step(**batch).item() - loss) < 1e-5
        assert abs(pipeline.step(**batch).item() - loss) < 1e-5
    assert_gradients(pipeline, model)


def frozen_stage(mesh: DeviceMesh) -> None:
    """A stage without anything to train."""

    def freeze(part: nn.Module) -> nn.Module:
        for name, param in part.named_parameters():
            param.requires_grad_("layers.3" in name or "lm_head" in name)
        return part

    pipeline, model, batch = pipeline_of("qwen3", mesh, freeze), build("qwen3"), batch_of()
    loss = truth_of(model, batch)
    assert abs(pipeline.step(**batch).item() - loss) < 1e-5
    if pipeline.has_last_stage:
        assert_gradients(pipeline, model)


def recomputation(mesh: DeviceMesh) -> None:
    """Layers of a stage can be recomputed as those of a whole model."""

    def recompute(part: nn.Module) -> nn.Module:
        part.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        return part

    pipeline, model, batch = pipeline_of("gemma3", mesh, recompute), build("gemma3"), batch_of()
    loss = truth_of(model, batch)
    assert abs(pipeline.step(**batch).item() - loss) < 1e-5
    assert_gradients(pipeline, model)


def from_meta(mesh: DeviceMesh) -> None:
    """A model without memory is cut first; a stage then gets memory for what it has."""
    with torch.device("meta"):
        hollow = build("gemma3")
    real = build("gemma3")

    def fill(part: nn.Module) -> nn.Module:
        assert all(param.is_meta for param in part.parameters())
        part.to_empty(device="cpu")
        for name, buffer in part.named_buffers():
            buffer.copy_(real.get_buffer(name))
        return part

    pipeline = build_pipeline(hollow, mesh, PipelineConfig(), parallelize_stage=fill, device=CPU)
    pipeline.load_state_dict({name: value for name, value in real.state_dict().items() if name != "lm_head.weight"})
    batch = batch_of()
    loss = truth_of(real, batch)
    assert abs(pipeline.step(**batch).item() - loss) < 1e-5
    assert_gradients(pipeline, real)
    assert pipeline.state_dict().keys() == {name for name, _ in pipeline.named_parameters()}


SCENARIOS = (masks_and_positions, losses, several_batches, frozen_stage, recomputation, from_meta)


def run_scenarios() -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    for scenario in SCENARIOS:
        scenario(mesh)
    return [scenario.__name__ for scenario in SCENARIOS]


def test_steps_with_all_kinds_of_inputs_equal_one_process(run_ranks: RunRanks) -> None:
    names = [scenario.__name__ for scenario in SCENARIOS]
    assert run_ranks(2, run_scenarios) == [names, names]
