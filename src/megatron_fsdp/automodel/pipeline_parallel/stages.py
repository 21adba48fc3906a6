"""A stage of a pipeline: the transformers model with only some of its layers, under the names of the whole model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from megatron_fsdp.automodel.architecture import find_layers, text_config
from megatron_fsdp.checkpoint.hf.live import own_class
from megatron_fsdp.errors import ConfigurationError

_FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "final_norm", "ln_f", "norm_f")


@dataclass(frozen=True)
class Ends:
    """The parts of a decoder around its layers, as attribute names."""

    layers: str  # the list of layers in the base model
    embeddings: tuple[str, ...]  # of the base model; the first stage has them
    norms: tuple[str, ...]  # of the base model; the last stage has them
    head: str | None  # of the model; the last stage has it. None: a model without one


class AbsentEmbedding(nn.Module):
    """Placeholder for another stage's embedding; its output is ignored."""

    def forward(self, indices: Tensor) -> Tensor:
        """Return a zero that can be added to anything."""
        return torch.zeros((), device=indices.device)


class StageForward:
    """Mixin for the class of a stage: runs the model's own forward over the local layers."""

    _stage_is_first: bool
    _stage_is_last: bool
    _stage_layers: str

    def forward(self, inputs: Tensor, **per_token: Any) -> Tensor:
        """Run one microbatch through this stage: from token ids in the first one, to logits in the last one.

        Stages send each other hidden states, (microbatch, sequence, hidden). `per_token`: attention_mask, position_ids,
        ...
        """
        model: Any = self
        base = model.base_model
        layers: StageLayers = getattr(base, self._stage_layers)
        # The base model makes masks and positions from `inputs_embeds`; its layers get `received` instead.
        named = {"input_ids" if self._stage_is_first else "inputs_embeds": inputs, "use_cache": False, **per_token}
        with layers.as_whole_list(None if self._stage_is_first else inputs) as run:
            if self._stage_is_last:
                return super().forward(**named).logits  # type: ignore[misc]  # the class of the model comes after
            base(**named)
        assert run.result is not None  # a stage has a layer, and the base model runs it
        return run.result


def find_ends(model: nn.Module) -> Ends:
    """Find the parts around a decoder's layers, and raise for models with others: cutting might change them."""
    name, config = type(model).__name__, text_config(model)
    base: Any = getattr(model, "base_model", None)
    if config is None or not isinstance(base, nn.Module) or base is model:
        raise ConfigurationError(f"{name} is no causal language model of transformers, so it cannot be cut into stages")
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(f"{name} has an encoder and a decoder; pipeline parallelism takes decoders only")
    if getattr(config, "output_router_logits", False):
        raise ConfigurationError(
            f"{name} has output_router_logits=True, but a stage sees the routers of its own layers only; set it False"
        )
    container = find_layers(model).container
    layers = next((key for key, child in base.named_children() if child is container), None)
    if layers is None:
        raise ConfigurationError(
            f"{name} has its layers inside of another part, as multimodal models do; pipeline parallelism takes "
            "text decoders whose base model has the layers"
        )
    output: Any = model.get_output_embeddings()  # type: ignore[operator]  # a method of transformers' models
    head = next((key for key, child in model.named_children() if output is not None and child is output), None)
    embeddings: list[str] = []
    norms: list[str] = []
    unknown = [key for key, _ in base.named_parameters(recurse=False)]
    for key, child in base.named_children():
        if key == layers or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.Embedding):
            embeddings.append(key)
        else:
            (norms if key in _FINAL_NORMS else unknown).append(key)
    for key, child in model.named_children():
        if child is not base and key != head and any(True for _ in child.parameters()):
            unknown.append(key)
    if unknown:
        raise ConfigurationError(
            f"{name} has parts that no stage is known for ({', '.join(unknown)}); pipeline parallelism takes decoders "
            "of embeddings, layers, a final norm and a head"
        )
    return Ends(layers, tuple(embeddings), tuple(norms), head)


