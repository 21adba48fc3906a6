"""Several optimizers of different parameters as one: the bits of each alone, one state dict and one checkpoint."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import AdamW8bit, ChainedOptimizer, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.errors import ConfigurationError
from tests.optim.full_tensor.test_step import Factored
from tests.support.on_ranks import on_ranks, refusal
from tests.support.optimizer_reference import ReferencePair, drawn, flat, matrices


def mixed() -> nn.Module:
    """Matrices and vectors."""
    model = matrices()
    model.vector, model.norm = nn.Parameter(drawn(torch.Size((7,)), 0, 0)), nn.LayerNorm(5)
    return model


def chain(params: Sequence[Any]) -> ChainedOptimizer:
    muon = torch.optim.Muon([param for param in params if param.dim() == 2], lr=0.1)
    others = [param for param in params if param.dim() != 2]
    return ChainedOptimizer(muon, torch.optim.AdamW(others[:1], lr=0.2), AdamW8bit(others[1:], lr=0.02))


def chain_of_sgd(params: Sequence[Any]) -> ChainedOptimizer:
    """One whose blank momentum must not be loaded, one whose state is there before the first step, one without any."""
    return ChainedOptimizer(
        torch.optim.SGD(params[:3], lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.Adagrad(params[3:5], lr=0.1),
        torch.optim.SGD(params[5:], lr=0.1),
    )


def test_a_chain_steps_as_its_optimizers_one_after_another() -> None:
    params, copies = ([nn.Parameter(drawn(torch.Size(s), 0, 0)) for s in ((4, 4), (3,), (2,))] for _ in range(2))
    chained, alone = copy.deepcopy(chain(params)), chain(copies).optimizers
    params = [param for group in chained.param_groups for param in group["params"]]
    assert [group["lr"] for group in chained.param_groups] == [0.1, 0.2, 0.02]
    for group in chained.param_groups:
        group["lr"] = group["lr"] / 2
    for optimizer in alone:
        optimizer.param_groups[0]["lr"] /= 2

    def closure() -> str:
        for step, many in enumerate((params, copies)):
            for param in many:
                param.grad = drawn(param.shape, 1, len(param.shape)) + 0 * step
        return "loss"

    assert chained.step(closure) == "loss"
    for optimizer in alone:
        optimizer.step()
    assert all(map(torch.equal, params, copies))
    assert set(chained.state) == set(params)


class Failing(torch.optim.SGD):
    """Fails where it is told to, on some ranks."""

    def __init__(self, params: Any, ranks: Sequence[int]) -> None:
        super().__init__(params, lr=0.1)
        self.ranks = ranks

    def step(self, closure: Any = None) -> Any:
        if dist.get_rank() in self.ranks:
            raise MemoryError("no room for the step")
        return super().step(closure)


@on_ranks(3)
def test_a_member_that_fails_on_one_rank_fails_on_all_which_say_what_has_stepped() -> None:
    """Muon, whose ranks wait for each other, comes behind it."""

    def make(params: Sequence[Any]) -> ChainedOptimizer:
        matrices = [param for param in params if param.dim() == 2]
        others = [param for param in params if param.dim() != 2]
        return ChainedOptimizer(
            torch.optim.AdamW(others[:1]), Failing(others[1:], ranks=[1]), torch.optim.Muon(matrices, lr=0.1)
        )

    pair = ReferencePair(mixed(), make, flat(3))
    before = [param._local_tensor.clone() for param in pair.params]  # type: ignore[attr-defined]
    failing, reference = pair.optimizer.optimizers[1], pair.reference.optimizers[1]  # type: ignore[attr-defined]
    reference.ranks = []
    assert refusal(pair.step, 0, error=RuntimeError).endswith(
        "AdamW stepped; Failing failed on rank 1 (MemoryError: no room for the step); Muon stepped; load a checkpoint "
        "before the next step"
    )
    pair.reference.step()
    for param, start, whole in zip(pair.params, before, pair.copies, strict=True):
        wanted = param.shard_spec.take(whole)  # type: ignore[attr-defined]
        kept = dist.get_rank() == 1 and param in set(failing.param_groups[0]["params"])
        assert torch.equal(param._local_tensor, start if kept else wanted.detach())  # type: ignore[attr-defined]
    failing.ranks = [0, 1, 2]
    with pytest.raises(RuntimeError, match="Failing failed on all ranks"):
        pair.step(1)


# ---- members that step whole tensors --------------------------------------------------------------------------------


def chain_of_whole_tensors(params: Sequence[Any]) -> ChainedOptimizer:
    """Torch's Adafactor in front of Muon and AdamW, a declared class behind them."""
    matrices, others = ([param for param in params if (param.dim() == 2) is is_one] for is_one in (True, False))
    return ChainedOptimizer(
        torch.optim.Adafactor(matrices[:2], lr=0.1),
        torch.optim.Muon(matrices[2:4], lr=0.1),
        torch.optim.AdamW(others, lr=0.2),
        Factored(matrices[4:]),
    )


