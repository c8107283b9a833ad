"""``resilient slurm``: a run as a SLURM job that is requeued until the training is complete."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.elastic.preemption.notice import LEAD_SECONDS
from resilient.errors import EXIT_CODES, ConfigError, DeadlineExceeded, NotRunning, UsageError
from resilient_cli import preemption_budget
from resilient_cli.app import parse_train_options
from resilient_cli.launch_checks import find_secret_variable, has_credentials
from resilient_cli.output import CommandResult, KeyValues, Table, show
from resilient_cli.repositories import output_of
from resilient_cli.slurm import client
from resilient_cli.slurm.script import (
    SlurmJob,
    SlurmPlacement,
    check_command,
    check_time,
    check_words,
    parse_environment,
    parse_nodes,
    render,
)
from resilient_cli.views.text import NONE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient_cli.slurm.client import JobState

_BRIEF = {code.number: code.brief for code in EXIT_CODES}


def build_render_result(job: SlurmJob, script: str) -> CommandResult:
    """Build the answer of ``slurm render``: the script and its time limits."""
    document = {**_times(job), "script": script}
    return CommandResult(
        "slurm.render", "script", document, (script.rstrip("\n"),), (script,), is_verbatim=True
    )


def build_submit_result(job: SlurmJob, number: str, log: str) -> CommandResult:
    """Build the answer of ``slurm submit``: the job number and the next commands."""
    document = {**_times(job), "job": number, "log": log}
    pairs = (
        ("job", number),
        ("signal", f"{job.lead_seconds} s before the time limit; --grace {job.grace_seconds:g}"),
        *((("log", log),) if log else ()),
    )
    blocks = (
        KeyValues(pairs),
        f"next: resilient slurm status {number}",
        f"stop: scancel {number}; save and restart on other nodes: scontrol requeue {number}",
    )
    return CommandResult("slurm.submit", "submission", document, blocks, (number,))


def states(jobs: Sequence[JobState]) -> CommandResult:
    """Build the answer of ``slurm status``: the states of a job and of its tasks."""
    rows = tuple(
        (
            job.job,
            job.name,
            job.state,
            str(job.starts),
            job.nodes or NONE,
            job.reason or NONE,
            _exit(job.exit_code),
        )
        for job in jobs
    )
    columns = ("JOB", "NAME", "STATE", "REQUEUED", "NODES", "REASON", "EXIT")
    logs = tuple(f"log: {log}" for log in sorted({job.log for job in jobs}))
    document = {"jobs": [asdict(job) for job in jobs]}
    ids = tuple(job.job for job in jobs)
    return CommandResult("slurm.status", "jobs", document, (Table(columns, rows), *logs), ids)


def _times(job: SlurmJob) -> dict[str, Any]:
    return {
        "name": job.name,
        "nodes_min": job.nodes_min,
        "nodes_max": job.nodes_max,
        "grace_seconds": job.grace_seconds,
        "lead_seconds": job.lead_seconds,
    }


def _exit(code: int | None) -> str:
    if code is None:
        return NONE
    return f"{code} {_BRIEF[code]}" if code in _BRIEF else str(code)


_EXAMPLE = "resilient slurm submit --time 4:00:00 -- train --repo s3://lab/run train.py"
_DEFAULT_GRACE_SECONDS = 25.0
_ENDED_BADLY = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run a training as a SLURM job that is requeued until the training is complete.",
)


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- train ...",
        help="Command, without `resilient`; {task} in it is the task number of an array.",
    ),
]
Name = Annotated[str, _option("Name of the job.")]
Nodes = Annotated[str, _option("Nodes: N, or MIN-MAX for the free nodes.")]
Time = Annotated[
    str, _option("Time limit of each start: 90, 4:00:00, 1-12; by default that of the partition.")
]
Partition = Annotated[str, _option("Partition.")]
Account = Annotated[str, _option("Account.")]
Qos = Annotated[str, _option("Quality of service.")]
Gpus = Annotated[str, _option("GPUs of each node: N or TYPE:N.")]
Cpus = Annotated[int, _option("Processors of each node; by default SLURM decides.", min=0)]
Memory = Annotated[str, _option("Memory of each node: 64G.")]
Array = Annotated[str, _option("Tasks of an array: 0-7, 1,3,5 or 0-15%4.")]
Logs = Annotated[str, _option("Folder for logs and failure records, visible to all nodes.")]
Env = Annotated[
    list[str] | None,
    _option("NAME=VALUE to set, or NAME to require from the environment of sbatch.", "--env"),
]
Setup = Annotated[
    list[str] | None,
    _option("Line to run before the training: source .venv/bin/activate.", "--setup"),
]
MaxFailures = Annotated[
    int, _option("Failed starts until the job is not requeued; exit code 75 does not count.", min=1)
]
Events = Annotated[
    Path | None, _option("Event files of a run with measured save times: sets --grace.")
]
Notice = Annotated[
    float | None,
    _option(
        "Seconds between the signals of a preemption: GraceTime of the partition and KillWait.",
        min=0,
    ),
]
DryRun = Annotated[bool, _option("Print the script and submit nothing.", "--dry-run")]


@app.command("render")
def render_script(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
    ctx: typer.Context,
    command: Command = None,
    *,
    name: Name = "train",
    nodes: Nodes = "1",
    time: Time = "",
    partition: Partition = "",
    account: Account = "",
    qos: Qos = "",
    gpus: Gpus = "",
    cpus: Cpus = 0,
    memory: Memory = "",
    array: Array = "",
    logs: Logs = ".",
    env: Env = None,
    setup: Setup = None,
    max_failures: MaxFailures = 5,
    events: Events = None,
    notice: Notice = None,
) -> int:
    """Write the batch script of a training to stdout.

    The job is requeued after exit code 75. The job stops after an exit code that another start
    would repeat. After other codes the job is requeued up to --max-failures times. The script holds
    no secrets.

    Example: resilient slurm render --nodes 1-4 -- train --repo s3://lab/run train.py > job.sh
    """
    place = SlurmPlacement(partition, account, qos, gpus, cpus, memory, array)
    options = _GivenOptions(
        name, nodes, time, logs, tuple(env or ()), tuple(setup or ()), max_failures
    )
    job = _job(tuple(command or ()), options, place, events, notice)
    show(build_render_result(job, render(job)), output_of(ctx))
    return 0


@app.command("submit")
def submit_script(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
    ctx: typer.Context,
    command: Command = None,
    *,
    name: Name = "train",
    nodes: Nodes = "1",
    time: Time = "",
    partition: Partition = "",
    account: Account = "",
    qos: Qos = "",
    gpus: Gpus = "",
    cpus: Cpus = 0,
    memory: Memory = "",
    array: Array = "",
    logs: Logs = ".",
    env: Env = None,
    setup: Setup = None,
    max_failures: MaxFailures = 5,
    events: Events = None,
    notice: Notice = None,
    dry_run: DryRun = False,
) -> int:
    """Create the log folder, and submit the script of `slurm render` with sbatch.

    Example: resilient slurm submit --time 4:00:00 -- train --repo s3://lab/run train.py
    """
    place = SlurmPlacement(partition, account, qos, gpus, cpus, memory, array)
    options = _GivenOptions(
        name, nodes, time, logs, tuple(env or ()), tuple(setup or ()), max_failures
    )
    job = _job(tuple(command or ()), options, place, events, notice)
    if dry_run:
        show(build_render_result(job, render(job)), output_of(ctx))
        return 0
    try:
        # Without this folder SLURM writes no log, and reports no error.
        Path(logs).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--logs {logs}: cannot be made: {error.strerror}") from error
    number = client.submit(render(job))
    show(build_submit_result(job, number, _log_of(number)), output_of(ctx))
    return 0


def _log_of(number: str) -> str:
    """Return the log path of a submitted job; empty if SLURM does not report it now."""
    try:
        return next(iter(client.query_jobs(number))).log
    except (ConfigError, DeadlineExceeded, NotRunning):
        return ""


@app.command("status")
def status(
    ctx: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Number of the job: 123 or 123_4.")],
) -> int:
    """Show the state of a SLURM job, its number of requeues, and the meaning of its exit code.

    Exit code 1: the job or one of its tasks failed. 66: SLURM does not know the job. SLURM forgets
    a job some minutes after its end (MinJobAge); `sacct` may still know the job.

    Example: resilient slurm status 123
    """
    jobs = client.query_jobs(client.check_job(job))
    show(states(jobs), output_of(ctx))
    return 1 if any(each_job.state in _ENDED_BADLY for each_job in jobs) else 0


@dataclass(frozen=True, slots=True)
class _GivenOptions:
    """Command-line options, unchanged."""

    name: str
    nodes: str
    time: str
    logs: str
    env: tuple[str, ...]
    setup: tuple[str, ...]
    failures_max: int


def _job(
    words: tuple[str, ...],
    options: _GivenOptions,
    place: SlurmPlacement,
    events: Path | None,
    notice: float | None,
) -> SlurmJob:
    """Check all options, and return the job that they describe."""
    if words[:1] != ("train",) or not words[1:]:
        raise UsageError("slurm needs a training to run", hint=_EXAMPLE)
    check_words(
        {
            "--name": options.name,
            "--partition": place.partition,
            "--account": place.account,
            "--qos": place.qos,
            "--gpus": place.gpus,
            "--memory": place.memory,
            "--array": place.array,
            "--logs": options.logs,
        }
    )
    nodes_min, nodes_max = parse_nodes(options.nodes)
    train_options = parse_train_options(words[1:])
    check_command(words[1:], set(train_options), place.array)
    if any("\n" in line for line in options.setup):
        raise ConfigError("--setup takes one line; repeat the option for more lines")
    if any(map(has_credentials, options.setup)):
        raise ConfigError(
            "--setup has a URL with a user, a password or a signature, and the script would show "
            "it; --env NAME takes a variable from the environment of sbatch",
            hint="export NAME=...; resilient slurm submit --env NAME -- train ...",
        )
    if variable := next(filter(None, map(find_secret_variable, options.setup)), ""):
        raise ConfigError(
            f"--setup: the value of {variable} would be visible in the script and in SLURM's "
            "records",
            hint=f"export {variable}=...; resilient slurm submit --env {variable} -- train ...",
        )
    grace = _grace_seconds(train_options.get("grace"), events, notice)
    lead_seconds = math.ceil(grace + preemption_budget.MARGIN_SECONDS)
    # The agent also knows the end of the job, and leaves LEAD_SECONDS before it.
    agent_lead_seconds = 0.0 if train_options.get("notice") == "off" else LEAD_SECONDS
    check_time(options.time, max(lead_seconds, math.ceil(agent_lead_seconds)))
    environment = parse_environment(options.env)
    return SlurmJob(
        *(options.name, words[1:], nodes_min, nodes_max, options.time, place, options.logs, grace),
        has_grace_option="grace" in train_options,
        lead_seconds=lead_seconds,
        environment=environment,
        setup=options.setup,
        failures_max=options.failures_max,
    )


def _grace_seconds(
    option_seconds: float | None, events: Path | None, notice: float | None
) -> float:
    """Return ``--grace`` as given or from measured saves; check it against the notice.

    Raises:
        ConfigError: A save does not fit --grace, or --grace does not fit the notice.
    """
    save_times = preemption_budget.read_events(events) if events else preemption_budget.SaveTimes()
    if events and not save_times.saves:
        raise ConfigError(f"--events {events}: no save is recorded there")
    grace = (
        max(_DEFAULT_GRACE_SECONDS, preemption_budget.needed_grace(save_times))
        if option_seconds is None
        else option_seconds
    )
    # The batch script always leaves more than --grace before the time limit.
    preemption_budget.require(preemption_budget.budget_of(save_times, grace, notice, None))
    return grace
