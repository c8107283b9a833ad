"""Apply a layout page: move and merge modules, rename their names, rewrite every reference.

    python tools/restructure.py PAGE [--write]

The page has tables of modules (new path, lines, old modules, content) and of names (new path, old
name, new name). Edits are made by position, all at once, so that a new name that equals another
old one is never renamed twice. Without ``--write`` only the report is printed.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BASES = {"resilient": ROOT, "resilient_cli": ROOT / "cli"}
READERS = ("tests", "benchmarks", "examples", "tools", "container", "k8s")
TEXTS = ("*.md", "*.toml", "*.yaml", "*.yml", "Makefile", "*.sh", "*.txt", "Dockerfile", "*.cfg")
DOTTED = re.compile(r"(?<![\w./])(resilient(?:_cli)?)((?:\.[A-Za-z_]\w*)+)")
PATHED = re.compile(
    r"(?<![\w.])(?:cli/)?(resilient(?:_cli)?)((?:/\w+)+)(\.py|/(?!\w)|(?=[\s`\"'),]))"
)
BY_HAND = {"MindingSaver", "Saver", "HoldingSaver"}
"""Classes that become one; their order of inheritance is settled by hand."""
REPORT: list[str] = []


def report(text: str) -> None:
    REPORT.append(text)


# ---------------------------------------------------------------- the page


@dataclass
class Page:
    modules: dict[str, list[str]] = field(default_factory=dict)
    content: dict[str, str] = field(default_factory=dict)
    names: dict[tuple[str, str], str] = field(default_factory=dict)
    methods: list[tuple[str, str, str]] = field(default_factory=list)


def read_page(path: Path) -> Page:
    page, root = Page(), "resilient"
    for line in path.read_text().splitlines():
        if line.startswith(("## ", "### ")):
            root = "resilient_cli" if line.startswith("### cli") else "resilient"
        cells = [one.strip() for one in line.strip().strip("|").split(" | ")]
        if len(cells) >= 4 and cells[0].endswith(".py`") and cells[1].isdigit():
            new = dotted_of(cells[0].strip("`"), root)
            page.modules[new] = [f"{root}.{one}" for one in re.findall(r"`([^`]+)`", cells[2])]
            page.content[new] = cells[3]
        elif len(cells) >= 3 and cells[0].endswith(".py`") and cells[1].startswith("`"):
            new = dotted_of(cells[0].strip("`"), root)
            old, name = cells[1].strip("`"), cells[2].strip("`")
            if old in BY_HAND:
                continue
            if "." in old:
                page.methods.append((new, old, name))
            else:
                page.names[new, old] = name
    return page


def dotted_of(path: str, root: str) -> str:
    return f"{root}." + path.removesuffix(".py").replace("/", ".")


# ---------------------------------------------------------------- modules of today


@dataclass
class Binding:
    local: str
    module: str
    attr: str | None  # None: the module itself
    type_only: bool
    has_alias: bool
    dotted: bool = False  # `import a.b`: binds `a`


class Module:
    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self.source = path.read_text(encoding="utf-8")
        self.lines = self.source.splitlines(keepends=True)
        self.tree = ast.parse(self.source)
        self.starts = [0]
        for one in self.lines:
            self.starts.append(self.starts[-1] + len(one))
        self.byte_safe = self.source.isascii()
        self.bindings: dict[str, Binding] = {}
        self.defs: dict[str, ast.stmt] = {}
        self.header: list[ast.stmt] = []
        self.odd_type_only: list[ast.stmt] = []
        self._read()
        self.scopes = Scopes(self.tree)

    def at(self, line: int, col: int) -> int:
        """Return the place in the text of a line and a column in bytes."""
        if not self.byte_safe:
            text = self.lines[line - 1]
            col = len(text.encode()[:col].decode())
        return self.starts[line - 1] + col

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree, clean=True) or ""

    def _read(self) -> None:
        for node in self.tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.header.append(node)
                self._bind(node, type_only=False)
            elif is_type_checking(node):
                self.header.append(node)
                for one in node.body:
                    if isinstance(one, ast.Import | ast.ImportFrom):
                        self._bind(one, type_only=True)
                    else:
                        self.odd_type_only.append(one)
            else:
                for name in names_bound(node):
                    self.defs.setdefault(name, node)

    def _bind(self, node: ast.Import | ast.ImportFrom, *, type_only: bool) -> None:
        for one in bindings_of(node, type_only=type_only):
            self.bindings[one.local] = one

    @property
    def body_start(self) -> int:
        """The line after the docstring and the imports at the top."""
        last = 0
        for node in self.tree.body:
            is_doc = node is self.tree.body[0] and isinstance(node, ast.Expr)
            if is_doc or node in self.header:
                last = node.end_lineno
            else:
                break
        return last


def is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and (node.test.id == "TYPE_CHECKING")
    )


def bindings_of(node: ast.Import | ast.ImportFrom, *, type_only: bool) -> list[Binding]:
    found = []
    for alias in node.names:
        if isinstance(node, ast.Import):
            if alias.asname:
                found.append(Binding(alias.asname, alias.name, None, type_only, True))
            else:
                local = alias.name.partition(".")[0]
                found.append(Binding(local, alias.name, None, type_only, False, "." in alias.name))
        else:
            assert not node.level, "relative import"
            full = f"{node.module}.{alias.name}"
            local = alias.asname or alias.name
            if full in ALL_OLD:
                found.append(Binding(local, full, None, type_only, bool(alias.asname)))
            else:
                found.append(Binding(local, node.module, alias.name, type_only, bool(alias.asname)))
    return found


def names_bound(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    found = []
    for one in ast.walk(node):
        if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            found.append(one.id)
        elif isinstance(one, ast.FunctionDef | ast.ClassDef) and isinstance(node, ast.If | ast.Try):
            found.append(one.name)
        elif isinstance(one, ast.alias) and isinstance(node, ast.If | ast.Try):
            found.append((one.asname or one.name).partition(".")[0])
    return found


# ---------------------------------------------------------------- scopes


class Scope:
    def __init__(self, node: ast.AST, parent: Scope | None, kind: str) -> None:
        self.node, self.parent, self.kind = node, parent, kind
        self.bound: set[str] = set()
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()


class Scopes(ast.NodeVisitor):
    """Finds the scope that each name in a module belongs to."""

    def __init__(self, tree: ast.Module) -> None:
        self.top = Scope(tree, None, "module")
        self.uses: list[tuple[ast.Name, Scope]] = []
        self.imports: list[tuple[ast.Import | ast.ImportFrom, Scope]] = []
        self.statements: list[tuple[ast.stmt, Scope]] = []  # def, class, global, nonlocal, except
        self.attributes: list[tuple[ast.Attribute, Scope]] = []
        self._now = self.top
        self.every_bound: set[str] = set()
        for one in tree.body:
            self.visit(one)
        self.every_bound = {one.id for one, scope in self.uses if not isinstance(one.ctx, ast.Load)}
        self.every_bound |= {one.arg for one in ast.walk(tree) if isinstance(one, ast.arg)}

    def _in(self, node: ast.AST, kind: str, parts: list[ast.AST], names: list[str]) -> None:
        before, self._now = self._now, Scope(node, self._now, kind)
        self._now.bound.update(names)
        for one in parts:
            self.visit(one)
        self._now = before

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._now.bound.add(node.name)
        self.statements.append((node, self._now))
        for one in [*node.decorator_list, *outer_parts(node.args)]:
            self.visit(one)
        if node.returns:
            self.visit(node.returns)
        self._in(node, "function", node.body, arg_names(node.args))

    visit_FunctionDef = visit_AsyncFunctionDef = _function

    def visit_Lambda(self, node: ast.Lambda) -> None:
        for one in outer_parts(node.args):
            self.visit(one)
        self._in(node, "function", [node.body], arg_names(node.args))

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._now.bound.add(node.name)
        self.statements.append((node, self._now))
        for one in [*node.decorator_list, *node.bases, *node.keywords]:
            self.visit(one)
        self._in(node, "class", node.body, [])

    def _comprehension(self, node) -> None:
        first, *others = node.generators
        self.visit(first.iter)
        parts = [first.target, *first.ifs, *others]
        parts += [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        self._in(node, "comprehension", parts, [])

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        scope = self._now
        while scope.kind == "comprehension":
            scope = scope.parent
        scope.bound.add(node.target.id)
        self.uses.append((node.target, scope))
        self.visit(node.value)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._now.bound.add(node.id)
        self.uses.append((node, self._now))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.attributes.append((node, self._now))
        self.generic_visit(node)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        self.imports.append((node, self._now))
        for alias in node.names:
            self._now.bound.add((alias.asname or alias.name).partition(".")[0])

    visit_Import = visit_ImportFrom = _import

    def visit_Global(self, node: ast.Global) -> None:
        self._now.globals.update(node.names)
        self.statements.append((node, self._now))

    def visit_Nonlocal(self, node: ast.Nonlocal) -> None:
        self._now.nonlocals.update(node.names)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self._now.bound.add(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        if node.name:
            self._now.bound.add(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        if node.name:
            self._now.bound.add(node.name)

    def home(self, name: str, scope: Scope) -> Scope:
        """Return the scope that ``name`` belongs to when it is used in ``scope``."""
        one: Scope | None = scope
        while one is not None:
            is_seen = one is scope or one.kind != "class"
            if name in one.globals:
                return self.top
            if is_seen and name in one.bound and name not in one.nonlocals:
                return one
            one = one.parent
        return self.top

    def shadows(self, name: str, scope: Scope, home: Scope) -> bool:
        """Say whether ``name`` would mean something else in ``scope`` than in ``home``."""
        one: Scope | None = scope
        while one is not None and one is not home:
            if (one is scope or one.kind != "class") and name in one.bound:
                return True
            one = one.parent
        return False


def arg_names(args: ast.arguments) -> list[str]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    every += [one for one in (args.vararg, args.kwarg) if one]
    return [one.arg for one in every]


def outer_parts(args: ast.arguments) -> list[ast.AST]:
    every = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    every += [one for one in (args.vararg, args.kwarg) if one]
    found: list[ast.AST] = [one.annotation for one in every if one.annotation]
    return [*found, *args.defaults, *(one for one in args.kw_defaults if one)]


# ---------------------------------------------------------------- the plan


ALL_OLD: dict[str, Path] = {}


class Plan:
    def __init__(self, page: Page) -> None:
        self.page = page
        for base, root in BASES.items():
            for path in sorted((root / base).rglob("*.py")):
                parts = path.relative_to(root).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                ALL_OLD[name] = path
        self.new_of = {old: new for new, olds in page.modules.items() for old in olds}
        for old in list(self.new_of):
            if old not in ALL_OLD:
                report(f"PAGE names {old}, which is not there")
                del self.new_of[old]
        self._map_packages()
        self.modules = {name: Module(name, path) for name, path in ALL_OLD.items()}
        self.parts: dict[str, list[str]] = defaultdict(list)
        for old in ALL_OLD:
            if old not in self.dropped:
                self.parts[self.new_of[old]].append(old)
        self._order_parts()
        self.final: dict[tuple[str, str], str] = {}
        self.removed: set[tuple[str, str]] = set()
        self._name_definitions()
        self.locals: dict[str, dict[str, str]] = {}
        self.imports: dict[str, dict[str, tuple[str, str | None, bool]]] = {}
        for new in self.parts:
            self._name_imports(new)

    def _map_packages(self) -> None:
        votes: dict[str, Counter[str]] = defaultdict(Counter)
        for old, new in self.new_of.items():
            votes[old.rpartition(".")[0]][new.rpartition(".")[0]] += 1
        packages = [old for old, path in ALL_OLD.items() if path.name == "__init__.py"]
        homes: dict[str, str] = {}
        for one in sorted(packages, key=lambda name: name.count(".")):
            above = homes.get(one.rpartition(".")[0])
            if votes[one]:
                homes[one] = votes[one].most_common(1)[0][0]
            else:
                homes[one] = f"{above}.{one.rpartition('.')[2]}" if above else one
        self.dropped: set[str] = set()
        taken: dict[str, str] = {}
        for one in sorted(packages, key=lambda name: (name.count("."), name)):
            home = homes[one]
            depth = home.count(".")
            if home in taken or (home in self.page.modules):
                self.dropped.add(one)
                if len(ast.parse(ALL_OLD[one].read_text()).body) > 1:
                    report(f"PACKAGE {one} has code and no home (of {home})")
            elif one.count(".") > depth and home not in homes.values():
                self.dropped.add(one)
            else:
                taken[home] = one
            self.new_of[one] = home
        for old in ALL_OLD:
            if old not in self.new_of:
                package, _, last = old.rpartition(".")
                self.new_of[old] = f"{homes.get(package, package)}.{last}"
                report(f"UNMAPPED {old} -> {self.new_of[old]}")

    def _order_parts(self) -> None:
        for new, olds in self.parts.items():
            listed = self.page.modules.get(new, [])
            rank = {old: at for at, old in enumerate(listed)}
            olds.sort(key=lambda old: rank.get(old, 99))
            done: list[str] = []
            trail: list[str] = []

            def put(old: str) -> None:
                if old in done:
                    return
                if old in trail:
                    report(f"CYCLE in {new}: {trail} {old}")
                    return
                trail.append(old)
                for one in self.modules[old].bindings.values():
                    if one.module in olds and one.module != old and not one.type_only:
                        put(one.module)
                trail.pop()
                done.append(old)

            for old in list(olds):
                put(old)
            olds[:] = done

    def _name_definitions(self) -> None:
        for new, olds in self.parts.items():
            taken: dict[str, tuple[str, str]] = {}
            for old in olds:
                module = self.modules[old]
                for name, node in module.defs.items():
                    final = self.page.names.get((new, name), name)
                    if final in taken and taken[final][0] != old and not final.startswith("__"):
                        other, other_name = taken[final]
                        if self._same(module, node, self.modules[other], other_name):
                            self.removed.add((old, name))
                        else:
                            suffix = old.rpartition(".")[2]
                            final = self._apart(name, suffix)
                            report(f"COLLISION in {new}: {old}.{name} -> {final} ({other})")
                    taken.setdefault(final, (old, name))
                    self.final[old, name] = final
        used = {(self.new_of[old], name) for (old, name) in self.final}
        for new, name in self.page.names:
            if (new, name) not in used:
                report(f"PAGE renames {new} {name}, which is not there")

    @staticmethod
    def _apart(name: str, suffix: str) -> str:
        lead = "_" if name.startswith("_") else ""
        bare = name.lstrip("_")
        if bare.isupper():
            return f"{lead}{suffix.upper()}_{bare}"
        if bare[:1].isupper():
            return f"{lead}{suffix.title().replace('_', '')}{bare}"
        return f"{lead}{suffix}_{bare}"

    @staticmethod
    def _same(one: Module, node: ast.stmt, other: Module, name: str) -> bool:
        twin = other.defs[name]
        simple = ast.Assign | ast.AnnAssign
        return (
            isinstance(node, simple)
            and isinstance(twin, simple)
            and ast.dump(node) == ast.dump(twin)
        )

    def resolve(self, module: str, attr: str) -> tuple[str, str]:
        """Return the new module and the new name of what ``module.attr`` is."""
        new = self.new_of.get(module)
        if new is None:
            return module, attr
        if (module, attr) in self.final:
            return new, self.final[module, attr]
        found = self.modules[module].bindings.get(attr) if module in self.modules else None
        if found is not None and found.attr is not None:
            target = self.resolve(found.module, found.attr)
            if module in self.dropped or ALL_OLD[module].name != "__init__.py":
                return target
            return new, (attr if found.has_alias else target[1])
        return new, attr

    def _name_imports(self, new: str) -> None:
        olds = self.parts[new]
        defined = {self.final[old, name] for old in olds for name in self.modules[old].defs}
        chosen: dict[tuple[str, str | None], str] = {}
        imports: dict[str, tuple[str, str | None, bool]] = {}
        for old in olds:
            mine: dict[str, str] = {}
            for name in self.modules[old].defs:
                mine[name] = self.final[old, name]
            for one in self.modules[old].bindings.values():
                local = self._choose(new, one, imports, chosen, defined, old)
                if local is not None:
                    mine[one.local] = local
            self.locals[old] = mine
        self.imports[new] = imports

    def _choose(self, new, one, imports, chosen, defined, old) -> str | None:
        """Return the local name of an import in the merged module."""
        if one.module == "__future__":
            return None
        if one.attr is None:
            target: tuple[str, str | None] = (self.new_of.get(one.module, one.module), None)
            wanted = one.local
            if not one.has_alias and not one.dotted and one.module in self.new_of:
                wanted = target[0].rpartition(".")[2]
                if wanted != one.local and wanted in self.modules[old].scopes.every_bound:
                    wanted = one.local
        else:
            target = self.resolve(one.module, one.attr)
            wanted = one.local if one.has_alias else target[1]
        if target[0] == new:
            return target[1] if target[1] is not None else ""
        if one.dotted:
            target = (target[0], ".")
        known = chosen.get(target)
        if known is not None:
            held = imports[known]
            imports[known] = (held[0], held[1], held[2] and one.type_only)
            return known
        local = wanted
        if local in defined or (local in imports and imports[local][:2] != target):
            stem = target[0].rpartition(".")[2]
            local = f"{stem}_{wanted}" if target[1] not in (None, ".") else f"{stem}_module"
            report(f"IMPORT in {new} ({old}): {wanted} of {target[0]} as {local}")
        chosen[target] = local
        imports[local] = (target[0], target[1], one.type_only)
        return local


# ---------------------------------------------------------------- edits


class Editor:
    """Collects the edits of one file's text."""

    def __init__(self, plan: Plan, module: Module, new: str | None) -> None:
        self.plan, self.module, self.new = plan, module, new
        self.edits: dict[tuple[int, int], str] = {}
        self.scopes = module.scopes
        self.lazy: dict[tuple[int, str], tuple[Binding, str | None]] = {}

    def put(self, span: tuple[int, int], text: str) -> None:
        self.edits[span] = text

    def all(self, locals_: dict[str, str], *, skip_header: bool) -> None:
        self._lazy_imports(skip_header)
        self._names(locals_)
        self._definitions(locals_)
        self._attributes()
        self._set_attributes()
        self._quoted_types(locals_)
        self._texts()

    def _binding(self, name: str, scope: Scope) -> tuple[Binding, str | None] | None:
        home = self.scopes.home(name, scope)
        if home is self.scopes.top:
            found = self.module.bindings.get(name)
            if found is not None:
                return found, None
        return self.lazy.get((id(home), name))

    def _lazy_imports(self, skip_header: bool) -> None:
        tops = {id(one) for one in self.module.header}
        inside = {
            id(one) for node in self.module.header if isinstance(node, ast.If) for one in node.body
        }
        for node, scope in self.scopes.imports:
            if id(node) in tops or id(node) in inside:
                if not skip_header:
                    self._import(node, scope, is_top=True)
                continue
            self._import(node, scope, is_top=scope is self.scopes.top)

    def _import(self, node, scope: Scope, *, is_top: bool) -> None:
        groups: dict[str, list[str]] = {}
        lines = []
        plain = []
        for one in bindings_of(node, type_only=False):
            if one.attr is None:
                target = self.plan.new_of.get(one.module, one.module)
                local = one.local
                if one.dotted or (isinstance(node, ast.Import) and not one.has_alias):
                    plain.append(target)
                    self.lazy[id(scope), one.local] = (one, None)
                    continue
                if not one.has_alias and one.module in self.plan.new_of:
                    local = target.rpartition(".")[2]
                    if local != one.local and (
                        local in scope.bound or hasattr(builtins, local) or self._is_used(local)
                    ):
                        local = f"{local}_module"
                self.lazy[id(scope), one.local] = (one, local)
                if isinstance(node, ast.Import):
                    lines.append(f"import {target} as {local}")
                    continue
                package, _, last = target.rpartition(".")
                alias = "" if local == last else f" as {local}"
                groups.setdefault(package, []).append(f"{last}{alias}")
                continue
            module, attr = self.plan.resolve(one.module, one.attr)
            if module == self.new:
                self.lazy[id(scope), one.local] = (one, attr)
                continue
            local = one.local if one.has_alias else attr
            if local != one.local and self._clashes(one.local, local, scope):
                local = one.local
                report(f"KEPT {self.module.path}: {attr} as {local}")
            self.lazy[id(scope), one.local] = (one, local)
            groups.setdefault(module, []).append(attr if local == attr else f"{attr} as {local}")
        lines += [f"import {one}" for one in dict.fromkeys(plain)]
        lines += [
            f"from {module} import {', '.join(dict.fromkeys(names))}"
            for module, names in groups.items()
        ]
        begin, end = self.module.span(node)
        pad = " " * node.col_offset
        body = getattr(scope.node, "body", [])
        text = ("\n" + pad).join(lines)
        if not lines:
            is_alone = isinstance(body, list) and len(body) == 1
            text = "pass" if is_alone else ""
            if not text:
                begin = self.module.starts[node.lineno - 1]
                end = self.module.starts[node.end_lineno]
        self.put((begin, end), text)

    def _is_used(self, name: str) -> bool:
        return any(one.id == name for one, _ in self.scopes.uses)

    def _clashes(self, old: str, new: str, scope: Scope) -> bool:
        if new in scope.bound:
            return True
        return any(
            self.scopes.shadows(new, where, scope)
            for node, where in self.scopes.uses
            if node.id == old and self.scopes.home(old, where) is scope
        )

    def _names(self, locals_: dict[str, str]) -> None:
        top = self.scopes.top
        for node, scope in self.scopes.uses:
            home = self.scopes.home(node.id, scope)
            if home is top and (id(top), node.id) not in self.lazy:
                wanted = locals_.get(node.id)
            else:
                found = self.lazy.get((id(home), node.id))
                wanted = found[1] if found else None
            if not wanted or wanted == node.id:
                continue
            if self.scopes.shadows(wanted, scope, home):
                report(
                    f"SHADOW {self.module.path}:{node.lineno} {node.id} -> {wanted}: bound there"
                )
            self.put(self.module.span(node), wanted)

    def _definitions(self, locals_: dict[str, str]) -> None:
        for node, scope in self.scopes.statements:
            if isinstance(node, ast.Global):
                text = ", ".join(locals_.get(one, one) for one in node.names)
                self.put(self.module.span(node), f"global {text}")
            elif scope is self.scopes.top and locals_.get(node.name, node.name) != node.name:
                begin = self.module.at(node.lineno, node.col_offset)
                at = self.module.source.index(node.name, begin)
                self.put((at, at + len(node.name)), locals_[node.name])

    def _attributes(self) -> None:
        for node, scope in self.scopes.attributes:
            if isinstance(node.value, ast.Name):
                self._of_module(node, node.value, scope)
            chain = chain_of(node)
            if chain and chain[0] in BASES:
                self._of_chain(node, chain)

    def _of_module(self, node: ast.Attribute, value: ast.Name, scope: Scope) -> None:
        found = self._binding(value.id, scope)
        if found is None or found[0].attr is not None or found[0].module not in self.plan.new_of:
            return
        one = found[0]
        if one.dotted or one.module in BASES:
            return
        module, attr = self.plan.resolve(one.module, node.attr)
        end = self.module.at(node.end_lineno, node.end_col_offset)
        if module == self.new:
            self.edits.pop(self.module.span(value), None)
            self.put(self.module.span(node), attr)
        elif attr != node.attr:
            self.put((end - len(node.attr), end), attr)

    def _of_chain(self, node: ast.Attribute, chain: list[str]) -> None:
        full = ".".join(chain)
        if full in self.plan.new_of:
            new = self.plan.new_of[full]
        elif full.rpartition(".")[0] in self.plan.new_of and "." in full:
            module, _, attr = full.rpartition(".")
            where, name = self.plan.resolve(module, attr)
            new = f"{where}.{name}"
        else:
            return
        if new != full:
            self.put(self.module.span(node), new)

    def _set_attributes(self) -> None:
        """Rename the text of ``setattr(module, "name", ...)``."""
        for node in ast.walk(self.module.tree):
            if not isinstance(node, ast.Call) or len(node.args) < 2:
                continue
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            first, second = node.args[:2]
            if called not in ("setattr", "getattr", "delattr", "object") or not (
                isinstance(second, ast.Constant) and isinstance(second.value, str)
            ):
                continue
            module = self._module_of(first)
            if module is None:
                continue
            _, attr = self.plan.resolve(module, second.value)
            if attr != second.value:
                self.put(self.module.span(second), f'"{attr}"')

    def _quoted_types(self, locals_: dict[str, str]) -> None:
        """Rename the names in types that are written as text: ``cast("X", ...)``, ``TypeVar``."""
        for node in ast.walk(self.module.tree):
            texts = []
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("cast", "TypeVar"):
                texts = [*node.args[:1], *(one.value for one in node.keywords)]
            elif isinstance(node, ast.AnnAssign):
                texts = [node.annotation]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                every = [*node.args.args, *node.args.kwonlyargs, *node.args.posonlyargs]
                texts = [one.annotation for one in every if one.annotation]
                texts += [node.returns] if node.returns else []
            for one in texts:
                for each in ast.walk(one):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        self._quoted(each, locals_)
        for node in self.module.tree.body:
            targets = getattr(node, "targets", [])
            if targets and getattr(targets[0], "id", "") == "__all__":
                for each in ast.walk(node):
                    if isinstance(each, ast.Constant) and isinstance(each.value, str):
                        self._quoted(each, locals_)

    def _quoted(self, node: ast.Constant, locals_: dict[str, str]) -> None:
        try:
            ast.parse(node.value, mode="eval")
        except SyntaxError:
            return
        lazy = {name: local for (_, name), (_, local) in self.lazy.items() if local}
        known = {**lazy, **locals_}
        text = re.sub(
            r"(?<![\w.])[A-Za-z_]\w*", lambda one: known.get(one[0]) or one[0], node.value
        )
        if text != node.value:
            self.put(self.module.span(node), f'"{text}"')

    def _module_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            for use, scope in self.scopes.uses:
                if use is node:
                    found = self._binding(node.id, scope)
                    if found and found[0].attr is None and found[0].module in self.plan.new_of:
                        return found[0].module
        chain = chain_of(node) if isinstance(node, ast.Attribute) else None
        full = ".".join(chain) if chain else ""
        return full if full in self.plan.new_of else None

    def _texts(self) -> None:
        reader = io.StringIO(self.module.source).readline
        for one in tokenize.generate_tokens(reader):
            if one.type in (tokenize.STRING, tokenize.COMMENT) and "resilient" in one.string:
                text = rewritten_text(self.plan, one.string)
                if text != one.string:
                    begin = self.module.starts[one.start[0] - 1] + one.start[1]
                    end = self.module.starts[one.end[0] - 1] + one.end[1]
                    self.put((begin, end), text)

    def applied(self, begin: int = 0, end: int | None = None) -> str:
        end = len(self.module.source) if end is None else end
        text, at = [], begin
        last = -1
        for (first, after), new in sorted(self.edits.items()):
            if first < begin or after > end:
                continue
            if first < last:
                report(f"OVERLAP {self.module.path} {self.module.source[first:after]!r}")
                continue
            text += [self.module.source[at:first], new]
            at = last = after
        return "".join([*text, self.module.source[at:end]])


