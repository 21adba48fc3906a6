"""Errors for arguments that are misspelt, missing, not implemented or set elsewhere."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

from megatron_fsdp.errors import NotSupportedYetError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Class = TypeVar("_Class")

IN_SLOTS = (
    "bytes of weight_format='mxfp8' are gathered into the slot of the weights, which a unit needs beside its gradients "
    "in backward anyway"
)

NOT_IMPLEMENTED: Mapping[str, str] = {"reuse_grad_buf_for_mxfp8_param_ag": IN_SLOTS}
"""Switches that have to stay off under every front end, with the reason."""

DECIDED_ELSEWHERE: Mapping[str, str] = {
    "grad_reduce_in_fp32": "mixed_precision_policy names the dtypes of gradients, and where it follows this is float32",
    "use_distributed_optimizer": "data_parallel_sharding_strategy says what is sharded",
    "num_distributed_optimizer_instances": "dist_index says which ranks share an optimizer (dp_outer_dim)",
    "align_param_gather": "whoever calls start_param_sync decides when pipeline stages gather",
    "num_buckets": "parameters are gathered and reduced by units",
    "pad_buckets_for_high_nccl_busbw": "parameters are gathered and reduced by units",
    "use_megatron_fsdp": "whoever calls MegatronFSDP has chosen it",
    "use_custom_fsdp": "whoever calls MegatronFSDP has chosen it",
}
"""Fields of a configuration that decide nothing in `MegatronFSDP`, with the reason."""


def refuse_unsupported(given: Mapping[str, Any]) -> None:
    """Raise if a field of `NOT_IMPLEMENTED` is not at its default."""
    at_fault = [
        f"{name}={given[name]!r} (default False)" for name in NOT_IMPLEMENTED if given.get(name, False) is not False
    ]
    if at_fault:
        raise NotSupportedYetError(
            f"not supported yet: {', '.join(at_fault)}; this version accepts the default only, so leave it out"
        )


def nearest_name(given: object, known: Iterable[str], otherwise: str = "") -> str:
    """Return a suggestion for a name that does not exist, to end a message with."""
    names = list(known)
    nearest = difflib.get_close_matches(str(given), names, n=1)
    return f"did you mean {nearest[0]!r}?" if nearest else otherwise or f"the fields are {', '.join(names)}."


def explains_arguments(
    **cures: str,
) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Make a function's errors suggest a name for an unknown keyword, and the cure for a missing argument.

    Its signature stays readable by `inspect`. The errors are TypeErrors, as Python's own.

    Args:
        cures: What a caller who leaves out a required argument may want, by name of the argument.
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        signature = inspect.signature(function)
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for given in kwargs:
                if given not in signature.parameters:
                    hint = nearest_name(given, signature.parameters, f"see help({name}).")
                    raise TypeError(f"{name}() has no argument {given!r}; {hint}")
            bound = signature.bind_partial(*args, **kwargs).arguments
            for missing, cure in cures.items():
                if missing not in bound:
                    raise TypeError(f"{name}() was called without {missing!r}; {cure}")
            return function(*args, **kwargs)

        return call

    return decorate


def explains_fields(cls: type[_Class]) -> type[_Class]:
    """Apply `explains_arguments` to a dataclass."""
    cls.__init__ = explains_arguments()(cls.__init__)  # type: ignore[method-assign]
    return cls
