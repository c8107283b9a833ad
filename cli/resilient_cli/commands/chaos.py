"""``resilient chaos``: a user's training under faults, compared with an undisturbed run."""

from __future__ import annotations

import secrets
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.clock import SystemClock
from resilient.errors import UsageError
from resilient.testing.chaos.capabilities import look_at_machine, require_capabilities, why_not
from resilient.testing.chaos.job import name_of
from resilient.testing.chaos.netns import HOSTS_MAX
from resilient.testing.chaos.plan import draw_injections, read_plan, shipped
from resilient.testing.chaos.runner import (
    ChaosExperiment,
    Terminated,
    obeying_orders,
    run_experiment,
)
from resilient.testing.chaos.verdict import GuaranteeState, evaluate_guarantees, is_proven
from resilient_cli.app import parse_train_options
from resilient_cli.output import CommandResult, KeyValues, Table, say, show
from resilient_cli.repositories import output_of
from resilient_cli.views.text import NONE, count, duration, folder, share

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient.testing.chaos.plan import ChaosPlan, Injection
    from resilient.testing.chaos.verdict import ExperimentResult, GuaranteeResult, InjectionResult


def build_list_result(
    plans: Sequence[ChaosPlan], reasons: Mapping[str, Mapping[str, str]]
) -> CommandResult:
    """Build the answer of ``chaos list``: the plans, and the reasons if a plan cannot run here."""
    document = {
        "plans": [
            {
                "name": plan.name,
                "description": plan.description,
                "faults": sum(fault.count for fault in plan.faults),
                "impossible": dict(reasons[plan.name]),
            }
            for plan in plans
        ]
    }
    rows = tuple(
        (
            plan.name,
            str(sum(fault.count for fault in plan.faults)),
            "; ".join(reasons[plan.name].values()) or "can run here",
            plan.description,
        )
        for plan in plans
    )
    table = Table(("PLAN", "FAULTS", "HERE", "WHAT"), rows)
    return CommandResult(
        "chaos.list", "plans", document, (table,), tuple(plan.name for plan in plans)
    )


def build_plan_result(
    plan: ChaosPlan, injections: Sequence[Injection], seed: int, repeat_command: str, hosts: int = 1
) -> CommandResult:
    """Build the answer of ``chaos run --dry-run``: the planned faults."""
    document = {
        "plan": plan.name,
        "seed": seed,
        "hosts": hosts,
        "command": repeat_command,
        "faults": [
            {"at": round(injection.share, 4), **_fault(injection), "host": _host(injection, hosts)}
            for injection in injections
        ],
    }
    rows = tuple((share(injection.share, 1), *_cells(injection, hosts)) for injection in injections)
    host_facts = (("hosts", str(hosts)),) if hosts > 1 else ()
    facts = KeyValues(
        (("plan", plan.name), ("seed", str(seed)), *host_facts, ("command", repeat_command))
    )
    table = Table(("AT", "FAULT", "TARGET", "SECONDS"), rows)
    return CommandResult("chaos.run", "plan", document, (facts, table))


def verdict(
    experiment: ChaosExperiment,
    evidence: ExperimentResult,
    promises: Sequence[GuaranteeResult],
    repeat_command: str,
) -> CommandResult:
    """Build the answer of ``chaos run``: faults, promises, and the command that repeats the run."""
    is_kept = is_proven(evidence, promises)
    document = {
        "plan": experiment.plan.name,
        "seed": experiment.seed,
        "hosts": experiment.hosts,
        "kept": is_kept,
        "steps": evidence.calm.step,
        "faults": [_injection_to_json(result) for result in evidence.struck],
        "missed": [_fault(fault) for fault in evidence.missed],
        "promises": [asdict(promise) for promise in promises],
        "differences": list(evidence.ended.differences),
        "command": repeat_command,
        "folder": str(experiment.folder),
    }
    faults = Table(
        ("STEP", "FAULT", "EXIT", "LOST", "STARTED FROM", "CONTINUES AFTER"),
        tuple(map(_row, evidence.struck)),
    )
    table = Table(
        ("GUARANTEE", "STATE", "WHAT"),
        tuple((promise.name, str(promise.state), _sentence(promise)) for promise in promises),
    )
    closing = _summary_lines(experiment, evidence, promises, repeat_command)
    return CommandResult("chaos.run", "verdict", document, (faults, table, "", *closing))


def _fault(injection: Injection) -> dict[str, Any]:
    fault = injection.fault
    return {
        "kind": str(fault.kind),
        "target": str(fault.target) if fault.kind == "kill" else None,
        "in_save": fault.in_save,
        "seconds": fault.seconds or None,
    }


def _host(injection: Injection, hosts: int) -> str | None:
    """Return the target host of an injection, if it is known before the run.

    The host of a rank is known only when the fault strikes.
    """
    is_known = hosts > 1 and injection.fault.is_of_host
    return name_of(injection.host(hosts)) if is_known else None


def _cells(injection: Injection, hosts: int) -> tuple[str, str, str]:
    fault, host = injection.fault, _host(injection, hosts)
    target = str(fault.target) if fault.kind == "kill" else ""
    if host:
        target = f"agent of {host}" if target == "agent" else host
    saving = " while it saves" * fault.in_save
    seconds = f"{fault.seconds:g}" * bool(fault.seconds)
    return str(fault.kind), f"{target}{saving}" or NONE, seconds