def chain_of(node: ast.expr) -> list[str] | None:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return [node.id, *reversed(parts)]


def rewritten_text(plan: Plan, text: str) -> str:
    def dotted(match: re.Match[str]) -> str:
        full = match[0]
        parts = full.split(".")
        for count in range(len(parts), 1, -1):
            module = ".".join(parts[:count])
            if module in plan.new_of:
                rest = parts[count:]
                new = plan.new_of[module]
                if rest:
                    new, rest[0] = plan.resolve(module, rest[0])
                return ".".join([new, *rest])
        return full

    def pathed(match: re.Match[str]) -> str:
        module = match[1] + match[2].replace("/", ".")
        if module not in plan.new_of:
            return match[0]
        if match[3] == ".py" and ALL_OLD[module].name == "__init__.py":
            return match[0]
        lead = "cli/" if match[0].startswith("cli/") else ""
        return lead + plan.new_of[module].replace(".", "/") + match[3]

    def attributed(match: re.Match[str]) -> str:
        if match[1] not in plan.new_of:
            return match[0]
        module, name = plan.resolve(match[1], match[2])
        return f"{module}:{name}"

    text = re.sub(r"(resilient(?:_cli)?(?:\.\w+)+):([A-Za-z_]\w*)", attributed, text)
    if ":" in text and re.search(r"resilient[\w.]*:[A-Za-z_]", text):
        return text
    return PATHED.sub(pathed, DOTTED.sub(dotted, text))


