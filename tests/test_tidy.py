"""The rules that no linter knows: sizes, dead modules, spine docstrings, banned words, what loads.

Limits are those of CONTRIBUTING.md. An exception to a rule is listed here by name, with its reason.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import resilient
import resilient.errors

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "resilient").rglob("*.py"))
TEMPLATES = ROOT / "cli" / "resilient_cli" / "templates"  # scripts of users, who may print
COMMAND_LINE = sorted(
    one for one in (ROOT / "cli" / "resilient_cli").rglob("*.py") if one.parent != TEMPLATES
)
TOOLS = sorted((ROOT / "tools").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
OTHERS = sorted(
    path
    for one in (ROOT / "benchmarks", ROOT / "examples", TEMPLATES)
    for path in one.rglob("*.py")
)
OURS = [*LIBRARY, *COMMAND_LINE, *TOOLS]
OURS_SET = frozenset(OURS)
EVERYTHING = [*OURS, *TESTS, *OTHERS]

FUNCTION_LINES_MAX = 50
PROTOCOL_METHODS_MAX = 8
README_LINES_MAX = 250

# Imported by nothing because a person or the interpreter starts them, or because users import them.
ENTRY_POINTS = {
    "resilient_cli.__main__",
    "resilient.elastic.workers.bootstrap",
    "resilient.elastic.workers.fork_server",
    "resilient.checkpoint.daemon.server",
    "tools.walk",
}
USERS_IMPORT = ("resilient.testing.", "resilient.adapters.")

# The only modules that may catch any exception.
CATCH_ALL = {
    "cli/resilient_cli/app.py",  # turns any error into text and an exit code
    "resilient/distributed/coordination.py",  # posts a rank's failure to its peers, then raises it
    "resilient/elastic/metrics/collector.py",  # a failed metric must not stop a run: see `_attempt`
    "resilient/elastic/workers/bootstrap.py",  # reports any exception that ends a worker
    "resilient/elastic/workers/fork_server.py",  # imported packages may raise any error: see `step`
    "resilient/train/trackers/reporting.py",  # no error of a tracker stops training
    "resilient/exit_hooks.py",  # reports any error during the exit of a process
    "resilient/events.py",  # an error in a sink must not stop the code that emits
    "resilient/storage/transfer.py",  # the caller raises a thread's error again
}
BROAD = ("Exception", "BaseException")

SPINE = (
    "resilient/state_dict/",
    "resilient/checkpoint/",
    "resilient/checkpoint_engine.py",
    "resilient/checkpointer.py",
)
TORCH_FREE = (
    *("resilient.checkpoint", "resilient.storage", "resilient.format", "resilient.layouts"),
    "resilient.goodput",
    "resilient.diff",
    "resilient_cli",
)


def short(path):
    return path.relative_to(ROOT).as_posix()


def module_of(path):
    base = ROOT / "cli" if "cli/resilient_cli" in path.as_posix() else ROOT
    parts = path.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def text_of(path):
    return path.read_text(encoding="utf-8")


class Facts(NamedTuple):
    """The findings of all rules in one file. A file is parsed once, and no tree is kept."""

    long: list[str]
    wide: list[str]
    silent: list[str]
    prints: list[str]
    broad: list[str]
    unknown_args: list[str]
    imports: frozenset[str]


@cache
def facts(path):
    tree, place = ast.parse(text_of(path)), short(path)
    nodes = list(ast.walk(tree))
    name = module_of(path) if path in OURS_SET else ""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return Facts(
        long_functions(nodes, place),
        wide_protocols(nodes, place),
        silent_functions(tree, place) if place.startswith(SPINE) else [],
        prints(nodes, place),
        broad_handlers(nodes, place),
        unknown_args(nodes, place),
        frozenset(imported_by(nodes, package) - {name}),
    )


def functions(nodes):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in nodes if isinstance(node, kinds)]


def classes(nodes):
    return [node for node in nodes if isinstance(node, ast.ClassDef)]


def lines_without_docstring(node):
    """Return the lines of a definition, decorators, signature and docstring not counted."""
    body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


def length(path):
    return len(text_of(path).splitlines())


def long_functions(nodes, place):
    return [
        f"{place}:{node.lineno} {node.name} has {lines_without_docstring(node)} lines"
        for node in functions(nodes)
        if lines_without_docstring(node) > FUNCTION_LINES_MAX
    ]


def test_functions_are_short():
    assert not [line for path in EVERYTHING for line in facts(path).long]


def wide_protocols(nodes, place):
    return [
        f"{place}:{node.lineno} {node.name} has {len(functions(ast.walk(node)))} methods"
        for node in classes(nodes)
        if "Protocol" in {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases}
        and len(functions(ast.walk(node))) > PROTOCOL_METHODS_MAX
    ]


def test_protocols_are_narrow():
    assert not [line for path in OURS for line in facts(path).wide]


def imported_by(nodes, package):
    """Return the modules that a file imports, in functions and for types as well."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A module that is loaded by name: tables of lazy names, `python -m`.
            found |= {node.value} if node.value.startswith("resilient") else set()
    return found


