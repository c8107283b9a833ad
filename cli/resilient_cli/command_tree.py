"""Table of the commands: the module of each and its help line, readable without an import of it."""

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


_LOGS = "resilient train --log-dir FOLDER (shows what ranks print, and keeps it: resilient logs)"
_LEAVE_OUT = "resilient train --help (leave the option out)"


_CKPT = {
    "ls": LazyCommand(
        "resilient_cli.commands.ls", "ls", "List checkpoints and the lives that wrote them."
    ),
    "inspect": LazyCommand(
        "resilient_cli.commands.inspect",
        "inspect",
        "Show what a checkpoint of any tool says of itself.",
    ),
    "verify": LazyCommand(
        "resilient_cli.commands.verify", "verify", "Hold checkpoints against what was committed."
    ),
    "repair": LazyCommand(
        "resilient_cli.commands.repair",
        "repair",
        "Make damaged files whole, from parity or elsewhere.",
    ),
    "diff": LazyCommand(
        "resilient_cli.commands.diff", "diff", "Say what is different in two checkpoints."
    ),
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
        "Let training go on from an older checkpoint.",
    ),
    "undo": LazyCommand(
        "resilient_cli.commands.rollback", "undo", "Take the newest rollback back."
    ),
    "reflog": LazyCommand(
        "resilient_cli.commands.rollback",
        "reflog",
        "List the lives of the run, and why each began.",
    ),
    "unlock": LazyCommand(
        "resilient_cli.commands.unlock",
        "unlock",
        "Say who may write, and shut out whoever should not.",
    ),
    "tag": LazyCommand("resilient_cli.commands.prune", "tag", "Give a checkpoint a name."),
    "untag": LazyCommand("resilient_cli.commands.prune", "untag", "Take a name away."),
    "prune": LazyCommand("resilient_cli.commands.prune", "prune", "Delete what no policy keeps."),
    "sign": LazyCommand("resilient_cli.commands.sign", "sign", "Sign a checkpoint."),
    "cp": LazyCommand(
        "resilient_cli.commands.cp", "cp", "Copy a checkpoint to another repository."
    ),
    "export": LazyCommand(
        "resilient_cli.commands.cp", "export", "Write a checkpoint for other tools."
    ),
    "import": LazyCommand(
        "resilient_cli.commands.cp", "import_", "Take over a checkpoint of Transformers."
    ),
    "scan": LazyCommand(
        "resilient_cli.commands.scan",
        "scan_",
        "Look for what could harm whoever loads a checkpoint.",
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
        "Prove that no sample was lost or trained twice.",
    ),
    "status": LazyCommand(
        "resilient_cli.commands.report",
        "status",
        "Say where a run is: its step, its speed, what is durable, what is at risk.",
    ),
    "logs": LazyCommand(
        "resilient_cli.commands.logs",
        "logs",
        "Show what the ranks of a run printed, of each life, also as it comes.",
    ),
    "stop": LazyCommand(
        "resilient_cli.commands.stop",
        "stop",
        "Ask a run of this machine to save and leave.",
    ),
    "report": LazyCommand(
        "resilient_cli.commands.report",
        "report",
        "Say where the wall clock of a run went, as text or as a page.",
    ),
    "ui": LazyCommand(
        "resilient_cli.commands.ui",
        "ui",
        "Serve the page of `report` to this machine; it renews itself as the run goes on.",
    ),
    "plan": LazyCommand(
        "resilient_cli.commands.plan",
        "plan",
        "Say what saves cost, whether they fit a notice, and how often to save.",
    ),
    "doctor": LazyCommand(
        "resilient_cli.commands.doctor",
        "doctor",
        "Look whether this machine and this repository are fit to train on.",
    ),
    "chaos": LazyCommand(
        "resilient_cli.commands.chaos",
        "app",
        "Strike a training of your own on purpose, and see which promises hold.",
    ),
    "slurm": LazyCommand(
        "resilient_cli.commands.slurm",
        "app",
        "Run a training as a job of SLURM that is requeued until it is trained to the end.",
    ),
    "k8s": LazyCommand(
        "resilient_cli.commands.k8s",
        "app",
        "Run a training on Kubernetes, by kubectl: to manifests, to the cluster, to its end.",
    ),
    "init": LazyCommand(
        "resilient_cli.commands.init", "init", "Write a script that trains, to begin from."
    ),
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
        "Write the script with which a shell completes commands and checkpoints.",
    ),
    "version": LazyCommand(
        "resilient_cli.commands.version", "version", "Show the versions of what runs."
    ),
}
