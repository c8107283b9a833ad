"""Full verification of another tool's checkpoint: contents, problems of its bytes, resumability."""

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
    """A checkpoint of another tool after every byte was read.

    Attributes:
        url: URL of the folder.
        listing: Files of the checkpoint.
        contents: Contents, with all problems.
        verdict: Result of the resumability check.
    """

    url: str
    listing: DirectoryListing
    contents: Contents
    verdict: Resumability


def verify_folder(place: str | Folder, others: Alternatives | None = None) -> VerifiedFolder:
    """Read every byte of a checkpoint and assess its resumability; execute and write nothing.

    Args:
        place: Path, URL or open folder.
        others: Other ways to continue the run.

    Raises:
        KeyNotFound: The folder is empty or missing.
        UnknownLayout: No known tool wrote it.
        StoreError: A file could not be read.
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