def test_no_module_is_dead():
    used = {name for path in (*OURS, *OTHERS) for name in facts(path).imports}
    modules = {module_of(path) for path in OURS if path.name != "__init__.py"}
    dead = sorted(
        name for name in modules - used - ENTRY_POINTS if not name.startswith(USERS_IMPORT)
    )
    assert not dead


def is_public(node):
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("_")


def reaches_storage(node):
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return bool({"store", "comms"} & {one.arg for one in arguments})


def spine_functions(tree):
    """Return the functions of a spine module that must have a `Crash:` line.

    Those are the public functions that take a ``store`` or ``comms``, and the public methods of
    ``Checkpointer`` that are not properties.
    """
    found = [node for node in tree.body if is_public(node) and reaches_storage(node)]
    found += [
        method
        for node in classes(ast.walk(tree))
        if node.name == "Checkpointer"
        for method in node.body
        if is_public(method) and not method.decorator_list
    ]
    return found


def silent_functions(tree, place):
    return [
        f"{place}:{node.lineno} {node.name}"
        for node in spine_functions(tree)
        if not re.search(r"^\s*Crash: ", ast.get_docstring(node) or "", re.MULTILINE)
    ]


def test_the_spine_says_what_a_crash_leaves_behind():
    assert not [line for path in LIBRARY for line in facts(path).silent]


def parameters_of(node):
    """Return the names of what a function or a class takes; None for a class that inherits them."""
    if isinstance(node, ast.ClassDef):
        init = next((one for one in functions(node.body) if one.name == "__init__"), None)
        if init is not None:
            return parameters_of(init)
        fields = (one for one in node.body if isinstance(one, ast.AnnAssign))
        return None if node.bases else {one.target.id for one in fields}
    taken = node.args
    others = [one for one in (taken.vararg, taken.kwarg) if one]
    return {one.arg for one in [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, *others]}


def unknown_args(nodes, place):
    """Return entries of `Args:` that no parameter has: the docstring missed a rename."""
    found = []
    for node in [*functions(nodes), *classes(nodes)]:
        section = re.search(
            r"^Args:\n((?:    .*\n?|\n)*)", ast.get_docstring(node) or "", re.MULTILINE
        )
        names = parameters_of(node) if section else None
        if names is None:
            continue
        named = re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:", section[1], re.MULTILINE)
        found += [f"{place}:{node.lineno} {node.name}: {one}" for one in named if one not in names]
    return found


def test_docstrings_describe_the_parameters_that_are_there():
    assert not [line for path in OURS for line in facts(path).unknown_args]


def prints(nodes, place):
    return [
        f"{place}:{node.lineno}"
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    ]


def test_the_library_does_not_print():
    assert not [line for path in OURS for line in facts(path).prints]


