"""``--notice``: what words mean, and what a machine is that says nothing."""

from __future__ import annotations

import pytest

from resilient.clock import SystemClock
from resilient.elastic.preemption.factory import choose_sources, detect
from resilient.errors import ConfigError


def names(text, environ=None, dmi=None):
    sources = choose_sources(text, environ or {}, SystemClock(), dmi)
    for source in sources:
        source.close()
    return [source.name for source in sources]


def machine(folder, **files):
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def test_words_become_sources():
    assert names("off") == names("") == []
    assert names("aws") == names("aws+rebalance") == ["aws"]
    assert names("gcp, azure+ack") == ["gcp preempted", "gcp maintenance-event", "azure"]
    assert names("slurm", {"SLURM_JOB_ID": "1"}) == ["slurm"]
    assert names("file:/run/stop") == ["file /run/stop"]
    assert names("http://user:secret@host/x?key=1") == ["host/x"]
    assert names("http:0")[0].startswith("http 127.0.0.1:")
    assert names("http::0")[0].startswith("http 0.0.0.0:")


@pytest.mark.parametrize(
    "text",
    ["amazon", "aws+ack", "aws=nowhere", "aws=ftp://x", "file:", "http:x", "auto,aws", "http://"],
)
def test_a_word_that_nobody_knows_is_refused(text):
    with pytest.raises(ConfigError):
        names(text)


def test_metadata_servers_are_where_the_clouds_own_variables_say():
    environ = {
        "AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://127.0.0.1:1/",
        "GCE_METADATA_HOST": "127.0.0.1:2",
        "RESILIENT_AZURE_METADATA": "http://127.0.0.1:3",
    }
    found = choose_sources("aws,gcp,azure", environ, SystemClock())
    endpoints = [source._endpoint for source in found]
    assert endpoints == [f"http://127.0.0.1:{port}" for port in (1, 2, 2, 3)]
    found = choose_sources("aws=http://127.0.0.1:9", environ, SystemClock())
    assert found[0]._endpoint == "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({"sys_vendor": "Amazon EC2"}, ["aws"]),
        ({"product_name": "Google Compute Engine", "sys_vendor": "Google"}, ["gcp"]),
        ({"chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77"}, ["azure"]),
        ({"sys_vendor": "Microsoft Corporation"}, []),
        ({}, []),
    ],
)
def test_a_machine_says_itself_whose_it_is(tmp_path, files, found):
    assert detect({}, machine(tmp_path, **files)) == found


def test_a_job_of_slurm_is_one_wherever_it_runs(tmp_path):
    environ = {"SLURM_JOB_ID": "5", "AWS_EC2_METADATA_DISABLED": "true"}
    folder = machine(tmp_path, sys_vendor="Amazon EC2")
    assert names("auto", environ, folder) == ["slurm"]
