"""What is told of a run, when, and to whom."""

from __future__ import annotations

from dataclasses import dataclass

from resilient.train.arguments.fields.option import option


@dataclass
class LoggingArguments:
    """Logs, progress and trackers."""

    logging_strategy: str = option("steps", "when to log: no, steps, epoch")
    logging_steps: float = option(500, "steps between logs; below 1 a ratio of all steps")
    logging_first_step: bool = option(default=False, help="log step 1 too")
    logging_nan_inf_filter: bool = option(
        default=True, help="leave losses that are no number out of what is logged"
    )
    logging_dir: str | None = option(None, "folder of TensorBoard's files; None: output_dir/runs")
    log_level: str = option("passive", "what the coordinator shows: debug, info, warning, ...")
    log_level_replica: str = option("warning", "what the other ranks show")
    log_on_each_node: bool = option(
        default=True, help="show logs on every node, not only on the first"
    )
    include_num_input_tokens_seen: bool | str = option(
        "no", "count the tokens trained on: no, all, non_padding"
    )
    disable_tqdm: bool | None = option(None, "None: a progress bar if stderr is a terminal")

    report_to: list[str] | str | None = option("none", "trackers to report to: none, all or names")
    run_name: str | None = option(None, "name of the run in trackers")
    project: str = option("huggingface", "name of the project in Trackio")
    trackio_space_id: str | None = option(None, "Space that shows Trackio's logs")
    trackio_bucket_id: str | None = option(None, "bucket of that Space")
    trackio_static_space_id: str | bool | None = option(
        None, "read-only Space over that bucket; False: none"
    )
