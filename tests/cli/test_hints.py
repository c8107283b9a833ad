"""A hint or a fix is a command that can be typed, an instruction, or says that there is none."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRANSCRIPTS = Path(__file__).parent / "transcripts"
SOURCES = [
    *(ROOT / "cli" / "resilient_cli").rglob("*.py"),
    *(
        one
        for folder in ("checkpoint", "layouts", "layout_repair", "diff")
        for one in (ROOT / "resilient" / folder).rglob("*.py")
    ),
]
PROGRAMS = (
    *("resilient", "kubectl", "ssh", "sudo", "curl", "docker", "export", "exec", "command", "pip"),
    *(
        "ls",
        "cat",
        "df",
        "grep",
        "openssl",
        "dmesg",
        "systemctl",
        "sinfo",
        "sacct",
        "scontrol",
        "nvidia-smi",
    ),
)
INSTRUCTIONS = ("count", "delete", "give", "increment", "set")
NONE = re.compile(r"none\b(: | here: | is needed\b)")
NAMES = ("hint", "fix")


def is_told(text: str) -> bool:
    """Return True for a command, an instruction, or a text that says why there is no command."""
    is_order = text.partition(" ")[0] in (*PROGRAMS, *INSTRUCTIONS)
    return not text or is_order or bool(NONE.match(text))


def texts_of(node: ast.expr, known: dict[str, str]) -> list[str]:
    """Return how the texts begin that an expression may be; what is computed has none."""
    within: list[ast.expr] = []
    match node:
        case ast.Constant(value=str(text)) | ast.JoinedStr(values=[ast.Constant(value=text), *_]):
            return [text]
        case ast.Name(id=name) if name in known:
            return [known[name]]
        case ast.IfExp(body=one, orelse=other):
            within = [one, other]
        case ast.BoolOp(values=values):
            within = values
    return [text for one in within for text in texts_of(one, known)]


def told_in(path: Path) -> list[tuple[int, str]]:
    """Return what a module gives as hint or fix: by keyword, or by a variable of that name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    known = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    found = []
    for node in ast.walk(tree):
        values = []
        if isinstance(node, ast.keyword) and node.arg in NAMES:
            values.append(node.value)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            values += [node.value] if node.targets[0].id in NAMES else []
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple):
            pairs = zip(node.targets[0].elts, getattr(node.value, "elts", ()), strict=False)
            values += [one for name, one in pairs if getattr(name, "id", "") in NAMES]
        found += [(one.lineno, text) for one in values for text in texts_of(one, known)]
    return found


def test_hints_in_the_source_are_commands():
    found = [(path, line, text) for path in SOURCES for line, text in told_in(path)]
    assert len(found) > 100, "the walk has lost its way"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, line, text in found
        if not is_told(text)
    ]
    assert not wrong, "\n".join(wrong)


def helped(text: str) -> list[str]:
    """Return what a transcript says to do."""
    found = re.findall(
        r"^ *(?:hint(?:: clock|: budget)?|undo|fix(?: for [^:]*)?): (.*)$", text, re.MULTILINE
    )
    for line in text.splitlines():
        if line.startswith('{"'):
            found += _fields(json.loads(line))
    return found


def _fields(value) -> list[str]:
    if isinstance(value, dict):
        own = [one for name, one in value.items() if name in NAMES and isinstance(one, str)]
        return own + [text for one in value.values() for text in _fields(one)]
    return [text for one in value for text in _fields(one)] if isinstance(value, list) else []


@pytest.mark.parametrize("path", sorted(TRANSCRIPTS.glob("*.txt")), ids=lambda one: one.stem)
def test_hints_in_a_transcript_are_commands(path):
    wrong = [one for one in helped(path.read_text(encoding="utf-8")) if not is_told(one)]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("resilient ckpt ls s3://bucket/run", True),
        ("none: its tool keeps none", True),
        ("none is needed: no resume reads it", True),
        ("set host_bytes_max=1024 or more", True),
        ("", True),
        ("look at the URL; no run was ever started there", False),
        ("name another file", False),
        ("near it: config.json", False),
        ("nonetheless: go on", False),
    ],
)
def test_what_is_a_command(text, is_right):
    assert is_told(text) is is_right
