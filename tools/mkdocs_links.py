"""A hook of mkdocs: name files of the repository that are no pages, where the pages on a forge link to them."""

import re
from typing import Any

_OUTSIDE = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?:\.\./)+(?P<target>[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, **_context: Any) -> str:
    """Replace links that leave the folder of the pages by their text, and the path where the text is another."""
    return _OUTSIDE.sub(_named, markdown)


def _named(link: re.Match[str]) -> str:
    text, target = link["text"], link["target"] or "the repository"
    return text if text.strip("`") == target else f"{text} (`{target}`)"
