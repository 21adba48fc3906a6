"""The published page about flags: it is complete."""

import re
from pathlib import Path

from megatron_fsdp.config.ddp_config_flags import flag_of
from megatron_fsdp.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron_fsdp.train.options.megatron_flags import ALIASES, EXPLAINED, FIXED, REFUSED
from megatron_fsdp.train.options.options import OPTIONS
from tools.training_flags_words import RULES

PAGE = Path(__file__).parents[3] / "docs" / "training_flags.md"


def test_every_flag_has_a_row_in_the_right_table() -> None:
    tables = {}
    for part in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        flags = re.findall(r"^\| `(--[^` ]+)`", text, flags=re.MULTILINE)
        tables[title] = [flag.replace("--[no-]", "--") for flag in flags]
    fields = [flag_of(name) for name in DistributedDataParallelConfig.__dataclass_fields__]
    options = [flag for title, flags in tables.items() if title.islower() and title != "ddp" for flag in flags]
    assert options == [option.flag for option in OPTIONS.values()]
    assert tables["ddp"] == fields
    assert tables["Other spellings"] == list(ALIASES)
    assert tables["Flags of Megatron-LM with one possible value"] == list(FIXED)
    assert tables["Flags of Megatron-LM without an effect"] == list(EXPLAINED)
    assert tables["Flags of Megatron-LM that are refused"] == list(REFUSED)


def test_all_rules_are_answered() -> None:
    assert len(RULES) == 45
    assert all(len(row) == 3 and all(row) for row in RULES)
