"""`--audit-share`: steps computed again on other ranks; a planted bit is found in an audited step, and only there."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.train.audit import Audit
from megatron_fsdp.train.models.trained import Trained
from tests.conftest import RunRanks
from tests.support.train_program import by_step, job_of, refusal, train, write_text

WORLD = ("--deterministic", "world", "--micro-batch-size", "1", "--global-batch-size", "6", "--use-megatron-fsdp")
ZERO3 = ("--data-parallel-sharding-strategy", "optim_grads_params")
HYBRID = ("--num-distributed-optimizer-instances", "2")
WRONG = 1


def arguments(folder: Path, name: str, *options: str) -> tuple[str, ...]:
    text = str(write_text(folder / "text"))
    return (*WORLD, "--data-path", text, "--out", str(folder / name), *options)


def flip(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int32)[0] ^= 1


class Faults:
    """Lets rank 1 get one bit wrong in one step."""

    def __init__(self, what: str, at_step: int) -> None:
        self.what, self.at_step, self.step = what, at_step, 1
        self.passes = 0  # of the step
        self.original = Trained.accumulate, Trained.update

    def plant(self) -> None:
        accumulate, update = self.original
        faults = self

        def accumulates(trained: Trained, *args: Any) -> Any:
            faults.passes += 1
            hook = None
            if faults.hits("gradient") or (faults.what == "always" and dist.get_rank() == WRONG):
                hook = _spoil(trained)
            result = accumulate(trained, *args)
            if hook is not None:
                hook.remove()
            if faults.hits("sum"):
                pieces = (p.grad.to_local() for n, p in trained.model.named_parameters() if "blocks.0" in n)
                flip(next(piece for piece in pieces if piece.numel()))
            return result

        def updates(trained: Trained) -> None:
            update(trained)
            faults.step, faults.passes = faults.step + 1, 0

        Trained.accumulate, Trained.update = accumulates, updates  # type: ignore[method-assign]

    def hits(self, what: str) -> bool:
        is_here = self.what == what and dist.get_rank() == WRONG
        return is_here and self.step == self.at_step and self.passes == 1

    def remove(self) -> None:
        Trained.accumulate, Trained.update = self.original  # type: ignore[method-assign]


def _spoil(trained: Trained) -> Any:
    """Flip a bit of every gradient of the attention's output on its way back, in the first block."""
    block = next(module for name, module in trained.model.named_modules() if name.endswith("blocks.0"))

    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda grad: _flipped(grad))

    return block.register_forward_hook(hook)


def _flipped(grad: torch.Tensor) -> torch.Tensor:
    spoilt = grad.clone()
    spoilt.view(-1).view(torch.int32)[0] ^= 1 << 22
    return spoilt


def refusal_with_fault(what: str, at_step: int, *options: str) -> str:
    faults = Faults(what, at_step)
    faults.plant()
    if what == "weight":
        note = Audit.note_update

        def notes(audit: Audit, step: int) -> None:
            note(audit, step)
            if step + 1 == at_step and dist.get_rank() == WRONG:
                params = (p.to_local() for n, p in audit._trained.model.named_parameters() if "blocks.0" in n)
                flip(next(piece for piece in params if piece.numel()).detach())

        Audit.note_update = notes  # type: ignore[method-assign]
    try:
        return refusal(*options)
    finally:
        faults.remove()
        if what == "weight":
            Audit.note_update = note  # type: ignore[method-assign]


SAID = {
    "gradient": "step 4, audited: the gradients of unit blocks.0 for microbatch 1 are wrong on rank 1, as ",
    "sum": "step 4, audited: the sums of gradients of unit blocks.0 that rank 1 holds changed when",
    "weight": "step 4, audited: the weights of unit blocks.0 that rank 1 holds changed between the update",
}


