"""Puts the diff of the scripts in examples/coming_from into the pages docs/coming_from_*.md.

Usage: python tools/coming_from_diffs.py
"""

import difflib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ORIGINS = ("ddp", "fsdp2", "deepspeed", "megatron_fsdp")
_BEGIN, _END = "```diff\n", "```\n"


def page_of(origin: str) -> Path:
    """The page of an origin."""
    return ROOT / "docs" / f"coming_from_{origin}.md"


def diff_of(origin: str) -> str:
    """What `diff -u` says of the script before and the script after, without times."""
    names = [f"examples/coming_from/{origin}_{moment}.py" for moment in ("before", "after")]
    texts = [(ROOT / name).read_text(encoding="utf-8").splitlines(keepends=True) for name in names]
    return "".join(difflib.unified_diff(*texts, *names))


def printed_diff(page: str) -> str:
    """The diff that a page shows.

    Raises:
        ValueError: It has none, or several.
    """
    return _around_diff(page)[1]


def with_diff(page: str, diff: str) -> str:
    """The page with another diff."""
    head, _, tail = _around_diff(page)
    return head + _BEGIN + diff + _END + tail


def _around_diff(page: str) -> tuple[str, str, str]:
    if page.count(_BEGIN) != 1:
        raise ValueError(f"a page shows one diff, in lines from {_BEGIN.strip()} to {_END.strip()}; this one does not")
    head, rest = page.split(_BEGIN)
    text, tail = rest.split(_END, maxsplit=1)
    return head, text, tail


def main() -> None:
    """Bring every page up to date."""
    for origin in ORIGINS:
        page = page_of(origin)
        page.write_text(with_diff(page.read_text(encoding="utf-8"), diff_of(origin)), encoding="utf-8")


if __name__ == "__main__":
    main()
