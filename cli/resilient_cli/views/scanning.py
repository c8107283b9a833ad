"""What could harm, as an answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from resilient.layouts.scanning import Risk
from resilient_cli.render import Answer, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.layouts.scanning import Finding
    from resilient.storage.folder import Listing


def scanned(url: str, listing: Listing, found: Sequence[Finding]) -> Answer:
    """Return the findings, and one line that says whether to load it."""
    counts = {risk.value: sum(one.risk is risk for one in found) for risk in Risk}
    files = len(listing.sizes) + len(listing.outside)
    document = {
        "url": url,
        "files": files,
        "counts": counts,
        "safe": not counts[Risk.DANGER] and not counts[Risk.WARNING],
        "findings": [asdict(one) for one in found],
    }
    rows = tuple((one.risk.value, one.file or ".", one.what, one.consequence) for one in found)
    table = Table(("RISK", "FILE", "WHAT", "CONSEQUENCE"), rows)
    ids = tuple(dict.fromkeys(one.file for one in found if one.risk is not Risk.NOTE))
    return Answer("ckpt.scan", "scan", document, (table, _verdict(files, counts)), ids)


def _verdict(files: int, counts: dict[str, int]) -> str:
    looked = f"{files} file{'s' * (files != 1)} looked at, none of them run."
    if counts[Risk.DANGER]:
        return f"{looked} Do not load it: {counts[Risk.DANGER]} can harm you."
    if counts[Risk.WARNING]:
        return f"{looked} Load it only if you trust who made it."
    return f"{looked} Nothing that harms was found."
