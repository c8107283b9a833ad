"""``resilient ckpt ls``: what a repository holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer reads the annotations when it runs

from resilient.clock import SystemClock
from resilient.format.names import CHECKPOINTS, GENERATIONS, TAGS
from resilient.storage.open import open_store
from resilient.vault.registry.catalog import committed, lineage
from resilient.vault.registry.generations import read_generations
from resilient_cli.listed import ListedStore
from resilient_cli.places import Place, Repo, committed_of, open_repository, output_of
from resilient_cli.render import show
from resilient_cli.survey import Level, survey, tags_of
from resilient_cli.views.listing import Listing, listing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from resilient.format.names import CheckpointId
    from resilient.storage.store import Store


def ls(ctx: typer.Context, place: Place = None, repo: Repo = None) -> None:
    """List checkpoints, newest first, and the lives of the run that wrote them.

    STATE is ok when every file is present with its full size, DAMAGED when not, and abandoned
    when a later life began from an older checkpoint. `ckpt verify` reads the content too.

    Example: resilient ckpt ls s3://bucket/run
    """
    store = open_repository(place, repo)
    found = listed(store, committed_of(store))
    show(listing(found, SystemClock().now_iso()), output_of(ctx))


def listed(store: Store, found: Iterable[CheckpointId]) -> Listing:
    """Return what a repository holds, by presence and size of its files.

    Args:
        store: the repository.
        found: its committed checkpoints.
    """
    seen = ListedStore(store, CHECKPOINTS, GENERATIONS, TAGS)
    surveys = survey(seen, found, Level.QUICK)
    return Listing(store.url, surveys, lineage(seen), read_generations(seen), tags_of(seen))


def stored(run: Sequence[Path]) -> Listing | None:
    """Return what the first of the folders holds that is a repository; None if none is."""
    store = store_of(run)
    return listed(store, committed(store)) if store else None


def store_of(run: Sequence[Path]) -> Store | None:
    """Return the first of the folders that is a repository with checkpoints; None if none is."""
    for folder in run:
        if any(folder.glob("checkpoint-*")):
            store = open_store(str(folder))
            if committed(store):
                return store
    return None
