"""Table of the commands, with the module and the help line of each command.

The table imports no module of a command.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True)
class LazyCommand:
    """Location and help line of a command that is imported when it is called.

    Attributes:
        module: Module of the command; empty for a group that only has commands.
        attribute: Name of a function or of a Typer group.
        help: One line of help.
        context_settings: Settings of the parser.
        foreign: Options that users of torchrun try, each with its replacement.
        commands: Commands of a group, each imported when it is called.
    """

    module: str
    attribute: str
    help: str
    context_settings: Mapping[str, Any] = field(default_factory=dict)
    foreign: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, LazyCommand] = field(default_factory=dict)


_LOGS = "resilient train --log-dir FOLDER (shows and keeps the output of ranks: resilient logs)"
_LEAVE_OUT = "resilient train --help (omit the option)"


_CKPT = {
    "ls": LazyCommand(
        "resilient_cli.commands.ls", "ls", "List checkpoints and the generations that wrote them."
    ),
    "inspect": LazyCommand(
        "resilient_cli.commands.inspect",
        "inspect",
        "Show the contents of a checkpoint of any tool.",
    ),
    "verify": LazyCommand(
        "resilient_cli.commands.verify", "verify", "Verify checkpoints against their manifests."
    ),
    "repair": LazyCommand(
        "resilient_cli.commands.repair",
        "repair",
        "Repair damaged checkpoints, from parity or another copy.",
    ),
    "diff": LazyCommand("resilient_cli.commands.diff", "diff", "Compare two checkpoints."),
    "cat": LazyCommand(
        "resilient_cli.commands.cat", "cat", "Show one tensor, one value or one file."
    ),
    "bisect": LazyCommand(
        "resilient_cli.commands.bisect",
        "bisect",
        "Find the first checkpoint at which a command fails.",
    ),
    "rollback": LazyCommand(
        "resilient_cli.commands.rollback",
        "rollback",
        "Resume training from an older checkpoint.",
    ),
    "undo": LazyCommand("resilient_cli.commands.rollback", "undo", "Revert the newest rollback."),
    "reflog": LazyCommand(
        "resilient_cli.commands.rollback",
        "reflog",
        "List the generations of the run and their causes.",
    ),
    "unlock": LazyCommand(
        "resilient_cli.commands.unlock",
        "unlock",
        "Show which process may write, and fence it.",
    ),
    "tag": LazyCommand("resilient_cli.commands.prune", "tag", "Give a checkpoint a name."),
    "untag": LazyCommand("resilient_cli.commands.prune", "untag", "Remove a tag."),
    "prune": LazyCommand(
        "resilient_cli.commands.prune", "prune", "Delete checkpoints that no policy keeps."
    ),
    "sign": LazyCommand("resilient_cli.commands.sign", "sign", "Sign a checkpoint."),
    "cp": LazyCommand(
        "resilient_cli.commands.cp", "cp", "Copy a checkpoint to another repository."
    ),
    "export": LazyCommand(
        "resilient_cli.commands.cp", "export", "Write a checkpoint for other tools."
    ),
    "import": LazyCommand(
        "resilient_cli.commands.cp", "import_", "Import a checkpoint of Transformers."
    ),
    "scan": LazyCommand(
        "resilient_cli.commands.scan",
        "scan_",
        "Search a checkpoint for content that could harm its reader.",
    ),
}

COMMANDS = {
    "train": LazyCommand(
        "resilient_cli.commands.train",
        "train",
        "Run a training script, supervise it and resume it.",
        # Options after the script belong to the script.
        {
            "allow_interspersed_args": False,
            # torchrun accepts `-` and `_` in the name of each option.
            "token_normalize_func": lambda name: name.replace("_", "-"),
        },
        {
            **dict.fromkeys(("-t", "--tee", "--redirects", "--logs-specs"), _LOGS),
            **dict.fromkeys(("--duplicate-stdout-filters", "--duplicate-stderr-filters"), _LOGS),
            "--local-ranks-filter": _LOGS,
            **dict.fromkeys(("--role", "--start-method", "--event-log-handler"), _LEAVE_OUT),
            **dict.fromkeys(("--run-path", "--virtual-local-rank"), _LEAVE_OUT),
            **dict.fromkeys(("--numa-binding", "--signals-to-handle"), _LEAVE_OUT),
        },
    ),
    "ckpt": LazyCommand(
        "",
        "",
        "List, inspect, compare, verify, repair, rewind, unlock, sign, tag, prune, copy, exchange.",
        commands=_CKPT,
    ),
    "audit": LazyCommand(
        "resilient_cli.commands.audit",
        "audit",
        "Verify that no sample was lost or trained twice.",
    ),
    "status": LazyCommand(
        "resilient_cli.commands.report",
        "status",
        "Show the state of a run: its step, its speed, what is durable, what is at risk.",
    ),
    "logs": LazyCommand(
        "resilient_cli.commands.logs",
        "logs",
        "Show the output of the ranks of a run, attempt by attempt; can follow new output.",
    ),
    "stop": LazyCommand(
        "resilient_cli.commands.stop",
        "stop",
        "Ask a run of this machine to save and exit.",
    ),
    "report": LazyCommand(
        "resilient_cli.commands.report",
        "report",
        "Show where the wall-clock time of a run went, as text or as a page.",
    ),
    "ui": LazyCommand(
        "resilient_cli.commands.ui",
        "ui",
        "Serve the page of `report` on this machine; it updates while the run is active.",
    ),
    "plan": LazyCommand(
        "resilient_cli.commands.plan",
        "plan",
        "Show the cost of saves, whether they fit a preemption notice, and how often to save.",
    ),
    "doctor": LazyCommand(
        "resilient_cli.commands.doctor",
        "doctor",
        "Check whether this machine and this repository are fit for training.",
    ),
    "chaos": LazyCommand(
        "resilient_cli.commands.chaos",
        "app",
        "Inject faults into a training of your own, and check which guarantees hold.",
    ),
    "slurm": LazyCommand(
        "resilient_cli.commands.slurm",
        "app",
        "Run a training as a SLURM job that is requeued until the training is complete.",
    ),
    "k8s": LazyCommand(
        "resilient_cli.commands.k8s",
        "app",
        "Run a training on Kubernetes with kubectl: render, apply, watch and wait.",
    ),
    "init": LazyCommand("resilient_cli.commands.init", "init", "Write a starter training script."),
    "config": LazyCommand(
        "resilient_cli.commands.config",
        "app",
        "Show, check and describe the arguments of a run.",
    ),
    "help": LazyCommand(
        "resilient_cli.commands.help",
        "manual",
        "Explain exit codes, error ids, references, storage and the environment.",
    ),
    "completion": LazyCommand(
        "resilient_cli.commands.completion",
        "completion",
        "Write the shell script that completes commands and checkpoint names.",
    ),
    "version": LazyCommand(
        "resilient_cli.commands.version", "version", "Show the versions of the installed software."
    ),
}
