"""Object keys of a repository, the place in a store with all checkpoints of one run.

Only this module builds or parses a key. An attempt is one start of all ranks of the run. A
generation is the number of an attempt.

::

    generations/g000003.json                 record of the third attempt, created exclusively
    generations/g000003.committed.json       that attempt has committed a checkpoint
    heartbeats/g000003-9f2c...41.json        heartbeat of the process of that attempt
    store-abilities.json                     result of the test of exclusive create
    store-probe/3f2a...9c-0                  object that the test of exclusive create writes
    tags/release.json                        a name for a checkpoint, created exclusively
    ledger/g000003-000000000120.json         samples trained up to step 120 of generation 3
    checkpoint-120-g3/manifest.json          the checkpoint is committed if this exists
    checkpoint-120-g3/manifest.copy.json     second copy, without effect on the commit
    checkpoint-80-g3/manifest.trashed-...    manifest in the trash, from one time to another
    checkpoint-120-g3/model.r00000.safetensors
    checkpoint-120-g3/optimizer.r00000-00.safetensors
    checkpoint-120-g3/optimizer.r00000-01.safetensors
    checkpoint-120-g3/rng_state_0.safetensors
    checkpoint-120-g3/state.json
    checkpoint-120-g3/trainer_state.json
    checkpoint-120-g3/parity-0-1.r00000.parity
    checkpoint-120-g3/signature-8c1f0a52b67d934e.json
    checkpoint-120-g3/aside-5e1d07c2a94f-state.json   file that a repair replaced; unused
"""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass
from typing import Any

from resilient.errors import ConfigError

MANIFEST = "manifest.json"
MANIFEST_COPY = "manifest.copy.json"
GENERATIONS = "generations/"
CHECKPOINTS = "checkpoint-"
HEARTBEATS = "heartbeats/"
TAGS = "tags/"
LEDGER = "ledger/"
STATE_DOCUMENT = "state.json"
ABILITIES = "store-abilities.json"
PARITY_SUFFIX = ".parity"

STEP_MAX = 10**18 - 1
"""Highest step that fits in the name of a checkpoint."""

_ROOT_LENGTH = 16
_TRASHED = "manifest.trashed-"
_TRASH = re.compile(r"manifest\.trashed-([0-9]{8}T[0-9]{9})-([0-9]{8}T[0-9]{9})\.json")
_ASIDE_LENGTH = 12
_ASIDE_NAME_MAX = 160
_FOLDER = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})-g([1-9][0-9]{0,17})")
_GENERATION = re.compile(r"generations/g([0-9]{6,18})(\.committed)?\.json")
_TOKEN = re.compile(r"[0-9A-Za-z]{1,64}")
_HEARTBEAT = re.compile(r"heartbeats/g([0-9]{6,18})-([0-9A-Za-z]{1,64})\.json")
_SEGMENT = re.compile(r"ledger/g([0-9]{6,18})-([0-9]{12,18})\.json")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
# Texts that refer to a checkpoint without a tag.
_RESERVED_NAMES = re.compile(r"latest|auto|never|[0-9]+|checkpoint-.*")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,180}\.(?:json|safetensors|parity)")


@dataclass(frozen=True, slots=True, order=True)
class CheckpointId:
    """Name of one checkpoint, and owner of every key under its folder.

    The order is (generation, step): each save of a later attempt outranks all saves of an earlier
    attempt.
    """

    generation: int
    step: int

    @property
    def folder(self) -> str:
        """The folder's name, for example ``checkpoint-120-g3``."""
        return f"checkpoint-{self.step}-g{self.generation}"

    @property
    def copy_key(self) -> str:
        """The key of the manifest's second copy, for repairs; its presence is not a commit."""
        return self.key(MANIFEST_COPY)

    @property
    def manifest_key(self) -> str:
        """The key whose presence is the commit."""
        return self.key(MANIFEST)

    def key(self, name: str) -> str:
        """Return the store's key of a file of this checkpoint."""
        return f"{self.folder}/{name}"

    def __str__(self) -> str:
        return self.folder


