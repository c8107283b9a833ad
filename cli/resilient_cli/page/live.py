"""What makes a page that is served renew itself: its script, and the only things it may do."""

from __future__ import annotations

import base64
import hashlib
from html import escape

_SCRIPT = """
const shown = document.querySelector("meta[name=version]").content;
const said = document.getElementById("live");
const look = async () => {
  try {
    const answer = await fetch("version", {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    if ((await answer.text()) !== shown) location.reload();
    said.textContent = "live";
  } catch { said.textContent = "not served any more: this is the last that was seen"; }
};
setInterval(look, 1000);
"""
_DIGEST = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; "
    f"script-src 'sha256-{_DIGEST}'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Of the content: the one script by its digest, and nothing from anywhere else."""


def head_of(version: str) -> str:
    """Return what stands in the head of a page of this version."""
    return f'<meta name="version" content="{escape(version)}">'


def foot_of() -> str:
    """Return what stands at the end of the body: whether it is live, and what looks for it."""
    return f'<p id="live" role="status">live</p><script>{_SCRIPT}</script>'
