"""The rules of the house that a machine can check. Each failure lists the places."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.support.source_tree import SOURCE, module_name, own_files, own_imports, parse, python_files, short_name

DEVICE_FILES = {"src/megatron_fsdp/comm/collectives.py", "src/megatron_fsdp/comm/registration.py"}
"""The only files that may name `torch.cuda`."""

_LAYERS = (
    "base comm config sharding dtensor engine formats state optim debug describe hang wrap checkpoint published "
    "experimental fsdp2 weights ddp front contrib doctor trace plan automodel train cli"
)
LAYERS = _LAYERS.split()
"""From the bottom to the top: each imports itself and what is below it (the picture is section 3 of docs/design.md).

A layer is a folder. Of the modules beside them, those that import nothing but each other are "base", the others
"published"; "front" is the package itself.
"""

STRANGERS = {
    *(("checkpoint", lower) for lower in ("engine", "formats", "state", "wrap", "optim", "hang")),
    *(("plan", lower) for lower in ("trace", "doctor", "checkpoint")),
    ("trace", "doctor"),
    ("automodel", "trace"),
    ("automodel", "doctor"),
}
"""(upper, lower) that know nothing of each other, although the order would allow it."""

PURE = {"sharding", "config"}
PURE_BUT_THIN = {"megatron_fsdp.sharding.mesh"}
"""Modules of the pure layers that may know process groups, because holding them is all they do."""


@cache
def layer_of(module: str) -> str:
    """The layer of a dotted module name: its folder, or "front", "base" or "published"."""
    parts = module.split(".")[1:] or ["__init__"]
    if len(parts) > 1 or (SOURCE / "megatron_fsdp" / parts[0]).is_dir():
        return parts[0]
    if parts[0] == "__init__":
        return "front"
    path = (SOURCE / "megatron_fsdp" / parts[0]).with_suffix(".py")
    imported = {item.module for item in own_imports(path)} if path.exists() else set()
    return "base" if all(name.count(".") == 1 and layer_of(name) == "base" for name in imported) else "published"


def forbidden_imports(path: Path) -> list[str]:
    """The imports of a file below src that point up, one line of text each."""
    layer = layer_of(module_name(path))
    below = LAYERS[: LAYERS.index(layer) + 1]
    allowed = {other for other in below if (layer, other) not in STRANGERS}
    return [
        f"{short_name(path)}:{item.line} ({layer}) imports {item.module} ({layer_of(item.module)})"
        for item in own_imports(path)
        if layer_of(item.module) not in allowed
    ]


def test_only_the_device_files_name_cuda() -> None:
    naming = {short_name(path) for path in python_files("src") if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert naming - DEVICE_FILES == set()


def test_imports_point_down() -> None:
    assert [text for path in python_files("src") for text in forbidden_imports(path)] == []


def test_every_layer_stands_in_the_table() -> None:
    layers = {layer_of(module_name(path)) for path in python_files("src")}
    assert layers == set(LAYERS)


def test_pure_modules_know_no_process_groups() -> None:
    found = []
    for path in python_files("src"):
        if layer_of(module_name(path)) not in PURE or module_name(path) in PURE_BUT_THIN:
            continue
        for node in ast.walk(parse(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            source = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(f"{source}.{name}".lstrip(".").startswith("torch.distributed") for name in names):
                found.append(f"{short_name(path)}: {ast.unparse(node)}")
    assert found == []


def test_errors_of_other_code_are_shown_by_functions_that_cannot_fail() -> None:
    """`text_of`, `words_of` and `first_line`: the `__str__` of somebody's own class may raise."""
    found = []
    for path in python_files("src"):
        for handler in (node for node in ast.walk(parse(path)) if isinstance(node, ast.ExceptHandler)):
            if handler.type is None or ast.unparse(handler.type) not in ("Exception", "BaseException"):
                continue
            for node in ast.walk(handler):
                shown = [node.value] if isinstance(node, ast.FormattedValue) else []
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr"):
                    shown = node.args
                if any(isinstance(each, ast.Name) and each.id == handler.name for each in shown):
                    found.append(f"{short_name(path)}:{node.lineno}")
    assert found == []


INDIRECT = re.compile(r"\b(what|whether|how)\b|\bin place of\b|^(let|say|tell)\b", re.IGNORECASE)
"""Indirect questions and their like, which say less than a verb with a noun of the field."""


def summaries(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and first line of each docstring of a file, those of attributes included."""
    for node in ast.walk(parse(path)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        assigned = (after for before, after in pairwise(node.body) if isinstance(before, ast.Assign | ast.AnnAssign))
        for found in (*node.body[:1], *assigned):
            text = found.value.value if isinstance(found, ast.Expr) and isinstance(found.value, ast.Constant) else None
            if isinstance(text, str):
                yield found.lineno, text.strip().partition("\n")[0]


def test_summaries_are_no_indirect_questions() -> None:
    found = [
        f"{short_name(path)}:{line}: {text}"
        for path in python_files("src")
        for line, text in summaries(path)
        if INDIRECT.search(re.sub("`[^`]*`", "", text))
    ]
    assert found == []


def test_nothing_is_left_to_do() -> None:
    marker = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|HA" + r"CK|XX" + r"X)\b")
    found = [
        f"{short_name(path)}: {match.group()}"
        for path in python_files("src", "tests", "tools", "examples", "benchmarks")
        for match in marker.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_no_file_names_a_path_of_one_machine() -> None:
    machine_path = re.compile(r"(?<![\w.$)}/-])/(?:work|root|home|tmp|Users|mnt)/[\w.-]+")
    found = []
    for path in own_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # pictures and other binaries
        found += [f"{short_name(path)}: {match.group()}" for match in machine_path.finditer(text)]
    assert found == []
