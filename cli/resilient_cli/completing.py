"""What a shell offers for a reference: checkpoints, tags and words that fit what was typed.

Only the names of objects are read, never a manifest, and a store that does not answer within
two seconds offers nothing: who presses Tab waits for it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

import typer  # noqa: TC002 - Typer reads the annotations when it runs

from resilient.errors import ResilientError
from resilient.storage.open import open_store
from resilient.vault.registry.catalog import committed
from resilient.vault.registry.tags import list_tags
from resilient.world.launch import read_storage_options

if TYPE_CHECKING:
    from resilient.storage.store import Store

WITHIN_SECONDS = 2.0


def complete_ref(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the references that begin with ``incomplete``, each with a word on what it is.

    The repository is that of ``--repo``, of a REPO that stands before, or of RESILIENT_REPO.
    """
    url = ctx.params.get("repo") or ctx.params.get("place") or os.environ.get("RESILIENT_REPO")
    if not url:
        return []
    # A shell shows whatever is written while it completes: a store that fails offers nothing.
    with suppress(ResilientError):
        options = read_storage_options(os.environ)
        store = open_store(url, within_seconds=WITHIN_SECONDS, storage_options=options)
        return [one for one in references(store) if one[0].startswith(incomplete)]
    return []


def references(store: Store) -> list[tuple[str, str]]:
    """Return every short name of a checkpoint in a repository, the newest first."""
    found = committed(store)
    if not found:
        return []
    steps = dict.fromkeys(one.step for one in found)
    return [
        ("latest", "what a resume would try first"),
        *((tag, "tag") for tag in list_tags(store)),
        *((one.folder, f"step {one.step}, life {one.generation}") for one in found),
        *((f"step:{step}", "the newest with this step") for step in steps),
    ]
