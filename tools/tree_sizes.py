"""Sizes of the code tree: modules, lines, importers, import cycles and repeated class names."""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = (ROOT / "resilient", ROOT / "cli" / "resilient_cli")
_AT_IMPORT, _LAZY, _TYPE_ONLY = range(3)
MODULES_MAX = 400
LINES_MEDIAN_MIN, LINES_MEDIAN_MAX = 200, 300
REPEATED_NAMES = {
    "WorkerFailed": "the error of a failed worker, and the event that reports it",
}
"""Class names of several classes, each with its reason."""
_TARGETS = {
    "modules": f"at most {MODULES_MAX}",
    "package_files": "43",
    "lines_median": f"{LINES_MEDIAN_MIN} to {LINES_MEDIAN_MAX}",
    "lines_p90": "476",
    "lines_max": "675",
    "code_lines_mean": "182",
    "modules_with_one_importer": "72",
    "cycles_at_import": "0",
    "cycles_with_lazy": "0",
    "cycles_with_types": "5",
    "repeated_class_names": "0, apart from those with a listed reason",
}
_TITLES = {
    "modules": "modules with code",
    "package_files": "package __init__ files",
    "lines_median": "lines per module, median",
    "lines_p90": "lines per module, 90th percentile",
    "lines_max": "lines per module, largest",
    "code_lines_mean": "code lines per module, mean",
    "modules_with_one_importer": "modules with exactly one importer",
    "cycles_at_import": "import cycles, at import",
    "cycles_with_lazy": "import cycles, with lazy imports",
    "cycles_with_types": "import cycles, with type-only imports",
    "repeated_class_names": "public class names used more than once",
}


