"""The text that runs train on."""

from pathlib import Path

import pytest

from tests.support.train_program import write_text


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def data(text_file: Path) -> tuple[str, str]:
    return "--data-path", str(text_file)
