"""How soon a checkpoint is committed to S3, and proved when read back, against bare clients.

A model and its AdamW (parameters and two moments, fp32), one process, one real server: Ceph's
gateway on loopback, installed where that is possible, or what the `AWS_*` variables and
`BENCH_BUCKET` name. Per round each contender puts and gets once, in shuffled order. `ours` is the
whole way through the Checkpointer, with digests, manifest and fence, and back into the live
tensors; the peers put and get one object of as many bytes. What was overwritten or deleted is freed
between two turns, for the server takes as long for that as for a put. A peer that is not installed,
or that this server refuses, is left out and named. `MEGAPARAMS` in the environment sets the size,
30 million by default; `CONTENDERS` names some.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from botocore.session import get_session

from benchmarks.harness import Report, installed
from benchmarks.peers.buckets import PEERS, Bucket, ours, ready
from benchmarks.peers.rounds import Rounds, medians, ratio, turns, wants
from benchmarks.peers.training import Training, mega_parameters
from tests.services.ceph import KEY, SECRET, Ceph, why_impossible

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 5
COPIES_MAX = 10
"""So many times do the bytes lie there: one of each contender, and what is freed after a turn."""
_HOUR = 3600


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order."""
    torch.set_num_threads(1)
    training = Training(mega_parameters())
    with tempfile.TemporaryDirectory(prefix="s3-") as name:
        folder = Path(name)
        memory_bytes = max(COPIES_MAX * training.size_bytes, 4 << 30)
        with bucket_of(folder, memory_bytes) as (bucket, free):
            return compare(training, bucket, folder, rounds, free)


@contextmanager
def bucket_of(folder: Path, memory_bytes: int) -> Iterator[tuple[Bucket, Callable[[], None]]]:
    """Give a bucket of the server that the environment names, else of one started in ``folder``.

    With it goes what frees all that was deleted there, as far as that can be asked for.

    Args:
        folder: an empty one.
        memory_bytes: what a server that is started may hold; one that is full only waits.
    """
    if "BENCH_BUCKET" in os.environ:
        named = Bucket(
            os.environ["BENCH_BUCKET"],
            os.environ["AWS_ENDPOINT_URL"],
            os.environ["AWS_ACCESS_KEY_ID"],
            os.environ["AWS_SECRET_ACCESS_KEY"],
            os.environ.get("AWS_REGION", "us-east-1"),
        )
        yield named, lambda: None
        return
    problem = why_impossible()
    if problem:
        raise SystemExit(f"no S3 server: {problem}")
    place = folder / "server"
    place.mkdir()
    with Ceph(place, memory_bytes, _HOUR) as server:
        made = Bucket("benchmark", server.endpoint, KEY, SECRET)
        client = get_session().create_client(
            "s3",
            endpoint_url=made.endpoint,
            aws_access_key_id=made.key,
            aws_secret_access_key=made.secret,
            region_name=made.region,
        )
        client.create_bucket(Bucket=made.name)
        yield made, server.free


def compare(
    training: Training, bucket: Bucket, folder: Path, rounds: int, free: Callable[[], None]
) -> Report:
    """Let ours and every peer take turns in one bucket."""
    data = memoryview(bytearray(os.urandom(1 << 20)) * -(-training.size_bytes >> 20))
    peers, left_out = ready(data, bucket)
    ways = {name: one for name, one in peers.items() if wants(name)}
    clients = {"ours": "obstore", "ours_s3fs": "s3fs"}
    mine = {name: client for name, client in clients.items() if installed(client) and wants(name)}
    ways |= {name: ours(training, bucket, client) for name, client in mine.items()}
    for name in mine:
        ways[name].put()
    contenders = {}
    for name, one in ways.items():
        contenders |= one.contenders(name)
    return report(turns(contenders, folder, rounds, free), training.size_bytes, left_out)


def report(found: Rounds, size_bytes: int, left_out: dict[str, str]) -> Report:
    """Return the ratios of a run."""
    ratios: dict[str, float] = {}
    for way, name in (("up", "upload"), ("down", "download")):
        mine = f"ours_{way}_took"
        against = {
            peer: ratio(found, f"{peer}_{way}_took", mine)
            for peer in (*PEERS, "ours_s3fs")
            if f"{peer}_{way}_took" in found[0] and mine in found[0]
        }
        best = min((value for peer, value in against.items() if peer in PEERS), default=None)
        if best is not None:
            ratios[f"{name}_throughput_over_best_peer"] = best
        ratios |= {f"{name}_throughput_over_{peer}": value for peer, value in against.items()}
    notes = {"rounds": len(found), "state_mib": size_bytes >> 20, "left_out": left_out}
    return Report("s3", ratios, {**notes, **medians(found)})
