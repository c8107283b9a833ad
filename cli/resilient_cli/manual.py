"""Explanations of error codes, help topics, and the JSON schemas of ``--json``.

The message of an error describes the case at hand; the explanation of its code describes the
usual cause, what is safe and what to do next. A help topic belongs to no single command. The
schemas are files of the package: one for each command, and one for errors. Programs can validate
our output against them, and our tests do. This module loads no validator.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resilient_cli.output import Table


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one ``RES-`` code.

    Attributes:
        cause: Usual cause.
        safe: Data that was not changed or not lost.
        remedies: Next steps, the most likely first; commands where there are any.
    """

    cause: str
    safe: str
    remedies: tuple[str, ...]


_NOTHING = "Nothing was written or deleted."
_OLDER = "Checkpoints that were committed before are untouched."
_LS = "resilient ckpt ls REPO"
_DOCTOR = "resilient doctor --repo REPO"
_SAME = "resilient train ..., the same command again: it resumes from the newest whole checkpoint"
_LOGS = "resilient logs RUN, for the first failure"

EXPLANATIONS = {
    "RES-ERROR": Explanation(
        "Something failed that has no id of its own, or the program has a bug.",
        _OLDER,
        ("resilient COMMAND --debug, the same again, for the traceback",),
    ),
    "RES-CONFIG": Explanation(
        "A setting is missing, unknown, of the wrong kind, or contradicts another. The message "
        "names it and where it came from.",
        _NOTHING,
        ("resilient config check FILE", "resilient train --dry-run ..., once it is mended"),
    ),
    "RES-USAGE": Explanation(
        "The command line has an option or an argument that the command does not know.",
        _NOTHING,
        ("resilient COMMAND --help",),
    ),
    "RES-STORE": Explanation(
        "The storage refused something and gave a reason that is no other id's.",
        _OLDER,
        (_DOCTOR, "resilient COMMAND --debug, the same again, for what the storage said"),
    ),
    "RES-STORE-404": Explanation(
        "An object that was asked for by name is not in the store: another process deleted it, "
        "or the name is wrong.",
        _NOTHING,
        (_LS, "resilient ckpt verify --all REPO"),
    ),
    "RES-STORE-412": Explanation(
        "An object was to be created and must not exist, and it does: two processes wanted the "
        "same name. This is how lives of a run keep out of each other's way.",
        "What was there is as it was.",
        (
            "resilient ckpt unlock REPO, for who writes there",
            "resilient stop RUN, of the other job",
        ),
    ),
    "RES-STORE-503": Explanation(
        "The store did not answer, throttled, or the network to it is down. It was tried again "
        "until the deadline.",
        "Nothing counts as written before the store said so.",
        (_DOCTOR, "start the same command again later"),
    ),
    "RES-STORE-507": Explanation(
        "The disk or the quota of the store is full.",
        _OLDER,
        (
            "resilient ckpt prune REPO --keep-last 3 --grace 0 --dry-run",
            "make space, then start the same command again",
        ),
    ),
    "RES-STORE-403": Explanation(
        "Credentials are missing, expired or too weak, or the mode bits or a read-only mount "
        "forbid it.",
        _NOTHING,
        (_DOCTOR, "renew the credentials in RESILIENT_STORAGE_OPTIONS or the environment"),
    ),
    "RES-STORE-EXCL": Explanation(
        "The store cannot create an object only if it is absent, so it cannot stop two jobs "
        "from writing to one repository.",
        _NOTHING,
        (
            "resilient help storage, for stores that can",
            "resilient train --single-writer ..., to promise that no second job writes there",
        ),
    ),
    "RES-REPO-404": Explanation(
        "No run ever began at this URL. Often the URL is misspelled, or the credentials see "
        "another account.",
        _NOTHING,
        (_DOCTOR, "resilient help storage, for how a URL is written"),
    ),
    "RES-RESUME-NONE": Explanation(
        "The repository has no checkpoint that the reference names.",
        _NOTHING,
        (_LS, "resilient help refs"),
    ),
    "RES-START-OVER": Explanation(
        "The run would begin at step 0, but its repository or output folder holds checkpoints of "
        "resilient, Hugging Face, accelerate, DeepSpeed, Lightning, DCP or Megatron.",
        _NOTHING,
        (
            "resilient train --resume PATH SCRIPT, to continue from the checkpoint of the message",
            "resilient train --resume never SCRIPT, to start at step 0; checkpoints stay",
        ),
    ),
    "RES-SCRIPT-404": Explanation(
        "The script to train with is not a file, or the module cannot be found.",
        _NOTHING,
        ("resilient train --dry-run SCRIPT, from the folder that its path begins in",),
    ),
    "RES-RUN-404": Explanation(
        "A command wants to speak to the launcher of a run, and none that began on this machine "
        "is alive: it ended, was killed, or runs on another machine.",
        _NOTHING,
        ("resilient status RUN", "ssh HOST resilient stop RUN, with the host of the message"),
    ),
    "RES-CLUSTER-503": Explanation(
        "The API server of Kubernetes did not answer kubectl, or was too busy to.",
        "The run goes on without whoever asks; what was asked was not done, or not all of it.",
        ("kubectl cluster-info", "run the same command again"),
    ),
    "RES-CLUSTER-403": Explanation(
        "The cluster does not know who asks, or the role of whoever asks does not allow it.",
        _NOTHING,
        ("kubectl auth whoami", "kubectl auth can-i patch jobs"),
    ),
    "RES-CLUSTER-409": Explanation(
        "Another tool set a field of an object of the run, to another value: server-side apply "
        "takes nothing away from others.",
        _NOTHING,
        (
            "kubectl get job NAME -o yaml --show-managed-fields, to see whose it is",
            "kubectl apply --server-side --force-conflicts -f FILE, of what `k8s render` wrote",
        ),
    ),
    "RES-CKPT-DAMAGED": Explanation(
        "Bytes are not what was committed: a bit flipped, a file is short, missing or replaced. "
        "The message names file and tensor.",
        "Damaged bytes were not handed on. Older checkpoints are tried by `train` on its own.",
        (
            "resilient ckpt verify --all REPO",
            "resilient ckpt repair REF REPO",
            "resilient ckpt repair REF REPO --from COPY",
        ),
    ),
    "RES-CKPT-SIGNATURE": Explanation(
        "A signature is required, and the checkpoint has none, or one by another key.",
        "Nothing of it was used.",
        (
            "resilient ckpt verify --require-signature REF REPO",
            "resilient ckpt sign REF REPO, when you trust it",
        ),
    ),
    "RES-CKPT-NONE-INTACT": Explanation(
        "Checkpoints were committed, and none of them can be read whole. Training does not begin "
        "from scratch on its own: that would hide the loss.",
        "Everything is as it was found.",
        (
            "resilient ckpt verify --all REPO",
            "resilient ckpt repair latest REPO",
            "resilient train --resume never ..., to begin again on purpose",
        ),
    ),
    "RES-CKPT-INCOMPATIBLE": Explanation(
        "The checkpoint is whole, but the model, the optimizer, the arguments or the version of "
        "the format differ from what wants to read it. The message names the first difference.",
        _NOTHING,
        ("resilient ckpt inspect REF REPO --tensors", "use the code that wrote it"),
    ),
    "RES-CKPT-LAYOUT": Explanation(
        "What lies there is no checkpoint of any tool that is known.",
        _NOTHING,
        ("resilient ckpt inspect PATH, of the folder of one checkpoint", _LS),
    ),
    "RES-STATE-UNSAVABLE": Explanation(
        "A state dict holds a value that only pickle could save. Checkpoints hold tensors and "
        "JSON, so that reading one never runs code.",
        _OLDER,
        ("give the object a state_dict of tensors, numbers, texts, lists and dicts",),
    ),
    "RES-SAVE-FAILED": Explanation(
        "A checkpoint could not be made durable.",
        _OLDER,
        ("resilient doctor --repo REPO, for space and rights", _SAME),
    ),
    "RES-SAVE-PEER": Explanation(
        "Another rank ended or went silent while a checkpoint was being saved, so it was not "
        "committed: half of one is worth nothing.",
        _OLDER,
        (_LOGS, _SAME),
    ),
    "RES-FENCED": Explanation(
        "A newer life of this run exists; this process is one that everybody thought dead, or a "
        "second job was started on the repository.",
        "The newer life's work is untouched, and this one writes nothing more.",
        (_LS, "resilient stop RUN, of one of the two jobs"),
    ),
    "RES-WRITER-ALIVE": Explanation(
        "A start by hand, or `resilient ckpt unlock --yes`, would have ended the run of a process "
        "that is alive and writes to the repository. The message names the process.",
        "Nothing was changed; the run goes on.",
        (
            "resilient stop RUN",
            "resilient train --take-over SCRIPT, which loses its unsaved steps",
            "resilient ckpt unlock REPO --yes --force, which loses them as well",
        ),
    ),
    "RES-PEER": Explanation(
        "Another rank could not do its part. The message names the rank that failed first.",
        _OLDER,
        ("resilient logs RUN --rank RANK, for its own error", _SAME),
    ),
    "RES-DEADLINE": Explanation(
        "Something did not happen in time: a rank hangs, a store is slow, or the time is short "
        "for this machine.",
        _OLDER,
        ("resilient doctor --repo REPO, for how slow the store is", _SAME),
    ),
    "RES-CRASH-LOOP": Explanation(
        "The run failed again and again without a new checkpoint, so starting it once more would "
        "not help.",
        _OLDER,
        (_LOGS, "resilient report RUN"),
    ),
    "RES-NUMBERS": Explanation(
        "The loss became NaN, infinite or far from what it was, and going back and leaving out "
        "data did not help.",
        _OLDER,
        (_LS, "lower the learning rate, or clip gradients"),
    ),
    "RES-WORKER": Explanation(
        "A worker of the launcher ended with an error of the script. The report names rank, exit "
        "code or signal, and the traceback.",
        _OLDER,
        ("resilient logs RUN, for the traceback", _SAME),
    ),
    "RES-PREEMPTED": Explanation(
        "The job was asked to stop, saved the agreed step, and ended in good order.",
        "Everything up to that step is durable.",
        (_SAME,),
    ),
}

