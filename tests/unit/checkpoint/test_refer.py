"""What did not change is not written again, and every reference leads to proved bytes."""

from __future__ import annotations

import pytest
import torch

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.commit import commit, gather_receipts
from resilient.checkpoint.restore.memory_store import MemoryCachedStore, StagedFileRecord
from resilient.checkpoint.restore.read import read
from resilient.checkpoint.save import dedup
from resilient.checkpoint.save.dedup import (
    DedupBase,
    RegionFingerprints,
    deduplicate,
    make_dedup_base,
)
from resilient.checkpoint.save.persist import write
from resilient.checkpoint.verify import verify
from resilient.distributed.launch_env import World
from resilient.format.digest import digest_file
from resilient.state_dict.snapshot import Part, capture
from resilient.state_dict.staging import StagingBuffers, stage
from resilient.storage.shared_memory import SharedFolder, map_file
from resilient.testing.memory_store import MemoryStore
from tests.helpers.manifests import Values, begin, empty_manifest, frozen_parts_of, save
from tests.helpers.referring import MODEL, files, place, put_step, step, value


@pytest.fixture
def store():
    store = MemoryStore()
    begin(store)
    return store


def test_only_what_changed_is_written_and_all_of_it_reads_back(store):
    put_step(store, 1)
    second = put_step(store, 2, [step(1)])
    assert place(second, "model/frozen").file == step(1).key(MODEL)
    assert place(second, "model/trained").file == MODEL
    assert len(store.objects[step(2).key(MODEL)]) < 2000 < len(store.objects[step(1).key(MODEL)])
    for name in ("frozen", "slow", "trained", "nothing"):
        expected = frozen_parts_of(2)["model"].stateful.state[name]
        assert torch.equal(value(store, 2, f"model/{name}"), expected), name
    assert verify(store, step(2), "deep") == []


def test_a_reference_leads_to_where_the_bytes_are_however_many_saves_ago(store):
    put_step(store, 1)
    for number in (2, 3, 4, 5):
        put_step(store, number, [step(number - 1)])
    last = read_manifest(store, step(5))
    assert place(last, "model/frozen").file == step(1).key(MODEL)
    assert place(last, "model/slow").file == step(3).key(MODEL)
    assert files(last) > {step(1).key(MODEL), step(3).key(MODEL), MODEL}
    assert (
        last.size_bytes
        > last.own_bytes
        == sum(
            len(data)
            for key, data in store.objects.items()
            if key.startswith(f"{step(5)}/") and "manifest" not in key
        )
    )


def test_a_file_of_which_nothing_changed_is_not_written(store):
    one = torch.arange(9000.0)
    put_step(store, 1, same=one)
    second = put_step(store, 2, [step(1)], same=one)
    assert files(second) == {step(1).key(MODEL), "state.json"}
    assert step(2).key(MODEL) not in store.objects
    assert torch.equal(value(store, 2, "model/same"), one)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (torch.zeros(8000), torch.zeros(8000, dtype=torch.int32)),
        (torch.zeros(8000), torch.zeros(80, 100)),
        (torch.zeros(8000), torch.ones(8000)),
    ],
    ids=["dtype", "shape", "bits"],
)
def test_what_differs_in_any_way_is_written(store, before, after):
    put_step(store, 1, one=before)
    second = put_step(store, 2, [step(1)], one=after)
    assert files(second) == {MODEL, "state.json"}
    assert verify(store, step(2), "deep") == []
    assert torch.equal(value(store, 2, "model/one"), after)


def test_a_tensor_of_another_name_is_another_tensor(store):
    put_step(store, 1, one=torch.ones(9000))
    assert files(put_step(store, 2, [step(1)], other=torch.ones(9000))) == {MODEL, "state.json"}


def test_small_regions_are_written_all_the_same(store):
    count = dedup.REFER_BYTES_MIN // 4
    tensors = {"small": torch.zeros(count - 1), "large": torch.zeros(count)}
    put_step(store, 1, **tensors)
    second = put_step(store, 2, [step(1)], **tensors)
    assert place(second, "model/small").file == MODEL
    assert place(second, "model/large").file == step(1).key(MODEL)


def test_a_file_most_of_which_nobody_needs_is_not_referred_to(store):
    """A fifth of the first file is still the same: not worth to keep the rest for."""
    same, odd = torch.ones(8000), torch.arange(32000.0)
    put_step(store, 1, same=same, odd=odd)
    second = put_step(store, 2, [step(1)], same=same)
    assert files(second) == {MODEL, "state.json"}


def test_a_file_of_which_nearly_all_changed_is_written_as_it_was_staged(store):
    same, odd = torch.ones(8000), torch.arange(32000.0)
    put_step(store, 1, same=same)
    second = put_step(store, 2, [step(1)], same=same, odd=odd)
    assert files(second) == {MODEL, "state.json"}


