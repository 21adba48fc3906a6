"""Exports checkpoints of the trainer as Hugging Face folders; this package's own decoder as a Llama.

The decoder computes what a Llama does where it has RMSNorm, SwiGLU, rotary positions and no biases: its matrices of
queries, keys and values, and of gate and value, are those of a Llama one below the other.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.hf import export_hf
from megatron_fsdp.checkpoint.naming import MODEL
from megatron_fsdp.checkpoint.rearranged import Part, RearrangedFolder
from megatron_fsdp.config.hf_config import read_config
from megatron_fsdp.config.import_path import literal
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.optional_packages import require
from megatron_fsdp.sharding.shards import Box

_FACTS = "trainer.facts"
_OF_MODEL = " of the model"
_FLAGS = {"--norm-epsilon": "rms_norm_eps", "--num-attention-heads": "num_attention_heads"}
"""Options of runs that are not named after the model's fields, and the fields that they become."""
_NOT_COMPUTED = ("max_position_embeddings", "token_id", "dropout", "pdrop")
"""Endings of fields that do not change the result of trained weights."""
_KEY = re.compile(rf"{MODEL}\.(?:module\.)*(.+)")
_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "attention.query_key_value": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "feed_forward.gate_and_value": ("mlp.gate_proj", "mlp.up_proj"),
    "feed_forward.output": ("mlp.down_proj",),
}
"""Our names in a block, and Llama's in a layer; several of them divide the rows, in this order."""


def export_run(source: CheckpointFolder, folder: Path, config: Path | None, **options: Any) -> tuple[str, ...]:
    """Write the model of a checkpoint as a Hugging Face folder, as `export_hf`.

    A config that contradicts the checkpoint's own facts is an error; for this package's decoder one is written if none
    is given.

    Raises:
        ConfigurationError: The config is missing or contradicts the run, or the decoder is not shaped as a Llama.
    """
    facts = saved_facts(source)
    keys = {name[1]: key for key in source.tensors if (name := _KEY.fullmatch(key))}
    if "blocks.0.attention.query_key_value.weight" not in keys:
        if config is None:
            raise ConfigurationError(
                f"{source.path} holds no decoder of this package, whose config is known: give --config FOLDER with the "
                "config.json of the model that was trained"
            )
        _require_agreement(config, dict(_config_fields(facts)), source.path)
        return export_hf(source, folder, config, **options)
    view, fields = _as_llama(source, keys, facts)
    if config is not None:
        _require_agreement(config, fields, source.path)
        return export_hf(view, folder, config, **options)
    with tempfile.TemporaryDirectory() as written:
        transformers: Any = require("transformers", "a Hugging Face folder")
        llama = transformers.LlamaConfig(**fields, bos_token_id=None, eos_token_id=None, pad_token_id=None)
        llama.architectures = ["LlamaForCausalLM"]
        llama.dtype = view.tensors[f"{MODEL}.{_NAMES['embedding.weight']}"].dtype
        llama.save_pretrained(written)
        return export_hf(view, folder, written, **options)


def saved_facts(source: CheckpointFolder) -> dict[str, str]:
    """Read the trainer's facts of the run that saved; empty for other checkpoints."""
    stored = source.read_object(_FACTS) if _FACTS in source.objects else []
    pairs = stored if isinstance(stored, list) else []
    return {str(item[0]): str(item[1]) for item in pairs if isinstance(item, list | tuple) and len(item) == 2}


# ---- the decoder as a Llama ------------------------------------------------------------------------------------------


