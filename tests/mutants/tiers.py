"""Defects of tiers: what goes on, in which order, what is believed, and what may leave."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TIERS = "tests/unit/checkpoint/test_tiers.py tests/unit/checkpoint/test_promoting.py"
SWEEP = "tests/crash/test_tiers_sweep.py -k first"

HOSTS = "tests/gang/test_near_per_host.py"
TOGETHER = "tests/gang/test_promoting_together.py"
KEPT = "tests/gang/test_keeper_tiers.py"

PROMOTE = "resilient/checkpoint/promotion.py"
PROMOTER = "resilient/checkpoint/promotion.py"
UNEQUAL = "tests/gang/test_unequal_hosts.py"
STORE = "resilient/checkpoint/tiers/tiered_store.py"

MUTANTS = [
    Mutant(
        "only the coordinator's host knows what the run protects",
        PROMOTER,
        "self._newest, self._keep = checkpoint, orders.keep",
        (
            "self._newest, self._keep = checkpoint, orders.keep if "
            "context.world.is_coordinator else ()"
        ),
        f"{TOGETHER} -k ends_well",
    ),
    Mutant(
        "a promotion puts the manifest before the files",
        PROMOTE,
        "    put_bytes = _carry_each(tiers, manifest, here, fence, beat)\n",
        "    put_manifest(tiers.durable, key, data)\n"
        "    put_bytes = _carry_each(tiers, manifest, here, fence, beat)\n",
        SWEEP,
    ),
    Mutant(
        "a promotion leaves behind what the checkpoint refers to",
        PROMOTE,
        "put_bytes = _carry_each(tiers, manifest, here, fence, beat)",
        "put_bytes = _carry_each(tiers, manifest, [x for x in here if not x.origin], fence, beat)",
        SWEEP,
    ),
    Mutant(
        "a promotion does not look at the fence",
        PROMOTE,
        "    fence = partial(check_fence, tiers.durable, generation, token)\n",
        "    fence = partial(print, end='')\n",
        TIERS,
    ),
    Mutant(
        "a promotion carries damage",
        PROMOTE,
        "if digest_file(data) != entry.proof:",
        "if not data:",
        TIERS,
    ),
    Mutant(
        "near files of any life are believed",
        STORE,
        "        if not has_record(source, self.durable, number):\n",
        "        if not has_record(source, self.durable, number) and number < 0:\n",
        TIERS,
    ),
    Mutant(
        "a near tier of another run is taken",
        "resilient/checkpoint/start_generation.py",
        "            require_same_run(context.store)\n",
        ("            fsync_leftovers(context.store)\n"),
        TIERS,
    ),
    Mutant(
        "a damaged near copy is damage of the checkpoint",
        "resilient/checkpoint/restore/read.py",
        ("if not use_other_replica(store, error.key):"),
        ("if store.url or not use_other_replica(store, error.key):"),
        TIERS,
    ),
    Mutant(
        "what was read from the durable tier counts as proved near",
        STORE,
        "        if _generation_of(key):\n            self.recalled.add(key)\n",
        "        if _generation_of(key):\n            self.recalled.discard(key)\n",
        TIERS,
    ),
    Mutant(
        "what is on its way may leave the near tier",
        PROMOTER,
        "(*owed, *self._on_its_way)",
        "(*owed, *self._on_its_way[1:])",
        TIERS,
    ),
    Mutant(
        "a promotion that failed is not owed",
        PROMOTER,
        "self._is_owing = not in_flight.result()",
        "self._is_owing = in_flight.result() is None",
        TIERS,
    ),
    Mutant(
        "the last save stays near",
        "resilient/checkpoint_engine.py",
        "            self._desk.finish(is_closing=True)\n",
        "",
        TIERS,
    ),
    Mutant(
        "what lies on another host is not read from there",
        STORE,
        "order = [self.near, *sorted(",
        "order = [self.near] or [*sorted(",
        HOSTS,
    ),
    Mutant(
        "what was read from another host counts as proved here",
        STORE,
        "        if source is not self.near:\n            self.recalled.add(key)\n",
        "        if source is not self.near:\n",
        TIERS,
    ),
    Mutant(
        "near files of another host count for any life",
        STORE,
        "        if not number or (source.url, number) in self._shared_lives:\n",
        "        if not number or source is not self.near:\n",
        HOSTS,
    ),
    Mutant(
        "a host that does not answer has no checkpoint",
        STORE,
        "raise (silent or error) from error",
        "raise error",
        HOSTS,
    ),
    Mutant(
        "the manifest is promoted with the files of one host alone",
        PROMOTE,
        "        if entry.name not in carried and ",
        "        if not carried and ",
        HOSTS,
    ),
    Mutant(
        "a host without the manifest rotates all the same",
        PROMOTER,
        "        if not self._take_manifest(context, checkpoint):\n",
        "        if not self._take_manifest(context, checkpoint) and not orders.due:\n",
        HOSTS,
    ),
    Mutant(
        "a manifest that a host did not get stays away",
        "resilient/checkpoint/start_generation.py",
        "            adopt_manifests(tiers)\n",
        "",
        HOSTS,
    ),
    Mutant(
        "only the coordinator's host is asked whose its near tier is",
        "resilient/checkpoint/start_generation.py",
        "isinstance(context.store, TieredStore) and context.leads:",
        "isinstance(context.store, TieredStore) and context.world.is_coordinator:",
        HOSTS,
    ),
    Mutant(
        "room is asked for as if all hosts had one disk",
        "resilient/checkpoint/save/persist.py",
        "for group in context.places.groups or (tuple(ranks),):",
        "for group in (tuple(ranks),):",
        HOSTS,
    ),
    Mutant(
        "time alone promotes nothing",
        "resilient/checkpoint/promotion_policy.py",
        "passed_seconds >= seconds:",
        "passed_seconds < 0 <= seconds:",
        TIERS,
    ),
    Mutant(
        "time is counted from the first promotion",
        PROMOTER,
        "            self._began_seconds = now_seconds\n",
        "            self._began_seconds = self._began_seconds or now_seconds\n",
        TIERS,
    ),
    Mutant(
        "anything of a host's disk may be read from elsewhere",
        "resilient/checkpoint/tiers/peer_store.py",
        "    if not _may_be_read(key):\n",
        "    if not key:\n",
        "tests/unit/checkpoint/test_peers.py",
    ),
    Mutant(
        "the keeper passes the near tier by",
        "resilient/checkpoint/daemon/session.py",
        ("self._onwards = SessionTiers(info, info.near) if info.near else None"),
        "self._onwards = None",
        KEPT,
    ),
    Mutant(
        "what the keeper committed last nobody finishes without it",
        "resilient/checkpoint/daemon/client.py",
        "            context.promoter.note(job.about.checkpoint, job.keep)\n",
        "            pass\n",
        KEPT,
    ),
    Mutant(
        "the trainer does not ask the keeper to finish",
        "resilient/checkpoint/daemon/factory.py",
        "        if not self._finish(within_seconds):\n",
        "        if within_seconds > 0:\n",
        KEPT,
    ),
    Mutant(
        "memory hides that a near copy can be doubted",
        "resilient/checkpoint/restore/memory_store.py",
        ("        return use_other_replica(self._store, key)\n"),
        "        return False\n",
        KEPT,
    ),
    Mutant(
        "the keeper takes all hosts for one",
        "resilient/checkpoint/daemon/messages.py",
        ("        tiered = replace(tiered, places=NearTierGroups(groups))\n"),
        "",
        KEPT,
    ),
    Mutant(
        "who closes waits for a host that is gone",
        PROMOTER,
        "            self._tiers.require_peers()\n",
        "",
        HOSTS,
    ),
    Mutant(
        "what a sweep took before the manifest came is brought again only where others refer to",
        PROMOTE,
        "if file.name in copied.names]\n",
        "if file.name in copied.names and file.origin]\n",
        TIERS,
    ),
    Mutant(
        "a signature that a sweep took before the manifest came is not brought again",
        PROMOTE,
        "    if signature:\n",
        "    if signature and copied.is_committed:\n",
        TIERS,
    ),
    Mutant(
        "what has a manifest in the durable tier is taken for whole",
        PROMOTE,
        "    was_committed = is_committed(tiers.durable, checkpoint)\n",
        "    was_committed = is_committed(tiers.durable, checkpoint)\n"
        "    if was_committed:\n        return None\n",
        TIERS,
    ),
    Mutant(
        "a host promotes while another still rotates",
        PROMOTER,
        "            self._wait(context)\n",
        "            pass\n",
        f"{TOGETHER} -k older_one",
    ),
    Mutant(
        "a run ends well with its best in the near tier alone",
        PROMOTER,
        "sorted({newest, *self._keep} - self._done)",
        "sorted({newest} - self._done)",
        TIERS,
    ),
    Mutant(
        "one damaged checkpoint holds up all that are promoted after it",
        PROMOTER,
        "                self._damaged[checkpoint] = error\n",
        ("                self._damaged[checkpoint] = error\n                break\n"),
        TIERS,
    ),
    Mutant(
        "one damaged checkpoint has a promotion begin with each save",
        PROMOTER,
        "if any(candidate not in self._damaged for candidate in owed):",
        "if owed:",
        TIERS,
    ),
    Mutant(
        "one damaged checkpoint may leave the near tier before it is mended",
        PROMOTER,
        "(*owed, *self._on_its_way)",
        "tuple(self._on_its_way)",
        TIERS,
    ),
    Mutant(
        "a host that brings file after file is taken for silent",
        "resilient/checkpoint/promotion.py",
        "        beat()\n    return put_bytes\n",
        "    return put_bytes\n",
        f"{UNEQUAL} -k three_times",
    ),
    Mutant(
        "a host that brings nothing is waited for without end",
        "resilient/distributed/coordination.py",
        "beats.get(rank) == before.get(rank)]",
        "rank not in beats]",
        "tests/contract/test_comms.py -k rests_there",
    ),
    Mutant(
        "the ranks that promote nothing do not wait for the one that does",
        PROMOTER,
        "            self._wait(context)\n",
        "            pass\n",
        f"{UNEQUAL} -k longer_than",
    ),
]
