"""Writes docs/licences.md: `.venv/bin/python -m docs.licences`, in the environment of `make test`.

What a package's own metadata say: its licence expression, else its classifiers, else the first line
of its licence.
"""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

HEAD = """# Licences of dependencies

What the packages of `make test` (`constraints.txt`) say of themselves. None is part of this
repository. Written by `python -m docs.licences`.

| package | version | licence |
|---|---|---|
"""


def licence(package: Distribution) -> str:
    said = package.metadata.json
    lines = [line for line in said.get("classifier", []) if line.startswith("License ::")]
    classified = [line.rpartition(" :: ")[2] for line in lines]
    text = str(said.get("license") or "not stated").strip().splitlines()[0]
    found = str(said.get("license_expression") or ", ".join(classified) or text)
    return re.sub(r"\s+", " ", found).replace("|", "/")


def main() -> None:
    rows = []
    for line in Path("constraints.txt").read_text(encoding="utf-8").splitlines():
        name, pinned, _ = line.partition("==")
        if not pinned or line.startswith("#"):
            continue
        try:
            package = distribution(name.strip())
        except PackageNotFoundError:  # of another platform
            continue
        rows.append(f"| {name.strip()} | {package.version} | {licence(package)} |\n")
    Path("docs/licences.md").write_text(HEAD + "".join(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
