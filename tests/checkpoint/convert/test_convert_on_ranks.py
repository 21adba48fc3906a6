"""Several ranks share a conversion; what goes wrong on one stops all, and leaves nothing behind."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron_fsdp.checkpoint.convert import convert as module
from megatron_fsdp.checkpoint.convert.convert import ConversionMismatchError, Steps, TorchDistSource, convert
from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.manifest import Manifest, checksum_box
from megatron_fsdp.checkpoint.verify import share_out
from tests.support.on_ranks import assert_equal_tensors, of_ranks, on_ranks, once, refusal, same_on_ranks
from tests.support.torch_dist import GptSpec, WriteOptions, expected_tensors, make_truth, write_torch_dist

SPEC = GptSpec(experts=2)


@given(st.lists(st.integers(0, 1000), max_size=40), st.integers(1, 7))
def test_shares_hold_each_item_once_and_balance(sizes: list[int], ranks: int) -> None:
    shares = [share_out(sizes, rank, ranks) for rank in range(ranks)]
    assert sorted(index for share in shares for index in share) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_any_number_of_ranks_writes_the_same(tmp_path: Path, num_ranks: int) -> None:
    truth, source, told = make_truth(SPEC), tmp_path / "iter_0000007", list[int]()
    once(lambda: write_torch_dist(source, truth, WriteOptions(generation=num_ranks, tp=2)))
    report = convert(source, tmp_path / "out", steps=Steps(verify=True), progress=lambda done, _: told.append(done))
    folder = CheckpointFolder(tmp_path / "out")
    found = {key: folder.read_tensor(key) for key in folder.tensors if not key.startswith("rng_state")}
    assert_equal_tensors(found, expected_tensors(truth))
    manifest = Manifest.read(tmp_path / "out")
    assert manifest is not None
    assert (manifest.tensors.keys(), manifest.objects.keys()) == (folder.tensors.keys(), folder.objects.keys())
    for key, tensor in expected_tensors(truth).items():
        assert manifest.tensors[key].checksum == f"{checksum_box(tensor, (0,) * tensor.ndim, tensor.shape):016x}"
    assert report.ranks == num_ranks
    assert told == sorted(told)
    keys = sorted(part.target for part in (*report.plan.values, *report.plan.moves))
    assert keys == sorted([*folder.tensors, *folder.objects])
    dropped = same_on_ranks([item.key for item in report.plan.dropped])  # also which states of ranks are left behind
    assert len([key for key in dropped if key.startswith("rerun_state_machine_state")]) == 2
    assert folder.read_object("rerun_state_machine.mode") == "disabled"
    written = of_ranks(told[-1])
    assert max(written) - min(written) <= 24 * 8 * 4  # the largest tensor
    assert len([name for name in folder.files if name.endswith(".distcp")]) == num_ranks
    assert not torch.cuda.is_initialized()


@on_ranks(3)
def test_what_fails_on_one_rank_is_raised_on_all_and_nothing_is_left(tmp_path: Path) -> None:
    source = tmp_path / "iter_0000007"
    once(lambda: write_torch_dist(source, make_truth(SPEC)))
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 2:
            patch.setattr(TorchDistSource, "read", Mock(side_effect=OSError("the disk is gone")))
        assert "rank 2: OSError: the disk is gone" in refusal(convert, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]


def test_verification_finds_one_changed_element_and_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_torch_dist(tmp_path / "iter_0000007", make_truth(SPEC))
    write = module.write_state

    def write_and_damage(state: dict[str, Any], folder: Path, *arguments: Any, **options: Any) -> None:
        write(state, folder, *arguments, **options)
        entry = CheckpointFolder(folder).tensors["model.module.output_layer.weight"].chunks[0].span
        path = folder / entry.file
        raw = bytearray(path.read_bytes())
        weight = make_truth(SPEC).masters["output_layer.weight"].numpy().tobytes()
        raw[raw.index(weight, entry.offset) + 5] ^= 1
        path.write_bytes(raw)

    monkeypatch.setattr(module, "write_state", write_and_damage)
    with pytest.raises(ConversionMismatchError, match=r"model\.module\.output_layer\.weight holds other"):
        convert(source, tmp_path / "out", steps=Steps(verify=True))
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]


def test_of_the_folder_of_a_run_the_latest_is_taken_and_an_empty_target_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("iter_0000007", "iter_0000008"):
        write_torch_dist(run / name, make_truth(SPEC))
    (run / "latest_checkpointed_iteration.txt").write_text("7")
    (tmp_path / "out").mkdir()
    report = convert(run, tmp_path / "out")
    assert report.source == run / "iter_0000007"
    assert report.as_json()["source"] == str(run / "iter_0000007")