# ---------------------------------------------------------------- texts of mutants


def mutants_of(tree: ast.Module) -> list[ast.Call]:
    return [
        one
        for one in ast.walk(tree)
        if isinstance(one, ast.Call)
        and getattr(one.func, "id", "") == "Mutant"
        and len(one.args) >= 4
        and all(isinstance(arg, ast.Constant) for arg in one.args[1:4])
    ]


def rename_mutants(plan: Plan, editor: Editor) -> None:
    """Rename what the texts of mutants name in the module that they break."""
    for call in mutants_of(editor.module.tree):
        path = call.args[1].value
        old = path.removeprefix("cli/").removesuffix(".py").replace("/", ".")
        old = old.removesuffix(".__init__")
        if old not in plan.new_of:
            report(f"MUTANT of {path}, which is not there")
            continue
        known = plan.locals.get(old, {})
        for arg in call.args[2:4]:
            text = re.sub(
                r"(?<![\w.])[A-Za-z_]\w*(?!\s*=(?!=)[^\n]*\)$)",
                lambda one: known.get(one[0], one[0]) or one[0],
                rewritten_text(plan, arg.value),
            )
            if text != arg.value:
                begin, end = editor.module.span(arg)
                editor.edits = {
                    span: new for span, new in editor.edits.items() if not begin <= span[0] < end
                }
                editor.put((begin, end), repr_of(text))


