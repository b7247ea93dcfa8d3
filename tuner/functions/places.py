"""Where in the user's own code something happens, for messages."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).resolve().parents[1])
LIBRARIES = (
    OURS,
    "<frozen",
    *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")),
)
"""How the paths begin of code that is not the user's."""


def place_of(frame: FrameType, line: int | None = None) -> str:
    """`name (file:line)` of a frame."""
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{line or frame.f_lineno})"


def raised_in(error: BaseException) -> str | None:
    """Where in the user's own code an error came up; None where it did not."""
    frames = reversed(list(traceback.walk_tb(error.__traceback__)))
    own = ((f, line) for f, line in frames if not f.f_code.co_filename.startswith(LIBRARIES))
    found = next(own, None)
    return None if found is None else place_of(*found)
