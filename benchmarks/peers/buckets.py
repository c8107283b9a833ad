"""Uploads of one training state to a bucket, and downloads into memory, by all contenders.

Ours is a whole checkpoint. An upload lasts from the call of ``save`` until the manifest is
committed. A download lasts from the listing until every byte is verified in the live tensors, as
``resume`` reads. Peers put and get one object of the same size, with the same part size and
parallelism. A peer that accepts a buffer gets memory whose pages exist already. Peers verify
nothing.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import installed
from benchmarks.peers.rounds import Contender, Figures, timed
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.restore.read import ReadRequest, read_wanted
from resilient.checkpoint.save.metadata import CheckpointInfo
from resilient.clock import SystemClock
from resilient.engine_factory import open_engine
from resilient.events import CheckpointCommitted, Emitter, Event
from resilient.state_dict.resharding import LoadPlan, load
from resilient.storage.open import open_store
from resilient.storage.options import OBSTORE_PART_BYTES
from resilient.storage.transfer import MultipartConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.peers.training import Training

PARTS = MultipartConfig(OBSTORE_PART_BYTES)


@dataclass(frozen=True)
class Bucket:
    """Bucket of an S3 server.

    Attributes:
        name: Name of the bucket.
        endpoint: URL of the server.
        key: Id of the credentials.
        secret: Secret of the credentials.
        region: Region that a client must name.
        authority: PEM file of the authority to trust for https; empty for those of the machine.
        prefix: Prefix of our checkpoints.
    """

    name: str
    endpoint: str
    key: str
    secret: str = field(repr=False)
    region: str = "us-east-1"
    authority: str = ""
    prefix: str = ""

    def options(self, client: str = "") -> dict[str, object]:
        """Return our storage options."""
        return {
            "ca_file": self.authority,
            "endpoint": self.endpoint,
            "region": self.region,
            "key": self.key,
            "secret": self.secret,
            "client": client,
        }


@dataclass(frozen=True)
class Ways:
    """Upload and download of one contender; each call moves all bytes."""

    put: Callable[[], float]
    get: Callable[[], float]

    def contenders(self, name: str) -> dict[str, Contender]:
        """Return upload and download as contenders."""

        def turn(work: Callable[[], float], _: Path) -> Figures:
            return {"took": work()}

        return {f"{name}_up": partial(turn, self.put), f"{name}_down": partial(turn, self.get)}


def ours(training: Training, bucket: Bucket, client: str) -> Ways:
    """Save with an engine that keeps one checkpoint, and read the committed checkpoint."""
    url, options = f"s3://{bucket.name}/{bucket.prefix}ours-{client}", bucket.options(client)
    took: list[float] = []

    def listen(_record: Mapping[str, object], event: Event) -> None:
        if isinstance(event, CheckpointCommitted):
            took.append(event.commit_seconds)

    checkpointer = open_engine(
        url, emit=Emitter(SystemClock(), (listen,)), keep_last=1, storage_options=options
    )
    parts = training.parts()
    checkpointer.resume(parts)
    store = open_store(url, storage_options=options)

    def put() -> float:
        training.change()
        checkpointer.save(len(took) + 1, parts, CheckpointInfo())
        # Retention deletes the previous checkpoint after the commit.
        checkpointer.wait()
        return took[-1]

    def load_all() -> None:
        landing = LoadPlan(parts, in_place=True)
        proved = read_wanted(store, committed(store)[0], ReadRequest(parts, places=landing.places))
        load(proved.manifest, proved.files, parts, 0, landing)

    return Ways(put, lambda: timed(load_all))


def obstore_of(data: memoryview, bucket: Bucket, *, unsigned: bool = False) -> Ways:
    """Put an object in parts, and read it with ``open_reader``, which is faster than ``get``.

    Args:
        data: Bytes to put.
        bucket: Target of the bytes.
        unsigned: Send bodies that the server cannot verify.
    """
    import obstore
    from obstore.store import S3Store

    trust: dict[str, Any] = {}
    if bucket.authority:
        trust["root_certificate"] = Path(bucket.authority).read_bytes()
    store = S3Store(
        bucket.name,
        endpoint=bucket.endpoint,
        region=bucket.region,
        access_key_id=bucket.key,
        secret_access_key=bucket.secret,
        unsigned_payload=unsigned,
        client_options={"allow_http": True, "timeout": "120s", **trust},
    )

    def put() -> None:
        obstore.put(
            store,
            "obstore",
            data,
            chunk_size=PARTS.part_bytes,
            max_concurrency=PARTS.in_flight,
        )

    def get() -> None:
        assert len(obstore.open_reader(store, "obstore").read()) == len(data)

    return Ways(lambda: timed(put), lambda: timed(get))


def s3fs_of(data: memoryview, bucket: Bucket) -> Ways:
    """Put with ``pipe_file`` in parts, and get with ``cat_ranges``, several ranges at once."""
    import s3fs

    filesystem = s3fs.S3FileSystem(
        key=bucket.key,
        secret=bucket.secret,
        endpoint_url=bucket.endpoint,
        use_listings_cache=False,
        client_kwargs={"verify": bucket.authority or None},
    )
    path, content = f"{bucket.name}/s3fs", bytes(data)
    starts = list(range(0, len(data), PARTS.part_bytes))
    ends = [min(start + PARTS.part_bytes, len(data)) for start in starts]

    def put() -> None:
        filesystem.pipe_file(
            path, content, chunksize=PARTS.part_bytes, max_concurrency=PARTS.in_flight
        )

    def get() -> None:
        found = filesystem.cat_ranges([path] * len(starts), starts, ends)
        assert len(b"".join(found)) == len(data)

    return Ways(lambda: timed(put), lambda: timed(get))


def boto3_of(data: memoryview, bucket: Bucket) -> Ways:
    """Put and get with the transfer manager and threads."""
    import boto3
    from boto3.s3.transfer import TransferConfig
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=bucket.endpoint,
        aws_access_key_id=bucket.key,
        aws_secret_access_key=bucket.secret,
        region_name=bucket.region,
        verify=bucket.authority or None,
        # Ceph 16 does not know the checksums that newer clients add by default.
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            max_pool_connections=2 * PARTS.in_flight,
        ),
    )
    transfer = TransferConfig(
        multipart_threshold=PARTS.part_bytes,
        multipart_chunksize=PARTS.part_bytes,
        max_concurrency=PARTS.in_flight,
    )

    file = io.BytesIO(bytes(len(data)))

    def put() -> None:
        client.upload_fileobj(io.BytesIO(data), bucket.name, "boto3", Config=transfer)

    def get() -> None:
        file.seek(0)
        client.download_fileobj(bucket.name, "boto3", file, Config=transfer)
        assert len(file.getbuffer()) == len(data)

    return Ways(lambda: timed(put), lambda: timed(get))


def s3torchconnector_of(data: memoryview, bucket: Bucket) -> Ways:
    """Put and get with its checkpoint writer and reader, on the AWS Common Runtime."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    # s3torchconnector reads credentials only from the standard variables.
    os.environ |= {"AWS_ACCESS_KEY_ID": bucket.key, "AWS_SECRET_ACCESS_KEY": bucket.secret}
    checkpoint = S3Checkpoint(
        region=bucket.region,
        endpoint=bucket.endpoint,
        s3client_config=S3ClientConfig(force_path_style=True, part_size=PARTS.part_bytes),
    )
    url = f"s3://{bucket.name}/s3torchconnector"

    def put() -> None:
        with checkpoint.writer(url) as writer:
            for start in range(0, len(data), PARTS.part_bytes):
                writer.write(bytes(data[start : start + PARTS.part_bytes]))

    def get() -> None:
        with checkpoint.reader(url) as reader:
            assert len(reader.read()) == len(data)

    return Ways(lambda: timed(put), lambda: timed(get))


PEERS: dict[str, Callable[[memoryview, Bucket], Ways]] = {
    "obstore": obstore_of,
    "obstore_unsigned": partial(obstore_of, unsigned=True),
    "s3fs": s3fs_of,
    "boto3": boto3_of,
    "s3torchconnector": s3torchconnector_of,
}
UNPROVED = frozenset({"obstore_unsigned"})
"""Peers whose request bodies the server cannot verify."""


def ready(data: memoryview, bucket: Bucket) -> tuple[dict[str, Ways], dict[str, str]]:
    """Return every peer that can put and get here, and the reason for each of the others.

    Args:
        data: Bytes to put; every returned peer has put them once.
        bucket: Target of the bytes.
    """
    found: dict[str, Ways] = {}
    left_out: dict[str, str] = {}
    for name, make in PEERS.items():
        if not installed(name.removesuffix("_unsigned")):
            left_out[name] = "not installed"
            continue
        try:
            ways = make(data, bucket)
            ways.put()
            ways.get()
        except Exception as error:  # noqa: BLE001 - each library has its own
            left_out[name] = f"{type(error).__name__}: {str(error)[:120]}"
        else:
            found[name] = ways
    return found, left_out
