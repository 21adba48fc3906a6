"""The example of the guide runs as printed, with each strategy by one line."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest
import tokenizers
import torch.distributed as dist
import transformers
import yaml

from tests.conftest import RunRanks
from tests.support.source_tree import ROOT

EXAMPLE = ROOT / "examples" / "finetune_hf.py"


def write_settings(folder: Path, name: str, **training: str) -> Path:
    """The settings as they are shipped, but for that one line, a short training, the folders and what else is given."""
    settings = yaml.safe_load((ROOT / "examples" / "finetune_hf.yaml").read_text(encoding="utf-8"))
    assert settings["distributed"]["strategy"] == "fsdp2"
    settings["distributed"]["strategy"] = name
    short = {"steps": 10, "sequence": 32, "text": str(ROOT / "docs"), "output": str(folder / "out")}
    settings["training"] |= short | training
    path = folder / "settings.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def assert_trained(shown: str, folder: Path) -> None:
    told = re.search(r"step 10: loss (\d+\.\d+), gradient norm (\d+\.\d+)", shown)
    assert told is not None, shown
    assert float(told[1]) < 5.0  # ln 256 = 5.5 at the start
    assert "plain transformers reads 791,680 parameters" in shown
    assert (folder / "out" / "model.safetensors").is_file()


def run_as_a_rank(settings: str) -> str:
    """The example in ranks that are joined already; what it shows."""
    return run_example(settings)


def run_example(settings: str) -> str:
    """The example in a process whose group is needed afterwards; what it shows."""
    with (
        mock.patch.object(sys, "argv", [str(EXAMPLE), settings]),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(io.StringIO()) as shown,
    ):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return shown.getvalue()


@pytest.mark.full(short=["megatron_fsdp"])
@pytest.mark.parametrize("name", ["megatron_fsdp", "ddp"])  # tests/test_torchrun.py runs it as it is shipped
def test_one_line_of_yaml_is_another_strategy(run_ranks: RunRanks, tmp_path: Path, name: str) -> None:
    # In ranks that are joined already only the first would save the small model.
    model = runpy.run_path(str(EXAMPLE))["make_small_model"](tmp_path / "small")
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()  # one token for each byte
    of_model = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    of_model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=of_model).save_pretrained(model)
    first, second = run_ranks(2, run_as_a_rank, str(write_settings(tmp_path, name, model=model)))
    assert_trained(first, tmp_path)
    assert second == ""