def test_a_checkpoint_refers_to_a_bounded_number_of_folders(store, monkeypatch):
    monkeypatch.setattr(dedup, "FOLDERS_MAX", 2)
    tensors = {f"layer{number}": torch.full((8000 + number,), -1.0) for number in range(3)}
    put_step(store, 1, **tensors)
    for number in range(3):
        # One layer after the other gets its last value, in a folder of its own.
        for other in range(number, 3):
            tensors[f"layer{other}"] = torch.full((8000 + other,), float(number * 10 + other))
        put_step(store, 2 + number, [step(1 + number)], **tensors)
    last = put_step(store, 5, [step(4)], **tensors)
    assert len({one.origin for one in last.files} - {None}) == 2
    assert place(last, "model/layer0").file == MODEL, "the least goes first"


@pytest.mark.parametrize("loss", ["gone", "short"])
def test_what_is_not_there_any_more_is_written_anew(store, loss):
    put_step(store, 1)
    key = step(1).key(MODEL)
    if loss == "gone":
        del store.objects[key]
    else:
        store.objects[key] = store.objects[key][:-1]
    assert files(put_step(store, 2, [step(1)])) == files(read_manifest(store, step(1)))
    assert verify(store, step(2)) == []


@pytest.mark.parametrize("loss", ["gone", "damaged"])
def test_without_a_whole_manifest_to_compare_with_everything_is_written(store, loss):
    put_step(store, 1)
    if loss == "gone":
        del store.objects[step(1).manifest_key]
    else:
        store.objects[step(1).manifest_key] += b" "
    assert all(one.origin is None for one in put_step(store, 2, [step(1)]).files)


def test_the_first_base_that_is_committed_counts(store):
    put_step(store, 1)
    put_step(store, 2, [step(1)])
    third = put_step(store, 4, [step(5), step(3), step(2), step(1)])
    assert place(third, "model/frozen").file == step(1).key(MODEL)
    assert place(third, "model/slow").file == MODEL


def test_a_checkpoint_never_refers_to_a_newer_one(store):
    put_step(store, 2)
    assert all(one.origin is None for one in put_step(store, 1, [step(2)]).files)


def test_documents_are_always_own(store):
    """A part of each rank has its plain values in its file's header."""
    parts = {"own": Part(Values(words=torch.zeros(9000), plain=1), "rank")}
    for number in (1, 2):
        save(store, step(number), bases=[step(1)] if number > 1 else [], parts=parts)
    second = read_manifest(store, step(2))
    assert files(second) == {"own_0.safetensors", "state.json"}


def test_after_a_resume_only_what_this_rank_has_proved_is_referred_to(store):
    put_step(store, 1)
    one = place(read_manifest(store, step(1)), "model/frozen")
    ranges = ((MODEL, one.start, one.start + one.size_bytes),)
    second = put_step(store, 2, [DedupBase(step(1), ranges)])
    assert place(second, "model/frozen").file == step(1).key(MODEL)
    assert place(second, "model/slow").file == MODEL
    short = ((MODEL, one.start, one.start + one.size_bytes - 1),)
    assert all(
        file.origin is None for file in put_step(store, 3, [DedupBase(step(1), short)]).files
    )


def test_what_came_from_memory_is_not_known_to_be_stored(store, tmp_path):
    """The store's copy is damaged, memory's is whole: the next save must not refer to it."""
    put_step(store, 1)
    key = step(1).key(MODEL)
    content = store.objects[key]
    shared = SharedFolder(tmp_path)
    path = shared.allocate(len(content))
    map_file(path, len(content), writable=True)[:] = content
    store.objects[key] = content[:-1] + bytes([content[-1] ^ 1])
    recalling = MemoryCachedStore(
        store, {key: StagedFileRecord(str(path), digest_file(content))}, pytest.fail
    )
    base = make_dedup_base(read(recalling, step(1)), recalling)
    assert MODEL not in {file for file, _, _ in base.verified_ranges}
    put_step(store, 2, [base])
    assert verify(store, step(2)) == []
    shared.close()


def test_what_was_read_and_proved_is_all_of_it(store):
    put_step(store, 1)
    put_step(store, 2, [step(1)])
    base = make_dedup_base(read(store, step(2)), store)
    third = put_step(store, 3, [base])
    assert place(third, "model/frozen").file == step(1).key(MODEL)
    assert DedupBase.from_json(base.to_json()) == base


