"""Start guard: refusal of a start at step 0 that would ignore an existing checkpoint of any tool.

Trainers keep checkpoints in the run's folder or in folders with known names. A checkpoint in any
other folder counts as part of another run. The search reads only names of files, at most 50,000 in
one place. If the guard refuses a start, it also verifies the newest checkpoints, so that the hint
of the error names an intact one.
"""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from resilient.errors import (
    NothingToResume,
    RepositoryNotFound,
    ResilientError,
    StartOverRefused,
    StoreError,
    UnknownLayout,
)
from resilient.format.keys import MANIFEST, parse_checkpoint
from resilient.layouts.detect import LAYOUTS, read_layout
from resilient.layouts.incomplete import saved_name
from resilient.layouts.resumability import is_costly, reasons
from resilient.layouts.run_folder import FILE, WEIGHTS, checkpoints_of, order_of
from resilient.redaction import shell_quote
from resilient.storage.folder import DirectoryListing, open_folder
from resilient.storage.open import local_root

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from resilient.layouts.run_folder import RunCheckpoint
    from resilient.storage.store import Store

_Error = TypeVar("_Error", bound=ResilientError)

NATIVE = "resilient"
TRANSFORMERS = "hf-trainer"
UNKNOWN = "unknown"
_LIGHTNING, _MEGATRON, _DEEPSPEED = "lightning", "megatron", "deepspeed"
STEP_FOLDER = re.compile(r"checkpoint-\d+")
"""Name that the Hugging Face Trainer gives to a checkpoint."""
_FILES_MAX = 50_000
"""Limit on names read in one place."""
_FILES_OF_FOLDER_MAX = 5_000
"""Limit on names read in one subfolder, so that a folder of data does not hide its siblings."""
_PREFIX_FILES_MAX = 1_000
_PREFIXES = (
    *("checkpoint", "ckpt", "epoch", "global_step", "iter_", "last", "lightning_logs/", "step"),
    "version_",
)
"""Prefixes listed one by one in a store with more names than the limit."""
_DEPTH_MAX = 2
"""Depth of folders inside a run's folder whose files identify a layout."""
_CHECKPOINT_FOLDER = re.compile(
    r"(?i)(?!pre_?train|base|init|teacher)(?:\w+[-_])?(?:ckpts?|checkpoints?)"
    r"|lightning_logs|version_\d+"
)
"""Folders in which trainers collect checkpoints."""
_LOGGER_FOLDER = re.compile(r"[^/.][^/]*/(?:version_\d+|[a-z0-9]{8})/checkpoints")
"""Folder of Lightning's checkpoints below that of its logger: CSV, TensorBoard or W&B."""
_STEP_NAME = re.compile(
    r"(?i)(?:\w*[-_.])?(?:checkpoint|ckpt|epoch|global_?step|iter(?:ation)?|step)s?"
    r"[-_=.]?\d{1,12}(?:[-_.=].*)?"
)
"""Folder of one step, as scripts name it."""
_STATE_IN_STEP = re.compile(
    r"(?i)(?:.*[-_.])?(?:checkpoint|ckpt|model|network|optim|policy|state|weights)[^/]*"
    r"\.(?:ckpt|distcp|pth?)(?:\.tar)?"
)
"""Files of torch in the folder of a step that are state, and not data."""
_MEGATRON_FILE = "model_optim_rng.pt"
_STATE_FILE = re.compile(r"(?i)(?P<stem>.+?)\.(?P<kind>ckpt|pth?|tar)(?:\.tar)?")
_REPLACED_AT_EACH_SAVE = re.compile(
    r"(?i)ckpt|checkpoint|(?<![a-z])(?:last|latest|resume|snapshot)"
    r"|(?:^|train\w*[-_.])state(?![a-z])"
)
_OF_STEP = re.compile(
    r"(?i)step|(?<![a-z])iter|epoch|(?:^|[-_.=])(?:model|net|ep?|state)?\d{1,12}(?=$|[-_.=])"
)
_NO_STATE = re.compile(
    r"(?i)args|cache|consolidated|data|feature|label|loader|optim|random|rng|scaler|sched|token"
    r"|vocab"
)
"""Names of data, of downloaded weights, and of a part of the state."""
_NEWEST = (float("inf"),)
"""Sort key of a file that each save replaces."""
_CHECKPOINT_NAME = re.compile(r"(?i)ckpt|checkpoint|epoch|iter|last|lightning|step|version_")


