#!/bin/bash
@{directives}
@{variables}
@{setup}
set -u
# Each task of an array has a number. SLURM_JOB_ID of one task is the number of the whole array:
# `scontrol requeue` with this number would requeue all tasks.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
start="${SLURM_RESTART_COUNT:-0}"
run="$SLURM_JOB_NAME-$job-r$start"

say() { printf 'slurm: %s\n' "$*" >&2; }

requeue() {
  # Leave a cancelled job alone. SLURM restarts a requeued or preempted job by itself.
  state=$(scontrol show job -o "$job") || state="JobState=RUNNING"
  case "$state" in
    *JobState=RUNNING*|*Reason=TimeLimit*) ;;
    *) say "exit $code; SLURM has already ended job $job"; exit "$code" ;;
  esac
  say "exit $code: $1; job $job is requeued after start $start"
  scontrol requeue "$job" || { say "not requeued; run: scontrol requeue $job"; exit "$code"; }
  exit "$code"
}

@{rendezvous}
srun @{srun_options}--kill-on-bad-exit=0 --wait=0 \
  @{program} @{agent_options} \
  @{command} &
agents=$!

# SLURM signals only this shell. srun forwards the signal to the agents of all nodes.
trap 'say "time limit is near: saving, then exiting"; kill -USR1 "$agents" 2>/dev/null' USR1
trap 'kill -TERM "$agents" 2>/dev/null' TERM
code=0
# A signal ends `wait` while the agents still run.
while :; do
  wait "$agents"
  code=$?
  kill -0 "$agents" 2>/dev/null || break
done
trap '' USR1 TERM
# The agents may have ended together with the signal: then this `wait` returns their exit code.
wait "$agents" 2>/dev/null
last=$?
[ "$last" -eq 127 ] || code=$last
@{code_of_first}
case "$code" in
  0) exit 0 ;;
  @{requeue_code}) requeue "saved" ;;
  @{permanent_codes}) say "exit $code: another start would fail in the same way"; exit "$code" ;;
esac
failures="@{failures}"
echo "start $start exit $code nodes $SLURM_JOB_NODELIST" >> "$failures" &&
  failed=$(wc -l < "$failures") || {
  # Without a count of its failures, the job would be requeued forever.
  say "exit $code, and $failures cannot be written: job $job is not requeued"
  exit "$code"
}
if [ "$failed" -ge @{failures_max} ]; then
  say "exit $code: $failed starts have failed, see $failures; job $job is not requeued"
  exit "$code"
fi
requeue "failure $failed of @{failures_max}"
