"""A profile without memory equals what real tensors need on the CPU, segment by segment."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

pytest.importorskip("transformers")

from megatron_fsdp import fully_shard_model
from megatron_fsdp.engine.observer import Observer, Phase
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.activations import kernels_of, profile_compute
from megatron_fsdp.plan.compute_profile import ComputeProfile, Event, Segment
from megatron_fsdp.plan.recompute import recomputing
from megatron_fsdp.plan.setup import Recompute
from tests.conftest import RunRanks
from tests.support.counting import LiveBytes, on_meta, token_batch
from tests.support.language_models import LAYERS, SMALL_MODELS, build_small, unit_names
from tests.support.zoo import (
    FLOOR_NUMEL,
    FLOORS,
    HIDDEN,
    TOWER_FEATURES,
    Floor,
    TinyTransformer,
    Tower,
    build_partly_frozen_transformer,
    tower_loss,
)

SAMPLES = 10
FLOAT = 4


def mean_square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def first_token_loss(logits: Tensor) -> Tensor:
    """Cross-entropy with token 0 everywhere."""
    flat = logits.flatten(0, -2)
    return F.cross_entropy(flat, torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device))


@dataclass(frozen=True)
class Case:
    """A model, its inputs and its loss."""

    build: Callable[[], nn.Module]
    inputs: Any
    units: list[str]
    loss_fn: Callable[[Any], Tensor] | None = None


def build_attention() -> nn.Module:
    """Layers of torch, whose attention is reached through `nn.MultiheadAttention`."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.1, batch_first=True) for _ in range(2)))


def build_convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1))


TOWER_UNITS = ["", *(f"floors.{index}" for index in range(FLOORS))]
BLOCK_UNITS = ["", *(f"blocks.{index}" for index in range(3))]
TOKENS = torch.arange(32).view(4, 8) % TinyTransformer.VOCABULARY

CASES = {
    "tower": Case(Tower, torch.linspace(-1, 1, SAMPLES * TOWER_FEATURES).view(SAMPLES, -1), TOWER_UNITS, mean_square),
    "transformer": Case(TinyTransformer, TOKENS, BLOCK_UNITS, first_token_loss),
    "tied": Case(partial(TinyTransformer, tied=True), TOKENS, BLOCK_UNITS, first_token_loss),
    "frozen": Case(build_partly_frozen_transformer, TOKENS, BLOCK_UNITS, first_token_loss),
    "torch-attention": Case(build_attention, torch.ones(3, 7, 16), ["", "0", "1"], mean_square),
    "convolution": Case(build_convolution, torch.ones(4, 5, 6), [""], mean_square),
    **{name: Case(lambda name=name: build_small(name), token_batch(), unit_names(name)) for name in SMALL_MODELS},
}


def profile_on_meta(case: Case, recompute: Recompute = "none", **options: Any) -> ComputeProfile:
    with torch.device("meta"):
        model = case.build()
    options = {"kernels": "cpu", **options}
    return profile_compute(
        model, on_meta(case.inputs), unit_names=case.units, loss_fn=case.loss_fn, recompute=recompute, **options
    )


def profile_on_cpu(case: Case, recompute: Recompute = "none") -> ComputeProfile:
    model = case.build()
    return profile_compute(model, case.inputs, unit_names=case.units, loss_fn=case.loss_fn, recompute=recompute)


@pytest.mark.full(short=["qwen3-moe"])
@pytest.mark.parametrize("name", CASES)
def test_peak_without_memory_is_that_of_real_tensors(name: str) -> None:
    """Besides those of parameters and inputs, while gradients of parameters die at once."""
    case, model = CASES[name], CASES[name].build()
    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))
    with LiveBytes() as live:
        output = model(**case.inputs) if isinstance(case.inputs, dict) else model(case.inputs)
        loss = case.loss_fn(output) if case.loss_fn is not None else output.loss
        del output
        loss.backward()
    assert profile_on_meta(case).peak_bytes == live.peak_bytes


def kept_in(profile: ComputeProfile, label: str) -> int:
    """Bytes that are alive more at the end of a segment than at its beginning."""
    place = [str(segment) for segment in profile.segments].index(label)
    return profile.segments[place + 1].begin_bytes - profile.segments[place].begin_bytes


