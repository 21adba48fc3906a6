"""A model in stages over the ranks of a pipeline: training and evaluation steps, and its parts as one model."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.distributed.tensor import DTensor

from megatron_fsdp.automodel.architecture import IGNORED_LABEL, find_layers, text_config
from megatron_fsdp.automodel.context_parallel import check_call
from megatron_fsdp.automodel.pipeline_parallel import schedules
from megatron_fsdp.automodel.pipeline_parallel.schedules import PipelineConfig
from megatron_fsdp.automodel.pipeline_parallel.stages import (
    DecoderStage,
    cut_stage,
    find_ends,
    tied_embeddings,
)
from megatron_fsdp.checkpoint.naming import PipelinePlace, own_name
from megatron_fsdp.comm.agreement import Problem, all_agree, ask, gather_objects
from megatron_fsdp.comm.fingerprint import fingerprint
from megatron_fsdp.dtensor.shard_spec import local_tensor
from megatron_fsdp.errors import ConfigurationError


@dataclass(frozen=True)
class PipelineParts:
    """The parts of a pipeline on one rank."""

    modules: Mapping[int, nn.Module]  # stage index -> part, ascending
    num_stages: int  # of the whole pipeline
    activation_dtype: torch.dtype  # of the hidden states that stages send
    tied: tuple[str, str] | None = None  # names of the head's and the input embeddings' matrix where these are one


class Pipeline:
    """A decoder in stages; every rank of a pipeline makes the same calls with the same batch.

    The first stage uses token ids and the last labels, but all ranks take both: shapes come from them, and attention
    masks and positions are made in every stage.

    `pp_mesh` is the 1-D mesh of the pipeline's ranks, `device` that of this rank's parts.
    """

    def __init__(self, parts: PipelineParts, pp_mesh: DeviceMesh, config: PipelineConfig, device: torch.device) -> None:
        self.parts: list[nn.Module] = list(parts.modules.values())
        self.pp_mesh = pp_mesh
        self.config = config
        self.num_stages = parts.num_stages
        self.stages: list[DecoderStage] = []
        """Torch's stages of this rank; made anew by a step with other shapes than the one before."""
        self.schedule: Any = None
        """Torch's schedule; None before the first step."""
        self.finish_gradients: Callable[[], None] | None = None
        """Called once the schedule of a step is done, where gradients of parts are not final with their backward."""
        self._parts, self._device = parts, device
        self._group = pp_mesh.get_group()
        self._kind = schedules.schedule_named(config.pp_schedule)
        self._factor: Tensor | float | None = None  # of the losses of the step under way; None: there are none
        self._shape: tuple[int, ...] | None = None
        self._tied_end = self._find_tied_end()
        if parts.tied is not None:
            check_ends(self._tied_end, self._group)
        self._set_pipeline_places()
        self.equalize_tied()

    @property
    def has_first_stage(self) -> bool:
        """True if this rank has the embeddings."""
        return 0 in self._parts.modules

    @property
    def has_last_stage(self) -> bool:
        """True if this rank has the head."""
        return self.num_stages - 1 in self._parts.modules

    def step(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        num_label_tokens: int | None = None,
        dp_size: int = 1,
        **per_token: Any,
    ) -> Tensor:
        """Run forward and backward of a batch; gradients are added to `.grad`, and under FSDP2 reduced once.

        The gradients are those of the mean over the counted labels of this batch. Under data parallelism, where
        gradients are averaged over ranks, labels may lie unevenly: give `num_label_tokens` of all ranks and `dp_size`,
        and the averaged gradients are those of the mean over all labels.

        Args:
            input_ids: (rows, sequence), int64.
            labels: (rows, sequence), not yet shifted, as transformers takes them; -100 does not count.
            num_label_tokens: Labels that count, of all data-parallel ranks. None: those of this batch.
            dp_size: Ranks that gradients are averaged over (context-parallel ones included). Needs `num_label_tokens`.
            per_token: `shift_labels` instead of `labels`, where these are of the same positions already;
                `attention_mask`, `position_ids` and whatever else the layers take; tensors are cut by rows.

        Returns:
            The differentiated loss, a float32 scalar, the same on all ranks of the pipeline: the mean over labels
            of this batch; with `num_label_tokens` the batch's share times `dp_size`, so that the mean over
            data-parallel ranks is the mean over all labels.

        Raises:
            ConfigurationError: Inputs do not fit, or differ between the ranks of the pipeline.
        """
        inputs = self._take_labelled(input_ids, labels, per_token, ("step", num_label_tokens, dp_size))
        rows = input_ids.shape[0]
        if self.config.pp_batch_size not in (1, rows):
            raise ConfigurationError(
                f"a step was given {rows} rows but pp_batch_size={self.config.pp_batch_size}; give that many, or set "
                "pp_batch_size=1 to allow any number"
            )
        if self.config.pp_seq_len not in (None, input_ids.shape[1]):
            raise ConfigurationError(
                f"a step was given sequences of {input_ids.shape[1]} tokens but pp_seq_len={self.config.pp_seq_len}; "
                "give that many, or leave pp_seq_len out to allow any number"
            )
        if self._tied_end is not None:
            self._tied_end.before_step()
        _, losses = self._run("step", inputs)
        if self.finish_gradients is not None:
            self.finish_gradients()
        if self._tied_end is not None:
            self._tied_end.after_step()
        return self._total(losses)

    def eval_step(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        num_label_tokens: int | None = None,
        dp_size: int = 1,
        **per_token: Any,
    ) -> Tensor:
        """Return the loss of `step` without gradients; arguments, result and errors are those of `step`."""
        inputs = self._take_labelled(input_ids, labels, per_token, ("eval_step", num_label_tokens, dp_size))
        with torch.no_grad():
            _, losses = self._run("eval", inputs)
        return self._total(losses)

    def forward(self, input_ids: Tensor, **per_token: Any) -> Tensor | None:
        """Return the logits of a batch, (rows, sequence, vocabulary), without gradients.

        Args:
            input_ids: (rows, sequence), int64.
            per_token: As for `step`, without labels.

        Returns:
            The logits on the rank that has the last stage, None on the others.

        Raises:
            ConfigurationError: Inputs do not fit, or differ between the ranks of the pipeline.
        """
        inputs = self._take(input_ids, None, per_token, ("forward",))
        if inputs.labels is not None:
            raise ConfigurationError("forward gives logits and takes no labels; use eval_step for the loss")
        self._factor = None
        ignored = replace(inputs, labels=torch.full_like(input_ids, IGNORED_LABEL))
        with torch.no_grad():
            logits: Tensor | None = self._run("eval", ignored, return_outputs=True)[0]
        return logits if self.has_last_stage else None

    @property
    def tied_copies(self) -> dict[str, str]:
        """The map from the name of the head's matrix to that of the input embeddings, if tied; the same on all ranks.

        The last stage has a copy of the first stage's matrix, and both have the gradient of the whole: count it once in
        norms, save it once.
        """
        tied = self._parts.tied
        return {tied[0]: tied[1]} if tied is not None and self.num_stages > 1 else {}

    def equalize_tied(self) -> None:
        """Copy tied input embeddings to the head; all ranks call it after weights were written."""
        if self._tied_end is not None:
            self._tied_end.equalize()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield name in the whole model and parameter, of all parts of this rank."""
        return itertools.chain.from_iterable(part.named_parameters() for part in self.parts)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of all parts of this rank."""
        return (param for _, param in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank's parts, under the names of the whole model."""
        return {name: value for part in self.parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this rank's parts from a state with the names of the whole model.

        Raises:
            RuntimeError: Something is missing, or does not fit; of torch.
        """
        state = {**{copy: state[name] for copy, name in self.tied_copies.items() if name in state}, **state}
        for part in self.parts:
            part.load_state_dict({name: state[name] for name in part.state_dict() if name in state})

    def train(self, mode: bool = True) -> Pipeline:
        """Set training mode on all parts."""
        for part in self.parts:
            part.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set evaluation mode on all parts."""
        return self.train(False)

    def _take(
        self, input_ids: Tensor, labels: Tensor | None, per_token: dict[str, Any], call: tuple[Any, ...]
    ) -> StepInputs:
        vocabulary = getattr(text_config(self.parts[0]), "vocab_size", None)
        # A rank with other shapes would wait for tensors that no rank sends.
        with all_agree("a pipeline step", [self._group]) as facts:
            inputs = _take_inputs(input_ids, labels, per_token, vocabulary)
            facts |= inputs.facts(call)
        check_call(self.parts[0], inputs.per_token)
        return inputs

    def _take_labelled(
        self, input_ids: Tensor, labels: Tensor | None, per_token: dict[str, Any], call: tuple[str, int | None, int]
    ) -> StepInputs:
        """Check the inputs of a step, and set the factor of its losses; `call` has its name, label tokens and ranks."""
        inputs = self._take(input_ids, labels, per_token, call)
        name, num_label_tokens, dp_size = call
        if inputs.labels is None:
            raise ConfigurationError(
                f"{name} needs labels or shift_labels on every rank of the pipeline; without them, see forward"
            )
        self._factor = self._factor_of(inputs.labels, num_label_tokens, dp_size)
        return inputs

    def _factor_of(self, labels: Tensor, num_label_tokens: int | None, dp_size: int) -> Tensor | float:
        if self.config.scale_grads_in_schedule:
            if num_label_tokens is not None or dp_size != 1:
                raise ConfigurationError(
                    "num_label_tokens and dp_size have no effect under scale_grads_in_schedule=True, where loss_fn "
                    "gives a mean; leave them out"
                )
            return 1.0
        if num_label_tokens is None:
            if dp_size != 1:
                raise ConfigurationError(
                    f"dp_size={dp_size} has an effect only with num_label_tokens of all data-parallel ranks; give both"
                )
            return 1.0 / (labels != IGNORED_LABEL).sum().clamp(min=1)
        if num_label_tokens < 1 or dp_size < 1:
            raise ConfigurationError(f"num_label_tokens={num_label_tokens} and dp_size={dp_size} have to be at least 1")
        return dp_size / num_label_tokens

    def _prepare(self, inputs: StepInputs) -> None:
        """Build stages and schedule for these shapes, unless they exist."""
        rows, sequence = inputs.input_ids.shape
        if self._shape == (rows, sequence):
            return
        size = self.config.pp_microbatch_size
        count = schedules.count_microbatches(self._kind, rows, size, self.pp_mesh.size(), self.num_stages)
        config = text_config(self.parts[0])
        shape, dtype = (size, sequence, config.hidden_size), self._parts.activation_dtype
        hidden = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        self.stages = [
            DecoderStage(part, (index, self.num_stages), hidden, config.vocab_size, self._device, self._group)
            for index, part in self._parts.modules.items()
        ]
        self.schedule = get_schedule_class(self._kind.name)(
            self.stages if self._kind.several_stages else self.stages[0],
            count,
            loss_fn=self._loss,
            scale_grads=self.config.scale_grads_in_schedule,
        )
        self._shape = (rows, sequence)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the share of a microbatch in the loss of the step; the schedule calls it.

        With the factor dp_size / (label tokens of all data-parallel ranks) the gradients of a step, averaged over the
        data-parallel ranks, are those of the mean over all label tokens, for any distribution over microbatches and
        ranks. A mean of means would be another number.
        """
        if self._factor is None:
            return torch.zeros((), device=logits.device)
        return (self.config.loss_fn or cross_entropy_sum)(logits, labels) * self._factor

    def _set_pipeline_places(self) -> None:
        """Give each part its position and its peers' names, for checkpoints."""
        own = {
            own_name(part, name)
            for part in self.parts
            for name, _ in (*part.named_parameters(remove_duplicate=False), *part.named_buffers())
        }
        names = frozenset().union(*gather_objects(own, self._group))
        number = min(dist.get_process_group_ranks(self._group))
        place = PipelinePlace(self.pp_mesh.get_local_rank(), self.pp_mesh.size(), number, names, self.tied_copies)
        for part in self.parts:
            vars(part)["pipeline_place"] = place

    def _find_tied_end(self) -> TiedEnd | None:
        """Return this rank's end of tied embeddings; the first stage is on rank 0."""
        for target, source in self.tied_copies.items():
            if self.has_first_stage:
                return TiedEnd(self._parts.modules[0], source, self._group, self._last_rank, is_source=True)
            if self.has_last_stage:
                return TiedEnd(self._parts.modules[self.num_stages - 1], target, self._group, 0, is_source=False)
        return None

    @property
    def _last_rank(self) -> int:
        return (self.num_stages - 1) % self.pp_mesh.size()

    def _run(self, call: str, inputs: StepInputs, *, return_outputs: bool = False) -> tuple[Any, list[Tensor]]:
        """Run `step` or `eval` of the schedule; return outputs and losses of the last stage."""
        self._prepare(inputs)
        root = (inputs.input_ids,) if self.has_first_stage else ()
        losses: list[Tensor] = []
        options = {"target": inputs.labels, "losses": losses, "return_outputs": return_outputs}
        return getattr(self.schedule, call)(*root, **options, **inputs.per_token), losses

    def _total(self, losses: list[Tensor]) -> Tensor:
        """Send the loss of the step from the last stage to all ranks."""
        total = torch.zeros((), device=self._device)
        if self.has_last_stage:
            total = torch.stack([loss.detach().float() for loss in losses]).sum()
            total = total / len(losses) if self.config.scale_grads_in_schedule else total
        dist.broadcast(total, group=self._group, group_src=self._last_rank)
        return total


def build_pipeline(
    model: nn.Module | Callable[[], nn.Module],
    pp_mesh: DeviceMesh,
    config: PipelineConfig,
    *,
    parallelize_stage: Callable[[nn.Module], nn.Module],
    device: torch.device,
    activation_dtype: torch.dtype | None = None,
) -> Pipeline:
    """Cut a causal language model of transformers into stages, and prepare this rank's.

    Stage i is on rank i modulo the number of ranks. The embeddings are in the first stage, the final norm and the head
    in the last, rotary embeddings everywhere.

    Args:
        model: The whole model, on the meta device or with memory, or a function that gives it. It is left as it is;
            the parts have its tensors, so drop it to free those of other stages.
        pp_mesh: 1-D mesh of the pipeline's ranks.
        config: Schedule and sizes.
        parallelize_stage: Makes a part of a rank ready: memory, weights, sharding. What it gives must be the part
            itself or stand for it, so wrap the part itself by `fully_shard` besides its layers: gradients are then
            reduced once in a step. `reshard_after_forward=False` spares gathers between microbatches.
        device: Of this rank's parts.
        activation_dtype: Of the hidden states that stages send; None: that of the parameters. Under mixed precision
            give the dtype of FSDP2's outputs.

    Raises:
        ConfigurationError: The model cannot be cut, or sizes do not fit; the same on all ranks.
    """
    if pp_mesh.ndim != 1:
        raise ConfigurationError(
            f"pp_mesh has {pp_mesh.ndim} dimensions ({pp_mesh.mesh_dim_names}) but has to have one; give mesh['pp']"
        )
    whole = model if isinstance(model, nn.Module) else model()
    find_ends(whole)
    kind, ranks = schedules.schedule_named(config.pp_schedule), pp_mesh.size()
    num_layers = len(find_layers(whole).modules())
    num_stages = schedules.count_stages(kind, num_layers, ranks, config.layers_per_stage)
    pieces = schedules.split_layers(num_layers, num_stages, config.layers_per_stage)
    if config.pp_batch_size > 1:
        schedules.count_microbatches(kind, config.pp_batch_size, config.pp_microbatch_size, ranks, num_stages)
    tied = tied_embeddings(whole)
    if tied is not None and ranks == 1 and num_stages > 1:
        raise ConfigurationError(
            f"{type(whole).__name__} has tied embeddings, whose ends must be on two ranks, but the pipeline has one; "
            "use no pipeline"
        )
    dtype = activation_dtype or next(param.dtype for param in whole.parameters() if param.is_floating_point())
    tensors = {id(tensor): tensor for tensor in (*whole.parameters(), *whole.buffers())}  # which all parts share
    parts = {}
    for index in range(pp_mesh.get_local_rank(), num_stages, ranks):
        part = cut_stage(copy.deepcopy(whole, dict(tensors)), *pieces[index], index == 0, index == num_stages - 1)
        parts[index] = parallelize_stage(part)
    return Pipeline(PipelineParts(parts, num_stages, dtype, tied), pp_mesh, config, device)


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, checked and ready to be cut into microbatches."""

    input_ids: Tensor  # (rows, sequence)
    labels: Tensor | None  # of the same positions (shifted), (rows, sequence); None: none were given
    per_token: dict[str, Any]  # the model's other inputs; tensors have all rows

    def facts(self, call: tuple[Any, ...]) -> dict[str, str]:
        """Return the facts that must be equal on all ranks of a pipeline, `call` included."""
        others = [(name, tuple(value.shape), str(value.dtype)) for name, value in sorted(self.per_token.items())]
        return {
            "the shape of input_ids": str(tuple(self.input_ids.shape)),
            "the checksum of input_ids": str(int(fingerprint(self.input_ids))),
            "the checksum of labels": "none" if self.labels is None else str(int(fingerprint(self.labels))),
            "the call": f"{call} with {others}",
        }


def _take_inputs(
    input_ids: Tensor, labels: Tensor | None, per_token: dict[str, Any], vocabulary: int | None
) -> StepInputs:
    """Check the inputs of a step and shift the labels."""
    others = {name: value for name, value in per_token.items() if value is not None}
    shifted = others.pop("shift_labels", None)
    if input_ids.ndim != 2:
        raise ConfigurationError(f"input_ids has shape {tuple(input_ids.shape)} but has to be (rows, sequence)")
    if vocabulary is not None and input_ids.numel():
        low, high = (int(value) for value in input_ids.aminmax())
        if low < 0 or high >= vocabulary:
            raise ConfigurationError(
                f"input_ids has tokens from {low} to {high}, and the model knows 0 to {vocabulary - 1}"
            )
    if labels is not None and shifted is not None:
        raise ConfigurationError("labels and shift_labels were both given; give one of them")
    for name, value in (("labels", labels), ("shift_labels", shifted)):
        if value is not None and value.shape != input_ids.shape:
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)} but has to have that of input_ids, {tuple(input_ids.shape)}"
            )
    rows = input_ids.shape[0]
    for name, value in others.items():
        if not isinstance(value, Tensor):
            raise ConfigurationError(
                f"{name}={value!r} has no effect in a pipeline, whose stages take tensors per token only "
                "(attention_mask, position_ids); leave it out"
            )
        if value.ndim == 0 or value.shape[0] not in (1, rows):
            raise ConfigurationError(
                f"{name} has shape {tuple(value.shape)} but its first dimension has to be the {rows} rows of "
                "input_ids (or 1), since it is cut into microbatches by rows"
            )
        others[name] = value.expand(rows, *value.shape[1:])
    if labels is not None:  # those of the next position belong to the logits of a position
        shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    return StepInputs(input_ids, shifted, others)


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Sum the cross entropies in float32 over the counted labels, (rows, sequence), of the same positions."""
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )


@dataclass
class TiedEnd:
    """One copy of a tied matrix whose ends are in different stages: the input embeddings in the first, or the head.

    Both ranks add up the gradients of both copies, so optimizers make equal updates. The sum of two numbers is the same
    in either order: copies stay equal bit for bit.
    """

    part: nn.Module  # the stage that has the copy
    name: str  # of the parameter in it
    group: dist.ProcessGroup  # of the pipeline
    peer: int  # rank in the group that has the other copy
    is_source: bool  # this is the input embeddings, whose values lead
    _kept: Tensor | None = field(default=None, init=False)

    @torch.no_grad()
    def equalize(self) -> None:
        """Copy the input embeddings to the head; both ranks call it. On the meta device it does nothing."""
        local = local_tensor(self._param())
        if local.is_meta or not local.numel():
            return
        if self.is_source:
            dist.send(local.contiguous(), group=self.group, group_dst=self.peer)
        else:
            received = torch.empty_like(local)
            dist.recv(received, group=self.group, group_src=self.peer)
            local.copy_(received)

    def before_step(self) -> None:
        """Set gradients of earlier steps aside: they are sums already."""
        param = self._param()
        self._kept, param.grad = param.grad, None

    @torch.no_grad()
    def after_step(self) -> None:
        """Add the other copy's gradient of this step, and the earlier steps' gradients; both ranks call it."""
        param = self._param()
        if not param.requires_grad:
            return
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        own = local_tensor(param.grad)
        if own.numel():
            other = torch.empty_like(own)
            ops = [
                dist.P2POp(dist.isend, own.clone(), group=self.group, group_peer=self.peer),
                dist.P2POp(dist.irecv, other, group=self.group, group_peer=self.peer),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            own.add_(other)
        if self._kept is not None:
            param.grad.add_(self._kept)
            self._kept = None

    def _param(self) -> nn.Parameter:
        """Return the optimizer's parameter; FSDP2 shows full ones after a forward that gathered them."""
        if isinstance(self.part, FSDPModule):
            self.part.reshard()
        return self.part.get_parameter(self.name)


def check_ends(end: TiedEnd | None, group: dist.ProcessGroup) -> None:
    """Check that both copies are divided alike over other mesh dimensions; all ranks of the pipeline call it."""
    own = None
    if end is not None:
        param = end.part.get_parameter(end.name)
        placements = repr(param.placements) if isinstance(param, DTensor) else ""
        own = (tuple(param.shape), tuple(local_tensor(param).shape), str(param.dtype), placements)
    ask([(group, own)], _judge_ends)


def _judge_ends(ends: Sequence[Any]) -> Problem | None:
    if len({found for found in ends if found is not None}) < 2:
        return None
    return ConfigurationError, (
        "the input embeddings and the head are tied, but their stages cut or cast them differently; give both "
        "the same tensor-parallel style, sharding and dtype, or set tie_word_embeddings=False"
    )
