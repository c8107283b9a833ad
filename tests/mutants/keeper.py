"""Defects of the keeper, its memory and its board."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ALONE = "tests/process/test_keeper_alone.py"
ASLEEP = "tests/process/test_keeper_asleep.py"
MEMORY = "tests/process/test_keeper_memory.py"
STREAMS = "tests/process/test_keeper_streams.py"
SHARED = "tests/process/test_shared_memory.py"
BOARDS = "tests/contract/test_comms.py"
TIERS = "tests/gang/test_keeper_tiers.py"
FAILED = "tests/unit/test_failed_saves.py"

MUTANTS = [
    Mutant(
        "a rank's death before the hand-over is not told",
        "resilient/checkpoint/daemon/session.py",
        "        kv_store.will(comms.key(agreement, who), json.dumps(value).encode())\n",
        "        pass\n",
        f"{ALONE} -k heard_of_at_once",
    ),
    Mutant(
        "the coordinator's death before the hand-over is told where nobody listens",
        "resilient/checkpoint/daemon/session.py",
        'who, value = "ruling", value | {"rank": 0}',
        "who = 0",
        f"{ALONE} -k heard_of_at_once",
    ),
    Mutant(
        "a keeper that is gone is taken for a durable save",
        "resilient/checkpoint/daemon/client.py",
        (
            "capture_failure(\n"
            "                partial(resolve_outcome, context, job, kv_store, "
            "failed.message)\n"
            "            )"
        ),
        "None",
        f"{ALONE} -k heard_of_at_once",
    ),
    Mutant(
        "a keeper that is gone is taken for a failed save",
        "resilient/checkpoint/daemon/client.py",
        (
            "found is True or capture_failure(lambda: "
            "is_committed(context.store, checkpoint)) is True"
        ),
        "False",
        "tests/unit/checkpoint/test_verdict.py",
    ),
    Mutant(
        "what the run protects is forgotten with a keeper",
        "resilient/checkpoint/promotion.py",
        "self._newest, self._keep = checkpoint, tuple(keep)",
        "self._newest, self._keep = checkpoint, ()",
        f"{TIERS} -k protects",
    ),
    Mutant(
        "a mark that a lost keeper owed is put by nobody",
        "resilient/checkpoint/save/executor.py",
        ("SaveHistory(owes_mark=True)"),
        ("SaveHistory()"),
        f"{TIERS} -k a_mark",
    ),
    Mutant(
        "what a dead keeper held is given up",
        "resilient/checkpoint/daemon/client.py",
        (
            "        if isinstance(failed, RankFailure) and not "
            "self._persist_here(context, job, failed):\n"
        ),
        ("        if isinstance(failed, RankFailure):\n            raise failed.cause\n"),
        f"{ALONE} -k heard_of_at_once",
    ),
    Mutant(
        "a dead rank is waited for like a slow store",
        "resilient/checkpoint/daemon/client.py",
        "min(context.limits.within_seconds, _ANSWER_SECONDS)",
        "min(context.limits.within_seconds, 60.0)",
        f"{ALONE} -k not_waited_for",
    ),
    Mutant(
        "nobody hears that a rank has given its keeper up",
        "resilient/checkpoint/daemon/client.py",
        ("                capture_failure(lambda: context.comms.call(_here(job)))\n"),
        "                pass\n",
        f"{ASLEEP} -k not_waited_for_by_a_stop",
    ),
    Mutant(
        "who gave its keeper up waits for a ruling that its keeper has no part in",
        "resilient/checkpoint/daemon/client.py",
        "            kv_store = None if sleeps or is_called else self.board\n",
        "            kv_store = self.board\n",
        f"{ASLEEP} -k not_waited_for_by_a_stop",
    ),
    Mutant(
        "a keeper that sleeps is left to wake",
        "resilient/checkpoint/daemon/client.py",
        "            signal.pidfd_send_signal(self._handle, signal.SIGKILL)\n",
        "            pass\n",
        f"{ASLEEP} -k wakes",
    ),
    Mutant(
        "whoever comes late rotates by what it was told before",
        "resilient/checkpoint/garbage_collection.py",
        "    if written is not None and _is_outrun(written, found.folders):",
        "    if written is None:",
        "tests/crash/test_sleeping_keeper.py",
    ),
    Mutant(
        "time in which this process did not run is the keeper's silence",
        "resilient/checkpoint/daemon/connection.py",
        "min(looked_seconds, 2 * _LOOK_SECONDS)",
        "looked_seconds",
        "tests/unit/checkpoint/test_conversation.py",
    ),
    Mutant(
        "a keeper that was only slow has not saved",
        "resilient/checkpoint/daemon/client.py",
        (
            "            if capture_failure(lambda: is_committed(context.store, "
            "job.about.checkpoint)) is True:"
        ),
        "            if not job:",
        f"{FAILED} -k only_slow",
    ),
    Mutant(
        "a save waits for the keeper's acknowledgement",
        "resilient/checkpoint/daemon/client.py",
        ('capture_failure(lambda: self._to().send("save", **_handover(context, shared, slots)))'),
        (
            'capture_failure(lambda: self._to().request("save", **_handover(context, '
            "shared, slots)))"
        ),
        "tests/process/test_keeper_overlap.py -k steady_state",
    ),
    Mutant(
        "memory is believed",
        "resilient/checkpoint/restore/memory_store.py",
        "return data if digest_file(data) == record.proof else None",
        "return data",
        f"{MEMORY} -k not_believed",
    ),
    Mutant(
        "memory has no bound",
        "resilient/checkpoint/daemon/memory.py",
        "            if 0 < self.share.host_bytes_max < needed_bytes:",
        "            if False:",
        "tests/unit/checkpoint/test_room.py",
    ),
    Mutant(
        "state that does not fit is staged all the same",
        "resilient/checkpoint/daemon/memory.py",
        "        if not self.size_bytes or needed_bytes <= self.size_bytes:",
        "        if True:",
        f"{STREAMS} -k plain",
    ),
    Mutant(
        "training does not wait for what is streamed",
        "resilient/checkpoint/daemon/client.py",
        ("            self._ended = capture_failure(self._see_to_its_end)\n"),
        "            pass\n",
        f"{STREAMS} -k one_moment",
    ),
    Mutant(
        "a slot is given away before what is in it was written",
        "resilient/checkpoint/daemon/connection.py",
        "        slot = self._take()\n",
        "        slot = self._take()\n        self._free.append(slot)\n",
        "tests/unit/checkpoint/test_stream.py",
    ),
    Mutant(
        "a file that could not be copied is taken for one that came",
        "resilient/checkpoint/daemon/connection.py",
        "        if not wanted.is_there.wait(self._within_seconds):\n"
        '            raise DeadlineExceeded(f"`{wanted.file}` was not copied in time")\n'
        "        self._require()\n",
        "        wanted.is_there.wait(self._within_seconds)\n",
        "tests/unit/checkpoint/test_stream.py",
    ),
    Mutant(
        "the keeper waits for the files of a rank that is dead",
        "resilient/checkpoint/daemon/session.py",
        "                self._stream.fail(is_gone())\n",
        "                pass\n",
        f"{STREAMS} -k killed_in_mid_stream",
    ),
    Mutant(
        "memory is not reserved",
        "resilient/storage/shared_memory.py",
        "            os.posix_fallocate(handle, 0, max(size_bytes, 1))",
        "            os.ftruncate(handle, max(size_bytes, 1))",
        SHARED,
    ),
    Mutant(
        "a live owner's memory is swept",
        "resilient/storage/shared_memory.py",
        "        lock = lock_folder(path)\n        if lock is not None:\n            shutil.rmtree",
        "        lock = os.open(path, os.O_RDONLY)\n        if lock is not None:\n"
        "            shutil.rmtree",
        SHARED,
    ),
    Mutant(
        "a pid that is in use keeps a stale folder",
        "resilient/storage/shared_memory.py",
        "        if lock is not None:\n            shutil.rmtree",
        '        pid = path.name.split("-")[1]\n'
        '        if lock is not None and not Path(f"/proc/{pid}").exists():\n'
        "            shutil.rmtree",
        SHARED,
    ),
    Mutant(
        "another user's folder is swept",
        "resilient/storage/shared_memory.py",
        " or path.stat().st_uid != os.geteuid()",
        "",
        SHARED,
    ),
    Mutant(
        "a new life does not hear what the keeper holds",
        "resilient/checkpoint/daemon/client.py",
        'for key, value in answer["held"].items()}',
        "for key, value in ()}",
        f"{MEMORY} -k restore_from_memory",
    ),
    Mutant(
        "the machine's whole memory is taken",
        "resilient/elastic/saver_daemon.py",
        "left_bytes // AUTO_SHARE",
        "left_bytes",
        "tests/unit/elastic/test_memory.py",
    ),
    Mutant(
        "a size that the host has not is granted",
        "resilient/elastic/saver_daemon.py",
        "    if least_bytes <= granted_bytes <= min(shared_bytes, left_bytes):",
        "    if least_bytes <= granted_bytes:",
        "tests/unit/elastic/test_memory.py",
    ),
    Mutant(
        "a keeper that cannot start is told at every life",
        "resilient/elastic/saver_daemon.py",
        'self._process, None, ""\n',
        "self._process, None, self.path\n",
        f"{MEMORY} -k told_once",
    ),
    Mutant(
        "the keeper heeds the job's signals",
        "resilient/checkpoint/daemon/server.py",
        "        signal.signal(number, signal.SIG_IGN)\n",
        "        pass\n",
        f"{ALONE} -k signals_of_the_job",
    ),
    Mutant(
        "the keeper leaves without its save in flight",
        "resilient/checkpoint/daemon/server.py",
        "    is_done = daemon.settle(given.linger_seconds)\n",
        "    is_done = True\n",
        f"{ALONE} -k lets_the_save_in_flight_land",
    ),
    Mutant(
        "a new life does not wait for the save in flight",
        "resilient/checkpoint/daemon/client.py",
        "            _wait_for_past_lives(talk, context)\n",
        "            pass\n",
        f"{ALONE} -k waits_for",
    ),
    Mutant(
        "a will is posted although its key was",
        "resilient/distributed/kv_store.py",
        "            wills.pop(key, None)\n",
        "",
        BOARDS,
    ),
    Mutant(
        "the token is not asked for",
        "resilient/distributed/kv_store.py",
        "        return hmac.compare_digest(token.encode(), self.address.token.encode())",
        "        return bool(token) or True",
        BOARDS,
    ),
    Mutant(
        "a repository in memory is taken for a dead run's",
        "resilient/storage/shared_memory.py",
        "        if not _is_one(path):",
        "        if False:",
        "tests/process/test_shared_memory.py",
    ),
    Mutant(
        "a failed save deletes what its rival writes",
        "resilient/checkpoint/save/persist.py",
        " and not in_doubt and not job.has_rival:",
        " and not in_doubt:",
        FAILED,
    ),
    Mutant(
        "nobody looks for the files before the commit beside a rival",
        "resilient/checkpoint/save/persist.py",
        "        require_files(context.store, manifest)\n",
        "        pass\n",
        FAILED,
    ),
    Mutant(
        "the keeper takes itself for alone",
        "resilient/checkpoint/daemon/messages.py",
        "        has_rival=True,\n",
        "",
        FAILED,
    ),
    Mutant(
        "who saves in the keeper's place takes itself for alone",
        "resilient/checkpoint/daemon/client.py",
        "replace(job, topic=topic, has_rival=True)",
        "replace(job, topic=topic)",
        FAILED,
    ),
    Mutant(
        "what a keeper could not write stays on a full disk",
        "resilient/checkpoint/daemon/client.py",
        ("            delete_failed_save(context, job)\n"),
        "",
        "tests/process/test_keeper_memory.py -k could_not_write",
    ),
]