@dataclass(frozen=True, slots=True)
class TrashedManifest:
    """Parsed name of a manifest in the trash.

    Attributes:
        name: Name of the file.
        since: Time of the move to the trash, UTC, ISO 8601; the same for all manifests of one
            prune.
        until: Time from which the files of the checkpoint may be deleted.
    """

    name: str
    since: str
    until: str

    @property
    def prune(self) -> str:
        """The id of the prune that moved the manifest: both times, as spelled in the name."""
        return self.name.removeprefix(_TRASHED).removesuffix(".json")


def whole_step(step: Any) -> int:
    """Return a step as a plain number, also a step of NumPy or of a tensor.

    Raises:
        ConfigError: The step is not a single whole number, or is out of bounds.
    """
    number = -1
    is_truth = "bool" in str(getattr(step, "dtype", type(step).__name__))
    if not is_truth and not getattr(step, "ndim", 0) and hasattr(step, "__index__"):
        try:
            number = operator.index(step)
        except TypeError:  # such as a tensor of floats, which has the method too
            number = -1
    if not 0 <= number <= STEP_MAX:
        raise ConfigError(
            f"{step!r} ({type(step).__name__}) is not a step: a step is a whole number from 0 to "
            f"{STEP_MAX}",
            hint="count optimizer steps, and pass their number: save(int(step))",
        )
    return number


def parse_checkpoint(folder: str) -> CheckpointId | None:
    """Parse the id of a checkpoint from a folder's name; None for any other name."""
    match = _FOLDER.fullmatch(folder)
    return CheckpointId(int(match[2]), int(match[1])) if match else None


def split_checkpoint_key(key: str) -> tuple[CheckpointId, str] | None:
    """Return the checkpoint and the file that ``key`` names, or None for a foreign key."""
    folder, _, name = key.partition("/")
    checkpoint = parse_checkpoint(folder)
    return (checkpoint, name) if checkpoint and is_file_name(name) else None


def key_of_file(checkpoint: CheckpointId, name: str) -> str:
    """Return the key of a file named in a manifest: of the same folder, or ``folder/name``."""
    return name if "/" in name else checkpoint.key(name)


def origin_of(name: str) -> CheckpointId | None:
    """Return the older checkpoint whose folder has the file; None for the manifest's own folder."""
    split = split_checkpoint_key(name)
    return split[0] if split and split[1] != MANIFEST else None


def trash_name(since: str, until: str) -> str:
    """Return the name of a manifest that is in the trash from ``since`` to ``until``.

    Args:
        since: Start, UTC, ISO 8601, with milliseconds.
        until: End, in the same format.
    """
    return f"{_TRASHED}{_compact(since)}-{_compact(until)}.json"


def parse_trash(name: str) -> TrashedManifest | None:
    """Parse the name of a manifest in the trash; None for any other name."""
    match = _TRASH.fullmatch(name)
    return TrashedManifest(name, _iso(match[1]), _iso(match[2])) if match else None


def parse_prune(text: str) -> TrashedManifest | None:
    """Parse the id of a prune; None for any other text."""
    return parse_trash(f"{_TRASHED}{text}.json")


def _compact(moment: str) -> str:
    return re.sub(r"[-:.Z]", "", moment)


def _iso(compact: str) -> str:
    day, time = compact[:8], compact[9:]
    date = f"{day[:4]}-{day[4:6]}-{day[6:]}"
    return f"{date}T{time[:2]}:{time[2:4]}:{time[4:6]}.{time[6:]}Z"


def generation_key(number: int) -> str:
    """Return the key of the record of generation ``number``."""
    return f"{GENERATIONS}g{number:06d}.json"


def probe_key(token: str, number: int) -> str:
    """Return the key that competing writers create in one round of the probe ``token``."""
    return f"store-probe/{token}-{number}"


def parse_generation(key: str) -> int | None:
    """Return the number in the key of a generation record, or None for any other key."""
    number = _number_in_key(key)
    return number if number and generation_key(number) == key else None