def without_bandwidth(segment: Segment) -> Segment:
    """The segment but for what depends on how a device takes operators apart."""
    return replace(segment, moved_bytes=0, operators=0)


@pytest.mark.full(short=["mixtral-full", "gpt2-dropout-selective"])
@pytest.mark.parametrize("recompute", ["none", "full", "selective", "every_second_product", "mlp"])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2-dropout"])
def test_segments_without_memory_are_those_of_real_tensors(name: str, recompute: Recompute) -> None:
    found, expected = profile_on_meta(CASES[name], recompute), profile_on_cpu(CASES[name], recompute)
    assert list(map(without_bandwidth, found.segments)) == list(map(without_bandwidth, expected.segments))


def test_tower_by_hand() -> None:
    """A floor keeps its input (which the one below has as its sum), what relu gave, and nothing else."""
    profile = profile_on_meta(CASES["tower"])
    forwards = [segment for segment in profile.segments if segment.event is Event.FORWARD_BEGINS and segment.unit]
    kept = FLOAT * SAMPLES * (HIDDEN + TOWER_FEATURES)
    assert [kept_in(profile, f"F{unit}>") for unit in range(1, FLOORS + 1)] == [kept] * FLOORS
    assert [segment.flops for segment in forwards] == [2 * SAMPLES * FLOOR_NUMEL] * FLOORS
    backwards = [segment for segment in profile.segments if segment.event is Event.BACKWARD_BEGINS and segment.unit]
    assert [segment.flops for segment in backwards[:-1]] == [4 * SAMPLES * FLOOR_NUMEL] * (FLOORS - 1)
    gradient = FLOAT * TOWER_FEATURES * HIDDEN
    last = backwards[0]
    # its input, what relu gave, the gradient of its output (which goes on to the one below) and of `down`
    held = (FLOORS - 1) * kept + FLOAT * SAMPLES * (TOWER_FEATURES + HIDDEN)
    assert last.peak_bytes >= held + gradient
    assert last.gradients == [f"floors.{FLOORS - 1}.down.weight", f"floors.{FLOORS - 1}.up.weight"]


def test_loops_over_experts_are_planned_as_grouped_products_and_the_model_is_left_as_it_was() -> None:
    with torch.device("meta"):
        model: Any = build_small("mixtral", experts_implementation="eager")
    before = [(name, id(param), param.grad) for name, param in model.named_parameters()]
    batch, names = on_meta(token_batch()), unit_names("mixtral")
    looped = profile_compute(model, batch, unit_names=names, kernels="cpu", recompute="full")
    assert looped == profile_on_meta(CASES["mixtral"], "full")
    assert model.config._experts_implementation == "eager"
    assert [(name, id(param), param.grad) for name, param in model.named_parameters()] == before
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert all(not param._post_accumulate_grad_hooks for param in model.parameters())


def attention(mask: Tensor | None = None, **changes: Any) -> Tensor:
    shape = {"heads": 4, "key_heads": 4, "features": 16, "value_features": 16, "dtype": torch.bfloat16, **changes}
    dtype = shape["dtype"]
    query = torch.empty(2, shape["heads"], 8, shape["features"], dtype=dtype, device="meta", requires_grad=True)
    key = torch.empty(2, shape["key_heads"], 8, shape["features"], dtype=dtype, device="meta", requires_grad=True)
    value = torch.empty(2, shape["key_heads"], 8, shape["value_features"], dtype=dtype, device="meta")
    grouped = shape["heads"] != shape["key_heads"]
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def kernel_of(result: Tensor) -> str:
    assert result.grad_fn is not None
    return result.grad_fn.name()


def test_kernels_are_those_that_a_device_would_choose() -> None:
    mask = torch.empty(8, 8, dtype=torch.bool, device="meta")
    with kernels_of("cuda"):
        assert "FlashAttention" in kernel_of(attention())
        assert "FlashAttention" in kernel_of(attention(key_heads=2))
        assert "EfficientAttention" in kernel_of(attention(dtype=torch.float32))
        assert "EfficientAttention" in kernel_of(attention(value_features=8))
        assert "EfficientAttention" in kernel_of(attention(mask))
        assert "Attention" not in kernel_of(attention(mask, key_heads=2))
    with kernels_of("cpu"):
        assert "FlashAttentionForCpu" in kernel_of(attention(mask))
        assert "Attention" not in kernel_of(attention(value_features=8))
    assert "Attention" not in kernel_of(attention())


