"""Quantised bases from folders: the model on the meta device as a library quantises it, then its bytes, by weight.

transformers' own quantizers say which weights are quantised, and quantise or deserialise each. A rank holds one whole
weight at a time, and keeps its shards of the bytes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megatron_fsdp.checkpoint.folder import whole_box
from megatron_fsdp.checkpoint.hf.files import FolderReader, StoredTensor, open_folder
from megatron_fsdp.checkpoint.hf.live import (
    LiveTensor,
    base_tensors,
    install_weights,
    keep_local,
    key_variants,
    live_tensors,
    map_keys,
    unwrap,
)
from megatron_fsdp.checkpoint.hf.loading import Match, copy_boxes
from megatron_fsdp.checkpoint.report import decided_by_first, together
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.formats.quantized import StoredWeight, take_quantized_apart

_READY_MADE = "bitsandbytes"
"""The library whose quantised folders are read."""


class QuantizedBase:
    """The weights of a model on the meta device that a library quantises.

    `config` is that of transformers' `quantization_config`. Modules of the model are replaced as the library does.
    `is_ready`: the folder of its weights is quantised already.
    """

    def __init__(self, config: Any, model: Any, folder: Path, *, is_ready: bool) -> None:
        from transformers.quantizers.auto import AutoHfQuantizer

        self._plain, self._folder, self._is_ready = copy.deepcopy(model), folder, is_ready
        self._skeleton = copy.deepcopy(model)  # without memory; in which weights are quantised, one at a time
        method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
        if method not in (None, _READY_MADE) and (is_ready or method != "torchao"):
            raise ConfigurationError(
                f"the {'folder' if is_ready else 'quantization_config'} is of {getattr(method, 'value', method)}; give "
                f"BitsAndBytesConfig, TorchAoConfig, or a folder that {_READY_MADE} has quantised"
            )
        try:
            self._quantizer: Any = AutoHfQuantizer.from_config(config, pre_quantized=is_ready)
            self._quantizer.validate_environment(device_map=None)
            for each in (self._skeleton, model):  # whose modules cannot be copied any more
                self._quantizer.preprocess_model(model=each, device_map=None, checkpoint_files=None)
        except (ImportError, ValueError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"transformers does not take this quantization_config: {error}") from error
        self._places: dict[str, tuple[Any, str]] = {}
        for name, plain in list(model.named_parameters()):
            if self._quantizer.param_needs_quantization(model, name):
                owner, _, attribute = name.rpartition(".")
                module = model.get_submodule(owner)
                shape, dtype = (getattr(self._plain.get_parameter(name), each) for each in ("shape", "dtype"))
                if self._take(name, module, attribute, self._quantized(name, torch.zeros(shape, dtype=dtype))):
                    self._places[name] = module, attribute
                else:  # the library leaves it as it is
                    module._parameters[attribute] = plain
        self._names = list(self._places)
        if not self._names:
            raise ConfigurationError("the quantization_config quantises no weight of this model; leave it out")
        self._quantizer.postprocess_model(model)
        model.hf_quantizer = self._quantizer  # which peft asks

    def _take(self, name: str, module: Any, attribute: str, weight: nn.Parameter) -> bool:
        """Put a weight into a module as its bytes, on the meta device; return False for one that is not quantised."""
        module._parameters[attribute] = weight
        take_quantized_apart([module])
        if attribute in module._parameters:
            return False
        stored = module.parametrizations[attribute]
        stored[0].name = name
        for key, param in stored._parameters.items():
            stored._parameters[key] = nn.Parameter(param.to("meta"), requires_grad=False)
        return True

    def _quantized(self, name: str, value: torch.Tensor) -> nn.Parameter:
        """Quantise a whole weight as the library does."""
        operation = self._quantizer.get_quantize_ops()
        return self._converted(operation, name, {name: [value]})

    def _converted(self, operation: Any, name: str, given: Mapping[str, Any]) -> nn.Parameter:
        """Run an operation of transformers for a weight in the skeleton, which is as before then."""
        owner, _, attribute = name.rpartition(".")
        module: Any = self._skeleton.get_submodule(owner)
        before = module._parameters[attribute]
        with torch.no_grad():
            made = operation.convert(dict(given), model=self._skeleton, full_layer_name=name, missing_keys=set())
        found = next(iter(made.values()), None)
        weight: nn.Parameter = module._parameters[attribute] if found is None else found
        module._parameters[attribute] = before
        weight.requires_grad_(False)
        return weight

    def fill(self, model: nn.Module, device: torch.device, key_mapping: Any) -> tuple[frozenset[str], frozenset[str]]:
        """Read the weights into the shards of a model; return the filled parameters and the keys read. Collective."""
        files = decided_by_first(lambda: open_folder(self._folder), f"opening {self._folder}")
        stored = {name: files.tensors[key] for name, key in map_keys(files.tensors, key_mapping).items()}
        lives = [self._live(name) for name in self._names]
        boxes = [[each.local_boxes() for each in of_weight] for of_weight in lives]
        reader, used = FolderReader(self._folder), set[str]()
        read = self._read_ready if self._is_ready else self._reader_of_plain(stored)

        def load() -> None:
            for name, of_weight in zip(self._names, boxes, strict=True):
                owner = self._skeleton.get_submodule(name.rpartition(".")[0])
                weight, keys = read(name, stored, reader, device)
                values = StoredWeight(name, owner, weight).right_inverse(weight)
                shapes = [tuple(live.shape) for live in lives[self._names.index(name)]]
                if [tuple(value.shape) for value in values] != shapes:
                    raise CheckpointError(f"{name} is quantised otherwise in {self._folder} than its config says")
                for places, value in zip(of_weight, values, strict=True):
                    keep_local(places, value)
                used.update(keys)

        together(f"quantising {self._folder}", load)
        filled = [live for of_weight in lives for live in of_weight]
        install_weights(model, filled)
        ids = {id(live.tensor) for live in filled}
        names = {each.name for each in base_tensors(unwrap(model))[1] if id(each.tensor) in ids}
        return frozenset(names), frozenset(used)

    def _live(self, name: str) -> list[LiveTensor]:
        module, attribute = self._places[name]
        params = module.parametrizations[attribute]._parameters
        return [LiveTensor(f"{name} ({key})", (name,), param, True) for key, param in params.items()]

    def _reader_of_plain(self, stored: Mapping[str, StoredTensor]) -> Any:
        """Return the function that reads a weight in floating point, and quantises it."""
        match = Match(self._plain, live_tensors(self._plain), stored)
        wanted = {alias: each for each in match.wanted for alias in each.live.aliases}

        def read(name: str, _: Any, reader: FolderReader, device: torch.device) -> tuple[nn.Parameter, set[str]]:
            if name not in wanted:
                raise CheckpointError(
                    f"{self._folder} has no weight {name} of this shape; give the folder of the model"
                )
            each = wanted[name]
            value = torch.empty(each.live.shape, dtype=each.live.dtype)
            copy_boxes(each.sources, [(whole_box(each.live.shape), value)], reader)
            return self._quantized(name, value.to(device)), {found.key for _, found in each.sources}

        return read

    def _read_ready(
        self, name: str, stored: Mapping[str, StoredTensor], reader: FolderReader, device: torch.device
    ) -> tuple[nn.Parameter, set[str]]:
        """Read a weight that is quantised already, with its scales."""
        key = next((each for each in key_variants(self._plain, name) if each in stored), None)
        if key is None:
            raise CheckpointError(f"{self._folder} has no weight {name}; give the folder of the model")
        owner = key.rpartition(".")[0]
        beside = (f"{key}.", f"{owner}.SCB", f"{owner}.weight_format")
        parts = {each.removeprefix(f"{owner}."): stored[each] for each in stored if each.startswith((key, *beside))}
        values = {part: reader.read(found, whole_box(found.shape)).clone().to(device) for part, found in parts.items()}
        operation = self._quantizer.get_load_operations()["deserialize"](self._quantizer)
        return self._converted(operation, name, values), {found.key for found in parts.values()}
