"""Lines that ranks printed, as ``resilient logs`` shows them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from resilient.showing import visible, without_users
from resilient_cli.render import Format

if TYPE_CHECKING:
    from resilient.agent.outputs.reading import Printed


def line_of(one: Printed, form: Format, *, is_named: bool, is_safe: bool) -> str:
    """Return a line of the answer, without its end; users in front of a URL's host are left out.

    Args:
        one: what a rank printed.
        form: people get the text, other tools columns, programs an object.
        is_named: whether people have to be told which life and rank it was.
        is_safe: whether it goes where escapes would do something.
    """
    source, line = one.source, one.line
    text = without_users(line.text)
    if form is Format.JSON:
        return json.dumps(
            {
                "schema": "resilient/logs@1",
                "type": "line",
                "life": source.life,
                "attempt": source.attempt,
                "rank": source.rank,
                "stream": line.stream,
                "at": line.at or None,
                "text": text,
            }
        )
    if is_safe:
        text = harmless(text)
    if form is Format.PLAIN:
        return f"{source.life}\t{source.rank}\t{line.stream}\t{line.at}\t{text}"
    return f"life {source.life} rank {source.rank} | {text}" if is_named else text


def harmless(text: str) -> str:
    """Return a text that a terminal shows and does not obey: what is not printed is spelled."""
    return visible(text.expandtabs(8), "")