def repr_of(text: str) -> str:
    """Return a literal in double quotes, one line of text a line."""
    lines = text.splitlines(keepends=True) or [""]
    return "(" + "\n".join(json.dumps(one, ensure_ascii=False) for one in lines) + ")"


def find_mutants() -> int:
    """Take the texts of mutants from the code again where its formatting changed."""
    lost = 0
    for path in sorted((ROOT / "tests" / "mutants").glob("*.py")):
        source = path.read_text(encoding="utf-8")
        module = Module(f"<{path.name}>", path)
        edits: dict[tuple[int, int], str] = {}
        for call in mutants_of(module.tree):
            file, old = ROOT / call.args[1].value, call.args[2].value
            if not file.exists():
                lost += 1
                sys.stdout.write(f"GONE {path.name}: {call.args[1].value}\n")
                continue
            code = file.read_text(encoding="utf-8")
            if not old or code.count(old) == 1:
                continue
            found = list(pattern_of(old).finditer(code)) if code.count(old) == 0 else []
            if len(found) != 1:
                lost += 1
                count = code.count(old) or len(found)
                sys.stdout.write(f"MUTANT {path.name} {call.args[0].value!r}: {count} times\n")
                continue
            text = found[0][0]
            begin, end = module.span(call.args[2])
            edits[begin, end] = repr_of(text)
        for (begin, end), text in sorted(edits.items(), reverse=True):
            source = source[:begin] + text + source[end:]
        path.write_text(source, encoding="utf-8")
    return lost


