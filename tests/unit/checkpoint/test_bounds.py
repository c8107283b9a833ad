"""Documents that ask for more than there is: refused before anything is allocated for them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.generations import claim, read_generation
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.verify import verify, verify_records
from resilient.errors import ConfigError, IntegrityError, StoreDenied
from resilient.format.document import canonical, check_manifest, unseal
from resilient.format.keys import ABILITIES, committed_key, generation_key, tag_key
from resilient.format.manifest import decode
from resilient.storage.local import LocalStore
from resilient.testing.memory_store import MemoryStore
from tests.helpers.mutations import deep, reseal
from tests.helpers.tiny import CHECKPOINT, tiny_repository

FIELDS = json.loads(tiny_repository().objects[CHECKPOINT.manifest_key])
FILE, TENSOR = FIELDS["files"][0], FIELDS["tensors"][0]
REGION = TENSOR["regions"][0]


def with_file(**fields):
    return {**FIELDS, "files": [{**FILE, **fields}, *FIELDS["files"][1:]]}


def with_tensor(**fields):
    return {**FIELDS, "tensors": [{**TENSOR, **fields}, *FIELDS["tensors"][1:]]}


def with_region(**fields):
    return with_tensor(regions=[{**REGION, **fields}])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({**FIELDS, "files": [FILE] * 200_001}, "more than 200000"),
        ({**FIELDS, "tensors": [TENSOR] * 500_001}, "more than 500000"),
        (with_tensor(regions=[REGION] * 100_001), "more than 100000"),
        (with_tensor(shape=[2**40, 2**40]), "larger than any memory"),
        (with_tensor(shape=[0, 2**62, 2**62]), "larger than any memory"),
        (with_tensor(shape=[1] * 65), "more than 64"),
        (with_tensor(shape=[-1]), "whole number"),
        (with_tensor(shape=["aaaa", 2**40]), "whole number"),
        (with_tensor(name="x" * 5000), "not a name"),
        (with_tensor(dtype=["F32"]), "short text"),
        (with_file(size_bytes=2**63), "whole number"),
        (with_file(size_bytes=float(FILE["size_bytes"])), "whole number"),
        (with_file(size_bytes=True), "whole number"),
        (with_file(name="x" * 300), "short text"),
        (with_file(chunks=["zz"]), "not a digest"),
        (with_region(size_bytes=-1), "whole number"),
        (with_region(size_bytes=2**50), "shorter than its tensors"),
        (with_region(file="elsewhere.safetensors"), "shorter than its tensors"),
        ({**FIELDS, "world": [2]}, "not an object"),
        ({**FIELDS, "created_at": "\x1b[2J"}, "printable text"),
        ({**FIELDS, "run_id": "\ud800"}, "printable text"),
    ],
)
def test_what_is_out_of_bounds_is_refused_before_it_is_used(fields, why):
    with pytest.raises(ValueError, match=why):
        check_manifest(fields)
    if len(fields["files"]) + len(fields["tensors"]) < 1000:
        with pytest.raises(IntegrityError):
            decode(reseal(fields), CHECKPOINT.manifest_key)


@pytest.mark.parametrize("name", ["../x.json", "/etc/passwd", "a/b.json", "a\0.json", "..", ".x"])
@pytest.mark.parametrize("field", ["files", "document", "region"])
def test_no_name_of_a_manifest_leaves_its_folder(name, field):
    fields = {
        "files": with_file(name=name),
        "region": with_region(file=name),
        "document": {**FIELDS, "parts": [{**FIELDS["parts"][0], "document": name}]},
    }[field]
    with pytest.raises(IntegrityError):
        decode(reseal(fields), CHECKPOINT.manifest_key)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":1,"a":2,"root":"00"}\n',
        b'{"a":' + b"9" * 6000 + b',"root":"00"}\n',
        b'{"a":NaN,"root":"00"}\n',
        b'{"a":1e999,"root":"00"}\n',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b',"root":"00"}\n',
        canonical({"a": deep(300), "root": "00"}),
        '{"a":1,"root":"00"}\n'.encode("utf-16"),
        b"",
    ],
)
def test_json_that_is_not_ours_is_refused(data):
    with pytest.raises(IntegrityError):
        unseal(data, "key")


def test_what_is_sealed_may_nest_as_deep_as_a_configuration_does_and_no_deeper():
    assert unseal(reseal({"a": deep(90)}), "key")["a"]
    with pytest.raises(IntegrityError, match="deep"):
        unseal(reseal({"a": deep(110)}), "key")


class Careful(LocalStore):
    """Would rather fail the test than take the machine's memory."""

    def get(self, key):
        assert self.stat(key).size_bytes < 1 << 30, f"{key} is read"
        return super().get(key)


