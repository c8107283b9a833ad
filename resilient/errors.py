"""Exception tree, RES ids and the exit-code table.

::

    ResilientError                       1   RES-ERROR
    |- ConfigError                      78   RES-CONFIG
    |- UsageError                        2   RES-USAGE
    |- StoreError                       69   RES-STORE
    |  |- KeyNotFound                   66   RES-STORE-404
    |  |- KeyExists                     80   RES-STORE-412
    |  |- StoreUnavailable              69   RES-STORE-503
    |  |- StoreFull                     73   RES-STORE-507
    |  |- StoreDenied                   77   RES-STORE-403
    |  `- NotExclusive                  78   RES-STORE-EXCL
    |- RepositoryNotFound               66   RES-REPO-404
    |- NothingToResume                  66   RES-RESUME-NONE
    |- StartOverRefused                 78   RES-START-OVER
    |- ScriptNotFound                   66   RES-SCRIPT-404
    |- NotRunning                       66   RES-RUN-404
    |- ClusterUnavailable               69   RES-CLUSTER-503
    |- ClusterDenied                    77   RES-CLUSTER-403
    |- ClusterConflict                  80   RES-CLUSTER-409
    |- IntegrityError                    1   RES-CKPT-DAMAGED
    |  `- SignatureRefused               77   RES-CKPT-SIGNATURE
    |- NoIntactCheckpoint                3   RES-CKPT-NONE-INTACT
    |- IncompatibleCheckpoint           65   RES-CKPT-INCOMPATIBLE
    |- UnknownLayout                    65   RES-CKPT-LAYOUT
    |- UnsavableState                   78   RES-STATE-UNSAVABLE
    |- SaveFailed                       73   RES-SAVE-FAILED
    |  `- SaveAbandoned                 69   RES-SAVE-PEER
    |- Fenced                           80   RES-FENCED
    |- WriterAlive                      80   RES-WRITER-ALIVE
    |- PeerFailed                       69   RES-PEER
    |- DeadlineExceeded                 69   RES-DEADLINE
    |- CrashLoop                        70   RES-CRASH-LOOP
    |- NumbersBroken                    70   RES-NUMBERS
    |- WorkerFailed                      1   RES-WORKER
    `- Preempted                        75   RES-PREEMPTED

An error states what failed, where and why; its ``hint`` is the next command to run. ``resilient
help errors`` shows the first sentence of each class docstring.

Exit codes follow sysexits.h where it has a name for the case. One table serves all commands:
``resilient help exit-codes``, ``resilient --help`` and ``docs/exit-codes.md`` are made from it.
"""

from __future__ import annotations

from dataclasses import dataclass


class ResilientError(Exception):
    """An error of this library that has no class of its own, and the base of those that have."""

    exit_code = 1
    code = "RES-ERROR"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(ResilientError, ValueError):
    """A setting is missing, unknown or contradicts another.

    A ``ValueError`` too, because Transformers raises that for the same settings.
    """

    exit_code = 78
    code = "RES-CONFIG"


class UsageError(ResilientError):
    """A command was called in a way that it does not understand."""

    exit_code = 2
    code = "RES-USAGE"


class StoreError(ResilientError):
    """A store could not do what was asked; ``key`` names the object."""

    exit_code = 69
    code = "RES-STORE"

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class KeyNotFound(StoreError):
    """No object has this key."""

    exit_code = 66
    code = "RES-STORE-404"


class KeyExists(StoreError):
    """An exclusive create found the key taken; nothing was changed."""

    exit_code = 80
    code = "RES-STORE-412"


class StoreUnavailable(StoreError):
    """The store did not answer, or asked to come back later. The only retryable one."""

    exit_code = 69
    code = "RES-STORE-503"


class StoreFull(StoreError):
    """No space or quota is left."""

    exit_code = 73
    code = "RES-STORE-507"


class StoreDenied(StoreError):
    """The credentials, the mode bits or a read-only mount forbid it."""

    exit_code = 77
    code = "RES-STORE-403"


