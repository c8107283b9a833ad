"""Looking at checkpoints that other tools wrote."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.errors import KeyNotFound, StoreError, UnknownLayout
from resilient.layouts.incomplete import saved_name
from resilient.layouts.judging import Alternatives, Outcome, judge
from resilient.layouts.recognizing import checkpoints_in, read_layout
from resilient.layouts.remedies import is_costly
from resilient.layouts.values import Cure
from resilient.layouts.weights import SAFE, TORCH
from resilient.showing import quoted
from resilient.storage.folder import Listing, open_folder
from resilient.storage.open import open_store
from resilient.storage.urls import protocol_of
from resilient.vault.registry.catalog import committed
from resilient.vault.registry.generations import list_numbers
from resilient.world.launch import read_storage_options
from resilient_cli.lengths import WITHIN_SECONDS
from resilient_cli.progress import Progress
from resilient_cli.told import ToldFolder

if TYPE_CHECKING:
    from resilient.layouts.values import Contents, Verdict
    from resilient.storage.folder import Folder

_SIBLINGS_MAX = 3
_PLANNED_BYTES_MAX = 1 << 30
"""Largest checkpoint whose repair `ckpt inspect` plans: a plan reads every byte."""


@dataclass(frozen=True, slots=True)
class Looked:
    """What was found at a place.

    Attributes:
        url: where, without secrets.
        contents: what it holds.
        verdict: whether training can go on from it.
        listing: its files.
        sibling: another one of the same run that training can go on from, where it was looked for.
        read_bytes: what was read to prove it; None where only headers were looked at.
    """

    url: str
    contents: Contents
    verdict: Verdict
    listing: Listing
    sibling: str = ""
    read_bytes: int | None = None

    @property
    def is_damaged(self) -> bool:
        """Whether a resume stops or loses a state that its tool had saved."""
        return self.verdict.answer == "no" or is_costly(self.contents.problems)


def is_foreign(url: str) -> bool:
    """Say whether something is at a place, and it is no repository of ours.

    Raises:
        StoreError: the place could not be asked.
    """
    if url.endswith((SAFE, *TORCH)):
        return True
    if protocol_of(url) == "file" and not os.path.isdir(url.removeprefix("file://")):  # noqa: PTH112
        return os.path.isfile(url)  # noqa: PTH113 - a URL is no Path
    options = read_storage_options(os.environ)
    store = open_store(url, within_seconds=WITHIN_SECONDS.get(), storage_options=options)
    return not committed(store) and not list_numbers(store)


def look_if_known(url: str | None, *, is_read: bool) -> Looked | None:
    """Return what another tool left at a place; None when nothing that is known did.

    Args:
        url: a path or a URL.
        is_read: whether every byte is looked at, and not headers alone.

    Raises:
        UnknownLayout: it is a folder of checkpoints and none itself; the hint names one of them.
        StoreError: it could not be read.
    """
    try:
        return look(url, is_read=is_read) if url and is_foreign(url) else None
    except UnknownLayout as error:
        if error.hint:
            raise
        return None


def look(url: str, *, is_read: bool = False) -> Looked | None:
    """Return what is at a place, None when there is nothing.

    Args:
        url: a path or a URL.
        is_read: whether every byte is looked at, and not headers alone.

    Raises:
        UnknownLayout: it is no checkpoint.
        StoreError: it could not be read.
    """
    found = opened(url)
    if found is None:
        return None
    folder, listing, contents = found
    read_bytes = None
    if is_read:
        from resilient.comparison.proving import prove  # it needs numpy, which listing does not

        with Progress("reading") as told:
            counted = ToldFolder(folder, told, sum(listing.sizes.values()))
            proofs = prove(counted, listing, contents)
        read_bytes = counted.seen_bytes
        contents = replace(contents, problems=(*contents.problems, *proofs))
    verdict = judge(contents, folder.url)
    others = Alternatives()
    if verdict.answer != "yes" or any(one.cure is Cure.EARLIER for one in contents.problems):
        others = _alternatives(url, listing, verdict, is_read=is_read)
        verdict = judge(contents, folder.url, others)
    return Looked(folder.url, contents, verdict, listing, others.sibling, read_bytes)


def _alternatives(url: str, listing: Listing, verdict: Verdict, *, is_read: bool) -> Alternatives:
    """Return the other ways to continue the run of a checkpoint.

    Raises:
        StoreError: A place could not be read.
    """
    repair = Outcome.UNKNOWN
    size_bytes = sum(listing.sizes.values())
    is_planned = is_read or size_bytes <= _PLANNED_BYTES_MAX
    if verdict.answer != "yes" and protocol_of(url) == "file" and is_planned:
        repair = _outcome(url)
    return Alternatives(_sibling(url, is_read=is_read), repair)


def _outcome(url: str) -> Outcome:
    """Return what `resilient ckpt repair` would make of a checkpoint."""
    from resilient.mending.planning import plan_mending  # it needs numpy, which listing does not

    plan = plan_mending(url)
    if not plan.is_mended or plan.verdict.answer == "no":
        return Outcome.NONE
    return Outcome.LOSSLESS if plan.is_whole and plan.verdict.answer == "yes" else Outcome.LOSSY


def opened(url: str) -> tuple[Folder, Listing, Contents] | None:
    """Return the folder at a place, its files and what they hold; None when there is nothing.

    Raises:
        UnknownLayout: it is no checkpoint.
        StoreError: it could not be read.
    """
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        listing = folder.list()
    except KeyNotFound:
        return None
    if not listing.sizes and not listing.outside:
        return None
    contents = read_layout(folder, listing)
    if contents is None:
        raise _unknown(folder.url, listing)
    return folder, listing, contents


def _unknown(url: str, listing: Listing) -> UnknownLayout:
    inside = checkpoints_in(listing)
    newer = f"{url.rstrip('/')}/{inside[0]}" if inside else ""
    hint = f"resilient ckpt inspect {quoted(newer)}" if inside else ""
    newest = f"; the newest of those in it seems to be `{inside[0][:80]}`" if inside else ""
    what = newest or "; docs/layouts.md has a list"
    if protocol_of(url) in ("http", "https"):
        what = "; over http one file is read, and a page of links is no listing of a folder"
        hint = f"resilient ckpt inspect {quoted(url.rstrip('/') + '/model.safetensors')}"
    return UnknownLayout(
        f"`{url}` is no checkpoint of a tool that is known{what}",
        hint=hint or f"resilient ckpt ls {quoted(url)}",
    )


def _sibling(url: str, *, is_read: bool) -> str:
    """Return the newest other checkpoint of the run that is resumable, best without loss.

    Args:
        url: The checkpoint.
        is_read: Whether every byte of the other one is read, and not its headers alone.
    """
    parent, _, own = url.rstrip("/").rpartition("/")
    if protocol_of(url) != "file" or not any(one.isdigit() for one in own):
        return ""
    stem = (saved_name(own) or own).rstrip("0123456789")
    numbers = {
        int(name[len(stem) :]): name
        for name in os.listdir(parent or ".")  # noqa: PTH208 - a URL is no Path
        if name != own and name.startswith(stem) and name[len(stem) :].isascii()
        if name[len(stem) :].isdigit() and len(name) < len(stem) + 12
    }
    lossy = ""
    for _, name in sorted(numbers.items(), reverse=True)[:_SIBLINGS_MAX]:
        path = f"{parent}/{name}" if parent else name
        answer = _answer(path, is_read=is_read)
        if answer == "yes":
            return path
        lossy = lossy or (path if answer == "partly" else "")
    return lossy


def _answer(path: str, *, is_read: bool) -> str:
    """Return the judge's answer about another checkpoint; empty if it cannot be read."""
    try:
        if is_read:
            from resilient.comparison.verification import verify_folder

            return verify_folder(path).verdict.answer
        folder = open_folder(path)
        contents = read_layout(folder, folder.list())
    except (StoreError, UnknownLayout):
        return ""
    return judge(contents, path).answer if contents else ""
