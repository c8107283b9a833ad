"""Exception classes, each with its exit code and its error id (``RES-...``).

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

An error states what failed, where and why. The ``hint`` of an error is the next command to run.
``resilient help errors`` shows the first sentence of each class docstring.

Exit codes follow sysexits.h where sysexits.h has a name for the case. ``resilient help
exit-codes``, ``resilient --help`` and ``docs/exit-codes.md`` are generated from one table in this
module.
"""

from __future__ import annotations

from dataclasses import dataclass


class ResilientError(Exception):
    """Base class of all errors; raised for errors that have no class of their own."""

    exit_code = 1
    code = "RES-ERROR"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            # Python prints the notes of an uncaught error below its message.
            self.add_note(f"hint: {hint}")

    def drop_hint_note(self) -> None:
        """Remove the note with the hint, before the caller prints the hint in another form."""
        notes = [note for note in getattr(self, "__notes__", []) if note != f"hint: {self.hint}"]
        self.__notes__ = notes


class ConfigError(ResilientError, ValueError):
    """A setting is missing, unknown or contradicts another.

    A ``ValueError`` too, because Transformers raises that for the same settings.
    """

    exit_code = 78
    code = "RES-CONFIG"


class UsageError(ResilientError):
    """The command line is wrong: an unknown option, a missing argument or a contradiction."""

    exit_code = 2
    code = "RES-USAGE"


