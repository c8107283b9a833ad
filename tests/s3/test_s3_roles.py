"""A role that may not delete trains; another one prunes: a policy of the real server says so."""

import json

import pytest

from resilient import Checkpointer
from resilient.checkpoint.catalog import committed
from resilient.checkpoint.generations import read_generations
from resilient.checkpoint.writer_heartbeat import read_heartbeat
from resilient.errors import StoreDenied
from resilient.format.keys import HEARTBEATS, heartbeat_key

STEPS = 3


def forbid_to_delete(bucket):
    """Let nobody delete an object of the bucket."""
    denied = {
        "Effect": "Deny",
        "Principal": "*",
        "Action": ["s3:DeleteObject", "s3:DeleteObjectVersion"],
        "Resource": [f"arn:aws:s3:::{bucket.name}/*"],
    }
    policy = {"Version": "2012-10-17", "Statement": [denied]}
    bucket.admin.put_bucket_policy(Bucket=bucket.name, Policy=json.dumps(policy))


def life(bucket, client, steps, **limits):
    """Train a loop of its own by some steps and return where it began."""
    state = {"count": 0}
    with Checkpointer(
        bucket.url, storage_options=bucket.options(client), state=state, **limits
    ) as checkpointer:
        start = checkpointer.resume() or 0
        for step in range(start + 1, start + steps + 1):
            state["count"] = step
            checkpointer.save(step)
    return start


def steps_in(store):
    return [one.step for one in committed(store)]


def test_a_role_that_may_not_delete_trains_and_another_prunes(bucket, client):
    forbid_to_delete(bucket)
    store = bucket.open(client)
    assert life(bucket, client, STEPS) == 0
    with pytest.raises(StoreDenied):
        store.delete(committed(store)[0].manifest_key)
    # Rotation is refused too; it costs nothing but room.
    assert life(bucket, client, STEPS, keep_last=1) == STEPS
    assert steps_in(store) == [6, 5, 4, 3, 2, 1]
    claims = read_generations(store)
    assert {one.key for one in store.list(HEARTBEATS)} == {
        heartbeat_key(one.number, one.token) for one in claims
    }
    assert [read_heartbeat(store, one.number, one.token) for one in claims] == [None, None], "ended"
    bucket.admin.delete_bucket_policy(Bucket=bucket.name)
    assert life(bucket, client, 1, keep_last=1) == 2 * STEPS
    assert steps_in(store)[0] == 2 * STEPS + 1
    assert len(steps_in(store)) <= 2
    assert not list(store.list(HEARTBEATS))