class NotExclusive(StoreError):
    """The store has no exclusive create, so it cannot fence a stale process."""

    exit_code = 78
    code = "RES-STORE-EXCL"


class RepositoryNotFound(ResilientError):
    """The URL holds no checkpoints and no generations."""

    exit_code = 66
    code = "RES-REPO-404"


class NothingToResume(ResilientError, ValueError):
    """No checkpoint was ever committed here, or none of that name."""

    exit_code = 66
    code = "RES-RESUME-NONE"


class StartOverRefused(ResilientError):
    """A start at step 0 would ignore checkpoints that lie there; nothing was changed."""

    exit_code = 78
    code = "RES-START-OVER"


class ScriptNotFound(ResilientError):
    """The script to train with does not exist."""

    exit_code = 66
    code = "RES-SCRIPT-404"


class NotRunning(ResilientError):
    """No launcher of the run is alive on this machine."""

    exit_code = 66
    code = "RES-RUN-404"


class ClusterUnavailable(ResilientError):
    """The API server of a cluster did not answer, or asked to come back later."""

    exit_code = 69
    code = "RES-CLUSTER-503"


class ClusterDenied(ResilientError):
    """A cluster does not know who asks, or does not allow what is asked."""

    exit_code = 77
    code = "RES-CLUSTER-403"


class ClusterConflict(ResilientError):
    """Somebody else set a field of a cluster's object, to another value; nothing was changed."""

    exit_code = 80
    code = "RES-CLUSTER-409"


