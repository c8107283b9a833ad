"""Start guard: refusal of a start at step 0 that would ignore existing checkpoints of any tool."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from resilient.errors import NothingToResume, StartOverRefused
from resilient.format.keys import MANIFEST, parse_checkpoint
from resilient.layouts.detect import FILE, LAYOUTS, WEIGHTS, checkpoints_of, read_layout
from resilient.layouts.incomplete import saved_name
from resilient.layouts.resumability import assess_resumability
from resilient.redaction import shell_quote
from resilient.storage.folder import DirectoryListing, open_folder
from resilient.storage.open import local_root

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from resilient.format.keys import CheckpointId
    from resilient.layouts.detect import RunCheckpoint
    from resilient.storage.store import Store

OURS = "resilient"
TRANSFORMERS = "hf-trainer"
_FILES_MAX = 50_000
"""Limit on names read in one place; a folder with more was named by mistake."""
_DEPTH_MAX = 2
"""Depth of folders inside a checkpoint whose files identify its layout."""
_HOLDER = re.compile(r"checkpoints?|lightning_logs|version_\d+")
"""Folders in which trainers collect checkpoints."""
STEP_FOLDER = re.compile(r"checkpoint-\d+")
"""Name that the Hugging Face Trainer gives to a checkpoint."""
_STATE_FILE = re.compile(r"(?i)ckpt|checkpoint|last|latest|step|iter|epoch")
_INTACT, _LOSSY = "yes", "partly"
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
_TITLES = {
    OURS: "resilient",
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
class Door:
    """Wording of one Python API for the two ways to continue.

    Attributes:
        never: Call that starts at step 0.
        takes: Call that continues from ``{path}``; empty if the API imports no other layout.
    """

    never: str
    takes: str = ""


TRAINER = Door(
    "trainer.train(resume_from_checkpoint=False)",
    "trainer.train(resume_from_checkpoint='{path}')",
)
LOOP = Door("checkpointer.resume('never')")
STOCK_TRAINER = Door("trainer.train(resume_from_checkpoint=False)")


@dataclass(frozen=True, slots=True)
class StartGuard:
    """Conditions of a start that found nothing to resume in its repository.

    Attributes:
        door: API through which the run starts.
        places: Further folders to check, such as the output folder.
        requires_checkpoint: Whether the script asked to resume, so a start at step 0 is an error.
    """

    door: Door = LOOP
    places: tuple[str, ...] = ()
    requires_checkpoint: bool = False

    def check(self, store: Store) -> None:
        """Refuse a start at step 0 that would ignore a checkpoint. Reads names only.

        Raises:
            StartOverRefused: The repository or a further folder has checkpoints.
            NothingToResume: The script asked to resume and no place has a checkpoint.
            StoreError: The store failed.
        """
        checkpoints = checkpoints_in_store(store)
        own_root = local_root(store.url)
        for place in self.places:
            root = local_root(place)
            if root is not None and root != own_root:
                checkpoints += checkpoints_in_folder(root)
        if checkpoints:
            raise _refusal(checkpoints, self.door)
        if self.requires_checkpoint:
            raise NothingToResume(
                f"no checkpoint to resume from at {store.url}; nothing was changed",
                hint=f"to start at step 0: --resume never, or {self.door.never}",
            )


def checkpoints_in_store(store: Store) -> list[FoundCheckpoint]:
    """Return the checkpoints of any layout at the root of a store, newest first.

    Crash: reads only.

    Raises:
        StoreError: The store failed.
    """
    root = local_root(store.url)
    if root is not None:
        return checkpoints_in_folder(root)
    entries = islice(store.list(), _FILES_MAX)
    return _find_checkpoints(
        DirectoryListing({entry.key: entry.size_bytes for entry in entries}), store.url
    )


def checkpoints_in_folder(root: Path) -> list[FoundCheckpoint]:
    """Return the checkpoints of any layout directly in a folder, newest first.

    Folders named as trainers name them (``checkpoints``, ``lightning_logs/version_0``) count as
    the folder itself. Checkpoints of other runs, in other subfolders, do not count.
    """
    sizes = dict(islice(_files_of(root), _FILES_MAX))
    return _find_checkpoints(DirectoryListing(sizes), str(root))


@dataclass(frozen=True, slots=True)
class SkippedFolder:
    """Checkpoint folder that a takeover skips.

    Attributes:
        path: Path of the folder.
        reason: Damage or loss.
        is_lossy: Whether a resume works but loses the state that ``reason`` names.
    """

    path: str
    reason: str
    is_lossy: bool = False


@dataclass(frozen=True, slots=True)
class TakeoverPlan:
    """Candidates of a takeover from the Hugging Face Trainer.

    Attributes:
        intact: Folders from which a resume loses nothing, newest first.
        skipped: Other folders, newest first.
    """

    intact: tuple[str, ...] = ()
    skipped: tuple[SkippedFolder, ...] = ()

    def not_newer_than(self, path: str) -> tuple[SkippedFolder, ...]:
        """Return the skipped folders of lower steps."""
        newer = self.newer_than(path)
        return tuple(skip for skip in self.skipped if skip not in newer)

    def newer_than(self, path: str) -> tuple[SkippedFolder, ...]:
        """Return the skipped folders of higher steps."""
        return tuple(skip for skip in self.skipped if _step_of(skip.path) > _step_of(path))


def plan_takeover(folder: str) -> TakeoverPlan:
    """Classify the ``checkpoint-<step>`` folders of the Hugging Face Trainer, newest first.

    Crash: reads only.

    Args:
        folder: Output folder of the run; a URL has no candidates.
    """
    root = local_root(folder)
    checkpoints = checkpoints_in_folder(root) if root is not None else []
    step_folders = [checkpoint for checkpoint in checkpoints if _is_step_folder(checkpoint, root)]
    intact_paths: list[str] = []
    skipped_folders: list[SkippedFolder] = []
    for checkpoint in sorted(
        step_folders, key=lambda candidate: _step_of(candidate.path), reverse=True
    ):
        flaw = _flaw_of(checkpoint.path)
        if flaw is None:
            intact_paths.append(checkpoint.path)
        else:
            skipped_folders.append(flaw)
    return TakeoverPlan(tuple(intact_paths), tuple(skipped_folders))


def _is_step_folder(checkpoint: FoundCheckpoint, root: Path | None) -> bool:
    path = Path(checkpoint.path)
    is_named = STEP_FOLDER.fullmatch(path.name) is not None
    return checkpoint.layout in (TRANSFORMERS, WEIGHTS) and is_named and path.parent == root


def _step_of(path: str) -> int:
    return int(path.rpartition("-")[2])


def _flaw_of(path: str) -> SkippedFolder | None:
    """Return the reason why a resume from a checkpoint loses state, None if it loses nothing."""
    folder = open_folder(path)
    contents = read_layout(folder, folder.list())
    if contents is None or contents.layout != TRANSFORMERS:
        return SkippedFolder(path, "incomplete: the state of the trainer is missing")
    verdict = assess_resumability(contents, path)
    if verdict.answer == _INTACT:
        return None
    return SkippedFolder(path, "; ".join(verdict.why), verdict.answer == _LOSSY)


def _find_checkpoints(listing: DirectoryListing, url: str) -> list[FoundCheckpoint]:
    own_checkpoints = {
        checkpoint for name in listing.sizes if (checkpoint := _own_checkpoint(name))
    }
    checkpoints = [
        FoundCheckpoint(f"{url}/{name}", OURS) for name in sorted(own_checkpoints, reverse=True)
    ]
    foreign_files = DirectoryListing(
        {n: size for n, size in listing.sizes.items() if not _is_own_key(n)}
    )
    if layout := _layout_of_root(foreign_files):
        return [*checkpoints, FoundCheckpoint(url, layout)]
    foreign_checkpoints = [
        checkpoint for checkpoint in checkpoints_of(foreign_files) if _counts(checkpoint)
    ]
    return [
        *checkpoints,
        *(
            FoundCheckpoint(f"{url}/{checkpoint.name}", checkpoint.layout)
            for checkpoint in foreign_checkpoints
        ),
    ]


def _own_checkpoint(key: str) -> CheckpointId | None:
    folder, _, name = key.partition("/")
    return parse_checkpoint(folder) if name == MANIFEST else None


def _is_own_key(key: str) -> bool:
    return parse_checkpoint(key.partition("/")[0]) is not None


def _layout_of_root(listing: DirectoryListing) -> str:
    """Return the layout of a folder that is itself a checkpoint; empty for any other folder."""
    layout = next((candidate.name for candidate in LAYOUTS if candidate.is_it(listing)), "")
    names = {name.partition("/")[0] for name in listing.sizes}
    # `Trainer.save_state()` writes the trainer's state beside the checkpoints of its run.
    is_end_of_run = layout == TRANSFORMERS and not names & set(_OPTIMIZERS)
    holds_others = bool(checkpoints_of(listing))
    return "" if layout == WEIGHTS or is_end_of_run or holds_others else layout


def _counts(checkpoint: RunCheckpoint) -> bool:
    """Return whether this is a checkpoint of the run itself, by its place, layout and name.

    A staging folder of a save that never ended is not a checkpoint.
    """
    if saved_name(checkpoint.base):
        return False
    if checkpoint.folder and not all(
        _HOLDER.fullmatch(part) for part in checkpoint.folder.split("/")
    ):
        return False
    if checkpoint.layout == WEIGHTS:
        return STEP_FOLDER.fullmatch(checkpoint.base) is not None
    if checkpoint.layout == FILE:
        has_step = bool(checkpoint.order) or _STATE_FILE.search(checkpoint.base) is not None
        return checkpoint.base.endswith(".ckpt") or has_step
    return True


def _files_of(root: Path) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files that identify the checkpoints in a folder."""
    pending_folders = [("", -1)]
    linked_folders: set[tuple[int, int]] = set()
    while pending_folders:
        prefix, depth = pending_folders.pop()
        for entry in _entries(root / prefix):
            name = f"{prefix}{entry.name}"
            if entry.is_file():
                yield name, entry.stat().st_size
            elif depth < _DEPTH_MAX and not entry.name.startswith("."):
                if entry.is_symlink():
                    status = entry.stat()
                    if (status.st_dev, status.st_ino) in linked_folders:
                        continue
                    linked_folders.add((status.st_dev, status.st_ino))
                is_holder = depth < 0 and _HOLDER.fullmatch(entry.name) is not None
                pending_folders.append((f"{name}/", -1 if is_holder else max(depth, 0) + 1))


