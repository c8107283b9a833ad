"""Sources of notices against servers that speak their protocols: as told, late, garbled, silent."""

from __future__ import annotations

import threading
import time

import pytest

from resilient.clock import SystemClock
from resilient.elastic.preemption.cloud_sources import AwsSource, AzureSource, GcpSource
from resilient.elastic.preemption.metadata_http import MetadataRequest, http_get
from resilient.elastic.preemption.notice import Notice, SourceGarbled, SourceLost, unix_seconds
from tests.helpers.metadata import Aws, Azure, Gcp, Plain, iso, serving

CLOCK = SystemClock()


def left(notice):
    return notice.at_seconds - unix_seconds(CLOCK)


@pytest.fixture
def aws():
    with serving(Aws()) as server:
        yield server


@pytest.fixture
def gcp():
    with serving(Gcp()) as server:
        yield server


@pytest.fixture
def azure():
    with serving(Azure()) as server:
        yield server


@pytest.fixture
def plain():
    with serving(Plain()) as server:
        yield server


def asking_aws(server, **options):
    return AwsSource(CLOCK, server.url, seconds=0.5, **options)


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_aws_says_what_happens_and_when(aws, action):
    source = asking_aws(aws)
    assert source.look() is None
    aws.set(action={"action": action, "time": iso(120)})
    notice = source.look()
    assert notice.reason == f"aws: spot {action}"
    assert 118 < left(notice) < 121
    assert aws.asked[0] == "PUT /latest/api/token"
    assert len(aws.tokens) == 1, "one token serves for hours"


def test_aws_is_asked_with_a_new_token_when_the_old_one_is_refused(aws):
    source = asking_aws(aws)
    assert source.look() is None
    aws.tokens.clear()
    aws.set(action={"action": "terminate", "time": iso(90)})
    assert source.look().reason == "aws: spot terminate"
    assert len(aws.tokens) == 1


@pytest.mark.parametrize("setting", [{"token_status": 403}, {"hop_seconds": 1.0}])
def test_aws_behind_a_hop_limit_is_asked_without_a_token_where_that_is_allowed(aws, setting):
    aws.set(allows_v1=True, action={"action": "terminate", "time": iso(90)}, **setting)
    assert asking_aws(aws).look().reason == "aws: spot terminate"


def test_aws_behind_a_hop_limit_says_how_to_raise_it(aws):
    aws.set(hop_seconds=1.0)
    with pytest.raises(SourceLost, match="http-put-response-hop-limit 2"):
        asking_aws(aws).look()


def test_aws_that_refuses_tokens_and_wants_them_is_lost(aws):
    aws.set(token_status=403)
    with pytest.raises(SourceLost, match="status 401, and gave no token"):
        asking_aws(aws).look()


@pytest.mark.parametrize("stops", [False, True])
def test_a_rebalance_recommendation_is_advice_unless_it_is_to_stop(aws, stops):
    aws.set(rebalance={"noticeTime": iso(0)})
    notice = asking_aws(aws, stops_on_rebalance=stops).look()
    assert notice == Notice("aws: rebalance recommended", None, is_advice=not stops)
    aws.set(action={"action": "terminate", "time": iso(120)})
    assert asking_aws(aws).look().reason == "aws: spot terminate", "an interruption counts first"


@pytest.mark.parametrize("text", ["<html>proxy</html>", "[]", "{}", '{"action": "dance"}', "\xff"])
def test_what_aws_never_says_is_no_notice(aws, text):
    aws.set(action=text)
    with pytest.raises(SourceGarbled):
        asking_aws(aws).look()


@pytest.mark.parametrize("more", [{}, {"time": "soon"}, {"time": None}])
def test_an_action_of_aws_without_a_moment_is_a_notice_without_one(aws, more):
    aws.set(action={"action": "stop", **more})
    assert asking_aws(aws).look() == Notice("aws: spot stop", None)


