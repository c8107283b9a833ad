"""Checked specification of a SLURM job, and its batch script.

The script depends only on the specification, so that tests can compare the script.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from resilient.errors import EXIT_CODE_FILE, PERMANENT, ConfigError
from resilient_cli.launch_checks import (
    RENDEZVOUS_OPTIONS,
    has_credentials,
    is_secret,
    is_variable,
    refuse_system_options,
    secret_option,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

TASK = "{task}"
"""Placeholder in a word of the command for the number of an array's task."""

_WORDS = {
    "--name": (r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", "letters, digits, dots, dashes"),
    "--partition": (r"[A-Za-z0-9_.,-]+", "a partition, or several, separated by commas"),
    "--account": (r"[A-Za-z0-9_.@-]+", "an account"),
    "--qos": (r"[A-Za-z0-9_.-]+", "a quality of service"),
    "--gpus": (r"(?:[A-Za-z0-9_.-]+:)?[1-9][0-9]*", "N or TYPE:N, for each node"),
    "--memory": (r"[1-9][0-9]*[KMGT]?", "a size such as 64G, for each node"),
    "--array": (
        (
            r"[0-9]+(?:-[0-9]+(?::[1-9][0-9]*)?)?(?:,[0-9]+(?:-[0-9]+(?::[1-9][0-9]*)?)?)*"
            r"(?:%[1-9][0-9]*)?"
        ),
        "as for sbatch: 0-7, 1,3,5 or 0-15%4",
    ),
    "--logs": (r"[A-Za-z0-9_./-]+", "a folder without blanks or %"),
}
_NODES = re.compile(r"([1-9][0-9]*)(?:[-:]([1-9][0-9]*))?")
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d{1,2}))?(?::(\d{1,2}))?")
_SECONDS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
EARLY_SECONDS = 60
"""SLURM may send the signal before the time limit this much earlier than requested."""


