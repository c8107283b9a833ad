import os

from resilient.clock import SystemClock
from resilient.storage.local import LocalStore, sweep_temporaries


def test_only_old_temporary_files_are_swept(tmp_path):
    store = LocalStore(tmp_path)
    store.put("a/object", b"x")
    paths = [tmp_path / "a" / name for name in (".tmp-1-old", ".tmp-2-new", ".foreign")]
    for path in paths:
        path.write_bytes(b"half")
    for path in (paths[0], paths[2], tmp_path / "a/object"):
        os.utime(path, (1, 1))
    (tmp_path / "a/.tmp-link").symlink_to(tmp_path / "a/object")
    assert sweep_temporaries(tmp_path, 3600, SystemClock()) == [paths[0]]
    assert not paths[0].exists()
    assert paths[1].exists()
    assert paths[2].exists()
    assert store.get("a/object") == b"x"


def test_a_missing_store_has_nothing_to_sweep(tmp_path):
    assert sweep_temporaries(tmp_path / "none", 0, SystemClock()) == []
