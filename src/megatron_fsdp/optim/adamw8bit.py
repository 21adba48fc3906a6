"""AdamW with moments of eight bits: one byte for each element, one fp32 scale for each block of 256 elements.

Blocks are counted in the flattened *global* tensor, so that state and updates are the same bits on any number of
ranks, under any strategy, and in one process without sharding. A shard may end inside a block:

    elements           0 ..... 255 | 256 ... 511 | 512 ... 767
    held by            ------- rank 0 ----><------ rank 1 ----
    its scale is       with rank 0 | with rank 0 | with rank 1     (who holds the block's first element)

Ranks that share a block take its scale from the maximum over all of them: two all-reduces of a few numbers in a step,
one for the old scales and one for the new, and none where no shard ends inside a block.

A moment is decoded, updated in fp32 and used for the weights before it is rounded again (T. Dettmers et al., "8-bit
Optimizers via Block-wise Quantization", 2022). Of the second moment the root is kept: it is what the update divides by,
and spans half as many orders of magnitude.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from megatron_fsdp.comm.agreement import ask
from megatron_fsdp.dtensor.dispatch import cut_alike
from megatron_fsdp.dtensor.shard_spec import ShardSpec
from megatron_fsdp.dtensor.tensor import UnevenDTensor, as_sharded
from megatron_fsdp.errors import CheckpointError, ConfigurationError
from megatron_fsdp.optim.full_tensor.exchange import Met, judge_met
from megatron_fsdp.optim.local_step import ExchangingStep, params_of
from megatron_fsdp.sharding.shards import Cut, ListedCut, ShardDescription, TensorParallelCut
from megatron_fsdp.state.statistics import local_of

BLOCK = 256
"""Elements that share a scale."""
CHUNK_NUMEL = 1 << 20
"""Elements that are computed at a time; decoded states are borrowed for one chunk."""

_CODES, _SCALES = ("exp_avg_codes", "exp_avg_root_codes"), ("exp_avg_scales", "exp_avg_root_scales")
_STEP = "step"


class AdamW8bit(Optimizer):
    """AdamW that keeps a byte for each moment of an element, and a scale for 256 of them: 2.03 bytes instead of 8.

    Works on plain tensors, and on parameters that `fully_shard` has sharded, with the same bits. Its state is, for a
    parameter: `step` (0-d fp32, on the CPU), `exp_avg_codes` and `exp_avg_root_codes` (uint8, of the parameter's
    shape), `exp_avg_scales` and `exp_avg_root_scales` (fp32, one for each block: of the parameter's shape with the last
    dimension divided by 256, or of one dimension where it does not divide). Weights are updated in fp32 and rounded to
    their own dtype.

    Args:
        params: Parameters or groups of them; of a floating-point dtype.
        lr: Learning rate, 0 or more.
        betas: Shares of the moments that stay, each in [0, 1).
        eps: Added to the root of the second moment, 0 or more.
        weight_decay: Decoupled, 0 or more.

    Raises:
        ConfigurationError: A number is out of its range, or a parameter has no blocks that belong to one global tensor:
            one that other parallelism cuts inside a block, or, at the first step, a DTensor of another library.
    """

    _has_agreed = False  # in the step that is running

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own.

        Raises:
            ConfigurationError: As the constructor; nothing was added.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # A stock DTensor is asked about at its first step: FSDP2's door cuts its parameters at the first forward.
        params = (param for param in group["params"] if type(param.detach()) is not DTensor)
        problem = _options_problem(group) or next(filter(None, map(problem_of_blocks, params)), None)
        if problem is not None:
            self.param_groups.pop()
            raise ConfigurationError(f"AdamW8bit was given {problem}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; collective over ranks that share blocks.

        Args:
            closure: Computes gradients and returns a loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Of both moments; for this step: once a device, not once a parameter.
        codes = functools.cache(lambda device: (_Code.on(True, device), _Code.on(False, device)))
        shards: list[_LocalShard] = []
        error: BaseException | None = None
        try:
            for group in self.param_groups:
                float(group["lr"])
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state: dict[str, Any] = self.state[param]
                    if not state:
                        if (problem := problem_of_blocks(param)) is not None:
                            raise ConfigurationError(f"AdamW8bit was given {problem}")
                        state.update(self.first_state(param))
                    shards.append(_LocalShard(param, group, state, codes))
        except BaseException as met:  # noqa: BLE001 - the ranks that share blocks must raise, too
            error = met
        self.agree(error)
        shared: dict[tuple[dist.ProcessGroup, ...], list[_LocalShard]] = {}  # those with blocks of several ranks
        for shard in shards:
            if shard.straddling:
                shared.setdefault(shard.groups, []).append(shard)
        for are_new in (False, True):
            for members in shared.values():
                _share_scales(members, are_new)
        for shard in shards:
            shard.update()
        return loss

    def agree(self, error: BaseException | None) -> None:
        """Raise the error of any rank on all before scales of shared blocks are exchanged; collective if some are."""
        self._has_agreed = True
        live = [param for param in params_of(self) if isinstance(param, UnevenDTensor) and param.grad is not None]
        specs = [param.shard_spec for param in live]
        cuts = [(spec, (spec.description.cut, *spec.description.other_cuts)) for spec in specs]
        groups = dict.fromkeys(  # replicas, too, which may wait for these ranks later
            group for spec, parts in cuts if any(map(_straddling, parts)) for group in spec.all_groups
        )
        ask([(group, Met.of(error)) for group in groups], judge_met, error)
        if error is not None:  # where nothing is shared
            raise error

    def first_state(self, param: Tensor) -> dict[str, Any]:
        """Return the state of a parameter before its first step."""
        zero = dynamic_map(True).index(0.0), dynamic_map(False).index(0.0)
        found: dict[str, Any] = {_STEP: torch.tensor(0.0)}
        for codes, scales, code in zip(_CODES, _SCALES, zero, strict=True):
            if isinstance(param, UnevenDTensor):
                spec = _spec_of_scales(param.shard_spec)
                local = torch.full_like(param._local_tensor, code, dtype=torch.uint8, requires_grad=False)
                found[codes] = UnevenDTensor.wrap(local, param.shard_spec)
                blank = local.new_zeros(spec.description.local_shape, dtype=torch.float32)
                found[scales] = UnevenDTensor.wrap(blank, spec)
            else:
                found[codes] = torch.full_like(param, code, dtype=torch.uint8, requires_grad=False)
                found[scales] = torch.zeros(scales_shape(param.shape), device=param.device)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state of whole parameters, or sharded as they are; codes and scales keep their dtypes.

        Raises:
            CheckpointError: It is no state of an AdamW8bit on such parameters; nothing was loaded.
        """
        held: dict[str, Any] = {}

        def hold(optimizer: Optimizer, given: dict[str, Any]) -> None:  # after all other hooks
            params = params_of(optimizer)
            numbers = [number for group in given["param_groups"] for number in group["params"]]
            for param, number in zip(params, numbers, strict=False):  # torch refuses other lengths
                if given["state"].get(number):
                    held[number] = param, _fitted(param, given["state"][number])

        handle = self.register_load_state_dict_pre_hook(hold)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for param, state in held.values():  # which torch has cast to the dtype of the parameters
            self.state[param].update(state)


