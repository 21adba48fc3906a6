"""NumPy's arrays and numbers in pickles, such as the random states of `numpy.random`; numbers and text only.

NumPy trusts the states of its pickled dtypes and arrays: wrong ones end the process. So each is checked against what
NumPy itself would have written.
"""

from __future__ import annotations

import importlib.util
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

_SPEC = re.compile(r"[<>=|]?(?:[biuf][1248]|f16|c(?:8|16|32)|[SU]\d{0,9})")

_ARRAY = object()
"""Stands for the class of arrays, which pickles name; called, it would reserve memory and show what was in it."""


def numpy_names() -> dict[tuple[str, str], Any]:
    """Table of names; empty where NumPy is not installed."""
    if importlib.util.find_spec("numpy") is None:
        return {}
    names: dict[tuple[str, str], Any] = {("numpy", "ndarray"): _ARRAY, ("numpy", "dtype"): _dtype}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        names[module, "_reconstruct"] = _empty_array
        names[module, "scalar"] = _scalar
    return names


def numpy_builders() -> dict[type, Callable[[Any, Any], None]]:
    """How arrays and dtypes take their state."""
    try:
        import numpy as np
    except ImportError:
        return {}
    kinds = {type(np.dtype(code)) for code in "?bBhHiIlLqQefdgFDGSU"}
    return {np.ndarray: _fill_array, **dict.fromkeys(kinds, _fill_dtype)}


def _dtype(spec: Any, *_align_and_copy: Any) -> Any:
    import numpy as np

    _require(type(spec) is str and _SPEC.fullmatch(spec) is not None, f"dtype {spec!a:.50}")
    return np.dtype(spec, copy=True)  # a copy, since its state is to be set


def _fill_dtype(dtype: Any, state: Any) -> None:
    fixed = dtype.kind in "SU"
    sizes = (dtype.itemsize, dtype.alignment) if fixed else (-1, -1)
    expected = (None, None, None, *sizes, 8 if dtype.kind == "U" else 0)
    holds = type(state) is tuple and len(state) == 8 and state[0] == 3 and state[1] in ("<", ">", "=", "|")
    _require(holds and state[2:7] == expected[:5] and state[7] in (0, expected[5]), "a dtype with fields")
    dtype.__setstate__(state)


def _empty_array(kind: Any, shape: Any, code: Any) -> Any:
    import numpy as np

    _require(kind is _ARRAY and shape == (0,) and code in (b"b", "b"), "an array of another class")
    return np.ndarray((0,), "b")


def _fill_array(array: Any, state: Any) -> None:
    import numpy as np

    _require(type(state) is tuple and len(state) == 5, "an array without contents")
    _, shape, dtype, by_columns, raw = state
    shaped = type(shape) is tuple and all(type(n) is int and 0 <= n < 1 << 62 for n in shape) and len(shape) <= 32
    _require(shaped and isinstance(dtype, np.dtype) and type(raw) is bytes, "an array of objects")
    _require(math.prod(shape) * dtype.itemsize == len(raw), "an array of another length than its contents")
    array.__setstate__((1, shape, dtype, bool(by_columns), raw))


def _scalar(dtype: Any, raw: Any) -> Any:
    import numpy as np

    whole = isinstance(dtype, np.dtype) and type(raw) is bytes and len(raw) == dtype.itemsize
    _require(whole, "a number of another length than its contents")
    return np.frombuffer(raw, dtype)[0]


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise pickle.UnpicklingError(f"{what} in NumPy's data")
