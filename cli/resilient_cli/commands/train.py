"""``resilient train``: launch, supervision and resume of a training script."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.signing import read_signing
from resilient.distributed.launch_env import (
    ADAPTER,
    STORAGE_OPTIONS,
    STRICT_RESUME,
    TAKE_OVER,
    parse_storage_options,
)
from resilient.environment import read_flag
from resilient.errors import ConfigError, Preempted, ScriptNotFound, UsageError
from resilient.goodput.save_planning import parse_every
from resilient.redaction import shell_quote
from resilient_cli import process_exit
from resilient_cli.durations import parse_limit
from resilient_cli.output import CommandResult, KeyValues, Table, show

if TYPE_CHECKING:
    from resilient.elastic.launcher import LaunchPlan, TrainOptions


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, **more)


Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="Script, or module with -m.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ARGS]...", help="Arguments of the script, passed unchanged."),
]
Module = Annotated[bool, _option("SCRIPT is the name of a module.", "--module", "-m")]
Repo = Annotated[str, _option("Checkpoint repository.", "--repo", "-r", envvar="RESILIENT_REPO")]
Resume = Annotated[str, _option("auto, never, a checkpoint, or a folder saved by Transformers.")]
Nproc = Annotated[str, _option("Workers on this host: a number, cpu, gpu or auto.")]
MaxRestarts = Annotated[
    int,
    _option("Restarts after failures within --restart-window; preemptions do not count.", min=0),
]
RestartWindow = Annotated[
    float, _option("Seconds until a failure no longer counts; 0: failures always count.", min=0)
]
MaxPreemptions = Annotated[
    str, _option("Preemptions of the run, over all its launches: a number or unlimited.")
]
MaxNoProgress = Annotated[
    int,
    _option(
        "Failed attempts in a row without a new checkpoint until the run ends; 0: no limit.", min=0
    ),
]
MaxHostFailures = Annotated[
    int, _option("Failures of this host until the run excludes it; 0: no limit.", min=0)
]
Grace = Annotated[
    float, _option("Seconds from SIGTERM to SIGKILL.", "--grace", "--shutdown-timeout", min=0)
]
SingleWriter = Annotated[
    bool, _option("Promise: no two jobs write to the repository at once.", "--single-writer")
]
TakeOver = Annotated[
    bool,
    _option(
        "Fence a live process that writes to the repository; that process ends with 80.",
        "--take-over",
        envvar=TAKE_OVER,
    ),
]
RequireSignature = Annotated[
    bool,
    _option(
        "Resume only from checkpoints signed with the key of RESILIENT_SIGNING_KEY or "
        "RESILIENT_SIGNING_KEY_FILE. RESILIENT_REQUIRE_SIGNATURE has the same effect.",
        "--require-signature",
    ),
]
StrictResume = Annotated[
    bool,
    _option(
        "Refuse to resume a checkpoint that lost a part of its state; otherwise the loss is a "
        "warning. RESILIENT_STRICT_RESUME has the same effect.",
        "--strict-resume",
    ),
]
HostBytesMax = Annotated[
    str,
    _option(
        "Shared memory of this host for staged checkpoints: a size such as 8GiB; auto: what the "
        "machine has free; none: stage in the trainers, without a saver daemon."
    ),
]
StorageOptions = Annotated[
    str,
    _option(
        "Endpoint, region, credentials as JSON; set secrets in the environment, where `ps` "
        "does not show them.",
        "--storage-options",
        envvar=STORAGE_OPTIONS,
        show_default=False,
    ),
]
Events = Annotated[str, _option("Folder for event files.")]
LogDir = Annotated[
    str,
    _option(
        "Also keep the output of ranks here, by attempt and rank, for `resilient logs`, which "
        "finds RUN/logs by the name of the run.",
        "--log-dir",
        envvar="RESILIENT_LOG_DIR",
    ),
]
Notice = Annotated[
    str,
    _option(
        "Source of preemption notices: auto (detect this machine), off, or a comma-separated list "
        "of aws, gcp, azure, slurm, file:PATH, http:PORT, http://URL.",
        "--notice",
        envvar="RESILIENT_NOTICE",
    ),
]
Every = Annotated[
    str,
    _option(
        "Save interval: 500steps, 30s, 5m or auto (from the cost of saves and the failure "
        "rate); by default the script decides.",
        "--every",
        envvar="RESILIENT_EVERY",
    ),
]
UntilStep = Annotated[
    int | None,
    _option(
        "Train to this step, save, and exit with 0. A Trainer keeps the schedule of the whole "
        "run, and the same command without the option continues.",
        "--until-step",
        metavar="N",
        min=1,
        show_default=False,
    ),
]
MetricsPort = Annotated[
    str,
    _option("Serve /metrics and /healthz at this port; auto: a free port, 0: no server."),
]
MetricsHost = Annotated[str, _option("Address of the metrics server; clients need no password.")]
MetricsFile = Annotated[
    str, _option("Also write metrics to this file, for node_exporter's textfile collector.")
]
MetricsInterval = Annotated[
    float, _option("Seconds between two writes of the metrics file.", min=1)
]
Adapter = Annotated[
    str,
    _option(
        "Make an unchanged script of another trainer save to the repository and resume: "
        "transformers (also TRL). Without --repo it is OUTPUT_DIR/checkpoints.",
        "--adapter",
        envvar=ADAPTER,
        show_default=False,
    ),
]
DryRun = Annotated[bool, _option("Print the plan and do nothing.", "--dry-run")]
NoPython = Annotated[bool, _option("SCRIPT is a program, and is run directly.", "--no-python")]
RequeueExitCode = Annotated[
    int,
    _option(
        "Exit with this code instead of 75: 99 for Grid Engine, 85 for HTCondor.",
        "--requeue-exit-code",
        min=1,
        max=255,
    ),
]
Warm = Annotated[
    bool,
    _option(
        "Fork the workers of later attempts from a process that has already imported their "
        "modules; otherwise each worker imports them itself.",
        "--warm/--no-warm",
    ),
]
Interval = Annotated[
    float, _option("Seconds between two checks for nodes that want to join.", min=0.01)
]
HangDeadline = Annotated[
    str,
    _option(
        "Seconds a step may take before it counts as hung: auto (learned from this run), off, or "
        "a number."
    ),
]
HangFloor = Annotated[float, _option("Minimum of a learned deadline, in seconds.", min=0.1)]
HangPatience = Annotated[
    float,
    _option(
        "Deadline in seconds for everything but steps: the first step, loading, evaluation, start "
        "and end.",
        min=0.1,
    ),
]
Nnodes = Annotated[str, _option("Nodes: N or MIN:MAX.")]
Standalone = Annotated[
    bool, _option("Run one node without a rendezvous; the default for one node.", "--standalone")
]
Backend = Annotated[str, _option("Rendezvous: c10d, static, or another backend of torch.")]
Endpoint = Annotated[str, _option("Rendezvous endpoint: HOST:PORT.")]
RunId = Annotated[str, _option("Name of the job, the same on every node.")]
Conf = Annotated[str, _option("More rendezvous settings: key=value,key=value.")]
NodeRank = Annotated[int, _option("This node's rank, for static.", min=0)]
MasterAddr = Annotated[str, _option("Address of node 0, for static.")]
MasterPort = Annotated[int, _option("Port of node 0, for static; 0 is 29500.", min=0, max=65535)]
LocalAddr = Annotated[str, _option("Address of this node for the other nodes.")]


def train(  # noqa: PLR0913 - one parameter per option; Typer reads the signature
    ctx: typer.Context,
    script: Script,
    arguments: Arguments = None,
    *,
    module: Module = False,
    no_python: NoPython = False,
    repo: Repo = "",
    resume: Resume = "auto",
    every: Every = "",
    until_step: UntilStep = None,
    nproc_per_node: Nproc = "1",
    max_restarts: MaxRestarts = 3,
    restart_window: RestartWindow = 3600.0,
    max_preemptions: MaxPreemptions = "unlimited",
    max_no_progress: MaxNoProgress = 3,
    max_host_failures: MaxHostFailures = 3,
    grace: Grace = 25.0,
    single_writer: SingleWriter = False,
    take_over: TakeOver = False,
    require_signature: RequireSignature = False,
    strict_resume: StrictResume = False,
    host_bytes_max: HostBytesMax = "auto",
    storage_options: StorageOptions = "",
    events: Events = "",
    log_dir: LogDir = "",
    notice: Notice = "auto",
    metrics_port: MetricsPort = "0",
    metrics_host: MetricsHost = "127.0.0.1",
    metrics_file: MetricsFile = "",
    metrics_interval: MetricsInterval = 15.0,
    requeue_exit_code: RequeueExitCode = Preempted.exit_code,
    dry_run: DryRun = False,
    warm: Warm = True,
    adapter: Adapter = "",
    monitor_interval: Interval = 0.1,
    hang_deadline: HangDeadline = "auto",
    hang_floor: HangFloor = 60.0,
    hang_patience: HangPatience = 1800.0,
    nnodes: Nnodes = "1",
    standalone: Standalone = False,
    rdzv_backend: Backend = "c10d",
    rdzv_endpoint: Endpoint = "",
    rdzv_id: RunId = "",
    rdzv_conf: Conf = "",
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = "127.0.0.1",
    master_port: MasterPort = 0,
    local_addr: LocalAddr = "",
) -> None:
    """Run SCRIPT on every worker, restart it after failures, and end with a code for the cause.

    Everything after SCRIPT belongs to the script. Exit code 75 means: preempted and saved, the
    same command resumes.
    """
    from resilient.elastic import launcher
    from resilient.elastic.hang_detection import parse_hang_rule
    from resilient.elastic.options import MetricsOptions, parse_port
    from resilient.elastic.restart_policy import FailureLimits
    from resilient.elastic.saver_daemon import parse_host_bytes

    _require_target(script, is_module=module, is_program=no_python)
    _set_worker_variables(_checked_adapter(adapter, is_program=no_python), take_over=take_over)
    # Read the key before anything starts, so that a missing or short key is reported here.
    signing = read_signing(os.environ, require_signature=require_signature)
    storage = parse_storage_options(storage_options, "the storage options")
    if every:
        parse_every(every, "--every")
    hang = parse_hang_rule(hang_deadline, hang_floor, hang_patience)
    preemptions = parse_limit(max_preemptions, "--max-preemptions")
    limits = FailureLimits(
        max_restarts, restart_window, preemptions, max_no_progress, max_host_failures
    )
    worker_options = launcher.WorkerOptions(
        repo, _checked_resume(resume), events, single_writer, storage_options=storage
    )
    rendezvous_options = (nnodes, rdzv_backend, rdzv_endpoint, rdzv_id, rdzv_conf, standalone)
    node_options, port = (node_rank, master_addr, master_port, local_addr), parse_port(metrics_port)
    options = launcher.TrainOptions(
        target=script,
        arguments=tuple(arguments or ()),
        is_module=module,
        is_program=no_python,
        nproc_per_node=nproc_per_node,
        max_restarts=max_restarts,
        rendezvous=launcher.RendezvousOptions(*rendezvous_options, *node_options),
        patience=launcher.Timeouts(monitor_interval, grace, hang=hang, limits=limits),
        wishes=replace(
            worker_options,
            require_signature=signing.is_required,
            strict_resume=strict_resume or read_flag(os.environ, STRICT_RESUME),
            is_warm=warm,
            every=every,
            until_step=until_step or 0,
            log_dir=log_dir,
        ),
        host_bytes_max=parse_host_bytes(host_bytes_max),
        notice=notice,
        metrics=MetricsOptions(port, metrics_host, metrics_file, metrics_interval),
    )
    if dry_run:
        _show_plan(ctx, options)
        return
    code = launcher.run_agent(options, process_exit.pending_signals)
    raise typer.Exit(requeue_exit_code if code == Preempted.exit_code else code)


def _show_plan(ctx: typer.Context, options: TrainOptions) -> None:
    """Print what the agent would do, and start nothing."""
    from resilient.elastic import launcher
    from resilient.elastic.preemption.factory import names_of_sources

    process_exit.stop_listening()
    answer = _answer(launcher.resolve(options), options, names_of_sources(options.notice))
    show(answer, ctx.find_root().obj)


def _checked_resume(resume: str) -> str:
    """Return ``--resume``; the empty value of an unset variable is refused.

    Raises:
        ConfigError: The value is empty.
    """
    if not resume.strip():
        raise ConfigError(
            "--resume has an empty value; nothing was started",
            hint="give --resume auto for the newest checkpoint, or --resume never to start at 0",
        )
    return resume


def _set_worker_variables(adapter: str, *, take_over: bool) -> None:
    """Set the variables of options that workers inherit."""
    os.environ.update({TAKE_OVER: "1"} if take_over else {})
    os.environ.update({ADAPTER: adapter} if adapter else {})


def _checked_adapter(adapter: str, *, is_program: bool) -> str:
    """Return ``--adapter`` if it can be used.

    Raises:
        ConfigError: The adapter is unknown, or the package of its trainer is not installed.
        UsageError: The target is no Python script.
    """
    name = adapter.strip()
    if not name:
        return ""
    if name != "transformers":
        raise ConfigError(
            f"--adapter {shell_quote(name)} is unknown; nothing was started",
            hint="give --adapter transformers, or omit it",
        )
    if is_program:
        raise UsageError(
            "--adapter contradicts --no-python: it needs a Python script",
            hint="resilient train --adapter transformers SCRIPT",
        )
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            "--adapter transformers needs Transformers, which is not installed",
            hint="pip install 'resilient-train[hf]'",
        )
    return name


def _require_target(script: str, *, is_module: bool, is_program: bool) -> None:
    """Refuse a script that cannot be run, before anything starts.

    Raises:
        ScriptNotFound: The script or program does not exist.
        UsageError: The target is both a module and a program.
    """
    if is_module and is_program:
        raise UsageError("-m contradicts --no-python", hint="resilient train --help")
    if is_program and shutil.which(script) is None:
        raise ScriptNotFound(f"no program `{script}` in PATH", hint=f"command -v {script}")
    if not is_module and not is_program and not Path(script).is_file():
        raise ScriptNotFound(
            f"no script `{script}`", hint=f"resilient train -m {shell_quote(script)}"
        )


def _answer(plan: LaunchPlan, options: TrainOptions, notices: list[str]) -> CommandResult:
    """Build the answer of ``--dry-run``: command, rendezvous, limits and reactions to failures."""
    from resilient.elastic.restart_policy import reaction_table

    command = shlex.join((sys.executable, *plan.command))
    repository = options.wishes.repo
    limits, rows, interval = options.patience.limits, reaction_table(), options.wishes.every
    document = {
        "command": command,
        "workers_per_node": plan.nproc,
        "nodes_min": plan.nodes_min,
        "nodes_max": plan.nodes_max,
        "rendezvous": {
            "backend": plan.backend,
            "endpoint": plan.endpoint,
            "run_id": plan.run_id,
        },
        "repository": repository or None,
        "every": interval or None,
        "until_step": options.wishes.until_step or None,
        "limits": asdict(limits),
        "hang": asdict(options.patience.hang),
        "notices": notices,
        "grace_seconds": options.patience.grace_seconds,
        "reactions": [asdict(row) for row in rows],
    }
    preemptions = "any number of" if limits.preemptions_max is None else str(limits.preemptions_max)
    window = f"in {limits.window_seconds:g} s" if limits.window_seconds else "in all"
    pairs = (
        ("command", command),
        ("workers", f"{plan.nproc} per node"),
        ("nodes", f"{plan.nodes_min} to {plan.nodes_max}"),
        ("rendezvous", f"{plan.backend} at {plan.endpoint}, run {plan.run_id}"),
        ("repository", repository or "decided by the script"),
        (
            "saves",
            f"every {options.wishes.every}" if options.wishes.every else "decided by the script",
        ),
        *((("ends", f"after step {step}"),) if (step := options.wishes.until_step) else ()),
        ("budget", f"{limits.restarts_max} restarts {window}, {preemptions} preemptions"),
        ("hang", options.patience.hang.describe()),
        (
            "notices",
            f"{', '.join(notices) or 'none'}; {options.patience.grace_seconds:g} s to exit",
        ),
    )
    cells = tuple((row.ended, row.how, row.follows) for row in rows)
    table = Table(("ATTEMPT", "HOW IT ENDED", "WHAT FOLLOWS"), cells)
    return CommandResult(
        "train", "plan", document, (KeyValues(pairs), "", table), ids=(plan.run_id,)
    )
