"""``resilient ckpt tag``, ``untag`` and ``prune``: what a repository shall keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import ConfigError, NothingToResume, UsageError
from resilient.format.names import parse_prune
from resilient.showing import quoted
from resilient.vault.registry.generations import list_numbers
from resilient.vault.registry.references import resolve
from resilient.vault.registry.retention import BestOf, Retention, parse_best
from resilient.vault.registry.signed_store import require_signed
from resilient.vault.registry.tags import create_tag, remove_tag
from resilient.vault.rotation.rotate import carry_out, look
from resilient.vault.rotation.trash import Grace, bring_back, look_into_trash
from resilient_cli.completing import complete_ref
from resilient_cli.lengths import grace_of
from resilient_cli.places import (
    Place,
    Repo,
    committed_of,
    is_somebody_there,
    open_repository,
    output_of,
)
from resilient_cli.progress import Waiting
from resilient_cli.render import show
from resilient_cli.survey import Level, survey
from resilient_cli.views.rotation import pruning, returning, tagging, untagging

if TYPE_CHECKING:
    from resilient.storage.store import Store
    from resilient.vault.rotation.found import Found
    from resilient_cli.render import Output

ANSWER_IS_NO = 1

Name = Annotated[str, typer.Argument(metavar="NAME", help="The tag.", show_default=False)]


def tag(
    ctx: typer.Context,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF", help="latest, step:120, best:loss, ...", autocompletion=complete_ref
        ),
    ],
    name: Name,
    place: Place = None,
    repo: Repo = None,
) -> None:
    """Give a checkpoint a name. What has one is never rotated away or pruned.

    Example: resilient ckpt tag best:loss release runs/gpt2
    """
    store = open_repository(place, repo)
    checkpoint = resolve(store, ref)
    require_signed(store, checkpoint)
    created = create_tag(store, name, checkpoint, SystemClock())
    show(tagging(store.url, created), output_of(ctx))


def untag(ctx: typer.Context, name: Name, place: Place = None, repo: Repo = None) -> None:
    """Take a name away; the checkpoint stays until a rotation or prune lets it go.

    Example: resilient ckpt untag release runs/gpt2
    """
    store = open_repository(place, repo, reads_unsigned=True)
    show(untagging(store.url, name, remove_tag(store, name)), output_of(ctx))


def prune(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    place: Place = None,
    prune_id: Annotated[
        str | None,
        typer.Argument(
            metavar="ID",
            help="With --undo: which prune, as it was told; else the newest.",
            show_default=False,
        ),
    ] = None,
    repo: Repo = None,
    *,
    keep_last: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest N.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option(metavar="METRIC:N", help="Keep the best N; add :min or :max to be clear."),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep steps that are multiples of N.")
    ] = None,
    keep_hourly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N hours (UTC).")
    ] = None,
    keep_daily: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N days (UTC).")
    ] = None,
    keep_weekly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N weeks (ISO 8601).")
    ] = None,
    keep_monthly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N months (UTC).")
    ] = None,
    keep_yearly: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Keep the newest of N years (UTC).")
    ] = None,
    keep_within: Annotated[
        str | None,
        typer.Option(metavar="2d", help="Keep what was saved within this of the newest."),
    ] = None,
    keep_tag: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Keep what has this tag; any tag does.")
    ] = None,
    level: Annotated[
        Level, typer.Option(help="How to prove the newest before older ones go: quick or full.")
    ] = Level.QUICK,
    forget_undo: Annotated[
        bool, typer.Option("--forget-undo", help="Keep nothing just because `ckpt undo` needs it.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    grace: Annotated[
        str,
        typer.Option(metavar="24h", help="How long what goes can be brought back; 0: not at all."),
    ] = "24h",
    empty_trash: Annotated[
        bool, typer.Option("--empty-trash", help="Free what is in the trash now.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Bring back what the prune ID, or the newest, let go.")
    ] = False,
) -> int:
    """Let go what no policy keeps, and say of everything else why it stays.

    What stays is the union of all reasons. The newest, what has a tag, what the run protects,
    what a life has just begun from and what `ckpt undo` goes back to always stay; nothing goes
    while the newest is damaged.

    What goes is in the trash first: no command lists it and no run resumes from it, and --undo
    brings it back, all of one prune at a time: of the one whose ID is given, as often as it is
    given, or of the newest. After --grace the next rotation or prune frees its bytes.

    Exit code 0: done. 1: something holds the checkpoints, or not all of them came back.

    Example: resilient ckpt prune runs/gpt2 --keep-last 3 --keep-best loss:2 --dry-run
    """
    retention = Retention(
        keep_last=keep_last,
        keep_best=tuple(map(_best, keep_best or ())),
        keep_every=keep_every,
        keep_hourly=keep_hourly,
        keep_daily=keep_daily,
        keep_weekly=keep_weekly,
        keep_monthly=keep_monthly,
        keep_yearly=keep_yearly,
        keep_within=keep_within,
        keep_tags=tuple(keep_tag or ()),
        verify_before_rotate="quick" if level is Level.QUICK else "full",
        rolled_back="none" if forget_undo else "undo",
    )
    output = output_of(ctx)
    if undo:
        _require_alone(retention, empties=empty_trash)
        place, which = _place_and_id(place, prune_id)
        return _undo(
            open_repository(place, repo, reads_unsigned=True), which, output, dry_run=dry_run
        )
    if prune_id:
        raise UsageError(
            f"`{prune_id}`: only `--undo` takes the id of a prune",
            hint="resilient ckpt prune REPO --undo ID",
        )
    if not empty_trash:
        _require_policy(retention)
    asks = not (dry_run or output.agrees)
    time = Grace(SystemClock(), grace_of(grace, "--grace"), empty_trash)
    store = open_repository(place, repo, reads_unsigned=True)
    return _let_go(store, retention, time, output, asks=asks, dry_run=dry_run)


def _let_go(
    store: Store, retention: Retention, time: Grace, output: Output, *, asks: bool, dry_run: bool
) -> int:
    """Carry a policy out, or show what it would do; 1 if something holds the checkpoints."""
    committed = committed_of(store)
    mine = max(list_numbers(store), default=0)
    with Waiting("reading"):
        found = look(store, retention, in_full=True, grace=time)
    _require_tags(retention, found, store.url)
    plan = found.plan
    if asks and (plan.doomed or found.over):
        show(pruning(store.url, found, plan, time, done=False), output)
        _require_somebody(output)
        if not typer.confirm(_question(found), err=True):
            return ANSWER_IS_NO
    if not dry_run:
        with Waiting("deleting"):
            plan = carry_out(store, found, mine)
    newest = survey(store, committed[:1], Level.QUICK) if plan.held else []
    why = newest[0] if newest else None
    show(pruning(store.url, found, plan, time, done=not dry_run, newest=why), output)
    return ANSWER_IS_NO if plan.held else 0


def _question(found: Found) -> str:
    doomed = len(found.plan.doomed)
    if found.into and not found.over:
        return f"Put {doomed} in the trash?"
    return f"Delete {len(found.over) + (0 if found.into else doomed)}?"


def _place_and_id(place: str | None, prune_id: str | None) -> tuple[str | None, str]:
    """Tell the repository from the id of a prune, whichever stands first.

    Raises:
        UsageError: the second is no id.
    """
    words = [one for one in (place, prune_id) if one]
    ids = [one for one in words if parse_prune(one)]
    others = [one for one in words if one not in ids]
    if len(ids) > 1 or len(others) > 1:
        raise UsageError(
            f"`{words[1]}` is no id of a prune, as `prune` and `ckpt ls` tell them",
            hint="resilient ckpt prune REPO --undo ID",
        )
    return next(iter(others), None), next(iter(ids), "")


def _undo(store: Store, prune: str, output: Output, *, dry_run: bool) -> int:
    """Bring back what a prune let go; 1 if a part of it is not there any more."""
    returned = look_into_trash(store, prune) if dry_run else bring_back(store, prune)
    if not (returned.back or returned.left):
        _require_undone(store, prune)
    show(returning(store.url, returned, done=not dry_run), output)
    return ANSWER_IS_NO if returned.left else 0


def _require_undone(store: Store, prune: str) -> None:
    """Require of a prune of which nothing is in the trash that it was taken back before.

    Raises:
        NothingToResume: its time there is over.
    """
    mark = parse_prune(prune)
    if mark is None or mark.until <= SystemClock().now_iso():
        raise NothingToResume(
            f"nothing of the prune {prune} is in the trash of {store.url}: its time is over",
            hint=f"resilient ckpt ls {quoted(store.url)}",
        )


def _require_alone(retention: Retention, *, empties: bool) -> None:
    """Refuse policies where nothing is decided by them.

    Raises:
        UsageError: there are some.
    """
    if empties or not retention.is_empty:
        raise UsageError(
            "`--undo` brings back what a prune let go, and goes with no policy",
            hint="resilient ckpt prune REPO --undo",
        )


def _require_policy(retention: Retention) -> None:
    """Require a policy.

    Raises:
        UsageError: there is none.
    """
    if retention.is_empty:
        raise UsageError(
            "no policy was given, so there is nothing to decide by",
            hint="resilient ckpt prune --keep-last 3 --dry-run",
        )


def _require_somebody(output: Output) -> None:
    """Require somebody to answer, once the plan was shown.

    Raises:
        UsageError: nobody is there.
    """
    if not is_somebody_there(output):
        raise UsageError(
            "prune deletes, and nobody is there to confirm it; nothing was deleted: `--yes` does "
            "what is shown",
            hint="resilient ckpt prune --yes",
        )


def _require_tags(retention: Retention, found: Found, url: str) -> None:
    """Require that every tag of a policy is there: a wrong name would keep nothing.

    Raises:
        UsageError: one is not.
    """
    unknown = [name for name in retention.keep_tags if name not in (found.tags or ())]
    if unknown:
        raise UsageError(f"no tag `{unknown[0]}` at {url}", hint=f"resilient ckpt ls {quoted(url)}")


def _best(wish: str) -> BestOf:
    try:
        return parse_best(wish)
    except ConfigError as error:
        hint = "resilient ckpt prune --keep-best loss:3:min --dry-run"
        raise UsageError(error.message, hint=hint) from error
