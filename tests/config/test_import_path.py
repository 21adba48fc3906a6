"""Import by dotted path: what only the errors of modules on the way can show (the rest: test_units.py)."""

from pathlib import Path

import pytest

from megatron_fsdp.config.import_path import import_by_path
from megatron_fsdp.errors import ConfigurationError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a sound module, one whose import needs something absent, and one that raises."""
    folder = tmp_path / "sample_for_import_path"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "sound.py").write_text("class Outer:\n    class Inner:\n        pass\n")
    (folder / "needy.py").write_text("import absent_dependency\n")
    (folder / "broken.py").write_text("raise RuntimeError('broken on purpose')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


@pytest.mark.parametrize("path", ["sound.Outer.Inner", "sound:Outer.Inner"])
def test_modules_are_imported_on_the_way_and_names_may_be_nested(package: str, path: str) -> None:
    found = import_by_path(f"{package}.{path}", "argument")
    assert (found.__module__, getattr(found, "__qualname__", "")) == (f"{package}.sound", "Outer.Inner")


def test_a_misspelt_submodule_is_answered_with_the_nearest_without_importing_it(package: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        import_by_path(f"{package}.brokn.Class", "argument")
    assert str(caught.value) == (
        f"argument has '{package}.brokn.Class', but '{package}' has no 'brokn'; the nearest name is 'broken'."
    )


def test_what_a_module_raises_when_it_is_imported_is_not_hidden(package: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'absent_dependency'"):
        import_by_path(f"{package}.needy.Class", "argument")
    with pytest.raises(RuntimeError, match="broken on purpose"):
        import_by_path(f"{package}.broken.Class", "argument")