def is_broad(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or getattr(kind, "id", "") in BROAD for kind in kinds)


def suppresses_all(node):
    name = getattr(node.func, "attr", getattr(node.func, "id", "")) if is_call(node) else ""
    return name == "suppress" and any(getattr(one, "id", "") in BROAD for one in node.args)


def is_call(node):
    return isinstance(node, ast.Call)


def passes_on(handler):
    """Say whether a handler cleans up and raises again, which swallows nothing."""
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def broad_handlers(nodes, place):
    return [
        f"{place}:{node.lineno}"
        for node in nodes
        if (isinstance(node, ast.ExceptHandler) and is_broad(node) and not passes_on(node))
        or suppresses_all(node)
    ]


def test_only_the_edges_catch_whatever_comes():
    edges = {ROOT / one for one in CATCH_ALL}
    assert not [line for path in OURS if path not in edges for line in facts(path).broad]


def test_a_suppression_of_whatever_comes_is_seen():
    broad = ("suppress(Exception)", "contextlib.suppress(KeyError, BaseException)")
    assert all(suppresses_all(ast.parse(one, mode="eval").body) for one in broad)
    assert not suppresses_all(ast.parse("suppress(KeyError)", mode="eval").body)


# A worker that must differ from run to run, and memory that must not be compressed.
UNSEEDED_DRAWS = {"tests/process/test_chaos.py", "tests/process/test_causes_told.py"}
_UNSEEDED = re.compile(r"\bRandom\(\)|\bdefault_rng\(\)|\bos\.urandom\(|random\.RandomState\(\)")


def test_random_draws_of_tests_have_a_seed():
    """A failure must be repeatable: draw from `seeds`, which prints its seed."""
    found = {
        str(path.relative_to(ROOT))
        for path in TESTS
        if path.name != "test_tidy.py" and _UNSEEDED.search(text_of(path))
    }
    assert found == UNSEEDED_DRAWS


def test_code_is_ascii():
    strange = [
        f"{short(path)}:{number}"
        for path in EVERYTHING
        if not text_of(path).isascii()
        for number, line in enumerate(text_of(path).splitlines(), 1)
        if not line.isascii()
    ]
    assert not strange


def test_what_is_left_to_do_names_an_issue():
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b(?!\(#\d+\))")
    left = []
    for path in (one for one in EVERYTHING if words.search(text_of(one))):
        with tokenize.open(path) as file:
            left += [
                f"{short(path)}:{token.start[0]}"
                for token in tokenize.generate_tokens(file.readline)
                if token.type == tokenize.COMMENT and words.search(token.string)
            ]
    assert not left


@pytest.mark.parametrize("name", resilient.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(resilient, name) is not None


def all_errors(base):
    return [base, *(one for child in base.__subclasses__() for one in all_errors(child))]


def test_the_drawing_of_the_errors_is_the_tree_of_the_errors():
    drawn = re.findall(
        r"^[ |`-]*(\w+) +(\d+) +(RES-[A-Z0-9-]+)$", resilient.errors.__doc__, re.MULTILINE
    )
    ours = [
        one
        for one in all_errors(resilient.errors.ResilientError)
        if one.__module__ == "resilient.errors"
    ]
    assert sorted(drawn) == sorted((one.__name__, str(one.exit_code), one.code) for one in ours)


def test_what_must_not_load_torch_does_not():
    names = [module_of(path) for path in OURS]
    names = [name for name in names if f"{name}.".startswith(tuple(f"{x}." for x in TORCH_FREE))]
    probe = (
        "import importlib, sys\n"
        f"for name in {['resilient', *names]!r}:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} loads torch'\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", probe], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_every_module_of_the_library_can_be_imported():
    for path in LIBRARY:
        importlib.import_module(module_of(path))


def test_the_readme_is_short():
    assert length(ROOT / "README.md") <= README_LINES_MAX
