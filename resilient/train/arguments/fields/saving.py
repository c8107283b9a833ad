"""When a run saves, what stays, where it goes, and what a resume takes back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from resilient.train.arguments.fields.option import option


@dataclass
class SavingArguments:
    """Checkpoints in the names of the field."""

    save_strategy: str = option("steps", "when to save: no, steps, epoch, best")
    save_steps: float = option(500, "steps between checkpoints; below 1 a ratio of all steps")
    save_every: str = option(
        "",
        "500steps, 30s, 5m or auto (by what saves cost and how often the run fails); empty: "
        "save_strategy and save_steps; and memory=1step: hold each step in memory between saves",
    )
    save_total_limit: int | None = option(
        None,
        "checkpoints to keep, the best among them; None keeps all; 1 is 2 if the best is older",
    )
    save_only_model: bool = option(
        default=False, help="save the model alone; such a checkpoint cannot be resumed"
    )
    save_on_each_node: bool = option(default=False, help="save on every node")
    enable_jit_checkpoint: bool = option(
        default=False, help="save on SIGTERM; here a run always does"
    )
    ignore_data_skip: bool = option(
        default=False, help="on resume begin the epoch's data again instead of going on in it"
    )
    restore_callback_states_from_checkpoint: bool = option(
        default=True, help="on resume give callbacks their state back; here always"
    )
    strict_resume: bool = option(
        default=False, help="refuse to resume a checkpoint that lost a part of its state"
    )
    resume_changes: list[str] | str | None = option(
        None,
        "arguments, and parts as part:NAME, that may differ from the checkpoint's though a resume "
        "refuses it; or all",
    )


@dataclass
class RepositoryArguments:
    """The repository of checkpoints, and what is promised about it."""

    repo: str = option("", "URL of the checkpoint repository; empty: output_dir")
    near_repo: str = option(
        "", "URL of a near repository, mostly on each host's own disk, that takes every save"
    )
    durable_every: int | None = option(
        None, "with near_repo: every n-th save goes on to repo; None: all, or what seconds say"
    )
    durable_every_seconds: float | None = option(
        None, "with near_repo: a save goes on to repo if the last that did is so long ago"
    )
    near_total_limit: int = option(2, "with near_repo: checkpoints that stay there")
    storage_options: dict[str, Any] | None = option(
        None,
        "endpoint, credentials and the like of repo; never shown, never saved",
        is_secret=True,
    )
    save_retention: dict[str, Any] | None = option(
        None, "keep_best, keep_every, keep_hourly, ... (Retention)"
    )
    save_parity: int = option(
        0, "files of each rank that may be lost and are computed back; each costs the longest one"
    )
    repair_on_restore: bool = option(
        default=True, help="compute damaged files back from parity instead of going further back"
    )
    save_unchanged: str = option("refer", "bytes that are stored already: refer, write (again)")
    on_save_failure: str = option("stop", "what a failed save does to training: stop, continue")
    save_overlap: bool = option(
        default=True, help="copy what only the optimizer changes beside the next step"
    )
    rollback_on: str = option(
        "off", "go back to the last checkpoint and skip the data since: off, nan, spike (or nan)"
    )
    rollback_limit: int = option(3, "how often a run may go back for a broken loss")
    loss_spike_deviations: float = option(
        8.0, "a loss above the median of recent ones by so many deviations is a spike"
    )
    save_within_seconds: float = option(600.0, "time after which a save has failed")
    grace_seconds: float = option(
        20.0,
        "from a request to stop to leaving at once; under `resilient train` its --grace counts",
    )


@dataclass
class HubArguments:
    """Models on the Hub of Hugging Face."""

    push_to_hub: bool = option(default=False, help="push the model to the Hub when it is saved")
    hub_model_id: str | None = option(None, "name of the repository there")
    hub_strategy: str = option(
        "every_save", "what to push: end, every_save, checkpoint, all_checkpoints"
    )
    hub_token: str | None = option(
        None, "token for the Hub; None: that of the login; never saved", is_secret=True
    )
    hub_private_repo: bool | None = option(None, "make the repository private")
    hub_always_push: bool = option(default=False, help="push though the push before is not done")
    hub_revision: str | None = option(None, "branch, tag or commit to push to")
