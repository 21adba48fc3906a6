"""How far sums of bfloat16 gradients end from their exact value, by how the ranks are added up.

`python benchmarks/fp32_accumulation.py --help`. Pure numerics for many ranks, and gloo's real collectives for a few.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a plain script, this folder is no package

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.launching import measure_on_ranks
from megatron_fsdp import reduce_scatter_with_fp32_accumulation
from megatron_fsdp.comm.axis import Axis
from megatron_fsdp.comm.reduction import sum_received

INDEPENDENT = "independent"
AGREEING = "agreeing"
CASES = (INDEPENDENT, AGREEING)
SIMULATED_RANKS = (2, 4, 8, 64, 512)
REAL_RANKS = (2, 4)
HALF_ULP = 2.0**-8
"""The most that one rounding to bfloat16 is off, relative to the value."""


class Error(NamedTuple):
    """Against the exact sum.

    Attributes:
        rms: Root mean square of the error over that of the exact sum.
        largest: The largest relative error of elements that are at least as large as that root mean square; smaller
            ones say more of cancellation than of rounding.
    """

    rms: float
    largest: float


def gradients(case: str, ranks: int, numel: int, seed: int = 0) -> list[Tensor]:
    """Each rank's gradient, (numel,) in bfloat16.

    Args:
        case: "independent": standard normal noise. "agreeing": the same again on a signal that all ranks share.
        ranks: How many.
        numel: Elements.
        seed: Of everything.
    """
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(numel, generator=generator) * (case == AGREEING)
    return [(signal + torch.randn(numel, generator=generator)).bfloat16() for _ in range(ranks)]


def exact_sum(parts: Sequence[Tensor]) -> Tensor:
    """Sum in float64."""
    total = parts[0].double()
    for part in parts[1:]:
        total += part
    return total


def ring(parts: Sequence[Tensor]) -> Tensor:
    """Pass a partial sum from rank to rank, rounded to bfloat16 at every hop."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def tree(parts: Sequence[Tensor]) -> Tensor:
    """Partial sums meet in pairs and are rounded to bfloat16 at every level; ranks are a power of two."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return tree(parts[:half]) + tree(parts[half:])


def in_float32(parts: Sequence[Tensor]) -> Tensor:
    """Add up in float32 what came in, as this library does for a float32 main gradient."""
    return sum_received(torch.cat(list(parts)), len(parts))


def in_float32_rounded(parts: Sequence[Tensor]) -> Tensor:
    """Do the same, and round to bfloat16 once."""
    return in_float32(parts).bfloat16()


WAYS: Mapping[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "bf16 ring": ring,
    "bf16 tree": tree,
    "fp32, rounded once": in_float32_rounded,
    "fp32": in_float32,
}


def error_of(found: Tensor, exact: Tensor) -> Error:
    """Compare a sum, (numel,) in any dtype, with the exact one in float64."""
    off = found.double() - exact
    scale = exact.square().mean().sqrt()
    counted = exact.abs() >= scale
    relative = (off[counted] / exact[counted]).abs().max()
    return Error((off.square().mean().sqrt() / scale).item(), relative.item())


def simulate(case: str, ranks: int, numel: int, seed: int = 0) -> dict[str, Error]:
    """Return the error of each way to add up."""
    parts = gradients(case, ranks, numel, seed)
    exact = exact_sum(parts)
    return {name: error_of(add_up(parts), exact) for name, add_up in WAYS.items()}


def measure_here(case: str, numel: int, seed: int = 0) -> dict[str, Error]:
    """Measure the error of the back end's own reduce-scatter in bfloat16 and of this library's. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts = gradients(case, ranks, numel, seed)
    found = {}
    for name in ("bf16 reduce-scatter", "fp32, rounded once"):
        shard = torch.empty(numel // ranks, dtype=torch.bfloat16)
        if name.startswith("fp32"):
            reduce_scatter_with_fp32_accumulation(shard, parts[rank].clone())
        else:
            work = Axis(dist.group.WORLD, rank, ranks).reduce_scatter(shard, parts[rank].clone())
            assert work is not None
            work.wait()
        shards = [torch.empty_like(shard) for _ in range(ranks)]
        dist.all_gather(shards, shard)
        found[name] = error_of(torch.cat(shards), exact_sum(parts))
    return found


def _all_cases(numel: int, _device: torch.device, _mesh: DeviceMesh) -> dict[str, dict[str, Error]]:
    return {case: measure_here(case, numel) for case in CASES}


def table(rows: Iterable[tuple[str, int, Mapping[str, Error]]]) -> str:
    """Markdown with one line for each (case, ranks, errors); each error as "RMS, largest"."""
    lines: list[str] = []
    for case, ranks, errors in rows:
        if not lines:
            lines = [f"| gradients | ranks | {' | '.join(errors)} |", "|---|" + "---:|" * (1 + len(errors))]
        told = " | ".join(", ".join(f"{value:.1e}" if value else "0" for value in error) for error in errors.values())
        lines.append(f"| {case} | {ranks} | {told} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=65_536, help="elements; a multiple of all real ranks")
    parser.add_argument("--ranks", type=int, nargs="*", default=list(SIMULATED_RANKS), help="powers of two, simulated")
    parser.add_argument("--real-ranks", type=int, nargs="*", default=list(REAL_RANKS), help="gloo processes")
    given = parser.parse_args(argv)
    print(
        f"torch {torch.__version__}; {given.numel} elements; RMS, largest relative error; one rounding: {HALF_ULP:.1e}"
    )
    print("\nSimulated\n")
    print(table((case, ranks, simulate(case, ranks, given.numel)) for case in CASES for ranks in given.ranks))
    print("\nReal collectives of gloo\n")
    real = {ranks: measure_on_ranks(_all_cases, given.numel, ranks, threads=1)[0] for ranks in given.real_ranks}
    print(table((case, ranks, real[ranks][case]) for case in CASES for ranks in given.real_ranks))


if __name__ == "__main__":
    main(sys.argv[1:])
