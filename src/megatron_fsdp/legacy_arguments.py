"""Keywords of earlier versions of this API, mapped onto today's."""

from dataclasses import dataclass, replace

import torch

from megatron_fsdp.errors import ConfigurationError
from megatron_fsdp.mixed_precision import MixedPrecisionPolicy
from megatron_fsdp.notices import warn_caller


@dataclass(frozen=True)
class LegacyArguments:
    """The keywords that are gone; None means "not given".

    Attributes:
        grad_reduce_in_fp32: Now ``main_grads_dtype`` and ``grad_comm_dtype`` of the policy: True is float32 for both,
            False lets both follow.
        preserve_fp32_weights: Now ``main_params_dtype`` of the policy: True is float32, False is None.
        check_for_nan_in_grad: Now ``report_nan_in_param_grad``.
        keep_fp8_transpose_cache_when_using_custom_fsdp: Now ``keep_fp8_transpose_cache``.
    """

    grad_reduce_in_fp32: bool | None = None
    preserve_fp32_weights: bool | None = None
    check_for_nan_in_grad: bool | None = None
    keep_fp8_transpose_cache_when_using_custom_fsdp: bool | None = None


@dataclass(frozen=True)
class CurrentArguments:
    """Today's arguments that legacy keywords map onto, with nothing left open.

    Attributes:
        mixed_precision_policy: The dtypes to use.
        report_nan_in_param_grad: Whether to check every gradient for NaN and infinity.
        keep_fp8_transpose_cache: Whether to keep transposed float8 weights.
        notices: One sentence per legacy keyword that was given.
    """

    mixed_precision_policy: MixedPrecisionPolicy
    report_nan_in_param_grad: bool
    keep_fp8_transpose_cache: bool
    notices: tuple[str, ...]


def resolve_legacy_arguments(
    legacy: LegacyArguments,
    *,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    report_nan_in_param_grad: bool | None = None,
    keep_fp8_transpose_cache: bool | None = None,
) -> CurrentArguments:
    """Replace legacy keywords by today's arguments, with one ``FutureWarning`` for all of them.

    Args:
        legacy: The legacy keywords.
        mixed_precision_policy: Today's argument; None: not given.
        report_nan_in_param_grad: Today's argument; None: not given.
        keep_fp8_transpose_cache: Today's argument; None: not given.

    Returns:
        Today's arguments; the defaults where neither form was given.

    Raises:
        ConfigurationError: A legacy keyword and the argument that replaced it are both given and disagree.
    """
    policy, notices = _resolve_policy(legacy, mixed_precision_policy)
    report, report_notices = _resolve_flag(
        ("check_for_nan_in_grad", legacy.check_for_nan_in_grad),
        ("report_nan_in_param_grad", report_nan_in_param_grad),
    )
    keep, keep_notices = _resolve_flag(
        (
            "keep_fp8_transpose_cache_when_using_custom_fsdp",
            legacy.keep_fp8_transpose_cache_when_using_custom_fsdp,
        ),
        ("keep_fp8_transpose_cache", keep_fp8_transpose_cache),
    )
    notices = (*notices, *report_notices, *keep_notices)
    if notices:
        warn_caller(" ".join(notices), FutureWarning)
    return CurrentArguments(policy, report, keep, notices)


def _resolve_policy(
    legacy: LegacyArguments, given: MixedPrecisionPolicy | None
) -> tuple[MixedPrecisionPolicy, tuple[str, ...]]:
    policy = given or MixedPrecisionPolicy()
    notices: list[str] = []
    for keyword, value, names in (
        ("grad_reduce_in_fp32", legacy.grad_reduce_in_fp32, ("main_grads_dtype", "grad_comm_dtype")),
        ("preserve_fp32_weights", legacy.preserve_fp32_weights, ("main_params_dtype",)),
    ):
        if value is None:
            continue
        dtype = torch.float32 if value else None
        wanted = replace(policy, **dict.fromkeys(names, dtype))
        if given is not None and _with_grad_comm(wanted) != _with_grad_comm(policy):
            raise _conflict(f"{keyword}={value}", f"mixed_precision_policy={given}")
        policy = wanted
        mapped = ", ".join(f"{name}={dtype}" for name in names)
        notices.append(_notice(f"{keyword}={value}", f"mixed_precision_policy=MixedPrecisionPolicy({mapped})"))
    return policy, tuple(notices)


def _with_grad_comm(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """A communication dtype that follows the main gradients is the same as one that names their dtype."""
    return replace(policy, grad_comm_dtype=policy.grad_comm_dtype or policy.main_grads_dtype)


def _resolve_flag(legacy: tuple[str, bool | None], current: tuple[str, bool | None]) -> tuple[bool, tuple[str, ...]]:
    old_name, old = legacy
    new_name, new = current
    if old is None:
        return bool(new), ()
    if new is not None and new != old:
        raise _conflict(f"{old_name}={old}", f"{new_name}={new}")
    return old, (_notice(f"{old_name}={old}", f"{new_name}={old}"),)


def _notice(old: str, new: str) -> str:
    return f"{old} is deprecated and was taken as {new}; write that instead."


def _conflict(old: str, new: str) -> ConfigurationError:
    return ConfigurationError(f"{old} is deprecated and contradicts {new}; leave the former out.")
