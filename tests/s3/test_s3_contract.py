"""Both clients of S3 keep every promise of a Store, on a real server."""

import pytest

from resilient.errors import ConfigError, KeyNotFound, StoreDenied, StoreError
from resilient.storage.fsspec_store import FsspecStore
from resilient.storage.store import ObjectInfo
from resilient.testing.store_contract import StoreContract

PART = 5 << 20


class Both(StoreContract):
    client = ""

    @pytest.fixture
    def store(self, bucket):
        pytest.importorskip(self.client)
        store = bucket.open(self.client, part_bytes=PART)
        assert store.exclusive
        return store


class TestObstore(Both):
    client = "obstore"


class TestS3fs(Both):
    client = "s3fs"


def test_the_fast_client_is_chosen_where_it_is_installed(bucket):
    pytest.importorskip("obstore")
    from resilient.storage.s3_store import ObstoreStore

    assert isinstance(bucket.open("")._store, ObstoreStore)
    assert isinstance(bucket.open("obstore")._store, ObstoreStore)
    assert isinstance(bucket.open("s3fs")._store, FsspecStore)
    assert isinstance(bucket.open("", config_kwargs={})._store, FsspecStore)


@pytest.mark.smoke
@pytest.mark.parametrize("size_bytes", [PART, PART + 1, 2 * PART, 3 * PART + 12345])
def test_an_object_in_parts_comes_back_as_it_was(bucket, client, size_bytes):
    store = bucket.open(client, part_bytes=PART, parts_in_flight=3)
    content = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
    store.put("a/large", memoryview(content))
    assert store.stat("a/large") == ObjectInfo("a/large", size_bytes)
    assert store.get("a/large") == content
    assert store.get_range("a/large", PART - 10, 20) == content[PART - 10 : PART + 10]
    assert bucket.uploads() == []


def test_what_one_client_wrote_the_other_reads(bucket):
    fast, portable = bucket.open("obstore"), bucket.open("s3fs")
    fast.put("a@b+c=d/x_y-z.json", b"fast")
    portable.put("a@b+c=d/w", b"portable")
    for one in (fast, portable):
        assert one.get("a@b+c=d/x_y-z.json") == b"fast"
        assert [entry.key for entry in one.list("a@b+c=d/")] == [
            "a@b+c=d/w",
            "a@b+c=d/x_y-z.json",
        ]


def test_a_listing_of_many_pages_is_whole(bucket, client):
    admin = bucket.admin
    for number in range(1100):
        admin.put_object(Bucket=bucket.name, Key=f"run/many/{number:04}", Body=b"")
    assert len(list(bucket.open(client).list("many/"))) == 1100


def test_a_bucket_that_is_not_there_is_no_empty_store(bucket, client):
    bucket.name = "no-such-bucket"
    store = bucket.open(client, within_seconds=0)
    for run in (lambda: list(store.list()), lambda: store.get("a"), lambda: store.put("a", b"")):
        with pytest.raises(StoreError) as caught:
            run()
        assert not isinstance(caught.value, KeyNotFound)


@pytest.mark.smoke
@pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "nobody"}])
def test_wrong_credentials_are_denied_at_once(bucket, client, wrong):
    store = bucket.open(client, **wrong)
    with pytest.raises(StoreDenied):
        store.put("a", b"x")
    with pytest.raises(StoreDenied):
        list(store.list())


def test_a_url_without_a_bucket_is_refused(client):
    from resilient.storage.open import open_store

    with pytest.raises((ConfigError, StoreError)):
        open_store("s3://", storage_options={"client": client}).put("a", b"")


def test_nothing_is_left_of_an_upload_that_was_begun_by_an_older_life(bucket, client):
    """Only what the caller calls ours, only under our prefix, only what is old enough."""
    from resilient.clock import SystemClock

    keys = ["run/checkpoint-1-g1/a.json", "run/foreign", "running/a", "run/checkpoint-2-g2/b.json"]
    for key in keys:
        bucket.admin.create_multipart_upload(Bucket=bucket.name, Key=key)
    store, clock = bucket.open(client), SystemClock()
    assert store.sweep(lambda key: key.startswith("checkpoint-1"), 3600, clock) == ()
    assert store.sweep(lambda key: key.startswith("checkpoint-1"), 0, clock) == (
        "checkpoint-1-g1/a.json",
    )
    assert sorted(bucket.uploads()) == sorted(keys[1:])
