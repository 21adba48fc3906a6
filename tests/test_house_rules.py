"""The rules of the house that a machine can check. Each failure lists the places."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.source_tree import (
    ROOT,
    SOURCE,
    functions,
    module_name,
    own_files,
    parse,
    python_files,
    runtime_imports,
    short_name,
)

DEVICE_FILES = {"src/megatron_fsdp/comm/lanes.py", "src/megatron_fsdp/engine/executor.py"}
"""The only files that may name `torch.cuda`."""

_API_MODULES = {
    "fully_shard",
    "megatron_fsdp",
    "hand_driven",
    "reports",
    "uneven_dtensor",
    "mesh_arguments",
    "parameters_access",
    "checkpoint_access",
    "ema",
    "param_and_grad_buffer",
    "utils",
}
"""Top-level modules that are the public face of the engine; every other top-level module is pure."""

_ENGINE = {"pure", "buffer", "dtensor", "unit", "runtime", "hang", "api"}

MAY_IMPORT: dict[str, set[str]] = {
    "pure": {"pure"},
    "buffer": {"pure", "buffer"},
    "dtensor": {"pure", "dtensor"},
    "unit": {"pure", "buffer", "dtensor", "unit"},
    "runtime": {"pure", "buffer", "dtensor", "unit", "runtime"},
    "hang": _ENGINE - {"api"},
    "api": _ENGINE,
    "ddp": _ENGINE | {"ddp"},
    "front": _ENGINE | {"ddp"},
    "checkpoint": {"pure", "buffer", "dtensor", "unit", "checkpoint"},
    "doctor": _ENGINE | {"front", "ddp", "checkpoint", "doctor"},
    "trace": _ENGINE | {"front", "ddp", "trace"},
    "plan": _ENGINE | {"front", "ddp", "plan"},
    "automodel": _ENGINE | {"front", "ddp", "checkpoint", "plan", "automodel"},
    "train": _ENGINE | {"front", "ddp", "checkpoint", "plan", "doctor", "trace", "automodel", "train"},
    "cli": _ENGINE | {"front", "ddp", "checkpoint", "plan", "doctor", "trace", "automodel", "train", "cli"},
}
"""Layer -> the layers it may import at run time; the picture is section 4 of docs/design.md."""

PURE_BUT_THIN = {"megatron_fsdp.sharding.mesh"}
"""Pure-layer modules that may know process groups, because holding them is all they do."""


def layer_of(module: str) -> str:
    """The layer of a dotted module name: its sub-package, "front" for the package itself, else "api" or "pure"."""
    parts = module.split(".")[1:] or ["__init__"]
    is_package = len(parts) > 1 or (SOURCE / "megatron_fsdp" / parts[0]).is_dir()
    if is_package:
        return parts[0]
    if parts[0] == "__init__":
        return "front"
    return "api" if parts[0] in _API_MODULES else "pure"


def forbidden_imports(path: Path) -> list[str]:
    """The imports of a file below src that point up, one line of text each."""
    layer = layer_of(module_name(path))
    allowed = MAY_IMPORT.get(layer, set())
    return [
        f"{short_name(path)}:{item.line} ({layer}) imports {item.module} ({layer_of(item.module)})"
        for item in runtime_imports(path)
        if layer_of(item.module) not in allowed
    ]


def unannotated(path: Path) -> list[str]:
    """The parameters and returns of a file that lack a type."""
    found = []
    for function in functions(path):
        spec = function.args
        named = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
        missing = [arg.arg for arg in named if arg.annotation is None and arg.arg not in ("self", "cls")]
        missing += ["return"] if function.returns is None else []
        found += [f"{short_name(path)}:{function.lineno} {function.name}: {name}" for name in missing]
    return found


def test_everything_in_src_is_annotated() -> None:
    assert [text for path in python_files("src") for text in unannotated(path)] == []


def test_only_the_device_files_name_cuda() -> None:
    naming = {short_name(path) for path in python_files("src") if "torch.cuda" in path.read_text(encoding="utf-8")}
    assert naming - DEVICE_FILES == set()


def test_imports_point_down() -> None:
    assert [text for path in python_files("src") for text in forbidden_imports(path)] == []


def test_every_layer_stands_in_the_table() -> None:
    layers = {layer_of(module_name(path)) for path in python_files("src")}
    assert layers - MAY_IMPORT.keys() == set()


def test_pure_modules_know_no_process_groups() -> None:
    found = []
    for path in python_files("src"):
        if layer_of(module_name(path)) != "pure" or module_name(path) in PURE_BUT_THIN:
            continue
        for node in ast.walk(parse(path)):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            source = (node.module or "") if isinstance(node, ast.ImportFrom) else ""
            if any(f"{source}.{name}".lstrip(".").startswith("torch.distributed") for name in names):
                found.append(f"{short_name(path)}: {ast.unparse(node)}")
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


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("megatron_fsdp", "front"),
        ("megatron_fsdp.__init__", "front"),
        ("megatron_fsdp.fully_shard", "api"),
        ("megatron_fsdp.errors", "pure"),
        ("megatron_fsdp.engine.executor", "runtime"),
    ],
)
def test_layers_are_read_from_module_names(module: str, layer: str) -> None:
    assert layer_of(module) == layer


def test_import_rule_sees_upward_imports_and_spares_type_checking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.support.source_tree.SOURCE", tmp_path)
    monkeypatch.setattr("tests.support.source_tree.ROOT", tmp_path)
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    package = tmp_path / "megatron_fsdp"
    for folder in ("buffer", "runtime"):
        (package / folder).mkdir(parents=True)
    (package / "runtime" / "executor.py").write_text("")
    low = package / "buffer" / "low.py"
    low.write_text(
        "from typing import TYPE_CHECKING\n"
        "from megatron_fsdp import errors\n"
        "from ..runtime import executor\n"
        "import megatron_fsdp.buffer.other\n"
        "if TYPE_CHECKING:\n    from megatron_fsdp.runtime import executor\n"
        "def late():\n    from megatron_fsdp.fully_shard import fully_shard\n"
    )
    (package / "errors.py").write_text("")
    assert forbidden_imports(low) == [
        "megatron_fsdp/buffer/low.py:3 (buffer) imports megatron_fsdp.engine.executor (runtime)",
        "megatron_fsdp/buffer/low.py:8 (buffer) imports megatron_fsdp.fully_shard (api)",
    ]
    assert unannotated(low) == ["megatron_fsdp/buffer/low.py:7 late: return"]


def test_root_is_this_project() -> None:
    assert (ROOT / "pyproject.toml").exists()
    assert len(own_files()) > 10
