"""``resilient chaos``: a user's own training under faults, held against an undisturbed run."""

from __future__ import annotations

import secrets
import shlex
from pathlib import Path
from typing import Annotated

import typer

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.testing.chaos.faults import draw_strikes
from resilient.testing.chaos.feasible import look_at_machine, refuse_impossible, why_not
from resilient.testing.chaos.namespaces import HOSTS_MAX
from resilient.testing.chaos.orders import Ordered, obeying_orders
from resilient.testing.chaos.plan import read_plan, shipped
from resilient.testing.chaos.promises import is_proven, judge
from resilient.testing.chaos.rehearsal import Rehearsal, rehearse
from resilient_cli.given import given_to_train
from resilient_cli.places import output_of
from resilient_cli.render import show
from resilient_cli.streams import say
from resilient_cli.views.chaos import listing, planned, verdict

BROKEN = 1
_SIGNAL_BASE = 128
_SEEDS = 10**6
_FOLDER, _WITHIN_SECONDS = Path("chaos-run"), 600.0
_EXAMPLE = "resilient chaos run kills -- train train.py --output-dir {folder}"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Strike a training of your own on purpose, and see which promises hold.",
)

Plan = Annotated[str, typer.Argument(metavar="PLAN", help="Name of a plan, or a .toml file.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- train ...",
        help="The command, without `resilient`; {folder} in it is the folder of each run, {host} "
        "the name of each host.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Of the faults; drawn and told if not given.")]
Folder = Annotated[Path, typer.Option(help="For both runs; what an earlier one left is removed.")]
Within = Annotated[
    float, typer.Option(help="Seconds that the run may take to go on after a fault.", min=1)
]
Hosts = Annotated[
    int,
    typer.Option(
        help="Network namespaces of this machine to train on, each with an agent; needs root.",
        min=1,
        max=HOSTS_MAX,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the faults and do nothing.")]


@app.command("run")
def run(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
    ctx: typer.Context,
    plan: Plan,
    command: Command = None,
    *,
    hosts: Hosts = 1,
    seed: Seed = None,
    folder: Folder = _FOLDER,
    within: Within = _WITHIN_SECONDS,
    dry_run: DryRun = False,
) -> int:
    """Run a training undisturbed and under the faults of PLAN, and compare the two.

    Exit code 0: every fault struck and every promise was kept. 1: a promise was broken, or a
    fault found no run to strike. What cannot be done here is refused before anything starts. An
    order to end (SIGTERM, Ctrl-C) ends the training as well, with 143 or 130.

    Example: resilient chaos run kills -- train train.py --output-dir {folder}
    """
    words = tuple(command or ())
    if words[:1] != ("train",):
        raise UsageError("chaos run needs a training to strike", hint=_EXAMPLE)
    faults = read_plan(plan)
    refuse_impossible(faults, given_to_train(words[1:]), look_at_machine(faults, hosts), hosts)
    seed = secrets.randbelow(_SEEDS) if seed is None else seed
    where = (*_unless("--hosts", hosts, 1), *_unless("--folder", folder, _FOLDER))
    told = (*where, *_unless("--within", within, _WITHIN_SECONDS), "--seed", str(seed))
    again = shlex.join(("resilient", "chaos", "run", plan, *told, "--", *words))
    if dry_run:
        show(planned(faults, draw_strikes(faults, seed), seed, again, hosts), output_of(ctx))
        return 0
    wish = Rehearsal(faults, seed, words[1:], folder.resolve(), within, hosts)
    try:
        with obeying_orders():
            evidence = rehearse(wish, SystemClock(), say)
    except Ordered as order:
        say(f"ended by {order}: nothing of it runs any more, and both folders stay; {again}")
        return _SIGNAL_BASE + order.number
    promises = judge(evidence)
    is_kept = is_proven(evidence, promises)
    show(verdict(wish, evidence, promises, again), output_of(ctx))
    return 0 if is_kept else BROKEN


def _unless(option: str, given: Path | float, usual: Path | float) -> tuple[str, ...]:
    """Return an option as it must be typed again; nothing if that is what it is by itself."""
    shown = f"{given:g}" if isinstance(given, float) else str(given)
    return () if given == usual else (option, shown)


@app.command("list")
def list_plans(ctx: typer.Context) -> None:
    """List the plans that are shipped, and which of them can be carried out on this machine.

    Example: resilient chaos list
    """
    plans = shipped()
    reasons = {
        one.name: why_not(one, look_at_machine(one), hosts=2 if one.needs_hosts else 1)
        for one in plans
    }
    show(listing(plans, reasons), output_of(ctx))
