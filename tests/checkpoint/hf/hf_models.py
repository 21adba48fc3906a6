"""Tiny models of transformers for the tests of Hugging Face files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import transformers
from torch import Tensor, nn

from megatron_fsdp import MegatronFSDP, fully_shard, fully_shard_model
from tests.support.language_models import config_of
from tests.support.on_ranks import fixed_seed, once

VOCABULARY = 41
"""Prime: no number of ranks divides it."""

_SMALL = {"vocab_size": VOCABULARY, "num_hidden_layers": 2, "num_key_value_heads": 2}
_SMALL |= {"hidden_size": 16, "intermediate_size": 24}
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _SMALL),
    "gpt2": ("gpt2", {"vocab_size": VOCABULARY, "n_embd": 16, "n_inner": None, "n_layer": 2, "n_head": 2}),
    "mixtral": ("mixtral", _SMALL),
    "qwen_moe": ("qwen2_moe", {**_SMALL, "moe_intermediate_size": 12, "tie_word_embeddings": True}),
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights."""
    family, sizes = _KINDS[kind]
    with fixed_seed(seed):
        return transformers.AutoModelForCausalLM.from_config(config_of(family, **{**sizes, **changes}))


def shard(model: nn.Module, strategy: int = 3, **options: Any) -> MegatronFSDP:
    return fully_shard_model(model, zero_dp_strategy=strategy, **options).eval()


def tokens() -> Tensor:
    return torch.arange(2, 14).reshape(2, 6)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(plain: nn.Module, strategy: int = 3, **options: Any) -> tuple[MegatronFSDP, torch.optim.Optimizer]:
    """Shard a model with an optimizer, and take a step."""
    optimizer = torch.optim.AdamW([param for param in plain.parameters() if param.requires_grad], lr=0.05)
    model, optimizer = fully_shard(plain, optimizer, zero_dp_strategy=strategy, **options)
    step(model, optimizer)
    return model.eval(), optimizer


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(input_ids=tokens()).logits


def stored(folder: str | Path) -> dict[str, Tensor]:
    """All tensors of a folder, read by the safetensors library."""
    found: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safetensors.safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            for key in file.keys():  # noqa: SIM118 (not a dict)
                assert key not in found
                found[key] = file.get_tensor(key)
    return found


def same_tensors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and bits are the same."""
    return found.keys() == wanted.keys() and all(
        value.dtype == wanted[name].dtype and torch.equal(value, wanted[name]) for name, value in found.items()
    )


def save_reference(folder: Path, kind: str, max_bytes: str = "5GB", **changes: Any) -> Tensor:
    """A folder as transformers writes it, for all ranks; returns the logits of the model."""
    model = build(kind, seed=7, **changes).eval()
    once(lambda: model.save_pretrained(folder, max_shard_size=max_bytes))
    return logits(model)
