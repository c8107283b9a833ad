"""Time to commit a checkpoint to S3, and to read it back verified, against bare clients.

One process moves a model and its AdamW (parameters and two moments, fp32) to and from one real
server. The server is Ceph's gateway on loopback: release 20 in a root of its own if it can be
installed, else that of the machine. The `AWS_*` variables and `BENCH_BUCKET` can name another
server. The first pass uses https, as production buckets do. The second pass uses http (`plain_`).
Per round each contender puts and gets once, in shuffled order.

`ours` is the whole path: through the engine, with digests, manifest and fence, and back into the
live tensors. Peers put and get one object of the same size. Overwritten and deleted data is freed
between two turns, because the server needs as long for that as for a put. A peer that is not
installed, or that this server refuses, is left out and named. s3torchconnector trusts only the
certificate authorities of the machine. If this process runs as root, it therefore adds the server's
authority in a mount namespace of its own. `obstore_unsigned` sends bodies that the server cannot
verify, so it is left out of the comparison with the best peer. `MEGAPARAMS` in the environment sets
the size, 30 million by default; `CONTENDERS` selects contenders.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from botocore.session import get_session

from benchmarks.harness import Report, installed
from benchmarks.peers.buckets import PEERS, UNPROVED, Bucket, ours, ready
from benchmarks.peers.rounds import Rounds, medians, ratio, turns, wants
from benchmarks.peers.training import Training, mega_parameters
from benchmarks.peers.trust import OwnTrust
from tests.services.ceph import KEY, SECRET, Ceph, why_impossible
from tests.services.newer import newer_ceph

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROUNDS = 5
COPIES_MAX = 10
"""Maximum number of copies in the server: one of each contender, and those freed after a turn."""
_HOUR = 3600


def run(rounds: int) -> Report:
    """Measure every contender `rounds` times in shuffled order, over https and without."""
    with tempfile.TemporaryDirectory(prefix="s3-") as name:
        trust = OwnTrust(Path(name))
        found = list(_both(rounds, Path(name), trust))
    ratios = {name: value for way_report in found for name, value in way_report.ratios.items()}
    figures = {name: value for way_report in found for name, value in way_report.figures.items()}
    return Report("s3", ratios, figures)


def _both(rounds: int, folder: Path, trust: OwnTrust) -> Iterator[Report]:
    training = Training(mega_parameters())
    memory_bytes = max(COPIES_MAX * training.size_bytes, 4 << 30)
    with served(memory_bytes) as (ways, free):
        for way, bucket in ways.items():
            trust.add(bucket.authority)
            yield compare(training, bucket, folder, rounds, free, way)


@contextmanager
def served(memory_bytes: int) -> Iterator[tuple[dict[str, Bucket], Callable[[], None]]]:
    """Yield the buckets by the prefix of their figures, and a function that frees deleted data.

    The buckets are in the server that the environment names, or else in one that is started here.

    Args:
        memory_bytes: Memory limit of a started server; a full server only waits.
    """
    if "BENCH_BUCKET" in os.environ:
        named = Bucket(
            os.environ["BENCH_BUCKET"],
            os.environ["AWS_ENDPOINT_URL"],
            os.environ["AWS_ACCESS_KEY_ID"],
            os.environ["AWS_SECRET_ACCESS_KEY"],
            os.environ.get("AWS_REGION", "us-east-1"),
        )
        yield {"": named}, lambda: None
        return
    with started(memory_bytes) as server:
        plain = Bucket("benchmark", server.endpoint, KEY, SECRET, prefix="plain-")
        authority = str(server.certificate.authority)
        over_tls = replace(plain, endpoint=server.tls_endpoint, authority=authority, prefix="tls-")
        client_of(plain).create_bucket(Bucket=plain.name)
        yield {"": over_tls, "plain_": plain}, server.free


@contextmanager
def started(memory_bytes: int) -> Iterator[Ceph]:
    """Start a server; one that supports checksums if available."""
    root, lacking = newer_ceph()
    if lacking:
        root, problem = Path("/"), why_impossible()
        if problem:
            raise SystemExit(f"no S3 server: {lacking}; {problem}")
    with (
        tempfile.TemporaryDirectory(prefix="s3-", dir=root / "tmp") as folder,
        Ceph(Path(folder), memory_bytes, _HOUR, root) as server,
    ):
        yield server


def client_of(bucket: Bucket) -> Any:
    """Return a client of the server that creates and empties buckets."""
    return get_session().create_client(
        "s3",
        endpoint_url=bucket.endpoint,
        aws_access_key_id=bucket.key,
        aws_secret_access_key=bucket.secret,
        region_name=bucket.region,
        verify=bucket.authority or None,
    )


def compare(
    training: Training,
    bucket: Bucket,
    folder: Path,
    rounds: int,
    free: Callable[[], None],
    way: str,
) -> Report:
    """Let ours and every peer take turns in one bucket, and empty it afterwards.

    Args:
        training: Training whose bytes are moved.
        bucket: The bucket.
        folder: Folder for the files of a turn.
        rounds: Rounds of every contender.
        free: Function that frees the server's memory.
        way: Prefix of the figures.
    """
    data = memoryview(bytearray(os.urandom(1 << 20)) * -(-training.size_bytes >> 20))
    peers, left_out = ready(data, bucket)
    ways = {name: peer for name, peer in peers.items() if wants(name)}
    clients = {"ours": "obstore", "ours_s3fs": "s3fs"}
    own_clients = {
        name: client for name, client in clients.items() if installed(client) and wants(name)
    }
    ways |= {name: ours(training, bucket, client) for name, client in own_clients.items()}
    for name in own_clients:
        ways[name].put()
    contenders = {}
    for name, each_way in ways.items():
        contenders |= each_way.contenders(name)
    contenders = {
        name: contender
        for name, contender in contenders.items()
        if name.removesuffix("_down") not in UNPROVED
    }
    found = turns(contenders, folder, rounds, free)
    empty(bucket)
    free()
    return report(found, training.size_bytes, left_out, way)


def empty(bucket: Bucket) -> None:
    """Delete all objects of a bucket."""
    client = client_of(bucket)
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket.name):
        for entry in page.get("Contents", ()):
            client.delete_object(Bucket=bucket.name, Key=entry["Key"])


def report(found: Rounds, size_bytes: int, left_out: dict[str, str], way: str) -> Report:
    """Return the ratios and figures of a run, under names that begin with ``way``."""
    ratios: dict[str, float] = {}
    proved = PEERS.keys() - UNPROVED
    for there, what in (("up", "upload"), ("down", "download")):
        own_name, name = f"ours_{there}_took", f"{way}{what}"
        against = {
            peer: ratio(found, f"{peer}_{there}_took", own_name)
            for peer in (*PEERS, "ours_s3fs")
            if f"{peer}_{there}_took" in found[0] and own_name in found[0]
        }
        best = min((value for peer, value in against.items() if peer in proved), default=None)
        if best is not None:
            ratios[f"{name}_throughput_over_best_peer"] = best
        ratios |= {f"{name}_throughput_over_{peer}": value for peer, value in against.items()}
    notes = {"rounds": len(found), "state_mib": size_bytes >> 20, f"{way}left_out": left_out}
    figures = {f"{way}{name}": value for name, value in medians(found).items()}
    return Report("s3", ratios, {**notes, **figures})
