"""What every test gets: no leaked threads or children, and a count of crash states at the end."""

from __future__ import annotations

import os
import shutil
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.helpers.seeds import begin_streams, draw

# A failing contract shows its values, as a test of our own would; before anybody imports it.
pytest.register_assert_rewrite("resilient.testing.store_contract")

# Transformers loads weights in threads that outlive the call.
os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
# Ranks share two cores. The same number everywhere, so that forked ranks have imported the same.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests of these folders start processes or count for minutes: those marked `smoke` are in the fast
# tier, one for each guarantee; all others are marked `slow`.
SLOW_FOLDERS = {"clouds", "container", "crash", "damage", "process", "s3", "simulation", "slurm"}
SHARED_POOLS = ("pytest-timeout", "asyncio", "fsspec", "QueueFeederThread", "execnet")


def pytest_addoption(parser):
    parser.addoption("--seed", help="seed of the random streams of each test, as a test printed it")
    parser.addoption(
        "--crash-doubles",
        type=int,
        default=400,
        help="how many pairs of crashes the sweep draws (make crash takes more)",
    )
    parser.addoption(
        "--crash-every",
        type=int,
        default=3,
        help="one case of so many of each long sweep (make crash takes all)",
    )
    parser.addoption(
        "--long-every",
        type=int,
        default=3,
        help="one of so many modules with long tests, in turn by the day (make long takes all)",
    )
    parser.addoption(
        "--fuzz-runs",
        type=int,
        default=400,
        help="how many spoiled inputs each reader gets (make fuzz takes more)",
    )
    parser.addoption(
        "--configurations",
        type=int,
        default=6,
        help="how many training configurations are compared (make configurations takes more)",
    )
    parser.addoption("--configurations-seed", type=int, default=1, help="what they are drawn from")
    parser.addoption(
        "--round-trips",
        type=int,
        default=40,
        help="how many drawn objects are saved and resumed (make round-trips takes more)",
    )
    parser.addoption("--kinds", default="", help="the strategies to train under, with commas")
    parser.addoption("--matrix", action="store_true", help="every optimizer with every schedule")
    parser.addoption("--every-repair", action="store_true", help="each repair of each layout")
    parser.addoption("--fifty-faults", action="store_true", help="the long run that is audited")
    parser.addoption("--every-slurm", action="store_true", help="what takes minutes on SLURM")
    parser.addoption("--fuzz-seed", type=int, default=0, help="number of the first of them")
    parser.addoption("--launches", type=int, default=4, help="random launches of the agent")
    parser.addoption("--launches-seed", type=int, default=1, help="seed of the first launch")
    parser.addoption("--damage-seed", type=int, default=0, help="slice of the damage campaign")


# Temporary folders lie in memory where there is room: tests write many small files and wait for
# each. The variable is pytest's own.
MEMORY, MEMORY_MIN_BYTES = Path("/dev/shm"), 8 << 30  # noqa: S108 - only the owner reads a folder of pytest
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_MIN_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def _is_in_slow_folder(path, config) -> bool:
    return path.relative_to(config.rootpath / "tests").parts[0] in SLOW_FOLDERS


def pytest_ignore_collect(collection_path, config):
    """Skip the import of a test module without a test of the selected tier.

    The marks of a tier stand in the text of the module.
    """
    tier = config.getoption("markexpr")
    if collection_path.suffix != ".py" or tier not in {"slow", "not slow"}:
        return None
    slow_folder = _is_in_slow_folder(collection_path, config)
    if slow_folder == (tier == "slow"):
        return None
    mark = "mark.smoke" if slow_folder else "mark.slow"
    return None if mark in collection_path.read_text() else True


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Mark what is not in the fast tier, before marks select tests; thin the long tests."""
    for item in items:
        if _is_in_slow_folder(item.path, config) and item.get_closest_marker("smoke") is None:
            item.add_marker("slow")
    if config.getoption("markexpr") == "slow":
        _thin_long_modules(config, items)


def _thin_long_modules(config, items):
    """Deselect the long tests of the modules whose turn is another day.

    A module shares costly fixtures, so all its long tests have one turn.
    """
    every = config.getoption("--long-every")
    long_items = [item for item in items if item.get_closest_marker("long")]
    modules = sorted({item.path for item in long_items})
    day = int(os.environ["TESTS_DAY"])
    idle = {path for number, path in enumerate(modules) if (number + day) % every}
    deselected = [item for item in long_items if item.path in idle]
    items[:] = [item for item in items if item not in set(deselected)]
    config.hook.pytest_deselected(items=deselected)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Seed the random streams before the first fixture of a test, and print the seed.

    A heartbeat of a checkpointer that a test never closes would write to its folder until the end
    of the session. So only tests of whole processes have the default.
    """
    if item.path.relative_to(item.config.rootpath / "tests").parts[0] in SLOW_FOLDERS:
        os.environ.pop("RESILIENT_HEARTBEAT_SECONDS", None)
    else:
        os.environ["RESILIENT_HEARTBEAT_SECONDS"] = "0"
    seed = begin_streams(item.nodeid)
    print(f"random streams begin at seed {seed}; --seed={seed} repeats them")  # noqa: T201 - for a failure


