"""A real S3 server for the session, a bucket for each test, and a proxy with faults before it."""

import tempfile
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from botocore.config import Config
from botocore.session import get_session

from resilient.storage.open import open_store
from tests.services.ceph import KEY, SECRET, Ceph, why_impossible
from tests.services.faultproxy import FaultProxy
from tests.services.presence import require

CLIENTS = ("obstore", "s3fs")


@cache
def admin_of(endpoint):
    """Return a client of one server; making one takes longer than most tests."""
    return get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


@dataclass
class Bucket:
    """A bucket of a server, and how to get there."""

    name: str
    server: Ceph

    @property
    def url(self):
        return f"s3://{self.name}/run"

    def options(self, client, endpoint="", **more):
        return {
            "client": client,
            "endpoint": endpoint or self.server.endpoint,
            "region": "us-east-1",
            "key": KEY,
            "secret": SECRET,
            **more,
        }

    def open(self, client, endpoint="", within_seconds=60.0, **more):
        options = self.options(client, endpoint, **more)
        return open_store(self.url, within_seconds=within_seconds, storage_options=options)

    @property
    def admin(self):
        """The bucket as a third client sees it."""
        return admin_of(self.server.endpoint)

    def uploads(self):
        """Return the keys of unfinished multipart uploads."""
        found = self.admin.list_multipart_uploads(Bucket=self.name)
        return [one["Key"] for one in found.get("Uploads", ())]


@pytest.fixture(scope="session")
def server():
    require("ceph", why_impossible())
    # Not under pytest's own folder: Ceph refuses paths as long as those.
    with tempfile.TemporaryDirectory(prefix="ceph-") as folder, Ceph(Path(folder)) as running:
        yield running


@pytest.fixture(scope="session")
def bucket_of():
    """What makes a new bucket of a server."""

    def new_bucket(server):
        made = Bucket(f"test-{uuid.uuid4().hex[:12]}", server)
        made.admin.create_bucket(Bucket=made.name)
        return made

    return new_bucket


@pytest.fixture
def bucket(server, bucket_of):
    return bucket_of(server)


@pytest.fixture
def proxy(server):
    with FaultProxy(server.port) as running:
        yield running


@pytest.fixture(params=CLIENTS)
def client(request):
    pytest.importorskip(request.param)
    return request.param


def pytest_collection_modifyitems(items):
    """Keep all tests of the server in one process: it takes a quarter of a minute to start."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.xdist_group("s3"))