def cut_stage(model: nn.Module, start: int, stop: int, is_first: bool, is_last: bool) -> nn.Module:
    """Remove, in place, all layers outside [start, stop) and the ends of other stages; names do not change.

    With `is_first` the embeddings stay, with `is_last` the final norm and the head. Of tied embeddings, each end that
    stays keeps the matrix under its own name; `Pipeline` keeps the two equal. The model's forward then follows
    `StageForward.forward`.
    """
    ends = find_ends(model)
    base: Any = model.base_model
    whole = list(getattr(base, ends.layers))
    if not 0 <= start < stop <= len(whole):
        raise ConfigurationError(f"a stage of layers {start} to {stop} does not fit a model of {len(whole)} layers")
    _refuse_shared(model, ends, whole, range(start, stop), is_first, is_last)
    if is_first != is_last and tied_embeddings(model) is not None:
        # The other end is not here: transformers must not look for it when it ties, initialises or loads weights.
        config: Any = model.config
        config.tie_word_embeddings = False
        vars(model)["all_tied_weights_keys"] = {}
    setattr(base, ends.layers, StageLayers(whole, start, stop))
    if not is_first:
        for key in ends.embeddings:
            _replace(base, key, AbsentEmbedding())
    if not is_last:
        for key in ends.norms:
            _replace(base, key, nn.Identity())
        if ends.head is not None:
            setattr(model, ends.head, None)
    # The name of the class stays as well: transformers writes it into config.json.
    cls = type(model)
    stage = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    model.__class__ = type(cls.__name__, (StageForward, cls), stage)
    vars(model).update(_stage_is_first=is_first, _stage_is_last=is_last, _stage_layers=ends.layers)
    return model


def _replace(owner: nn.Module, key: str, proxy: nn.Module) -> None:
    """Replace a part without registering a module: plans and sharding must not see it."""
    delattr(owner, key)
    vars(owner)[key] = proxy


def tied_embeddings(model: nn.Module) -> tuple[str, str] | None:
    """Return the names of (the head's matrix, the input embeddings' matrix) if they are one; else None."""
    source: Any = model.get_input_embeddings()  # type: ignore[operator]  # methods of transformers' models
    target: Any = model.get_output_embeddings()  # type: ignore[operator]
    if target is None or getattr(source, "weight", None) is not target.weight:
        return None
    name_of = {child: name for name, child in model.named_modules()}
    return f"{name_of[target]}.weight", f"{name_of[source]}.weight"


def _refuse_shared(
    model: nn.Module, ends: Ends, whole: list[nn.Module], kept: range, is_first: bool, is_last: bool
) -> None:
    """Raise for parameters besides tied embeddings that two stages use: each would train its own."""
    base: Any = model.base_model
    parts = [(layer, index in kept) for index, layer in enumerate(whole)]
    parts += [(getattr(base, key), is_first) for key in ends.embeddings]
    parts += [(getattr(base, key), is_last) for key in ends.norms]
    parts += [(getattr(model, ends.head), is_last)] if ends.head is not None else []
    tied = tied_embeddings(model)
    allowed = {id(model.get_parameter(tied[1]))} if tied is not None else set()
    here = {id(param) for part, stays in parts if stays for param in part.parameters()} - allowed
    if any(id(param) in here for part, stays in parts if not stays for param in part.parameters()):
        raise ConfigurationError(
            f"{type(model).__name__} shares parameters between layers of different stages, which would drift apart; "
            "use no pipeline for it"
        )
    if tied is None and ends.head is not None and getattr(text_config(model), "tie_word_embeddings", False):
        raise ConfigurationError(
            f"the config of {type(model).__name__} has tie_word_embeddings=True, but the model has two matrices; call "
            "its tie_weights() first, or set it False"
        )


class HiddenStatesProxy(Tensor):
    """Placeholder hidden states; indexable, since some models unpack tuples."""

    def __getitem__(self, index: Any) -> Tensor:
        return self if isinstance(index, int) else super().__getitem__(index)


class AbsentLayer:
    """A layer of another stage: it has the plain attributes that a model's forward may read, and computes nothing."""

    def __init__(self, layer: nn.Module) -> None:
        plain = {name: value for name, value in vars(layer).items() if isinstance(value, str | int | float | None)}
        vars(self).update({name: value for name, value in plain.items() if not name.startswith("_")})

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return a tensor of the hidden states' shape, without memory of its own."""
        zero = torch.zeros((), dtype=hidden_states.dtype, device=hidden_states.device)
        return zero.expand(hidden_states.shape).as_subclass(HiddenStatesProxy)


@dataclass
class StageRun:
    """One forward of a stage."""

    received: Tensor | None  # from the previous stage, (microbatch, sequence, hidden); None in the first one
    result: Tensor | None = None  # the output of the last layer of this stage


