"""Mixed precision: the dtypes of each copy of a parameter and of its gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_fsdp.errors import ConfigurationError, explains_fields

WEIGHT_FORMAT_NAMES = ("fp8", "fp8_compute", "mxfp8", "nvfp4")
"""Names of the formats of `megatron_fsdp.sharding.weight_formats`."""

_ALLOWED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@explains_fields
@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of main weights, main gradients and gradient communication; None means "follow".

    Attributes:
        main_params_dtype: Dtype of the weights that the optimizer updates. None: the compute weights are the main
            weights, and no copy is kept.
        main_grads_dtype: Dtype in which gradients are accumulated and handed to the optimizer. None: the dtype of the
            parameter.
        grad_comm_dtype: Dtype in which gradients are sent. None: the dtype of the main gradients.
        weight_format: Weight format in which weights of two dimensions or more, but for embeddings, are kept sharded
            and gathered under strategy 3; they are decoded into their dtype, so that the model computes with rounded
            weights. None: weights are gathered in their dtype. A mapping gives one, or None, for `fnmatch` patterns of
            parameter names, the first that matches: ``{"lm_head.*": None, "*.experts.*": "nvfp4", "*": "fp8"}``.
            With "fp8_compute" plain `nn.Linear` multiply the gathered float8 weights themselves.

    Raises:
        TypeError: A dtype is neither None nor a ``torch.dtype`` (names such as ``"bf16"`` are not accepted here).
        ConfigurationError: A dtype is not one of float16, bfloat16, float32, float64; a format does not exist; a
            mapping names none.
    """

    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype | None = None
    grad_comm_dtype: torch.dtype | None = None
    weight_format: str | Mapping[str, str | None] | None = None

    def __post_init__(self) -> None:
        for name in ("main_params_dtype", "main_grads_dtype", "grad_comm_dtype"):
            check_main_dtype(getattr(self, name), name)
        if not all(isinstance(pattern, str) for pattern in self.weight_formats):
            raise TypeError(
                f"weight_format={self.weight_format!r} has a pattern that is no string; give those of fnmatch"
            )
        for chosen in self.weight_formats.values():
            if chosen not in (None, *WEIGHT_FORMAT_NAMES):
                raise ConfigurationError(
                    f"weight_format={self.weight_format!r}: {chosen!r} does not exist; give one of "
                    f"{', '.join(WEIGHT_FORMAT_NAMES)}, or None"
                )
        if self.weight_formats and not any(self.weight_formats.values()):
            raise ConfigurationError(f"weight_format={self.weight_format!r} names no format; leave it out or name one")

    @property
    def weight_formats(self) -> Mapping[str, str | None]:
        """The weight format of each pattern of parameter names; the first match counts."""
        chosen = self.weight_format
        return chosen if isinstance(chosen, Mapping) else {} if chosen is None else {"*": chosen}


def weight_formats_of(entries: Sequence[str]) -> dict[str, str | None] | None:
    """Parse `weight_format` from a flag's words: "FORMAT" or "PATTERN=FORMAT", with "none" for none.

    Raises:
        ConfigurationError: As `MixedPrecisionPolicy`, or a pattern is empty.
    """
    if empty := [entry for entry in entries if entry.startswith("=")]:
        raise ConfigurationError(
            f"the weight format {empty[0]!r} has no pattern before '='; give FORMAT or PATTERN=FORMAT"
        )
    pairs = [entry.rpartition("=") for entry in entries]
    formats = {pattern or "*": None if name == "none" else name for pattern, _, name in pairs}
    return dict(MixedPrecisionPolicy(weight_format=formats).weight_formats) if formats else None


def check_main_dtype(dtype: object, argument: str) -> None:
    """Raise if a dtype cannot hold main weights, main gradients or gradients in communication."""
    allowed = ", ".join(map(str, _ALLOWED))
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument}={dtype!r} is not a torch.dtype; give one of {allowed}, or None to follow.")
    if dtype is not None and dtype not in _ALLOWED:
        raise ConfigurationError(f"{argument}={dtype} cannot be used; give one of {allowed}, or None to follow.")