class BlocksStep(ExchangingStep):
    """Steps one AdamW8bit, which itself agrees with the ranks that share its blocks."""

    def begin(self, optimizer: Optimizer) -> None:
        """Note that these ranks will wait for this one."""
        super().begin(optimizer)
        cast(AdamW8bit, optimizer)._has_agreed = False

    def agree(self, optimizer: Optimizer, error: BaseException | None) -> None:
        """Raise the error of a hook; collective, unless the step has agreed already."""
        own = cast(AdamW8bit, optimizer)
        if not own._has_agreed:
            own.agree(error)


def _options_problem(group: Mapping[str, Any]) -> str | None:
    numbers = {key: float(group[key]) for key in ("lr", "eps", "weight_decay")}
    wrong = [f"{key}={value:g}" for key, value in numbers.items() if not 0 <= value < math.inf]
    if not (len(group["betas"]) == 2 and all(0 <= beta < 1 for beta in group["betas"])):
        wrong.append(f"betas={group['betas']}")
    if not wrong:
        return None
    return f"{', '.join(wrong)}; give two betas in [0, 1), and other numbers that are finite and not negative"


def problem_of_blocks(param: Tensor) -> str | None:
    """Return the reason why a parameter's blocks would depend on its sharding; None if they do not."""
    if not param.is_floating_point():
        return f"a parameter of {param.dtype}; give floating-point parameters"
    if isinstance(param, UnevenDTensor):
        spec = param.shard_spec
        if spec.foreign_groups and param.dim() > 2:
            return (
                f"a stack of experts of shape {tuple(param.shape)} that expert-parallel ranks save as one tensor, "
                "whose blocks no rank has; give it to AdamW, or keep one parameter for each expert"
            )
        return None if scales_in_blocks(spec.description) is not None else _TENSOR_PARALLEL.format(tuple(param.shape))
    if isinstance(param, DTensor):
        return (
            f"a DTensor of shape {tuple(param.shape)} that fully_shard has not made; give plain tensors, or parameters "
            "of a model that fully_shard has sharded"
        )
    return None


