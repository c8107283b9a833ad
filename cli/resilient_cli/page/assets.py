"""Style sheet, script and content security policy of the page.

The page is complete without the script. The script shows one part of the page at a time, and sorts,
searches and opens rows of tables. On a served page the script also requests slow parts, and updates
changed parts. The script receives HTML only from the code that makes the page. This code escapes
every name.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

from resilient.goodput.timeline import TimeClass


@cache
def _script() -> str:
    return f"\n{_read('page/static/page.js')}"


def _read(path: str) -> str:
    return (files("resilient_cli") / path).read_text(encoding="utf-8")


def _rules() -> str:
    """Return the policy of every page: only this script may run, and nothing else may load."""
    digest = base64.b64encode(hashlib.sha256(_script().encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


@cache
def served_policy() -> str:
    """Return the content security policy of a served page, which may load only from its server."""
    return f"{_rules()}; connect-src 'self'; frame-ancestors 'none'"


def head_of(version: str) -> str:
    """Return the elements for the head of a page.

    Args:
        version: Version of a served page, which checks for a newer version. Empty for a page
            in a file, which must not make requests.
    """
    if version:
        return f'<meta name="version" content="{escape(version)}">'
    return f'<meta http-equiv="Content-Security-Policy" content="{_rules()}">'


def foot_of(version: str) -> str:
    """Return the end of the body: the live mark of a served page, and the script."""
    live_html = '<p id="live" role="status">live</p>' if version else ""
    return f"{live_html}<script>{_script()}</script>"


COLOURS = {
    TimeClass.TRAINING: "#2e9e5b",
    TimeClass.LOST: "#d64545",
    TimeClass.EVALUATION: "#3f7fd0",
    TimeClass.SAVE_STALL: "#d99a1c",
    TimeClass.RESTORE: "#8f62c9",
    TimeClass.START: "#5aa9b8",
    TimeClass.RENDEZVOUS: "#b06c3b",
    TimeClass.DETECT: "#e0679e",
    TimeClass.TEARDOWN: "#7a4a4a",
    TimeClass.WAIT: "#a8a04a",
    TimeClass.FINISH: "#74859c",
    TimeClass.DOWN: "#b9bcc2",
}


def style() -> str:
    """Return the style sheet of the page."""
    fills = "".join(
        f".c-{kind.value}{{fill:{colour};background:{colour}}}" for kind, colour in COLOURS.items()
    )
    return " ".join(["", *_read("page/static/page.css").split("\n")]) + fills
