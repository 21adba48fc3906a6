"""Find out what is wrong with a state dict before anything of it is copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from megatron_fsdp.dtensor.operands import local_operand
from megatron_fsdp.dtensor.tensor import UnevenDTensor


class _CopiesNothing(TorchFunctionMode):
    """Lets `tensor.copy_(other)` check that it could, and do nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.copy_:
            if isinstance(args[0], UnevenDTensor):
                local_operand(args[0].shard_frame, args[1], "copy_")
            return args[0]
        return func(*args, **dict(kwargs or {}))


def check_load(module: nn.Module, load: Callable[[], object]) -> str | None:
    """Go through a load without copying; no communication.

    Args:
        module: Where it loads into.
        load: Does it, by torch's own means; it may be called again afterwards.

    Returns:
        What torch would complain of, all together; None where nothing is wrong.
    """
    overridden = [each for each in module.modules() if type(each).set_extra_state is not nn.Module.set_extra_state]
    before = [(each, each.get_extra_state()) for each in overridden]
    try:
        with _CopiesNothing():
            load()
    except RuntimeError as error:
        for each, state in before:
            each.set_extra_state(state)
        return str(error)
    return None
