"""Resumability of a trainer's own checkpoint, checked before the trainer loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import RISKS
from resilient.diff.verification import verify_folder
from resilient.distributed.launch_env import read_launch
from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    UnknownLayout,
)
from resilient.layouts.resumability import assess_resumability
from resilient.redaction import shell_quote

if TYPE_CHECKING:
    from collections.abc import Collection


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """Checked checkpoint that a trainer is about to load.

    Attributes:
        path: Path or URL.
        lost: State that a resume loses, in words.
        refusal: Error to raise if a run would start from it; None if the checkpoint is accepted.
    """

    path: str
    lost: tuple[str, ...]
    refusal: ResilientError | None


def judge_checkpoint(
    path: str, *, trusts_pickle: bool = False, buffers: Collection[str] = ()
) -> JudgedCheckpoint | None:
    """Read every byte of a checkpoint and assess its resumability; execute and write nothing.

    Args:
        path: Path or URL.
        trusts_pickle: Whether the user lets the trainer run the code that a pickle names.
        buffers: Names of the model's buffers.

    Returns:
        None if the path is empty or no known tool wrote it. The trainer reports that error.

    Raises:
        StoreError: The checkpoint could not be read.
    """
    try:
        verified = verify_folder(path, buffers=buffers)
    except (KeyNotFound, UnknownLayout):
        return None
    verdict = verified.verdict
    if trusts_pickle and verdict.answer == "no":
        problems = tuple(problem for problem in verified.contents.problems if problem.help != RISKS)
        verdict = assess_resumability(replace(verified.contents, problems=problems), path)
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
