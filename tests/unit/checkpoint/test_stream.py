"""Slots of a stream: lent to one file at a time, and nobody waits for a rank that is gone."""

from __future__ import annotations

import threading

import pytest

from resilient.checkpoint.daemon.connection import FileStream, StreamBuffer, is_gone
from resilient.distributed.coordination import RankFailure
from resilient.errors import DeadlineExceeded, PeerFailed, SaveFailed


def stream_of(count, within_seconds=5.0):
    memory = [bytearray(4) for _ in range(count)]
    slots = [StreamBuffer(f"slot/{number}", memoryview(one)) for number, one in enumerate(memory)]
    return FileStream(slots, within_seconds), {slot.name: slot.memory for slot in slots}


def serve(stream, memory, files):
    """Fill what is asked for until the stream is over, as a rank does."""

    def run():
        while not is_over.is_set():
            wanted = stream.next(0.05)
            if wanted is not None:
                memory[wanted.slot.name][:4] = files[wanted.file]
                stream.file_arrived(wanted.number)

    is_over = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    return lambda: (is_over.set(), thread.join())


def test_many_files_pass_through_few_slots_each_whole_while_it_is_lent():
    stream, memory = stream_of(2)
    files = {f"file-{number}": bytes([number]) * 4 for number in range(40)}
    stop = serve(stream, memory, files)
    wrong = []

    def write(names):
        for name in names:
            with stream.lend(name, 4) as data:
                # Long enough for another to write over it, if one could.
                threading.Event().wait(0.002)
                if bytes(data) != files[name]:
                    wrong.append(name)

    writers = [threading.Thread(target=write, args=(list(files)[lane::3],)) for lane in range(3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    stop()
    assert wrong == []


def test_a_slot_is_free_again_after_what_failed_inside():
    stream, memory = stream_of(1)
    stop = serve(stream, memory, {"a": b"aaaa", "b": b"bbbb"})

    def put():
        with stream.lend("a", 4):
            raise SaveFailed("the store is full")

    with pytest.raises(SaveFailed, match="full"):
        put()
    with stream.lend("b", 4) as data:
        assert bytes(data) == b"bbbb"
    stop()


def lent(stream, *names):
    """Ask for files in threads; return what became of each."""
    found = []

    def ask(name):
        try:
            with stream.lend(name, 4):
                found.append("came")
        except (PeerFailed, SaveFailed, DeadlineExceeded) as error:
            found.append(error.message)

    threads = [threading.Thread(target=ask, args=(name,)) for name in names]
    for one in threads:
        one.start()
    return threads, found


def test_all_who_wait_hear_at_once_that_the_rank_is_gone():
    stream, _ = stream_of(1, within_seconds=60)
    threads, found = lent(stream, "a", "b", "c")
    stream.next(5)
    stream.fail(is_gone())
    for one in threads:
        one.join(10)
    assert found == ["the connection ended before all bytes were stored"] * 3


def test_a_file_that_could_not_be_copied_fails_with_the_reason_of_the_rank():
    stream, _ = stream_of(2, within_seconds=60)
    threads, found = lent(stream, "a")
    stream.next(5)
    stream.fail(RankFailure(SaveFailed.code, "the device is gone"))
    threads[0].join(10)
    assert found == ["the device is gone"]


def test_a_file_that_does_not_come_is_not_waited_for_without_end():
    stream, _ = stream_of(1, within_seconds=0.05)
    with pytest.raises(DeadlineExceeded, match="`a` was not copied in time"), stream.lend("a", 4):
        pass


def test_nothing_is_wanted_of_a_stream_that_is_over():
    stream, _ = stream_of(1)
    stream.close()
    assert stream.next(60) is None
