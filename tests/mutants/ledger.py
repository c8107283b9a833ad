"""Defects of the ledger of samples and of its audit."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

AUDIT = "tests/cli/test_audit.py"
LIVES = "tests/cli/test_audited_lives.py"
TRAINED = "tests/unit/train/test_ledger.py"
SWEEP = "tests/crash/test_sweep.py -k one_crash"

_PUT = """    if job.segment is not None:
        put_segment(context.store, job.segment, context.token)
"""
_REST = """    key = context.signing.key
    files = {name: digest for report in shown for name, digest in report["signed"].items()}
    commit(context.store, manifest, Signature(key, files) if key else None, context.token)
"""

MUTANTS = [
    Mutant(
        "a segment comes after the manifest that names it",
        "resilient/checkpoint/save/persist.py",
        _PUT + _REST,
        _REST + _PUT,
        SWEEP,
    ),
    Mutant(
        "a failed save keeps its records",
        "resilient/train/ledger.py",
        "        self._chain, entries, losses = self._unsure\n",
        "        self._chain, entries, losses = self._unsure[0], [], []\n",
        f"{TRAINED} -k failed",
    ),
    Mutant(
        "a life is not in the chain",
        "resilient/format/ledger.py",
        'f"{link}\\n{generation}\\n{row}\\n"',
        'f"{link}\\n{row}\\n"',
        f"{AUDIT} -k generation_and_the_name",
    ),
    Mutant(
        "links are not looked at",
        "resilient/checkpoint/ledger_audit.py",
        "stored[number - 1] != link[:CHECK_LENGTH]",
        "False",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "heads of segments are not held against each other",
        "resilient/checkpoint/ledger_audit.py",
        "    if before.head != after.opens:\n",
        "    if False:\n",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "heads of manifests are not looked at",
        "resilient/checkpoint/ledger_audit.py",
        "        if not is_there:\n",
        "        if False:\n",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "a segment may lie under any key",
        "resilient/format/ledger.py",
        "    if parse_segment(key) != checkpoint:\n",
        "    if False:\n",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "where a life began is not asked",
        "resilient/checkpoint/ledger_audit.py",
        "parent is not None and parent != left:",
        "parent is not None and False:",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "samples that come twice are passed over",
        "resilient/checkpoint/ledger_audit.py",
        "        if (epoch, start) == (place.epoch, place.samples):\n",
        "        if epoch == place.epoch:\n",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "orders are not computed anew",
        "resilient/checkpoint/ledger_audit.py",
        "            if expected and expected != digest:\n",
        "            if False:\n",
        f"{AUDIT} -k tampering",
    ),
    Mutant(
        "an epoch that ends early is passed over",
        "resilient/checkpoint/ledger_audit.py",
        "        if coverage.size and self.place.samples != coverage.size:\n",
        "        if False:\n",
        f"{TRAINED} -k without_saying",
    ),
    Mutant(
        "what is cut short is not noted",
        "resilient/train/run.py",
        "                self.ledger.leave_out(cursor, "
        '"cut short" if cut_short else "incomplete round")\n',
        "                pass\n",
        f"{TRAINED} -k cut_short",
    ),
    Mutant(
        "a life of the chain may have no record",
        "resilient/checkpoint/ledger_audit.py",
        "        except KeyNotFound:\n            flaws.append(",
        "        except KeyNotFound:\n            () and flaws.append(",
        f"{LIVES} -k missing",
    ),
    Mutant(
        "a record of a life that does not prove says nothing",
        "resilient/checkpoint/ledger_audit.py",
        ("            flaws.append(LedgerProblem(generation_key(number), 0, problem))\n"),
        "            continue\n",
        f"{LIVES} -k missing",
    ),
    Mutant(
        "a life that left no trace may be missing",
        "resilient/checkpoint/ledger_audit.py",
        "    if missing > 0:\n",
        "    if False:\n",
        f"{LIVES} -k missing",
    ),
    Mutant(
        "a record may be another run's",
        "resilient/checkpoint/ledger_audit.py",
        "    if generation.run_id != run_id:\n",
        "    if False:\n",
        f"{LIVES} -k missing",
    ),
    Mutant(
        "a number that a claim left out is taken for a loss",
        "resilient/checkpoint/generations.py",
        "number - newest - 1 if candidate == number else 0",
        "0",
        f"{LIVES} -k left_out",
    ),
    Mutant(
        "a copy has the records of its own line only",
        "resilient/checkpoint/replicate.py",
        "(*shipment.lives, *shipment.others)",
        "shipment.lives",
        f"{LIVES} -k elsewhere",
    ),
]
