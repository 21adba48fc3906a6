"""A model built on the meta device begins as the same model built eagerly, bit for bit, on any number of ranks."""

import importlib.util
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from tests.conftest import RunRanks
from tests.support.meta_models import META_CASES, MetaCase, SmallGPT, token_loss, tokens
from tests.support.models import Block
from tests.support.parity import assert_equal_tensors, fixed_seed
from tests.support.sharded_run import FP32

SEED = 5


def build_on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def shard_meta(case: MetaCase, strategy: int) -> MegatronFSDP:
    return fully_shard_model(
        build_on_meta(case.build),
        fsdp_unit_modules=case.units,
        zero_dp_strategy=strategy,
        init_model_with_meta_device=True,
        mixed_precision_policy=_follow(),
    )


def _follow() -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(main_params_dtype=None)


def same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left, right)


def differences(case: MetaCase, strategy: int) -> list[str]:
    """What of the meta-built model is not as in the eagerly built one, on this rank."""
    with fixed_seed(SEED):
        eager = case.build()
        end = torch.get_rng_state()
    with fixed_seed(SEED):
        model = shard_meta(case, strategy)
        same_end = torch.equal(torch.get_rng_state(), end)
    found = [] if same_end else ["the random state after it"]
    weights = model.full_parameters()
    expected = dict(eager.named_parameters())
    assert weights.keys() == expected.keys()
    found += [name for name, weight in weights.items() if not same_bits(weight, expected[name])]
    buffers = dict(model.module.named_buffers())
    assert buffers.keys() == dict(eager.named_buffers()).keys()
    found += [name for name, buffer in eager.named_buffers() if not same_bits(buffers[name], buffer)]
    if _ties(model.module) != _ties(eager):
        found.append("ties")
    if [p.requires_grad for p in model.parameters()] != [p.requires_grad for p in eager.parameters()]:
        found.append("requires_grad")
    if not same_bits(model(case.make_input()), eager(case.make_input())):
        found.append("output")
    return found


def _ties(module: nn.Module) -> list[int]:
    """For each name of a parameter, tied ones included, the position of the first name of the same."""
    params = [param for _, param in module.named_parameters(remove_duplicate=False)]
    return [next(i for i, other in enumerate(params) if other is param) for param in params]


def all_differences(strategy: int) -> dict[str, list[str]]:
    return {name: found for name, case in META_CASES.items() if (found := differences(case, strategy))}


