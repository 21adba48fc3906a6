"""A model built on the meta device begins as the same model built eagerly, bit for bit, on any number of ranks."""

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard_model
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.wrap.meta_init import own_part, uninitialized_parameter
from tests.conftest import RunRanks
from tests.support.case import Scenario, Setting, check_strategies, momentum, three_steps
from tests.support.counting import LiveBytes
from tests.support.on_ranks import assert_equal_tensors, first_rank_warns, fixed_seed, on_ranks, refusal
from tests.support.zoo import (
    FEATURES,
    FLOORS,
    MODEL_CASES,
    ROOT_NUMEL,
    Block,
    Floor,
    Recurrent,
    TinyTransformer,
    Tower,
    token_case,
)

# ---- models that can be built on the meta device, each with something that their initialisation finds hard -----------

TOKENS = 6


class Waves(nn.Module):
    """Fixed frequencies in a buffer that no checkpoint holds, and a counter in one that it does."""

    frequencies: Tensor
    calls: Tensor

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.empty(features), persistent=False)
        self.register_buffer("calls", torch.empty((), dtype=torch.int64))
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self.frequencies = 100.0 ** -torch.linspace(0, 1, len(self.frequencies))
        self.calls.zero_()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(torch.arange(x.shape[1]).unsqueeze(-1) * self.frequencies)


class SmallGPT(TinyTransformer):
    """A transformer with waves beside its learned positions."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__(tied=tied)
        self.waves = Waves(self.FEATURES)

    def embed(self, tokens: Tensor) -> Tensor:
        return self.waves(super().embed(tokens))


class RootResetGPT(SmallGPT):
    """A root with a parameter of its own, and a reset method that draws that and one of a module below it anew."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(self.VOCABULARY))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.uniform_(self.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + self.bias


class AppliedGPT(SmallGPT):
    """A model that tells every module how to begin, once all are constructed; weights are tied before."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.gain = nn.Parameter(torch.empty(1))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, Block):
            nn.init.normal_(module.mlp.get_parameter("down.weight"), std=0.01)
        if module is self:
            nn.init.ones_(self.gain)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.gain


def tied_blocks() -> nn.Module:
    """Two units that share a matrix, which so belongs to neither."""
    pairs = [(nn.Linear(7, 7), nn.Linear(7, 7)) for _ in range(2)]
    pairs[1][0].weight = pairs[0][1].weight
    return nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))


class Shifted(nn.Module):
    """A layer and a shift."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.shift = nn.Parameter(torch.empty(7))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.shift


def shared_layer() -> nn.Module:
    """Two units that hold the same layer, each with a method that writes only what is its own."""
    layer = nn.Linear(7, 7)
    return nn.Sequential(Shifted(layer), Shifted(layer))


@dataclass(frozen=True)
class MetaCase:
    """A model, an input for it and its units."""

    build: Callable[[], nn.Module]
    make_input: Callable[[], Tensor]
    units: tuple[type[nn.Module], ...] | None


def tokens() -> Tensor:
    """int64 (4, 6)."""
    return torch.arange(4 * TOKENS).view(4, TOKENS) % TinyTransformer.VOCABULARY


def _vectors(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape)


def build_attention() -> nn.Module:
    """Layers of torch whose constructors draw the output projection before the input projection."""
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)))


def build_batch_norm() -> nn.Module:
    """Running statistics are buffers."""
    return nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4))


