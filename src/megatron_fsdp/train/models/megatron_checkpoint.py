"""A view of a checkpoint with Megatron's names as one of this package's decoder.

Megatron's GPT (and Llama-style) decoder has the same layers under other names, and divides two matrices another way:
the rows of `linear_qkv` are the queries, the key and the value of one group after another, and a gated `linear_fc1` is
stored as its halves `_w` (gate) and `_v`. Both are rows in another order, so no element is computed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from megatron_fsdp.checkpoint.folder import CheckpointFolder
from megatron_fsdp.checkpoint.naming import ITERATION
from megatron_fsdp.checkpoint.rearranged import Part, RearrangedFolder
from megatron_fsdp.errors import CheckpointError
from megatron_fsdp.sharding.shards import Box
from megatron_fsdp.train.models.decoder import Decoder, ModelShape

NAMES: Mapping[str, str] = {
    "embedding.word_embeddings.": "embedding.",
    "embedding.position_embeddings.": "positions.",
    "decoder.layers.#.input_layernorm.": "blocks.#.attention_norm.",
    "decoder.layers.#.self_attention.linear_qkv.layer_norm_": "blocks.#.attention_norm.",
    "decoder.layers.#.self_attention.linear_qkv.": "blocks.#.attention.query_key_value.",
    "decoder.layers.#.self_attention.q_layernorm.": "blocks.#.attention.query_norm.",
    "decoder.layers.#.self_attention.k_layernorm.": "blocks.#.attention.key_norm.",
    "decoder.layers.#.self_attention.linear_proj.": "blocks.#.attention.output.",
    "decoder.layers.#.pre_mlp_layernorm.": "blocks.#.feed_forward_norm.",
    "decoder.layers.#.mlp.linear_fc1.layer_norm_": "blocks.#.feed_forward_norm.",
    "decoder.layers.#.mlp.linear_fc1.": "blocks.#.feed_forward.input.",
    "decoder.layers.#.mlp.linear_fc2.": "blocks.#.feed_forward.output.",
    "decoder.final_layernorm.": "norm.",
    "output_layer.": "head.",
}
"""The part before `weight` or `bias` in Megatron's names, and in ours; # is the number of the layer. A gated
`linear_fc1` is `gate_and_value` here."""

_PARAMETER = re.compile(r"(model\.)(?:module\.)*(.+)")
_STATE = re.compile(r"(optimizer\.state\.)(?:module\.)*(.+)(\.[^.]+)")
_LAYER = re.compile(r"(?<=layers\.)\d+")
_NAME = re.compile(r"(.+[._])(weight|bias)((?<=linear_fc1\.weight)_[wv]|(?<=linear_fc1\.bias)_[wv])?")

View = Callable[[CheckpointFolder], CheckpointFolder]


def own_name(name: str, *, is_gated: bool) -> str | None:
    """Return our name of a parameter of Megatron's decoder; None if it has no counterpart."""
    parsed = _NAME.fullmatch(_LAYER.sub("#", name, count=1))
    if parsed is None or parsed[1] not in NAMES:
        return None
    found = NAMES[parsed[1]] + parsed[2]
    if is_gated or parsed[3]:  # halves may have been left together, as by `--swiglu none`
        found = found.replace(".feed_forward.input.", ".feed_forward.gate_and_value.")
    number = _LAYER.search(name)
    return found if number is None else found.replace("#", number[0])


