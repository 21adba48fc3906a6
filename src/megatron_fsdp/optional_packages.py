"""Optional packages, and a warning of NVIDIA's distribution, which has the same import name.

Where a package is missing or too old, one sentence names the extra that brings it. The distribution, `mfsdp`, is not on
the package index: extras are installed from a checkout.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from types import ModuleType

from packaging.version import Version

from megatron_fsdp.errors import MissingPackageError, warn_caller

EXTRAS: Mapping[str, Mapping[str, str]] = {
    "hf": {"transformers": "5.23", "safetensors": "0.5"},
    "train": {"tokenizers": "0.20", "datasets": "3", "tensorboard": "2.17", "rich": "13"},
    "quantized": {"bitsandbytes": "0.50", "torchao": "0.18"},
}
"""Extra -> package -> oldest version that works; a test compares it with pyproject.toml."""


def require(package: str, for_what: str, instead: str = "") -> ModuleType:
    """Import an optional package.

    Args:
        package: Its name, and that of its module.
        for_what: What needs it, as the subject of a sentence: "--hf-model", "a picture".
        instead: What else the user may do: "leave the picture out".

    Raises:
        MissingPackageError: It is not installed, too old, or cannot be imported.
    """
    require_installed(package, for_what, instead)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackageError(
            f"{for_what} needs the package {package}, which cannot be imported ({error}); {_cure(package, instead)}"
        ) from error


def require_installed(package: str, for_what: str, instead: str = "") -> None:
    """Check an optional package without an import, for a process that does not use it itself.

    Raises:
        MissingPackageError: It is not installed, or too old.
    """
    needed = next((packages[package] for packages in EXTRAS.values() if package in packages), "0")
    if not _is_here(package):
        problem = f"needs the package {package}, which is not installed"
    elif (found := _version(package)) is not None and Version(found) < Version(needed):
        problem = f"needs {package} {needed} or later, and {found} is installed"
    else:
        return
    raise MissingPackageError(f"{for_what} {problem}; {_cure(package, instead)}")


def _cure(package: str, instead: str) -> str:
    extra = next((extra for extra, packages in EXTRAS.items() if package in packages), None)
    how = f"pip install {package}" if extra is None else f"pip install -e '.[{extra}]' in the checkout of mfsdp"
    return f"run {how}" + (f", or {instead}" if instead else "")


def _is_here(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ValueError:  # a module that was put into sys.modules by hand has no spec
        return True


@functools.cache
def _version(package: str) -> str | None:
    """Return the installed version by the package's metadata."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


_NAMESAKE = "megatron-fsdp"


@functools.cache
def warn_of_namesake() -> None:
    """Warn, once, if NVIDIA's distribution is installed, too: both have files of one package."""
    try:
        found = importlib.metadata.metadata(_NAMESAKE)
    except importlib.metadata.PackageNotFoundError:
        return
    if "independent implementation" not in (found["Summary"] or ""):  # as this one was called, too
        warn_caller(
            f"the distribution {_NAMESAKE} {found['Version']} is installed beside mfsdp, and both bring the package "
            "megatron_fsdp, so that files of one have replaced files of the other; uninstall both, and install one"
        )