def pattern_of(text: str) -> re.Pattern[str]:
    lead = re.match(r"\s*", text)[0]
    tail = re.search(r"\s*$", text)[0] if text.strip() else ""
    pieces = []
    for one in re.findall(r"\w+|[^\w\s]", text):
        piece = re.escape(one)
        pieces.append(rf",?\s*{piece}" if one in ")]}" else piece)
    return re.compile(
        re.escape(lead) + r"\s*,?\s*".join(pieces).replace(",,", ",") + re.escape(tail)
    )


# ---------------------------------------------------------------- contracts of import-linter

FORBIDDEN = """
[[tool.importlinter.contracts]]
name = "no torch on the storage side"
type = "forbidden"
source_modules = [
  "resilient.checkpoint", "resilient.storage", "resilient.format", "resilient.layouts",
  "resilient.goodput", "resilient.diff", "resilient.layout_repair",
]
forbidden_modules = ["torch", "pickle", "safetensors"]

[[tool.importlinter.contracts]]
name = "the storage side never imports the tensor side"
type = "forbidden"
source_modules = [
  "resilient.checkpoint", "resilient.storage", "resilient.format", "resilient.layouts",
]
forbidden_modules = [
  "resilient.state_dict", "resilient.train", "resilient.elastic", "resilient.checkpoint_engine",
]
"""