def view_for(
    model: nn.Module, samples_per_step: int, extra: Mapping[str, Mapping[str, object]], *, strict: bool
) -> View:
    """Return the view through which a model loads checkpoints: Megatron's under our names, others unchanged.

    It raises a CheckpointError if `strict` and the vocabularies differ, and for checkpoints that must be converted
    first. `extra` is the state that a fresh run saves beside the model, by name; Megatron's iteration replaces that of
    the loop, and `samples_per_step` is used if the checkpoint does not have the number of consumed samples.
    """
    decoder = next((module for module in model.modules() if isinstance(module, Decoder)), None)

    def view(stored: CheckpointFolder) -> CheckpointFolder:
        if "embedding.word_embeddings.weight" in stored.tensors:
            raise CheckpointError(
                f"{stored.path} is a torch_dist checkpoint of Megatron's: convert it (mfsdp checkpoint convert "
                f"{stored.path} FOLDER) and load that folder"
            )
        parsed = [_PARAMETER.fullmatch(key) for key in stored.tensors]
        if decoder is None or all(name is None or own_name(name[2], is_gated=False) is None for name in parsed):
            return stored
        if strict:
            _require_vocabulary(stored, decoder.shape.vocab_size)
        objects = {f"{name}.{key}": value for name, state in extra.items() for key, value in state.items()}
        steps = stored.read_object(ITERATION) if ITERATION in stored.objects else 0
        if "trainer" in extra and isinstance(steps, int):
            args = stored.read_object("args") if "args" in stored.objects else None
            said = args if isinstance(args, Mapping) else getattr(args, "__dict__", {})
            samples = said.get("consumed_train_samples")
            objects["trainer.steps"] = steps
            objects["trainer.samples"] = samples if isinstance(samples, int) else steps * samples_per_step
        return RearrangedFolder(stored, rearranged(stored, decoder.shape), {ITERATION: steps, **objects})

    return view


def _require_vocabulary(stored: CheckpointFolder, size: int) -> None:
    for key, entry in stored.tensors.items():
        if key.startswith("model.") and key.endswith(".word_embeddings.weight") and entry.shape[:1] != (size,):
            raise CheckpointError(
                f"{stored.path} has a vocabulary of {entry.shape[0]} ids and this model one of {size}: give the "
                "tokenizer of the run that saved it, and --make-vocab-size-divisible-by as there (times its "
                "tensor-parallel ranks)"
            )


def rearranged(folder: CheckpointFolder, shape: ModelShape) -> dict[str, list[Part]]:
    """Return the parts, rows of stored tensors, that make up each of our parameters and its optimizer state, by key.

    Parameters that the decoder does not have keep their names, so that a load reports them.
    """
    sources: dict[str, list[str]] = {}
    for key in folder.tensors:
        parsed = _STATE.fullmatch(key) or _PARAMETER.fullmatch(key)
        if parsed is None:
            continue
        section, name, *slot = parsed.groups()
        ours = own_name(name, is_gated=shape.is_gated) or name
        sources.setdefault(f"{section}module.{ours}{''.join(slot)}", []).append(key)
    found: dict[str, list[Part]] = {}
    for ours, keys in sources.items():
        alike = len({(folder.tensors[key].shape[1:], folder.tensors[key].dtype) for key in keys}) == 1
        for name, joined in [(ours, keys)] if alike else [(key, [key]) for key in keys]:
            found[name] = _parts(folder, name, joined, shape)
    return found


def _parts(folder: CheckpointFolder, ours: str, keys: Sequence[str], shape: ModelShape) -> list[Part]:
    lengths = folder.tensors[keys[0]].shape
    if not lengths:  # the step counter, the same for both halves
        return [Part.whole(keys[0], ())]
    queries, width = shape.num_heads // shape.groups, shape.head_dim
    if ".query_key_value." in ours and lengths[0] == (queries + 2) * shape.groups * width:
        # The queries of all groups, then their keys, then their values.
        kinds = ((0, queries), (queries, 1), (queries + 1, 1))
        starts = [((queries + 2) * group + first, heads) for first, heads in kinds for group in range(shape.groups)]
        rows = [(keys[0], first * width, heads * width) for first, heads in starts]
    else:
        halves = sorted(keys, key=lambda key: re.search(r"_v(\.|$)", key) is not None)
        rows = [(key, 0, folder.tensors[key].shape[0]) for key in halves]
    at, parts = 0, []
    for key, first, count in rows:  # one below the other
        source, target = (Box((row, *(0 for _ in lengths[1:])), (count, *lengths[1:])) for row in (first, at))
        parts.append(Part(key, source, target))
        at += count
    return parts
