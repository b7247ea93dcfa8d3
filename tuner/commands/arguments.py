"""What several commands are given."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file in Trinity-RFT's form.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings that win over the file's."),
]
RunDirectoryPath = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run directory: <checkpoint_root_dir>/<project>/<name>."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
