"""The pages on coming from elsewhere show the scripts as they are, and point at what is there."""

import inspect
import re
from pathlib import Path

import pytest

import megatron_fsdp
from tools.coming_from_diffs import ORIGINS, diff_of, page_of, printed_diff, with_diff


@pytest.mark.parametrize("origin", ORIGINS)
def test_the_diff_on_the_page_is_that_of_the_scripts(origin: str) -> None:
    diff = diff_of(origin)
    assert diff.startswith(
        f"--- examples/coming_from/{origin}_before.py\n+++ examples/coming_from/{origin}_after.py\n@@"
    )
    page = page_of(origin).read_text(encoding="utf-8")
    assert printed_diff(page) == diff
    assert with_diff(page, diff) == page


def test_a_page_without_a_diff_is_refused() -> None:
    with pytest.raises(ValueError, match="one diff"):
        printed_diff("words\n")


@pytest.mark.parametrize("origin", ORIGINS)
def test_links_lead_to_files_and_headings(origin: str) -> None:
    page = page_of(origin)
    targets = re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8"))
    assert len(targets) > 10
    assert [f"{file}#{heading}" for file, heading in targets if not leads_somewhere(page, file, heading)] == []


def leads_somewhere(page: Path, file: str, heading: str) -> bool:
    path = (page.parent / file).resolve() if file else page
    if not path.is_file():
        return False
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) if heading else []
    return not heading or heading in {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("origin", ORIGINS)
def test_keywords_of_ours_that_a_page_names_are_there(origin: str) -> None:
    """The right column of the table: `keyword=` is an argument, `model.method` a method."""
    rows = [
        row.split(" | ") for row in page_of(origin).read_text(encoding="utf-8").splitlines() if row.startswith("| ")
    ]
    ours = " ".join(row[1] for row in rows if len(row) > 1)
    arguments = {
        *inspect.signature(megatron_fsdp.fully_shard).parameters,
        *inspect.signature(megatron_fsdp.MegatronFSDP).parameters,
        *inspect.signature(megatron_fsdp.DistributedDataParallelConfig).parameters,
        *inspect.signature(megatron_fsdp.MixedPrecisionPolicy).parameters,
        *inspect.signature(megatron_fsdp.MegatronFSDP.full_parameters_context).parameters,
        *inspect.signature(megatron_fsdp.MegatronFSDP.take_part).parameters,
    }
    named = set(re.findall(r"`(\w+)=", ours)) | set(re.findall(r"[(,] ?(\w+)=", ours))
    assert named
    assert named - arguments == set()
    methods = set(re.findall(r"`model\.(\w+)", ours)) - {"bfloat16", "half", "module"}
    assert methods
    assert {name for name in methods if not hasattr(megatron_fsdp.MegatronFSDP, name)} == set()