@dataclass(frozen=True, slots=True)
class TreeSizes:
    """Sizes of ``resilient`` and ``resilient_cli``.

    Attributes:
        modules: Number of modules with code, without package ``__init__`` files.
        package_files: Number of package ``__init__`` files.
        lines_median: Median of the lines per module.
        lines_p90: Lines that 90 % of the modules do not exceed.
        lines_max: Lines of the largest module.
        code_lines_mean: Mean of the lines per module, without comments, docstrings, empty lines.
        modules_with_one_importer: Number of modules that exactly one other module imports.
        cycles_at_import: Groups of modules that import each other at import.
        cycles_with_lazy: The same with imports inside functions.
        cycles_with_types: The same with type-only imports too.
        repeated_class_names: Modules of each public class name that stands for several classes.
    """

    modules: int
    package_files: int
    lines_median: int
    lines_p90: int
    lines_max: int
    code_lines_mean: int
    modules_with_one_importer: int
    cycles_at_import: list[list[str]]
    cycles_with_lazy: list[list[str]]
    cycles_with_types: list[list[str]]
    repeated_class_names: dict[str, list[str]]

    def missed(self) -> set[str]:
        """Return the names of the sizes that miss a limit. Other targets are estimates."""
        limits = {
            "modules": self.modules <= MODULES_MAX,
            "lines_median": LINES_MEDIAN_MIN <= self.lines_median <= LINES_MEDIAN_MAX,
            "cycles_at_import": not self.cycles_at_import,
            "cycles_with_lazy": not self.cycles_with_lazy,
            "repeated_class_names": self.repeated_class_names.keys() <= REPEATED_NAMES.keys(),
        }
        return {name for name, is_met in limits.items() if not is_met}

    def to_json(self) -> dict[str, Any]:
        """Return the sizes as JSON-able values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Module:
    """One parsed module.

    Attributes:
        name: Dotted name.
        lines: Lines of the file.
        code_lines: Lines with code.
        imports: Imported names, each with the earliest time at which it is imported.
        classes: Public classes at the top level.
    """

    name: str
    lines: int
    code_lines: int
    imports: dict[str, int]
    classes: list[str]


def measure_tree() -> TreeSizes:
    """Return the sizes of the tree."""
    paths = [path for package in _PACKAGES for path in sorted(package.rglob("*.py"))]
    modules = [_read(path) for path in paths if path.name != "__init__.py"]
    # The templates are scripts of users, which import the library.
    modules = [module for module in modules if ".templates." not in module.name]
    known = {module.name for module in modules}
    edges = {
        module.name: {name: when for name, when in module.imports.items() if name in known}
        for module in modules
    }
    importers: dict[str, set[str]] = defaultdict(set)
    for name, imported in edges.items():
        for each in imported:
            importers[each].add(name)
    lines = [module.lines for module in modules]
    return TreeSizes(
        modules=len(modules),
        package_files=len(paths) - len([path for path in paths if path.name != "__init__.py"]),
        lines_median=round(median(lines)),
        lines_p90=round(quantiles(lines, n=10)[-1]),
        lines_max=max(lines),
        code_lines_mean=round(mean(module.code_lines for module in modules)),
        modules_with_one_importer=sum(len(importers[module.name]) == 1 for module in modules),
        cycles_at_import=_cycles(edges, _AT_IMPORT),
        cycles_with_lazy=_cycles(edges, _LAZY),
        cycles_with_types=_cycles(edges, _TYPE_ONLY),
        repeated_class_names=_repeated(modules),
    )


def render_sizes(sizes: TreeSizes, rows: Sequence[tuple[str, int, str, bool]] = ()) -> str:
    """Return the sizes as a table, with the targets of the layout.

    Args:
        sizes: Sizes of the tree.
        rows: Further rows: title, number, target, and whether the number misses the target.
    """
    missed = sizes.missed()
    table = list(rows)
    for name, value in sizes.to_json().items():
        number = len(value) if isinstance(value, list | dict) else value
        table.append((_TITLES[name], number, _TARGETS[name], name in missed))
    lines = [
        f"{title:42} {number:6}   {target}{'   MISSED' * is_missed}"
        for title, number, target, is_missed in table
    ]
    details = [
        f"  {name}: {', '.join(modules)} ({REPEATED_NAMES.get(name, 'no listed reason')})"
        for name, modules in sizes.repeated_class_names.items()
    ]
    details += [f"  cycle: {', '.join(cycle)}" for cycle in sizes.cycles_with_types]
    return "\n".join([f"{'size of the tree':42} {'now':>6}   target", *lines, *details])


def _read(path: Path) -> _Module:
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    base = ROOT / "cli" if path.is_relative_to(ROOT / "cli") else ROOT
    name = ".".join(path.relative_to(base).with_suffix("").parts)
    imports: dict[str, int] = {}
    for imported, when in _imports(tree, name, _AT_IMPORT):
        imports[imported] = min(when, imports.get(imported, _TYPE_ONLY))
    imports.pop(name, None)
    classes = [
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    return _Module(name, len(text.splitlines()), _code_lines(text, tree), imports, classes)


def _code_lines(text: str, tree: ast.Module) -> int:
    stripped = enumerate(map(str.strip, text.splitlines()), 1)
    lines = {number for number, line in stripped if line and not line.startswith("#")}
    for node in _statements(tree):
        # Docstrings, also those of attributes.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


def _imports(node: ast.AST, name: str, when: int) -> Iterator[tuple[str, int]]:
    """Yield the names that the code below a node imports, and the time of each import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, when) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            package = name.rsplit(".", child.level)[0] + "." if child.level else ""
            module = f"{package}{child.module or ''}".rstrip(".")
            yield module, when
            yield from ((f"{module}.{alias.name}", when) for alias in child.names)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            yield from _imports(child, name, _TYPE_ONLY)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(child, name, max(when, _LAZY))
        elif not isinstance(child, ast.expr):
            yield from _imports(child, name, when)


def _is_type_checking(test: ast.expr) -> bool:
    return isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"


def _cycles(edges: Mapping[str, Mapping[str, int]], latest: int) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others.

    Args:
        edges: Imported modules of each module, with the time of the import.
        latest: Latest time of the imports that count.
    """
    reached = {name: _reached(edges, name, latest) for name in edges}
    groups = {
        tuple(sorted(each for each in found if name in reached[each]))
        for name, found in reached.items()
        if name in found
    }
    return [list(group) for group in sorted(groups)]


def _reached(edges: Mapping[str, Mapping[str, int]], start: str, latest: int) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = {name for name, when in edges[waiting.pop()].items() if when <= latest} - found
        found |= new
        waiting += new
    return found


def _repeated(modules: list[_Module]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for name in module.classes:
            places[name].append(module.name)
    return {name: at for name, at in sorted(places.items()) if len(at) > 1}
