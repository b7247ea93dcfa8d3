"""The page: one HTML file without requests to anywhere else."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from tuner.viewer.reader import to_json

TEMPLATE = Path(__file__).with_name("page.html")
# Inside a script element these could end it or begin a comment; in JSON they may all be escaped.
_ESCAPES = {ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}


def page(data: dict[str, Any]) -> str:
    """The page with `data` in it.

    Args:
        data: `{"mode": "live"}` to fetch everything from the server that served the page, or
            what `tuner.viewer.report.report_data` gives.
    """
    template = TEMPLATE.read_text(encoding="utf-8")
    # The nonce comes first: data might hold the text of the placeholder.
    template = template.replace("%NONCE%", secrets.token_urlsafe(16))
    return template.replace("%DATA%", to_json(data).translate(_ESCAPES))
