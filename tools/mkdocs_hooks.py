"""Hooks of mkdocs: README as the start page, pages for linked files of the repository, the version at the foot."""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_IMAGE = re.compile(r"(?<=\]\()docs/(?=images/)")
_NAMED = re.compile(r"docs/(\w+)\.md(#[\w-]+)?")
_LANGUAGES = {".py": "python", ".md": "", ".yaml": "yaml", ".sbatch": "bash", "": ""}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Name version, licence and provenance at the foot of each page."""
    facts: dict[str, str] = {}
    exec((ROOT / "src/megatron_fsdp/package_info.py").read_text(encoding="utf-8"), facts)
    config.copyright = f"Megatron-FSDP {facts['__version__']} · {facts['__license__']} · not affiliated with NVIDIA"
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each file of the repository that README or a page links to."""
    sources = {"index.md": _readme()}
    sources |= {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked: set[str] = set()
    for text in (_readme(), *sources.values()):
        linked |= {name for link in _LINK.finditer(text) if (name := _repository_file(link["target"]))}
    for name in sorted(linked - {"README.md"}):
        content = f"---\nsearch: {{boost: 0.1}}\n---\n\n{_listing(name)}"  # a search finds pages before listings
        files.append(File.generated(config, _page_of(name), content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **_context: Any) -> str:
    """Put README in front of the start page, and point links to files of the repository at their pages."""
    if page.file.src_uri.startswith("files/"):
        return markdown
    if page.file.src_uri == "index.md":
        markdown = f"{_readme()}\n\n{markdown[markdown.index('## All pages') :]}"
    return _LINK.sub(lambda link: _relinked(link, posixpath.dirname(page.file.src_uri)), markdown)


def on_page_content(html: str, page: Page, **_context: Any) -> str:
    """Make links of the pages that docstrings name."""
    return _NAMED.sub(r'<a href="../\1/\2">\g<0></a>', html) if page.file.src_uri == "api.md" else html


def _readme() -> str:
    """Return README with links relative to `docs/`."""

    def from_docs(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if "://" not in target:
            target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        return f"[{link['text']}]({target}{anchor})"

    return _IMAGE.sub("", _LINK.sub(from_docs, (ROOT / "README.md").read_text(encoding="utf-8")))


def _repository_file(target: str) -> str | None:
    """Return the path in the repository of a link to a shown file outside of `docs/`."""
    if not target.startswith("../"):
        return None
    path = ROOT / target.removeprefix("../")
    return target.removeprefix("../") if path.is_file() and path.suffix in _LANGUAGES else None


def _page_of(name: str) -> str:
    return "index.md" if name == "README.md" else f"files/{name.removesuffix('.md')}.md"


def _listing(name: str) -> str:
    """Return the page of a file: Markdown as it is, code in a block."""
    path = ROOT / name
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _LINK.sub(lambda link: link["text"], text)  # its links lead from another folder
    return f"# {name}\n\n````{_LANGUAGES[path.suffix]}\n{text.rstrip()}\n````\n"


def _relinked(link: re.Match[str], folder: str) -> str:
    if not link["target"].startswith("../"):
        return link[0]
    name = _repository_file(link["target"])
    if name is None:
        text, target = link["text"], link["target"].removeprefix("../").rstrip("/") or "the repository"
        return text if text.strip("`").rstrip("/") == target else f"{text} (`{target}`)"
    return f"[{link['text']}]({posixpath.relpath(_page_of(name), folder or '.')}{link['anchor'] or ''})"
