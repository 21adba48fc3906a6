"""The programs of `examples/` that run on torch's FSDP2 and on ours print the same."""

from pathlib import Path

import pytest

from tests.support.source_tree import ROOT
from tests.test_pages import losses, run


@pytest.mark.full(short=["torchtitan"])
@pytest.mark.parametrize("name", ["torchtitan", "accelerate"])
def test_both_imports_train_alike(name: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / f"fsdp2_{name}.py")
    ours, theirs = (losses(run(tmp_path, 2, program, *words)) for words in ((), ("torch",)))
    assert len(ours) >= 5
    assert ours == pytest.approx(theirs, abs=2e-5)
