"""Defects of what keeps the words of ranks, and of what reads them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/agent/test_outputs.py"
SHOWN = "tests/cli/test_logs.py"

MUTANTS = [
    Mutant(
        "the last words of a rank are left in the pipe",
        "resilient/agent/outputs/keeping.py",
        "    for tap in taps:\n        tap.finish()\n",
        "",
        RULES,
    ),
    Mutant(
        "what is kept is not shown any more",
        "resilient/agent/outputs/keeping.py",
        "        _write(self._onward, data)\n",
        "",
        RULES,
    ),
    Mutant(
        "the last lines are one too many",
        "resilient/agent/outputs/reading.py",
        "        left = lines + 1  #",
        "        left = lines + 2  #",
        RULES,
    ),
    Mutant(
        "half a line is read",
        "resilient/agent/outputs/reading.py",
        'if not raw.endswith(b"\\n") and len(raw) < LINE_BYTES_MAX:',
        "if not raw:",
        RULES,
    ),
    Mutant(
        "lives go by their names and not by their beginnings",
        "resilient/agent/outputs/reading.py",
        "key=lambda one: (begun[one], one)",
        "key=lambda one: one",
        RULES,
    ),
    Mutant(
        "a terminal obeys what ranks print",
        "cli/resilient_cli/views/logs.py",
        "    if is_safe:\n",
        "    if not is_safe:\n",
        SHOWN,
    ),
    Mutant(
        "a password of a URL is shown",
        "cli/resilient_cli/views/logs.py",
        "    text = redact(line.text)\n",
        "    text = line.text\n",
        SHOWN,
    ),
]