@pytest.mark.parametrize("place", [0, 3])
@on_ranks(2)
def test_a_hook_of_a_member_that_fails_on_one_rank_fails_the_step_of_the_chain_on_all(place: int) -> None:
    """Adafactor's, Muon's, whose peers wait for messages, and the last one's."""
    pair = ReferencePair(mixed(), chain_of_whole_tensors, flat(3))
    member = pair.optimizer.optimizers[place]  # type: ignore[attr-defined]

    def fails(*_step_arguments: object) -> None:
        if dist.get_rank() == 1:
            raise ValueError("no step today")

    handle = member.register_step_pre_hook(fails)
    told = refusal(pair.step, 0, error=RuntimeError)
    assert f"{type(member).__name__} failed on all ranks (RankError: the optimizer's step failed (rank 1: Value" in told
    begun = "Muon was not begun; AdamW was not begun; Factored was not begun; no weights were changed"
    assert told.endswith(begun) == (place == 0)
    handle.remove()
    fresh = ReferencePair(mixed(), chain_of_whole_tensors, flat(3))
    fresh.step(0)
    assert fresh.differing() == []


@on_ranks(2)
def test_hooks_and_schedules_of_members_see_the_members_and_sharded_parameters() -> None:
    pair = ReferencePair(mixed(), chain_of_whole_tensors, flat(3))
    members = pair.optimizer.optimizers  # type: ignore[attr-defined]
    seen: list[tuple[str, object, int]] = []
    for each in members:
        each.register_step_pre_hook(lambda own, *_: seen.append(("before", own, len(own.state))))
        each.register_step_post_hook(lambda own, *_: seen.append(("after", own, len(own.state))))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1) for each in members]
    pair.step(0)
    counts = [sum(len(group["params"]) for group in each.param_groups) for each in members]
    assert seen == [
        entry
        for each, count in zip(members, counts, strict=True)
        for entry in (("before", each, 0), ("after", each, count))
    ]
    for schedule in schedules:
        schedule.step()  # warns, which is an error here, of an optimizer that has not stepped
    assert [group["lr"] for group in pair.optimizer.param_groups] == pytest.approx([0.01, 0.01, 0.02, 0.01])


# ---- through the public functions ------------------------------------------------------------------------------------


@on_ranks(2)
def test_what_a_chain_cannot_do_is_refused_on_all_ranks() -> None:
    model = fully_shard_model(mixed(), fsdp_unit_modules=[nn.Linear], **flat(3))
    params = list(model.parameters())
    vectors = torch.optim.Muon(params[:1])
    vectors.add_param_group({"params": [param for param in params if param.dim() == 1]})
    with pytest.raises(ConfigurationError, match="Muon was given a parameter of shape"):
        fully_shard_optimizer(ChainedOptimizer(vectors))
    chained = fully_shard_optimizer(ChainedOptimizer(torch.optim.AdamW(params[:1]), torch.optim.SGD(params[1:2])))
    first = chained.optimizers[0]  # type: ignore[attr-defined]
    with pytest.raises(ConfigurationError, match="is not a parameter of the model that is being sharded"):
        first.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    assert len(first.param_groups) == 1
    nothing = torch.optim.Muon([{"params": []}])
    with pytest.raises(ConfigurationError, match=r"^Muon, in a ChainedOptimizer, has no parameters; build it on"):
        fully_shard_optimizer(ChainedOptimizer(nothing, torch.optim.AdamW(params)))


def test_what_is_no_chain_is_refused() -> None:
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(3)]
    first, second = (torch.optim.SGD([param]) for param in params[:2])
    for given, told in (
        ((), "nothing"),
        (([first, second],), "list"),
        ((ChainedOptimizer(first),), "ChainedOptimizer"),
    ):
        with pytest.raises(ConfigurationError, match=f"ChainedOptimizer was given {told}; give optimizers of torch"):
            ChainedOptimizer(*given)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(2, 2\) twice"):
        ChainedOptimizer(first, torch.optim.SGD([params[0]]))
    later = ChainedOptimizer(first, torch.optim.SGD([params[1]]))
    later.optimizers[1].add_param_group({"params": [params[0]]})
    with pytest.raises(ConfigurationError, match=r"a parameter of shape \(2, 2\) twice"):
        later.step()
    with pytest.raises(ConfigurationError, match="was given a group with params, and not told"):
        ChainedOptimizer(first, second).add_param_group({"params": [params[2]]})
