"""Full tensors one after another: values, order, memory and collectives."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, MixedPrecisionPolicy, fully_shard, fully_shard_model
from megatron_fsdp.checkpoint.hf import save_hf
from megatron_fsdp.errors import ConfigurationError, ScheduleError
from tests.support.api_net import gradients
from tests.support.case import Run, Scenario, Setting, adamw_above_noise, shard, two_steps
from tests.support.counting import LiveBytes, OpCounts
from tests.support.on_ranks import assert_equal_tensors, on_ranks, refusal
from tests.support.zoo import MODEL_CASES, ModelName

pytestmark = pytest.mark.unmerged

SIZES_BYTES = [1, 800, 2**28]
"""From one tensor at a time to whole groups."""


def trained(name: ModelName, strategy: int, policy: MixedPrecisionPolicy | None = None) -> MegatronFSDP:
    """A model that has been trained for a step, with gradients of the next one."""
    scenario = Scenario(two_steps, MODEL_CASES[name], adamw_above_noise)
    run = Run(scenario, Setting(strategy, policy or MixedPrecisionPolicy()))
    run.train(0)
    run.backward(1)
    assert run.sharded is not None
    return run.sharded


@pytest.mark.full(short=["unused-2", "scalars-3", "tied-3"])
@pytest.mark.parametrize(("name", "strategy"), [("odd_shapes", 0), ("scalars", 3), ("unused", 2), ("tied", 3)])
@on_ranks(3)
def test_tensors_are_those_of_the_model_whatever_the_bucket(name: ModelName, strategy: int) -> None:
    """All sizes are read before anything is compared, so that a reused buffer would show."""
    model = trained(name, strategy)
    found = [
        (list(model.iter_full_tensors(size)), list(model.iter_full_tensors(size, "gradients"))) for size in SIZES_BYTES
    ]
    shown = gradients(model)
    assert shown
    for read in found:
        for tensors, expected, first in zip(read, (model.full_parameters(), shown), found[0], strict=True):
            assert [n for n, _ in tensors] == [n for n, _ in first]  # the same order, and no name twice
            assert len(tensors) == len(expected)
            assert_equal_tensors(dict(tensors), expected)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(3)
def test_gradients_are_those_that_the_parameters_show(strategy: int) -> None:
    policy = MixedPrecisionPolicy(main_params_dtype=torch.float64, main_grads_dtype=torch.float32)
    model = trained("odd_shapes", strategy, policy)
    streamed = dict(model.iter_full_tensors(300, "gradients"))
    assert_equal_tensors(streamed, gradients(model))
    assert {grad.dtype for grad in streamed.values()} == {torch.float64}


# ---- memory and traffic --------------------------------------------------------------------------------------------


TENSOR_BYTES = 64 * 64 * 4


@pytest.mark.parametrize(("strategy", "tensors"), [(0, 1), (1, 4), (3, 8), (3, 32)])
@on_ranks(3)
def test_the_peak_is_what_was_allowed_and_collectives_are_batched(strategy: int, tensors: int) -> None:
    """Of nine square layers in one unit. Two buckets are alive at a time, each of half the bytes or of one tensor."""
    layers = (nn.Linear(64, 64, bias=False) for _ in range(9))  # shards of 3 ranks cut the tensors
    model = nn.ModuleList([nn.Sequential(*layers)])
    wrapped = fully_shard_model(model, fsdp_unit_modules=[nn.Sequential], zero_dp_strategy=strategy)
    tensors_in_turn = wrapped.iter_full_tensors(tensors * TENSOR_BYTES)  # agrees on its arguments at once
    with OpCounts() as counts, LiveBytes() as live:
        for _name, _tensor in tensors_in_turn:
            pass
    buckets = -(-9 // max(tensors // 2, 1)) if tensors < 32 else 1
    gathers, others = counts.collectives.gathers, counts.collectives.others
    agreements = [each for each in others if each == "allgather_"]  # that all have memory for the next bucket
    others = [each for each in others if each != "allgather_"]
    assert len(agreements) == (buckets if strategy else 0)
    # gloo's thread may let go of the bucket before the last a moment after the wait for it has ended.
    late = max(tensors // 2, 1) * TENSOR_BYTES if strategy and tensors < 32 else 0
    assert live.peak_bytes <= max(tensors, 2) * TENSOR_BYTES + late + 3 * 512  # 512: padding of a shard, at most
    assert live.peak_bytes >= min(max(tensors, 2) - 1, 9) * TENSOR_BYTES // 2
    if strategy == 0 or tensors == 32:
        assert (gathers, others) == (1 if strategy else 0, [])
    else:
        assert (gathers, set(others)) == (0, {"broadcast_"})
        assert buckets <= len(others) <= buckets + 2


@on_ranks(2)
def test_what_means_nothing_or_would_hang_is_refused() -> None:
    model = trained("odd_shapes", 3)

    def refuse(words: str, call: Callable[[], object]) -> None:
        assert re.search(words, refusal(call, error=ConfigurationError))

    refuse("^bucket_bytes=0 leaves no room", lambda: model.iter_full_tensors(0))
    refuse("^bucket_bytes=-1 leaves no room", lambda: model.iter_full_tensors(-1, "gradients"))
    refuse(
        r"^what='weights' is unknown; give 'parameters' or 'gradients'$",
        lambda: model.iter_full_tensors(what="weights"),
    )
    if dist.get_rank() == 1:
        model.module[0].wide.bias.grad = None
    differs = "^ranks differ: 0.wide.bias is torch.float32 on rank 0, nothing on rank 1; give the same on every rank$"
    refuse(differs, lambda: list(model.iter_full_tensors(what="gradients")))


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(2)
def test_nothing_else_happens_while_an_iteration_is_open(strategy: int) -> None:
    """Tensors before and after a step would be of two versions; every rank is told so before anything is sent."""
    case = MODEL_CASES["tied"]
    model, optimizer = shard(case, zero_dp_strategy=strategy)
    batch = case.make_batch(4, torch.Generator().manual_seed(0))
    case.loss(model, batch).backward()
    before, loss = model.full_parameters(), case.loss(model, batch)
    sent, streamed = model.traffic(), model.iter_full_tensors(1, "gradients")
    sharded, copied = model.state_dict(), {name: value.clone() for name, value in before.items()}
    for tensors in (model.iter_full_tensors(1), streamed):
        found = dict([next(tensors)])
        for use in (
            lambda: model(batch.inputs),
            lambda: loss.backward(retain_graph=True),
            optimizer.step,
            model.finish_grad_sync,
            model.state_dict,
            lambda: model.load_state_dict(sharded),
            lambda: model.module.load_state_dict(copied),
            model.full_parameters,
            lambda: next(model.iter_full_tensors(1)),
            model.full_parameters_context().__enter__,
            model.start_param_sync,
            model.install_optimized_model_weights,
            lambda: save_hf(model, "nowhere"),
        ):
            said = refusal(use, error=ScheduleError)
            assert re.search(r"while an iteration of iter_full_tensors is open.*close\(\)", said)
        if tensors is not streamed:
            assert_equal_tensors({**found, **dict(tensors)}, before)
        else:
            tensors.close()  # type: ignore[attr-defined]
    assert model.traffic() == sent
    next(model.iter_full_tensors(1))  # dropped at once
    loss.backward()
    optimizer.step()
    after = model.full_parameters()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def assign_zeros(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.data = torch.zeros(tensor.shape)


@pytest.mark.parametrize("strategy", [0, 3])
@on_ranks(3)
def test_tensors_that_were_written_to_since_an_iteration_began_are_not_handed_out(strategy: int) -> None:
    model = trained("odd_shapes", strategy)
    other = nn.Parameter(torch.ones(1))

    def used_by_torch(what: str) -> None:
        if what == "gradients":
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        else:
            torch.optim.SGD([other, *model.parameters()], 0.1).step()

    for what in ("parameters", "gradients"):
        every = list(model.parameters()) if what == "parameters" else [each.grad for each in model.parameters()]
        tensors: list[Tensor] = [each for each in every if each is not None]
        writes: list[Callable[[], object]] = [
            lambda tensors=tensors: [tensor.data.zero_() for tensor in tensors],
            lambda tensors=tensors: torch._foreach_mul_([tensor.detach() for tensor in tensors], 2.0),
            lambda tensors=tensors: assign_zeros(tensors),
            lambda what=what: used_by_torch(what),
        ]
        for write in writes:
            found = model.iter_full_tensors(1, what)  # type: ignore[arg-type]
            next(found)
            write()
            assert re.search(r"was written to while an iteration.*close\(\)", refusal(next, found, error=ScheduleError))
    sharded, before = dict(model.module.named_parameters()), model.full_parameters()
    for name, full in model.iter_full_tensors(1):  # each is read before it is written to
        torch.testing.assert_close(full, before[name], rtol=0, atol=0)
        sharded[name].data.add_(1)


@on_ranks(2)
def test_full_tensors_are_not_handed_out_inside_a_forward_nor_changed_below_their_copies() -> None:
    model, optimizer = fully_shard(
        linears := nn.Sequential(nn.Linear(4, 4)), torch.optim.SGD(linears.parameters(), 1.0)
    )
    loss = model(torch.ones(2, 4)).sum()
    hook = model.module[0].register_forward_hook(lambda *_: next(model.iter_full_tensors()))
    with pytest.raises(ScheduleError, match="full tensors were asked for inside a forward or backward"):
        model(torch.ones(2, 4))
    hook.remove()
    with model.full_parameters_context(writeback=True):
        for use in (optimizer.step, lambda: loss.backward(retain_graph=True)):
            with pytest.raises(ScheduleError, match="while full_parameters_context is open"):
                use()
