"""A converted checkpoint of Megatron's is one of the trainer's decoder: its logits, and the steps that follow."""

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_fsdp.checkpoint.convert.convert import Steps, convert
from megatron_fsdp.checkpoint.convert.plan import ConvertOptions
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.train.checkpoints import Origin, RunCheckpoints
from megatron_fsdp.train.loop import train
from tests.conftest import RunRanks
from tests.support.on_ranks import on_ranks, refusal
from tests.support.torch_dist import SLOTS, STEP, GptSpec, Truth, WriteOptions, make_truth, write_torch_dist
from tests.train.models.runs import DECODER, NoCheckpoints, Results, Silent, job_of, plain_steps, prepare, results_of

HEADS, GROUPS, HEAD_DIM, SAMPLES = 4, 2, 4, 35
GATED = GptSpec(hidden=16, ffn=24, vocabulary=64)
TIED_GELU = GptSpec(hidden=16, ffn=24, vocabulary=64, swiglu=False, bias=True, tied=True)
LLAMA_STYLE = {**DECODER, "untie_embeddings_and_output_weights": True, "train_iters": STEP + 2, "lr_decay_iters": 9}
GPT_STYLE = {**DECODER, "swiglu": False, "add_bias_linear": True, "train_iters": STEP + 2, "lr_decay_iters": 9}
SHARDED = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
FSDP2 = {"use_torch_fsdp2": True}


def truth_of(spec: GptSpec) -> Truth:
    """Weights and optimizer state of a run, with queries in groups."""
    found = make_truth(spec)
    rows = (HEADS + 2 * GROUPS) * HEAD_DIM
    for tensors in (found.masters, *found.states.values()):
        for name, tensor in tensors.items():
            if "linear_qkv.weight" in name or "linear_qkv.bias" in name:
                tensors[name] = tensor[:rows].clone()
    return found


def converted(folder: Path, truth: Truth, swiglu: str = "auto") -> str:
    """The folder of a run in Megatron's format, converted."""

    def say_samples(common: dict[str, Any]) -> None:
        common["args"].consumed_train_samples = SAMPLES

    options = WriteOptions(tp=2, change_common=say_samples)
    source = write_torch_dist(folder / "torch_dist" / f"iter_{STEP:07}", truth, options)
    out = folder / "fsdp_dtensor" / f"iter_{STEP:07}"
    convert(source, out, ConvertOptions(swiglu=swiglu), steps=Steps(write_tracker=True))
    return str(out.parent)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps=1e-5)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of [batch, length, head_dim], one pair of numbers at a time."""
    half, out = HEAD_DIM // 2, x.clone()
    for position in range(x.shape[1]):
        for pair in range(half):
            angle = position * 10_000.0 ** (-pair / half)
            first, second = x[:, position, pair], x[:, position, pair + half]
            out[:, position, pair] = first * math.cos(angle) - second * math.sin(angle)
            out[:, position, pair + half] = second * math.cos(angle) + first * math.sin(angle)
    return out


def attention(p: Mapping[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    """As Megatron has it: the rows of each group are its queries, its key and its value."""
    x = normed(x, p[f"{prefix}.linear_qkv.layer_norm_weight"])
    groups = functional.linear(x, p[f"{prefix}.linear_qkv.weight"], p.get(f"{prefix}.linear_qkv.bias"))
    mixed = []
    for group in groups.chunk(GROUPS, dim=-1):
        *queries, key, value = group.split(HEAD_DIM, dim=-1)
        for query in queries:
            scores = rotated(query) @ rotated(key).transpose(1, 2) / math.sqrt(HEAD_DIM)
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            mixed.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value)
    return functional.linear(
        torch.cat(mixed, -1), p[f"{prefix}.linear_proj.weight"], p.get(f"{prefix}.linear_proj.bias")
    )


def mlp(p: Mapping[str, Tensor], prefix: str, x: Tensor, gated: bool) -> Tensor:
    x = normed(x, p[f"{prefix}.linear_fc1.layer_norm_weight"])
    x = functional.linear(x, p[f"{prefix}.linear_fc1.weight"], p.get(f"{prefix}.linear_fc1.bias"))
    if gated:
        gate, up = x.chunk(2, dim=-1)
        x = functional.silu(gate) * up
    else:
        x = functional.gelu(x)
    return functional.linear(x, p[f"{prefix}.linear_fc2.weight"], p.get(f"{prefix}.linear_fc2.bias"))


def megatron_logits(p: Mapping[str, Tensor], spec: GptSpec, tokens: Tensor) -> Tensor:
    """Logits of Megatron's decoder, from parameters under its names."""
    x = p["embedding.word_embeddings.weight"][tokens]
    for layer in range(spec.layers):
        x = x + attention(p, f"decoder.layers.{layer}.self_attention", x)
        x = x + mlp(p, f"decoder.layers.{layer}.mlp", x, spec.swiglu)
    head = p.get("output_layer.weight", p["embedding.word_embeddings.weight"])
    return functional.linear(normed(x, p["decoder.final_layernorm.weight"]), head)


