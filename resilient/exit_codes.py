"""The exit codes of every command, in one table.

Numbers follow sysexits.h where it has a name for what happened. :mod:`resilient.errors` says
which error ends in which; ``resilient help exit-codes``, ``resilient --help`` and
``docs/exit-codes.md`` are made from this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExitCode:
    """One number and what it tells whoever started the command.

    Attributes:
        number: what ``$?`` holds.
        name: the name in sysexits.h without ``EX_``, or nothing.
        brief: what it means, in a few words.
        meaning: the same in a sentence.
        scheduler: what a scheduler that sees it should do.
    """

    number: int
    name: str
    brief: str
    meaning: str
    scheduler: str


EXIT_CODES = (
    ExitCode(0, "", "done", "Done; verified; no difference.", "complete the job"),
    ExitCode(
        1,
        "",
        "the answer is no",
        "The answer is no: it differs, it is damaged and something intact remains, it does not "
        "fit. Under `train`: the script failed and named no code of its own, or refused a damaged "
        "checkpoint before the first step.",
        "count a failure, start again",
    ),
    ExitCode(2, "", "wrong usage", "The command line was not understood.", "fail the job"),
    ExitCode(
        3,
        "",
        "no intact checkpoint is left",
        "Checkpoints were committed and none can be read whole; nothing was started from scratch.",
        "fail the job, call somebody",
    ),
    ExitCode(
        65,
        "DATAERR",
        "incompatible checkpoint",
        "A whole checkpoint that this model, code or format version cannot take.",
        "fail the job",
    ),
    ExitCode(
        66,
        "NOINPUT",
        "not found",
        "The repository, the checkpoint or the script does not exist.",
        "fail the job",
    ),
    ExitCode(
        69,
        "UNAVAILABLE",
        "storage or peers unreachable",
        "Storage, the rendezvous or another rank did not answer within its deadline.",
        "start again",
    ),
    ExitCode(
        70,
        "SOFTWARE",
        "crash loop",
        "Life after life failed without a new checkpoint, or the numbers broke for good.",
        "fail the job",
    ),
    ExitCode(
        71,
        "OSERR",
        "this host is not fit",
        "This host failed too often and was left out.",
        "start again on another host",
    ),
    ExitCode(
        73,
        "CANTCREAT",
        "not durable",
        "A checkpoint could not be made durable: no space, no quota, a read-only store. "
        "Older ones are untouched.",
        "start again, tell somebody",
    ),
    ExitCode(
        75,
        "TEMPFAIL",
        "preempted after a durable save (requeue)",
        "Asked to stop, and everything up to the agreed step is durable, or there was nothing "
        "new to save, or a rank was killed meanwhile and an earlier checkpoint is whole: the same "
        "command resumes.",
        "requeue, count nothing",
    ),
    ExitCode(
        77,
        "NOPERM",
        "not allowed",
        "Credentials, mode bits or a missing signature forbid it.",
        "fail the job",
    ),
    ExitCode(
        78,
        "CONFIG",
        "wrong configuration",
        "A setting is missing, unknown, contradicts another, or asks for what cannot be saved. "
        "A start at step 0 would ignore checkpoints that lie there.",
        "fail the job",
    ),
    ExitCode(
        80,
        "",
        "held by another life of the run",
        "A newer life of this run exists, or another process holds what was asked for.",
        "start again later",
    ),
    ExitCode(
        130,
        "",
        "interrupted",
        "Ctrl-C in a command other than `train`.",
        "nothing: somebody did it",
    ),
    ExitCode(
        143,
        "",
        "stopped, and work was lost",
        "SIGTERM, and not everything could be saved before the deadline.",
        "requeue, count a failure",
    ),
)

UNKNOWN = "A new code may be added: treat an unknown one as failure."
OWN = "`train` passes a script's own exit code on; 128 + N is signal N of a worker."

PERMANENT = tuple(one.number for one in EXIT_CODES if one.scheduler.startswith("fail the job"))
"""Those after which another start would end the same way."""

EXIT_CODE_FILE = "RESILIENT_EXIT_CODE_FILE"
"""A variable that names a file for the exit code of the program, as a line."""
