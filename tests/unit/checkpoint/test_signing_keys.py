"""Keys that sign: where they come from, and how they are told apart."""

from __future__ import annotations

import pytest

from resilient.distributed.launch_env import (
    LaunchEnv,
    World,
    read_launch,
    read_signing_key,
    write_launch,
)
from resilient.errors import ConfigError
from resilient.format.signature import SigningKey, SigningPolicy
from tests.helpers.tiny import OTHER, SECRET, SIGNING


def test_keys_are_told_apart_and_a_short_one_is_refused():
    assert SIGNING.key.key_id != OTHER.key.key_id
    assert SIGNING.key == SigningKey(SECRET.encode())
    with pytest.raises(ConfigError, match="15 bytes") as caught:
        SigningPolicy.of_secret("0123456789abcde")
    assert "0123456789abcde" not in caught.value.message + caught.value.hint
    assert SigningPolicy.of_secret("") == SigningPolicy()


def test_what_nobody_could_check_is_not_required():
    with pytest.raises(ConfigError, match="no key") as caught:
        SigningPolicy.of_secret("", is_required=True)
    assert "RESILIENT_SIGNING_KEY_FILE" in caught.value.hint


def test_the_key_comes_from_the_environment_or_from_a_file(tmp_path):
    file = tmp_path / "signing.key"
    file.write_text(f"{SECRET}\n")
    assert read_signing_key({}) == ""
    assert read_signing_key({"RESILIENT_SIGNING_KEY": SECRET}) == SECRET
    assert read_signing_key({"RESILIENT_SIGNING_KEY_FILE": str(file)}) == SECRET
    both = {"RESILIENT_SIGNING_KEY": SECRET, "RESILIENT_SIGNING_KEY_FILE": str(file)}
    with pytest.raises(ConfigError, match="use one of them"):
        read_signing_key(both)
    file.write_bytes(b"\xff" * 20)
    raw = read_signing_key({"RESILIENT_SIGNING_KEY_FILE": str(file)})
    assert SigningPolicy.of_secret(raw).key == SigningKey(b"\xff" * 20)


@pytest.mark.parametrize("content", [None, "", " \n", "x" * 70_000])
def test_a_key_file_without_a_key_is_named_and_not_shown(tmp_path, content):
    file = tmp_path / "signing.key"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"signing\.key") as caught:
        read_signing_key({"RESILIENT_SIGNING_KEY_FILE": str(file)})
    assert "openssl rand" in caught.value.hint
    assert "xxx" not in caught.value.message


def test_workers_are_told_that_a_signature_is_required():
    told = write_launch(LaunchEnv(World(), require_signature=True))
    assert told["RESILIENT_REQUIRE_SIGNATURE"] == "1"
    assert read_launch(told).require_signature
    assert not read_launch({}).require_signature