META_CASES: dict[str, MetaCase] = {
    "odd_shapes": MetaCase(MODEL_CASES["odd_shapes"].build, lambda: _vectors(4, 7), None),
    "bf16_fp32_norm": MetaCase(MODEL_CASES["bf16_fp32_norm"].build, lambda: _vectors(4, 7), None),
    "fp32_fp64_norm": MetaCase(MODEL_CASES["fp32_fp64_norm"].build, lambda: _vectors(4, 7).double(), None),
    "gpt": MetaCase(SmallGPT, tokens, (Block,)),
    "tied": MetaCase(partial(SmallGPT, tied=True), tokens, (Block,)),
    "partly_frozen": MetaCase(MODEL_CASES["partly_frozen"].build, tokens, (Block,)),
    "root_reset": MetaCase(RootResetGPT, tokens, (Block,)),
    "applied": MetaCase(AppliedGPT, tokens, (Block,)),
    "tied_across_units": MetaCase(tied_blocks, lambda: _vectors(4, 7), None),
    "shared_layer": MetaCase(shared_layer, lambda: _vectors(4, 7), None),
    "recurrent": MetaCase(Recurrent, lambda: _vectors(2, FEATURES), None),
    "attention": MetaCase(build_attention, lambda: _vectors(2, 3, 8), None),
    "batch_norm": MetaCase(build_batch_norm, lambda: _vectors(4, 5, 6), ()),
}


# ---- tests -----------------------------------------------------------------------------------------------------------

CPU = torch.device("cpu")
SEED = 5


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def shard_meta(case: MetaCase, strategy: int) -> MegatronFSDP:
    return fully_shard_model(
        on_meta(case.build),
        fsdp_unit_modules=case.units,
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=MixedPrecisionPolicy(main_params_dtype=None),
    )


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def ties(module: nn.Module) -> list[int]:
    """For each name of a parameter, tied ones included, the position of the first name of the same."""
    params = [param for _, param in module.named_parameters(remove_duplicate=False)]
    return [next(i for i, other in enumerate(params) if other is param) for param in params]


def check_begins_as_eagerly(case: MetaCase, strategy: int) -> None:
    with fixed_seed(SEED):
        eager = case.build()
        end = torch.get_rng_state()
    with fixed_seed(SEED):
        model = shard_meta(case, strategy)
        assert torch.equal(torch.get_rng_state(), end)
    for found, expected in (
        (model.full_parameters(), dict(eager.named_parameters())),
        (dict(model.module.named_buffers()), dict(eager.named_buffers())),
    ):
        assert found.keys() == expected.keys()
        assert [name for name, value in expected.items() if not same_bits(found[name], value)] == []
    assert ties(model.module) == ties(eager)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in eager.parameters()]
    found, wanted = model(case.make_input()), eager(case.make_input())
    assert same_bits(getattr(found, "logits", found), getattr(wanted, "logits", wanted))


@pytest.mark.full(short=["3-2"])
@pytest.mark.parametrize(("strategy", "num_ranks"), [(3, 2), (0, 4)])
@on_ranks()
def test_weights_buffers_and_generators_are_those_of_eager_construction(strategy: int) -> None:
    for case in META_CASES.values():
        check_begins_as_eagerly(case, strategy)


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@on_ranks(2)
def test_a_llama_begins_as_its_own_library_begins_it_rotary_frequencies_included() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library of others deprecates is not tested here
        for strategy in (0, 3):
            check_begins_as_eagerly(MetaCase(lambda: LlamaForCausalLM(config), tokens, None), strategy)


class FromMeta(Setting):
    """Shards a model that is built anew on the meta device, as its optimizer is."""

    def shard(self, scenario: Scenario, model: nn.Module) -> tuple[MegatronFSDP, torch.optim.Optimizer]:  # noqa: ARG002
        with fixed_seed(0):
            return super().shard(scenario, on_meta(scenario.case.build))


def test_training_goes_on_as_on_one_process_with_an_optimizer_built_before(run_ranks: RunRanks) -> None:
    scenario = Scenario(three_steps, token_case(SmallGPT), momentum)
    settings = [FromMeta(strategy, options=(("init_model_with_meta_device", True),)) for strategy in (1, 3)]
    check_strategies(run_ranks, 2, scenario, settings)


# ---- random states, mixed models -------------------------------------------------------------------------------------


@on_ranks(3)
def test_ranks_seeded_differently_draw_what_the_first_draws_and_get_their_own_state_back() -> None:
    with fixed_seed(100):
        expected = dict(SmallGPT().named_parameters())
    with fixed_seed(100 + dist.get_rank()):
        before = torch.get_rng_state()
        with first_rank_warns("^ranks were seeded differently, so the weights were initialised with"):
            model = shard_meta(META_CASES["gpt"], 3)
        assert torch.equal(torch.get_rng_state(), before)
    assert_equal_tensors(model.full_parameters(), expected)


