"""What is a wrapper, and what belongs to the model."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from megatron_fsdp.checkpoint.hf import load_hf, save_hf
from megatron_fsdp.errors import ConfigurationError
from tests.checkpoint.hf.hf_models import same_tensors, shard, stored
from tests.conftest import RunRanks


class Scaled(nn.Module):
    """A model whose only child has the name that wrappers use; with a buffer of its own, if asked for."""

    def __init__(self, value: float, has_buffer: bool = True) -> None:
        super().__init__()
        self.module = nn.Linear(3, 3)
        nn.init.constant_(self.module.weight, value)
        nn.init.constant_(self.module.bias, -value)
        if has_buffer:
            self.register_buffer("scale", torch.full((3,), value))


@pytest.mark.parametrize("has_buffer", [True, False])
def test_a_child_called_module_keeps_its_name(tmp_path: Path, has_buffer: bool) -> None:
    model = Scaled(2.0, has_buffer)
    save_hf(model, tmp_path / "out")
    assert same_tensors(stored(tmp_path / "out"), model.state_dict())
    (tmp_path / "plain").mkdir()
    save_file(model.state_dict(), tmp_path / "plain" / "model.safetensors")
    for folder in ("out", "plain"):
        other = Scaled(3.0, has_buffer)
        assert load_hf(other, tmp_path / folder).is_complete
        assert same_tensors(other.state_dict(), model.state_dict())


def save_and_load_sharded(folder: str) -> bool:
    model, other = shard(Scaled(2.0)), shard(Scaled(3.0))
    save_hf(model, folder)
    assert load_hf(other, folder).is_complete
    return all(
        torch.equal(value, torch.full_like(value, -2.0 if name.endswith("bias") else 2.0))
        for name, value in other.full_parameters().items()
    )


def test_our_wrapper_around_it_is_taken_off(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert run_ranks(2, save_and_load_sharded, str(tmp_path / "out")) == [True, True]
    assert same_tensors(stored(tmp_path / "out"), Scaled(2.0).state_dict())


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    for call in (load_hf, save_hf):
        with pytest.raises(ConfigurationError, match=r"model is a dict; give an nn\.Module"):
            call({}, tmp_path)  # type: ignore[arg-type]
