"""Defects of what keeps the words of ranks, of what reads them, and of the page that is served."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/elastic/test_outputs.py"
SHOWN = "tests/cli/test_logs.py"
SERVED = "tests/cli/test_ui.py"

MUTANTS = [
    Mutant(
        "the last words of a rank are left in the pipe",
        "resilient/elastic/worker_logs.py",
        "    for tap in taps:\n        tap.finish()\n",
        "",
        RULES,
    ),
    Mutant(
        "what is kept is not shown any more",
        "resilient/elastic/worker_logs.py",
        "        _write(self._onward, data)\n",
        "",
        RULES,
    ),
    Mutant(
        "the last lines are one too many",
        "resilient/elastic/worker_logs.py",
        "    left = lines + 1  #",
        "    left = lines + 2  #",
        RULES,
    ),
    Mutant(
        "half a line is read",
        "resilient/elastic/worker_logs.py",
        'if not raw.endswith(b"\\n") and len(raw) < LINE_BYTES_MAX:',
        "if not raw:",
        RULES,
    ),
    Mutant(
        "lives go by their names and not by their beginnings",
        "resilient/elastic/worker_logs.py",
        "key=lambda entry: (begun[entry], entry)",
        "key=lambda entry: entry",
        RULES,
    ),
    Mutant(
        "a terminal obeys what ranks print",
        "cli/resilient_cli/commands/logs.py",
        "    if is_safe:\n",
        "    if not is_safe:\n",
        SHOWN,
    ),
    Mutant(
        "a password of a URL is shown",
        "cli/resilient_cli/commands/logs.py",
        ("    text = redact_userinfo(line.text)\n"),
        "    text = line.text\n",
        SHOWN,
    ),
    Mutant(
        "whoever finds the port reads the page",
        "cli/resilient_cli/page/server.py",
        'if not self.path.startswith("/") or not slash or not is_known:',
        "if not slash:",
        SERVED,
    ),
    Mutant(
        "a name of a stranger's that is pointed at the loopback is served",
        "cli/resilient_cli/page/server.py",
        "if len(hosts) != 1 or hosts[0].lower() not in names:",
        "if len(hosts) != 1:",
        SERVED,
    ),
    Mutant(
        "a page says nothing of what it may load",
        "cli/resilient_cli/page/server.py",
        '        "Content-Security-Policy": served_policy(),\n',
        "",
        SERVED,
    ),
    Mutant(
        "a page that is served stays as it was first",
        "cli/resilient_cli/commands/ui.py",
        "        if version != self._version:\n",
        "        if not version:\n",
        SERVED,
    ),
]
