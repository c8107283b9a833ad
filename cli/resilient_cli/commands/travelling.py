"""``resilient ckpt rollback``, ``undo`` and ``reflog``: where resume goes on, and where it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.showing import quoted
from resilient.vault.registry.moves import Moves
from resilient.vault.registry.references import resolve
from resilient.vault.registry.signed_store import require_signed
from resilient.vault.rollback import plan_rollback, plan_undo, travel
from resilient_cli.places import (
    Place,
    Ref,
    Repo,
    committed_of,
    open_repository,
    output_of,
    ref_and_place,
)
from resilient_cli.render import show
from resilient_cli.views.travelling import moved, moves

if TYPE_CHECKING:
    from resilient.storage.store import Store
    from resilient.vault.rollback import Journey

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would change.")]
SingleWriter = Annotated[
    bool,
    typer.Option("--single-writer", help="Promise: no two jobs write to the repository at once."),
]


def rollback(
    ctx: typer.Context,
    ref: Ref,
    place: Place = None,
    repo: Repo = None,
    *,
    dry_run: DryRun = False,
    single_writer: SingleWriter = False,
) -> None:
    """Let training go on from an older checkpoint. Nothing is copied and nothing is deleted.

    A new life of the run begins from REF. What came after is abandoned: never resumed by itself,
    kept through rotations until `ckpt prune`, back with `ckpt undo`. A run that still trains here
    ends at its next save, with exit code 80.

    Example: resilient ckpt rollback step:12000 s3://bucket/run
    """
    ref, place = ref_and_place(ref, place, repo)
    if ref is None:
        raise UsageError(
            "rollback takes the checkpoint to go back to, and then the repository",
            hint=f"resilient ckpt rollback latest~1 {quoted(place)}",
        )
    store = open_repository(place, repo)
    target = resolve(store, ref)
    require_signed(store, target)
    journey = plan_rollback(store, target)
    _go("ckpt.rollback", ctx, store, journey, dry_run=dry_run, single_writer=single_writer)


def undo(
    ctx: typer.Context,
    place: Place = None,
    repo: Repo = None,
    *,
    dry_run: DryRun = False,
    single_writer: SingleWriter = False,
) -> None:
    """Take the newest rollback back that is in force; once more takes back the one before.

    Training goes on from where it would have without it. What was trained since the rollback is
    abandoned in its turn and not deleted.

    Example: resilient ckpt undo s3://bucket/run
    """
    store = open_repository(place, repo)
    committed_of(store)
    journey = plan_undo(store)
    _go("ckpt.undo", ctx, store, journey, dry_run=dry_run, single_writer=single_writer)


def reflog(ctx: typer.Context, place: Place = None, repo: Repo = None) -> None:
    """List the lives of the run, newest first: why each began, from where, and where it ended.

    REF names where a life ended, for any command: `ckpt rollback @{2}`.

    Example: resilient ckpt reflog s3://bucket/run
    """
    store = open_repository(place, repo)
    committed_of(store)
    found = Moves(store).newest_first()
    show(moves(store.url, found, SystemClock().now_iso()), output_of(ctx))


def _go(
    command: str,
    ctx: typer.Context,
    store: Store,
    journey: Journey,
    *,
    dry_run: bool,
    single_writer: bool,
) -> None:
    number = None
    if not dry_run:
        number = travel(store, journey, SystemClock(), single_writer=single_writer)
    show(moved(command, store.url, journey, number, dry_run=dry_run), output_of(ctx))
