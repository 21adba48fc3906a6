"""Machines as figures that a user may change: FLOPs, memory and links.

The presets are the makers' figures for dense 16-bit matrix products, memory and links per direction. The fields named
efficiency are the fractions that a run is assumed to reach; every report states them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.plan.setup import one_of

GIB = 1 << 30
_MAY_BE_ZERO = {"reserved_bytes", "link_latency_s", "network_latency_s", "operator_s", "fp8_flops"}


@dataclass(frozen=True)
class Machine:
    """One kind of node, and the network between nodes."""

    name: str
    devices_per_node: int  # accelerators that share the fast link
    memory_bytes: int  # of one device
    reserved_bytes: int  # of it, for the context, communication libraries and fragmentation
    flops: float  # dense 16-bit floating point operations per second of one device, at best
    memory_bytes_per_s: float  # bandwidth of one device's memory
    link_bytes_per_s: float  # of one device over the fast link, per direction
    network_bytes_per_s: float  # of one device over the network: its own adapter
    flops_efficiency: float = 0.65  # part of `flops` that matrix products reach
    memory_efficiency: float = 0.8  # part of the bandwidth that elementwise operators reach
    network_efficiency: float = 0.8  # part of link and network that collectives reach
    link_latency_s: float = 2e-6  # for one hop inside of a node
    network_latency_s: float = 8e-6  # for one hop between nodes
    operator_s: float = 4e-6  # time to start one operator, below which none is done
    fp8_flops: float = 0.0  # dense 8-bit floating point operations per second, at best; 0: there are none
    fp8_efficiency: float = 0.45  # part of it that matrix products reach, casts and scales included
    host_memory_bytes: int = 128 * GIB  # memory of the host for the state of one device
    host_link_bytes_per_s: float = 50e9  # between one device and the host, per direction
    host_bytes_per_s: float = 60e9  # of the host's memory, for one device

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, str) or (value == 0 and name in _MAY_BE_ZERO):
                continue
            if not value > 0:
                raise ConfigurationError(f"invalid {name}={value} of machine {self.name!r}: give a positive number")
            if name.endswith("_efficiency") and value > 1:
                raise ConfigurationError(f"{name}={value} of machine {self.name!r} is a part; give 0 to 1")
        if self.reserved_bytes >= self.memory_bytes:
            raise ConfigurationError(
                f"reserved_bytes={self.reserved_bytes} of machine {self.name!r} leave nothing of {self.memory_bytes}; "
                "give less"
            )

    @property
    def usable_bytes(self) -> int:
        """The memory of one device that a model can use."""
        return self.memory_bytes - self.reserved_bytes

    def compute_s(self, flops: float, moved_bytes: float, operators: int = 0, fp8_flops: float = 0.0) -> float:
        """Estimate the time of operators that run one after another: matrix products, then memory-bound ones.

        A roofline per kind of work (Williams, Waterman and Patterson, 2009), with a floor for starting operators.
        `fp8_flops` is the part of `flops` that runs in 8 bits; a machine without such products is an error.
        """
        work = (flops - fp8_flops) / (self.flops * self.flops_efficiency)
        work += moved_bytes / (self.memory_bytes_per_s * self.memory_efficiency)
        if fp8_flops:
            if not self.fp8_flops:
                raise ConfigurationError(f"machine {self.name!r} has no fp8 products: leave fp8 out, or set fp8_flops")
            work += fp8_flops / (self.fp8_flops * self.fp8_efficiency)
        return max(work, operators * self.operator_s)

    def bytes_per_s(self, ranks: int, stride: int = 1) -> float:
        """Return the bytes per second that each rank of a group sends in a ring or pairwise algorithm.

        Ranks of one node share a link; a group over several nodes is limited by the network, where the adapters of all
        its members in a node carry one ring each. `stride` is the distance of neighbours in the group in the numbering
        of all ranks, which goes node by node.
        """
        if (ranks - 1) * stride < self.devices_per_node:
            return self.link_bytes_per_s * self.network_efficiency
        members = max(1, self.devices_per_node // stride)
        across = self.network_bytes_per_s * min(members, ranks)
        return min(across, self.link_bytes_per_s if members > 1 else across) * self.network_efficiency

    def latency_s(self, ranks: int, stride: int = 1) -> float:
        """Return the latency of a collective: one hop per doubling of the group, within nodes and between them."""
        spread = -(-((ranks - 1) * stride + 1) // self.devices_per_node)
        nodes = spread if stride < self.devices_per_node else ranks
        inside = -(-ranks // nodes)
        return self.link_latency_s * (inside - 1).bit_length() + self.network_latency_s * (nodes - 1).bit_length()

    def collective_s(self, sent_bytes: float, ranks: int, stride: int = 1) -> float:
        """Estimate the time of a collective in which every rank sends `sent_bytes`; one rank sends nothing."""
        if ranks == 1:
            return 0.0
        return sent_bytes / self.bytes_per_s(ranks, stride) + self.latency_s(ranks, stride)

    def all_to_all_s(self, sent_bytes: float, ranks: int, stride: int = 1) -> float:
        """Estimate the time of an all-to-all in which each rank sends `sent_bytes`, divided equally among the others.

        Bytes that leave the node use each rank's adapter, the rest the link.
        """
        if ranks == 1:
            return 0.0
        near = min(ranks, max(1, self.devices_per_node // stride)) - 1
        inside = sent_bytes * near / (ranks - 1) / self.link_bytes_per_s
        outside = sent_bytes * (ranks - 1 - near) / (ranks - 1) / self.network_bytes_per_s
        return max(inside, outside) / self.network_efficiency + self.latency_s(ranks, stride)

    def but(self, changes: Mapping[str, float]) -> Machine:
        """Return a copy of the machine with other figures; unknown and impossible ones are errors."""
        known = {field.name for field in fields(self)} - {"name"}
        for name in changes:
            if not math.isfinite(changes[name]):
                raise ConfigurationError(f"invalid {name}={changes[name]}: give a finite number")
            if name not in known:
                raise ConfigurationError(f"a machine has no {name!r}; it has {', '.join(sorted(known))}")
        whole = {name: int(value) if name.endswith(("_bytes", "_node")) else value for name, value in changes.items()}
        return replace(self, **whole)  # type: ignore[arg-type]


def _card(
    name: str,
    gib: int,
    flops: float,
    memory_bytes_per_s: float,
    *,
    pcie_bytes_per_s: float = 25e9,
    fp8_flops: float = 0.0,
) -> Machine:
    """Describe a node of PCIe cards, with 64 GiB of host memory and a 25 Gb/s network for each."""
    return Machine(
        name,
        8,
        gib * GIB,
        GIB,
        flops,
        memory_bytes_per_s,
        pcie_bytes_per_s,
        3.125e9,
        fp8_flops=fp8_flops,
        host_memory_bytes=64 * GIB,
        host_link_bytes_per_s=pcie_bytes_per_s,
    )


MACHINES: dict[str, Machine] = {
    machine.name: machine
    for machine in (
        Machine("a100", 8, 80 * GIB, 4 * GIB, 312e12, 2.0e12, 300e9, 25e9, host_link_bytes_per_s=25e9),
        Machine("h100", 8, 80 * GIB, 4 * GIB, 989e12, 3.35e12, 450e9, 50e9, fp8_flops=1979e12),
        Machine("h800", 8, 80 * GIB, 4 * GIB, 989e12, 3.35e12, 200e9, 50e9, fp8_flops=1979e12),
        Machine("h200", 8, 141 * 10**9, 5 * GIB, 989e12, 4.8e12, 450e9, 50e9, fp8_flops=1979e12),
        Machine("b200", 8, 180 * 10**9, 6 * GIB, 2250e12, 8.0e12, 900e9, 50e9, fp8_flops=4500e12),
        _card("3090", 24, 71e12, 0.936e12),
        _card("4090", 24, 165.2e12, 1.008e12, fp8_flops=330.3e12),
        _card("5090", 32, 209.5e12, 1.792e12, pcie_bytes_per_s=50e9, fp8_flops=419e12),
        _card("l4", 24, 121e12, 0.3e12, fp8_flops=242.5e12),
        _card("l40s", 48, 362e12, 0.864e12, fp8_flops=733e12),
        _card("a40", 48, 149.7e12, 0.696e12),
        _card("a10", 24, 125e12, 0.6e12),
        _card("a6000", 48, 154.8e12, 0.768e12),
    )
}
"""Nodes of eight accelerators with one 400 Gb/s adapter each (a100: 200 Gb/s); PCIe 5 to the host (a100: PCIe 4); then
cards without a fast link, by the makers' figures of products that add up in fp32."""


def find_machine(name: str) -> Machine:
    """Return the machine preset of this name."""
    return one_of(f"machine {name!r} is not known", name, MACHINES)


def nearest_machine(memory_bytes: float | None) -> Machine:
    """Return the preset whose devices have the memory nearest to this; h100 where none is named."""
    if memory_bytes is None:
        return MACHINES["h100"]
    return min(MACHINES.values(), key=lambda machine: abs(machine.memory_bytes - memory_bytes))


def bytes_of(text: str, flag: str) -> float:
    """Parse a size such as 24GB, 80GiB or 3e10 into bytes: GB and TB in powers of 1000, GiB and TiB of 1024."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) *(?:([kmgt]?)(i?)b)?", text.strip().lower())
    try:
        number, prefix, binary = found.groups(default="") if found else ("", "", "")
        return float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " ")
    except ValueError:
        raise ConfigurationError(f"{flag} {text} is no size; give bytes, or a number with GB or GiB") from None
