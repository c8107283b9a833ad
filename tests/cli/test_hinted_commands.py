"""Every command that a source, a page or an answer names is one of the tree, with its options."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from resilient.checkpoint.catalog import committed, read_manifest
from resilient.redaction import shell_quote
from resilient.storage.local import LocalStore
from resilient_cli.app import LazyGroup, build, load
from resilient_cli.survey import Survey, assess_native
from tests.helpers.cli_repositories import write_usual_run

ROOT = Path(__file__).parents[2]
TRANSCRIPTS = Path(__file__).parent / "transcripts"
SOURCES = sorted([*(ROOT / "cli").rglob("*.py"), *(ROOT / "resilient").rglob("*.py")])
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "cli").rglob("*.md")])
COMMAND = re.compile(
    r"(?:^|`|Example: |\$ |hint: |undo: |fix: )(resilient (?!key id|manifest root)[a-z][^`\n]*)",
    re.MULTILINE,
)
# The text of a command at the start of a string: all others need no look at their tree.
QUOTED_COMMAND = re.compile(r"""["'](?:\\\n)?(?:resilient|cat|ls|df|rm|mv|chmod|sudo|du) """)
HOLE = "HOLE"


@cache
def below(*names):
    """Return a command of the tree, loaded."""
    if not names:
        return build()
    group = below(*names[:-1])
    if isinstance(group, LazyGroup):
        return load(names[-1], group.table[names[-1]]) if names[-1] in group.table else None
    return getattr(group, "commands", {}).get(names[-1])


def wrong_in(text: str) -> str:
    """Return what of a command the tree does not know; nothing if it knows all."""
    told = (_wrong_in(one.strip()) for one in re.split(r";|&&|\||>", text))
    return next(filter(None, told), "")


def _wrong_in(command: str) -> str:
    if not command.startswith("resilient "):
        return ""
    try:
        words = shlex.split(command, comments=True)[1:]
    except ValueError:
        words = command.split()[1:]
    words = [
        one.strip(",.()[]") if not one.startswith("-") else one.strip(",.()]") for one in words
    ]
    path: list[str] = []
    while words and hasattr(below(*path), "commands"):
        if not re.fullmatch(r"[a-z][a-z0-9-]*", words[0]):
            return (
                "" if words[0].startswith(("-", HOLE, "{", "<")) or words[0].isupper() else words[0]
            )
        if below(*path, words[0]) is None:
            return words[0]
        path.append(words.pop(0))
    return _wrong_option(path, words)


def _wrong_option(path: list[str], words: list[str]) -> str:
    found = below(*path)
    known = {name for one in found.params for name in (*one.opts, *one.secondary_opts)}
    known |= {"--help", "-h"}
    for word in words:
        if word == "--" or word.endswith((".py", "SCRIPT")):
            break  # what follows is of others
        name = word.partition("=")[0]
        if re.fullmatch(r"--[a-z0-9][a-z0-9-]*|-[a-zA-Z]", name) and name not in known:
            return f"{' '.join(path)} {name}"
    return ""


def texts_in(path: Path):
    """Yield every text of a module that names commands, with what is computed as a hole in it."""
    source = path.read_text(encoding="utf-8")
    if "resilient " not in source:
        return
    nodes = list(ast.walk(ast.parse(source)))
    inner = {id(one) for it in nodes if isinstance(it, ast.JoinedStr) for one in it.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [one.value if isinstance(one, ast.Constant) else HOLE for one in node.values]
            yield node.lineno, "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield node.lineno, str(node.value)


def commands_in(text: str):
    return COMMAND.findall(text)


def test_commands_in_the_sources_are_of_the_tree():
    found = [
        (path, line, one)
        for path in SOURCES
        for line, text in texts_in(path)
        for one in commands_in(text)
    ]
    assert len(found) > 250, "the walk has lost its way"
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {one}: {why}"
        for path, line, one in found
        if (why := wrong_in(one))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "path", [*PAGES, *sorted(TRANSCRIPTS.glob("*.txt"))], ids=lambda one: one.stem
)
def test_commands_in_a_page_or_an_answer_are_of_the_tree(path):
    text = path.read_text(encoding="utf-8")
    wrong = [f"{one}: {why}" for one in commands_in(text) if (why := wrong_in(one))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("resilient ckpt ls s3://bucket/run", ""),
        ("resilient ckpt repaired X", "repaired"),
        ("resilient ckpt ls --everything X", "ckpt ls --everything"),
        ("resilient train --grace 3 x.py --lr 3", ""),
        ("resilient nothing", "nothing"),
    ],
)
def test_what_the_tree_knows(text, wrong):
    assert wrong_in(text) == wrong


