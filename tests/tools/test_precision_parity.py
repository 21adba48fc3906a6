"""The tool behind docs/precision.md: what it measures on ranks, and that the document is what it writes."""

from pathlib import Path

import pytest

from tests.conftest import RunRanks
from tools.precision_parity import (
    BEGIN,
    END,
    NUM_RANKS,
    POLICIES,
    gap_table,
    gaps,
    insert,
    measure,
    plot,
    render,
    stage_table,
)

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def losses(run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    first, second = run_ranks(NUM_RANKS, measure, 2, tmp_path_factory.mktemp("tokens"))
    assert first == second
    return first


def test_runs_start_alike_and_part_only_where_something_is_rounded(losses: dict[str, list[float]]) -> None:
    assert list(losses) == [policy.name for policy in POLICIES]
    largest = {policy.name: max(gaps(losses, policy)) for policy in POLICIES}
    for policy in POLICIES:
        in_same_dtype = policy.reference == "fp32" if policy.dtype == "fp32" else policy.reference != "fp32"
        if in_same_dtype:
            assert losses[policy.name][0] == losses[policy.reference][0], "the first forward has not met a gradient yet"
    for exact in ("fp32, again", "bf16 compute, bf16 exchange"):  # bfloat16 gradients lose nothing on the way
        assert largest[exact] == 0.0
    for rounded in ("fp32, bf16 exchange", "fp32, fp16 exchange", "bf16 compute, all gradients bf16"):
        assert 0.0 < largest[rounded] < 0.05
    assert 0.0 < largest["bf16 everywhere"] < 0.2


def test_every_run_is_in_the_table_and_in_the_picture(losses: dict[str, list[float]], tmp_path: Path) -> None:
    rows = gap_table(losses).splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [
        policy.name for policy in POLICIES if policy.name != policy.reference
    ]
    assert "| fp32, again | fp32 |" in rows[0]
    assert rows[0].endswith("| 0 | 0 |")
    plot(tmp_path / "picture.png", losses)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_measured_part_is_replaced_and_the_rest_stays(losses: dict[str, list[float]]) -> None:
    document = insert(f"before\n{BEGIN}\nold\n{END}\nafter\n", render(losses))
    assert document.startswith(f"before\n{BEGIN}\n\n| run | compute")
    assert document.endswith(f"{END}\nafter\n")
    assert "old" not in document
    assert insert(document, render(losses)) == document


def test_the_document_names_the_dtypes_that_the_engine_resolves() -> None:
    document = (DOCS / "precision.md").read_text()
    assert stage_table() in document
    assert "50 AdamW steps of 2 microbatches on 2 ranks" in document
    for policy in POLICIES:
        assert policy.name == policy.reference or f"| {policy.name} | {policy.reference} |" in document
    assert (DOCS / "images" / "precision_parity.png").exists()
