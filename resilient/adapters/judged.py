"""Verdict on a checkpoint of a trainer's own, before that trainer loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from resilient.comparison.proving import RISKS
from resilient.comparison.verification import verify_folder
from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    UnknownLayout,
)
from resilient.layouts.judging import judge
from resilient.showing import quoted
from resilient.world.launch import read_launch


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


def judge_checkpoint(path: str, *, trusts_pickle: bool = False) -> JudgedCheckpoint | None:
    """Read every byte of a checkpoint and ask the judge; nothing is executed or written.

    Args:
        path: path or URL.
        trusts_pickle: whether the user had the trainer run the code that a pickle names.

    Returns:
        None if nothing is there or no known tool wrote it: the trainer names that error.

    Raises:
        StoreError: it could not be read.
    """
    try:
        verified = verify_folder(path)
    except (KeyNotFound, UnknownLayout):
        return None
    verdict = verified.verdict
    if trusts_pickle and verdict.answer == "no":
        problems = tuple(one for one in verified.contents.problems if one.help != RISKS)
        verdict = judge(replace(verified.contents, problems=problems), path)
    refusal: ResilientError | None = None
    verify = f"resilient ckpt verify {quoted(path)}"
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