@pytest.mark.parametrize(
    "key",
    [
        CHECKPOINT.manifest_key,
        CHECKPOINT.key("model.r00001.safetensors"),
        CHECKPOINT.key("trainer_state.json"),
        generation_key(1),
        committed_key(1),
        tag_key("release"),
        ABILITIES,
    ],
)
def test_an_object_of_a_terabyte_is_not_read(tmp_path, key):
    """The file is a hole, so only a reader that trusts its length would notice how long it is."""
    for name, data in tiny_repository().objects.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    with (tmp_path / key).open("r+b") as file:
        file.truncate(1 << 40)
    store = Careful(tmp_path)
    if key.startswith(CHECKPOINT.folder):
        with pytest.raises(IntegrityError, match="bytes"):
            read(store, CHECKPOINT)
        (finding,) = verify(store, CHECKPOINT)
        assert finding.file == key.rpartition("/")[2]
    else:
        assert [one.file for one in verify_records(store)] == [key]


BOMBS = """
import resource, sys
from pathlib import Path
from resilient.errors import IntegrityError
from resilient.format.manifest import decode
from resilient.format.safetensors_file import read_header

used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), used + (200 << 20)))
for path in sorted(Path(sys.argv[1]).iterdir()):
    data = path.read_bytes()
    for reader in (
        lambda: decode(data, "checkpoint-7-g1/manifest.json"),
        lambda: read_header(data, "key"),
    ):
        try:
            reader()
        except IntegrityError:
            continue
        raise SystemExit(f"{path.name} was taken")
"""


def test_bombs_are_refused_within_200_mib_of_address_space(tmp_path):
    bombs = {
        "huge-header": b"\xff" * 7 + b"\x00" + b"{" * 100,
        "header-of-100-mb": (100 << 20).to_bytes(8, "little") + b" " * 1000,
        "nested": b"[" * 1_000_000,
        "objects": b'{"a":' * 500_000,
        "shape": reseal(with_tensor(shape=[2**60, 2**60, 2**60])),
        "text-shape": reseal(with_tensor(shape=["a" * 1000, 2**40])),
        "many-names": b"[" + b'"a",' * 300_000 + b'"a"]',
        "aliases": reseal(with_tensor(regions=[REGION] * 1000)),
    }
    for name, data in bombs.items():
        (tmp_path / name).write_bytes(data)
    done = subprocess.run(
        [sys.executable, "-c", BOMBS, str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_link_that_leaves_the_root_is_not_followed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_bytes(tiny_repository().objects[CHECKPOINT.manifest_key])
    root = tmp_path / "root"
    root.mkdir()
    (root / CHECKPOINT.folder).symlink_to(outside)
    with pytest.raises(StoreDenied, match="symbolic link"):
        read_manifest(LocalStore(root), CHECKPOINT)
    assert list(LocalStore(root).list()) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [("parent", "../../x"), ("parent", 7), ("number", "1"), ("run_id", None), ("host", "\x1b[2J")],
)
def test_a_record_that_was_forged_badly_is_refused_and_not_taken_for_another(field, value):
    store = tiny_repository()
    key = generation_key(1)
    store.objects[key] = reseal({**json.loads(store.objects[key]), field: value})
    with pytest.raises(IntegrityError):
        read_generation(store, 1)


def test_a_life_is_not_recorded_in_a_way_that_nobody_could_read():
    from resilient.clock import SystemClock

    store = MemoryStore()
    with pytest.raises(ConfigError, match="cause"):
        claim(store, None, cause="two\nlines", clock=SystemClock())
    assert store.objects == {}