_REFS = "How a command line names a checkpoint. The first row that fits is taken."
_STORAGE = (
    "A repository is a path or a URL. Two jobs can be kept apart only where a store can create an "
    "object if it is absent; elsewhere `train` ends with 78 until --single-writer promises that "
    "no second job writes there."
)
_CREDENTIALS = """Credentials and endpoints: from the environment, or RESILIENT_STORAGE_OPTIONS.
  export RESILIENT_STORAGE_OPTIONS='{"endpoint": "https://s3.example"}'
They are in no checkpoint, event or error. `resilient doctor --repo URL` tries the store out."""
_ENVIRONMENT = (
    "Options of a command go before environment variables, and those before defaults. Arguments "
    "of training come from Python, from a file (TOML, YAML, JSON) or from the script's own "
    "command line; what was used is in every checkpoint, and a resume with others prints the "
    "difference first. A yes or no is 1, true, yes, on, 0, false, no or off, in any case; an empty "
    "variable counts as unset, and another value is refused."
)

REFS = (
    _REFS,
    Table(
        ("REF", "NAMES"),
        (
            ("latest", "what a resume would try first"),
            ("latest~2", "the one that a resume would try two later"),
            ("checkpoint-120-g3", "step 120 of the run's third life"),
            ("step:120, checkpoint-120, 120", "step 120: the newest life that has it"),
            ("release", "what `resilient ckpt tag REF release` named"),
            ("@2026-11-20T10:00", "the newest of the line that was saved by then (UTC)"),
            ("@{1}", "where the life before the newest ended (`ckpt reflog` lists them)"),
            ("best:loss, best:accuracy:max", "the best that was measured"),
            ("7f3a91c0", "what has a root that begins so: four digits at least"),
            ("runs/mine/checkpoint-120-g3", "a path: repository and checkpoint in one"),
            ("runs/mine/latest~2", "the same for any reference (`ckpt diff` and `ckpt cat`)"),
            ("latest:trainer_state.json", "a tensor, a value or a file of it (`ckpt cat`)"),
        ),
    ),
    "Example: resilient ckpt inspect latest~1 runs/mine",
)

