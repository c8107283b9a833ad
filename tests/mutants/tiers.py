"""Defects of tiers: what goes on, in which order, what is believed, and what may leave."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

TIERS = "tests/unit/vault/test_tiers.py"
SWEEP = "tests/crash/test_tiers_sweep.py -k first"

PROMOTE = "resilient/vault/promote.py"
PROMOTER = "resilient/vault/promoter.py"
STORE = "resilient/vault/tiers.py"

MUTANTS = [
    Mutant(
        "a promotion puts the manifest before the files",
        PROMOTE,
        "    put_bytes = sum(_carry(tiers, manifest, entry) for entry in manifest.files)\n",
        "    put_manifest(tiers.durable, key, data)\n"
        "    put_bytes = sum(_carry(tiers, manifest, entry) for entry in manifest.files)\n",
        SWEEP,
    ),
    Mutant(
        "a promotion leaves behind what the checkpoint refers to",
        PROMOTE,
        "(_carry(tiers, manifest, entry) for entry in manifest.files)",
        "(_carry(tiers, manifest, one) for one in manifest.files if not origin_of(one.name))",
        SWEEP,
    ),
    Mutant(
        "a promotion does not look at the fence",
        PROMOTE,
        "    check_fence(tiers.durable, mine)\n",
        "",
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
        "        if not has_record(self, number):\n",
        "        if not has_record(self, number) and number < 0:\n",
        TIERS,
    ),
    Mutant(
        "a near tier of another run is taken",
        "resilient/vault/begin.py",
        "            require_same_run(desk.store)\n",
        "            settle(desk.store)\n",
        TIERS,
    ),
    Mutant(
        "ranks are not asked whether they see the near tier",
        "resilient/vault/begin.py",
        'agree(desk.comms, "resume/near/seen", seen,',
        'agree(desk.comms, "resume/near/seen", None,',
        TIERS,
    ),
    Mutant(
        "a damaged near copy is damage of the checkpoint",
        "resilient/vault/read.py",
        "if not doubt(store, error.key):",
        "if store.url or not doubt(store, error.key):",
        TIERS,
    ),
    Mutant(
        "what was read from the durable tier counts as proved near",
        STORE,
        "            self.recalled.add(key)\n",
        "            self.recalled.discard(key)\n",
        TIERS,
    ),
    Mutant(
        "what is on its way may leave the near tier",
        PROMOTER,
        "staying = self._on_its_way",
        "staying = self._on_its_way[1:]",
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
        "resilient/checkpointer.py",
        "        if in_every_tier:\n",
        "        if in_every_tier and pending is None and not self._saves:\n",
        TIERS,
    ),
]
