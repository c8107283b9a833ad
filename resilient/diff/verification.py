"""Full verification of another tool's checkpoint, and check whether training can resume from it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from resilient.diff.foreign_verify import RISKS, verify_foreign
from resilient.distributed.launch_env import read_launch
from resilient.errors import (
    IncompatibleCheckpoint,
    IntegrityError,
    KeyNotFound,
    ResilientError,
    UnknownLayout,
)
from resilient.layouts.detect import read_layout
from resilient.layouts.incomplete import is_empty
from resilient.layouts.resumability import assess_resumability
from resilient.redaction import shell_quote
from resilient.storage.folder import open_folder

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from resilient.layouts.model import Contents, Resumability
    from resilient.layouts.resumability import Alternatives
    from resilient.storage.folder import DirectoryListing, Folder


@dataclass(frozen=True, slots=True)
class VerifiedFolder:
    """Result of the verification of another tool's checkpoint.

    Attributes:
        url: URL of the folder.
        listing: Files of the checkpoint.
        contents: Contents, with all problems.
        verdict: Result of the resumability check.
    """

    url: str
    listing: DirectoryListing
    contents: Contents
    verdict: Resumability


def verify_folder(
    place: str | Folder, others: Alternatives | None = None, buffers: Collection[str] = ()
) -> VerifiedFolder:
    """Read every byte of a checkpoint, and assess its resumability without running its code.

    Args:
        place: Path, URL or open folder.
        others: Other ways to continue the run.
        buffers: Names of weights that are known not to be parameters.

    Raises:
        KeyNotFound: The folder is missing, or empty without the name of a checkpoint.
        UnknownLayout: No known tool wrote the checkpoint.
        StoreError: A file could not be read.
    """
    folder = open_folder(place) if isinstance(place, str) else place
    listing = folder.list()
    if not listing.sizes and not listing.outside and not is_empty(folder.url, listing):
        raise KeyNotFound(f"nothing is at {folder.url}", key=folder.url)
    contents = read_layout(folder, listing)
    if contents is None:
        raise UnknownLayout(
            f"`{folder.url}` is not a checkpoint of a supported tool",
            hint="give the path of one checkpoint, a folder or a file, of a supported tool",
        )
    problems = (*contents.problems, *verify_foreign(folder, listing, contents, buffers))
    contents = replace(contents, problems=problems)
    return VerifiedFolder(
        folder.url, listing, contents, assess_resumability(contents, folder.url, others)
    )


def require_importable(verified: VerifiedFolder, folder: str) -> None:
    """Require that our Trainer can continue from a folder, with or without a loss.

    Args:
        verified: Result of :func:`verify_folder`.
        folder: The folder, as the user named it.

    Raises:
        IntegrityError: The verdict is "not resumable".
        IncompatibleCheckpoint: Our Trainer does not import the checkpoint.
    """
    verdict, reasons = verified.verdict, verified.contents.not_imported
    if verdict.answer == "no":
        raise IntegrityError(
            f"cannot import `{folder}`: it is {verdict.line()}. Nothing was committed",
            key=folder,
            hint=f"resilient ckpt verify {shell_quote(folder)}",
        )
    if reasons:
        raise IncompatibleCheckpoint(
            f"cannot import `{folder}`: {'; '.join(reasons)}. Nothing was committed",
            hint=verdict.command or f"resilient ckpt inspect {shell_quote(folder)}",
        )


def require_trainer_folder(folder: str, *, strict: bool) -> None:
    """Require a checkpoint of the Hugging Face Trainer that our Trainer imports. Reads only.

    Args:
        folder: Path of the folder or file, as the user named it.
        strict: Whether a loss is refused as well.

    Raises:
        IntegrityError: The checkpoint is damaged.
        IncompatibleCheckpoint: Our Trainer does not import it, or ``strict`` refuses a loss.
        UnknownLayout: No known tool wrote it.
        KeyNotFound: The folder is empty or missing.
        StoreError: A file could not be read.
    """
    verified = verify_folder(folder)
    require_importable(verified, folder)
    if verified.contents.layout != "hf-trainer":
        raise IncompatibleCheckpoint(
            f"cannot import `{folder}`: it is a checkpoint of {verified.contents.title}, and only "
            "those of the Hugging Face Trainer are imported. Nothing was committed",
            hint=verified.verdict.command or f"resilient ckpt inspect {shell_quote(folder)}",
        )
    if strict:
        refuse_losses(folder, verified.verdict.lost)


def refuse_losses(folder: str, lost: Sequence[str]) -> None:
    """Refuse a resume that would lose state; for ``strict_resume``.

    Raises:
        IncompatibleCheckpoint: A resume would lose state.
    """
    if lost:
        raise IncompatibleCheckpoint(
            f"cannot import `{folder}`: it is resumable with loss of {'; '.join(lost)}, and "
            "strict_resume refuses a loss. Nothing was committed",
            hint=f"resilient ckpt verify {shell_quote(folder)}",
        )


@dataclass(frozen=True, slots=True)
class JudgedCheckpoint:
    """Verified checkpoint that a trainer is about to load.

    Attributes:
        path: Path or URL.
        lost: Descriptions of the state that a resume loses.
        refusal: Error to raise if a run would start from it; None if the checkpoint is accepted.
    """

    path: str
    lost: tuple[str, ...]
    refusal: ResilientError | None


def judge_checkpoint(
    path: str, *, trusts_pickle: bool = False, buffers: Collection[str] = ()
) -> JudgedCheckpoint | None:
    """Read every byte of a checkpoint, and assess its resumability without running its code.

    Args:
        path: Path or URL.
        trusts_pickle: Whether the user lets the trainer run the code that a pickle names.
        buffers: Names of the model's buffers.

    Returns:
        None if the path is empty or no known tool wrote the checkpoint; the trainer then raises its
        own error.

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
