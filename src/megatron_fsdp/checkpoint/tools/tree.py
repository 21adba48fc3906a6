"""Keys as a tree along their dots, with what each branch weighs. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from megatron_fsdp.checkpoint.tools.inspect import ListedEntry


@dataclass
class Branch:
    """A part of a key and what lies below it.

    Attributes:
        name: The part; several joined by dots where there is no choice between them.
        entry: What has exactly this key; None if nothing.
        children: By name, in the order of keys.
        nbytes: Of all entries of the branch.
        count: Entries of the branch.
    """

    name: str
    entry: ListedEntry | None = None
    children: dict[str, Branch] = field(default_factory=dict)
    nbytes: int = 0
    count: int = 0


def key_tree(entries: Iterable[ListedEntry]) -> Branch:
    """The tree of keys; its root has no name."""
    root = Branch("")
    for entry in entries:
        node = root
        _count(node, entry)
        for part in entry.key.split("."):
            node = node.children.setdefault(part, Branch(part))
            _count(node, entry)
        node.entry = entry
    _join(root)
    return root


def _count(node: Branch, entry: ListedEntry) -> None:
    node.nbytes += entry.nbytes
    node.count += 1


def _join(node: Branch) -> None:
    """Let branches without a choice be one."""
    for name, child in list(node.children.items()):
        _join(child)
        if child.entry is None and len(child.children) == 1:
            (only,) = child.children.values()
            only.name = f"{child.name}.{only.name}"
            node.children[name] = only


def walk(node: Branch, indent: str = "") -> Iterator[tuple[str, Branch]]:
    """Every branch below the root, with the lines to draw before its name."""
    children = list(node.children.values())
    for place, child in enumerate(children):
        last = place == len(children) - 1
        yield f"{indent}{'`-- ' if last else '|-- '}", child
        yield from walk(child, f"{indent}{'    ' if last else '|   '}")