def write_contracts(page_path: str) -> int:
    """Write the layers of the page into ``pyproject.toml``."""
    text = Path(page_path).read_text()
    found = ["[tool.importlinter]", 'root_packages = ["resilient", "resilient_cli"]']
    found.append("include_external_packages = true")
    blocks = re.findall(r"```\n\[([^\]]+)\]\n(.*?)```([^`]*(?:`[^`]+`[^`\n]*)*)", text, re.DOTALL)
    for name, layers, after in blocks:
        package = name.removeprefix("inside ")
        full = package if package == "resilient_cli" else f"resilient.{package}"
        found += ["", "[[tool.importlinter.contracts]]", f'name = "{name}"', 'type = "layers"']
        if name != "one direction":
            found.append(f'containers = ["{full}"]')
        found.append("layers = [")
        found += [f'  "{one.strip()}",' for one in layers.strip().splitlines()]
        found.append("]")
        if name != "one direction":
            found.append("exhaustive = true")
        excused = [
            (one.replace("/", "."), other.replace("/", "."))
            for one, other in re.findall(r"`([\w/]+)\.py` -> `([\w/]+)\.py`", after)
        ]
        if excused:
            found.append("# Types alone: no import when the code runs.")
            found.append('unmatched_ignore_imports_alerting = "warn"')
            found.append("ignore_imports = [")
            found += [
                f'  "resilient.{one} -> resilient.{other}",'
                for one, other in dict.fromkeys(excused)
            ]
            found.append("]")
    path = ROOT / "pyproject.toml"
    before = path.read_text()
    begin, end = before.index("[tool.importlinter]"), before.index("[tool.pytest.ini_options]")
    contracts = "\n".join(found) + "\n" + FORBIDDEN + "\n"
    path.write_text(before[:begin] + contracts + before[end:])
    return 0


