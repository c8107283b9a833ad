"""Checkpoints of any tool by what a command line calls them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.comparison import ours, theirs
from resilient.errors import IntegrityError, RepositoryNotFound
from resilient.format.names import parse_checkpoint
from resilient.layouts.plain import ALONE
from resilient.layouts.weights import SAFE, TORCH
from resilient.showing import quoted
from resilient.vault.health.verify import verify
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient_cli.foreign import is_foreign, look, opened
from resilient_cli.places import open_repository
from resilient_cli.runs import in_run

if TYPE_CHECKING:
    from resilient.comparison.values import Side

_REFERENCE = re.compile(r"latest(?:~\d+)?|step:\d+|best:.+|@.+")


def side_at(ref: str, place: str | None, repo: str | None) -> Side:
    """Return the checkpoint that an argument means.

    It is a path or a URL if it has a slash, ends like a file of weights, or no repository is
    named: of a checkpoint of any tool, of one of ours, of a repository (its latest), or of a
    repository with a reference behind a slash. Else it is a reference in the repository.

    Raises:
        ResilientError: nothing is there, or it is no checkpoint.
    """
    if not _is_path(ref, place or repo):
        return _referred(ref, place or repo or "")
    head, _, tail = ref.rstrip("/").rpartition("/")
    if parse_checkpoint(tail) is not None:
        return _ours(tail, head or ("/" if ref.startswith("/") else "."))
    if _REFERENCE.fullmatch(tail):
        return _referred(tail, head or ".")
    found = opened(ref) if is_foreign(ref) else None
    return _ours("latest", ref) if found is None else theirs.side_of(*found)


def require_whole(side: Side) -> None:
    """Read every byte of a checkpoint once, and hold it against what its tool says of it.

    Raises:
        IntegrityError: something is damaged; the message names the first.
        StoreError: it could not be read.
    """
    if side.layout == ours.LAYOUT:
        place, _, name = side.url.rpartition("/")
        checkpoint = parse_checkpoint(name)
        store = open_repository(place, None)
        found = verify(store, checkpoint) if checkpoint else []
        wrong = [f"{one.file} {one.problem}" for one in found if one.severity == "damaged"]
        hint = f"resilient ckpt repair {name} {quoted(place)}"
    else:
        looked = look(side.url, is_read=True)
        problems = looked.contents.problems if looked else ()
        wrong = [f"{it.place}: {it.what}" for it in problems if it.is_fatal and it.what != ALONE]
        hint = f"resilient ckpt verify {quoted(side.url)}"
    if wrong:
        raise IntegrityError(f"{side.url} is damaged: {wrong[0]}", key=side.url, hint=hint)


def _is_path(ref: str, repository: str | None) -> bool:
    return "/" in ref or not repository or ref.endswith((SAFE, *TORCH))


def _referred(ref: str, url: str) -> Side:
    """Return what a reference means in a repository, or in a run of another tool."""
    try:
        return _ours(ref, url)
    except RepositoryNotFound:
        path = in_run(ref, url)
        found = opened(path) if path else None
        if found is None:
            raise
        return theirs.side_of(*found)


def _ours(ref: str, url: str) -> Side:
    store = open_repository(url, None)
    return ours.side_of(store, read_manifest(store, resolve(store, ref)))
