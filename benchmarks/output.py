"""What the programs of this folder print and write."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def show(found: Mapping[str, Any], file: Path | None) -> None:
    """Print a document as JSON, and write it to a file where one is asked for."""
    text = json.dumps(found, indent=1) + "\n"
    print(text, end="")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