def _injection_to_json(result: InjectionResult) -> dict[str, Any]:
    return {
        **_fault(result.strike),
        "host": None if result.host is None else name_of(result.host),
        "what": result.what,
        "step": result.step,
        "exit": result.code,
        "ends": [{"host": name_of(end.host), "exit": end.code} for end in result.ends],
        "lost_steps": result.lost_steps,
        "newest_before": folder(result.before),
        "restored": folder(result.restored),
        "recovery_seconds": round(result.seconds, 3),
        "problem": result.problem,
    }


def _row(result: InjectionResult) -> tuple[str, ...]:
    start_text = (str(result.restored or "scratch")) if result.is_new_life else NONE
    outcome_text = result.problem or duration(1000 * result.seconds)
    ends = "; ".join(f"{name_of(end.host)} {end.code}" for end in result.ends)
    code = ends or (NONE if result.code is None else str(result.code))
    return str(result.step), result.what, code, str(result.lost_steps), start_text, outcome_text


def _sentence(promise: GuaranteeResult) -> str:
    return f"{promise.text}: {promise.why}" if promise.why else promise.text


def _summary_lines(
    experiment: ChaosExperiment,
    evidence: ExperimentResult,
    promises: Sequence[GuaranteeResult],
    repeat_command: str,
) -> list[str]:
    broken_names = [promise.name for promise in promises if promise.state is GuaranteeState.BROKEN]
    kept_count = sum(promise.state is GuaranteeState.KEPT for promise in promises)
    lines = []
    if evidence.missed:
        lines.append(f"{count(len(evidence.missed), 'fault')} not injected: the run ended first.")
    if "exact" in broken_names:
        lines.append(
            "If plan `calm`, which has no faults, differs too, the script is not deterministic. "
            "Causes: an unseeded random stream, the time of day, the order of a set."
        )
    summary = (
        f"{kept_count} guarantees kept, {len(broken_names)} broken, "
        f"{len(promises) - kept_count - len(broken_names)} untested"
    )
    ending = f": BROKEN {', '.join(broken_names)}" if broken_names else ""
    return [
        *lines,
        f"{summary}{ending}. The output of the runs is in {experiment.folder}.",
        f"repeat: {repeat_command}",
    ]


BROKEN = 1
_SIGNAL_BASE = 128
_SEEDS = 10**6
_FOLDER, _WITHIN_SECONDS = Path("chaos-run"), 600.0
_EXAMPLE = "resilient chaos run kills -- train train.py --output-dir {folder}"

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Inject faults into a training of your own, and check which guarantees hold.",
)

Plan = Annotated[str, typer.Argument(metavar="PLAN", help="Name of a plan, or a .toml file.")]
Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- train ...",
        help="Command, without `resilient`; {folder} in it is the folder of each run, {host} the "
        "name of each host.",
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="Seed of the faults; drawn and printed if not given.")
]
Folder = Annotated[
    Path, typer.Option(help="Folder for both runs; results of an earlier experiment are removed.")
]
Within = Annotated[
    float, typer.Option(help="Seconds until the run must progress after a fault.", min=1)
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
    """Run a training without faults and then under the faults of PLAN, and compare the two runs.

    Exit code 0: every fault was injected and every guarantee was kept. 1: a guarantee was broken,
    or the run ended before a fault. A plan that this machine cannot run is rejected before the
    start. SIGTERM and Ctrl-C also end the training, with 143 or 130.

    Example: resilient chaos run kills -- train train.py --output-dir {folder}
    """
    words = tuple(command or ())
    if words[:1] != ("train",):
        raise UsageError("chaos run needs a training to inject faults into", hint=_EXAMPLE)
    faults = read_plan(plan)
    require_capabilities(
        faults, parse_train_options(words[1:]), look_at_machine(faults, hosts), hosts
    )
    seed = secrets.randbelow(_SEEDS) if seed is None else seed
    place_options = (
        *_option_unless_default("--hosts", hosts, 1),
        *_option_unless_default("--folder", folder, _FOLDER),
    )
    options = (
        *place_options,
        *_option_unless_default("--within", within, _WITHIN_SECONDS),
        "--seed",
        str(seed),
    )
    repeat_command = shlex.join(("resilient", "chaos", "run", plan, *options, "--", *words))
    if dry_run:
        show(
            build_plan_result(faults, draw_injections(faults, seed), seed, repeat_command, hosts),
            output_of(ctx),
        )
        return 0
    experiment = ChaosExperiment(faults, seed, words[1:], folder.resolve(), within, hosts)
    try:
        with obeying_orders():
            evidence = run_experiment(experiment, SystemClock(), say)
    except Terminated as order:
        say(
            f"ended by {order}: all its processes have ended, and both folders are kept; "
            f"{repeat_command}"
        )
        return _SIGNAL_BASE + order.number
    promises = evaluate_guarantees(evidence)
    is_kept = is_proven(evidence, promises)
    show(verdict(experiment, evidence, promises, repeat_command), output_of(ctx))
    return 0 if is_kept else BROKEN


def _option_unless_default(
    option: str, value: Path | float, default: Path | float
) -> tuple[str, ...]:
    """Return an option as the user must type it again; nothing if it has its default value."""
    value_text = f"{value:g}" if isinstance(value, float) else str(value)
    return () if value == default else (option, value_text)


@app.command("list")
def list_plans(ctx: typer.Context) -> None:
    """List the built-in plans, and show which of them this machine can run.

    Example: resilient chaos list
    """
    plans = shipped()
    reasons = {
        plan.name: why_not(plan, look_at_machine(plan), hosts=2 if plan.needs_hosts else 1)
        for plan in plans
    }
    show(build_list_result(plans, reasons), output_of(ctx))
