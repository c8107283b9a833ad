"""What may be shown of a URL, and of what another library says of one."""

from __future__ import annotations

import traceback

import pytest

from resilient.errors import ConfigError
from resilient.redaction import redact_json, redact_secrets, redact_userinfo
from resilient.storage.folder import open_folder
from resilient.storage.open import open_store
from resilient.storage.urls import fit_to_show, redacted, redacted_text

ANSWER = (
    'status 403: <?xml version="1.0"?>\n<Error><Code>SignatureDoesNotMatch</Code><Message>It does '
    "not match.</Message><CanonicalRequest>GET\nx-amz-security-token:c4n4ry\n</CanonicalRequest>"
    "</Error>, after 1 s"
)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://user:a/b+c=@bucket/run", "s3://bucket/run"),
        ("s3://user:secret@bucket/run@v2", "s3://bucket/run@v2"),
        ("s3://bucket/run@v2/x", "s3://bucket/run@v2/x"),
        ("s3://user:12/c4n4ry@bucket/run", "s3://bucket/run"),
        ("s3:/user:12/c4n4ry@bucket/run", "s3:/bucket/run"),
        ("hdfs://host:9000/folder@v2", "hdfs://host:9000/folder@v2"),
        ("sftp://user:secret@host:22/x@y", "sftp://host:22/x@y"),
        ("az://container@account/x", "az://account/x"),
        ("s3:/user:a/b@bucket/run", "s3:/bucket/run"),
        ("src:/data@v1", "src:/data@v1"),
    ],
)
def test_a_user_is_not_shown_whatever_the_secret_holds(url, shown):
    if "://" in url:
        assert redacted(url) == shown
    assert redacted_text(f"GET {url} refused") == f"GET {shown} refused"
    assert redact_userinfo(shown) == shown


def test_of_a_refusal_the_code_and_the_message_are_shown():
    assert (
        redacted_text(ANSWER) == "status 403: SignatureDoesNotMatch: It does not match., after 1 s"
    )
    for text in (
        "Authorization: Bearer c4n4ry",
        '{"x-amz-security-token": "c4n4ry"}',
        ANSWER[:150],
    ):
        assert "c4n4ry" not in redacted_text(text)


def test_a_cause_that_shows_nothing_is_kept_and_another_is_not():
    whole = ValueError("no such host")
    assert fit_to_show(whole) is whole
    hurt = ValueError("it failed")
    hurt.__cause__ = OSError(ANSWER)
    shown = fit_to_show(hurt)
    text = "".join(traceback.format_exception(shown))
    assert "ValueError: it failed" in text
    assert "c4n4ry" not in text


@pytest.mark.parametrize("opens", [open_store, open_folder])
@pytest.mark.parametrize(
    "url",
    ["s3://user:c4n4/ry@bucket/run", "gs://user:c4n4ry/x@b", "s3://b:c/", "s3://u:12/c4n4ry@b/x"],
)
def test_a_secret_that_would_be_a_bucket_is_refused_before_anybody_is_asked(opens, url):
    with pytest.raises(ConfigError, match="a URL must not contain a user or a secret") as caught:
        opens(url)
    assert "c4n4" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("`az://account/x?sig=c4n4ry` is not there", "`az://account/x?***` is not there"),
        ("s3:/bucket/x?secret=c4n4ry", "s3:/bucket/x?***"),
        ("https://user:c4n4ry@host/x?c4n4ry#c4n4ry", "https://***@host/x?***"),
        ("https://host/x#token=c4n4ry", "https://host/x#***"),
        ("is it https://host/x#part? Or /a?b=c", "is it https://host/x#part? Or /a?b=c"),
    ],
)
def test_nothing_of_a_query_is_shown_and_what_is_none_stays(said, shown):
    assert redact_secrets(said) == shown
    assert redact_json({"a": [said, 1, (said,)]}) == {"a": [shown, 1, [shown]]}
