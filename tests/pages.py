"""Code blocks of the documentation, and the comment above each that says how it runs.

    <!-- run: script -->                     a program by itself, run beside `my_dataset` and
                                             `config.yaml`, the tutorial's in small
    <!-- run: script NAME -->                the blocks of this name are joined, top to bottom
    <!-- run: functions [NAME] [judge=F] --> workflow and judge of a small run; the blocks of one
                                             name, or without a name, are joined
    <!-- run: beside a run -->               reads a finished run; the page's blocks are joined
    <!-- run: tests/path/to/test.py [NAME] -->  that file reads and runs it
    <!-- run: no, REASON -->                 not run

Every Python block has such a line directly above its fence. A YAML block without one is a complete
configuration for the local backend; blocks in other languages have one where a test reads them.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for place in ("*.md", "docs/**/*.md", "benchmarks/*.md", "examples/*/*.md")
    for page in sorted(ROOT.glob(place))
]
MOST_WORDS = 3000
LOGS = ("CHANGELOG.md",)
"""Pages that grow with each change and that nobody reads from top to bottom."""
MARKDOWN = MarkdownIt("commonmark").enable("table")
MARK = re.compile(r"\s*<!-- run: (.+?) -->\s*")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    mark: str  # empty without a comment

    @property
    def kind(self) -> str:
        """The mark without names and reasons: `script`, `functions`, `no`, a path, ..."""
        first = self.mark.partition(" ")[0].rstrip(",")
        return self.mark if first == "beside" else first

    @property
    def words(self) -> list[str]:
        """The names that follow the kind."""
        return self.mark[len(self.kind) :].split()


@cache
def parsed(page: Path) -> list[Token]:
    """The tokens of a page in order, each inline token followed by its children."""
    tokens = MARKDOWN.parse(page.read_text(encoding="utf-8"))
    return [one for token in tokens for one in (token, *(token.children or ()))]


def marked_blocks(page: Path) -> list[Block]:
    """All code blocks of a page."""
    found, mark = [], ""
    for token in parsed(page):
        if token.type == "fence":
            found.append(Block(token.info, token.content, mark))
        comment = MARK.fullmatch(token.content) if token.type == "html_block" else None
        mark = comment[1] if comment else ""
    return found


def blocks(page: str | Path, language: str, mark: str | None = None) -> list[str]:
    """The code of a page's blocks in one language, top to bottom.

    Args:
        page: a path, or the path below `docs` as text ("agents.md", "../README.md").
        language: what the fence says ("python", "yaml", "bash").
        mark: take only blocks whose mark begins with these words.
    """
    wanted = (mark or "").split()
    return [
        block.code
        for block in marked_blocks(ROOT / "docs" / page)
        if block.language == language and block.mark.split()[: len(wanted)] == wanted
    ]
