"""A converted checkpoint loads into a sharded model and optimizer, bit for bit, and training goes on as before."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard
from megatron_fsdp.checkpoint.convert.convert import Steps, convert
from megatron_fsdp.checkpoint.load import load_checkpoint
from tests.checkpoint.tools.builders import dcp_load
from tests.support.on_ranks import assert_equal_tensors, on_ranks, once
from tests.support.torch_dist import (
    SLOTS,
    STEP,
    GptSpec,
    Truth,
    WriteOptions,
    make_truth,
    parameter_shapes,
    split_halves,
    write_torch_dist,
)

# ---- a tiny GPT in plain torch whose parameters have Megatron's names ------------------------------------------------


class Named(nn.Module):
    """A module that reads parameters below it by name."""

    def __init__(self, spec: GptSpec) -> None:
        super().__init__()
        self.spec = spec

    def weight(self, name: str) -> Tensor:
        """A parameter below this module; of a gated fc1 both halves."""
        owner, _, last = name.rpartition(".")
        module = self.get_submodule(owner)
        if hasattr(module, last):
            return getattr(module, last)
        return torch.cat([getattr(module, f"{last}_w"), getattr(module, f"{last}_v")])

    def normed(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight(name))


class MegatronLayer(Named):
    """One transformer layer."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x, "self_attention.linear_qkv.layer_norm_weight")
        query, key, value = F.linear(normed, self.weight("self_attention.linear_qkv.weight")).chunk(3, dim=-1)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.linear(attended, self.weight("self_attention.linear_proj.weight"))
        if not self.spec.experts:
            return x + self.feed_forward(self.normed(x, "mlp.linear_fc1.layer_norm_weight"), "mlp")
        normed = self.normed(x, "pre_mlp_layernorm.weight")
        shares = F.linear(normed, self.weight("mlp.router.weight")).softmax(-1)  # all experts see all tokens
        for expert in range(self.spec.experts):
            x = x + shares[..., expert : expert + 1] * self.feed_forward(normed, "mlp.experts", str(expert))
        return x

    def feed_forward(self, x: Tensor, prefix: str, expert: str = "") -> Tensor:
        """SwiGLU of [gate ; up], or GELU."""
        hidden = F.linear(x, self.weight(f"{prefix}.linear_fc1.weight{expert}"))
        if self.spec.swiglu:
            gate, up = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * up
        else:
            hidden = F.gelu(hidden)
        return F.linear(hidden, self.weight(f"{prefix}.linear_fc2.weight{expert}"))