def pytest_configure(config):
    # Programs that tests start draw from the same seed.
    if config.getoption("--seed") is not None:
        os.environ["SEED"] = config.getoption("--seed")
    # Workers of xdist inherit the variable, so all collect the same tests at midnight.
    os.environ.setdefault("TESTS_DAY", str(datetime.now(UTC).toordinal()))


STATES_MIN, SWEEPS_MIN = 100_000, 36


def count_sweeps(terminalreporter) -> tuple[int, int, int]:
    """Add up what the sweeps counted, in this process and in those of xdist."""
    sweeps = states = violations = 0
    for reports in terminalreporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", "") == "call" and "crash_states" in properties:
                sweeps += 1
                states += properties["crash_states"]
                violations += properties.get("violations", 0)
    return sweeps, states, violations


def total(terminalreporter, name: str) -> int:
    """Add up a number that tests recorded."""
    return sum(
        dict(getattr(report, "user_properties", ())).get(name, 0)
        for reports in terminalreporter.stats.values()
        for report in reports
        if getattr(report, "when", "") == "call"
    )


def pytest_terminal_summary(terminalreporter):
    bits, missed = (total(terminalreporter, f"bits_{word}") for word in ("flipped", "missed"))
    if bits:
        terminalreporter.write_line(f"bit flips: {bits} bits flipped, {bits - missed} detected")
    runs = total(terminalreporter, "fuzz_runs")
    if runs:
        terminalreporter.write_line(f"fuzz: {runs} spoiled inputs, each read or refused")
    sweeps, states, violations = count_sweeps(terminalreporter)
    if sweeps:
        terminalreporter.write_line(f"crash sweep: {states} crash states, {violations} violations")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail a run of all sweeps that saw too few states to mean anything."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    sweeps, states, _ = count_sweeps(reporter) if reporter else (0, 0, 0)
    if sweeps >= SWEEPS_MIN and states < STATES_MIN:
        reporter.write_line(f"only {states} crash states, at least {STATES_MIN} are due")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def count_states(record_property):
    """Give a function that a sweep tells how many states it saw."""

    def count(states: int, violations: int) -> None:
        record_property("crash_states", states)
        record_property("violations", violations)

    return count


@pytest.fixture
def thinned(request):
    """Give a function that selects one case of ``--crash-every``; the seed selects the first."""
    every = request.config.getoption("--crash-every")

    def thin(cases):
        return list(cases)[draw().randrange(every) :: every]

    return thin


@pytest.fixture(autouse=True)
def nothing_leaks():
    """Fail a test that leaves a thread behind or changes the environment."""
    threads = set(threading.enumerate())
    environ = dict(os.environ)
    yield
    left = [
        thread.name
        for thread in threading.enumerate()
        if thread not in threads and not thread.daemon and not thread.name.startswith(SHARED_POOLS)
    ]
    changed = {
        name
        for name in environ.keys() ^ os.environ.keys()
        if not name.startswith(("PYTEST_", "KMP_", "TORCH", "PYTORCH_NVML"))
    }
    assert not left, f"threads left running: {left}"
    assert not changed, f"environment variables left changed: {changed}"
