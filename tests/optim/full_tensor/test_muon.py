"""Muon on sharded matrices: weights and momentum are those of one process with the same gradients, bit for bit."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_fsdp import MixedPrecisionPolicy, fully_shard, fully_shard_model, fully_shard_optimizer
from megatron_fsdp.checkpoint import load_checkpoint, save_checkpoint
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.optim.full_tensor import muon
from megatron_fsdp.optim.full_tensor.exchange import assign_owners, waves_of
from megatron_fsdp.optim.full_tensor.muon import check_muon
from megatron_fsdp.optim.optimizer import step_of
from tests.support.api_net import mesh
from tests.support.arrangements import divide_tensors, tensor_parallel
from tests.support.on_ranks import on_ranks
from tests.support.optimizer_reference import ReferencePair, drawn, flat, hybrid, matrices, three_steps
from tests.support.zoo import Block, build_dense

# ---- who computes what ----------------------------------------------------------------------------------------------


def test_matrices_go_to_the_rank_that_has_least_to_do() -> None:
    loads = [0, 0]
    assert assign_owners([4, 9, 4, 1], loads) == (1, 0, 1, 1)
    assert loads == [9, 9]
    assert assign_owners([], [0, 0, 0]) == ()
    assert assign_owners([5, 5, 5], [0] * 8) == (0, 1, 2)
    assert assign_owners([5, 5], [7, 1, 3]) == (1, 2)


def test_the_rank_that_holds_a_matrix_owns_it_where_ranks_have_about_the_same_to_do() -> None:
    loads = [0, 0]
    assert assign_owners([4, 4, 2], loads, [[1], [0], [1]]) == (1, 0, 1)
    assert loads == [4, 6]
    assert assign_owners([4, 4], [0, 0], [[1], [1]]) == (1, 0)
    assert assign_owners([4, 1, 1], [0, 0], [[], [1], [0]]) == (0, 1, 1)
    assert assign_owners([4, 4], [0, 0, 0], [[1, 2], [1, 2]]) == (1, 2)
    loads = [0, 0]
    assert assign_owners([50, 50, 2], loads, [[0], [1], [1]]) == (0, 1, 1)
    assert loads == [50, 52]


def test_no_owner_gets_more_than_the_limit_in_one_wave() -> None:
    assert waves_of([0, 1, 0, 0, 1], [6, 6, 4, 1, 20], 10) == ((0, 1, 2), (3, 4))
    assert waves_of([0, 0], [50, 60], 10) == ((0,), (1,))
    assert waves_of([], [], 10) == ()


# ---- the step --------------------------------------------------------------------------------------------------------


def plain(params: Sequence[Any]) -> torch.optim.Optimizer:
    return torch.optim.Muon(params, lr=0.1)


@pytest.mark.parametrize(("limit", "waves"), [(1, 4), (1 << 20, 1)])
@on_ranks(2)
def test_matrices_may_go_in_several_waves(limit: int, waves: int) -> None:
    """One rank has the large matrix; the other has the rest, in waves of one where no more is allowed."""
    calls, send = [], dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "WAVE_BYTES", limit)
        patch.setattr(dist, "all_to_all_single", lambda *args, **kwargs: calls.append(0) or send(*args, **kwargs))
        three_steps(matrices(), plain, flat(3), without=2)
    assert len(calls) == 2 * 3 * waves


def equal_matrices(count: int = 8, size: int = 12) -> nn.Module:
    return nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(count)))


def sent_in_a_step(pair: ReferencePair) -> tuple[int, int]:
    """Bytes that this rank sends in one step of Muon to others, and to itself."""
    sent, send, rank = [0, 0], dist.all_to_all_single, dist.get_rank()

    def counted(*args: Any, **kwargs: Any) -> Any:
        sent[0] += sum(args[3]) - args[3][rank]
        sent[1] += args[3][rank]
        return send(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_to_all_single", counted)
        pair.step(0)
    assert pair.differing() == []
    return sent[0], sent[1]


@pytest.mark.unmerged
@on_ranks(4)
def test_what_is_sent_depends_on_where_a_matrix_lies() -> None:
    """Eight matrices of 144 elements; each is cut up if it is a unit by itself, else it lies whole on its owner."""
    quarter = 8 * 144 // 4
    assert sum(sent_in_a_step(ReferencePair(equal_matrices(), plain, flat(3)))) == 4 * quarter
    assert sum(sent_in_a_step(ReferencePair(equal_matrices(), plain, hybrid(3, "no_shard")))) == (2 + 2 * 2) * quarter
    for units, others in (([], 0), ([nn.Linear], 2 * 2 * quarter * 3 // 4)):
        pair = ReferencePair(equal_matrices(), plain, {**flat(3), "fsdp_unit_modules": units})
        assert sent_in_a_step(pair)[0] == others


class Recorded:
    """A message under way, whose number is noted when it is waited for."""

    def __init__(self, work: Any, number: int, events: list[str]) -> None:
        self._work, self._number, self._events = work, number, events

    def wait(self) -> None:
        self._events.append(f"wait{self._number}")
        self._work.wait()


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@on_ranks()
def test_operands_of_the_next_wave_travel_while_one_is_iterated() -> None:
    """Three waves of a matrix for each rank; messages 0, 1, 3 take operands to their owners, 2, 4, 5 results back."""
    pair = ReferencePair(equal_matrices(3 * dist.get_world_size()), plain, flat(3))
    events: list[str] = []
    send, iterate = dist.all_to_all_single, muon._zeropower_via_newtonschulz

    def sent(*args: Any, **kwargs: Any) -> Recorded:
        number = sum(event.startswith("send") for event in events)
        events.append(f"send{number}")
        return Recorded(send(*args, **kwargs), number, events)

    def iterated(*args: Any) -> Tensor:
        events.append("iterate")
        return iterate(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "WAVE_BYTES", 1)
        patch.setattr(dist, "all_to_all_single", sent)
        patch.setattr(muon, "_zeropower_via_newtonschulz", iterated)
        pair.step(0)
    assert pair.differing() == []
    order = (
        "send0",
        "send1 wait0 iterate send2",
        "send3 wait1 iterate send4 wait2",
        "wait3 iterate send5 wait4",
        "wait5",
    )
    assert events == " ".join(order).split()


# ---- parameters of several matrices ---------------------------------------------------------------------------------


def stacks() -> nn.Module:
    """With stacks of matrices, one of them of a single one."""
    model = matrices()
    for name, shape in (("stack", (5, 4, 3)), ("single", (1, 3, 7))):
        model.register_parameter(name, nn.Parameter(drawn(torch.Size(shape), 0, 0)))
    return model


def split_sizes(shape: Sequence[int]) -> Any:
    """Of a parameter: as one, halves, or two of other sizes with names; they may begin anywhere in a shard."""
    rows = shape[-2]
    return (
        None if rows % 3 == 1 else rows // 2 if rows % 2 == 0 else {"first": 1, "rest": rows - 1} if rows > 1 else (1,)
    )


def splitting(params: Sequence[Any]) -> torch.optim.Optimizer:
    """Muon of matrices, to which stacks are added: torch looks at dimensions in the constructor."""
    groups = [{"params": [param], "split_sizes": split_sizes(param.shape)} for param in params if param.dim() > 1]
    flat = [group for group in groups if group["params"][0].dim() == 2]
    optimizer = torch.optim.Muon(flat, lr=0.1, adjust_lr_fn="match_rms_adamw")
    for group in groups:
        if group["params"][0].dim() == 3:
            optimizer.add_param_group(group)
    return optimizer


def split_by_hand(whole: Tensor) -> list[Tensor]:
    """The matrices of a parameter, or of its gradient, as views."""
    matrices = whole.detach().view(-1, *whole.shape[-2:])
    sizes = split_sizes(whole.shape) or whole.shape[-2]
    sizes = list(sizes.values()) if isinstance(sizes, dict) else sizes
    return [piece for matrix in matrices for piece in matrix.split(sizes)]


class SplitReferencePair(ReferencePair):
    """Beside Muon on each matrix as a parameter of its own."""

    def __init__(self, model: nn.Module, arguments: dict[str, Any]) -> None:
        super().__init__(model, splitting, arguments)
        self.pieces = [
            [nn.Parameter(piece) for piece in split_by_hand(copy)] if copy.dim() > 1 else [] for copy in self.copies
        ]
        self.reference = torch.optim.Muon(itertools.chain(*self.pieces), lr=0.1, adjust_lr_fn="match_rms_adamw")

    def step(self, step: int, without: int | None = None) -> None:
        for index, (copy, pieces) in enumerate(zip(self.copies, self.pieces, strict=True)):
            grads = split_by_hand(drawn(copy.shape, step, index)) if pieces else []
            for piece, grad in zip(pieces, grads, strict=True):
                piece.grad = None if index == without else grad
        super().step(step, without)

    def differing(self) -> list[str]:
        found = []
        for index, (param, copy, pieces) in enumerate(zip(self.params, self.copies, self.pieces, strict=True)):
            if not torch.equal(param.full_tensor(), copy):  # type: ignore[attr-defined]
                found.append(f"weight {index}")
            if pieces and pieces[0].grad is not None:
                wanted = torch.cat([self.reference.state[piece]["momentum_buffer"] for piece in pieces])
                if not torch.equal(self.optimizer.state[param]["momentum_buffer"].full_tensor().flatten(0, -2), wanted):
                    found.append(f"momentum {index}")
        return found


@pytest.mark.full(short=["3-3"])
@pytest.mark.parametrize(("strategy", "num_ranks"), [(0, 2), (2, 4), (3, 1), (3, 3)])
@on_ranks()
def test_split_matrices_and_stacks_step_as_matrices_of_their_own(tmp_path: Path, strategy: int) -> None:
    folder = tmp_path / "saved"
    pair = SplitReferencePair(stacks(), flat(strategy))
    assert step_of(pair.optimizer) == "on shards and whole matrices (Muon, split into first, rest)"
    for step in range(3):
        pair.step(step, without=2 if step == 0 else None)
        assert pair.differing() == [], f"step {step}"
    save_checkpoint(pair.model, pair.optimizer, folder, iteration=3)
    fresh = SplitReferencePair(stacks(), flat(strategy))
    load_checkpoint(fresh.model, fresh.optimizer, folder)
    fresh.copies, fresh.pieces, fresh.reference = pair.copies, pair.pieces, pair.reference
    assert fresh.differing() == []
    fresh.step(3)
    assert fresh.differing() == []


@pytest.mark.full(short=["3"])
@pytest.mark.parametrize("strategy", [1, 3])
@on_ranks(4)
def test_split_matrices_that_tensor_parallelism_cuts_step_as_matrices_of_their_own(strategy: int) -> None:
    arrangement = tensor_parallel(divide_tensors)
    model = build_dense()
    arrangement.place(model)
    for param in model.parameters():
        param.requires_grad_(param.dim() == 2)
    pair = SplitReferencePair(
        model, {**arrangement.arguments(), "zero_dp_strategy": strategy, "fsdp_unit_modules": [Block]}
    )
    for step in range(2):
        pair.step(step)
        assert pair.differing() == [], f"step {step}"


@on_ranks(2)
def test_the_matrices_of_a_stack_are_shared_out_over_ranks() -> None:
    """A stack as one piece would leave one of two ranks with nothing to do."""
    model = nn.Module()
    model.stack = nn.Parameter(torch.ones(4, 4, 3))
    made = torch.optim.Muon([nn.Parameter(torch.ones(1, 1))])
    made.param_groups[0]["params"] = [model.stack]
    _, optimizer = fully_shard(model, made, fsdp_unit_modules=[], **flat(3))
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    iterated: list[torch.Size] = []

    iterate = muon._zeropower_via_newtonschulz
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(muon, "_zeropower_via_newtonschulz", lambda *a: [iterated.append(a[0].shape), iterate(*a)][1])
        optimizer.step()
    assert iterated == [torch.Size((4, 3))] * 2


@pytest.mark.parametrize(
    "sizes", [(4, 4), (9, 0), (4.5, 4.5), (), {"q": 6, "k": 1, "v": 1}, {}, {0: 9}, {"q": True, "k": 8}, 3.5, True]
)
def test_split_sizes_that_do_not_fit_are_refused(sizes: Any) -> None:
    optimizer = torch.optim.Muon([{"params": [nn.Parameter(torch.ones(9, 2))], "split_sizes": sizes}])
    with pytest.raises(ConfigurationError, match=r"shape \(9, 2\); give the rows of each piece, which add up to 9, or"):
        check_muon(optimizer)


class OwnMuon(torch.optim.Muon):
    """Somebody's own."""


@on_ranks(2)
def test_what_cannot_be_right_is_refused_on_all_ranks() -> None:
    model = fully_shard_model(matrices(), mesh(), fsdp_unit_modules=[nn.Linear])
    with pytest.raises(
        ConfigurationError, match=r"^OwnMuon cannot update sharded parameters: it works on whole tensors"
    ):
        fully_shard_optimizer(OwnMuon(model.parameters()))
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=None)
    narrow = fully_shard_model(
        matrices().bfloat16(), mesh(), fsdp_unit_modules=[nn.Linear], mixed_precision_policy=policy
    )
    with pytest.raises(ConfigurationError, match="divides bf16 momentum by its norm"):
        fully_shard_optimizer(torch.optim.Muon(narrow.parameters(), nesterov=False))
    made = fully_shard_optimizer(torch.optim.Muon([next(narrow.parameters())]))
    with pytest.raises(ValueError, match=r"\(shape \(3,\)\) is not a parameter of the model"):
        made.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
