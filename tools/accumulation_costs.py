"""Measure the costs of each way to accumulate gradients: memory, collectives and bytes sent; docs/precision.md."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from megatron_fsdp import MegatronFSDP, fully_shard_model
from tests.support.counting import held_bytes
from tests.support.on_ranks import fixed_seed

FEATURES, BLOCKS, MICROBATCHES = 32, 3, 4
NUMEL = (BLOCKS + 1) * FEATURES * FEATURES  # P: three blocks and the root, nothing padded
SENT = ("gathers", "sent in gathers", "reductions", "sent in them")
MODES = {
    "reduce every microbatch": "each",
    "`set_model_auto_sync(False)`, `is_last_microbatch`": "last",
    "`no_sync()`": "no_sync",
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@dataclass(frozen=True)
class Cost:
    """The costs of one optimizer step after the first, on one rank."""

    held_bytes: int  # held between two microbatches beyond what is held between two steps
    gathers: int
    reductions: int  # reduce-scatters or all-reduces
    gather_bytes: int
    reduce_bytes: int


def measure() -> dict[tuple[int, str], Cost]:
    """Measure every strategy and mode."""
    return {(strategy, mode): _measure(strategy, mode) for strategy in range(4) for mode in MODES.values()}


def _measure(strategy: int, mode: str) -> Cost:
    with fixed_seed(0):
        net = nn.Sequential(*(_Block() for _ in range(BLOCKS)), nn.Linear(FEATURES, FEATURES, bias=False))
    model = fully_shard_model(
        net, fsdp_unit_modules=[_Block], zero_dp_strategy=strategy, sync_model_each_microbatch=mode != "last"
    )
    data = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        _accumulate(model, data, mode)
        model.install_optimized_model_weights()  # as after a step: full weights have to be gathered anew
        model.zero_grad()
    at_rest, before = held_bytes(), model.traffic()
    between = _accumulate(model, data, mode, looks=True)
    sent = model.traffic().since(before)
    return Cost(between - at_rest, sent.gathers, sent.reductions, sent.gather_bytes, sent.reduce_bytes)


def _accumulate(model: MegatronFSDP, data: torch.Tensor, mode: str, looks: bool = False) -> int:
    """Run one accumulation; return the memory before its last microbatch, if it `looks`."""
    held = 0
    for microbatch in range(MICROBATCHES):
        is_last = microbatch == MICROBATCHES - 1
        if mode == "last":
            model.is_last_microbatch = is_last
        if is_last and looks:
            held = held_bytes()
        if mode == "no_sync" and not is_last:
            with model.no_sync():
                model(data).sum().backward()
        else:
            model(data).sum().backward()
    return held


def table(costs: dict[tuple[int, str], Cost], num_ranks: int) -> str:
    """Return the costs in units of P parameters."""
    lines = [
        f"| strategy | mode | held besides, between microbatches {''.join(f'| {name} ' for name in SENT)}|",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for strategy in range(4):
        for label, mode in MODES.items():
            cost = costs[strategy, mode]
            numbers = [
                _held(cost.held_bytes, num_ranks),
                cost.gathers,
                _in_p(cost.gather_bytes, num_ranks),
                cost.reductions,
            ]
            numbers.append(_in_p(cost.reduce_bytes, num_ranks))
            lines.append(f"| {strategy} | {label} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def _held(num_bytes: int, num_ranks: int) -> str:
    """Return memory over P: a shard is P / N, and the unsharded root and two slots (strategy 3) three fourths of P."""
    if num_bytes * num_ranks == 4 * NUMEL:
        return "P / N"
    return "P / N + 3 P / 4" if (num_bytes - 3 * NUMEL) * num_ranks == 4 * NUMEL else _in_p(num_bytes, 1)


def _in_p(num_bytes: int, num_ranks: int) -> str:
    """Return exact elements over P, and over (N - 1) / N if they are sent."""
    ways = (num_ranks - 1) / num_ranks if num_ranks > 1 else 1.0
    value = num_bytes / 4 / NUMEL / ways
    return f"{value:g} P" if value else "0"


def measured_table() -> str:
    """Measure on the ranks of the default process group and return the table. Collective."""
    return table(measure(), dist.get_world_size())
