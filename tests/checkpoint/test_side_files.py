"""`verify` misses files beside the tensors that a checkpoint cannot do without."""

from pathlib import Path

import pytest

from megatron_fsdp.checkpoint.verify import VerifyReport, verify
from tests.support.torch_dist.gpt import GptSpec, make_truth
from tests.support.torch_dist.write import WriteOptions, write_torch_dist


def files(report: VerifyReport) -> dict[str, set[str]]:
    kinds = {"damaged": report.damaged, "missing": report.missing, "unexpected": report.unexpected}
    return {kind: {item.name for item in found} for kind, found in kinds.items() if found}


@pytest.mark.full(short=["2"])
@pytest.mark.parametrize("generation", [1, 2, 3])
def test_what_megatron_writes_beside_the_tensors(tmp_path: Path, generation: int) -> None:
    folder = write_torch_dist(tmp_path / "a", make_truth(GptSpec(layers=1)), WriteOptions(generation=generation))
    marker, common = folder / "metadata.json", folder / "common.pt"
    assert verify(folder).is_whole
    assert files(verify(folder)) == {}
    right = marker.read_bytes()
    for wrong in (b"\0garbage", b"[1]", b'{"sharded_backend": "zarr"}', b"{}"):
        marker.write_bytes(wrong)
        assert files(verify(folder)) == {"damaged": {"metadata.json"}}, wrong
    marker.unlink()
    assert files(verify(folder)) == {"missing": {"metadata.json"}}
    if generation < 3:
        common.unlink()
        assert files(verify(folder)) == {"missing": {"metadata.json", "common.pt"}}
        marker.write_bytes(right)
        assert files(verify(folder)) == {"missing": {"common.pt"}}
        assert "common.pt: iteration, arguments and parameter groups" in str(verify(folder))