def test_ranks_that_refer_to_one_file_list_it_once(store):
    """Two ranks save; one rank alone saved before."""
    tensors = {f"w{number}": torch.full((9000,), float(number)) for number in range(4)}
    put_step(store, 1, **tensors)
    save(store, step(2), ranks=2, bases=[step(1)], parts={"model": Part(Values(**tensors))})
    second = read_manifest(store, step(2))
    assert sorted(one.name for one in second.files) == [step(1).key(MODEL), "state.json"]
    assert verify(store, step(2), "deep") == []


def test_what_is_left_of_a_file_is_one_that_others_read(store):
    safetensors = pytest.importorskip("safetensors.torch")
    put_step(store, 1)
    put_step(store, 2, [step(1)])
    loaded = safetensors.load(store.objects[step(2).key(MODEL)])
    assert set(loaded) == {"trained", "nothing"}
    assert torch.equal(loaded["trained"], torch.full((100,), 2.0))


@pytest.mark.parametrize("lacking_bytes", [1, 0, None])
def test_a_file_is_written_as_it_lies_where_no_memory_is_left_for_a_shorter_copy(
    store, lacking_bytes
):
    def division(tensors):
        staged = stage(capture(2, {"model": Part(Values(**tensors))}, 0), World(), StagingBuffers())
        left_bytes = len(staged.files[0].data) - same.nbytes
        bound = None if lacking_bytes is None else left_bytes - lacking_bytes
        bases = [DedupBase(step(1))]
        return staged, deduplicate(
            store, step(2), staged.files, staged.parts, bases, copies_bytes_max=bound
        )

    same, changed = torch.arange(10_000.0), torch.zeros(500)
    put_step(store, 1, same=same, changed=changed)
    staged, found = division({"same": same, "changed": changed + 1})
    assert [one.name for one in found.files] == [one.name for one in staged.files]
    if lacking_bytes:
        assert found.files[0].data is staged.files[0].data
        assert found.referred == ()
    else:
        assert found.files[0].size_bytes < 3000
        assert [one.name for one in found.referred] == ["model/same"]
    _, found = division({"same": same})
    assert MODEL not in [one.name for one in found.files], "what is all there needs no copy"


@pytest.fixture
def digested(store, monkeypatch):
    """Save tensors as the steps of one life, and tell how many bytes each digest is of."""
    glimpses, lengths = RegionFingerprints(), []
    digest = dedup.digest_slowly
    monkeypatch.setattr(
        dedup, "digest_slowly", lambda one, told: [lengths.append(len(one)), digest(one, told)][1]
    )

    def division(number, bases, **tensors):
        lengths.clear()
        parts = {"model": Part(Values(**{name: one.clone() for name, one in tensors.items()}))}
        staged = stage(capture(number, parts, 0), World(), StagingBuffers())
        found = deduplicate(
            store, step(number), staged.files, staged.parts, bases, last_fingerprints=glimpses
        )
        written = write(store, step(number), 0, found.files, staged.parts)
        commit(store, gather_receipts(empty_manifest(step(number)), [found.complete(written)]))
        return [one.name for one in found.referred], lengths

    return division


def test_what_has_changed_for_certain_is_not_digested_to_find_that_out(
    digested, store, monkeypatch
):
    """Tensors with equal shapes and sizes differ by their digests."""
    tensors = {name: torch.zeros(20_000) for name in ("frozen", "trained", "sparse")}
    _, lengths = digested(1, [], **tensors)
    assert 80_000 not in lengths, "there is nothing to compare with"
    tensors["trained"] += 1
    tensors["sparse"][5000] = 1
    referred, lengths = digested(2, [DedupBase(step(1))], **tensors)
    assert referred == ["model/frozen"]
    assert lengths.count(80_000) == 3, "frozen, sparse; and what is left of a file is digested"
    assert verify(store, step(2), "deep") == []
    for one in tensors.values():
        one.add_(1)
    monkeypatch.setattr(dedup, "read_manifest", lambda *_: pytest.fail("the store was asked"))
    referred, lengths = digested(3, [DedupBase(step(2))], **tensors)
    assert (referred, 80_000 in lengths) == ([], False), "everything changed"


def test_a_file_that_is_written_anyway_is_not_digested_before(digested):
    few, many = torch.zeros(5), torch.zeros(20_000)
    digested(1, [], few=few, many=many)
    referred, lengths = digested(2, [DedupBase(step(1))], few=few, many=many + 1)
    assert (referred, 80_000 in lengths) == ([], False), "five numbers are worth no reference"


def test_a_save_that_writes_little_asks_for_little_room(store):
    parts = frozen_parts_of(1)
    staged = stage(capture(1, parts, 0), World(), StagingBuffers())
    save(store, step(1), parts=parts)
    division = deduplicate(store, step(2), staged.files, staged.parts, [DedupBase(step(1))])
    assert division.size_bytes == sum(len(one.data) for one in division.files)
    assert division.size_bytes < sum(len(one.data) for one in staged.files) / 10