@pytest.mark.parametrize(
    ("word", "typed"),
    [
        ("runs/mine", "runs/mine"),
        ("latest~2", "latest~2"),
        ("s3://bucket/run", "s3://bucket/run"),
        ("my run", "'my run'"),
        ("it's", "'it'\"'\"'s'"),
        ("$(reboot)", "'$(reboot)'"),
        ("~x", "'~x'"),
        ("-rf", "./-rf"),
        ("- f", "'./- f'"),
        ("", "''"),
        ("a;b", "'a;b'"),
        (Path("x y"), "'x y'"),
    ],
)
def test_a_word_is_typed_as_one(word, typed):
    assert shell_quote(word) == typed
    assert shlex.split(typed) in ([str(word)], [f"./{word}"])


ODD = "a run's $(x) -f"


@pytest.mark.parametrize("start", ["", "-"])
@pytest.mark.parametrize("words", [("logs",), ("ckpt", "cat"), ("train",)])
def test_a_hint_about_an_odd_place_is_one_command(words, start, tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    outcome = call(*words, "--", f"{start}{ODD}")
    (hint,) = re.findall(r"hint: (.*)", outcome.stderr)
    (place,) = [one for one in shlex.split(hint) if ODD in one]
    assert place.startswith("./-a" if start else "a")
    assert not wrong_in(hint)


def test_the_command_that_resumes_names_an_odd_repository_as_one_word(tmp_path):
    write_usual_run(tmp_path)
    store = LocalStore(tmp_path)
    checkpoint = committed(store)[0]
    manifest = read_manifest(store, checkpoint)
    elsewhere = SimpleNamespace(url=f"s3://bucket/{ODD}")
    verdict = assess_native(elsewhere, manifest, Survey(checkpoint, manifest, ()))
    words = shlex.split(verdict.command)
    assert words[words.index("--repo") + 1] == elsewhere.url


def test_no_command_is_put_together_without_quotes():
    wrong = []
    for path in SOURCES:
        source = path.read_text(encoding="utf-8")
        if not QUOTED_COMMAND.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.JoinedStr) or not _begins_a_command(node):
                continue
            for one in node.values:
                if isinstance(one, ast.FormattedValue) and not _is_quoted(one):
                    text = ast.unparse(one.value)
                    wrong += [f"{path.relative_to(ROOT)}:{node.lineno}: {text}"]
    assert not wrong, "\n".join(wrong)


def _begins_a_command(node: ast.JoinedStr) -> bool:
    first = node.values[0]
    text = first.value if isinstance(first, ast.Constant) else ""
    return bool(re.match(r"(?:resilient|cat|ls|df|rm|mv|chmod|sudo|du) ", str(text)))


def _is_quoted(one: ast.FormattedValue) -> bool:
    """Say whether a value is a word by its quotes, or is made of such, or is a number."""
    if one.format_spec is not None:
        return True
    text = ast.unparse(one.value)
    return (
        bool(re.match(r"shell_quote\(|typed\(|shlex\.join\(|math\.|\(lead_seconds", text))
        or text in SAFE
    )


SAFE = {
    "code",
    "checkpoint",
    "manifest.checkpoint",
    "template.value",
    "TASK",
    "needed_bytes",
    "options",
    "abandoned_hints",
    "name",
    "words",
    "pair",
    "agent.pid",
}
"""Ids, numbers, and words that were quoted where they were put together."""
