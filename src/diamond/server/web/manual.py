"""The documentation, as the application serves it: read from its Markdown files, found by words.

Nothing of a file becomes HTML by itself: a parser that knows no raw HTML makes a tree, of which only what is named here
is kept, and the template escapes all text. Links lead to other pages of it, or out over https.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

import diamond

# In the order in which people read them; what is not named comes behind, by name.
_ORDER = (
    "user-guide", "web", "projects", "secrets", "notifications", "quotas", "sites", "operator-guide", "identity",
    "settings", "audit", "threat-model", "rest",
)  # fmt: skip
_TAGS = {
    "paragraph": "p", "bullet_list": "ul", "ordered_list": "ol", "list_item": "li", "blockquote": "blockquote",
    "strong": "strong", "em": "em", "code_inline": "code", "table": "table", "thead": "thead", "tbody": "tbody",
    "tr": "tr", "th": "th", "td": "td", "hr": "hr", "hardbreak": "br",
}  # fmt: skip
_NOT_SLUG = re.compile(r"[^\w\- ]")
_PAGE_NAME = re.compile(r"[a-z0-9-]{1,80}")
_EXCERPT = 160
_MAX_WORDS = 8


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a page: an element with children, or (tag "") text."""

    tag: str = ""
    text: str = ""
    href: str = ""
    id: str = ""
    children: tuple[Piece, ...] = ()

    def words(self) -> str:
        return self.text + "".join(child.words() for child in self.children)


@dataclass(frozen=True, kw_only=True)
class Section:
    """What stands below one heading, for the contents of a page and for finding it."""

    title: str
    id: str
    level: int
    text: str


@dataclass(frozen=True, kw_only=True)
class Page:
    name: str
    title: str
    pieces: tuple[Piece, ...]
    sections: tuple[Section, ...] = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Hit:
    """A section that holds all the words, with a piece of it."""

    page: str
    page_title: str
    title: str
    id: str
    excerpt: str


def folder() -> Path:
    """Beside the source in a checkout, inside the package where it was installed."""
    package = Path(diamond.__file__).parent
    checkout = package.parents[1] / "docs"
    return checkout if (checkout / "user-guide.md").is_file() else package / "docs"


@functools.cache
def names() -> tuple[str, ...]:
    """Of all pages: those for people first, then decisions (adr/…)."""
    found = {path.stem for path in folder().glob("*.md") if _PAGE_NAME.fullmatch(path.stem)}
    first = [name for name in _ORDER if name in found]
    decisions = sorted(f"adr/{path.stem}" for path in folder().glob("adr/*.md") if _PAGE_NAME.fullmatch(path.stem))
    return (*first, *sorted(found - set(first)), *decisions)


@functools.cache
def titles() -> dict[str, str]:
    return {name: _title_of((folder() / f"{name}.md").read_text("utf-8"), name) for name in names()}


@functools.cache
def pictures() -> dict[str, Path]:
    """The plots and pictures that pages show, by their path below docs/."""
    found = [path for kind in ("*.svg", "*.png") for path in folder().glob(f"*/{kind}")]
    return {path.relative_to(folder()).as_posix(): path for path in sorted(found)}