def check_policy(policy: object) -> None:
    """Raise unless the policy is this package's `MixedPrecisionPolicy`; torch has a class of that name."""
    if isinstance(policy, MixedPrecisionPolicy):
        return
    if type(policy).__name__ == MixedPrecisionPolicy.__name__:
        raise TypeError(
            f"mixed_precision_policy is the {type(policy).__name__} of {type(policy).__module__}; give that of "
            "megatron_fsdp, with grad_comm_dtype for its reduce_dtype, and build the model in its param_dtype"
        )
    raise TypeError(f"mixed_precision_policy={policy!r} is not a MixedPrecisionPolicy; give megatron_fsdp's")


def is_float8tensor(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is one of Transformer Engine's in float8 (with one scale, blocks of them, or MXFP8)."""
    return is_te_tensor(tensor, "Float8Tensor", "Float8BlockwiseQTensor", "MXFP8Tensor")


def is_te_tensor(tensor: torch.Tensor, *names: str) -> bool:
    """Return True if a tensor is of one of the classes of Transformer Engine that have these names."""
    kinds = type(tensor).__mro__
    return any(kind.__module__.partition(".")[0] == "transformer_engine" and kind.__name__ in names for kind in kinds)


@dataclass(frozen=True)
class ResolvedPrecision:
    """The dtypes of one parameter group, all resolved."""

    compute: torch.dtype  # of the weights that forward and backward use
    main_params: torch.dtype  # of the weights that the optimizer updates
    main_grads: torch.dtype  # in which gradients are accumulated
    grad_comm: torch.dtype  # in which gradients travel
    has_main_copy: bool  # main weights have memory of their own, since their dtype differs from `compute`

    @property
    def narrows(self) -> bool:
        """True if the optimizer works with fewer bits than the model computes with."""
        return self.main_params.itemsize < self.compute.itemsize

    @property
    def widens_sent(self) -> bool:
        """True if gradients travel in a dtype to which torch would promote their own."""
        return torch.promote_types(self.compute, self.grad_comm) != self.compute


def resolve_precision(
    policy: MixedPrecisionPolicy, param_dtype: torch.dtype, compute_dtype: torch.dtype | None = None
) -> ResolvedPrecision:
    """Resolve a policy for the parameters of one dtype; `compute_dtype`: to which they are cast for compute, if any.

    Parameters that are not real floating-point numbers (integers, booleans, complex numbers) cannot be cast to the
    policy's dtypes without loss, so everything about them keeps their own dtype. Gradients of float8 parameters that
    are told to follow take bfloat16, since sums in float8 would mean nothing.
    """
    if not param_dtype.is_floating_point:
        return ResolvedPrecision(param_dtype, param_dtype, param_dtype, param_dtype, has_main_copy=False)
    is_float8 = param_dtype.itemsize == 1
    if is_float8 and policy.main_params_dtype is None:
        raise ConfigurationError(
            f"main_params_dtype=None leaves {param_dtype} parameters without weights that an optimizer can update; "
            "set main_params_dtype=torch.float32."
        )
    main_params = policy.main_params_dtype or param_dtype
    main_grads = policy.main_grads_dtype or (torch.bfloat16 if is_float8 else param_dtype)
    compute = compute_dtype or param_dtype
    return ResolvedPrecision(
        compute=compute,
        main_params=main_params,
        main_grads=main_grads,
        grad_comm=policy.grad_comm_dtype or main_grads,
        has_main_copy=main_params != compute,
    )


DTYPE_NAMES = {
    "fp16": torch.float16,
    "half": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp32": torch.float32,
    "float": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "double": torch.float64,
    "float64": torch.float64,
}
"""Names of dtypes in configuration files and on command lines."""


def dtype_from_name(name: str, argument: str = "dtype") -> torch.dtype:
    """Translate a name from a configuration file or a command line."""
    dtype = DTYPE_NAMES.get(name.removeprefix("torch."))
    if dtype is None:
        known = ", ".join(DTYPE_NAMES)
        raise ConfigurationError(f"{argument}={name!r} is not a dtype name; give one of {known}.")
    return dtype
