"""Verdict on a checkpoint of a trainer's own, before that trainer loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from resilient.diff.verification import verify_folder
from resilient.distributed.launch_env import read_launch
from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    UnknownLayout,
)
from resilient.redaction import shell_quote


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """A checkpoint that a trainer was told to load.

    Attributes:
        path: path or URL.
        lost: state that a resume loses, in words.
        refusal: the error to raise where a run would start from it; None if it may.
    """

    path: str
    lost: tuple[str, ...]
    refusal: ResilientError | None


def judge_checkpoint(path: str) -> JudgedCheckpoint | None:
    """Read every byte of a checkpoint and ask the judge; nothing is executed or written.

    Returns:
        None if nothing is there or no known tool wrote it: the trainer names that error.

    Raises:
        StoreError: it could not be read.
    """
    try:
        verdict = verify_folder(path).verdict
    except (KeyNotFound, UnknownLayout):
        return None
    refusal: ResilientError | None = None
    verify = f"resilient ckpt verify {shell_quote(path)}"
    if verdict.answer == "no":
        refusal = IntegrityError(
            f"cannot load `{path}`: it is {verdict.line()}. Nothing was loaded or committed",
            key=path,
            hint=verify,
        )
    elif verdict.lost and read_launch(os.environ).strict_resume:
        refusal = IncompatibleCheckpoint(
            f"cannot load `{path}`: it is resumable with loss of {'; '.join(verdict.lost)}, and "
            "strict_resume refuses a loss. Nothing was loaded or committed",
            hint=verify,
        )
    return JudgedCheckpoint(path, tuple(verdict.lost), refusal)
