"""A Job as JSON, with its bytes left where they lie in shared memory."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import ResilientError, UsageError
from resilient.format.ledger import decode_segment, encode_segment
from resilient.format.manifest import Receipt, TensorEntry, decode, encode
from resilient.format.names import CheckpointId, is_file_name, parse_checkpoint, segment_key
from resilient.format.shard import HostFile
from resilient.vault.keeper.stream import PulledFile, Slot, Stream
from resilient.vault.reuse.refer import Base
from resilient.vault.saving.persist import Job
from resilient.world.agreement import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from resilient.format.ledger import Segment

NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ResilientError)
"""What is raised by reading what none of us has written."""


def to_json(job: Job, rank: int, slots: Iterable[str] = ()) -> dict[str, Any]:
    """Return a JSON-able value of everything of ``job`` but its bytes.

    The names of files and slots stand for shared files that both sides know by these names.

    Args:
        job: what is handed over.
        rank: who does.
        slots: what its streamed files come through.
    """
    tensors = tuple(tensor for file in job.content for tensor in file.tensors)
    about = job.about.checkpoint
    return {
        "checkpoint": about.folder,
        "about": encode(job.about).decode(),
        "files": [[file.name, file.size_bytes] for file in job.files],
        "streamed": [[file.name, file.size_bytes] for file in job.streamed],
        "slots": list(slots),
        "receipt": Receipt(rank, (), tensors, job.parts).to_json(),
        "keep": [one.folder for one in job.keep],
        "is_first": job.is_first,
        "topic": job.topic,
        "began_seconds": job.began_seconds,
        "stall_seconds": job.stall_seconds(),
        "bases": [one.to_json() for one in job.bases],
        "copies_bytes_max": job.copies_bytes_max,
        "segment": encode_segment(job.segment).decode() if job.segment else None,
        "token": job.token,
        "spoiled": job.spoiled.to_json()["failure"] if job.spoiled else None,
    }


def from_json(
    value: Mapping[str, Any],
    memory_of: Callable[[str, int], memoryview],
    rank: int,
    within_seconds: float,
) -> tuple[Job, Stream]:
    """Return the job that ``to_json`` described, and what its streamed files come through.

    Args:
        value: as it came over the socket; nothing of it is trusted.
        memory_of: gives the shared memory of a file or a slot by name and length; raises for a
            stranger.
        rank: who hands over.
        within_seconds: how long a streamed file may take to come.

    Raises:
        UsageError: the value is no job.
    """
    try:
        return _job(value, memory_of, rank, within_seconds)
    except NONSENSE as error:
        raise UsageError(f"this is no job to hand over: {type(error).__name__}: {error}") from error


def _job(
    value: Mapping[str, Any],
    memory_of: Callable[[str, int], memoryview],
    rank: int,
    within_seconds: float,
) -> tuple[Job, Stream]:
    checkpoint = _checkpoint(value["checkpoint"])
    receipt = Receipt.from_json(value["receipt"])
    _require(receipt.rank == rank, f"rank {receipt.rank} on the line of rank {rank}")
    held, streamed = _sizes(value["files"]), _sizes(value["streamed"])
    sizes = held | streamed
    _require(len(sizes) == len(held) + len(streamed), "a file is named twice")
    stream = _stream(value["slots"], memory_of, streamed, within_seconds)
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in receipt.tensors:
        for one in tensor.regions:
            _require(
                0 <= one.start <= one.start + one.size_bytes <= sizes[one.file],
                f"`{tensor.name}` leaves its file",
            )
            by_file[one.file].append(tensor)
    job = Job(
        about=decode(str(value["about"]).encode(), checkpoint.manifest_key),
        files=tuple(
            HostFile(_name(name), memory_of(name, size_bytes), tuple(by_file[name]))
            for name, size_bytes in held.items()
        ),
        parts=receipt.parts,
        keep=tuple(_checkpoint(folder) for folder in value["keep"]),
        is_first=bool(value["is_first"]),
        topic=str(value["topic"]),
        began_seconds=float(value["began_seconds"]),
        stall_seconds=partial(float, float(value["stall_seconds"])),
        bases=tuple(Base.from_json(one) for one in value["bases"]),
        has_rival=True,
        segment=_segment(value["segment"], checkpoint),
        copies_bytes_max=_bound(value.get("copies_bytes_max")),
        token=str(value["token"]),
        spoiled=Failure(**spoiled) if (spoiled := value["spoiled"]) else None,
        streamed=tuple(
            PulledFile(_name(name), size_bytes, tuple(by_file[name]), stream)
            for name, size_bytes in streamed.items()
        ),
    )
    return job, stream


def _bound(size_bytes: Any) -> int | None:
    _require(size_bytes is None or int(size_bytes) >= 0, "a bound of less than nothing")
    return None if size_bytes is None else int(size_bytes)


def _segment(text: Any, checkpoint: CheckpointId) -> Segment | None:
    if text is None:
        return None
    return decode_segment(str(text).encode(), segment_key(checkpoint))


def _sizes(files: Any) -> dict[str, int]:
    sizes = {str(name): int(size_bytes) for name, size_bytes in files}
    _require(len(sizes) == len(files), "a file is named twice")
    return sizes


def _stream(
    names: Any,
    memory_of: Callable[[str, int], memoryview],
    sizes: Mapping[str, int],
    within_seconds: float,
) -> Stream:
    """Return the stream for files of these sizes."""
    longest_bytes = max(sizes.values(), default=0)
    slots = [Slot(str(name), memory_of(str(name), longest_bytes)) for name in names]
    _require(bool(slots) or not sizes, "there is nothing to stream through")
    _require(len({slot.name for slot in slots}) == len(slots), "a slot is named twice")
    _require(min(sizes.values(), default=0) >= 0, "a file of less than nothing")
    return Stream(slots, within_seconds)


def _checkpoint(folder: str) -> CheckpointId:
    checkpoint = parse_checkpoint(folder)
    _require(checkpoint is not None, f"{folder!r} is no checkpoint")
    assert checkpoint is not None, "required above"  # noqa: S101
    return checkpoint


def _name(name: str) -> str:
    _require(is_file_name(name), f"{name!r} is no file of a checkpoint")
    return name


def _require(holds: bool, what: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise ValueError(what)