class StageLayers(nn.ModuleDict):
    """The layers `start` to `stop` of a whole model, under their indices there.

    Inside `as_whole_list`, and only there, it iterates as the whole list does: forwards of transformers count layers
    and look up their kinds (full or sliding attention) by the index. The first local layer then gets the hidden states
    of the previous stage, whatever the model has made of its inputs (scaled embeddings, dropout), and the output of the
    last one is kept.
    """

    def __init__(self, layers: Sequence[nn.Module], start: int, stop: int) -> None:
        super().__init__({str(index): layers[index] for index in range(start, stop)})
        self._before = [AbsentLayer(layer) for layer in layers[:start]]
        self._after = [AbsentLayer(layer) for layer in layers[stop:]]
        self._shown: list[Any] | None = None

    @contextmanager
    def as_whole_list(self, received: Tensor | None) -> Iterator[StageRun]:
        """Act as the whole list inside the block, on the hidden states of the previous stage."""
        run, here = StageRun(received), list[Any](self.values())
        last = len(here) - 1
        # A set: the only layer of a stage is wrapped once.
        for end in {0, last}:
            here[end] = _EndLayer(here[end], run, end == 0, end == last)
        self._shown = [*self._before, *here, *self._after]
        try:
            yield run
        finally:
            self._shown = None

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__() if self._shown is None else iter(self._shown)

    def __len__(self) -> int:
        return super().__len__() if self._shown is None else len(self._shown)

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if self._shown is None or isinstance(key, str) else self._shown[key]


class _EndLayer:
    """The first or last layer of a stage, called as the layer itself."""

    def __init__(self, layer: Callable[..., Any], run: StageRun, is_first: bool, is_last: bool) -> None:
        self._layer, self._run, self._is_first, self._is_last = layer, run, is_first, is_last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_first and self._run.received is not None:
            hidden_states = self._run.received
        output = self._layer(hidden_states, *args, **kwargs)
        if self._is_last:
            self._run.result = output[0] if isinstance(output, tuple) else output
        return output


class DecoderStage(PipelineStage):
    """A stage of a decoder for torch's schedules, whose tensors are known before the first step.

    Torch would otherwise find shapes by running a microbatch forward and backward, for each new sequence length, and
    forget the gradients accumulated so far.
    """

    def __init__(
        self,
        part: nn.Module,  # of `cut_stage`
        place: tuple[int, int],  # index of the stage, number of stages
        hidden: Tensor,  # the hidden states between stages, (microbatch, sequence, hidden), on the meta device
        vocabulary: int,
        device: torch.device,
        group: dist.ProcessGroup,  # of the pipeline
    ) -> None:
        index, num_stages = place
        tokens = torch.empty(hidden.shape[:2], dtype=torch.int64, device="meta")
        logits = hidden.new_empty(*hidden.shape[:2], vocabulary).requires_grad_()
        super().__init__(
            part,
            index,
            num_stages,
            device,
            input_args=tokens if index == 0 else hidden,
            output_args=logits if index == num_stages - 1 else hidden,
            group=group,
        )
        self._sent = hidden

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the part; its hidden states get the dtype that the next stage expects."""
        if self.has_backward and not self.is_first:
            args[0].requires_grad_()  # torch 2.11 asks for no gradient where an evaluation came before the first step
        output: Any = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.is_last:
            return output
        if output.shape != self._sent.shape:
            raise ConfigurationError(
                f"stage {self.stage_index} gave hidden states of shape {tuple(output.shape)} but the next stage waits "
                f"for {tuple(self._sent.shape)}; layers must not change the shape of what they get"
            )
        return output.to(self._sent.dtype)


def merge_stages(stages: Sequence[nn.Module]) -> nn.Module:
    """Make one model of the stages of a model, for loading, saving and drawing values.

    Parts of other stages are None there, or absent in a `ModuleDict`. Tensors are shared, not copied.
    """
    return functools.reduce(_merged, stages)


def _merged(one: nn.Module, other: nn.Module) -> nn.Module:
    kind = own_class(one)
    result = kind.__new__(kind)
    result.__dict__.update(one.__dict__)
    result._modules = dict(one._modules)
    for name, child in other._modules.items():
        own = result._modules.get(name)
        if own is None:
            result._modules[name] = child
        elif child is not None and own is not child:
            result._modules[name] = _merged(own, child)
    return result
