"""Defects of the figures for Prometheus."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FIGURES = "tests/unit/elastic/test_metrics.py"
PAGE = "tests/unit/elastic/test_metrics_page.py"
SERVER = "tests/unit/elastic/test_metrics_server.py"
FOLDER = "resilient/elastic/metrics"

MUTANTS = [
    Mutant(
        "a life that is not gone on with counts as a restart",
        f"{FOLDER}/collector.py",
        '    if record.text("action") == "Restart":\n',
        '    if record.text("action"):\n',
        f"{FIGURES} -k preemptions_apart",
    ),
    Mutant(
        "whatever somebody calls a cause becomes a label",
        f"{FOLDER}/collector.py",
        "cause = cause if cause in _CAUSES else _OTHER",
        "cause = cause or _OTHER",
        f"{FIGURES} -k no_cause_of_ours",
    ),
    Mutant(
        "saves of older launches count again",
        f"{FOLDER}/collector.py",
        "    if is_new:\n        _count_what",
        ("    if record:\n        _count_what"),
        f"{FIGURES} -k since_the_agent",
    ),
    Mutant(
        "a quote in a label ends it",
        f"{FOLDER}/registry.py",
        "    return _escape(text).replace('\"', '\\\\\"')\n",
        "    return _escape(text)\n",
        f"{PAGE} -k odd_label",
    ),
    Mutant(
        "labels grow without a bound",
        f"{FOLDER}/registry.py",
        "known < LABELS_MAX",
        "known >= 0",
        f"{PAGE} -k bounded",
    ),
    Mutant(
        "the step is that of the fastest rank",
        f"{FOLDER}/collector.py",
        "self._note_step(min(found.values())",
        "self._note_step(max(found.values())",
        f"{FIGURES} -k signs",
    ),
    Mutant(
        "a step is as old as the last look",
        f"{FOLDER}/collector.py",
        "unix_seconds - ago_seconds",
        "unix_seconds - 0 * ago_seconds",
        f"{FIGURES} -k signs",
    ),
    Mutant(
        "half a line is lost",
        f"{FOLDER}/collector.py",
        "        self._offsets[path] = offset + whole\n",
        "        self._offsets[path] = offset + len(data)\n",
        f"{FIGURES} -k half_a_line",
    ),
    Mutant(
        "what is joined is summed no more",
        f"{FOLDER}/collector.py",
        "first.number(name) + last.number(name)",
        "last.number(name)",
        f"{FIGURES} -k keep_their_sums",
    ),
    Mutant(
        "an account is made at every look",
        f"{FOLDER}/collector.py",
        "(began_seconds < self._due_seconds and not is_last)",
        "(began_seconds < 0 and not is_last)",
        f"{FIGURES} -k those_of_the_account",
    ),
    Mutant(
        "the file is written where it is read",
        f"{FOLDER}/registry.py",
        'fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")',
        "fresh = path",
        f"{FIGURES} -k never_sees_a_part",
    ),
    Mutant(
        "an agent that stands still is well",
        f"{FOLDER}/collector.py",
        "still_seconds > self._patience_seconds",
        "still_seconds > 1e9",
        f"{FIGURES} -k is_well",
    ),
    Mutant(
        "a figure that fails ends all others",
        f"{FOLDER}/collector.py",
        "        except Exception as error:  # noqa: BLE001 - no figure is worth a run\n",
        "        except ZeroDivisionError as error:\n",
        f"{FIGURES} -k stops_nothing",
    ),
    Mutant(
        "as many connections as anybody likes",
        f"{FOLDER}/server.py",
        "        if self._open >= CONNECTIONS_MAX:\n",
        "        if self._open < 0:\n",
        f"{SERVER} -k many_connections",
    ),
    Mutant(
        "who is slow may stay",
        f"{FOLDER}/server.py",
        "async with asyncio.timeout(REQUEST_SECONDS):",
        "async with asyncio.timeout(None):",
        f"{SERVER} -k slow",
    ),
    Mutant(
        "all is well whatever is known",
        f"{FOLDER}/server.py",
        "_response(200 if is_well else 503,",
        "_response(200 if line else 503,",
        f"{SERVER} -k health",
    ),
]
