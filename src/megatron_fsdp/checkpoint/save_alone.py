"""`dcp.save` by one process, without torch's warning that it is one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save


def save_alone(state: Mapping[str, Any], **options: Any) -> None:
    """Save from this process alone, whether or not there are others.

    Args:
        state: What to save.
        **options: Of `dcp.save`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        save(dict(state), no_dist=True, **options)