@pytest.mark.full(short=["3-gradient", "3-sum"])
@pytest.mark.parametrize("what", SAID)
@pytest.mark.parametrize("ranks", [2, 3])
def test_one_wrong_bit_is_found_and_its_rank_named(run_ranks: RunRanks, tmp_path: Path, ranks: int, what: str) -> None:
    words = arguments(tmp_path, "out", *ZERO3, "--audit-share", "1")
    told = run_ranks(ranks, refusal_with_fault, what, 4, *words)
    assert told == [told[0]] * ranks
    assert told[0].startswith(f"AuditError: {SAID[what]}")


def test_a_rank_that_is_always_wrong_is_named_by_three(run_ranks: RunRanks, tmp_path: Path) -> None:
    words = (*ZERO3, "--audit-share", "1")
    told = run_ranks(3, refusal_with_fault, "always", 1, *arguments(tmp_path, "three", *words))[0]
    assert "are wrong on rank 1, as 2 of 3 passes say" in told
    told = run_ranks(2, refusal_with_fault, "always", 1, *arguments(tmp_path, "two", *words))[0]
    assert "differ between ranks 0 and 1, and passes do not tell which is wrong; audit on three ranks" in told


def audits(*words: str) -> Audit:
    return Audit(job_of(*words), *(None,) * 2)  # type: ignore[arg-type]


@pytest.mark.full
@pytest.mark.parametrize("what", SAID)
def test_a_fault_is_found_where_its_step_is_audited(run_ranks: RunRanks, tmp_path: Path, what: str) -> None:
    """So with the probability of the share, which is that of the steps that are audited."""
    words = arguments(tmp_path, "out", *ZERO3, "--audit-share", "0.4", "--train-iters", "6")
    due = [audits(*words).is_due(step) for step in range(1, 7)]
    assert True in due[1:]
    assert False in due[1:]
    for expected in (True, False):
        step = due.index(expected, 1) + 1  # the second or later: weights are noted after the step before
        name = ("--out", str(tmp_path / str(expected)))
        told = run_ranks(2, refusal_with_fault, what, step, *words, *name)[0]
        assert told.startswith("AuditError: " + SAID[what].replace("step 4", f"step {step}") if expected else "it went")


def test_each_microbatch_is_computed_again_with_the_probability_of_the_share(tmp_path: Path) -> None:
    """All microbatches of a step that is audited are, and no others; seeds and steps draw independently."""
    share, seeds, steps = 0.05, 300, 60
    words = arguments(tmp_path, "out", *ZERO3, "--audit-share", str(share))
    audit, due = audits(*words), list[list[bool]]()
    for seed in range(seeds):
        audit._seed = seed
        due.append([audit.is_due(step) for step in range(1, steps + 1)])
        assert due[-1] == [audit.is_due(step) for step in range(1, steps + 1)], "the same on every rank"
    counted = sum(map(sum, due))
    assert abs(counted - share * seeds * steps) < 4 * (seeds * steps * share * (1 - share)) ** 0.5
    for length in (1, 10, 45):  # a fault in each of so many steps
        found, chance = sum(any(of_seed[:length]) for of_seed in due), 1 - (1 - share) ** length
        assert abs(found - chance * seeds) < 4 * (seeds * chance * (1 - chance)) ** 0.5


@pytest.mark.full
@pytest.mark.parametrize("options", [ZERO3, (*ZERO3, *HYBRID), ("--data-parallel-sharding-strategy", "no_shard")])
def test_audits_change_no_bit(run_ranks: RunRanks, tmp_path: Path, options: tuple[str, ...]) -> None:
    run_ranks(4, train, *arguments(tmp_path, "plain", *options))
    run_ranks(4, train, *arguments(tmp_path, "audited", *options, "--audit-share", "0.7"))
    names = ("loss", "grad_norm")
    assert by_step(tmp_path / "audited", *names) == by_step(tmp_path / "plain", *names)


def test_without_a_deterministic_run_there_is_nothing_to_audit(tmp_path: Path) -> None:
    text = str(write_text(tmp_path / "text"))
    with pytest.raises(ConfigurationError, match="--audit-share does nothing without --deterministic world"):
        job_of("--data-path", text, "--audit-share", "0.5")
