"""``resilient ckpt unlock``: who may write to a repository, and shutting them out."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path  # noqa: TC003 - Typer reads the signature
from typing import Annotated

import typer

from resilient.accounting.steadying import present_ms
from resilient.clock import SystemClock
from resilient.errors import RepositoryNotFound, WriterAlive
from resilient.showing import quoted
from resilient.vault.registry.retention import Retention
from resilient.vault.rotation.rotate import look
from resilient.vault.writers import find_writer, shut_out
from resilient_cli.places import Place, Repo, open_repository, output_of
from resilient_cli.render import show
from resilient_cli.views.unlocking import Unlocking, unlocking
from resilient_cli.witness import State, records_of, testify

HELD = 80


def unlock(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    run: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="The run's event files, if they are not in REPO."),
    ] = None,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Shut the writer out.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also one that lives: it ends at its next save.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only look, as without --yes.")
    ] = False,
    single_writer: Annotated[
        bool, typer.Option("--single-writer", help="Promise: no other job writes to REPO.")
    ] = False,
) -> int:
    """Say who may write to a repository, whether it lives, and what holds it; shut it out by --yes.

    Nothing that died can lock a repository: the same command always begins a new life. But a
    process of the newest life may go on saving until a newer one begins, also if it hangs or was
    forgotten. --yes begins one that goes on from what resume takes and saves nothing: nothing is
    abandoned or deleted, and whatever wrote before ends at its next save, with exit code 80.

    Exit code 0: nobody is seen alive. 80: a writer is, and without --force it was let be.

    Example: resilient ckpt unlock s3://bucket/run --yes
    """
    store, clock = open_repository(place, repo, reads_unsigned=True), SystemClock()
    writer = find_writer(store)
    if writer is None:
        raise RepositoryNotFound(
            f"no repository at `{store.url}`: no run ever began there",
            hint=f"resilient doctor --repo {quoted(store.url)}",
        )
    now_ms = round(datetime.fromisoformat(clock.now_iso()).timestamp() * 1000)
    records = records_of(run, place or repo or "")
    seen = testify(writer, records, present_ms(records, clock, now_ms))
    is_alive = seen.state is State.ALIVE
    acts = (yes or output_of(ctx).agrees) and not dry_run
    if acts and is_alive and not force:
        raise WriterAlive(
            f"life {writer.life} of {store.url} is written by a process that lives: {seen.why}; "
            "nothing was changed",
            hint=f"resilient stop {quoted(run or store.url)}; "
            f"resilient ckpt unlock {quoted(store.url)} --yes --force loses what it has not saved",
        )
    # A life that saves nothing shuts everybody else out already.
    needed = not writer.is_nobody or is_alive
    life = shut_out(store, clock, single_writer=single_writer) if acts and needed else None
    held = look(store, Retention(keep_last=1), in_full=True).plan.held
    found = Unlocking(store.url, writer, seen, held, life, is_needed=needed)
    show(unlocking(found, clock.now_iso()), output_of(ctx))
    return HELD if is_alive and not life else 0