def _title_of(text: str, name: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    return re.sub(r"[`*]", "", found[1]).strip() if found else name


@functools.lru_cache(maxsize=64)
def page(name: str) -> Page | None:
    """None: there is no such page."""
    if name not in names():
        return None
    text = (folder() / f"{name}.md").read_text("utf-8")
    tree = SyntaxTreeNode(MarkdownIt("commonmark", {"html": False}).enable("table").parse(text))
    pieces = tuple(_Reader(name).read(tree))
    return Page(name=name, title=titles()[name], pieces=pieces, sections=tuple(_sections(pieces)))


class _Reader:
    """Turns the parser's tree into ours; gives headings ids as GitHub does, so that links into pages work alike."""

    def __init__(self, name: str) -> None:
        self._folder = PurePosixPath(name).parent
        self._ids: dict[str, int] = {}

    def read(self, node: SyntaxTreeNode) -> Iterator[Piece]:
        for child in node.children:
            yield from self._one(child)

    def _one(self, node: SyntaxTreeNode) -> Iterator[Piece]:
        kind = node.type
        if kind in ("text", "softbreak"):
            yield Piece(text=node.content or "\n")
        elif kind == "inline" or (kind == "paragraph" and node.hidden):
            yield from self.read(node)
        elif kind == "code_inline":
            yield Piece(tag="code", children=(Piece(text=node.content),))
        elif kind in ("fence", "code_block"):
            yield Piece(tag="pre", children=(Piece(text=node.content),))
        elif kind == "heading":
            children = tuple(self.read(node))
            yield Piece(tag=node.tag, id=self._id("".join(child.words() for child in children)), children=children)
        elif kind == "link":
            children, href = tuple(self.read(node)), self._href(str(node.attrs.get("href", "")))
            yield from (Piece(tag="a", href=href, children=children),) if href else children
        elif kind == "image":
            place = _within(self._folder / str(node.attrs.get("src", "")))
            words = node.content or "".join(child.content for child in node.children)
            yield Piece(tag="img", href=f"/help/{place}", text=words) if place in pictures() else Piece(text=words)
        elif kind in _TAGS:
            yield Piece(tag=_TAGS[kind], children=tuple(self.read(node)))
        else:  # nothing of the file is lost, and nothing of it is HTML
            yield Piece(text=node.content if not node.children else "".join(c.words() for c in self.read(node)))

    def _id(self, words: str) -> str:
        slug = _NOT_SLUG.sub("", words.strip().lower()).replace(" ", "-") or "section"
        number = self._ids.get(slug, 0)
        self._ids[slug] = number + 1
        return f"{slug}-{number}" if number else slug

    def _href(self, href: str) -> str:
        """Where a link of a file leads on our pages; empty: nowhere that people here can go."""
        if href.startswith("https://"):
            return href
        path, _, fragment = href.partition("#")
        anchor = f"#{fragment}" if fragment else ""
        if not path:
            return anchor
        target = _within(self._folder / path)
        if target.endswith(".md") and target.removesuffix(".md") in names():
            return f"/help/{target.removesuffix('.md')}{anchor}"
        return ""


def _within(path: PurePosixPath) -> str:
    """The path below docs/ that is meant, or "" for one that leads out of it."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            if not parts:
                return ""
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts)


def _sections(pieces: tuple[Piece, ...]) -> Iterator[Section]:
    title, anchor, level, text = "", "", 1, ""
    for piece in (*pieces, Piece(tag="h1")):
        if piece.tag in ("h1", "h2", "h3", "h4", "h5", "h6"):
            if title or text.strip():
                yield Section(title=title, id=anchor, level=level, text=" ".join(text.split()))
            title, anchor, level, text = piece.words().strip(), piece.id, int(piece.tag[1]), ""
        else:
            text += _spaced(piece) + " "


def _spaced(piece: Piece) -> str:
    """Its words, with blanks between cells and items, which HTML keeps apart by itself."""
    inner = piece.text + "".join(_spaced(child) for child in piece.children)
    return f" {inner} " if piece.tag in ("td", "th", "li", "p", "pre") else inner


def search(words: str, limit: int = 40) -> list[Hit]:
    """Sections that hold every one of the words, those with them in their title first."""
    wanted = [word for word in words.lower().split() if word][:_MAX_WORDS]
    if not wanted:
        return []
    found: list[tuple[int, int, Hit]] = []
    for place, name in enumerate(names()):
        read = page(name)
        assert read is not None
        for section in read.sections:
            title, text = f"{read.title} {section.title}".lower(), section.text.lower()
            if all(word in title or word in text for word in wanted):
                missing = sum(word not in section.title.lower() for word in wanted)
                hit = Hit(
                    page=name, page_title=read.title, title=section.title, id=section.id,
                    excerpt=_excerpt(section.text, wanted),
                )  # fmt: skip
                found.append((missing, place, hit))
    found.sort(key=lambda one: one[:2])
    return [hit for _, _, hit in found[:limit]]


def _excerpt(text: str, wanted: list[str]) -> str:
    places = [at for word in wanted if (at := text.lower().find(word)) >= 0]
    start = max(0, min(places, default=0) - _EXCERPT // 3)
    start = text.rfind(" ", 0, start) + 1 if start else 0
    end = start + _EXCERPT
    return ("… " if start else "") + text[start:end].strip() + (" …" if end < len(text) else "")
