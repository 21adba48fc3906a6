"""Sleep until another process changes a word of shared memory: Linux's futex, which Python does not offer.

Only on x86-64: there a processor shows its stores to others in the order in which they were made, so that who sees a
counter that says "the data is there" sees the data. Python has no fence that would make sure of it elsewhere.
Futexes: Drepper, "Futexes are tricky" (2011), and `man 2 futex`.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import sys

_SYS_FUTEX = 202
_WAIT, _WAKE = 0, 1
_ALL = 2**31 - 1


def has_futex() -> bool:
    """Whether this machine has what is needed: Linux on x86-64."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class Bell:
    """A 32-bit word of shared memory that is rung when something has changed.

    Who waits reads it, looks at what it waits for, and sleeps unless it was rung since.

    Args:
        address: Of the word, a multiple of four; whoever has the bell keeps the memory.
    """

    def __init__(self, address: int) -> None:
        self._word = ctypes.c_uint32.from_address(address)
        self._address = ctypes.c_void_p(address)
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall

    def read(self) -> int:
        """How often it was rung."""
        return self._word.value

    def ring(self) -> None:
        """Wake all who wait. Only the owner of the word rings."""
        self._word.value += 1
        self._syscall(_SYS_FUTEX, self._address, _WAKE, _ALL, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> None:
        """Sleep until it has been rung since `seen` was read, the time is over, or for no reason at all.

        Raises:
            OSError: The system refuses.
        """
        limit = _Timespec(int(timeout_s), int(timeout_s % 1.0 * 1e9))
        arguments = (self._address, _WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)
        if self._syscall(_SYS_FUTEX, *arguments) == -1:
            code = ctypes.get_errno()
            if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
                raise OSError(code, f"futex: {errno.errorcode.get(code, code)}")
