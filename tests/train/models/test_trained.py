"""What every engine does with a batch: how it is copied, what is rounded, and where weights begin."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megatron_fsdp.train.models.trained import build_optimizer, token_losses
from megatron_fsdp.train.options import OptimizerOptions
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks
from tests.train.models.runs import DECODER, LLAMA, initial_weights, job_of, plain_model, prepare, some_feed, train_here


class _Copies(TorchFunctionMode):
    """Notes of every `Tensor.to` of a tensor on the CPU whether it lets the host go on."""

    def __init__(self, batch_of: set[int]) -> None:
        super().__init__()
        self.batch_of, self.found = batch_of, list[bool]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.to and args[0].data_ptr() in self.batch_of:
            self.found.append(bool(kwargs.get("non_blocking")))
        return func(*args, **kwargs)


@pytest.mark.parametrize(
    "values",
    [{**DECODER, "use_megatron_fsdp": True}, {**LLAMA, "use_torch_fsdp2": True, "pipeline_model_parallel_size": 2}],
)
@on_ranks(2)
def test_inputs_targets_and_factors_are_copied_beside_the_host(values: dict[str, Any]) -> None:
    run = prepare(values)
    batches = run.feed.batches(0)
    factors = [batch.weights.clone() for batch in batches]
    taken = [*factors, *(batch.inputs for batch in batches), *(batch.targets for batch in batches)]
    with _Copies({tensor.data_ptr() for tensor in taken}) as copies:
        run.trained.accumulate(batches, factors)
    microbatches = 2 if "use_megatron_fsdp" in values else 3
    assert copies.found == [True] * (3 * microbatches)


OTHER = {
    **DECODER,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "qk_layernorm": True,
    "kv_channels": 6,
}
UNTIED = {**DECODER, "untie_embeddings_and_output_weights": True}


@pytest.mark.full(cover=1)
@pytest.mark.parametrize("model", [OTHER, UNTIED])
@pytest.mark.parametrize(
    "engine",
    [
        {"use_megatron_fsdp": True},
        {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim", "bf16": True},
        {"use_torch_fsdp2": True, "bf16": True},
    ],
)
def test_initial_weights_are_the_same_bit_for_bit(
    run_ranks: RunRanks, model: dict[str, Any], engine: dict[str, Any]
) -> None:
    plain, meta = (
        run_ranks(2, initial_weights, {**model, **engine, "init_model_with_meta_device": is_meta})
        for is_meta in (False, True)
    )
    for built, drawn in zip(plain, meta, strict=True):
        assert built.keys() == drawn.keys()
        assert all(torch.equal(built[name], value) for name, value in drawn.items())
    drawn = meta[0]["blocks.1.feed_forward.output.weight"]
    assert drawn.std().item() == pytest.approx(0.1 / 2, rel=0.1)  # the root of 2 * 2 layers


def test_options_of_the_optimizer_are_those_of_its_groups() -> None:
    model = nn.Linear(2, 2)
    for options, values in (
        (
            OptimizerOptions(lr=0.5, weight_decay=0.25, adam_beta1=0.1, adam_beta2=0.2, adam_eps=0.3),
            {"lr": 0.5, "betas": (0.1, 0.2), "eps": 0.3},
        ),
        (OptimizerOptions("sgd", lr=0.5, weight_decay=0.25, sgd_momentum=0.4), {"lr": 0.5, "momentum": 0.4}),
    ):
        groups = build_optimizer(model, options).param_groups
        assert [group["params"] for group in groups] == [[model.weight], [model.bias]]
        assert [group["weight_decay"] for group in groups] == [0.25, 0.0]
        assert all(group[name] == value for group in groups for name, value in values.items())


RANKS = 2
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
BUCKETS = {"overlap_grad_reduce": True, "use_distributed_optimizer": True}
FSDP2 = {"use_torch_fsdp2": True}
BF16 = {"bf16": True}
FP16 = {"fp16": True, "initial_loss_scale": 256.0}
SENT_IN_BF16 = {"grad_reduce_in_bf16": True}


@dataclass
class Plain:
    """Losses, norms and the optimizer's weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def train_rounding_alike(values: dict[str, Any], sent: torch.dtype) -> Plain:
    """Weights for compute are rounded from float32; each microbatch's gradient of each rank is rounded on its way."""
    job = job_of(values, RANKS)
    model = plain_model(job)
    if job.engine != "torch_fsdp2":  # weights of this package's engine begin in the dtype of compute
        model = model.to(job.dtype)
    main = copy.deepcopy(model).float()
    model = model.to(job.dtype)
    optimizer = build_optimizer(main, job.options.optimizer)
    feeds = [some_feed(job, rank) for rank in range(RANKS)]
    scale = job.options.training.initial_loss_scale if job.options.training.fp16 else 1.0
    found = Plain([], [], {})
    for step in range(job.train_iters):
        loss, sums = 0.0, [torch.zeros_like(parameter) for parameter in main.parameters()]
        for batch in (batch for feed in feeds for batch in feed.batches(step * job.batch.total)):
            part = (token_losses(model(batch.inputs), batch.targets) * batch.factors_per_sample(job.batch.total)).sum()
            gradients = torch.autograd.grad(part * RANKS * scale, list(model.parameters()))
            loss += part.item()
            for total, gradient in zip(sums, gradients, strict=True):
                total += gradient.to(sent).float() / RANKS
        for parameter, total in zip(main.parameters(), sums, strict=True):
            parameter.grad = total / scale
        found.norms.append(nn.utils.clip_grad_norm_(main.parameters(), job.options.optimizer.clip_grad).item())
        found.losses.append(loss)
        for group in optimizer.param_groups:
            group["lr"] = job.schedule.rate(step)
        optimizer.step()
        with torch.no_grad():
            for parameter, rounded in zip(main.parameters(), model.parameters(), strict=True):
                rounded.copy_(parameter)
    found.weights = {name: parameter.detach() for name, parameter in main.named_parameters()}
    return found


@pytest.mark.full(short=["values3-sent3"])
@pytest.mark.parametrize(
    ("values", "sent"),
    [
        ({**SHARDED, **BF16}, torch.float32),
        ({**BUCKETS, **BF16}, torch.float32),
        ({**FSDP2, **BF16}, torch.float32),
        ({**SHARDED, **FP16}, torch.float32),
        ({**FSDP2, **FP16}, torch.float32),
        ({**SHARDED, **SENT_IN_BF16}, torch.bfloat16),
        ({**SHARDED, "megatron_fsdp_grad_comm_dtype": torch.float16}, torch.float16),
    ],
)
def test_only_what_is_said_is_rounded(run_ranks: RunRanks, values: dict[str, Any], sent: torch.dtype) -> None:
    asked = {**DECODER, **values, "global_batch_size": 11, "untie_embeddings_and_output_weights": True}
    plain = train_rounding_alike(asked, sent)
    for found in run_ranks(RANKS, train_here, asked):
        torch.testing.assert_close(found.losses, plain.losses, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.norms, plain.norms, rtol=3e-6, atol=0)
        for name, value in plain.weights.items():
            torch.testing.assert_close(found.weights[name], value, rtol=0, atol=5e-6)
