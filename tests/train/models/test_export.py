"""Checkpoints of the trainer as Hugging Face folders: equal logits, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_fsdp.checkpoint import save_checkpoint
from megatron_fsdp.cli.main import main
from megatron_fsdp.train.checkpoints import TrainingState
from megatron_fsdp.train.models.decoder import Decoder, ModelShape
from tests.support.on_ranks import fixed_seed

transformers = pytest.importorskip("transformers")

FACTS = {"--num-attention-heads": "4", "--norm-epsilon": "0.001", "--rotary-base": "500.0", "--seq-length": "32"}
LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "num_layers": 2,
    "dim": 16,
    "num_heads": 4,
    "hidden_dim": 24,
    "normalizes_query_key": False,
    "rotary_base": 500.0,
    "norm_epsilon": 1e-3,
    "init_std": 0.3,
}


def saved(root: Path, facts: dict[str, str] = FACTS, **changes: Any) -> Decoder:
    with fixed_seed(0):
        decoder = Decoder(ModelShape(**LLAMA | changes))
        for param in decoder.parameters():
            if param.dim() == 1:
                torch.nn.init.normal_(param, 1.0, 0.3)
    save_checkpoint(decoder, None, root, iteration=1, extra={"trainer": TrainingState(facts)})
    return decoder


def exported(tmp_path: Path, *more: str) -> int:
    return main(["checkpoint", "to-hf", str(tmp_path / "run"), str(tmp_path / "out"), *more])


@pytest.mark.parametrize(
    "changes", [{}, {"num_query_groups": 2}, {"kv_channels": 6, "num_query_groups": 1}, {"ties_embeddings": True}]
)
def test_a_decoder_becomes_a_llama(tmp_path: Path, changes: dict[str, Any]) -> None:
    decoder = saved(tmp_path / "run", **changes)
    assert exported(tmp_path) == 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.tie_word_embeddings == changes.get("ties_embeddings", False)
    tokens = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, decoder(tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"normalizes_query_key": True}, "normalised queries and keys (--qk-layernorm)"),
        ({"is_gated": False}, "a feed-forward layer without a gate"),
        ({"has_bias": True}, "biases (--add-bias-linear)"),
        ({"normalization": "LayerNorm"}, "LayerNorm (--normalization)"),
        ({"learned_positions": 32}, "learned positions"),
    ],
)
def test_other_decoders_are_refused_by_what_they_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], told: str
) -> None:
    saved(tmp_path / "run", **changes)
    assert exported(tmp_path) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("rms_norm_eps", 1e-6, "rms_norm_eps is 1e-06 there and 0.001 in the run"),
        ("num_attention_heads", 2, "num_attention_heads is 2 there and 4 in the run"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "'rope_theta': 10000.0"),
        ("hidden_act", "gelu", "hidden_act is 'gelu' there"),
        (None, None, ""),
    ],
)
def test_a_config_that_contradicts_the_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str | None, value: Any, told: str
) -> None:
    saved(tmp_path / "run")
    assert exported(tmp_path) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps(config if name is None else {**config, name: value}))
    (tmp_path / "config" / "tokenizer.json").write_text("tokens")
    for path in (tmp_path / "out").iterdir():
        path.unlink()
    assert exported(tmp_path, "--config", str(tmp_path / "config")) == (0 if name is None else 2)
    assert told in capsys.readouterr().err
    assert (tmp_path / "out" / "tokenizer.json").exists() == (name is None)
