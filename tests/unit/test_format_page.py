"""What docs/format.md states in numbers is what the code does."""

from __future__ import annotations

from pathlib import Path

from resilient.format import document
from resilient.format.document import DOCUMENT_BYTES_MAX, RECORD_BYTES_MAX
from resilient.format.signature import SECRET_BYTES_MIN
from resilient.format.state_json import DEPTH_MAX

PAGE = (Path(__file__).resolve().parents[2] / "docs/format.md").read_text(encoding="utf-8")


def test_the_bounds_of_readers_are_what_the_page_says():
    table = PAGE.partition("## Bounds of readers")[2].partition("\n## ")[0]
    stated = [line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")]
    assert stated[1:] == [
        str(DOCUMENT_BYTES_MAX),
        str(RECORD_BYTES_MAX),
        str(document.DEPTH_MAX),
        str(DEPTH_MAX),
        str(document.FILES_MAX),
        str(document.TENSORS_MAX),
        str(document.REGIONS_MAX),
        str(document.AXES_MAX),
        str(document.CHECKPOINTS_MAX),
        str(document.RECORDS_MAX),
        str(document.ROW_LENGTH_MAX),
        str(document.NUMBER_MAX),
    ]
    assert f"at least {SECRET_BYTES_MIN} bytes" in PAGE