def one_process(truth: Truth, values: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the two steps after the checkpoint, in plain torch under Megatron's names."""
    job = job_of(values, 1)
    params = {name: tensor.clone().requires_grad_() for name, tensor in truth.masters.items()}
    options = job.options.optimizer
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.ndim == 2 and "embedding" not in name else 0.0}
        for name, p in params.items()
    ]
    optimizer = torch.optim.AdamW(groups, betas=(options.adam_beta1, options.adam_beta2), eps=options.adam_eps)
    for name, p in params.items():
        slots = {slot: truth.states[slot][name].clone() for slot in SLOTS}
        optimizer.state[p] = {"step": torch.tensor(float(STEP)), **slots}
    logits_of = partial(megatron_logits, params, truth.spec)
    return plain_steps(job, params.values(), logits_of, optimizer, done=(STEP, SAMPLES))


def load_and_train(values: dict[str, Any]) -> tuple[Tensor | None, Results, str]:
    """Logits right after loading, and the steps that follow."""
    run, watcher = prepare(values), Silent()
    origin = Origin(run.job.options.checkpoint.load)
    keeper = RunCheckpoints(run.job, run.trained, run.data, origin, watcher.say)
    with keeper.until_saved():
        done = keeper.start()
        with torch.no_grad():
            logits = run.trained.model(torch.arange(8)[None])
        train(run, watcher, NoCheckpoints(progress=done))
    return logits, results_of(run, watcher), "\n".join(watcher.said)


@pytest.mark.full(short=["2-llama", "1-gpt"])
@pytest.mark.parametrize(
    ("ranks", "spec", "values", "engine"),
    [
        pytest.param(2, GATED, LLAMA_STYLE, SHARDED, id="2-llama"),
        pytest.param(1, TIED_GELU, GPT_STYLE, SHARDED, id="1-gpt"),
        pytest.param(3, TIED_GELU, GPT_STYLE, FSDP2, id="3-gpt-fsdp2"),
        pytest.param(1, GATED, LLAMA_STYLE, FSDP2, id="1-llama-fsdp2"),
    ],
)
def test_the_trainer_goes_on_from_a_run_of_megatron(
    run_ranks: RunRanks, tmp_path: Path, spec: GptSpec, values: dict[str, Any], engine: dict[str, Any], ranks: int
) -> None:
    truth = truth_of(spec)
    load = converted(tmp_path, truth)
    expected = megatron_logits(truth.masters, spec, torch.arange(8)[None])
    losses, norms = one_process(truth, values)
    for logits, found, said in run_ranks(ranks, load_and_train, {**values, **engine, "load": load}):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.losses, losses, rtol=2e-5, atol=0)
        torch.testing.assert_close(found.norms, norms, rtol=2e-4, atol=0)
        assert f"step {STEP}, 0 s of training" in said
        assert "0 missing, 0 unexpected, 0 of another shape" in said


@on_ranks(1)
def test_weights_alone_begin_a_new_run(tmp_path: Path) -> None:
    truth = truth_of(GATED)
    load = converted(tmp_path, truth, swiglu="none")  # fc1 in one piece
    logits, found, _ = load_and_train({**LLAMA_STYLE, **SHARDED, "load": load, "finetune": True})
    expected = megatron_logits(truth.masters, GATED, torch.arange(8)[None])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert len(found.losses) == STEP + 2


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_layers": 3}, "model.module.blocks.2.attention.query_key_value.weight"),
        ({"num_layers": 1}, "model.module.blocks.1.attention.query_key_value.weight"),
        ({"num_query_groups": 4}, r"\(has \(32, 16\), wanted \(48, 16\)\)"),
        (
            {"make_vocab_size_divisible_by": 128},
            "has a vocabulary of 64 ids and this model one of 128: give the tokenizer",
        ),
    ],
)
@on_ranks(1)
def test_a_model_of_another_shape_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    values = {**LLAMA_STYLE, **SHARDED, "load": converted(tmp_path, truth_of(GATED)), **change}
    assert re.search(told, refusal(load_and_train, values, error=CheckpointError))


@on_ranks(1)
def test_what_is_not_converted_yet_is_refused_with_the_command(tmp_path: Path) -> None:
    source = write_torch_dist(tmp_path / f"iter_{STEP:07}", truth_of(GATED), WriteOptions())
    assert refusal(load_and_train, {**LLAMA_STYLE, **SHARDED, "load": str(source)}) == (
        f"{source} is a torch_dist checkpoint of Megatron's: convert it (mfsdp checkpoint convert {source} FOLDER) and "
        "load that folder"
    )