def _as_llama(
    source: CheckpointFolder, keys: Mapping[str, str], facts: Mapping[str, str]
) -> tuple[RearrangedFolder, dict[str, Any]]:
    """Present a decoder under the names of a Llama; also return the fields of its config."""
    others = {
        "learned positions (--position-embedding-type)": "positions.weight" in keys,
        "biases (--add-bias-linear), or LayerNorm (--normalization)": any(name.endswith(".bias") for name in keys),
        "normalised queries and keys (--qk-layernorm)": any(".query_norm." in name for name in keys),
        "a feed-forward layer without a gate (no --swiglu)": any(".feed_forward.input." in name for name in keys),
    }
    if odd := [what for what, has in others.items() if has]:
        raise ConfigurationError(
            f"{source.path} holds a decoder that no Llama computes: it has {', '.join(odd)}; only those with RMSNorm, "
            "SwiGLU and rotary positions, without biases and norms of queries and keys, are exported"
        )
    heads = int(_number(source, facts, "num_heads", "--num-attention-heads"))
    epsilon = _number(source, facts, "norm_epsilon", "--norm-epsilon")
    base = _number(source, facts, "rotary_base", "--rotary-base")
    shapes = {name: source.tensors[key].shape for name, key in keys.items()}
    _require_whole(source, shapes)
    vocabulary, dim = shapes["embedding.weight"]
    width = shapes["blocks.0.attention.output.weight"][1] // heads
    groups = (shapes["blocks.0.attention.query_key_value.weight"][0] // width - heads) // 2
    tensors = {f"{MODEL}.{name}": parts for name, parts in _parts(keys, shapes, (heads * width, groups * width))}
    fields = {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "intermediate_size": shapes["blocks.0.feed_forward.output.weight"][1],
        "num_hidden_layers": len({name.split(".")[1] for name in keys if name.startswith("blocks.")}),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "tie_word_embeddings": _are_tied(source, keys),
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(facts.get("--seq-length", 2048)),
    }
    return RearrangedFolder(source, tensors, {}), fields


def _require_whole(source: CheckpointFolder, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise for a checkpoint that lacks matrices of the decoder, or has others."""
    numbers = {name.split(".")[1] for name in shapes if name.startswith("blocks.")}
    known = {f"blocks.{number}.{name}.weight" for number in numbers for name in _BLOCK}
    whole = known | _NAMES.keys()
    odd = sorted((shapes.keys() ^ whole) - {"head.weight"})  # which tied embeddings may be without
    flat = [name for name in shapes if len(shapes[name]) != (1 if "norm." in name else 2)]
    if odd or flat:
        raise CheckpointError(
            f"{source.path} does not hold a whole decoder of this package: {', '.join([*odd, *flat][:4])} is missing, "
            "or of another model"
        )


def _number(source: CheckpointFolder, facts: Mapping[str, str], name: str, flag: str) -> float:
    """Return a number that the shapes of weights do not determine."""
    found = literal(facts.get(name + _OF_MODEL, facts.get(flag, "")))
    if not isinstance(found, int | float) or not found > 0:
        raise CheckpointError(
            f"{source.path} does not say {flag}, which the weights do not show: export a checkpoint that `mfsdp train` "
            "has saved"
        )
    return found


def _parts(
    keys: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], rows: tuple[int, int]
) -> Iterator[tuple[str, list[Part]]]:
    """Yield the parts of each tensor of the Llama, by its name; `rows` are those of queries, and of keys or values."""
    for name, key in keys.items():
        shape = shapes[name]
        if name in _NAMES:
            yield _NAMES[name], [Part.whole(key, shape)]
            continue
        _, number, inside = name.split(".", 2)
        targets = _BLOCK[inside.removesuffix(".weight")]
        counts = [rows[0], rows[1], rows[1]] if len(targets) == 3 else [shape[0] // len(targets)] * len(targets)
        for at, (target, count) in enumerate(zip(targets, counts, strict=True)):
            rest = tuple(0 for _ in shape[1:])
            there, here = (Box((first, *rest), (count, *shape[1:])) for first in (sum(counts[:at]), 0))
            yield f"model.layers.{number}.{target}.weight", [Part(key, there, here)]


def _are_tied(source: CheckpointFolder, keys: Mapping[str, str]) -> bool:
    """Compare the head with the embeddings: tied ones are stored under both names."""
    if "head.weight" not in keys:
        return True
    embedding = keys["embedding.weight"]
    return all(
        torch.equal(values, source.read_box(embedding, box.offsets, box.lengths))
        for box, values in source.parts(keys["head.weight"])
    )


# ---- the config and the run ------------------------------------------------------------------------------------------


def _config_fields(facts: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """List the fields of a transformers config that a run determines, and their values."""
    for name, text in facts.items():
        field = name.removesuffix(_OF_MODEL) if name.endswith(_OF_MODEL) else _FLAGS.get(name)
        if field is not None and "--rotary-base" not in name:
            yield field, literal(text)
    if (base := facts.get("--rotary-base")) is not None:
        yield "rope_parameters", {"rope_theta": literal(base)}


def _require_agreement(folder: Path, said: Mapping[str, Any], run: Path) -> None:
    """Raise for a config whose fields differ from the run's; for a mapping, of those that the run has."""
    if not folder.is_dir():
        return  # exporting says so
    config = read_config(folder)
    wrong = []
    for name, value in said.items():
        here: Any = config
        for part in name.split("."):
            here = getattr(here, part, None)
        if here is None or value is None or name.endswith(_NOT_COMPUTED):
            continue
        differs = here != value
        if isinstance(here, Mapping) and isinstance(value, Mapping):
            differs = any(here.get(key, inner) != inner for key, inner in value.items())
        if differs:
            wrong.append(f"{name} is {here!r} there and {value!r} in the run")
    if wrong:
        raise ConfigurationError(
            f"{folder} has the config of another model than {run} holds: {'; '.join(wrong[:8])}; correct it, or "
            "give the config that the model was trained with"
        )