@pytest.mark.full(short=["0-2", "3-2"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("strategy", range(4))
def test_weights_buffers_and_generators_are_those_of_eager_construction(
    strategy: int, num_ranks: int, run_ranks: RunRanks
) -> None:
    assert run_ranks(num_ranks, all_differences, strategy) == [{}] * num_ranks


def llama_differences(tied: bool) -> list[str]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tied,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library of others deprecates is not tested here
        case = MetaCase(lambda: _Logits(LlamaForCausalLM(config)), tokens, None)
        return [found for strategy in (0, 3) for found in differences(case, strategy)]


class _Logits(nn.Module):
    """A Hugging Face model that returns its logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Tensor) -> Tensor:
        return self.inner(batch).logits


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.full(short=["True"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_begins_as_its_own_library_begins_it_rotary_frequencies_included(
    tied: bool, run_ranks: RunRanks
) -> None:
    assert run_ranks(2, llama_differences, tied) == [[], []]


# ---- training afterwards -------------------------------------------------------------------------------------------


Step = tuple[float, dict[str, Tensor], dict[str, Tensor]]


def train_from_meta(strategy: int) -> list[Step]:
    """Three updates with an optimizer that was built on the meta parameters; loss, gradients and weights of each."""
    with fixed_seed(SEED):
        model = build_on_meta(SmallGPT)
        model, optimizer = fully_shard(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
            fsdp_unit_modules=[Block],
            zero_dp_strategy=strategy,
            init_model_with_meta_device=True,
        )
    share = tokens().chunk(dist.get_world_size())[dist.get_rank()]
    steps = []
    for _ in range(3):
        loss = token_loss(model, share)
        loss.backward()
        gradients = {name: grad.clone() for name, grad in model.full_gradients().items() if grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), gradients, {n: p.clone() for n, p in model.full_parameters().items()}))
    return steps


def train_eagerly() -> list[Step]:
    with fixed_seed(SEED):
        model = SmallGPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps = []
    for _ in range(3):
        loss = token_loss(model, tokens())
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), gradients, {n: p.detach().clone() for n, p in model.named_parameters()}))
    return steps


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [1, 3])
def test_training_goes_on_as_on_one_process_with_an_optimizer_built_before(strategy: int, run_ranks: RunRanks) -> None:
    by_rank = run_ranks(2, train_from_meta, strategy)
    expected = train_eagerly()
    for position, (loss, gradients, weights) in enumerate(expected):
        steps = [steps[position] for steps in by_rank]
        assert sum(step[0] for step in steps) / 2 == pytest.approx(loss, rel=1e-5)
        for _, got_gradients, got_weights in steps:
            assert_equal_tensors(got_gradients, gradients, FP32.rtol, FP32.atol)
            assert_equal_tensors(got_weights, weights, FP32.rtol, FP32.atol)


# ---- random states -------------------------------------------------------------------------------------------------


def seeded_by_rank() -> tuple[list[str], bool, list[str]]:
    """Differences to the eager model of rank 0, whether this rank's generator is as it was, and the warnings."""
    with fixed_seed(100):
        expected = dict(SmallGPT().named_parameters())
    with fixed_seed(100 + dist.get_rank()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        before = torch.get_rng_state()
        model = shard_meta(META_CASES["gpt"], 3)
        restored = torch.equal(torch.get_rng_state(), before)
    wrong = [name for name, weight in model.full_parameters().items() if not torch.equal(weight, expected[name])]
    return wrong, restored, [str(warning.message) for warning in caught]


def test_ranks_seeded_differently_draw_what_the_first_draws_and_get_their_own_state_back(run_ranks: RunRanks) -> None:
    for wrong, restored, caught in run_ranks(3, seeded_by_rank):
        assert (wrong, restored) == ([], True)
        assert len(caught) == 1
        assert caught[0].startswith("ranks were seeded differently, so the weights were initialised with the random ")


# ---- mixed models --------------------------------------------------------------------------------------------------


def mixed_model() -> nn.Module:
    """The embedding and one bias of a block are real, as after a load; attention has a real output projection."""
    model = build_on_meta(lambda: nn.Sequential(SmallGPT(), nn.MultiheadAttention(8, 2)))
    gpt, attention = model
    assert isinstance(gpt, SmallGPT)
    gpt.tokens.weight = nn.Parameter(torch.full((31, 16), 2.0 + dist.get_rank()))
    gpt.blocks[0].up.bias = nn.Parameter(torch.full((64,), 3.0))  # type: ignore[union-attr]
    attention.out_proj = nn.Linear(8, 8)
    with torch.no_grad():
        attention.out_proj.weight.fill_(4.0)  # type: ignore[union-attr,operator]
        attention.out_proj.bias.fill_(5.0)  # type: ignore[union-attr,operator]
    return model


def wrap_mixed() -> tuple[dict[str, Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with fixed_seed(SEED):
            model = fully_shard_model(mixed_model(), fsdp_unit_modules=[Block], init_model_with_meta_device=True)
    return model.full_parameters(), [str(warning.message) for warning in caught]


def test_real_tensors_keep_their_values_and_are_matched_over_ranks(run_ranks: RunRanks) -> None:
    (weights, caught), (other, _) = run_ranks(2, wrap_mixed)
    assert_equal_tensors(other, weights)
    constants = {"0.tokens.weight": 2.0, "0.blocks.0.up.bias": 3.0, "1.out_proj.weight": 4.0, "1.out_proj.bias": 5.0}
    for name, value in constants.items():
        assert weights[name].unique().tolist() == [value], name
    assert caught[0].startswith("1 parameters or buffers differed between ranks at wrap time (first: 0.tokens.weight)")
    bound = (6 / (4 * 8)) ** 0.5
    assert 0.9 * bound < weights["1.in_proj_weight"].abs().max().item() <= bound
    assert 0.9 / 4 < weights["0.blocks.0.up.weight"].abs().max().item() <= 1 / 4


def wrap_real_with_the_flag() -> tuple[bool, bool]:
    with fixed_seed(SEED):
        model = SmallGPT()
        before, expected = torch.get_rng_state(), {name: p.detach().clone() for name, p in model.named_parameters()}
        wrapped = fully_shard_model(model, fsdp_unit_modules=[Block], init_model_with_meta_device=True)
        kept = torch.equal(before, torch.get_rng_state())
    return kept, all(torch.equal(weight, expected[name]) for name, weight in wrapped.full_parameters().items())


def test_without_meta_tensors_the_flag_changes_nothing(run_ranks: RunRanks) -> None:
    assert run_ranks(2, wrap_real_with_the_flag) == [(True, True)] * 2