class IntegrityError(ResilientError):
    """Content is not what was committed; ``key`` names the file, ``tensor`` what it holds."""

    exit_code = 1
    code = "RES-CKPT-DAMAGED"

    def __init__(self, message: str, *, key: str = "", tensor: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.tensor = tensor


class SignatureRefused(IntegrityError):
    """A checkpoint that the key has not signed, where a signature is required."""

    exit_code = 77
    code = "RES-CKPT-SIGNATURE"


class NoIntactCheckpoint(ResilientError):
    """Checkpoints were committed, and none of them can be read whole."""

    exit_code = 3
    code = "RES-CKPT-NONE-INTACT"


class IncompatibleCheckpoint(ResilientError):
    """A whole checkpoint that this code, model or format version cannot take."""

    exit_code = 65
    code = "RES-CKPT-INCOMPATIBLE"


class UnknownLayout(ResilientError):
    """What is there is no checkpoint of any tool that is known."""

    exit_code = 65
    code = "RES-CKPT-LAYOUT"


class UnsavableState(ResilientError):
    """A value that only pickle could save; ``path`` names it."""

    exit_code = 78
    code = "RES-STATE-UNSAVABLE"

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class SaveFailed(ResilientError):
    """A checkpoint could not be made durable; older ones are untouched."""

    exit_code = 73
    code = "RES-SAVE-FAILED"


class Fenced(ResilientError):
    """A newer attempt of this run exists; this process must not write any more."""

    exit_code = 80
    code = "RES-FENCED"


class WriterAlive(ResilientError):
    """A process that may write to the repository was seen alive; it was not fenced off."""

    exit_code = 80
    code = "RES-WRITER-ALIVE"


class PeerFailed(ResilientError):
    """Another rank could not do its part; ``rank`` is the one that failed first."""

    exit_code = 69
    code = "RES-PEER"

    def __init__(self, message: str, *, rank: int = -1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class SaveAbandoned(SaveFailed):
    """A checkpoint could not be made durable because another rank ended or went silent."""

    exit_code = PeerFailed.exit_code
    code = "RES-SAVE-PEER"


class DeadlineExceeded(ResilientError):
    """Something did not happen within ``deadline_seconds``."""

    exit_code = 69
    code = "RES-DEADLINE"

    def __init__(self, message: str, *, deadline_seconds: float = 0.0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.deadline_seconds = deadline_seconds


class CrashLoop(ResilientError):
    """Several attempts failed one after the other without a new checkpoint."""

    exit_code = 70
    code = "RES-CRASH-LOOP"


class NumbersBroken(ResilientError):
    """The loss is no number or far from those before, and going back does not help any more."""

    exit_code = 70
    code = "RES-NUMBERS"


class WorkerFailed(ResilientError):
    """A worker ended with ``status``: its own exit code, or 128 plus the signal's number."""

    code = "RES-WORKER"

    def __init__(self, message: str, *, status: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = status


class Preempted(ResilientError):
    """Asked to stop, and everything up to the agreed step is durable: requeue, do not count."""

    exit_code = 75
    code = "RES-PREEMPTED"


@dataclass(frozen=True, slots=True)
class ExitCode:
    """Exit code and its meaning for the caller of a command.

    Attributes:
        number: Value of ``$?``.
        name: Name in sysexits.h without ``EX_``; may be empty.
        brief: Meaning in a few words.
        meaning: Meaning in a sentence.
        scheduler: Action for a scheduler that sees the code.
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
        "The answer of the command is negative: a difference, a setting that does not fit, or "
        "damage while an intact checkpoint remains. Under `train`: the script failed without an "
        "exit code of its own, or rejected a damaged checkpoint before the first step.",
        "count a failure, start again",
    ),
    ExitCode(2, "", "wrong usage", "The command line is invalid.", "fail the job"),
    ExitCode(
        3,
        "",
        "no intact checkpoint is left",
        "Checkpoints were committed, and none is intact. No training was started from scratch.",
        "fail the job, alert a person",
    ),
    ExitCode(
        65,
        "DATAERR",
        "incompatible checkpoint",
        "An intact checkpoint does not fit this model, code or format version.",
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
        "Attempts failed repeatedly without a new checkpoint, or the loss stayed broken after "
        "rollbacks.",
        "fail the job",
    ),
    ExitCode(
        71,
        "OSERR",
        "this host failed too often",
        "This host failed too often, needs a device reset, or has a worker that cannot be killed.",
        "start again on another host",
    ),
    ExitCode(
        73,
        "CANTCREAT",
        "not durable",
        "A checkpoint could not be made durable: no space, no quota, or a read-only store. "
        "Older checkpoints are unchanged.",
        "start again, alert a person",
    ),
    ExitCode(
        75,
        "TEMPFAIL",
        "preempted after a durable save (requeue)",
        "The run was asked to stop, and every step up to the agreed step is durable. Also: no step "
        "was new, or a rank was killed meanwhile and an older checkpoint is intact. The same "
        "command resumes.",
        "requeue, count nothing",
    ),
    ExitCode(
        77,
        "NOPERM",
        "not allowed",
        "Credentials, mode bits or a missing signature forbid the access.",
        "fail the job",
    ),
    ExitCode(
        78,
        "CONFIG",
        "wrong configuration",
        "A setting is missing, is unknown, contradicts another setting, or asks for state that "
        "cannot be saved. Or a start at step 0 would ignore existing checkpoints.",
        "fail the job",
    ),
    ExitCode(
        80,
        "",
        "a newer attempt exists",
        "A newer attempt of this run exists, or another process uses the requested resource.",
        "start again later",
    ),
    ExitCode(
        130,
        "",
        "interrupted",
        "Ctrl-C in a command other than `train`.",
        "nothing: a user interrupted the command",
    ),
    ExitCode(
        143,
        "",
        "stopped, and work was lost",
        "SIGTERM stopped the run, and some steps could not be saved before the deadline.",
        "requeue, count a failure",
    ),
)

UNKNOWN = "A new code may be added: treat an unknown one as failure."
OWN = "`train` passes a script's own exit code on; 128 + N is signal N of a worker."

PERMANENT = tuple(code.number for code in EXIT_CODES if code.scheduler.startswith("fail the job"))
"""Exit codes after which another start would end the same way."""

EXIT_CODE_FILE = "RESILIENT_EXIT_CODE_FILE"
"""Environment variable with the path of a file that receives the program's exit code as a line."""
