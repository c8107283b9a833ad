"""What happens to a request happens as it is said, and once."""

import pytest

from resilient.errors import KeyExists, StoreUnavailable
from resilient.testing.fault_store import Crash
from resilient.testing.object_server import (
    ObjectClient,
    ObjectServer,
    PlannedRequestFault,
    RequestFault,
)


def client(trouble, at=0, after=0, part_bytes=512):
    server = ObjectServer({"old": b"old"}, [PlannedRequestFault(at, trouble, after)])
    return server, ObjectClient(server, part_bytes)


@pytest.mark.parametrize(
    ("trouble", "error", "happened"),
    [
        (RequestFault.BUSY, StoreUnavailable, False),
        (RequestFault.CONFLICT, StoreUnavailable, False),
        (RequestFault.ANSWER_LOST, StoreUnavailable, True),
        (RequestFault.LATE, StoreUnavailable, False),
        (RequestFault.TWICE, KeyExists, True),
        (RequestFault.DIES_BEFORE, Crash, False),
        (RequestFault.DIES_AFTER, Crash, True),
    ],
)
def test_each_trouble_has_the_effect_and_the_answer_that_it_says(trouble, error, happened):
    server, store = client(trouble)
    with pytest.raises(error):
        store.put_new("new", b"x")
    assert ("new" in server.objects) is happened


def test_what_is_late_arrives_after_so_many_requests():
    server, store = client(RequestFault.LATE, after=2)
    with pytest.raises(StoreUnavailable):
        store.put("new", b"late")
    store.put("new", b"at once")
    assert server.objects["new"] == b"at once"
    store.stat("old")
    assert server.objects["new"] == b"late"


def test_a_late_exclusive_create_respects_who_came_first():
    server, store = client(RequestFault.LATE, after=2)
    with pytest.raises(StoreUnavailable):
        store.put_new("new", b"late")
    store.put_new("new", b"first")
    server.calm()
    assert server.objects["new"] == b"first"


def test_a_client_that_dies_between_parts_leaves_an_upload_that_nobody_sees():
    server, store = client(RequestFault.DIES_BEFORE, at=2, part_bytes=10)
    with pytest.raises(Crash):
        store.put("new", b"0123456789" * 3)
    assert server.objects == {"old": b"old"}
    assert list(server.uploads) == [1]
    with pytest.raises(Crash):
        store.get("old")
    assert ObjectClient(server).sweep(lambda key: key == "new", 0.0, None) == ("new",)
    assert server.uploads == {}


def test_a_trouble_may_last():
    server = ObjectServer({}, [PlannedRequestFault(0, RequestFault.BUSY, lasting=2)])
    store = ObjectClient(server)
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            store.put("new", b"x")
    store.put("new", b"x")


def test_a_mishap_is_printed_as_the_call_that_makes_it():
    mishap = PlannedRequestFault(3, RequestFault.LATE, 4)
    names = {"PlannedRequestFault": PlannedRequestFault, "RequestFault": RequestFault}
    assert eval(repr(mishap), names) == mishap  # noqa: S307
