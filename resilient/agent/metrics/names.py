"""The metrics by name: what users build dashboards and alerts on. Names and labels stay."""

from __future__ import annotations

from resilient.agent.metrics.exposition import Kind, Metric

_COUNTER, _GAUGE, _SUMMARY = Kind.COUNTER, Kind.GAUGE, Kind.SUMMARY

AGENT_INFO = Metric("resilient_agent_info", _GAUGE, "Always 1; which version runs.", "version")
AGENT_START = Metric(
    "resilient_agent_start_time_seconds", _GAUGE, "When the agent started, in unix time."
)
EXIT_CODE = Metric(
    "resilient_agent_exit_code", _GAUGE, "Of the agent, once it has decided to leave."
)
LIVES = Metric("resilient_lives_total", _COUNTER, "Lives of the workers that this agent began.")
RESTARTS = Metric(
    "resilient_restarts_total", _COUNTER, "Lives that another one followed, by why.", "cause"
)
FAILURES = Metric(
    "resilient_failures_total", _COUNTER, "Lives that ended by a failure, by its cause.", "cause"
)
PREEMPTIONS = Metric(
    "resilient_preemptions_total", _COUNTER, "Lives that ended because somebody asked for it."
)
NOTICES = Metric(
    "resilient_notices_total", _COUNTER, "Announcements heard that this host will be taken away."
)
HANGS = Metric("resilient_hangs_total", _COUNTER, "Hangs found.")
STRAGGLERS = Metric("resilient_stragglers_total", _COUNTER, "Times a rank fell behind the others.")
LOSSES_BROKEN = Metric(
    "resilient_losses_broken_total", _COUNTER, "Times the loss was no number, or a spike.", "kind"
)
RESTARTS_LEFT = Metric(
    "resilient_restarts_left", _GAUGE, "Restarts after failures that the budget still allows."
)
WORLD_SIZE = Metric("resilient_world_size", _GAUGE, "Ranks of all hosts in this life.")
LOCAL_WORLD_SIZE = Metric("resilient_local_world_size", _GAUGE, "Ranks of this host.")
NODES = Metric("resilient_nodes", _GAUGE, "Hosts in this life.")
GENERATION = Metric(
    "resilient_generation", _GAUGE, "Number of this life in the checkpoint repository."
)
STEP = Metric("resilient_step", _GAUGE, "The last step that all ranks of this host have finished.")
STEP_RATE = Metric(
    "resilient_steps_per_second", _GAUGE, "Steps per second over the last minute of this life."
)
RANK_STEP = Metric(
    "resilient_rank_step", _GAUGE, "The last step that a rank has finished.", "local_rank"
)
RANK_STEP_TIME = Metric(
    "resilient_rank_last_step_timestamp_seconds",
    _GAUGE,
    "When a rank finished its last step, in unix time.",
    "local_rank",
)
CHECKPOINT_STEP = Metric("resilient_checkpoint_step", _GAUGE, "Step of the last durable one.")
CHECKPOINT_TIME = Metric(
    "resilient_checkpoint_last_timestamp_seconds",
    _GAUGE,
    "When the last durable checkpoint was committed, in unix time.",
)
CHECKPOINT_BYTES = Metric(
    "resilient_checkpoint_size_bytes", _GAUGE, "Size of the last durable checkpoint."
)
CHECKPOINTS = Metric("resilient_checkpoints_total", _COUNTER, "Checkpoints committed.")
CHECKPOINT_WRITTEN = Metric(
    "resilient_checkpoint_written_bytes_total",
    _COUNTER,
    "Bytes written for them; less than their size where files are shared.",
)
COMMIT = Metric(
    "resilient_checkpoint_commit_seconds", _SUMMARY, "From the capture of a state to its commit."
)
STALL = Metric(
    "resilient_checkpoint_stall_seconds", _SUMMARY, "How long training waited for a save."
)
SAVES_ABORTED = Metric("resilient_saves_aborted_total", _COUNTER, "Saves that were not committed.")
STEPS_AT_RISK = Metric(
    "resilient_steps_at_risk", _GAUGE, "Steps that would be lost if all failed now."
)
GOODPUT = Metric(
    "resilient_goodput_ratio",
    _GAUGE,
    "Share of the wall clock that was training whose steps are part of the result.",
)
SPENT = Metric(
    "resilient_spent_seconds",
    _GAUGE,
    "Wall clock of the run by class; the classes sum to it, and training becomes lost.",
    "class",
)
LOST_STEPS = Metric("resilient_lost_steps", _GAUGE, "Steps of the run that were done in vain.")
SHARED_MEMORY = Metric(
    "resilient_shared_memory_bytes",
    _GAUGE,
    "Memory of this host that staged checkpoints take, of all jobs.",
)
METRICS_ERRORS = Metric(
    "resilient_metrics_errors_total", _COUNTER, "Times that figures could not be had."
)

ALL = tuple(one for one in list(globals().values()) if isinstance(one, Metric))
"""Every metric, in the order of the table in docs/metrics.md."""
