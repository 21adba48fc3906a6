"""The published page about flags: it is complete."""

import re
from pathlib import Path

from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED
from megatron_fsdp.train.options.options import OPTIONS

PAGE = Path(__file__).parents[3] / "docs" / "training_flags.md"


def test_every_flag_stands_once_in_the_right_table() -> None:
    tables = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        cells = re.findall(r"^\| (`--.*?) \| ", text, flags=re.MULTILINE)
        tables[title] = [flag.replace("--[no-]", "--") for cell in cells for flag in re.findall(r"`(--[^` ]+)", cell)]
    options = [flag for title, flags in tables.items() if title.islower() for flag in flags]
    assert options == [option.flag for option in OPTIONS.values()]
    assert tables["Other spellings"] == list(ALIASES)
    assert tables["Flags of Megatron-LM with one possible value"] == list(FIXED)
    assert sorted(tables["Flags of Megatron-LM without an effect"]) == sorted(EXPLAINED)
    assert sorted(tables["Flags of Megatron-LM that are refused"]) == sorted(REFUSED)