_VERIFIED_MAX = 8
_VERIFIED_BYTES_MAX = 2 << 30
"""Largest total size that the guard verifies in full; of further ones it reads headers."""
_TITLES = {
    NATIVE: "resilient",
    TRANSFORMERS: "Hugging Face Trainer",
    WEIGHTS: "Hugging Face Trainer, incomplete",
    "accelerate": "accelerate",
    "megatron": "Megatron",
    "lightning": "Lightning",
    "deepspeed": "DeepSpeed",
    "deepspeed-universal": "DeepSpeed, universal",
    "dcp": "torch.distributed.checkpoint",
    "dcp-safetensors": "torch.distributed.checkpoint, safetensors",
    FILE: "torch.save or Lightning",
    UNKNOWN: "unknown tool",
}


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint that a start at step 0 would ignore.

    Attributes:
        path: Path or URL.
        layout: Name of its layout, as in :mod:`resilient.layouts.detect`.
    """

    path: str
    layout: str


@dataclass(frozen=True, slots=True)
class StartCalls:
    """Hint texts: the calls of one Python API that start at step 0 or continue.

    Attributes:
        from_scratch: Call that starts at step 0.
        from_path: Call that continues from ``{path}``; empty if the API imports no other layout.
    """

    from_scratch: str
    from_path: str = ""


_CONTINUE_HINT = "to continue the run that is there: resilient train --resume auto SCRIPT"
TRAINER = StartCalls(
    "trainer.train(resume_from_checkpoint=False)",
    "trainer.train(resume_from_checkpoint={path})",
)
LOOP = StartCalls("checkpointer.resume('never')")
STOCK_TRAINER = StartCalls("trainer.train(resume_from_checkpoint=False)")


@dataclass(frozen=True, slots=True)
class StartGuard:
    """Check of a start before it claims a generation.

    Attributes:
        start_calls: API through which the run starts.
        places: Further folders to check, such as the output folder.
        requires_checkpoint: Whether the script asked to resume, so a start at step 0 is an error.
        accept: Function that every rank calls after the load, and that may refuse the loaded state.
    """

    start_calls: StartCalls = LOOP
    places: tuple[str, ...] = ()
    requires_checkpoint: bool = False
    accept: Callable[[], None] | None = None

    def check(self, store: Store) -> None:
        """Refuse a start at step 0 that would ignore a checkpoint.

        The check reads names only. Before a refusal it also reads the newest checkpoints.

        Raises:
            StartOverRefused: The repository or a further folder has checkpoints.
            NothingToResume: The script asked to resume and no place has a checkpoint.
            StoreError: The store failed.
        """
        checkpoints = self._ignored(store)
        if checkpoints:
            raise _refusal(checkpoints, self.start_calls)
        if self.requires_checkpoint:
            raise NothingToResume(
                f"no checkpoint to resume from at {store.url}; nothing was changed",
                hint=_start_hint(self.start_calls),
            )

    def explain(self, error: _Error, reference: str, store: Store) -> _Error:
        """Return the error of an unknown reference with a hint that leads to a checkpoint.

        Crash: reads only.

        Args:
            error: Error of the reference.
            reference: Reference, or a path that the user took for one.
            store: Repository.
        """
        try:
            checkpoints = checkpoints_at(reference)
            if not checkpoints and isinstance(error, RepositoryNotFound):
                checkpoints = self._ignored(store)
            is_gone = is_path(reference) and not os.path.lexists(reference)
            holds_run = is_gone and bool(checkpoints_in_store(store))
        except StoreError:
            return error
        if is_gone:
            hint = f"{_CONTINUE_HINT}; {error.hint}" if holds_run else error.hint
            message = f"{error.message}; there is no folder `{reference}`"
            error = type(error)(message, hint=hint)
            if holds_run:
                return error
        if checkpoints:
            return lead_to(error, checkpoints, self.start_calls)
        if isinstance(error, RepositoryNotFound):
            return type(error)(error.message, hint=_start_hint(self.start_calls))
        return error

    def _ignored(self, store: Store) -> list[FoundCheckpoint]:
        """Return the checkpoints that a start at step 0 would ignore."""
        checkpoints = checkpoints_in_store(store)
        own_root = local_root(store.url)
        for place in self.places:
            root = local_root(place)
            if root is not None and root != own_root:
                checkpoints += checkpoints_in_folder(root)
        return checkpoints


def is_path(reference: str) -> bool:
    """Return whether a reference is a local path: no other reference has a slash."""
    return os.sep in reference and "://" not in reference and not reference.startswith("best:")


def checkpoints_in_store(store: Store) -> list[FoundCheckpoint]:
    """Return the checkpoints of any layout at the root of a store, newest first.

    Crash: reads only.

    Raises:
        StoreError: The store failed.
    """
    root = local_root(store.url)
    if root is not None:
        return checkpoints_in_folder(root)
    sizes = {entry.key: entry.size_bytes for entry in islice(store.list(), _FILES_MAX)}
    for prefix in _PREFIXES if len(sizes) == _FILES_MAX else ():
        listed = islice(store.list(prefix), _PREFIX_FILES_MAX)
        sizes |= {entry.key: entry.size_bytes for entry in listed}
    return _find_checkpoints(DirectoryListing(sizes), store.url)


def checkpoints_in_folder(root: Path) -> list[FoundCheckpoint]:
    """Return the checkpoints of any layout in the folder of a run, newest first.

    Folders named as trainers name them (``checkpoints``, ``exp/version_0/checkpoints``) count as
    the folder itself. Checkpoints of other runs, in other subfolders, do not count.
    """
    sizes = dict(islice(_files_of(root), _FILES_MAX))
    return _find_checkpoints(DirectoryListing(sizes), str(root))


def checkpoints_at(path: str) -> list[FoundCheckpoint]:
    """Return the checkpoints at a path, newest first: the file or folder itself, or those in it."""
    root = local_root(path)
    if root is None or not root.exists():
        return []
    if root.is_file():
        return [FoundCheckpoint(path, FILE)]
    if (root / MANIFEST).is_file() and parse_checkpoint(root.name) is not None:
        return [FoundCheckpoint(path, NATIVE)]
    return checkpoints_in_folder(root)


def _is_run_folder(folder: str) -> bool:
    """Return whether the run keeps checkpoints in a subfolder; its own folder is the empty name."""
    if not folder or _LOGGER_FOLDER.fullmatch(folder):
        return True
    return all(_CHECKPOINT_FOLDER.fullmatch(part) for part in folder.split("/"))


def _find_checkpoints(listing: DirectoryListing, url: str) -> list[FoundCheckpoint]:
    own_names = {name for key in listing.sizes if (name := _own_checkpoint(key))}
    own_checkpoints = [
        FoundCheckpoint(f"{url}/{name}", NATIVE)
        for name in sorted(own_names, key=_age_key, reverse=True)
    ]
    foreign_files = DirectoryListing(
        {key: size for key, size in listing.sizes.items() if not _is_own_key(key)}
    )
    layout = _layout_of_root(foreign_files)
    if layout and layout != WEIGHTS:
        return [*own_checkpoints, FoundCheckpoint(url, layout)]
    # The files of a finished run do not hide the checkpoints of another tool below.
    files_below = DirectoryListing(
        {k: s for k, s in foreign_files.sizes.items() if not _is_export(k)}
    )
    candidates = dict(_foreign_checkpoints(files_below))
    names = sorted(sorted(candidates), key=lambda name: candidates[name][0], reverse=True)
    return [*own_checkpoints, *(FoundCheckpoint(f"{url}/{n}", candidates[n][1]) for n in names)]


def _age_key(name: str) -> tuple[object, str]:
    return parse_checkpoint(name.rpartition("/")[2]), name


def _own_checkpoint(key: str) -> str:
    """Return the name of our checkpoint that a key commits; empty for any other key."""
    name, _, file = key.rpartition("/")
    folder, _, base = name.rpartition("/")
    is_own = file == MANIFEST and parse_checkpoint(base) is not None
    return name if is_own and _is_run_folder(folder) else ""


def _is_own_key(key: str) -> bool:
    return any(parse_checkpoint(part) is not None for part in key.split("/")[:-1])


def _is_export(key: str) -> bool:
    """Return whether a file belongs to the model and the log of a finished run."""
    return "/" not in key and _STATE_FILE.fullmatch(key) is None


def _layout_of_root(listing: DirectoryListing) -> str:
    """Return the layout of a folder that is itself a checkpoint; empty for any other folder."""
    layout = next((candidate.name for candidate in LAYOUTS if candidate.is_it(listing)), "")
    # `Trainer.save_state()` writes the trainer's state beside the checkpoints of its run.
    is_end_of_run = layout == TRANSFORMERS and not _has_optimizer(listing, "")
    holds_others = bool(checkpoints_of(listing))
    return "" if is_end_of_run or holds_others else layout


def _has_optimizer(listing: DirectoryListing, prefix: str) -> bool:
    """Return whether a folder of Transformers has the state of an optimizer.

    A folder of DeepSpeed in the run's own folder is a checkpoint of its own.
    """
    parts = ("optimizer_", "global_step") if prefix else ("optimizer_",)
    names = (key.removeprefix(prefix) for key in listing.sizes if key.startswith(prefix))
    return any("optim" in name and ("/" not in name or name.startswith(parts)) for name in names)


def _foreign_checkpoints(
    listing: DirectoryListing,
) -> Iterator[tuple[str, tuple[tuple[float, ...], str]]]:
    """Yield name, sort key and layout of the checkpoints of other tools."""
    found_names = set()
    for checkpoint in checkpoints_of(listing):
        if checkpoint.layout != FILE and _belongs_to_run(checkpoint, listing):
            name, layout = _loadable_name(checkpoint)
            found_names.add(name)
            yield name, (order_of(name, layout)[1], layout)
    for key in listing.sizes:
        folder, _, base = key.rpartition("/")
        if any(above in found_names for above in _folders_above(key)):
            continue
        if _is_run_folder(folder) and _is_state_file(base):
            yield key, (order_of(key, FILE)[1] or _age_key_of_file(base), FILE)
        elif name := _step_folder(key):
            layout = _MEGATRON if base == _MEGATRON_FILE else UNKNOWN
            yield name, (order_of(name, layout)[1], layout)


def _folders_above(key: str) -> Iterator[str]:
    parts = key.split("/")
    return ("/".join(parts[:depth]) for depth in range(1, len(parts)))


def _loadable_name(checkpoint: RunCheckpoint) -> tuple[str, str]:
    """Return the name that a tool loads, and the tool.

    Lightning keeps the files of DeepSpeed in ``epoch=0-step=8.ckpt/checkpoint``.
    """
    name = checkpoint.name
    if checkpoint.layout == _DEEPSPEED and checkpoint.base == "checkpoint":
        name = checkpoint.folder if checkpoint.folder.endswith(".ckpt") else name
    is_lightning = checkpoint.layout == _DEEPSPEED and name.endswith(".ckpt")
    return name, _LIGHTNING if is_lightning else checkpoint.layout


def _belongs_to_run(checkpoint: RunCheckpoint, listing: DirectoryListing) -> bool:
    """Return whether this is a checkpoint of the run itself, by its place, layout and name.

    A staging folder of a save that never ended is not a checkpoint.
    """
    name, _ = _loadable_name(checkpoint)
    folder, _, base = name.rpartition("/")
    if saved_name(base) or not _is_run_folder(folder):
        return False
    if checkpoint.layout == WEIGHTS:
        return STEP_FOLDER.fullmatch(base) is not None
    if checkpoint.layout == TRANSFORMERS and STEP_FOLDER.fullmatch(base) is None:
        return _has_optimizer(listing, f"{name}/")
    return True


def _is_state_file(base: str) -> bool:
    """Return whether a file is named as scripts name the state of a run."""
    match = _STATE_FILE.fullmatch(base)
    if match is None:
        return False
    stem, kind = match["stem"], match["kind"].lower()
    if kind == "ckpt":
        return True
    # An archive without the suffix of torch is data, unless its name says otherwise.
    is_replaced = _REPLACED_AT_EACH_SAVE.search(stem) is not None
    is_named = is_replaced or (kind != "tar" and _OF_STEP.search(stem) is not None)
    return is_named and _NO_STATE.search(stem) is None


def _age_key_of_file(base: str) -> tuple[float, ...]:
    """Return the sort key of a file without a number: each save replaces ``last.ckpt``."""
    match = _STATE_FILE.fullmatch(base)
    stem = match["stem"] if match else ""
    return _NEWEST if _REPLACED_AT_EACH_SAVE.search(stem) and "best" not in stem.lower() else ()


def _step_folder(key: str) -> str:
    """Return the folder of the step that a file belongs to; empty for any other file."""
    parts = key.split("/")
    if _STATE_IN_STEP.fullmatch(parts[-1]) is None:
        return ""
    for at in range(max(0, len(parts) - 2 - _DEPTH_MAX), len(parts) - 1):
        is_step = _STEP_NAME.fullmatch(parts[at]) and not saved_name(parts[at])
        if is_step and _is_run_folder("/".join(parts[:at])):
            return "/".join(parts[: at + 1])
    return ""


def _files_of(root: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files that identify the checkpoints in a folder."""
    pending_folders = deque([("", 0)])
    linked_folders: set[tuple[int, int]] = set()
    while pending_folders:
        prefix, depth = pending_folders.popleft()
        files_left = _FILES_OF_FOLDER_MAX if depth else _FILES_MAX // 2
        for entry in _entries(root / prefix):
            name = f"{prefix}{entry.name}"
            if entry.is_file():
                files_left -= 1
                if files_left >= 0:
                    yield name, entry.stat().st_size
                continue
            below = 0 if _is_run_folder(name) else depth + 1
            if below > _DEPTH_MAX or entry.name.startswith("."):
                continue
            if entry.is_symlink():
                status = entry.stat()
                if (status.st_dev, status.st_ino) in linked_folders:
                    continue
                linked_folders.add((status.st_dev, status.st_ino))
            # The limit on names must not end the search in a folder of data.
            is_likely = depth > 0 or _CHECKPOINT_NAME.search(entry.name) is not None
            pending_folders.insert(0 if is_likely else len(pending_folders), (f"{name}/", below))


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if _leads_to_file_or_folder(entry)),
                key=lambda entry: entry.name,
            )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _leads_to_file_or_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file or a folder, or a link to one.

    A checkpoint behind a link is a checkpoint of the run too. The search only looks at names.
    """
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False  # a link to itself


@dataclass(frozen=True, slots=True)
class _Judged:
    """A checkpoint, and its damage or loss.

    Attributes:
        checkpoint: The checkpoint.
        flaw: Its damage or loss; empty for an intact checkpoint, and for one that was not read.
        is_resumable: Whether a resume works, with or without the loss.
        is_imported: Whether our Trainer imports it.
    """

    checkpoint: FoundCheckpoint
    flaw: str = ""
    is_resumable: bool = True
    is_imported: bool = False


def _judge_until_intact(checkpoints: Sequence[FoundCheckpoint]) -> list[_Judged]:
    """Judge the newest checkpoints, until one is intact.

    This function does not read checkpoints of this library, because resume verifies them. It does
    not read remote checkpoints either.
    """
    judged: list[_Judged] = []
    bytes_left = _VERIFIED_BYTES_MAX
    for checkpoint in checkpoints[:_VERIFIED_MAX]:
        result = _Judged(checkpoint)
        if checkpoint.layout not in (NATIVE, UNKNOWN) and local_root(checkpoint.path) is not None:
            # After an error the hint names this checkpoint, and its own tool reports the problem.
            with suppress(StoreError, UnknownLayout):
                result, bytes_left = _judge(checkpoint, bytes_left)
        judged.append(result)
        if not result.flaw:
            break
    return judged


def _judge(checkpoint: FoundCheckpoint, bytes_left: int) -> tuple[_Judged, int]:
    """Judge one checkpoint; return the bytes that are left to read, too.

    Raises:
        StoreError: A file could not be read.
        UnknownLayout: No known tool wrote the checkpoint.
    """
    from resilient.diff.verification import verify_folder

    folder = open_folder(checkpoint.path)
    listing = folder.list()
    bytes_left -= sum(listing.sizes.values())
    contents = verify_folder(folder).contents if bytes_left >= 0 else read_layout(folder, listing)
    if contents is None:
        return _Judged(checkpoint), bytes_left
    costly_problems = [problem for problem in contents.problems if is_costly([problem])]
    return _Judged(
        checkpoint,
        "; ".join(reasons(costly_problems)),
        is_resumable=not any(problem.is_fatal for problem in costly_problems),
        is_imported=contents.layout == TRANSFORMERS and not contents.not_imported,
    ), bytes_left


def _refusal(checkpoints: list[FoundCheckpoint], start_calls: StartCalls) -> StartOverRefused:
    judged = _judge_until_intact(checkpoints)
    return StartOverRefused(
        f"will not start at step 0: {_found_text(checkpoints, judged)}; nothing was changed",
        hint=f"{_continue_hint(judged, start_calls)}; {_start_hint(start_calls)}",
    )


def lead_to(
    error: _Error, checkpoints: Sequence[FoundCheckpoint], start_calls: StartCalls
) -> _Error:
    """Return an error of the same kind that also names the newest intact checkpoint.

    Args:
        error: Error of a reference that names none of the checkpoints.
        checkpoints: Checkpoints, newest first.
        start_calls: API through which the run starts.
    """
    judged = _judge_until_intact(checkpoints)
    message = f"{error.message}; {_found_text(checkpoints, judged)}"
    return type(error)(
        message, hint=f"{_continue_hint(judged, start_calls)}; {_start_hint(start_calls)}"
    )


def _start_hint(start_calls: StartCalls) -> str:
    return (
        f"to start at step 0: resilient train --resume never SCRIPT, or {start_calls.from_scratch}"
    )


def _found_text(checkpoints: Sequence[FoundCheckpoint], judged: Sequence[_Judged]) -> str:
    """Return the number of checkpoints, the newest, and the newest intact one in words."""
    newest, count = checkpoints[0], len(checkpoints)
    head = "there is a checkpoint" if count == 1 else f"there are {count} checkpoints, the newest"
    text = f"{head} at `{newest.path}` ({_TITLES.get(newest.layout, newest.layout)})"
    for number, result in enumerate(judged):
        if result.flaw:
            subject = f"; `{result.checkpoint.path}`" if number else ", which"
            text += f"{subject} is not intact: {result.flaw}"
        elif number:
            text += f"; the newest intact one is `{result.checkpoint.path}`"
    return text


def _continue_hint(judged: Sequence[_Judged], start_calls: StartCalls) -> str:
    """Return instructions to continue from a checkpoint; never a command that would refuse it."""
    # Only the last judged checkpoint can be intact. If it is not, choose the newest checkpoint
    # that is resumable with a loss.
    by_cost = sorted(judged, key=lambda result: bool(result.flaw))
    choice = next((result for result in by_cost if result.is_resumable), None)
    if choice is None:
        return f"to see the damage: resilient ckpt verify {shell_quote(judged[0].checkpoint.path)}"
    checkpoint, path = choice.checkpoint, choice.checkpoint.path
    head = "to continue with that loss" if choice.flaw else "to continue"
    if checkpoint.layout == NATIVE:
        return f"{head}: resilient train --repo {shell_quote(path.rpartition('/')[0])} SCRIPT"
    if choice.is_imported and start_calls.from_path:
        command = f"resilient train --resume {shell_quote(path)} SCRIPT"
        return f"{head}: {command}, or {start_calls.from_path.format(path=repr(path))}"
    title = _TITLES.get(checkpoint.layout, checkpoint.layout)
    other = ", or continue with resilient.train.Trainer" if choice.is_imported else ""
    return f"{head}: load `{path}` with {title} in the script, and start with --resume never{other}"
