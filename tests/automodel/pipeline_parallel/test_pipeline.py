"""What a step may be given, and what a pipeline refuses with the same outcome on every rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from megatron_fsdp.automodel import FSDP2Config
from megatron_fsdp.automodel.pipeline_parallel.pipeline import Pipeline, build_pipeline
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from megatron_fsdp.errors import ConfigurationError
from tests.automodel.training import managed, reference
from tests.support.counting import OpCounts
from tests.support.language_models import batch_of, build, label_count, token_loss_sum
from tests.support.on_ranks import on_ranks, refusal

CPU = torch.device("cpu")


def stages() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))


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


def assert_gradients(pipeline: Pipeline, model: nn.Module) -> None:
    seen = 0
    for name, param in pipeline.named_parameters():
        expected = model.get_parameter(pipeline.tied_copies.get(name, name)).grad
        assert (param.grad is None) == (not param.requires_grad), name
        if param.grad is not None:
            torch.testing.assert_close(param.grad, expected, rtol=1e-4, atol=1e-6, msg=name.__add__)
            seen += 1
    assert seen


def padded() -> Tensor:
    mask = torch.ones_like(batch_of()["input_ids"])
    for row, padding in enumerate((0, 3, 5, 1)):
        mask[row, 16 - padding :] = 0
    return mask


PACKED = torch.cat([torch.arange(7), torch.arange(9)])
INPUTS: dict[str, dict[str, Tensor]] = {
    "gemma3": {"attention_mask": padded()},
    "mistral": {"attention_mask": padded()},
    "qwen3": {"position_ids": PACKED.expand(4, -1)},
    "llama": {"position_ids": PACKED.unsqueeze(0) + 2},
}


@pytest.mark.full(short=["gemma3"])
@pytest.mark.parametrize("kind", INPUTS)
@on_ranks(2)
def test_masks_and_positions_reach_every_stage(kind: str) -> None:
    batch, inputs = batch_of(), INPUTS[kind]
    pipeline, model = pipeline_of(kind, stages()), build(kind)
    loss = truth_of(model, batch, **inputs)
    found = pipeline.step(**batch, **inputs, inputs_of_others=None).item()
    torch.testing.assert_close(found, loss, rtol=1e-5, atol=0.0)
    assert_gradients(pipeline, model)
    assert abs(truth_of(build(kind), batch) - loss) > 1e-4  # the inputs matter


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


@pytest.mark.full(short=["losses", "several_batches", "from_meta"])
@pytest.mark.parametrize(
    "scenario",
    [losses, several_batches, frozen_stage, from_meta],
    ids=lambda scenario: scenario.__name__,
)
@on_ranks(2)
def test_steps_equal_one_process(scenario: Callable[[DeviceMesh], None]) -> None:
    scenario(stages())


@on_ranks(4)
def test_sharded_stages_gather_and_reduce_each_unit_once_in_a_step() -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.bfloat16)
    pipeline = managed(FSDP2Config(backend="gloo", mp_policy=policy), build("llama"), pp_size=2)
    for rows in (2, 4):  # the same on all ranks
        with OpCounts() as counts:
            loss = pipeline.step(**batch_of(rows)).item()
        assert (counts.collectives.gathers, counts.collectives.reductions) == (3, 3)  # two layers and the rest
        assert abs(loss / reference("llama", steps=1, rows=rows).losses[0] - 1) < 2e-2
        assert {p.grad.dtype for p in pipeline.parameters() if p.grad is not None} == {torch.float32}
        received = getattr(pipeline.stages[0].args_recv_info[0][0], "buffer", None)
        assert (received is None) == (dist.get_rank() < 2)  # the first stage receives none
        assert received is None or received.dtype == torch.bfloat16


@on_ranks(2)
def test_refusals_are_sentences_that_are_the_same_on_every_rank() -> None:
    """Calls by words of what is said; a step still works afterwards."""
    rank, mesh, batch = dist.get_rank(), stages(), batch_of()
    tokens, labels = batch["input_ids"], batch["labels"]

    def made(kind: str = "llama", cast: bool = False, **options: Any) -> Any:
        prepare = lambda part: part.half() if cast else part  # noqa: E731
        return build_pipeline(build(kind), mesh, PipelineConfig(**options), parallelize_stage=prepare, device=CPU)

    step, evaluate, forward = (getattr(made(), name) for name in ("step", "eval_step", "forward"))
    mask = {"attention_mask": torch.ones_like(tokens)} if rank else {}
    mean = {"loss_fn": lambda logits, labels: logits.mean() + labels.sum(), "scale_grads_in_schedule": True}
    calls: list[tuple[str, Callable[[], object]]] = [
        ("the shape of input_ids is (4, 16) on rank 0, (3, 16)", lambda: step(tokens[: 4 - rank], labels[: 4 - rank])),
        ("the checksum of labels is none on rank 0, ", lambda: step(tokens, labels if rank else None)),
        ("needs labels", lambda: step(tokens)),
        ("needs labels", lambda: evaluate(tokens)),
        ("use eval_step", lambda: forward(tokens, shift_labels=labels)),
        ("rank 1: ConfigurationError: labels has shape (4, 15)", lambda: step(tokens, labels[:, rank:])),
        ("the call is ", lambda: step(tokens, labels, **mask)),
        ("attention_mask has shape (3, 16)", lambda: step(tokens, labels, attention_mask=torch.ones(3, 16))),
        ("give one of them", lambda: step(tokens, labels, shift_labels=labels)),
        ("(rows, sequence)", lambda: step(tokens[0], labels[0])),
        ("make 1 microbatches, but 1F1B needs at least one for each of the 2", lambda: step(tokens[:1], labels[:1])),
        ("ranks differ: the checksum of input_ids is ", lambda: step(**batch_of(4, seed=1 + rank))),
        ("and the model knows 0 to 95", lambda: step(tokens + 90, labels)),
        ("use_cache=True has no effect in a pipeline", lambda: step(tokens, labels, use_cache=True)),
        ("give both", lambda: step(tokens, labels, dp_size=2)),
        ("num_label_tokens=0", lambda: step(tokens, labels, num_label_tokens=0)),
        (
            "4 rows does not divide into microbatches of pp_microbatch_size=3",
            lambda: made(pp_microbatch_size=3).step(tokens, labels),
        ),
        ("pp_batch_size=2", lambda: made(pp_batch_size=2).step(tokens, labels)),
        ("in 2 equal rounds; give a multiple of 2", lambda: made(pp_schedule="interleaved1f1b").step(**batch_of(5))),
        ("leave them out", lambda: made(**mean).step(tokens, labels, num_label_tokens=5)),
        ("make 1 microbatches", lambda: made(pp_microbatch_size=3, pp_batch_size=3)),
        ("cut or cast them differently", lambda: made("llama_tied", cast=rank == 1)),
        (
            "make 2 stages, 1 on each of 2 ranks, but Interleaved1F1B runs at least two stages",
            lambda: made(pp_schedule="interleaved1f1b", layers_per_stage=2),
        ),
    ]
    for words, call in calls:
        told = refusal(call, error=ConfigurationError)
        assert words in told
        assert "\n" not in told
    assert step(tokens, labels).item() > 0
