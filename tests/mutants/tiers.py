"""Defects of the near tier and of promotions."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the near tier restores a checkpoint pruned there",
        "resilient/checkpoint/tiers/tiered_store.py",
        " - committed_checkpoints - trash_of(folders).keys()",
        " - committed_checkpoints",
        "tests/unit/checkpoint/test_trash.py -k near_tier",
    ),
    Mutant(
        "protected checkpoints are forgotten with the daemon",
        "resilient/checkpoint/promotion.py",
        "self._newest, self._keep = checkpoint, tuple(keep)",
        "self._newest, self._keep = checkpoint, ()",
        "tests/gang/test_keeper_tiers.py -k protects",
    ),
    Mutant(
        "a promotion stores the manifest before the files (power loss)",
        "resilient/checkpoint/promotion.py",
        "    put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)\n",
        (
            "    put_manifest(tiers.durable, key, data)\n"
            "    put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)\n"
        ),
        "tests/crash/test_enumeration.py -k recorded_history",
    ),
    Mutant(
        "only the coordinator's host protects checkpoints",
        "resilient/checkpoint/promotion.py",
        "self._newest, self._keep = checkpoint, post_commit_plan.keep",
        "self._newest, self._keep = checkpoint, post_commit_plan.keep if context.world.is_coordinator else ()",
        "tests/gang/test_promoting_together.py -k ends_well",
    ),
    Mutant(
        "a promotion stores the manifest before the files",
        "resilient/checkpoint/promotion.py",
        "    put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)\n",
        (
            "    put_manifest(tiers.durable, key, data)\n"
            "    put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)\n"
        ),
        "tests/crash/test_tiers_sweep.py -k first",
    ),
    Mutant(
        "a promotion leaves out shared files",
        "resilient/checkpoint/promotion.py",
        "put_bytes = _copy_each(tiers, manifest, near_files, fence, heartbeat)",
        "put_bytes = _copy_each(tiers, manifest, [x for x in near_files if not x.origin], fence, heartbeat)",
        "tests/crash/test_tiers_sweep.py -k first",
    ),
    Mutant(
        "a promotion does not check the fence",
        "resilient/checkpoint/promotion.py",
        "    fence = partial(check_fence, tiers.durable, generation, token)\n",
        "    fence = partial(print, end='')\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a promotion copies a damaged file",
        "resilient/checkpoint/promotion.py",
        "if digest_file(data) != entry.proof:",
        "if not data:",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "near files of any attempt are used",
        "resilient/checkpoint/tiers/tiered_store.py",
        "        if not has_record(source, self.durable, number):\n",
        "        if not has_record(source, self.durable, number) and number < 0:\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "bytes read from the durable tier count as verified near",
        "resilient/checkpoint/tiers/tiered_store.py",
        "        if _generation_of(key):\n            self.unverified_keys.add(key)\n",
        "        if _generation_of(key):\n            self.unverified_keys.discard(key)\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a checkpoint in promotion is deleted from the near tier",
        "resilient/checkpoint/promotion.py",
        "(*unpromoted, *self._pending_ids)",
        "(*unpromoted, *self._pending_ids[1:])",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a failed promotion is not repeated",
        "resilient/checkpoint/promotion.py",
        "self._must_promote_next = not in_flight.result()",
        "self._must_promote_next = in_flight.result() is None",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "files on another host are not read from there",
        "resilient/checkpoint/tiers/tiered_store.py",
        "order = [self.near, *sorted(",
        "order = [self.near] or [*sorted(",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "bytes read from another host count as verified here",
        "resilient/checkpoint/tiers/tiered_store.py",
        "        if source is not self.near:\n            self.unverified_keys.add(key)\n",
        "        if source is not self.near:\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "near files of another host are used for any attempt",
        "resilient/checkpoint/tiers/tiered_store.py",
        "        if not number or (source.url, number) in self._shared_generations:\n",
        "        if not number or source is not self.near:\n",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "a host that does not answer counts as one without checkpoints",
        "resilient/checkpoint/tiers/tiered_store.py",
        "raise (unavailable or error) from error",
        "raise error",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "the manifest is promoted with the files of one host",
        "resilient/checkpoint/promotion.py",
        "        if entry.name not in copied_names and ",
        "        if not copied_names and ",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "a host without the manifest runs retention",
        "resilient/checkpoint/promotion.py",
        "        if not self._take_manifest(context, checkpoint):\n",
        "        if not self._take_manifest(context, checkpoint) and not orders.due:\n",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "durable_every_seconds promotes nothing",
        "resilient/checkpoint/promotion_policy.py",
        "passed_seconds >= seconds:",
        "passed_seconds < 0 <= seconds:",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "durable_every_seconds counts from the first promotion",
        "resilient/checkpoint/promotion.py",
        "            self._began_seconds = now_seconds\n",
        "            self._began_seconds = self._began_seconds or now_seconds\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "any file of a host can be read by its peers",
        "resilient/checkpoint/tiers/peer_store.py",
        "    if not _may_be_read(key):\n",
        "    if not key:\n",
        "tests/unit/checkpoint/test_peers.py",
        promise="Limits",
    ),
    Mutant(
        "close waits for a host that is gone",
        "resilient/checkpoint/promotion.py",
        "            self._tiers.require_peers()\n",
        "",
        "tests/gang/test_near_per_host.py",
    ),
    Mutant(
        "only shared files deleted during a promotion are sent again",
        "resilient/checkpoint/promotion.py",
        "if file.name in copied.names]\n",
        "if file.name in copied.names and file.origin]\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a signature deleted during a promotion is not sent again",
        "resilient/checkpoint/promotion.py",
        "    if signature:\n",
        "    if signature and copied.is_committed:\n",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a durable manifest proves that all files exist",
        "resilient/checkpoint/promotion.py",
        "    was_committed = is_committed(tiers.durable, checkpoint)\n",
        (
            "    was_committed = is_committed(tiers.durable, checkpoint)\n"
            "    if was_committed:\n"
            "        return None\n"
        ),
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a host promotes while another one still deletes",
        "resilient/checkpoint/promotion.py",
        "            self._wait(context)\n",
        "            pass\n",
        "tests/gang/test_promoting_together.py -k older_one",
    ),
    Mutant(
        "a run succeeds with its best checkpoint in the near tier only",
        "resilient/checkpoint/promotion.py",
        "sorted({newest, *self._keep} - self._promoted)",
        "sorted({newest} - self._promoted)",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "one damaged checkpoint stops all later promotions",
        "resilient/checkpoint/promotion.py",
        "                self._errors[checkpoint] = error\n",
        ("                self._errors[checkpoint] = error\n                break\n"),
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "one damaged checkpoint starts a promotion at each save",
        "resilient/checkpoint/promotion.py",
        "if any(candidate not in self._errors for candidate in unpromoted):",
        "if unpromoted:",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a damaged checkpoint is deleted from the near tier before its repair",
        "resilient/checkpoint/promotion.py",
        "(*unpromoted, *self._pending_ids)",
        "tuple(self._pending_ids)",
        "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py",
    ),
    Mutant(
        "a slow host that makes progress counts as silent",
        "resilient/checkpoint/promotion.py",
        "        heartbeat()\n    return put_bytes\n",
        "    return put_bytes\n",
        "tests/gang/test_unequal_hosts.py -k three_times",
    ),
    Mutant(
        "ranks that promote nothing do not wait for the promoting rank",
        "resilient/checkpoint/promotion.py",
        "            self._wait(context)\n",
        "            pass\n",
        "tests/gang/test_unequal_hosts.py -k longer_than",
    ),
]
