#!/bin/bash
@{directives}
@{variables}
@{setup}
set -u
# A task of an array has a number of its own. SLURM_JOB_ID of one of them is that of the whole
# array, which `scontrol requeue` would requeue.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
start="${SLURM_RESTART_COUNT:-0}"
run="$SLURM_JOB_NAME-$job-r$start"

say() { printf 'slurm: %s\n' "$*" >&2; }

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

@{meeting}
srun @{srun_options}--kill-on-bad-exit=0 --wait=0 \
  @{program} @{agent_options} \
  @{command} &
agents=$!

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
@{code_of_first}
case "$code" in
  0) exit 0 ;;
  @{requeue_code}) requeue "saved" ;;
  @{permanent_codes}) say "exit $code: another start would end the same way"; exit "$code" ;;
esac
failures="@{failures}"
echo "start $start exit $code nodes $SLURM_JOB_NODELIST" >> "$failures" &&
  failed=$(wc -l < "$failures") || {
  # Who cannot count would start for ever.
  say "exit $code, and $failures cannot be written: job $job is left alone"
  exit "$code"
}
if [ "$failed" -ge @{failures_max} ]; then
  say "exit $code: $failed starts have failed, see $failures; job $job is left alone"
  exit "$code"
fi
requeue "failure $failed of @{failures_max}"
