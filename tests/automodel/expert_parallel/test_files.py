"""Models with divided experts are loaded from Hugging Face files and saved as such."""

from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from tests.checkpoint.hf.hf_models import same_tensors, stored
from tests.conftest import RunRanks

pytest.importorskip("transformers")

from tests.automodel.expert_parallel.training import KINDS, divide, whole
from tests.automodel.small_models import build

_CHANGES = {
    "whole experts": {"num_hidden_layers": 2},
    "slices of experts": {"num_hidden_layers": 2, "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6},
}
"""With 3 experts on each of 2 ranks, FSDP2 cannot give 2 ranks whole ones."""


def save_and_load(kind: str, ep: int, folder: str, changes: dict[str, int]) -> tuple[bool, bool]:
    """Save the divided model; load transformers' files into one that was made on the meta device."""
    model = build(kind, **changes)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    divide(model, ep)
    save_hf(model, f"{folder}/ours")
    with torch.device("meta"):
        blank = build(kind, **changes)
    divide(blank, ep)
    blank.to_empty(device="cpu")
    with torch.no_grad():
        for param in blank.parameters():
            param.fill_(7.0)
    report = load_hf(blank, f"{folder}/theirs")
    return report.is_complete, same_tensors(whole_parameters(blank), wanted)


def whole_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p) for name, p in model.named_parameters()}


@pytest.mark.full(short=["mixtral-slices of experts"])
@pytest.mark.parametrize("cut", _CHANGES)
@pytest.mark.parametrize("kind", KINDS)
def test_files_are_those_of_transformers(run_ranks: RunRanks, tmp_path: Path, kind: str, cut: str) -> None:
    build(kind, **_CHANGES[cut]).save_pretrained(tmp_path / "theirs")
    found = run_ranks(4, save_and_load, kind, 2, str(tmp_path), _CHANGES[cut])
    assert found == [(True, True)] * 4
    assert same_tensors(stored(tmp_path / "ours"), stored(tmp_path / "theirs"))