# ---------------------------------------------------------------- files


def emitted(plan: Plan, new: str) -> str:
    """Return the text of a new module."""
    olds = plan.parts[new]
    if len(olds) == 1 and plan.new_of[olds[0]] == new:
        old = olds[0]
        editor = Editor(plan, plan.modules[old], new)
        editor.all(plan.locals[old], skip_header=False)
        return editor.applied()
    texts, docs, mains, odd = [], [], [], []
    for old in olds:
        module = plan.modules[old]
        editor = Editor(plan, module, new)
        editor.all(plan.locals[old], skip_header=True)
        docs.append(docstring_of(editor))
        begin = module.starts[min(module.body_start, len(module.lines))]
        mains_here = [node for node in module.tree.body if is_main(node)]
        cut = module.at(mains_here[0].lineno, 0) if mains_here else len(module.source)
        for node in module.tree.body:
            if node in module.header and node.lineno > module.body_start:
                report(f"LATE import in {old}:{node.lineno}")
            dropped = [n for n in names_bound(node) if (old, n) in plan.removed]
            if dropped and isinstance(node, ast.Assign | ast.AnnAssign):
                first = module.starts[node.lineno - 1]
                editor.edits = {
                    s: t
                    for s, t in editor.edits.items()
                    if not first <= s[0] < module.span(node)[1]
                }
                editor.put((first, module.starts[node.end_lineno]), "")
        texts.append(editor.applied(begin, cut).strip("\n"))
        if mains_here:
            mains.append(editor.applied(cut).strip("\n"))
        odd += [ast.get_source_segment(module.source, one) for one in module.odd_type_only]
    header = import_lines(plan, new, list(dict.fromkeys(odd)))
    content = plan.page.content.get(new, "")
    summary = content[:1].upper() + content[1:].rstrip(".") + "."
    doc = "\n\n".join([summary, *(one for one in docs if one)])
    end = "\n" if "\n" in doc else ""
    parts = [f'"""{doc}{end}"""', "from __future__ import annotations", header]
    return "\n\n".join([*(one for one in parts if one), *texts, *mains]) + "\n"