class StoreError(ResilientError):
    """A store operation failed; ``key`` names the object."""

    exit_code = 69
    code = "RES-STORE"

    def __init__(self, message: str, *, key: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key


class KeyNotFound(StoreError):
    """The store holds no object with this key."""

    exit_code = 66
    code = "RES-STORE-404"


class KeyExists(StoreError):
    """An exclusive create found an existing object with the key; nothing was changed."""

    exit_code = 80
    code = "RES-STORE-412"


class StoreUnavailable(StoreError):
    """The store did not answer, or asked for a later retry. Only this store error is retried."""

    exit_code = 69
    code = "RES-STORE-503"


class StoreFull(StoreError):
    """The store has no free space or quota."""

    exit_code = 73
    code = "RES-STORE-507"


class StoreDenied(StoreError):
    """The credentials, the mode bits or a read-only mount forbid the operation."""

    exit_code = 77
    code = "RES-STORE-403"


class NotExclusive(StoreError):
    """The store has no exclusive create, so it cannot fence a stale process."""

    exit_code = 78
    code = "RES-STORE-EXCL"


class RepositoryNotFound(ResilientError):
    """The URL holds no checkpoints and no generations; ``url`` names a place with other files."""

    exit_code = 66
    code = "RES-REPO-404"

    def __init__(self, message: str, *, url: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.url = url


class NothingToResume(ResilientError, ValueError):
    """The repository has no committed checkpoint, or no checkpoint with that name."""

    exit_code = 66
    code = "RES-RESUME-NONE"


class StartOverRefused(ResilientError):
    """A start at step 0 would ignore existing checkpoints; nothing was changed."""

    exit_code = 78
    code = "RES-START-OVER"


class ScriptNotFound(ResilientError):
    """The training script does not exist."""

    exit_code = 66
    code = "RES-SCRIPT-404"


class NotRunning(ResilientError):
    """No launcher of the run is alive on this machine."""

    exit_code = 66
    code = "RES-RUN-404"


class ClusterUnavailable(ResilientError):
    """The API server of a cluster did not answer, or asked for a later retry."""

    exit_code = 69
    code = "RES-CLUSTER-503"


class ClusterDenied(ResilientError):
    """A cluster rejected the credentials, or does not allow the operation."""

    exit_code = 77
    code = "RES-CLUSTER-403"


class ClusterConflict(ResilientError):
    """Another client set a field of a cluster's object to another value; nothing was changed."""

    exit_code = 80
    code = "RES-CLUSTER-409"


class IntegrityError(ResilientError):
    """Content differs from what was committed; ``key`` names the file, ``tensor`` its tensor."""

    exit_code = 1
    code = "RES-CKPT-DAMAGED"

    def __init__(self, message: str, *, key: str = "", tensor: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.key = key
        self.tensor = tensor


class SignatureRefused(IntegrityError):
    """A signature is required, and the checkpoint has none from this key."""

    exit_code = 77
    code = "RES-CKPT-SIGNATURE"


class NoIntactCheckpoint(ResilientError):
    """All committed checkpoints are damaged."""

    exit_code = 3
    code = "RES-CKPT-NONE-INTACT"


class IncompatibleCheckpoint(ResilientError):
    """The checkpoint is intact, but this code, model or format version cannot load it."""

    exit_code = 65
    code = "RES-CKPT-INCOMPATIBLE"


class UnknownLayout(ResilientError):
    """The path holds no checkpoint of a supported tool."""

    exit_code = 65
    code = "RES-CKPT-LAYOUT"


class UnsavableState(ResilientError):
    """A value can be saved only with pickle; ``path`` names the value."""

    exit_code = 78
    code = "RES-STATE-UNSAVABLE"

    def __init__(self, message: str, *, path: str = "", hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.path = path


class SaveFailed(ResilientError):
    """A checkpoint could not be made durable; older checkpoints are unchanged."""

    exit_code = 73
    code = "RES-SAVE-FAILED"


class Fenced(ResilientError):
    """A newer attempt of this run exists; this process must not write any more."""

    exit_code = 80
    code = "RES-FENCED"


class WriterAlive(ResilientError):
    """A process that may write to the repository is alive; it was not fenced."""

    exit_code = 80
    code = "RES-WRITER-ALIVE"


class PeerFailed(ResilientError):
    """Another rank failed; ``rank`` is the first failed rank."""

    exit_code = 69
    code = "RES-PEER"

    def __init__(self, message: str, *, rank: int = -1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class SaveAbandoned(SaveFailed):
    """A checkpoint could not be made durable because another rank ended or stopped responding."""

    exit_code = PeerFailed.exit_code
    code = "RES-SAVE-PEER"


class DeadlineExceeded(ResilientError):
    """An operation did not finish within ``deadline_seconds``."""

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
    """The loss is not finite, or is a spike, and rollbacks no longer help."""

    exit_code = 70
    code = "RES-NUMBERS"


class WorkerFailed(ResilientError):
    """A worker ended with ``status``: its own exit code, or 128 plus the signal's number."""

    code = "RES-WORKER"

    def __init__(self, message: str, *, status: int = 1, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.exit_code = status


class Preempted(ResilientError):
    """The run stopped on request after a durable save of the agreed step: requeue the job."""

    exit_code = 75
    code = "RES-PREEMPTED"


REFUSAL_CODES = frozenset(
    kind.code
    for kind in (
        ConfigError,
        IncompatibleCheckpoint,
        IntegrityError,
        NoIntactCheckpoint,
        NotExclusive,
        NothingToResume,
        RepositoryNotFound,
        SignatureRefused,
        StartOverRefused,
        UnknownLayout,
        UnsavableState,
        UsageError,
        WriterAlive,
    )
)
"""RES ids of errors with which a rank refuses to start; the next attempt would refuse as well."""


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
    ExitCode(0, "", "done", "Done, or verified, or no difference.", "complete the job"),
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
        "The run was asked to stop, and every step up to the agreed step is durable. The code also "
        "means that no new step was trained, or that a rank was killed during the stop and an "
        "older checkpoint is intact. The same command resumes.",
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

UNKNOWN = "New codes may be added: treat an unknown code as a failure."
OWN = "`train` returns the exit code of a script; 128 + N means that signal N ended a worker."

PERMANENT = tuple(code.number for code in EXIT_CODES if code.scheduler.startswith("fail the job"))
"""Exit codes after which another start would end the same way."""

EXIT_CODE_FILE = "RESILIENT_EXIT_CODE_FILE"
"""Environment variable with the path of a file that receives the program's exit code as a line."""
