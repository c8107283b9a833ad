"""gs:// and az:// are told in their libraries' words, and create by their services' conditions."""

import errno

import pytest

from resilient.storage.fsspec_store import create_for
from resilient.storage.options import for_cloud


def test_the_names_of_s3_mean_the_same_where_there_is_such_a_thing():
    given = {"endpoint": "http://here", "request_seconds": 7, "token": "anon"}
    assert for_cloud("gs", given) == {
        "endpoint_url": "http://here",
        "requests_timeout": 7,
        "token": "anon",
    }
    assert for_cloud("az", {"account": "a", "key": "k", "connect_seconds": 1}) == {
        "account_name": "a",
        "account_key": "k",
        "connection_timeout": 1,
        "read_timeout": 60.0,
    }
    assert for_cloud("sftp", {"endpoint": "x"}) == {"endpoint": "x"}


class Google:
    """gcsfs repeats by itself: the first answer was lost, and the second says taken."""

    def __init__(self, taken_by="", loses_answer=False):
        self.metadata = {"resilient-writer": taken_by} if taken_by else None
        self.loses_answer = loses_answer

    def _pipe_file(self, path, data, metadata=None, mode="overwrite"):
        raise NotImplementedError

    def pipe_file(self, path, data, metadata=None, mode="overwrite"):
        assert mode == "create"
        if self.metadata is None:
            self.metadata = metadata
            if not self.loses_answer:
                return
        raise FileExistsError(errno.EEXIST, path)

    def invalidate_cache(self):
        pass

    def info(self, path):
        return {"metadata": self.metadata}


def test_on_google_ones_own_echo_is_no_loss_and_another_writer_is():
    google = Google(loses_answer=True)
    create_for("gs", google)(google, "b/a", b"x")
    other = Google(taken_by="somebody else")
    with pytest.raises(FileExistsError):
        create_for("gs", other)(other, "b/a", b"x")


class Azure:
    def _pipe_file(self, path, value, overwrite=True):
        raise NotImplementedError

    def pipe_file(self, path, value, **options):
        self.options = options


def test_azure_is_asked_once_and_never_overwrites():
    azure = Azure()
    create_for("az", azure)(azure, "b/a", b"x")
    assert azure.options == {"overwrite": False, "retry_total": 0}


class Old:
    def _pipe_file(self, path, value):
        raise NotImplementedError


@pytest.mark.parametrize("protocol", ["gs", "az", "abfs"])
def test_a_library_that_knows_no_condition_is_not_exclusive(protocol):
    assert create_for(protocol, Old()) is None
