"""A Job as JSON, with its bytes left where they lie in shared memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from resilient.errors import ResilientError, UsageError
from resilient.format.digest import FileDigest
from resilient.format.manifest import Receipt, TensorEntry, decode, encode
from resilient.format.names import CheckpointId, is_file_name, parse_checkpoint
from resilient.format.shard import HostFile
from resilient.vault.persist import Job
from resilient.vault.refer import Base
from resilient.world.agreement import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_NONSENSE = (KeyError, TypeError, ValueError, AttributeError, OverflowError, ResilientError)


@dataclass(frozen=True, slots=True)
class Held:
    """One file of a checkpoint in shared memory, with what its bytes were when it was stored.

    Attributes:
        path: the shared file.
        proof: length and digests of the content.
    """

    path: str
    proof: FileDigest

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able value."""
        proof = self.proof
        return {"path": self.path, "proof": [proof.size_bytes, proof.digest, list(proof.chunks)]}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Held:
        """Return what ``to_json`` described."""
        size_bytes, digest, chunks = value["proof"]
        return Held(str(value["path"]), FileDigest(int(size_bytes), str(digest), tuple(chunks)))


def to_json(job: Job, rank: int) -> dict[str, Any]:
    """Return a JSON-able value of everything of ``job`` but its bytes.

    The file names stand for shared files that both sides know by these names.
    """
    tensors = tuple(tensor for file in job.files for tensor in file.tensors)
    about = job.about.checkpoint
    return {
        "checkpoint": about.folder,
        "about": encode(job.about).decode(),
        "files": [[file.name, len(file.data)] for file in job.files],
        "receipt": Receipt(rank, (), tensors, job.parts).to_json(),
        "keep": [one.folder for one in job.keep],
        "is_first": job.is_first,
        "topic": job.topic,
        "began_seconds": job.began_seconds,
        "stall_seconds": job.stall_seconds(),
        "bases": [one.to_json() for one in job.bases],
        "spoiled": job.spoiled.to_json()["failure"] if job.spoiled else None,
    }


def from_json(
    value: Mapping[str, Any], memory_of: Callable[[str, int], memoryview], rank: int
) -> Job:
    """Return the job that ``to_json`` described.

    Args:
        value: as it came over the socket; nothing of it is trusted.
        memory_of: gives the shared memory of a file by name and length; raises for a stranger.
        rank: who hands over.

    Raises:
        UsageError: the value is no job.
    """
    try:
        return _job(value, memory_of, rank)
    except _NONSENSE as error:
        raise UsageError(f"this is no job to hand over: {type(error).__name__}: {error}") from error


def _job(value: Mapping[str, Any], memory_of: Callable[[str, int], memoryview], rank: int) -> Job:
    checkpoint = _checkpoint(value["checkpoint"])
    receipt = Receipt.from_json(value["receipt"])
    sizes = {str(name): int(size_bytes) for name, size_bytes in value["files"]}
    _require(receipt.rank == rank, f"rank {receipt.rank} on the line of rank {rank}")
    _require(len(sizes) == len(value["files"]), "a file is named twice")
    by_file: dict[str, list[TensorEntry]] = defaultdict(list)
    for tensor in receipt.tensors:
        for one in tensor.regions:
            _require(
                0 <= one.start <= one.start + one.size_bytes <= sizes[one.file],
                f"`{tensor.name}` leaves its file",
            )
            by_file[one.file].append(tensor)
    return Job(
        about=decode(str(value["about"]).encode(), checkpoint.manifest_key),
        files=tuple(
            HostFile(_name(name), memory_of(name, size_bytes), tuple(by_file[name]))
            for name, size_bytes in sizes.items()
        ),
        parts=receipt.parts,
        keep=tuple(_checkpoint(folder) for folder in value["keep"]),
        is_first=bool(value["is_first"]),
        topic=str(value["topic"]),
        began_seconds=float(value["began_seconds"]),
        stall_seconds=partial(float, float(value["stall_seconds"])),
        bases=tuple(Base.from_json(one) for one in value["bases"]),
        spoiled=Failure(**spoiled) if (spoiled := value["spoiled"]) else None,
    )


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