def test_what_cannot_be_profiled_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        floor = Floor()
    given = torch.empty(2, 4, device="meta")
    with pytest.raises(ConfigurationError, match=r"scalar loss with a gradient and got \(2, 4\) from the model"):
        profile_compute(model, given, unit_names=[""])
    floor.up.weight.grad = torch.empty_like(floor.up.weight)
    with pytest.raises(ConfigurationError, match=r"up.weight has a gradient already"):
        profile_compute(floor, torch.empty(2, TOWER_FEATURES, device="meta"), unit_names=[""], loss_fn=mean_square)
    for forward, words in ((_by_value, "asks for the value"), (_by_shape, "no shape without values")):
        model.forward = forward.__get__(model)  # type: ignore[method-assign]
        with pytest.raises(ConfigurationError, match=words):
            profile_compute(model, given, unit_names=[""], loss_fn=mean_square)


def _by_value(_: nn.Module, given: Tensor) -> Tensor:
    return given * given.sum().item()


def _by_shape(_: nn.Module, given: Tensor) -> Tensor:
    return given[given > 0]


# ---- recomputation ---------------------------------------------------------------------------------------------------

LLAMA_TOKENS = token_batch()["input_ids"].numel()


def test_recomputation_repeats_a_forward_up_to_what_backward_needs() -> None:
    """Torch stops a recomputation at the last tensor that is saved: the product of `down_proj` is not repeated."""
    plain, full = profile_on_meta(CASES["llama"], "none"), profile_on_meta(CASES["llama"], "full")
    assert plain.recomputed_flops == 0
    assert (full.forward_flops, full.backward_flops) == (plain.forward_flops, plain.backward_flops)
    layers = {f"F{unit}>" for unit in range(1, LAYERS + 1)}
    forward = sum(segment.flops for segment in plain.segments if str(segment) in layers)
    last_products = LAYERS * 2 * LLAMA_TOKENS * 48 * 32
    assert full.recomputed_flops == forward - last_products


def test_nothing_to_recompute_is_refused() -> None:
    model = nn.Linear(TOWER_FEATURES, TOWER_FEATURES)
    with pytest.raises(ConfigurationError, match="no units besides the root"), recomputing(model, [""], "full"):
        pass
    words = "no units with self_attn, self_attention, attention, attn"
    with pytest.raises(ConfigurationError, match=words), recomputing(Tower(), ["", "floors.0"], "selective"):
        pass


# ---- events ----------------------------------------------------------------------------------------------------------


class Events(Observer):
    """What begins and ends, in the compact form of a profile."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def begins(self, phase: Phase, unit: int) -> None:
        if phase is Phase.FORWARD:
            self.told.append(f"F{unit}>")
        elif phase in (Phase.BACKWARD, Phase.FINALISE):
            self.told.append(f"B{unit}" if phase is Phase.BACKWARD else "E")

    def ends(self, phase: Phase, unit: int) -> None:
        if phase is Phase.FORWARD:
            self.told.append(f"F{unit}<")


def events_of_a_sharded_step(recompute: Recompute) -> str:
    model = Tower()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    with recomputing(model, TOWER_UNITS, recompute):
        sharded = fully_shard_model(model, device_mesh=mesh, dp_shard_dim="dp", fsdp_unit_modules=[Floor])
        events = Events()
        sharded.observe(events)
        tower_loss(sharded, torch.ones(4, TOWER_FEATURES)).backward()
    return " ".join(events.told)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_profile_has_the_events_of_the_engine(run_ranks: RunRanks, recompute: Recompute) -> None:
    with torch.device("meta"):
        model, given = Tower(), torch.empty(4, TOWER_FEATURES)
    profile = profile_compute(model, given, unit_names=TOWER_UNITS, loss_fn=mean_square, recompute=recompute)
    assert run_ranks(2, events_of_a_sharded_step, recompute) == [profile.events] * 2