@on_ranks(2)
def test_real_tensors_keep_their_values_and_are_matched_over_ranks() -> None:
    """The embedding and one bias of a block are real, as after a load; attention has a real output projection."""
    model = on_meta(lambda: nn.Sequential(SmallGPT(), nn.MultiheadAttention(8, 2)))
    gpt, attention = model
    gpt.tokens.weight = nn.Parameter(torch.full((31, 16), 2.0 + dist.get_rank()))
    gpt.blocks[0].mlp.up.bias = nn.Parameter(torch.full((32,), 3.0))
    attention.out_proj = nn.Linear(8, 8)
    nn.init.constant_(attention.out_proj.weight, 4.0)
    nn.init.constant_(attention.out_proj.bias, 5.0)
    differed = r"^1 parameters or buffers differed between ranks at wrap time \(first: 0.tokens.weight\)"
    with fixed_seed(SEED), first_rank_warns(differed):
        wrapped = fully_shard_model(model, fsdp_unit_modules=[Block], init_model_with_meta_device=True)
    weights = wrapped.full_parameters()
    constants = {"0.tokens.weight": 2.0, "0.blocks.0.mlp.up.bias": 3.0}
    constants |= {"1.out_proj.weight": 4.0, "1.out_proj.bias": 5.0}
    for name, value in constants.items():
        assert weights[name].unique().tolist() == [value], name
    bound = (6 / (4 * 8)) ** 0.5
    assert 0.9 * bound < weights["1.in_proj_weight"].abs().max().item() <= bound
    assert 0.9 / 4 < weights["0.blocks.0.mlp.up.weight"].abs().max().item() <= 1 / 4


# ---- what cannot be initialised --------------------------------------------------------------------------------------


class Gain(nn.Module):
    """A parameter and a buffer, and nothing that sets them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.ones(2), persistent=False)


class Cached(nn.Module):
    """A tensor that is neither parameter nor buffer, and a reset method that forgets it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.cache = torch.ones(2)

    def reset_parameters(self) -> None:
        """Leave the cache as it is."""


class HalfReset(nn.Module):
    """A reset method that leaves one row, one parameter and one integer buffer without a value."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(3, 2))
        self.forgotten = nn.Parameter(torch.empty(2))
        self.given = nn.Parameter(torch.empty(2))
        self.register_buffer("count", torch.empty(2, dtype=torch.int64))
        self.register_buffer("steps", torch.empty((), dtype=torch.int64))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.rows[1:].fill_(1.0)
            self.given.data.fill_(1.0)
            self.steps.zero_()


class WholeModelReset(SmallGPT):
    """A root that draws every matrix anew, as torch.nn.Transformer does."""

    def reset_parameters(self) -> None:
        for param in self.parameters():
            if param.dim() > 1:
                nn.init.xavier_uniform_(param)


class Whole(nn.Module):
    """A buffer on the meta device next to real parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.empty(3, device="meta"))


def meta_on_rank_one() -> nn.Module:
    return on_meta(SmallGPT) if dist.get_rank() else SmallGPT()


REFUSALS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "several helpless": (
        lambda: on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Gain(), nn.Sequential(Gain()))),
        (
            "2 modules hold tensors on the meta device and have no method that initialises them: ",
            ": 1 (Gain: gain, scale); 2.0 (Gain: gain, scale); give each a reset_parameters()",
        ),
    ),
    "forgotten attribute": (
        lambda: on_meta(Cached),
        ("1 tensors are still on the meta device after", "cache of (root) (Cached)"),
    ),
    "half reset": (
        lambda: on_meta(HalfReset),
        ("3 tensors got no value, or NaN,", ": rows, forgotten, buffer count of (root) (HalfReset); let reset_"),
    ),
    "whole model reset": (
        lambda: on_meta(WholeModelReset),
        (
            "initialising (root) (WholeModelReset) writes parameters of units below it (such as blocks.0.",
            "fsdp_unit_modules=[] for one unit",
        ),
    ),
    "meta buffer": (Whole, ("(root) (Whole: mask)", "reset_buffers() for buffers")),
    "meta on rank one": (
        meta_on_rank_one,
        (
            "ranks differ: parameter tokens.weight is (31, 16) torch.float32 requires_grad=True on rank 0, (31, 16) ",
            "requires_grad=True on the meta device on rank 1; parameter ",
            " more differ; give the same on every rank",
        ),
    ),
}