def test_a_proxy_of_the_environment_is_not_asked(aws, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert asking_aws(aws).look() is None


def test_nobody_there_is_a_source_that_is_lost():
    with pytest.raises(SourceLost, match="ConnectionRefusedError"):
        AwsSource(CLOCK, "http://127.0.0.1:9", seconds=0.5).look()


def test_an_answer_without_end_is_cut(plain):
    plain.set(status=200, body="x" * 100_000)
    with pytest.raises(SourceLost, match="too many bytes"):
        http_get(MetadataRequest(plain.url))


def test_gcp_is_heard_while_the_poll_waits(gcp):
    source = GcpSource(CLOCK, "preempted", gcp.url, wait_seconds=20)
    assert source.look() is None
    timer = threading.Timer(0.4, gcp.set, kwargs={"preempted": "TRUE"})
    timer.start()
    began = time.monotonic()
    notice = source.look()
    took = time.monotonic() - began
    timer.join()
    assert 0.3 < took < 3
    assert notice.reason == "gcp: preempted"
    assert 28 < left(notice) <= 30
    time.sleep(0.3)
    assert "wait_for_change=true" in gcp.asked[-1]
    gcp.set(is_closed=True)  # the poll ends at once, and says the same
    assert source.look() == notice, "said again it is no new notice"


def test_gcp_that_announced_before_it_was_asked_is_heard_at_once(gcp):
    gcp.set(preempted="TRUE")
    assert GcpSource(CLOCK, "preempted", gcp.url).look().reason == "gcp: preempted"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NONE", None),
        ("MIGRATE_ON_HOST_MAINTENANCE", None),
        ("TERMINATE_ON_HOST_MAINTENANCE", "gcp: host maintenance"),
    ],
)
def test_gcp_maintenance_stops_only_what_is_not_moved(gcp, value, reason):
    gcp.set(maintenance=value)
    notice = GcpSource(CLOCK, "maintenance-event", gcp.url).look()
    assert (notice.reason if notice else None) == reason


def test_a_server_that_is_not_googles_is_not_believed(gcp):
    gcp.set(preempted="TRUE", flavor="captive")
    with pytest.raises(SourceGarbled, match="not come from the metadata server"):
        GcpSource(CLOCK, "preempted", gcp.url).look()


def test_a_value_that_gcp_never_says_is_no_notice(gcp):
    gcp.set(preempted="maybe")
    with pytest.raises(SourceGarbled, match="maybe"):
        GcpSource(CLOCK, "preempted", gcp.url).look()


def test_gcp_that_falls_silent_in_a_poll_is_lost_and_asked_anew(gcp):
    source = GcpSource(CLOCK, "preempted", gcp.url, wait_seconds=-4.5)
    assert source.look() is None
    with pytest.raises(SourceLost, match="no answer"):
        source.look()
    assert source.look() is None
    assert "wait_for_change" not in gcp.asked[-1]


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_azure_says_what_happens_and_when_and_hears_that_all_is_saved(azure, kind):
    source = AzureSource(azure.url, acknowledges=True)
    assert source.look() is None
    azure.set(events=[azure.event(kind, seconds=30)])
    notice = source.look()
    assert notice.reason == f"azure: {kind.lower()}"
    assert 28 < left(notice) <= 30.1
    source.acknowledge()
    assert azure.acknowledged == [azure.events[0]["EventId"]]


def test_azure_is_not_told_unless_asked_to(azure):
    source = AzureSource(azure.url)
    azure.set(events=[azure.event()])
    assert source.look()
    source.acknowledge()
    assert azure.acknowledged == []


def test_events_of_another_machine_and_pauses_are_not_ours(azure):
    azure.set(events=[azure.event(resources=("machine-8",)), azure.event("Freeze")])
    assert AzureSource(azure.url).look() is None


def test_the_first_of_several_events_counts(azure):
    azure.set(events=[azure.event("Reboot", 600), azure.event("Preempt", 25)])
    assert AzureSource(azure.url).look().reason == "azure: preempt"


def test_an_event_of_azure_that_has_started_has_no_moment(azure):
    azure.set(events=[azure.event(not_before="")])
    assert AzureSource(azure.url).look() == Notice("azure: preempt", None)


@pytest.mark.parametrize("body", ["", "null", '{"Events": 3}', "<html>"])
def test_what_azure_never_says_is_no_notice(azure, body):
    azure.set(body=body)
    with pytest.raises(SourceGarbled):
        AzureSource(azure.url).look()


def test_events_of_azure_that_are_no_objects_are_passed_over(azure):
    azure.set(events=["x", 3, azure.event()])
    assert AzureSource(azure.url).look().reason == "azure: preempt"
