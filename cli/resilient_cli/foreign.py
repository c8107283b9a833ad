"""Checkpoints and runs of other tools on a command line.

An argument may name a checkpoint of any tool, a folder with several checkpoints of another tool, or
a repository of this project.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.checkpoint.generations import list_numbers
from resilient.checkpoint.refs import resolve
from resilient.checkpoint.verify import verify
from resilient.distributed.launch_env import read_storage_options
from resilient.errors import (
    IntegrityError,
    KeyNotFound,
    NothingToResume,
    RepositoryNotFound,
    ResilientError,
    StoreError,
    UnknownLayout,
    UsageError,
)
from resilient.format.keys import parse_checkpoint
from resilient.layouts.detect import LAYOUTS, read_layout
from resilient.layouts.incomplete import is_empty, saved_name
from resilient.layouts.model import Remedy
from resilient.layouts.neighbours import place_in_run
from resilient.layouts.resumability import (
    Alternatives,
    RepairOutcome,
    assess_resumability,
    is_costly,
    reasons,
)
from resilient.layouts.run_folder import (
    checkpoints_in,
    checkpoints_of,
    pointed_at,
    referred,
    with_last,
)
from resilient.layouts.single_file import ALONE
from resilient.layouts.weights import SAFE, TORCH
from resilient.redaction import shell_quote
from resilient.storage.folder import DirectoryListing, open_folder
from resilient.storage.open import open_store
from resilient.storage.urls import protocol_of
from resilient_cli.durations import WITHIN_SECONDS
from resilient_cli.output import Progress
from resilient_cli.repositories import open_repository
from resilient_cli.store_wrappers import ProgressFolder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from resilient.diff.model import CheckpointView
    from resilient.layouts.model import Contents, Resumability
    from resilient.layouts.run_folder import Pointers, RunCheckpoint
    from resilient.storage.folder import Folder

_SIBLINGS_MAX = 3
_PLANNED_BYTES_MAX = 1 << 30
"""Largest checkpoint for which `ckpt inspect` plans a repair, because a plan reads every byte."""


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """Checkpoint of another tool: contents, resumability and files.

    Attributes:
        url: URL without secrets.
        contents: Contents of the checkpoint.
        verdict: Whether training can continue from it.
        listing: Files of the checkpoint.
        others: Other ways to continue the run; the default if no search was needed.
        read_bytes: Bytes read for a verification; None if only headers were read.
    """

    url: str
    contents: Contents
    verdict: Resumability
    listing: DirectoryListing
    others: Alternatives = field(default_factory=Alternatives)
    read_bytes: int | None = None

    @property
    def is_damaged(self) -> bool:
        """True if a resume fails, or loses a state that the tool had saved."""
        return self.verdict.answer == "no" or is_costly(self.contents.problems)


def is_foreign(url: str) -> bool:
    """Return True if a location has files and is not a native repository.

    Raises:
        StoreError: The location could not be read.
    """
    if url.endswith((SAFE, *TORCH)):
        return True
    if protocol_of(url) == "file" and not os.path.isdir(url.removeprefix("file://")):  # noqa: PTH112
        return os.path.isfile(url)  # noqa: PTH113 - a URL is no Path
    options = read_storage_options(os.environ)
    store = open_store(url, within_seconds=WITHIN_SECONDS.get(), storage_options=options)
    return not committed(store) and not list_numbers(store)


def inspect_if_known(url: str | None, *, is_read: bool) -> ForeignCheckpoint | None:
    """Return the checkpoint of another tool at a location; None if no known tool wrote it.

    Args:
        url: Path or URL.
        is_read: Whether every byte is read, and not only headers.

    Raises:
        UnknownLayout: The location is only a folder of checkpoints; the hint names one of them.
        StoreError: The location could not be read.
    """
    try:
        return inspect_foreign(url, is_read=is_read) if url and is_foreign(url) else None
    except UnknownLayout as error:
        if error.hint:
            raise
        return None


def inspect_foreign(url: str, *, is_read: bool = False) -> ForeignCheckpoint | None:
    """Return the checkpoint of another tool at a location; None if nothing is there.

    Args:
        url: Path or URL.
        is_read: Whether every byte is read, and not only headers.

    Raises:
        UnknownLayout: The location holds no checkpoint.
        StoreError: The location could not be read.
    """
    checkpoint_folder = open_foreign(url)
    if checkpoint_folder is None:
        return None
    folder, listing, contents = checkpoint_folder
    read_bytes = None
    if is_read:
        from resilient.diff.foreign_verify import (
            verify_foreign,
        )  # it needs numpy, which listing does not

        with Progress("reading") as progress:
            progress_folder = ProgressFolder(folder, progress, sum(listing.sizes.values()))
            found_problems = verify_foreign(progress_folder, listing, contents)
        read_bytes = progress_folder.seen_bytes
        contents = replace(contents, problems=(*contents.problems, *found_problems))
    verdict = assess_resumability(contents, folder.url)
    alternatives = Alternatives()
    if verdict.answer != "yes" or any(
        problem.cure is Remedy.EARLIER for problem in contents.problems
    ):
        alternatives = _alternatives(url, listing, verdict, is_read=is_read)
        verdict = assess_resumability(contents, folder.url, alternatives)
    return ForeignCheckpoint(folder.url, contents, verdict, listing, alternatives, read_bytes)


def _alternatives(
    url: str, listing: DirectoryListing, verdict: Resumability, *, is_read: bool
) -> Alternatives:
    """Return the other ways to continue the run of a checkpoint.

    Raises:
        StoreError: A place could not be read.
    """
    repair = RepairOutcome.UNKNOWN
    size_bytes = sum(listing.sizes.values())
    is_planned = is_read or size_bytes <= _PLANNED_BYTES_MAX
    if verdict.answer != "yes" and protocol_of(url) == "file" and is_planned:
        repair = _outcome(url)
    return Alternatives(_sibling(url, is_read=is_read), repair)


def _outcome(url: str) -> RepairOutcome:
    """Return the outcome that `resilient ckpt repair` would have for a checkpoint."""
    from resilient.layout_repair.plan import (
        plan_layout_repair,
    )  # it needs numpy, which listing does not

    plan = plan_layout_repair(url)
    if not plan.is_repaired or plan.verdict.answer == "no":
        return RepairOutcome.NONE
    return (
        RepairOutcome.LOSSLESS
        if plan.is_whole and plan.verdict.answer == "yes"
        else RepairOutcome.LOSSY
    )


def open_foreign(url: str) -> tuple[Folder, DirectoryListing, Contents] | None:
    """Return the folder at a location, its files and their contents; None if nothing is there.

    Raises:
        UnknownLayout: The location holds no checkpoint.
        StoreError: The location could not be read.
    """
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        listing = folder.list()
    except KeyNotFound:
        return None
    if not listing.sizes and not listing.outside and not is_empty(folder.url, listing):
        return None
    contents = read_layout(folder, listing)
    if contents is None:
        raise _unknown(folder.url, listing)
    return folder, listing, contents


def explain_not_found(error: RepositoryNotFound) -> ResilientError:
    """Return the error for a place without a repository; a better error if it has other files.

    Args:
        error: The error; its ``url`` is the place.
    """
    if protocol_of(error.url) != "file":
        return error
    folder = open_folder(error.url)
    try:
        listing = folder.list()
        contents = read_layout(folder, listing)
    except StoreError:
        return error
    if contents is not None:
        return _only_repositories(folder, contents)
    if not checkpoints_of(listing):
        return error
    return UsageError(
        f"`{folder.url}` is a folder of checkpoints of another tool, and this form of the command "
        "reads only repositories of `resilient`",
        hint=f"resilient ckpt ls {shell_quote(folder.url)}",
    )


def _only_repositories(folder: Folder, contents: Contents) -> ResilientError:
    """Return the refusal of a checkpoint of another tool; it names the damage, if there is any."""
    hint = f"resilient ckpt verify {shell_quote(folder.url)}"
    fatal_problems = (problem for problem in contents.problems if problem.is_fatal)
    damage = [problem for problem in fatal_problems if problem.what != ALONE]
    if damage:
        text = f"`{folder.url}` is damaged: {reasons(damage)[0]}"
        return IntegrityError(text, key=folder.url, hint=hint)
    return UsageError(
        f"`{folder.url}` is a checkpoint of another tool ({contents.title}), and this form of the "
        "command reads only repositories of `resilient`",
        hint=hint,
    )


def _unknown(url: str, listing: DirectoryListing) -> UnknownLayout:
    checkpoint_names = [
        name
        for name in checkpoints_in(listing)[:_SIBLINGS_MAX]
        if _answer(f"{url.rstrip('/')}/{name}", is_read=False)
    ]
    newer = f"{url.rstrip('/')}/{checkpoint_names[0]}" if checkpoint_names else ""
    hint = f"resilient ckpt inspect {shell_quote(newer)}" if checkpoint_names else ""
    newest = f"; its newest checkpoint is `{checkpoint_names[0][:80]}`" if checkpoint_names else ""
    hint_text = newest or "; docs/layouts.md lists the supported layouts"
    if protocol_of(url) in ("http", "https"):
        hint_text = "; over http a folder cannot be listed: give the URL of one file"
        hint = f"resilient ckpt inspect {shell_quote(url.rstrip('/') + '/model.safetensors')}"
    return UnknownLayout(
        f"`{url}` is not a checkpoint of a supported tool{hint_text}",
        hint=hint or _GIVE_ONE,
    )


_GIVE_ONE = "give the path of one checkpoint, a folder or a file, of a supported tool"


def _sibling(url: str, *, is_read: bool) -> str:
    """Return the newest other checkpoint that can be resumed, preferably without loss.

    Args:
        url: The checkpoint.
        is_read: Whether every byte of the other checkpoint is read, and not only its headers.
    """
    parent, _, own_name = place_in_run(url).rstrip("/").rpartition("/")
    if protocol_of(url) != "file" or not any(character.isdigit() for character in own_name):
        return ""
    stem = (saved_name(own_name) or own_name).rstrip("0123456789")
    numbers = {
        int(name[len(stem) :]): name
        for name in os.listdir(parent or ".")  # noqa: PTH208 - a URL is no Path
        if name != own_name and name.startswith(stem) and name[len(stem) :].isascii()
        if name[len(stem) :].isdigit() and len(name) < len(stem) + 12
    }
    lossy_path = ""
    for _, name in sorted(numbers.items(), reverse=True)[:_SIBLINGS_MAX]:
        path = f"{parent}/{name}" if parent else name
        answer = _answer(path, is_read=is_read)
        if answer == "yes":
            return path
        lossy_path = lossy_path or (path if answer == "partly" else "")
    return lossy_path


def _answer(path: str, *, is_read: bool) -> str:
    """Return the resumability of another checkpoint; empty if it cannot be read."""
    try:
        if is_read:
            from resilient.diff.verification import verify_folder

            return verify_folder(path).verdict.answer
        folder = open_folder(path)
        contents = read_layout(folder, folder.list())
    except (StoreError, UnknownLayout):
        return ""
    return assess_resumability(contents, path).answer if contents else ""


_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """Folder in which another tool keeps its checkpoints.

    Attributes:
        url: URL without secrets.
        checkpoints: Checkpoints, newest first; at least one.
        pointers: References of the run to its checkpoints.
        latest: Names of the checkpoints that `latest` means, one per run.
        is_whole: Whether all files were listed; if not, newer checkpoints may be missing.
    """

    url: str
    checkpoints: Sequence[RunCheckpoint]
    pointers: Pointers
    latest: frozenset[str]
    is_whole: bool


def find_foreign_run(url: str) -> ForeignRun | None:
    """Return the run of another tool at a location; None if there is no run.

    Raises:
        RepositoryNotFound: The location is itself a checkpoint.
        StoreError: The location could not be read.
    """
    location = _list_run(url) if is_foreign(url) else None
    if location is None:
        return None
    folder, listing, checkpoints = location
    if checkpoints:
        pointers = pointed_at(folder, listing, checkpoints)
        # If the listing is cut, newer checkpoints may be missing: only a tracker knows the latest.
        newest = referred("latest", checkpoints, pointers.latest) if listing.is_whole else []
        latest = pointers.latest.union(checkpoint.name for checkpoint in newest)
        return ForeignRun(folder.url, checkpoints, pointers, latest, listing.is_whole)
    if listing.is_file or any(layout.is_it(listing) for layout in LAYOUTS):
        raise RepositoryNotFound(
            f"`{folder.url}` is a single checkpoint of another tool, not a folder of checkpoints",
            hint=f"resilient ckpt inspect {shell_quote(folder.url)}",
        )
    return None


def find_in_run(ref: str | None, url: str | None) -> str | None:
    """Return the path of the checkpoint that a reference names in a run of another tool.

    None if there is no such run, or if no reference is given. Call this only after the search for a
    native repository has failed, because the search takes time.

    Raises:
        NothingToResume: The run has no such checkpoint.
        UsageError: The reference names checkpoints of several runs, or the listing is cut.
        StoreError: The location could not be read.
    """
    if not ref or not url or "://" in ref or not is_foreign(url):
        return None
    location = _list_run(url)
    if location is None or not location[2]:
        return None
    folder, listing, checkpoints = location
    if not listing.is_whole:
        raise UsageError(
            f"`{folder.url}` holds more files than are listed, so `{ref}` is ambiguous: name a "
            "checkpoint by its path",
            hint=f"resilient ckpt ls {shell_quote(folder.url)}",
        )
    latest = pointed_at(folder, listing, checkpoints).latest if ref.startswith("latest") else ()
    matches = referred(ref, checkpoints, latest)
    if len(matches) == 1:
        return f"{url.rstrip('/')}/{matches[0].name}"
    if matches:
        names = ", ".join(checkpoint.name[:80] for checkpoint in matches[:_SHOWN_MAX])
        match_url = f"{folder.url.rstrip('/')}/{matches[0].name}"
        raise UsageError(
            f"`{ref}` matches {len(matches)} checkpoints in `{folder.url}`, of several runs: "
            f"{names}",
            hint=f"resilient ckpt inspect {shell_quote(match_url)}",
        )
    raise NothingToResume(
        f"`{ref}` matches no checkpoint in `{folder.url}`, a folder of another tool: use latest, "
        "latest~2, step:500 or a name",
        hint=f"resilient ckpt ls {shell_quote(folder.url)}",
    )


def _list_run(url: str) -> tuple[Folder, DirectoryListing, list[RunCheckpoint]] | None:
    folder = open_folder(url, read_storage_options(os.environ))
    try:
        listing = folder.list()
    except KeyNotFound:
        return None  # the caller, which looks for a repository there, reports this
    if listing.is_file:
        return folder, listing, []
    return folder, listing, with_last(folder, listing, checkpoints_of(listing))


_REFERENCE = re.compile(r"latest(?:~\d+)?|step:\d+|best:.+|@.+")


def open_view(ref: str, place: str | None, repo: str | None) -> CheckpointView:
    """Return the checkpoint that an argument means.

    The argument is a path or a URL if it has a slash, ends like a file of weights, or no repository
    is named. A path may name a checkpoint of any tool, a repository (its latest checkpoint), or a
    repository with a reference after a slash. Every other argument is a reference in the
    repository.

    Raises:
        ResilientError: The location is empty, or has no checkpoint.
    """
    if not _is_path(ref, place or repo):
        return _open_reference(ref, place or repo or "")
    head, _, tail = ref.rstrip("/").rpartition("/")
    if parse_checkpoint(tail) is not None:
        return _open_native(tail, head or ("/" if ref.startswith("/") else "."))
    if _REFERENCE.fullmatch(tail):
        return _open_reference(tail, head or ".")
    checkpoint_view = open_foreign(ref) if is_foreign(ref) else None
    return _open_native("latest", ref) if checkpoint_view is None else _view_of(*checkpoint_view)


def require_whole(side: CheckpointView) -> None:
    """Read every byte of a checkpoint once, and verify it against the records of its tool.

    Raises:
        IntegrityError: Something is damaged; the message names the first finding.
        StoreError: The checkpoint could not be read.
    """
    from resilient.diff import native

    if side.layout == native.LAYOUT:
        place, _, name = side.url.rpartition("/")
        checkpoint = parse_checkpoint(name)
        store = open_repository(place, None)
        findings = verify(store, checkpoint) if checkpoint else []
        wrong = [
            f"{finding.file} {finding.problem}"
            for finding in findings
            if finding.severity == "damaged"
        ]
        hint = f"resilient ckpt repair {name} {shell_quote(place)}"
    else:
        checkpoint_of_other_tool = inspect_foreign(side.url, is_read=True)
        problems = checkpoint_of_other_tool.contents.problems if checkpoint_of_other_tool else ()
        wrong = [
            f"{problem.place}: {problem.what}"
            for problem in problems
            if problem.is_fatal and problem.what != ALONE
        ]
        hint = f"resilient ckpt verify {shell_quote(side.url)}"
    if wrong:
        raise IntegrityError(f"{side.url} is damaged: {wrong[0]}", key=side.url, hint=hint)


def _is_path(ref: str, repository: str | None) -> bool:
    return "/" in ref or not repository or ref.endswith((SAFE, *TORCH))


def _open_reference(ref: str, url: str) -> CheckpointView:
    """Return the checkpoint that a reference names in a repository, or in a run of another tool."""
    try:
        return _open_native(ref, url)
    except RepositoryNotFound:
        path = find_in_run(ref, url)
        view = open_foreign(path) if path else None
        if view is None:
            raise
        return _view_of(*view)


def _view_of(folder: Folder, listing: DirectoryListing, contents: Contents) -> CheckpointView:
    # This import loads NumPy, which other commands do not need.
    from resilient.diff import foreign

    return foreign.open_foreign(folder, listing, contents)


def _open_native(ref: str, url: str) -> CheckpointView:
    from resilient.diff import native

    store = open_repository(url, None)
    return native.open_native(store, read_manifest(store, resolve(store, ref)))
