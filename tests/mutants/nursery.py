"""Defects of what forks the workers of a later life, and of what ends those before."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RULES = "tests/unit/elastic/test_nursery.py"
WARM = "tests/process/test_warm_workers.py"
CODES = "tests/process/test_agent_codes.py"

MUTANTS = [
    Mutant(
        "a thread of an import does not make a process unfit",
        "resilient/elastic/workers/fork_server.py",
        "    if threads > 1:\n",
        "    if threads > 1000:\n",
        RULES,
    ),
    Mutant(
        "an open device does not make a process unfit",
        "resilient/elastic/workers/fork_server.py",
        "            if target.startswith(_DEVICES):\n",
        "            if target in _DEVICES[1:]:\n",
        RULES,
    ),
    Mutant(
        "a line that is being written is read",
        "resilient/elastic/workers/fork_server.py",
        'text[: text.rfind(b"\\n") + 1]',
        "text",
        RULES,
    ),
    Mutant(
        "what was imported before makes workers start cold for a moment",
        "resilient/elastic/workers/fork_server.py",
        "        self.is_settled = self.is_settled and name in sys.modules\n",
        "        self.is_settled = False\n",
        f"{RULES}::test_what_a_later_life_imports_again_leaves_it_ready",
    ),
    Mutant(
        "a module that is new is not looked at",
        "resilient/elastic/workers/fork_server.py",
        "        self.is_settled = self.is_settled and name in sys.modules\n",
        "",
        f"{RULES}::test_what_a_later_life_imports_again_leaves_it_ready",
    ),
    Mutant(
        "a package counts as imported under the variables of a later life",
        "resilient/elastic/workers/fork_server.py",
        "        if variables is not None and name not in self.seen:\n",
        "        if variables is not None:\n",
        f"{RULES}::test_a_package_counts_as_imported_under_the_variables_of_the_first_time",
    ),
    Mutant(
        "what was imported waits to be looked at",
        "resilient/elastic/workers/fork_server.py",
        "        is_busy = imports.is_due() or imports.is_to_settle\n",
        "        is_busy = imports.is_due()\n",
        f"{RULES}::test_what_was_imported_is_looked_at_before_another_request_is_waited_for",
    ),
    Mutant(
        "variables that the program sets before it imports have no effect",
        "resilient/elastic/workers/fork_server.py",
        "            if variables != bootstrap.relevant_variables():\n",
        "            if not variables:\n",
        f"{WARM}::test_variables_that_the_program_sets_before_it_imports_have_their_effect",
    ),
    Mutant(
        "numpy draws the same on all ranks",
        "resilient/elastic/workers/fork_server.py",
        '        sys.modules["numpy.random"].seed()\n',
        "        pass\n",
        f"{WARM}::test_random_numbers_differ_between_ranks_as_in_cold_workers",
    ),
    Mutant(
        "a dead nursery is not replaced",
        "resilient/elastic/attempt_monitor.py",
        "        self._tend()\n",
        "",
        f"{WARM}::test_a_dead_nursery_means_a_cold_start_and_is_replaced",
    ),
    Mutant(
        "survivors get no time without a keeper",
        "resilient/elastic/options.py",
        "if has_keeper else",
        "if True else",
        f"{CODES}::test_a_survivor_that_ignores_sigterm_does_not_hold_up_the_restart",
    ),
]