class MegatronGpt(Named):
    """int64 tokens (samples, tokens) -> logits.

    A converted checkpoint has each gated fc1 as `weight_w` and `weight_v`, so that it loads here key for key. With
    `split=False` the model holds one `weight`, as Megatron's live model does: for the loss before the conversion.
    """

    def __init__(self, spec: GptSpec, split: bool = True) -> None:
        super().__init__(spec)
        tensors = {name: torch.zeros(shape) for name, shape in parameter_shapes(spec).items()}
        for name, tensor in split_halves(tensors, split and spec.swiglu).items():
            *path, last = name.split(".")
            module: nn.Module = self
            for depth, step in enumerate(path):
                if not hasattr(module, step):
                    is_layer = path[:2] == ["decoder", "layers"] and depth == 2
                    module.add_module(step, MegatronLayer(spec) if is_layer else nn.Module())
                module = module.get_submodule(step)
            module.register_parameter(last, nn.Parameter(tensor.clone()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.weight("embedding.word_embeddings.weight"))
        for layer in self.get_submodule("decoder.layers").children():
            x = layer(x)
        return F.linear(self.normed(x, "decoder.final_layernorm.weight"), self.weight("output_layer.weight"))


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


SPECS = {"dense": GptSpec(layers=3), "gelu": GptSpec(swiglu=False), "mixture": GptSpec(experts=2)}
SAMPLES = 30  # divides among 1, 2, 3 and 5 ranks
GOLDEN_LOSS = 3.20144
"""Of the dense model, when this test was written."""


def tokens(spec: GptSpec, step: int) -> Tensor:
    return torch.randint(spec.vocabulary, (SAMPLES, 6), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, spec: GptSpec, rank: int = 0, ranks: int = 1
) -> list[float]:
    losses = []
    for step in range(3):
        loss = loss_of(model, tokens(spec, step).chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole_state(
    model: MegatronFSDP, live: dict[str, Any], slot: str, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """One slot of every parameter, whole, by letting it pose as the gradient."""
    for param in live.values():
        param.grad = optimizer.state[param][slot]
    found = {name.removeprefix("module."): g for name, g in model.full_gradients().items() if g is not None}
    model.zero_grad_buffer()
    return found


def plain_run(truth: Truth) -> list[float]:
    """One process that was given the truth."""
    model = MegatronGpt(truth.spec)
    gated = truth.spec.swiglu
    weights = split_halves(truth.masters, gated)
    model.load_state_dict(weights)
    named = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "lr": 0.005, "weight_decay": 0.0 if p.ndim == 1 else 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
            for p in named.values()
        ]
    )
    halves = {slot: split_halves(truth.states[slot], gated) for slot in SLOTS}
    for name, param in named.items():
        optimizer.state[param] = {
            "step": torch.tensor(float(STEP)),
            **{slot: halves[slot][name].clone() for slot in SLOTS},
        }
    return train(model, optimizer, truth.spec)


@pytest.mark.full(short=["2-dense", "3-gelu", "2-mixture"])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_ranks()
def test_a_converted_checkpoint_loads_strictly_and_trains_on(tmp_path: Path, name: str, num_ranks: int) -> None:
    """Into a fresh optimizer with other options."""
    truth, source, run = make_truth(SPECS[name]), tmp_path / "iter_0000007", tmp_path / "run"
    spec = truth.spec
    once(lambda: write_torch_dist(source, truth, WriteOptions(tp=2, generation=num_ranks)))  # all three generations
    convert(source, run / "iter_0000007", steps=Steps(write_tracker=True))
    bare = MegatronGpt(spec)
    groups = [[p for p in bare.parameters() if (p.ndim > 1) == is_decayed] for is_decayed in (True, False)]
    optimizer = torch.optim.AdamW([{"params": part} for part in groups if part], lr=1.0, weight_decay=1.0)
    model, optimizer = fully_shard(bare, optimizer, fsdp_unit_modules=[MegatronLayer])
    assert "0 missing, 0 unexpected, 0 of another shape" in str(load_checkpoint(model, optimizer, run, verify=True))
    live = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    weights = {name.removeprefix("module."): tensor for name, tensor in model.full_parameters().items()}
    assert_equal_tensors(weights, split_halves(truth.masters, spec.swiglu))
    for slot in SLOTS:
        states = split_halves(truth.states[slot], spec.swiglu)
        assert_equal_tensors(whole_state(model, live, slot, optimizer), states)
    losses = torch.tensor(train(model, optimizer, spec, dist.get_rank(), num_ranks))
    dist.all_reduce(losses)
    assert (losses / num_ranks).tolist() == pytest.approx(plain_run(truth), rel=1e-5)


def test_the_first_loss_after_conversion_is_the_last_one_before_it(tmp_path: Path) -> None:
    truth = make_truth(SPECS["dense"])
    before = MegatronGpt(truth.spec, split=False)  # as the run that saved had it
    before.load_state_dict(truth.masters)
    convert(write_torch_dist(tmp_path / "iter_0000007", truth), tmp_path / "fsdp")
    after = MegatronGpt(truth.spec)
    state = {f"module.{name}": value for name, value in after.state_dict().items()}
    dcp_load({"model": state}, tmp_path / "fsdp")  # torch's own loader, into the memory of the model
    batch = tokens(truth.spec, 0)
    losses = [float(loss_of(model, batch).detach()) for model in (before, after)]
    assert losses[0] == losses[1] == pytest.approx(GOLDEN_LOSS, rel=1e-5)
