"""What MkDocs is told of the repository, so that its pages need not be written for a site.

A page keeps its path below the root, and what it links to beside the pages comes along: a file as
it is, a folder as a page that lists its files. So a link means the same here and in a checkout.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs/*.md", "docs/*.png")
LINK = re.compile(r"(?<=\]\()[^)#\s:]+")
LIST = "index.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The pages under the paths that they have in the repository, and what they link to."""
    for file in files.documentation_pages() + files.media_files():
        if file.src_dir == config.docs_dir:
            files.remove(file)
    wanted = {path for pattern in PAGES for path in ROOT.glob(pattern)}
    folders = set()
    for page in [path for path in wanted if path.suffix == ".md"]:
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            linked = (page.parent / target).resolve()
            if linked.is_dir():
                folders.add(linked)
            elif linked.is_file():
                wanted.add(linked)
    for folder in folders:
        listed = [path for path in sorted(folder.iterdir()) if path.is_file()]
        wanted.update(listed)
        lines = [f"# {_name(folder)}", "", *(f"- [{path.name}]({path.name})" for path in listed)]
        name = f"{_name(folder)}/{LIST}"
        text = "\n".join(["---", "search: {exclude: true}", "---", *lines])
        files.append(File.generated(config, name, content=text))
    for path in sorted(wanted):
        files.append(File.generated(config, _name(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A link to a folder is one to its list."""
    here = (ROOT / page.file.src_uri).parent

    def to_list(found: re.Match[str]) -> str:
        return f"{found[0]}/{LIST}" if (here / found[0]).is_dir() else found[0]

    return LINK.sub(to_list, markdown)


def _name(path: Path) -> str:
    return os.path.relpath(path, ROOT).replace(os.sep, "/")
