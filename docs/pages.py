"""A hook of MkDocs that makes the site from the repository, so that links work in both.

A page keeps its path below the root. Files that pages link to are added as they are, folders as
their README or as a page that lists their files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "CHANGELOG.md",
    "docs/**/*.md",
    "docs/*.png",
    "docs/*.svg",
    "docs/*.css",
    "benchmarks/*.md",
)
INLINE_CODE = re.compile(r"(?<!<pre>)(?<!</span>)<code>[^<]+</code>")
KEY_END = re.compile(r"(?<=\w)([._/])(?=\w)")
LINK = re.compile(r"(?<=\]\()[^)#\s:]+")
README, LIST = "README.md", "index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages under the paths that they have in the repository, and what they link to."""
    for file in files.documentation_pages() + files.media_files():
        if file.src_dir == config.docs_dir:
            files.remove(file)
    wanted = dict.fromkeys(path for pattern in PAGES for path in sorted(ROOT.glob(pattern)))
    pages = [path for path in wanted if path.suffix == ".md"]
    for page in pages:  # it grows
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            found = [linked] if linked.is_file() else []
            if linked.is_dir():
                found = [path for path in sorted(linked.iterdir()) if path.is_file()]
                if not (linked / README).exists() and linked not in wanted:
                    lines = [f"# {_name(linked)}", "", *(f"- [{p.name}]({p.name})" for p in found)]
                    text = "\n".join(["---", "search: {exclude: true}", "---", *lines])
                    files.append(File.generated(config, f"{_name(linked)}/{LIST}", content=text))
                    wanted[linked] = None
            pages += [path for path in found if path.suffix == ".md" and path not in wanted]
            wanted |= dict.fromkeys(found)
    for path in wanted:
        if path.is_file():
            files.append(File.generated(config, _name(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a folder is one to its README or its list."""
    here = (ROOT / page.file.src_uri).parent

    def to_list(found: re.Match[str]) -> str:
        folder = here / found[0]
        if not folder.is_dir():
            return found[0]
        return f"{found[0].rstrip('/')}/{README if (folder / README).exists() else LIST}"

    return LINK.sub(to_list, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """In the table of contents a key is named without the section that it stands under."""
    for section in (section for title in page.toc for section in title.children):
        for key in section.children:
            key.title = key.title.removeprefix(f"{section.title}.")
        section.title = KEY_END.sub(r"\1<wbr>", section.title)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """A key breaks after a dot, an underscore or a slash; docs/site.css forbids it elsewhere."""
    return INLINE_CODE.sub(lambda found: KEY_END.sub(r"\1<wbr>", found[0]), output)


def _name(path: Path) -> str:
    return os.path.relpath(path, ROOT).replace(os.sep, "/")