def _entries(folder: Path) -> Iterable[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                (entry for entry in entries if _is_there(entry)), key=lambda entry: entry.name
            )
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


def _is_there(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a file or a folder, or a link to one.

    A checkpoint behind a link is a checkpoint of the run too. The guard only looks at names.
    """
    try:
        return entry.is_file() or entry.is_dir()
    except OSError:
        return False  # a link to itself


def _refusal(checkpoints: list[FoundCheckpoint], entry_point: Door) -> StartOverRefused:
    newest = checkpoints[0]
    count = (
        "a checkpoint" if len(checkpoints) == 1 else f"{len(checkpoints)} checkpoints, the first"
    )
    title = _TITLES.get(newest.layout, newest.layout)
    return StartOverRefused(
        f"will not start at step 0: there is {count} at `{newest.path}` ({title}); "
        "nothing was changed",
        hint=f"to continue: {_continuing(newest, entry_point)}; to start at step 0: "
        f"resilient train --resume never SCRIPT, or {entry_point.never}",
    )


def _continuing(checkpoint: FoundCheckpoint, entry_point: Door) -> str:
    """Return instructions to continue from a checkpoint; never a command that would refuse it."""
    if checkpoint.layout == OURS:
        return f"resilient train --repo {shell_quote(checkpoint.path.rpartition('/')[0])} SCRIPT"
    command = f"resilient train --resume {shell_quote(checkpoint.path)} SCRIPT"
    if checkpoint.layout == TRANSFORMERS and entry_point.takes:
        return f"{command}, or {entry_point.takes.format(path=checkpoint.path)}"
    if checkpoint.layout == TRANSFORMERS:
        return f"{command} with resilient.train.Trainer"
    title = _TITLES.get(checkpoint.layout, checkpoint.layout)
    return f"load `{checkpoint.path}` with {title} in the script, then start with --resume never"