@dataclass(frozen=True, slots=True)
class SlurmPlacement:
    """Machines of a job and their owner; an empty value leaves the choice to SLURM."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    gpus: str = ""
    cpus: int = 0
    memory: str = ""
    array: str = ""


@dataclass(frozen=True, slots=True)
class SlurmJob:
    """Checked specification of a run as a job of SLURM.

    Attributes:
        name: Name of the job and of its log.
        command: Words after ``resilient train``.
        nodes_min: Fewest nodes on which SLURM may start the job.
        nodes_max: Most nodes.
        time: Time limit, as SLURM writes it; empty for the limit of the partition.
        place: Machines of the job.
        logs: Folder of its log and of its record of failures.
        grace_seconds: ``--grace`` of ``resilient train``.
        has_grace_option: Whether the command contains ``--grace`` itself.
        lead_seconds: Seconds before the time limit at which SLURM signals.
        environment: Names and values of variables; None takes the value of sbatch's caller.
        setup: First lines of the batch script.
        failures_max: Number of failed starts after which the job is not requeued.
    """

    name: str
    command: tuple[str, ...]
    nodes_min: int = 1
    nodes_max: int = 1
    time: str = ""
    place: SlurmPlacement = SlurmPlacement()
    logs: str = "."
    grace_seconds: float = 25.0
    has_grace_option: bool = False
    lead_seconds: int = 30
    environment: tuple[tuple[str, str | None], ...] = ()
    setup: tuple[str, ...] = ()
    failures_max: int = 5


def check_words(value_by_option: Mapping[str, str]) -> None:
    """Check options against the syntax of a ``#SBATCH`` line.

    Raises:
        ConfigError: An option has other characters, which could end the line or the option.
    """
    for option, text in value_by_option.items():
        pattern, syntax = _WORDS[option]
        if text and not re.fullmatch(pattern, text):
            raise ConfigError(f"{option} {text!r} is not {syntax}")


def parse_nodes(text: str) -> tuple[int, int]:
    """Parse ``N``, ``MIN-MAX`` or ``MIN:MAX``, and return the fewest and the most nodes.

    Raises:
        ConfigError: The text has none of these forms, or MAX is less than MIN.
    """
    match = _NODES.fullmatch(text)
    if not match:
        raise ConfigError(f"--nodes {text!r} is not N or MIN-MAX")
    nodes_min = int(match[1])
    nodes_max = int(match[2] or nodes_min)
    if nodes_max < nodes_min:
        raise ConfigError(
            f"--nodes {text!r}: at most {nodes_max} is less than at least {nodes_min}"
        )
    return nodes_min, nodes_max


def parse_time(text: str) -> int:
    """Parse a time as SLURM writes it, ``90``, ``4:00:00`` or ``1-12``, and return its seconds.

    Raises:
        ConfigError: The text is no such time, or 0.
    """
    match = _TIME.fullmatch(text)
    if not match:
        raise ConfigError(f"--time {text!r} is not MINUTES, HOURS:MINUTES:SECONDS or DAYS-HOURS")
    days, *number_texts = match.groups()
    numbers = [int(number_text) for number_text in number_texts if number_text is not None]
    names = ["hours", "minutes", "seconds"]
    if days is None and len(numbers) < len(names):
        names = names[1:]
    seconds = (
        sum(number * _SECONDS[name] for number, name in zip(numbers, names, strict=False))
        + int(days or 0) * _SECONDS["days"]
    )
    if not seconds:
        raise ConfigError(f"--time {text!r} is not a time; omit it for the partition's limit")
    return seconds


def check_time(text: str, lead_seconds: int) -> None:
    """Check that a time limit leaves room for training before SLURM signals its end.

    Raises:
        ConfigError: The run would exit at once, and SLURM would requeue it repeatedly.
    """
    if text and parse_time(text) <= lead_seconds + EARLY_SECONDS:
        raise ConfigError(
            f"--time {text}: the run exits {lead_seconds} s before its end, and SLURM may send "
            f"the signal {EARLY_SECONDS} s earlier, so no time is left to train",
            hint=f"resilient slurm submit --time {(lead_seconds + EARLY_SECONDS) // 60 + 1} ...",
        )


def parse_environment(texts: tuple[str, ...]) -> tuple[tuple[str, str | None], ...]:
    """Parse ``NAME=VALUE`` and ``NAME`` entries; a script is no place for secrets.

    Raises:
        ConfigError: A name is invalid or repeated, or a value is secret or has several lines.
    """
    variables: dict[str, str | None] = {}
    for text in texts:
        name, has_value, value = text.partition("=")
        if not is_variable(name):
            raise ConfigError(
                f"--env {name!r} is not the name of a variable: use NAME=VALUE, or NAME"
            )
        if name in variables:
            raise ConfigError(f"--env {name} is given twice")
        if has_value and is_secret(name, value):
            raise ConfigError(
                f"--env {name}: its value would be visible in the script and in SLURM's records",
                hint=f"export {name}=...; resilient slurm submit --env {name} -- train ...",
            )
        if "\0" in value or "\n" in value:
            raise ConfigError(f"--env {name}: its value has more than one line")
        variables[name] = value if has_value else None
    return tuple(variables.items())


def check_command(command: tuple[str, ...], option_names: set[str], array: str) -> None:
    """Refuse options that the script sets, secrets, and array tasks that share a repository.

    Args:
        command: Words after ``train``.
        option_names: Names of the options of ``train`` among them.
        array: Value of ``--array``.

    Raises:
        ConfigError: The command is refused; the message shows an alternative.
    """
    refuse_system_options(option_names, _REFUSED_OPTIONS)
    for word in command:
        if has_credentials(word):
            raise ConfigError(
                "a URL of the command has a user, a password or a signature, and the script would "
                "show it; export RESILIENT_STORAGE_OPTIONS before sbatch instead",
                hint="export RESILIENT_STORAGE_OPTIONS=...",
            )
        if "\n" in word or "\0" in word:
            raise ConfigError(f"{word!r} has more than one line")
    if option := secret_option(command):
        raise ConfigError(
            f"{option}: its value would be visible in the script and in SLURM's records. Read a "
            "variable in the script; --env NAME takes it from the environment of sbatch",
            hint="export NAME=...; resilient slurm submit --env NAME -- train ...",
        )
    has_task = any(TASK in word for word in command)
    if array and not has_task:
        raise ConfigError(
            "--array: all its tasks would write to one repository",
            hint=f"resilient slurm submit --array 0-3 -- train --repo s3://bucket/run-{TASK} ...",
        )
    if has_task and not array:
        raise ConfigError(f"{TASK} is the number of an array task, and --array is missing")


_RENDEZVOUS_REASON = "the batch script sets the rendezvous; use `slurm --nodes MIN-MAX`"
_REFUSED_OPTIONS = {
    **dict.fromkeys(RENDEZVOUS_OPTIONS, _RENDEZVOUS_REASON),
    "storage_options": "the script would show them; export RESILIENT_STORAGE_OPTIONS instead",
    "dry_run": "use the option of `slurm submit`",
    "requeue_exit_code": "the script requeues the job itself after exit code 75",
}

_REQUEUE = 75

# Whole lines or nothing replace a placeholder alone on its line. Words replace the others.
_PLACEHOLDER = re.compile(r"^@\{(\w+)\}\n|@\{(\w+)\}", re.MULTILINE)

_RENDEZVOUS_LINES = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
"""
_EXIT_CODES_LINE = 'codes=$(mktemp -u "${TMPDIR:-/tmp}/resilient-$run-XXXXXX")\n'
_CODE_OF_FIRST_LINES = """\
[ ! -s "$codes.0" ] || read -r code < "$codes.0"
rm -f "$codes".*
"""