def committed_key(number: int) -> str:
    """Return the key of the mark that generation ``number`` has committed a checkpoint."""
    return f"{GENERATIONS}g{number:06d}.committed.json"


def parse_committed(key: str) -> int | None:
    """Return the generation in a mark's key, or None for any other key."""
    number = _number_in_key(key)
    return number if number and committed_key(number) == key else None


def heartbeat_key(number: int, token: str) -> str:
    """Return the key of the heartbeat of a claim; empty if the token does not fit in a key."""
    return f"{HEARTBEATS}g{number:06d}-{token}.json" if _TOKEN.fullmatch(token) else ""


def parse_heartbeat(key: str) -> int | None:
    """Return the generation in a heartbeat's key, or None for any other key."""
    match = _HEARTBEAT.fullmatch(key)
    return int(match[1]) if match and heartbeat_key(int(match[1]), match[2]) == key else None


def _number_in_key(key: str) -> int:
    match = _GENERATION.fullmatch(key)
    return int(match[1]) if match else 0


def segment_key(checkpoint: CheckpointId) -> str:
    """Return the key of the ledger segment that a checkpoint's save writes."""
    return f"{LEDGER}g{checkpoint.generation:06d}-{checkpoint.step:012d}.json"


def parse_segment(key: str) -> CheckpointId | None:
    """Return the checkpoint of a ledger segment's key, or None for any other key."""
    match = _SEGMENT.fullmatch(key)
    checkpoint = CheckpointId(int(match[1]), int(match[2])) if match else None
    return checkpoint if checkpoint and segment_key(checkpoint) == key else None


def tag_key(name: str) -> str:
    """Return the key of the tag ``name``."""
    return f"{TAGS}{name}.json"


def parse_tag(key: str) -> str | None:
    """Return the name in a tag's key, or None for any other key.

    A name that already refers to a checkpoint, such as ``latest`` or a step, is not a tag.
    """
    if not key.startswith(TAGS) or not key.endswith(".json"):
        return None
    name = key.removeprefix(TAGS).removesuffix(".json")
    return name if _TAG.fullmatch(name) and not _RESERVED_NAMES.fullmatch(name) else None


def is_file_name(name: str) -> bool:
    """Return whether ``name`` is a valid file name: one path segment, with a known ending."""
    return _FILE.fullmatch(name) is not None


def signature_name(root: str) -> str:
    """Return the name of the file that signs the manifest with this root."""
    return f"signature-{root[:_ROOT_LENGTH]}.json"


def aside_name(name: str, digest: str) -> str:
    """Return the name under which a repair keeps the damaged file that it replaced.

    Args:
        name: Name of the file, without a folder.
        digest: Digest of the kept bytes, so that other damage has another name.
    """
    return f"aside-{digest[:_ASIDE_LENGTH]}-{name[-_ASIDE_NAME_MAX:]}"


def shard_name(part: str, rank: int, number: int | None = None) -> str:
    """Return the name of a file with one rank's regions of a replicated part.

    Args:
        part: Name of the part.
        rank: Rank that writes the file.
        number: Number of the file among the files of the rank's share; None for a single file.
    """
    suffix = "" if number is None else f"-{number:02d}"
    return f"{part}.r{rank:05d}{suffix}.safetensors"


def rank_part(part: str, rank: int) -> str:
    """Return the name of one rank's copy of a per-rank part."""
    return f"{part}_{rank}"


def rank_part_file(part: str, rank: int) -> str:
    """Return the file of one rank's own part, for example ``rng_state_0.safetensors``."""
    return f"{rank_part(part, rank)}.safetensors"


def parity_name(group: int, row: int, rank: int) -> str:
    """Return the file that has one parity row over a group of one rank's files."""
    return f"parity-{group}-{row}.r{rank:05d}{PARITY_SUFFIX}"


def is_parity_name(name: str) -> bool:
    """Return whether a file is a parity file, which no restore reads."""
    return name.endswith(PARITY_SUFFIX)