def refused(model: nn.Module, flag: bool = True) -> str:
    """What every rank says alike, with the random state as it was."""
    state = torch.get_rng_state()
    said = refusal(fully_shard_model, model, init_model_with_meta_device=flag, error=ConfigurationError)
    assert torch.equal(torch.get_rng_state(), state)
    return said


@on_ranks(2)
def test_what_cannot_be_initialised_is_refused_alike_on_every_rank() -> None:
    for name, (build, told) in REFUSALS.items():
        model = build()
        before = dict(model.named_parameters())
        message = refused(model)
        for part in told:
            assert part in message
        if name == "several helpless":  # refused before any module was initialised
            after = dict(model.named_parameters())
            assert after.keys() == before.keys()
            assert all(param is before[key] and param.is_meta for key, param in after.items())


@on_ranks(2)
def test_without_the_flag_meta_tensors_are_refused_with_a_pointer_to_it() -> None:
    message = refused(on_meta(TinyTransformer), False)
    assert "parameters are on the meta device (such as tokens.weight)" in message
    assert "init_model_with_meta_device is False; set it to let modules initialise themselves" in message
    message = refused(Whole(), False)
    assert message.startswith("1 of 1 buffers are on the meta device (such as mask) and init_model_with_meta_device is")


FP32_BYTES = 4
WIDTHS = (512,) * FLOORS
FLOOR_NUMEL = 32 * WIDTHS[0]
SCALARS_BYTES = 128
"""The results of checks."""


class ResetFloor(Floor):
    """A floor with a method of its own, which has to see all it holds at once."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.up.weight)
        nn.init.normal_(self.down.weight)


class ResetFloorTower(Tower):
    """Floors that see all they hold at once."""

    floor = ResetFloor


@pytest.mark.parametrize(
    ("tower", "extra_numel", "strategy", "num_ranks"),
    [(Tower, FLOOR_NUMEL // 2, 0, 2), (ResetFloorTower, FLOOR_NUMEL, 3, 4)],
    ids=["one module", "one unit"],
)
@on_ranks()
def test_wrapping_takes_the_shards_and_what_one_method_has_to_see(
    tower: type[Tower], extra_numel: int, strategy: int, num_ranks: int
) -> None:
    model = on_meta(lambda: tower(WIDTHS))
    torch.manual_seed(0)
    with LiveBytes() as live:
        wrapped = fully_shard_model(
            model, fsdp_unit_modules=[Floor], zero_dp_strategy=strategy, init_model_with_meta_device=True
        )
    ranks_of_shards = 1 if strategy == 0 else num_ranks
    shards_bytes = 2 * FP32_BYTES * (ROOT_NUMEL + FLOORS * FLOOR_NUMEL) // ranks_of_shards
    assert wrapped.memory().persistent_bytes == shards_bytes  # weights and gradients
    extra = live.peak_bytes - shards_bytes // 2  # gradients are taken when there are some
    assert FP32_BYTES * extra_numel <= extra <= FP32_BYTES * extra_numel + SCALARS_BYTES


@on_ranks(2)
def test_a_tensor_parallel_parameter_is_drawn_whole_and_cut_to_this_rank() -> None:
    shape = (5, 4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for placement in (Shard(0), Shard(1), Replicate()):
        original = nn.Parameter(distribute_tensor(torch.empty(shape, device="meta"), mesh, [placement]))
        assert isinstance(original, DTensor)
        assert uninitialized_parameter(original, CPU).tensor.shape == shape
        full = torch.arange(20.0).view(shape)
        part = own_part(full, original)
        assert type(part) is Tensor
        assert torch.equal(part, distribute_tensor(full, mesh, [placement]).to_local())
