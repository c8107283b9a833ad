"""Defects of a save: files, signature, commit, pace, deduplication."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "a stale attempt commits",
        "resilient/checkpoint/commit.py",
        "    check_fence(store, checkpoint.generation, token)\n",
        "",
        "tests/unit/checkpoint",
        promise="P7",
    ),
    Mutant(
        "the manifest is stored before the files",
        "resilient/checkpoint/save/persist.py",
        "        receipt = capture_failure(lambda: _write(context, job",
        (
            "        from resilient.format.manifest import encode\n"
            "        context.store.put(checkpoint.manifest_key, encode(job.about))\n"
            "        receipt = capture_failure(lambda: _write(context, job"
        ),
        "tests/crash/test_sweep.py -k one_crash",
    ),
    Mutant(
        "an equal manifest of another process fails the save",
        "resilient/checkpoint/commit.py",
        "    except (StoreUnavailable, KeyExists):\n",
        "    except StoreUnavailable:\n",
        "tests/unit/test_failed_saves.py",
        promise="P1",
    ),
    Mutant(
        "a foreign error after the commit fails the save",
        "resilient/checkpoint/save/persist.py",
        "        _clean_up_or_report(context, job, history, PostCommitPlan",
        "        _clean_up(context, job, history, PostCommitPlan",
        "tests/unit/test_failed_saves.py",
        promise="P1",
    ),
    Mutant(
        "a commit checks only the generation number",
        "resilient/checkpoint/save/persist.py",
        "Signature(key, files) if key else None, context.token)",
        "Signature(key, files) if key else None)",
        "tests/unit/checkpoint/test_fence_token.py -k later_step",
    ),
    Mutant(
        "each rank checks the free space for its own files only",
        "resilient/checkpoint/save/persist.py",
        'sum(report["needs"] for report in group_answers)',
        'max(report["needs"] for report in group_answers)',
        "tests/gang/test_room_for_a_save.py",
    ),
    Mutant(
        "the free space is checked after the write",
        "resilient/checkpoint/save/persist.py",
        "        require_space(context, checkpoint, dedup_result, job.topic)\n",
        (
            "        mine = capture_failure(lambda: _write(context, job, dedup_result, throttle))\n"
            "        require_space(context, checkpoint, dedup_result, job.topic)\n"
        ),
        "tests/gang/test_room_for_a_save.py",
    ),
    Mutant(
        "a commit mark that was not stored counts as stored",
        "resilient/checkpoint/save/persist.py",
        "    is_marked = not is_first\n",
        "    is_marked = True\n",
        "tests/unit/test_failed_saves.py",
        promise="P3",
    ),
    Mutant(
        "an owed commit mark is forgotten",
        "resilient/checkpoint/save/persist.py",
        "job.is_first or history.owes_mark",
        "job.is_first",
        "tests/unit/test_failed_saves.py",
        promise="P3",
    ),
    Mutant(
        "the commit mark owed by a lost daemon is never stored",
        "resilient/checkpoint/save/executor.py",
        "SaveHistory(owes_mark=True)",
        "SaveHistory()",
        "tests/gang/test_keeper_tiers.py -k a_mark",
    ),
    Mutant(
        "a failed save deletes files that its rival writes",
        "resilient/checkpoint/save/persist.py",
        " and not in_doubt and not job.has_rival:",
        " and not in_doubt:",
        "tests/unit/test_failed_saves.py",
        promise="Saver daemon",
    ),
    Mutant(
        "a commit beside a rival does not check for the files",
        "resilient/checkpoint/save/persist.py",
        "        require_files(context.store, manifest)\n",
        "        pass\n",
        "tests/unit/test_failed_saves.py",
        promise="Saver daemon",
    ),
    Mutant(
        "a stale attempt commits (simulator)",
        "resilient/checkpoint/commit.py",
        "    check_fence(store, checkpoint.generation, token)\n",
        "",
        "tests/simulation -k slice",
        promise="Simulator",
    ),
    Mutant(
        "references form chains",
        "resilient/checkpoint/save/dedup.py",
        "replace(region, file=manifest.key(region.file))",
        'replace(region, file=manifest.checkpoint.key(region.file.rpartition("/")[2]))',
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "deduplication does not compare digests",
        "resilient/checkpoint/save/dedup.py",
        "if place is not None and place.digest == region.digest:",
        "if place is not None:",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "deduplication does not compare dtypes",
        "resilient/checkpoint/save/dedup.py",
        "return tensor.name, tensor.dtype, tensor.shape, region.region",
        'return tensor.name, "", tensor.shape, region.region',
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "a checkpoint refers to bytes that were not verified",
        "resilient/checkpoint/save/dedup.py",
        "            base.verified_ranges is None\n            or",
        "            base.verified_ranges is not False\n            or",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "bytes restored from daemon memory count as stored",
        "resilient/checkpoint/save/dedup.py",
        "            verified.manifest.key(name) not in unverified_keys\n            and name",
        "            name",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "a checkpoint refers to a missing file",
        "resilient/checkpoint/save/dedup.py",
        "for match in matches if match.place.file in existing_keys]",
        "for match in matches]",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "an old file is kept for a small part of its bytes",
        "resilient/checkpoint/save/dedup.py",
        "if match.file in worth and match.place.file in worth\n",
        "if match.file in worth\n",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "a checkpoint refers to any number of folders",
        "resilient/checkpoint/save/dedup.py",
        "kept_matches = [match for match in matches if origin_of(match.place.file) in largest]",
        "kept_matches = matches",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "one changed region makes a whole file new",
        "resilient/checkpoint/save/dedup.py",
        "        region.start in changed[file.name]\n",
        "        changed[file.name]\n",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "digests are computed only to find changed tensors",
        "resilient/checkpoint/save/dedup.py",
        "        if region.digest or region.start in changed:",
        "        if region.digest:",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "a document is split into regions",
        "resilient/checkpoint/save/dedup.py",
        "    documents = {part.document for part in parts}",
        "    documents = set[str]()",
        "tests/unit/checkpoint/test_refer.py tests/unit/checkpoint/test_refer_and_read.py",
    ),
    Mutant(
        "the rest of a partly shared file is copied beyond the memory limit",
        "resilient/checkpoint/save/dedup.py",
        "length - taken_bytes <= copies_bytes_max",
        "length > copies_bytes_max",
        "tests/unit/checkpoint/test_refer.py -k shorter_copy",
    ),
    Mutant(
        "partly shared files are copied in parallel beyond the memory limit",
        "resilient/checkpoint/save/persist.py",
        "        at_once = min(at_once, copies_bytes_max // copied_bytes)\n",
        "        pass\n",
        "tests/unit/checkpoint/test_write.py -k as_memory",
    ),
    Mutant(
        "repair_on_restore=False is ignored",
        "resilient/checkpoint/context.py",
        "self.signing, self.limits.repair_on_restore, places)",
        "self.signing, True, places)",
        "tests/gang/test_mending.py",
    ),
    Mutant(
        "the check of free space ignores the parity files",
        "resilient/checkpoint/save/dedup.py",
        "        return sum(sizes) + parity_bytes(sizes, self.parity)",
        "        return sum(sizes)",
        "tests/gang/test_mending.py",
    ),
    Mutant(
        "a failed second copy of the manifest fails the save",
        "resilient/checkpoint/save/persist.py",
        "    copy_result = capture_failure(lambda: copy_manifest(context.store, checkpoint))",
        "    copy_result = copy_manifest(context.store, checkpoint)",
        "tests/gang/test_mending.py",
    ),
    Mutant(
        "a shared file is kept without its parity group",
        "resilient/checkpoint/save/dedup.py",
        "    origins |= dict.fromkeys(name for group in groups for name in group.shares)\n",
        "    groups = ()\n",
        "tests/unit/checkpoint/test_refer_with_parity.py",
    ),
    Mutant(
        "an incomplete parity group counts as protection",
        "resilient/checkpoint/save/dedup.py",
        "        groups = [group for group in groups if all_stored(store, group.shares, bounds.lengths)]\n",
        "",
        "tests/unit/checkpoint/test_refer_with_parity.py",
    ),
    Mutant(
        "a checkpoint with parity refers to an unprotected file",
        "resilient/checkpoint/save/dedup.py",
        "[match for match in matches if match.place.file in safe]",
        "matches",
        "tests/unit/checkpoint/test_refer_with_parity.py",
    ),
    Mutant(
        "a file reconstructed in memory counts as stored",
        "resilient/checkpoint/save/dedup.py",
        "            and name not in verified.reconstructed\n",
        "",
        "tests/gang/test_mending.py",
    ),
    Mutant(
        "a paced save pauses longer than the interval between saves allows",
        "resilient/checkpoint/throttle.py",
        "    return max(min(worked_seconds * (1 / WORK_SHARE - 1), ahead_seconds), 0.0)",
        "    return max(worked_seconds * (1 / WORK_SHARE - 1), 0.0)",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "the pace ignores the interval between saves",
        "resilient/checkpoint/throttle.py",
        "    return min(interval_seconds * INTERVAL_SHARE, seconds_max)",
        "    return seconds_max",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "a paced save never pauses",
        "resilient/checkpoint/throttle.py",
        "        self._hurry.wait(left_seconds)\n",
        "        pass\n",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "a paced save pauses beside an idle core",
        "resilient/checkpoint/throttle.py",
        "            if self._is_idle or not due_seconds:",
        "            if not due_seconds:",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "the save's own processor time counts as training's",
        "resilient/checkpoint/throttle.py",
        "        idle_seconds = after.idle_seconds - before.idle_seconds + own_seconds\n",
        "        idle_seconds = after.idle_seconds - before.idle_seconds\n",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "each thread of a save has its own pause",
        "resilient/checkpoint/throttle.py",
        "            self._until_seconds = max(self._until_seconds, now_seconds) + due_seconds",
        "            self._until_seconds = now_seconds + due_seconds",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "a caller that waits for a save also waits for its pauses",
        "resilient/checkpoint/save/executor.py",
        "            self._throttle.hurry()\n",
        "            pass\n",
        "tests/unit/checkpoint/test_persister.py",
        promise="Failures of processes",
    ),
    Mutant(
        "a rank pauses beyond the deadline of its peers",
        "resilient/checkpoint/context.py",
        "return min(self.pace_seconds_max, self.within_seconds * _PAUSE_SHARE)",
        "return self.pace_seconds_max",
        "tests/unit/checkpoint/test_persister.py",
        promise="Failures of processes",
    ),
    Mutant(
        "a save that starts for a dead rank pauses",
        "resilient/checkpoint/throttle.py",
        "            if self._is_left:\n                self.pace.hurry()\n",
        "",
        "tests/gang/test_keeper_pace.py",
    ),
    Mutant(
        "a rank knows only its own pauses",
        "resilient/checkpoint/save/persist.py",
        'max(float(report["rested_seconds"]) for report in answers)',
        'float(answers[0]["rested_seconds"])',
        "tests/gang/test_keeper_pace.py",
    ),
    Mutant(
        "pauses that were cut short count in full",
        "resilient/checkpoint/throttle.py",
        "                self._due_seconds -= max(self._until_seconds - now_seconds, 0.0)\n",
        "",
        "tests/unit/checkpoint/test_pace.py",
    ),
    Mutant(
        "the signature is stored after the manifest",
        "resilient/checkpoint/commit.py",
        (
            "    if signature is not None:\n"
            "        put_signature(store, checkpoint, root, signature)\n"
            "    put_manifest(store, checkpoint.manifest_key, data)\n"
        ),
        (
            "    put_manifest(store, checkpoint.manifest_key, data)\n"
            "    if signature is not None:\n"
            "        put_signature(store, checkpoint, root, signature)\n"
        ),
        "tests/unit/checkpoint/test_signing.py tests/unit/checkpoint/test_signing_keys.py",
    ),
    Mutant(
        "the files of a commit in doubt are deleted",
        "resilient/checkpoint/save/persist.py",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)\n",
        "    in_doubt = False\n",
        "tests/crash/test_enumeration.py -k gives_up",
    ),
    Mutant(
        "a rank that lost the connection deletes files that may be committed",
        "resilient/checkpoint/save/persist.py",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded | PeerFailed)\n",
        "    in_doubt = isinstance(error, StoreUnavailable | DeadlineExceeded)\n",
        "tests/gang/test_lines_cut.py",
        promise="Storage",
    ),
    Mutant(
        "a commit without an answer counts as done",
        "resilient/checkpoint/commit.py",
        "        if not _is_there(store, key, data):\n",
        "        if False:\n",
        "tests/crash/test_enumeration.py -k gives_up",
    ),
    Mutant(
        "the commit mark is stored before the commit",
        "resilient/checkpoint/save/persist.py",
        "    commit(context.store, manifest, Signature(key, files) if key else None, context.token)\n",
        (
            "    from resilient.checkpoint.generations import mark_committed\n"
            "    mark_committed(context.store, job.about.checkpoint.generation)\n"
            "    commit(context.store, manifest, Signature(key, files) if key else None, context.token)\n"
        ),
        "tests/crash/test_enumeration.py -k recorded_history",
    ),
    Mutant(
        "a spoiled copy is written",
        "resilient/checkpoint/save/persist.py",
        "        dedup_result: Any = job.copy_failure or capture_failure(",
        "        dedup_result: Any = capture_failure(",
        "tests/unit/test_overlap.py -k spoils",
    ),
    Mutant(
        "a ledger segment is stored after the manifest",
        "resilient/checkpoint/save/persist.py",
        (
            "    if job.segment is not None:\n"
            "        put_segment(context.store, job.segment, context.token)\n"
            "    key = context.signing.key\n"
            '    files = {name: digest for report in answers for name, digest in report["signed"].items()}\n'
            "    commit(context.store, manifest, Signature(key, files) if key else None, context.token)\n"
        ),
        (
            "    key = context.signing.key\n"
            '    files = {name: digest for report in answers for name, digest in report["signed"].items()}\n'
            "    commit(context.store, manifest, Signature(key, files) if key else None, context.token)\n"
            "    if job.segment is not None:\n"
            "        put_segment(context.store, job.segment, context.token)\n"
        ),
        "tests/crash/test_sweep.py -k one_crash",
    ),
    Mutant(
        "without a daemon all files are streamed at once",
        "resilient/checkpoint/save/executor.py",
        "self._lent_bytes + size_bytes <= self._bytes_max",
        "True",
        "tests/unit/test_loop_memory.py",
    ),
    Mutant(
        "a lower step is saved although resume never selects it",
        "resilient/checkpoint/save/metadata.py",
        "        if checkpoint < newest:\n",
        "        if False:\n",
        "tests/unit/test_loop_misuse.py -k lower_step",
        promise="Crash sweep",
    ),
    Mutant(
        "free space is checked as if all hosts shared one disk",
        "resilient/checkpoint/save/persist.py",
        "for group in context.places.groups or (tuple(ranks),):",
        "for group in (tuple(ranks),):",
        "tests/gang/test_near_per_host.py",
    ),
]
