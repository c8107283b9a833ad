"""The facts of another tool's checkpoint, the proof of its bytes, and the judge's verdict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import verify_foreign
from resilient.errors import KeyNotFound, UnknownLayout
from resilient.layouts.detect import read_layout
from resilient.layouts.resumability import assess_resumability
from resilient.redaction import shell_quote
from resilient.storage.folder import open_folder

if TYPE_CHECKING:
    from resilient.layouts.model import Contents, Resumability
    from resilient.layouts.resumability import Alternatives
    from resilient.storage.folder import DirectoryListing, Folder


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """A checkpoint of another tool of which every byte was read.

    Attributes:
        url: Its place.
        listing: Its files.
        contents: Its facts, and all problems.
        verdict: The judge's answer.
    """

    url: str
    listing: DirectoryListing
    contents: Contents
    verdict: Resumability


def verify_folder(place: str | Folder, others: Alternatives | None = None) -> VerifiedFolder:
    """Read every byte of a checkpoint and ask the judge; nothing is executed or written.

    Args:
        place: A path or URL, or an open folder.
        others: Other ways to continue the run.

    Raises:
        KeyNotFound: Nothing is there.
        UnknownLayout: No known tool wrote it.
        StoreError: It could not be read.
    """
    folder = open_folder(place) if isinstance(place, str) else place
    listing = folder.list()
    if not listing.sizes and not listing.outside:
        raise KeyNotFound(f"nothing is at {folder.url}", key=folder.url)
    contents = read_layout(folder, listing)
    if contents is None:
        raise UnknownLayout(
            f"`{folder.url}` is no checkpoint of a tool that is known",
            hint=f"resilient ckpt ls {shell_quote(folder.url)}",
        )
    problems = (*contents.problems, *verify_foreign(folder, listing, contents))
    contents = replace(contents, problems=problems)
    return VerifiedFolder(
        folder.url, listing, contents, assess_resumability(contents, folder.url, others)
    )
