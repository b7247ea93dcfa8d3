"""Folders that programs work in: each rollout's is made from a template, and removed after it."""

from __future__ import annotations

import difflib
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

from tuner.errors import ConfigError
from tuner.rewards.sandbox import remove

_SHOWN_BYTES = 1_000_000
"""A larger file is not compared line by line."""


class Workspaces:
    """Makes folders out of templates, and removes them.

    A template is read once: what becomes of it while the run goes on changes nothing.

    Args:
        within: Where they are, if that is a folder of this machine. None: in a temporary one.
    """

    def __init__(self, within: Path | None = None) -> None:
        self._within = within
        self._lock = threading.Lock()
        self._root: Path | None = None
        self._templates: dict[tuple[str, str | None], Path] = {}
        self._numbers = count(1)
        self._remover = ThreadPoolExecutor(1, thread_name_prefix="tuner-folders")

    def __reduce__(self) -> tuple[type[Workspaces], tuple[Path]]:
        """In another process it has folders of its own, within ours: it may be killed."""
        with self._lock:
            return Workspaces, (self._made(),)

    def _made(self) -> Path:
        if self._root is None:
            within = self._within if self._within is not None and self._within.is_dir() else None
            self._root = Path(tempfile.mkdtemp(prefix="tuner-program-", dir=within))
            weakref.finalize(self, remove, self._root)
        return self._root

    def new(self, template: str | None, commit: str | None) -> tuple[Path, Path | None]:
        """A folder of its own for one rollout, and what it was made from.

        Args:
            template: A folder, or a git repository where `commit` is given; None: it is empty.
            commit: Whatever git can check out.

        Raises:
            ConfigError: There is no such template.
        """
        with self._lock:
            folder = self._made() / f"{next(self._numbers):06d}"
            before = None if template is None else self._read(template, commit)
        if before is None:
            folder.mkdir()
        else:
            shutil.copytree(before, folder, symlinks=True)
        return folder, before

    def _read(self, template: str, commit: str | None) -> Path:
        assert self._root is not None
        read = self._templates.get((template, commit))
        if read is None:
            read = self._root / f"template-{len(self._templates)}"
            if commit is None:
                check_template(template, None)
                shutil.copytree(template, read, symlinks=True)
            else:
                _check_out(template, commit, read)
            self._templates[template, commit] = read
        return read

    def remove(self, folder: Path) -> None:
        """Remove one, in a thread: it may hold many files."""
        with suppress(RuntimeError):  # all are being removed
            self._remover.submit(remove, folder)

    def close(self) -> None:
        """Remove all of them."""
        self._remover.shutdown()
        with self._lock:
            if self._root is not None:
                remove(self._root)
            self._root, self._templates = None, {}
            self._remover = ThreadPoolExecutor(1, thread_name_prefix="tuner-folders")


def check_template(template: str, commit: str | None) -> None:
    """Whether a template is there.

    Raises:
        ConfigError: It is not; a repository that is not on this machine is not asked.
    """
    if commit is not None and ("://" in template or "@" in template):
        return
    if not os.path.isdir(template):
        raise ConfigError(f"template is {template!r}: there is no such folder")
    if commit is not None:
        _git("-C", template, "rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")


def _check_out(repository: str, commit: str, folder: Path) -> None:
    """A repository with one commit, which shares nothing with the one that it is from."""
    check_template(repository, commit)
    asked, found = commit, repository
    if os.path.isdir(repository):
        asked = _git("-C", repository, "rev-parse", f"{commit}^{{commit}}").strip()
        found = Path(repository).resolve().as_uri()
    try:
        _git("init", "--quiet", str(folder))
        _git("-C", str(folder), "fetch", "--quiet", "--depth=1", found, asked)
        _git("-C", str(folder), "checkout", "--quiet", "--detach", "FETCH_HEAD")
    except ConfigError:
        remove(folder)
        raise


def _git(*arguments: str) -> str:
    """What git says.

    Raises:
        ConfigError: It failed, or is not installed.
    """
    asked = " ".join(("git", *arguments))
    try:
        done = subprocess.run(
            ["git", "-c", "safe.directory=*", *arguments],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except FileNotFoundError:
        raise ConfigError("commit is set, and git is not installed") from None
    if done.returncode:
        raise ConfigError(f"{asked} failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def files_in(folder: Path) -> Iterator[str]:
    """Names of the regular files below a folder, sorted, without those of git and links."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            found = Path(path, name)
            if found.is_file() and not found.is_symlink():
                yield found.relative_to(folder).as_posix()


def difference(before: Path | None, given: Mapping[str, str], after: Path) -> str:
    """What has changed in a folder, as a unified diff.

    Args:
        before: What it was made from; None: it was empty.
        given: Texts of the files that were added, by name.
        after: The folder.
    """
    old = {name: before / name for name in files_in(before)} if before else {}
    new = {name: after / name for name in files_in(after)}
    compared = []
    for name in sorted({*old, *new, *given}):
        was = _short(given[name].encode()) if name in given else _bytes_of(old.get(name))
        compared.append(_compared(name, was, _bytes_of(new.get(name))))
    return "".join(compared)


def _short(text: bytes) -> bytes:
    return text if len(text) <= _SHOWN_BYTES else b"\0" + hashlib.sha256(text).digest()


def _bytes_of(path: Path | None) -> bytes | None:
    """What is in a file; of a large one something binary that is another's only if that is alike:
    it may have all that a program may put on the disk."""
    if path is None:
        return None
    if path.stat().st_size <= _SHOWN_BYTES:
        return path.read_bytes()
    with path.open("rb") as file:
        return b"\0" + hashlib.file_digest(file, "sha256").digest()


def _compared(name: str, old: bytes | None, new: bytes | None) -> str:
    if old == new:
        return ""
    titles = (
        ("/dev/null" if old is None else f"a/{name}"),
        ("/dev/null" if new is None else f"b/{name}"),
    )
    both = [old or b"", new or b""]
    try:
        if any(b"\0" in text for text in both):
            raise ValueError("it is no text")
        was, now = (text.decode().splitlines(keepends=True) for text in both)
    except ValueError:
        return f"Binary files {titles[0]} and {titles[1]} differ\n"
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        for line in difflib.unified_diff(was, now, *titles)
    )
