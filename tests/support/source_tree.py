"""The project's own files, parsed: what the house rules look at."""

import ast
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
_FOLDERS = ("src", "tests", "docs", "examples", "benchmarks", "tools", ".ci")


class Import(NamedTuple):
    """One imported module of this package, in full, and the line that names it."""

    module: str
    line: int


@cache
def own_files() -> list[Path]:
    """Every file of the project, without caches and build products."""
    nested = (path for folder in _FOLDERS for path in (ROOT / folder).rglob("*"))
    files = [path for path in (*ROOT.glob("*"), *nested) if path.is_file() and path.name != ".git"]  # of a worktree
    return sorted(path for path in files if not {"__pycache__"} & set(path.parts) and ".egg-info" not in str(path))


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the given top-level folders."""
    return [path for path in own_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in folders]


def short_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def module_name(path: Path) -> str:
    """The dotted name of a file below src, `__init__` included: `megatron_fsdp.buffer.__init__`."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@cache
def own_imports(path: Path) -> list[Import]:
    """What a file below src imports from this package, for type checkers too."""
    found: list[Import] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), module_name(path).rpartition(".")[0])
            found += [Import(_module_or_member(base, alias.name), node.lineno) for alias in node.names]
    return [item for item in found if item.module.split(".")[0] == "megatron_fsdp"]


def _module_or_member(base: str, name: str) -> str:
    """`from base import name` imports module base.name where there is one, else something out of base."""
    as_path = SOURCE.joinpath(*base.split("."), name)
    return f"{base}.{name}" if as_path.with_suffix(".py").exists() or as_path.is_dir() else base
