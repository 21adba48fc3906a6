"""Tests of what travels over a back end, or of memory that only that needs, keep ranks from sharing memory."""

import os
from collections.abc import Callable
from typing import Any

from megatron_fsdp.shm.share import VARIABLE


def over_sockets(fn: Callable[..., Any], *args: Any) -> Any:
    """What `fn(*args)` returns where models that it shards do not use shared memory; to be run on all ranks."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "0"
    try:
        return fn(*args)
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before
