"""A job to the text of its batch script; nothing else is looked at, so it can be held in tests."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from resilient.exit_codes import EXIT_CODE_FILE, PERMANENT
from resilient_cli.slurm.job import TASK

if TYPE_CHECKING:
    from resilient_cli.slurm.job import SlurmJob

_REQUEUE = 75

_HEAD = """\
set -u
# A task of an array has a number of its own. SLURM_JOB_ID of one of them is that of the whole
# array, which `scontrol requeue` would requeue.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
start="${SLURM_RESTART_COUNT:-0}"
run="$SLURM_JOB_NAME-$job-r$start"
"""

_SAY = """
say() { printf 'slurm: %s\\n' "$*" >&2; }

requeue() {
  # A job that was cancelled stays so; one that SLURM requeued or preempted starts by itself.
  state=$(scontrol show job -o "$job") || state="JobState=RUNNING"
  case "$state" in
    *JobState=RUNNING*|*Reason=TimeLimit*) ;;
    *) say "exit $code; SLURM has ended job $job already"; exit "$code" ;;
  esac
  say "exit $code: $1; job $job is requeued after start $start"
  scontrol requeue "$job" || { say "not requeued; by hand: scontrol requeue $job"; exit "$code"; }
  exit "$code"
}
"""

_WAIT = """
# SLURM signals this shell alone; srun passes the notice on to the agents of all nodes.
trap 'say "the time is nearly over: save and leave"; kill -USR1 "$agents" 2>/dev/null' USR1
trap 'kill -TERM "$agents" 2>/dev/null' TERM
code=0
# A signal ends `wait`, not what is waited for.
while :; do
  wait "$agents"
  code=$?
  kill -0 "$agents" 2>/dev/null || break
done
trap '' USR1 TERM
# If both came at once, the code is still to be had.
wait "$agents" 2>/dev/null
last=$?
[ "$last" -eq 127 ] || code=$last
"""


_OF_FIRST = """\
[ ! -s "$codes.0" ] || read -r code < "$codes.0"
rm -f "$codes".*
"""


def render(job: SlurmJob) -> str:
    """Return the batch script of a job, ending with a line break."""
    parts = [
        "#!/bin/bash\n",
        *(f"#SBATCH {one}\n" for one in _directives(job)),
        *(_variable(name, value) for name, value in job.environment),
        *(f"{line}\n" for line in job.setup),
        _HEAD,
        _SAY,
        _agents(job),
        _WAIT,
        _OF_FIRST if job.nodes_min < job.nodes_max else "",
        _verdict(job),
    ]
    return "".join(parts)


def _directives(job: SlurmJob) -> list[str]:
    place = job.place
    is_elastic = job.nodes_min < job.nodes_max
    nodes = f"{job.nodes_min}-{job.nodes_max}" if is_elastic else f"{job.nodes_min}"
    log = "%x-%A_%a.log" if place.array else "%x-%j.log"
    asked = {
        "job-name": job.name,
        "array": place.array,
        "partition": place.partition,
        "account": place.account,
        "qos": place.qos,
        "nodes": nodes,
        # Of a range SLURM would give the fewest nodes that so many tasks fit on.
        "ntasks-per-node": "" if is_elastic else "1",
        "gpus-per-node": place.gpus,
        "cpus-per-task": str(place.cpus or ""),
        "mem": place.memory,
        "time": job.time,
        "signal": f"B:USR1@{job.lead_seconds}",
        "output": f"{job.logs.rstrip('/') or '/'}/{log}",
        "open-mode": "append",
    }
    given = [f"--{name}={value}" for name, value in asked.items() if value]
    # With fewer nodes than it began with, a run of elastic size goes on.
    return [*given, "--requeue", *(["--no-kill"] if is_elastic else [])]


def _variable(name: str, value: str | None) -> str:
    if value is not None:
        return f"export {name}={shlex.quote(value)}\n"
    return (
        f'[ -n "${{{name}:-}}" ] || {{ echo "slurm: {name} is not set: export it where you call '
        f'sbatch" >&2; exit 78; }}\n'
    )


def _agents(job: SlurmJob) -> str:
    """Return the lines that start one agent per node, in the background."""
    own = [] if job.says_grace else [f"--grace {job.grace_seconds:g}"]
    lines = []
    if job.nodes_max > 1:
        lines = [
            'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n',
            "port=$((20000 + SLURM_JOB_ID % 10000))\n",
        ]
        # Nodes that SLURM did not give are not waited for.
        own.append(f'--nnodes "{job.nodes_min}:$SLURM_JOB_NUM_NODES"')
        own.append('--rdzv-endpoint "$head:$port"')
    own.append('--rdzv-id "$run"')
    program = "resilient train"
    if job.nodes_min < job.nodes_max:
        # srun tells the code of a node that died, and the first agent that of the run.
        lines.append('codes=$(mktemp -u "${TMPDIR:-/tmp}/resilient-$run-XXXXXX")\n')
        named = f'export {EXIT_CODE_FILE}="$0.$SLURM_PROCID"'
        program = f"""bash -c '{named}; exec resilient train "$@"' "$codes\""""
    cpus = f"--cpus-per-task={job.place.cpus} " if job.place.cpus else ""
    # The job's own --no-kill keeps its nodes; without the step's, SLURM kills the agents on them.
    is_elastic = job.nodes_min < job.nodes_max
    stays = "--no-kill --ntasks-per-node=1 " if is_elastic else ""
    words = " ".join(map(_quote, job.command))
    return "".join(
        [
            "\n",
            *lines,
            # An agent that leaves first hurries nobody: the others may still be saving.
            f"srun {cpus}{stays}--kill-on-bad-exit=0 --wait=0 \\\n",
            f"  {program} {' '.join(own)} \\\n",
            f"  {words} &\n",
            "agents=$!\n",
        ]
    )


def _quote(word: str) -> str:
    """Return a word for the shell, with the number of the task where it is asked for."""
    if TASK not in word:
        return shlex.quote(word)
    texts = [shlex.quote(one) if one else "" for one in word.split(TASK)]
    return '"$SLURM_ARRAY_TASK_ID"'.join(texts)


def _verdict(job: SlurmJob) -> str:
    permanent = "|".join(str(one) for one in PERMANENT)
    failures = f"{job.logs.rstrip('/')}/$SLURM_JOB_NAME-$job.failures"
    return f"""\
case "$code" in
  0) exit 0 ;;
  {_REQUEUE}) requeue "saved" ;;
  {permanent}) say "exit $code: another start would end the same way"; exit "$code" ;;
esac
failures="{failures}"
echo "start $start exit $code nodes $SLURM_JOB_NODELIST" >> "$failures" &&
  failed=$(wc -l < "$failures") || {{
  # Who cannot count would start for ever.
  say "exit $code, and $failures cannot be written: job $job is left alone"
  exit "$code"
}}
if [ "$failed" -ge {job.failures_max} ]; then
  say "exit $code: $failed starts have failed, see $failures; job $job is left alone"
  exit "$code"
fi
requeue "failure $failed of {job.failures_max}"
"""
