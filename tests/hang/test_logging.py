"""Models that keep logs: switched on by a call or the environment, on all ranks or none, without effect on values."""

import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_fsdp import DistributedDataParallel, DistributedDataParallelConfig, MegatronFSDP, fully_shard_model
from megatron_fsdp.comm.collectives import Moment
from megatron_fsdp.engine.observer import Phase
from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.hang.explain import Doing, state_of
from megatron_fsdp.hang.log_file import NO_NUMBER, Mark, read_folder
from tests.hang.test_hangs import step
from tests.support.on_ranks import engine_of, on_ranks, refusal, same_on_ranks
from tests.support.zoo import Layer, Ordered


def shard() -> MegatronFSDP:
    torch.manual_seed(0)
    return fully_shard_model(Ordered(), fsdp_unit_modules=[Layer])


@on_ranks(2)
def test_a_log_tells_what_was_done_and_changes_nothing(tmp_path: Path) -> None:
    model = shard()
    model.log_for_hangs(tmp_path)
    before = model.traffic()
    losses = [step(model).item() for _ in range(2)]
    sent = model.traffic().since(before)
    model.clip_grad_norm_(1.0)
    list(model.iter_full_tensors())
    dist.barrier()
    log = read_folder(tmp_path).ranks[dist.get_rank()]
    dist.barrier()
    model.stop_logging_for_hangs()
    step(model)
    after = read_folder(tmp_path).ranks[dist.get_rank()]
    plain = shard()
    assert losses == [step(plain).item() for _ in range(2)]
    count = Counter(record.phase for record in log.records if record.mark is Mark.LAUNCHES)
    assert count[Phase.UNSHARD] + count[Phase.REDUCE] == sent.gathers + sent.reductions
    assert log.records[-1].collective + 1 == sent.gathers + sent.reductions
    assert (count[Phase.NORM], count[Phase.AGREE]) == (1, 2)
    assert count[Phase.WHOLE] == 21  # twenty tensors and the end
    units = [(unit.label, len(unit.parameters), unit.num_bytes) for unit in log.writer.units]
    assert units == [("(root)", 4, 336), *((f"layers.{i}", 4, 492) for i in range(4))]
    assert log.writer.peers == (0, 1)
    assert (state_of(log).doing, state_of(after).doing) == (Doing.OUTSIDE, Doing.ENDED)
    assert len(after.records) == len(log.records) + 1
    same_on_ranks((log.records[-1].hash, log.writer.run))


def by_environment(folder: str, on: tuple[int, ...], seconds: str = "") -> str:
    rank = dist.get_rank()
    os.environ.update(
        {"MFSDP_HANG_LOG": folder} if rank in on else {}, MFSDP_HANG_TIMEOUT=seconds if rank in on else ""
    )
    try:
        torch.manual_seed(0)
        config = DistributedDataParallelConfig(overlap_grad_reduce=False)
        models = [shard(), DistributedDataParallel(config, Ordered())]
        step(models[1])
    except ConfigurationError as error:
        return str(error)
    finally:
        del os.environ["MFSDP_HANG_TIMEOUT"]
        os.environ.pop("MFSDP_HANG_LOG", None)
    with pytest.raises(ConfigurationError, match=r"this model keeps a log for hangs in .* already; call stop_logging"):
        models[0].log_for_hangs(folder)
    dist.barrier()
    logs = read_folder(Path(folder)).ranks
    dist.barrier()  # a model that goes says goodbye in its log
    return " ".join(f"{log.writer.rank}.{log.writer.model}.{len(log.records) > 0}" for log in logs)


@on_ranks(2)
def test_the_environment_asks_for_a_log_of_each_model(tmp_path: Path) -> None:
    assert by_environment(str(tmp_path), (0, 1), "60") == "0.0.False 1.0.False 0.1.True 1.1.True"
    assert {path.name for path in tmp_path.iterdir()} == {
        f"rank-0000{rank}{model}.mfsdplog" for rank in range(2) for model in ("", ".model-1")
    }


@on_ranks(2)
def test_ranks_have_to_agree_on_the_environment(tmp_path: Path) -> None:
    message = same_on_ranks(by_environment(str(tmp_path), (1,)))
    assert "MFSDP_HANG_LOG is not set on rank 0, set on rank 1" in message
    message = same_on_ranks(by_environment(str(tmp_path), (1,), "soon"))
    words = "MFSDP_HANG_TIMEOUT='soon' is not a time to wait; give seconds, more than 0"
    assert f"rank 1: ConfigurationError: {words}" in message


@on_ranks(2)
def test_a_folder_that_one_rank_cannot_write_is_refused_by_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = shard()
    message = refusal(model.log_for_hangs, tmp_path / "file" if dist.get_rank() == 1 else tmp_path)
    assert "rank 1: ConfigurationError: the log for hangs cannot be written to " in message
    assert "FileExistsError" in message or "NotADirectoryError" in message
    model.log_for_hangs(tmp_path)  # nothing is left of the attempt


class Unfinished:
    """The handle of a collective that an accelerator has not completed."""

    def is_completed(self) -> bool:
        return False


@on_ranks(1)
def test_a_heartbeat_names_the_collective_that_an_accelerator_has_not_finished(tmp_path: Path) -> None:
    model = shard()
    model.log_for_hangs(tmp_path)
    (log,) = engine_of(model).observers.watching
    for work, number in ((None, NO_NUMBER), (Unfinished(), 7)):
        log._keeps_handles = work is not None  # type: ignore[attr-defined]  # as on accelerators
        log.begins(Phase.REDUCE, 2)
        log.communicates(7, Moment.LAUNCHES, "reduce", None)
        log.communicates(7, Moment.LAUNCHED, "reduce", work)  # type: ignore[arg-type]
        log.ends(Phase.REDUCE, 2)
        log.look()  # type: ignore[attr-defined]
        beat = read_folder(tmp_path).ranks[0].beat
        assert beat is not None
        assert beat.collective == number
    assert (beat.phase, beat.unit) == (Phase.REDUCE, 2)
