"""No command shows a credential: not of a URL, not of the environment, not what a server echoes."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from resilient_cli.app import load
from resilient_cli.command_tree import COMMANDS
from tests.cli.test_schemas import leaves
from tests.helpers.cli_repositories import write_usual_run

CANARY = "c4n4ry-Do-Not-Show+="
TRAIN = ("train", "--repo", "URL", "SCRIPT")

# REF: a checkpoint's name. OUT: a path where nothing is. What is no row is refused below.
WORDS = {
    "audit": ("URL",),
    "chaos.list": (),
    "chaos.run": ("kills", "--dry-run", "--", *TRAIN),
    "ckpt.bisect": ("step:10", "latest", "-r", "URL", "--", "false"),
    "ckpt.cat": ("latest", "trainer.global_step", "URL"),
    "ckpt.cp": ("latest", "OUT", "--repo", "URL"),
    "ckpt.diff": ("latest", "latest~1", "URL"),
    "ckpt.export": ("latest", "OUT", "--repo", "URL", "--format", "hf"),
    "ckpt.import": ("RUN", "--repo", "URL"),
    "ckpt.inspect": ("latest", "URL"),
    "ckpt.ls": ("URL",),
    "ckpt.prune": ("URL", "--keep-last", "2", "--dry-run"),
    "ckpt.reflog": ("URL",),
    "ckpt.repair": ("latest", "URL"),
    "ckpt.rollback": ("latest", "URL", "--dry-run"),
    "ckpt.scan": ("URL",),
    "ckpt.sign": ("latest", "URL"),
    "ckpt.tag": ("latest", "release", "URL"),
    "ckpt.undo": ("URL", "--dry-run"),
    "ckpt.unlock": ("URL",),
    "ckpt.untag": ("release", "URL"),
    "ckpt.verify": ("URL",),
    "completion": ("bash",),
    "config.check": ("CONFIG",),
    "config.schema": (),
    "config.show": ("CONFIG",),
    "doctor": ("--repo", "URL"),
    "help": ("storage",),
    "init": ("OUT",),
    "k8s.apply": ("--image", "img", "--dry-run", "--", *TRAIN),
    "k8s.delete": ("train", "--yes"),
    "k8s.diff": ("--image", "img", "--", *TRAIN),
    "k8s.logs": ("train",),
    "k8s.render": ("--image", "img", "--", "train", "--repo", "URL", "/train.py"),
    "k8s.status": ("train",),
    "k8s.wait": ("train", "--timeout", "1s"),
    "logs": ("URL",),
    "plan": ("URL",),
    "report": ("URL",),
    "slurm.render": ("--", *TRAIN),
    "slurm.status": ("1",),
    "slurm.submit": ("--", *TRAIN),
    "status": ("URL",),
    "stop": ("URL",),
    "train": ("--dry-run", "--repo", "URL", "SCRIPT"),
    "ui": ("URL/none", "--no-browser"),
    "version": (),
}


# Every other place that a command takes: in an argument, and in an option.
PLACES = {
    "chaos.run --resume": ("kills", "--dry-run", "--", "train", "--resume", "URL", "SCRIPT"),
    "chaos.run --events": ("kills", "--events", "URL", "--dry-run", "--", *TRAIN),
    "ckpt.bisect --repo": ("step:10", "latest", "--repo", "URL", "--", "false"),
    "ckpt.cat REF": ("URL", "trainer.global_step"),
    "ckpt.cp REF": ("URL", "OUT"),
    "ckpt.cp TARGET": ("latest", "URL", "--repo", "run"),
    "ckpt.diff A": ("URL", "latest", "run"),
    "ckpt.diff --html": ("latest", "latest~1", "run", "--html", "URL"),
    "ckpt.export --out": ("latest", "run", "--format", "safetensors", "--out", "URL"),
    "ckpt.import FOLDER": ("URL", "OUT"),
    "ckpt.import --repo": ("run", "--repo", "URL"),
    "ckpt.inspect --repo": ("latest", "--repo", "URL"),
    "ckpt.inspect REF": ("URL",),
    "ckpt.repair REF": ("URL",),
    "ckpt.repair --from": ("latest", "run", "--from", "URL"),
    "ckpt.repair --out": ("RUN", "--out", "URL"),
    "ckpt.repair --rebuild": ("latest", "run", "--rebuild", "URL"),
    "ckpt.rollback REF": ("URL",),
    "ckpt.tag REF": ("URL", "release"),
    "ckpt.unlock --events": ("run", "--events", "URL"),
    "config.check FILE": ("URL",),
    "config.show FILE": ("URL",),
    "help TOPIC": ("URL",),
    "init DIR": ("URL/resilient",),
    "report -o": ("run", "-o", "URL"),
    "report --tensors": ("run", "-o", "OUT", "--tensors", "URL"),
    "report --compare": ("run", "-o", "OUT", "--compare", "URL", "URL"),
    "slurm.render --resume": ("--", "train", "--resume", "URL", "SCRIPT"),
    "train --resume": ("--max-restarts", "0", "--resume", "URL", "--repo", "OUT", "SCRIPT"),
    "train --events": ("--dry-run", "--events", "URL", "SCRIPT"),
    "train --metrics-file": ("--dry-run", "--metrics-file", "URL", "SCRIPT"),
    "train SCRIPT": ("URL",),
    "train ARGS": ("--dry-run", "SCRIPT", "URL"),
}


class Echo(BaseHTTPRequestHandler):
    """A server that refuses, and says what it was told, as S3 does of a wrong signature."""

    def do_GET(self):
        told = "".join(f"{name}:{value}\n" for name, value in self.headers.items())
        body = (
            '<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code>'
            f"<Message>no</Message><CanonicalRequest>{told}</CanonicalRequest></Error>"
        ).encode()
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET  # noqa: N815 - the base's names

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def endpoint():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run_of(tmp_path, monkeypatch, endpoint, call):
    """Return a function that calls a command with secrets all around it."""
    write_usual_run(tmp_path / "run")
    script, config = tmp_path / "train.py", tmp_path / "resilient.toml"
    script.write_text("print('hello')\n", encoding="utf-8")
    options = {"endpoint": endpoint, "key": "AKIAEXAMPLE", "secret": CANARY, "token": CANARY}
    config.write_text("output_dir = 'out'\n", encoding="utf-8")
    monkeypatch.setenv("RESILIENT_STORAGE_OPTIONS", json.dumps(options))
    monkeypatch.setenv("RESILIENT_SIGNING_KEY", CANARY * 2)
    monkeypatch.chdir(tmp_path)
    places = {"RUN": "run", "SCRIPT": "train.py", "OUT": "nothing-here", "CONFIG": "resilient.toml"}

    def run(name, url, *options, is_after=False):
        words = [one.replace("URL", url) for one in (WORDS | PLACES)[name]]
        words = [places.get(one, one) for one in words]
        command = name.partition(" ")[0].split(".")
        # An option of the command alone stands behind its name.
        return call(*command, *options, *words) if is_after else call(*options, *command, *words)

    return run


def test_every_command_is_asked():
    assert set(WORDS) == set(leaves(COMMANDS))


@pytest.mark.parametrize("options", [(), ("--json",), ("--debug",)], ids=" ".join)
@pytest.mark.parametrize("name", sorted(WORDS))
def test_a_command_that_works_shows_no_secret_of_the_environment(name, options, run_of):
    outcome = run_of(name, "run", *options)
    assert outcome.stdout + outcome.stderr
    assert CANARY not in outcome.stdout + outcome.stderr


BUCKETS = sorted(name for name, words in WORDS.items() if any("URL" in one for one in words))


@pytest.mark.parametrize("options", [(), ("--json",), ("--debug",)], ids=" ".join)
@pytest.mark.parametrize("name", BUCKETS)
def test_a_command_that_is_refused_shows_none_of_the_url_nor_what_a_server_echoes(
    name, options, run_of
):
    outcome = run_of(name, f"s3://user:{CANARY}@bucket/run", *options)
    assert outcome.stdout + outcome.stderr
    assert CANARY not in outcome.stdout + outcome.stderr


@pytest.mark.parametrize("options", [(), ("--json",), ("--debug",)], ids=" ".join)
@pytest.mark.parametrize("name", BUCKETS)
def test_a_secret_with_a_slash_is_no_bucket(name, options, run_of):
    outcome = run_of(name, f"s3://user:{CANARY}/{CANARY}@bucket/run", *options)
    assert outcome.stdout + outcome.stderr
    assert CANARY not in outcome.stdout + outcome.stderr


SIGNED = [
    f"az://account/run?sig={CANARY}",
    f"s3:/bucket/run?secret_key={CANARY}",
    f"https://user:{CANARY}@127.0.0.1:1/run?X-Amz-Signature={CANARY}",
]


@pytest.mark.parametrize("url", SIGNED, ids=["az", "path", "https"])
@pytest.mark.parametrize("name", [*BUCKETS, *PLACES])
def test_no_signature_of_a_url_is_shown_wherever_a_place_is_given(name, url, run_of):
    for options in ((), ("--json",), ("--debug",)):
        outcome = run_of(name, url, "--timeout", "0.1s", *options)
        assert outcome.stdout + outcome.stderr
        assert CANARY not in outcome.stdout + outcome.stderr


def texts_of(name):
    """Return the options of a command that take something; what is no text refuses a URL."""
    command, table = None, COMMANDS
    for part in name.split("."):
        if table is not None and part in table:
            command, table = load(part, table[part]), table[part].commands
        else:
            command, table = command.commands[part], None
    options = [one for one in command.params if one.param_type_name == "option"]
    return [max(one.opts, key=len) for one in options if not one.is_flag]


OPTIONS = [(name, one) for name in sorted(WORDS) for one in texts_of(name)]


def test_the_options_of_all_commands_are_found():
    assert len(OPTIONS) > 150
    assert {("train", "--events"), ("train", "--log-dir"), ("train", "--metrics-file")} <= set(
        OPTIONS
    )
    assert {("ckpt.repair", "--from"), ("ckpt.export", "--out"), ("k8s.apply", "--env")} <= set(
        OPTIONS
    )


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_whatever_an_option_is_given_it_shows_no_secret_of_a_url(name, option, run_of):
    """Hand a URL to each option that takes a text: a new one is in it by being there."""
    for url in SIGNED[1:]:
        outcome = run_of(name, "run", option, url, is_after=True)
        assert outcome.stdout + outcome.stderr
        assert CANARY not in outcome.stdout + outcome.stderr


def test_an_unknown_command_that_is_a_url_is_not_repeated(call):
    assert CANARY not in call(SIGNED[0]).stderr
