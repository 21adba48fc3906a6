"""Let transformers take no sequence for a packed one, as long as a model that asked for it lives.

Its flash attention looks into the position ids in every layer where the batch is one sequence, and waits for the
device to answer. The function that looks is one for the whole process, so other models do without it meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

_MARK = "_models_without_packed_sequences"


def assume_no_packed_sequences(model: nn.Module) -> None:
    """Replace transformers' look by the answer no; undone when the last model that asked for it is gone."""
    from transformers import modeling_flash_attention_utils as flash

    module: Any = flash
    users: set[int] | None = getattr(module._is_packed_sequence, _MARK, None)
    if users is None:
        users, looks = set(), module._is_packed_sequence

        def is_never_packed(*_: Any, **__: Any) -> bool:
            return False

        setattr(is_never_packed, _MARK, users)
        is_never_packed.__wrapped__ = looks  # type: ignore[attr-defined]
        module._is_packed_sequence = is_never_packed
    if id(model) not in users:
        users.add(id(model))
        weakref.finalize(model, _release, module, id(model))


def _release(module: Any, key: int) -> None:
    current = module._is_packed_sequence
    users: set[int] = getattr(current, _MARK, set())
    users.discard(key)
    if not users and hasattr(current, _MARK):
        module._is_packed_sequence = current.__wrapped__
