"""One vocabulary, spelled for two clients, and never shown."""

import pytest

from resilient.distributed.launch_env import (
    LaunchEnv,
    World,
    parse_storage_options,
    read_launch,
    read_storage_options,
    write_launch,
)
from resilient.errors import ConfigError
from resilient.storage.open import open_store
from resilient.storage.options import for_obstore, for_s3fs, read_s3_options
from resilient.storage.transfer import MultipartConfig

CANARY = "canary-secret"
GIVEN = {
    "endpoint": "https://s3.example",
    "region": "eu-1",
    "key": "id",
    "secret": CANARY,
    "token": CANARY,
    "connect_seconds": 2,
    "request_seconds": 7.5,
}


def test_both_clients_are_told_the_same():
    options = read_s3_options(GIVEN)
    portable, fast = for_s3fs(options), for_obstore(options)
    assert portable["endpoint_url"] == fast["config"]["endpoint"] == "https://s3.example"
    assert portable["client_kwargs"]["region_name"] == fast["config"]["region"] == "eu-1"
    assert portable["key"] == fast["config"]["access_key_id"] == "id"
    assert portable["secret"] == fast["config"]["secret_access_key"] == CANARY
    assert portable["token"] == fast["config"]["session_token"] == CANARY
    assert portable["config_kwargs"]["connect_timeout"] == 2
    assert portable["config_kwargs"]["read_timeout"] == 7.5
    # Both sign the SHA-256 of each body, over https too, and add no trailer.
    assert portable["config_kwargs"]["s3"] == {"payload_signing_enabled": True}
    assert portable["config_kwargs"]["request_checksum_calculation"] == "when_required"
    assert fast["client_options"]["connect_timeout"].total_seconds() == 2
    assert fast["client_options"]["timeout"].total_seconds() == 7.5
    assert fast["retry_config"]["max_retries"] == 0


def test_what_is_not_given_is_left_to_the_clients_own_environment(monkeypatch):
    monkeypatch.delenv("AWS_CA_BUNDLE", raising=False)
    options = read_s3_options({})
    assert set(for_s3fs(options)) == {"config_kwargs"}
    assert set(for_obstore(options)["config"]) == {"disable_bulk_delete"}


def test_the_names_of_other_tools_mean_the_same():
    named = {"endpoint_url": "https://s3.example", "region_name": "eu-1", "access_key_id": "id"}
    assert read_s3_options(named) == read_s3_options(
        {"endpoint": "https://s3.example", "region": "eu-1", "key": "id"}
    )


def test_what_s3fs_alone_knows_is_passed_on_and_wins():
    options = read_s3_options({"region": "eu-1", "client_kwargs": {"region_name": "us-2"}})
    assert for_s3fs(options)["client_kwargs"]["region_name"] == "us-2"


@pytest.mark.parametrize(
    "given",
    [
        {"secrt": CANARY},
        {"secret": 7},
        {"anon": CANARY},
        {"client": "boto"},
        {"client": "obstore", "client_kwargs": {"x": CANARY}},
        {"part_bytes": 1},
        {"parts_in_flight": True},
        {"request_seconds": 0},
    ],
)
def test_a_wrong_option_is_refused_by_name_and_its_value_is_not_shown(given):
    with pytest.raises(ConfigError) as caught:
        open_store("s3://bucket/run", storage_options=given)
    said = caught.value.message + caught.value.hint
    assert next(iter(given)) in said
    assert CANARY not in said


def test_a_misspelled_option_names_the_one_that_was_meant():
    with pytest.raises(ConfigError, match="did you mean `secret`"):
        read_s3_options({"secrt": "x"})


def test_shown_options_tell_nothing():
    assert CANARY not in repr(read_s3_options(GIVEN))
    assert CANARY not in repr(LaunchEnv(World(), storage_options=GIVEN))


def test_a_worker_is_told_what_its_launcher_was_told():
    launch = LaunchEnv(World(), storage_options=GIVEN)
    assert read_launch(write_launch(launch)).storage_options == GIVEN
    assert "RESILIENT_STORAGE_OPTIONS" not in write_launch(LaunchEnv(World()))


@pytest.mark.parametrize("text", ['{"secret": "canary-secret"', '["canary-secret"]', "[" * 99999])
def test_options_that_are_no_object_are_refused_without_showing_them(text):
    with pytest.raises(ConfigError) as caught:
        read_storage_options({"RESILIENT_STORAGE_OPTIONS": text})
    assert "RESILIENT_STORAGE_OPTIONS" in caught.value.message
    assert CANARY not in caught.value.message + caught.value.hint
    assert caught.value.__cause__ is None


def test_no_options_are_no_error():
    assert parse_storage_options("", "here") == read_storage_options({}) == {}


@pytest.mark.parametrize("size_bytes", [0, 1, 160 << 30, (160 << 30) + 1, 5 << 40])
def test_an_upload_never_has_more_parts_than_s3_takes(size_bytes):
    assert -(-size_bytes // MultipartConfig().bytes_for(size_bytes)) <= 10_000
