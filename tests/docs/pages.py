"""The pages of the project as text: their code blocks, links and headings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GUIDE, GUIDE_ZH = ROOT / "docs", ROOT / "docs" / "zh"
_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=ticks)[ \t]*$", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Block:
    """One fenced code block."""

    language: str
    text: str
    where: str


@dataclass(frozen=True)
class Page:
    """One Markdown file."""

    path: Path

    def __str__(self) -> str:
        return str(self.path.relative_to(ROOT))

    @cached_property
    def text(self) -> str:
        """The whole file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def sentences(self) -> str:
        """The file without its code blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def prose(self) -> str:
        """The file without any code."""
        return re.sub(r"`[^`\n]*`", "", self.sentences)

    @cached_property
    def blocks(self) -> list[Block]:
        """The code blocks, in order."""
        return [
            Block(found["language"], found["text"], f"{self}:{self.text.count(chr(10), 0, found.start()) + 1}")
            for found in _FENCE.finditer(self.text)
        ]

    @cached_property
    def anchors(self) -> set[str]:
        """What links into the page can name, as GitHub makes it from headings."""
        headings = re.findall(r"^#+ (.+)$", self.sentences, re.M)
        return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}

    @cached_property
    def links(self) -> list[str]:
        """Targets of the links, as written."""
        return _LINK.findall(self.prose)


PAGES = [
    Page(path) for path in [*sorted(ROOT.glob("*.md")), *sorted(GUIDE.glob("*.md")), *sorted(GUIDE_ZH.glob("*.md"))]
]
BLOCKS = [block for page in PAGES for block in page.blocks]


def blocks_in(*languages: str) -> list[Block]:
    """Return the blocks in these languages."""
    return [block for block in BLOCKS if block.language in languages]
