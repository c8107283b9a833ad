"""Pages that belong to no single command: what a reference is, what a store is, who is asked."""

from __future__ import annotations

from resilient_cli.render import Table

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