def docstring_of(editor: Editor) -> str:
    module = editor.module
    first = module.tree.body[0] if module.tree.body else None
    if not isinstance(first, ast.Expr):
        return ""
    begin, end = module.span(first)
    return editor.applied(begin, end).strip('"').strip()


def is_main(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__main__" in ast.dump(node.test)


def import_lines(plan: Plan, new: str, odd: list[str]) -> str:
    runtime: list[str] = []
    types: list[str] = []
    groups: dict[tuple[bool, str], list[str]] = {}
    for local, (module, attr, type_only) in plan.imports[new].items():
        lines = types if type_only else runtime
        if attr == ".":
            lines.append(f"import {module}")
        elif attr is None:
            package, _, last = module.rpartition(".")
            if module in plan.new_of.values() and package:
                alias = "" if local == last else f" as {local}"
                groups.setdefault((type_only, package), []).append(f"{last}{alias}")
            else:
                lines.append(f"import {module}" + ("" if local == module else f" as {local}"))
        else:
            alias = "" if local == attr else f" as {local}"
            groups.setdefault((type_only, module), []).append(f"{attr}{alias}")
    for (type_only, module), names in groups.items():
        line = f"from {module} import {', '.join(sorted(set(names)))}"
        (types if type_only else runtime).append(line)
    if types or odd:
        if not any("TYPE_CHECKING" in one for one in runtime):
            runtime.append("from typing import TYPE_CHECKING")
        block = "\n".join(f"    {one}" for one in [*types, *odd])
        return "\n".join(runtime) + "\n\nif TYPE_CHECKING:\n" + block
    return "\n".join(runtime)


def path_of(new: str, plan: Plan) -> Path:
    base = BASES[new.partition(".")[0]]
    path = base / new.replace(".", "/")
    is_package = any(
        ALL_OLD[old].name == "__init__.py" for old in plan.parts[new] if old in ALL_OLD
    )
    return path / "__init__.py" if is_package else path.with_suffix(".py")


def main(page_path: str, write: str = "") -> int:
    if page_path == "--mutants":
        return 1 if find_mutants() else 0
    if page_path == "--contracts":
        return write_contracts(write)
    plan = Plan(read_page(Path(page_path)))
    made: dict[Path, str] = {}
    for new in plan.parts:
        made[path_of(new, plan)] = emitted(plan, new)
    for folder in READERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__).resolve():
                continue
            module = Module(f"<{path.relative_to(ROOT)}>", path)
            editor = Editor(plan, module, None)
            editor.all({}, skip_header=False)
            if path.parent.name == "mutants":
                rename_mutants(plan, editor)
            made[path] = editor.applied()
    for pattern in TEXTS:
        for path in sorted(ROOT.rglob(pattern)):
            parts = path.relative_to(ROOT).parts
            if parts[0] in (".git", ".venv", "changelog.d") or ".venv" in parts or "adr" in parts:
                continue
            text = path.read_text(encoding="utf-8")
            changed = rewritten_text(plan, text)
            if changed != text:
                made[path] = changed
    for one in sorted(set(REPORT)):
        sys.stdout.write(one + "\n")
    if write == "--write":
        for path in ALL_OLD.values():
            path.unlink()
        for path, text in made.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            package = path.parent
            while package not in (ROOT, ROOT / "cli") and package.is_relative_to(ROOT):
                init = package / "__init__.py"
                if (
                    path in made
                    and (
                        package.is_relative_to(ROOT / "resilient")
                        or package.is_relative_to(ROOT / "cli" / "resilient_cli")
                    )
                    and not init.exists()
                    and init not in made
                ):
                    init.write_text(f'"""{package.name.replace("_", " ").capitalize()}."""\n')
                package = package.parent
    sys.stdout.write(f"{len(plan.parts)} modules\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
