"""The network that ranks of one machine use: none that anybody else can reach."""

from __future__ import annotations

import socket

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_interface() -> dict[str, str]:
    """Return the variables that keep traffic of back ends on this machine; none where no loopback is known."""
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return {} if loopback is None else dict.fromkeys(INTERFACE_VARIABLES, loopback)
