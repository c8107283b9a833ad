"""``resilient ckpt ls``: what a repository holds."""

from __future__ import annotations

import typer  # noqa: TC002 - Typer reads the annotations when it runs

from resilient.clock import SystemClock
from resilient.format.names import CHECKPOINTS, GENERATIONS, TAGS
from resilient.vault.registry.catalog import lineage
from resilient.vault.registry.generations import read_generations
from resilient_cli.listed import ListedStore
from resilient_cli.places import Place, Repo, committed_of, open_repository, output_of
from resilient_cli.render import show
from resilient_cli.survey import Level, survey, tags_of
from resilient_cli.views.listing import Listing, listing


def ls(ctx: typer.Context, place: Place = None, repo: Repo = None) -> None:
    """List checkpoints, newest first, and the lives of the run that wrote them.

    STATE is ok when every file is present with its full size, DAMAGED when not, and abandoned
    when a later life began from an older checkpoint. `ckpt verify` reads the content too.

    Example: resilient ckpt ls s3://bucket/run
    """
    store = open_repository(place, repo)
    found = committed_of(store)
    listed = ListedStore(store, CHECKPOINTS, GENERATIONS, TAGS)
    surveys = survey(listed, found, Level.QUICK)
    everything = Listing(
        store.url, surveys, lineage(listed), read_generations(listed), tags_of(listed)
    )
    show(listing(everything, SystemClock().now_iso()), output_of(ctx))