def render(job: SlurmJob) -> str:
    """Return the batch script of a job, which ends with a line break."""
    values = {
        "directives": "".join(f"#SBATCH {option}\n" for option in _directives(job)),
        "variables": "".join(_variable(name, value) for name, value in job.environment),
        "setup": "".join(f"{line}\n" for line in job.setup),
        **_agents(job),
        "requeue_code": str(_REQUEUE),
        "permanent_codes": "|".join(str(code) for code in PERMANENT),
        "failures": f"{job.logs.rstrip('/')}/$SLURM_JOB_NAME-$job.failures",
        "failures_max": str(job.failures_max),
    }
    template = files("resilient_cli") / "slurm/batch_template.sh"
    return _PLACEHOLDER.sub(
        lambda match: values[match[1] or match[2]], template.read_text(encoding="utf-8")
    )


def _directives(job: SlurmJob) -> list[str]:
    place = job.place
    is_elastic = job.nodes_min < job.nodes_max
    nodes = f"{job.nodes_min}-{job.nodes_max}" if is_elastic else f"{job.nodes_min}"
    log = "%x-%A_%a.log" if place.array else "%x-%j.log"
    value_by_option = {
        "job-name": job.name,
        "array": place.array,
        "partition": place.partition,
        "account": place.account,
        "qos": place.qos,
        "nodes": nodes,
        # With a node range, this option would make SLURM allocate as few nodes as possible.
        "ntasks-per-node": "" if is_elastic else "1",
        "gpus-per-node": place.gpus,
        "cpus-per-task": str(place.cpus or ""),
        "mem": place.memory,
        "time": job.time,
        "signal": f"B:USR1@{job.lead_seconds}",
        "output": f"{job.logs.rstrip('/') or '/'}/{log}",
        "open-mode": "append",
    }
    directives = [f"--{name}={value}" for name, value in value_by_option.items() if value]
    # A run of elastic size continues with fewer nodes than it started with.
    return [*directives, "--requeue", *(["--no-kill"] if is_elastic else [])]


def _variable(name: str, value: str | None) -> str:
    if value is not None:
        return f"export {name}={shlex.quote(value)}\n"
    return (
        f'[ -n "${{{name}:-}}" ] || {{ echo "slurm: {name} is not set: export it before sbatch" '
        ">&2; exit 78; }\n"
    )


def _agents(job: SlurmJob) -> dict[str, str]:
    """Return the values for the lines that start one agent per node in the background."""
    is_elastic = job.nodes_min < job.nodes_max
    # The job's --no-kill keeps its nodes. Without --no-kill of the step, SLURM kills all agents.
    srun_options = [f"--cpus-per-task={job.place.cpus}"] if job.place.cpus else []
    srun_options += ["--no-kill", "--ntasks-per-node=1"] if is_elastic else []
    agent_options = [] if job.has_grace_option else [f"--grace {job.grace_seconds:g}"]
    if job.nodes_max > 1:
        # The agents must not wait for nodes that SLURM did not allocate.
        agent_options.append(f'--nnodes "{job.nodes_min}:$SLURM_JOB_NUM_NODES"')
        agent_options.append('--rdzv-endpoint "$head:$port"')
    agent_options.append('--rdzv-id "$run"')
    program = "resilient train"
    if is_elastic:
        # srun reports the code of a node that died; the first agent writes the code of the run.
        export = f'export {EXIT_CODE_FILE}="$0.$SLURM_PROCID"'
        program = f"""bash -c '{export}; exec resilient train "$@"' "$codes\""""
    return {
        "rendezvous": (_RENDEZVOUS_LINES if job.nodes_max > 1 else "")
        + (_EXIT_CODES_LINE if is_elastic else ""),
        "srun_options": "".join(f"{option} " for option in srun_options),
        "program": program,
        "agent_options": " ".join(agent_options),
        "command": " ".join(map(_quote, job.command)),
        "code_of_first": _CODE_OF_FIRST_LINES if is_elastic else "",
    }


def _quote(word: str) -> str:
    """Return a word for the shell; the placeholder becomes the number of the task."""
    if TASK not in word:
        return shlex.quote(word)
    texts = [shlex.quote(piece) if piece else "" for piece in word.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(texts)
