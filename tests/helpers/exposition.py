"""What Prometheus would read from a page, by ``name`` or ``name{label="value"}``."""

from __future__ import annotations

import re
import urllib.request

_LINE = re.compile(r'([a-z_]+(?:\{[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"\})?) (\S+)')


def figures(text):
    """Return the samples of a page, and fail on a line that is none."""
    assert text.endswith("\n")
    rows = [line for line in text.splitlines() if not line.startswith(("# HELP ", "# TYPE "))]
    matches = [_LINE.fullmatch(row) for row in rows]
    assert all(matches), [row for row, match in zip(rows, matches, strict=True) if not match]
    names = [match[1] for match in matches]
    assert len(names) == len(set(names))
    return {match[1]: float(match[2]) for match in matches}


def scrape(url):
    """Return the samples that are served at ``url`` now."""
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return figures(answer.read().decode())
