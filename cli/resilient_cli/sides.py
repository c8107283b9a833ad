"""Checkpoints of any tool by what a command line calls them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from resilient.comparison import ours, theirs
from resilient.format.names import parse_checkpoint
from resilient.layouts.weights import SAFE, TORCH
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient_cli.foreign import is_foreign, opened
from resilient_cli.places import open_repository

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
        return _ours(ref, place or repo or "")
    head, _, tail = ref.rstrip("/").rpartition("/")
    if parse_checkpoint(tail) is not None:
        return _ours(tail, head or ("/" if ref.startswith("/") else "."))
    if _REFERENCE.fullmatch(tail):
        return _ours(tail, head or ".")
    found = opened(ref) if is_foreign(ref) else None
    return _ours("latest", ref) if found is None else theirs.side_of(*found)


def _is_path(ref: str, repository: str | None) -> bool:
    return "/" in ref or not repository or ref.endswith((SAFE, *TORCH))


def _ours(ref: str, url: str) -> Side:
    store = open_repository(url, None)
    return ours.side_of(store, read_manifest(store, resolve(store, ref)))