_TENSOR_PARALLEL = (
    "a parameter of shape {} that tensor parallelism cuts inside a block of 256 elements; give it to AdamW, or choose "
    "tensor-parallel ranks whose parts are multiples of 256"
)


# ---- blocks (pure) ---------------------------------------------------------------------------------------------------


def scales_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of the scales of a tensor: one for each block, in the order of the flattened tensor."""
    if shape and shape[-1] % BLOCK == 0:
        return (*shape[:-1], shape[-1] // BLOCK)
    return (_blocks(math.prod(shape)),)


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def scales_in_blocks(description: ShardDescription) -> ShardDescription | None:
    """Return the shard spec of a tensor's scales: each is on the rank that holds the first element of its block.

    None where tensor-parallel parts end inside a block.
    """
    shape, parts = description.shape, description.tensor_cut
    divides_last = bool(shape) and shape[-1] % BLOCK == 0
    if parts is not None and (not divides_last or parts.dim == len(shape) - 1):
        if not divides_last and parts.dim:
            return None
        unit = 1 if divides_last else math.prod(shape[1:])
        edges = [edge * unit for edge in parts.edges]
        if any(edge % BLOCK for edge in edges if edge < edges[-1]):
            return None
        parts = TensorParallelCut(parts.dim, tuple(map(_blocks, edges)))
    return replace(
        description,
        shape=scales_shape(shape),
        cut=_cut_in_blocks(description.cut),
        tensor_cut=parts,
        other_cuts=tuple(map(_cut_in_blocks, description.other_cuts)),
    )


def _cut_in_blocks(cut: Cut) -> ListedCut:
    starts = [cut.range_of(shard)[0] for shard in range(cut.num_shards)]
    return ListedCut(tuple(map(_blocks, [*starts, cut.numel])))


@functools.lru_cache(maxsize=4096)
def _straddling(cut: Cut) -> tuple[int, ...]:
    """Return the blocks inside of which a shard ends, rising."""
    if cut.is_multiple_of(BLOCK):
        return ()
    edges = (cut.range_of(shard)[0] for shard in range(cut.num_shards))
    return tuple(dict.fromkeys(edge // BLOCK for edge in edges if edge % BLOCK and edge < cut.numel))


def _spec_of_scales(spec: ShardSpec) -> ShardSpec:
    description = scales_in_blocks(spec.description)
    assert description is not None, "such a parameter was refused"
    made = ShardSpec(spec.mesh, description)
    made.belongs = spec.belongs
    return made


# ---- codes -----------------------------------------------------------------------------------------------------------


@functools.cache
def dynamic_map(is_signed: bool) -> tuple[float, ...]:
    """Return the 256 values of a code, rising, in [-1, 1] or [0, 1].

    Seven orders of magnitude, each with twice as many values as the one below; 0 and 1.
    """
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if is_signed else 2 ** (decade + 1)
        means = [(0.1 + 0.9 * (index + 0.5) / count) * 10.0 ** (decade - 6) for index in range(count)]
        found += [*means, *(-mean for mean in means)] if is_signed else means
    return tuple(sorted(found))


@dataclass(frozen=True)
class _Code:
    """Values of a code, and the thresholds between them: fp32 on one device."""

    values: Tensor
    thresholds: Tensor

    @classmethod
    def on(cls, is_signed: bool, device: torch.device) -> _Code:
        values = torch.tensor(dynamic_map(is_signed), device=device)
        return cls(values, (values[1:] + values[:-1]) / 2)

    def decoded(self, codes: Tensor) -> Tensor:
        return self.values[codes.int()]

    def encoded(self, values: Tensor) -> Tensor:
        """Return the code of the nearest value."""
        return torch.bucketize(values, self.thresholds, out_int32=True).to(torch.uint8)


# ---- one step --------------------------------------------------------------------------------------------------------


class _LocalShard:
    """This rank's elements [start, stop) of a flattened parameter (of its tensor-parallel part), and their state.

    `straddling` are the blocks that several ranks share, the same on all of them, and `groups` those ranks.
    """

    def __init__(
        self,
        param: Tensor,
        group: Mapping[str, Any],
        state: Mapping[str, Any],
        codes_on: Callable[[torch.device], tuple[_Code, _Code]],
    ) -> None:
        assert param.grad is not None
        self._group, self._state, self._count = group, state, float(state[_STEP]) + 1
        if isinstance(param, UnevenDTensor):
            spec = param.shard_spec
            description, self.groups = spec.description, spec.shard_groups
            self._start, self._stop = description.local_range
            self.straddling = _straddling(description.cut)
            grad = as_sharded(param.grad, spec)
        else:
            self._start, self._stop, self.straddling, self.groups, grad = 0, param.numel(), (), (), param.grad
        # `detach` shares the version counter, by which writes are noticed.
        self._weight, self._grad = local_of(param).detach(), local_of(grad).detach().reshape(-1)
        self._codes = [local_of(state[key]).detach().view(-1) for key in _CODES]
        self._kept = [local_of(state[key]).detach().view(-1) for key in _SCALES]  # of blocks that begin here
        self._maps = codes_on(self._grad.device)
        self.first, self._last = self._start // BLOCK, _blocks(self._stop) if self._stop > self._start else 0
        # Of both moments, of all blocks of which there are elements here.
        self.scales = torch.zeros(2, max(self._last - self.first, 0), device=self._grad.device)
        self.scales[:, self.scales.shape[1] - len(self._kept[0]) :] = torch.stack(self._kept)
        self._new: dict[int, Tensor] = {}  # scales of blocks that are shared

    def shares(self, block: int) -> bool:
        """Return True if this rank holds elements of a block."""
        return self.first <= block < self._last

    def update(self) -> None:
        """Update weights, codes, scales and the count of steps."""
        self._state[_STEP].add_(1)
        step = CHUNK_NUMEL // BLOCK
        for first in range(self.first, self._last, step):
            self._update(first, min(first + step, self._last))
        skipped = self.scales.shape[1] - len(self._kept[0])
        for kept, scales in zip(self._kept, self.scales, strict=True):
            kept.copy_(scales[skipped:])

    def _update(self, first: int, last: int) -> None:
        part = self._part(first, last)
        moments = self._moments(part, first, last)
        here = self.scales[:, first - self.first : last - self.first]
        for scales, moment in zip(here, moments, strict=True):
            scales.copy_(self._in_rows(moment.abs(), first, last).amax(1))
        for block, scales in self._new.items():
            if first <= block < last:
                here[:, block - first] = scales
        for scales, moment, codes, code in zip(here, moments, self._codes, self._maps, strict=True):
            divisor = self._spread(torch.where(scales == 0, 1, scales), first, part)
            codes[part] = code.encoded(moment / divisor)
        self._apply(part, *moments)

    def _apply(self, part: slice, mean: Tensor, root: Tensor) -> None:
        """Update the weights as torch's AdamW; each operation is rounded alike on any length and alignment."""
        group, lr = self._group, float(self._group["lr"])
        correction, root_correction = (1 - beta**self._count for beta in group["betas"])
        update = mean / correction / (root / math.sqrt(root_correction) + group["eps"])
        weight = self._weight.view(-1)[part]
        weight.copy_(weight.float() * (1 - lr * group["weight_decay"]) - update * lr)

    def _moments(self, part: slice, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Return the new mean of gradients, and the root of the mean of their squares: fp32."""
        grad, (beta, root_beta) = self._grad[part].float(), self._group["betas"]
        old = self.scales[:, first - self.first : last - self.first]
        mean, root = (
            code.decoded(codes[part]) * self._spread(scales, first, part)
            for code, codes, scales in zip(self._maps, self._codes, old, strict=True)
        )
        mean = mean * beta + grad * (1 - beta)
        return mean, (root * root * root_beta + grad * grad * (1 - root_beta)).sqrt()

    def _part(self, first: int, last: int) -> slice:
        """Return this rank's elements of blocks [first, last)."""
        return slice(max(first * BLOCK - self._start, 0), min(last * BLOCK, self._stop) - self._start)

    def _spread(self, scales: Tensor, first: int, part: slice) -> Tensor:
        """Repeat the scales of blocks from `first` on for each element."""
        skipped = part.start + self._start - first * BLOCK
        return scales.repeat_interleave(BLOCK)[skipped : skipped + part.stop - part.start]

    def _in_rows(self, values: Tensor, first: int, last: int) -> Tensor:
        """Return values that are not negative with a row for each block; zeros where there are no elements here."""
        before = max(self._start - first * BLOCK, 0)
        after = (last - first) * BLOCK - before - len(values)
        return torch.nn.functional.pad(values, (before, after)).view(-1, BLOCK)


def _share_scales(shards: Sequence[_LocalShard], are_new: bool) -> None:
    """Take the scales of shared blocks: the largest that any of their ranks has; an all-reduce for each group."""
    places = [(shard, block) for shard in shards for block in shard.straddling]
    device = shards[0].scales.device
    largest = torch.zeros(len(places), 2, device=device)
    for place, (shard, block) in enumerate(places):
        if shard.shares(block):
            if are_new:
                part = shard._part(block, block + 1)
                largest[place] = torch.stack([moment.abs().amax() for moment in shard._moments(part, block, block + 1)])
            else:
                largest[place] = shard.scales[:, block - shard.first]
    for group in shards[0].groups:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    for place, (shard, block) in enumerate(places):
        if shard.shares(block):
            if are_new:
                shard._new[block] = largest[place]
            else:
                shard.scales[:, block - shard.first] = largest[place]


# ---- state that is loaded --------------------------------------------------------------------------------------------


def _fitted(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return loaded codes and scales, sharded as the parameter's; raise if they do not fit it."""
    wanted = {**dict.fromkeys(_CODES, (tuple(param.shape), torch.uint8))}
    wanted |= dict.fromkeys(_SCALES, (scales_shape(param.shape), torch.float32))
    found = {key: state[key] for key in wanted if isinstance(state.get(key), Tensor)}
    if {key: (tuple(value.shape), value.dtype) for key, value in found.items()} != wanted or _STEP not in state:
        raise CheckpointError(
            f"AdamW8bit was given the state {sorted(map(str, state))} for a parameter of shape {tuple(param.shape)}; "
            f"give what an AdamW8bit saved for such a parameter: {_STEP}, {', '.join(wanted)}, as it saved them"
        )
    step = {_STEP: torch.as_tensor(state[_STEP], dtype=torch.float32, device="cpu").clone()}  # counted in place
    if not isinstance(param, UnevenDTensor):
        return step | {key: value.detach().to(param.device, copy=True) for key, value in found.items()}
    specs = dict.fromkeys(_CODES, param.shard_spec) | dict.fromkeys(_SCALES, _spec_of_scales(param.shard_spec))
    cut = {key: cut_alike(specs[key], value).detach().clone() for key, value in found.items()}
    return step | {key: UnevenDTensor.wrap(local, specs[key]).to(param.device) for key, local in cut.items()}