STORAGE = (
    _STORAGE,
    Table(
        ("URL", "NEEDS", "KEEPS TWO JOBS APART"),
        (
            ("runs/mine, file:///runs/mine", "-", "yes, where the file system has hard links"),
            (
                "s3://bucket/run",
                "resilient-train[s3], or [fast]",
                "yes, if the server has If-None-Match",
            ),
            ("gs://bucket/run", "resilient-train[gcs]", "yes"),
            ("az://container/run", "resilient-train[azure]", "yes"),
            ("memory://run", "-", "within one process"),
            ("any other fsspec URL", "its fsspec package", "no"),
        ),
    ),
    _CREDENTIALS,
)

ENVIRONMENT = (
    _ENVIRONMENT,
    Table(
        ("VARIABLE", "STANDS FOR"),
        (
            ("RESILIENT_REPO", "--repo"),
            ("RESILIENT_EVERY", "--every"),
            ("RESILIENT_LOG_DIR", "--log-dir"),
            ("RESILIENT_NOTICE", "--notice"),
            ("RESILIENT_STORAGE_OPTIONS", "--storage-options: JSON with endpoint and credentials"),
            ("RESILIENT_REQUIRE_SIGNATURE", "--require-signature"),
            ("RESILIENT_STRICT_RESUME", "--strict-resume"),
            ("RESILIENT_TAKE_OVER", "--take-over"),
            ("RESILIENT_JOB", "name of the job: its starts take over from each other"),
            ("RESILIENT_SIGNING_KEY, RESILIENT_SIGNING_KEY_FILE", "the key that signs and proves"),
            ("RESILIENT_SHARED_FOLDER", "the folder in memory for staged checkpoints: /dev/shm"),
            ("NO_COLOR, FORCE_COLOR", "no colours; colours even without a terminal"),
        ),
    ),
)

_FOLDER = Path(__file__).parent / "schemas"
_SUFFIX = ".json"


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: ``ckpt.ls`` for ``resilient/ckpt.ls@1``."""
    return tuple(sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}")))


def schema_text(name: str) -> str:
    """Return the text of the JSON Schema (draft 2020-12) with a name of :func:`schema_names`.

    Raises:
        KeyError: No schema has this name.
    """
    if name not in schema_names():
        raise KeyError(name)
    return (_FOLDER / f"{name}{_SUFFIX}").read_text(encoding="utf-8")


def schema_document(name: str) -> dict[str, Any]:
    """Return the JSON Schema of this name as a value."""
    document: dict[str, Any] = json.loads(schema_text(name))
    return document
