"""Runs of other tools on a command line: which checkpoint a reference means there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, NothingToResume, RepositoryNotFound, UsageError
from resilient.layouts.recognizing import LAYOUTS
from resilient.layouts.runs import checkpoints_of, pointed_at, referred, with_last
from resilient.showing import quoted
from resilient.storage.folder import open_folder
from resilient.world.launch import read_storage_options
from resilient_cli.foreign import is_foreign

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.layouts.runs import Kept, Pointers
    from resilient.storage.folder import Folder, Listing

_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class Run:
    """A folder in which another tool keeps its checkpoints.

    Attributes:
        url: where, without secrets.
        checkpoints: newest first; one at least.
        pointers: what it says of them.
        latest: the names of those that `latest` means, one of each run.
        is_whole: whether all files were listed; else newer checkpoints may lack.
    """

    url: str
    checkpoints: Sequence[Kept]
    pointers: Pointers
    latest: frozenset[str]
    is_whole: bool


def run_at(url: str) -> Run | None:
    """Return the run of another tool at a place; None of what is none.

    Raises:
        RepositoryNotFound: it is a checkpoint itself.
        StoreError: it could not be read.
    """
    there = _found_at(url) if is_foreign(url) else None
    if there is None:
        return None
    folder, listing, found = there
    if found:
        pointers = pointed_at(folder, listing, found)
        # Of a list that is cut only a tracker knows the latest: newer ones may lack.
        newest = referred("latest", found, pointers.latest) if listing.is_whole else []
        latest = pointers.latest.union(one.name for one in newest)
        return Run(folder.url, found, pointers, latest, listing.is_whole)
    if listing.is_file or any(one.is_it(listing) for one in LAYOUTS):
        raise RepositoryNotFound(
            f"`{folder.url}` is a checkpoint of another tool, and holds no others",
            hint=f"resilient ckpt inspect {quoted(folder.url)}",
        )
    return None


def in_run(ref: str | None, url: str | None) -> str | None:
    """Return the path of the checkpoint that a reference means in a run of another tool.

    None where there is no such run, or nothing in it is asked for. It is for who found no
    repository of ours there: those do not pay for it.

    Raises:
        NothingToResume: there is no such checkpoint in it.
        UsageError: there are several, of several runs.
        StoreError: it could not be read.
    """
    if not ref or not url or "://" in ref or not is_foreign(url):
        return None
    there = _found_at(url)
    if there is None or not there[2]:
        return None
    folder, listing, found = there
    if not listing.is_whole:
        raise UsageError(
            f"`{folder.url}` holds more files than are listed, so what `{ref}` means is not known: "
            "name a checkpoint by its path",
            hint=f"resilient ckpt ls {quoted(folder.url)}",
        )
    latest = pointed_at(folder, listing, found).latest if ref.startswith("latest") else ()
    named = referred(ref, found, latest)
    if len(named) == 1:
        return f"{url.rstrip('/')}/{named[0].name}"
    if named:
        shown = ", ".join(one.name[:80] for one in named[:_SHOWN_MAX])
        raise UsageError(
            f"`{ref}` means {len(named)} checkpoints in `{folder.url}`, of several runs: {shown}",
            hint=f"resilient ckpt inspect {quoted(folder.url.rstrip('/') + '/' + named[0].name)}",
        )
    raise NothingToResume(
        f"`{ref}` means no checkpoint in `{folder.url}`, which another tool wrote: latest, "
        "latest~2, step:500 and names do",
        hint=f"resilient ckpt ls {quoted(folder.url)}",
    )


def _found_at(url: str) -> tuple[Folder, Listing, list[Kept]] | None:
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        listing = folder.list()
    except KeyNotFound:
        return None  # whoever looks for a repository there says so
    if listing.is_file:
        return folder, listing, []
    return folder, listing, with_last(folder, listing, checkpoints_of(listing))
