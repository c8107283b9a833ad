"""``resilient help``: exit codes, errors, topics and JSON schemas.

The message of an error describes the current case. The explanation of an error code describes the
usual cause, the data that is safe, and the next command. A help topic belongs to no single command.
Each command has a JSON schema, and all errors share one schema. Programs and our tests can validate
the output of commands against the schemas. The schemas are files of the package, and are read on
demand.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.errors import EXIT_CODES, OWN, UNKNOWN, ResilientError, UsageError
from resilient.redaction import shell_quote
from resilient_cli.app import main
from resilient_cli.command_tree import COMMANDS
from resilient_cli.output import CommandResult, KeyValues, Table, show
from resilient_cli.repositories import output_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SAFE = "Safe: "
_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of one ``RES-`` code.

    Attributes:
        cause: Usual cause.
        safe: Data that was not changed or not lost.
        remedies: Next steps, the most likely first. A step is a command if a command can do it.
    """

    cause: str
    safe: str
    remedies: tuple[str, ...]


@cache
def explanations() -> Mapping[str, Explanation]:
    """Return the explanation of every ``RES-`` code."""
    texts = {}
    for section in _read("help_texts/errors.md").split("\n## ")[1:]:
        code, cause, safe, remedies = section.strip().split("\n\n")
        lines = tuple(line.removeprefix("- ") for line in remedies.splitlines())
        texts[code] = Explanation(cause, safe.removeprefix(_SAFE), lines)
    return texts


def topic_blocks(name: str) -> tuple[Table | str, ...]:
    """Return the paragraphs and tables of a help topic.

    Raises:
        FileNotFoundError: No topic has this name.
    """
    paragraphs = _read(f"help_texts/{name}.md").strip().split("\n\n")
    return tuple(
        _table(paragraph) if paragraph.startswith("|") else paragraph for paragraph in paragraphs
    )


def _table(text: str) -> Table:
    columns, _, *rows = [_cells(line) for line in text.splitlines()]
    return Table(columns, tuple(rows))


def _cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def schema_names() -> tuple[str, ...]:
    """Return the names of all schemas, sorted: ``ckpt.ls`` for ``resilient/ckpt.ls@1``."""
    names = [file.name for file in (files("resilient_cli") / "schemas").iterdir()]
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in names if name.endswith(_SUFFIX)))


def schema_text(name: str) -> str:
    """Return the text of the JSON Schema (draft 2020-12) with a name of :func:`schema_names`.

    Raises:
        KeyError: No schema has this name.
    """
    if name not in schema_names():
        raise KeyError(name)
    return _read(f"schemas/{name}{_SUFFIX}")


def schema_document(name: str) -> dict[str, Any]:
    """Return the JSON Schema of this name as a value."""
    document: dict[str, Any] = json.loads(schema_text(name))
    return document


def _read(path: str) -> str:
    return (files("resilient_cli") / path).read_text(encoding="utf-8")


def errors() -> dict[str, type[ResilientError]]:
    """Return every error of the library by its id."""
    return {error.code: error for error in _below(ResilientError)}


def exit_codes() -> CommandResult:
    """Build the table of exit codes."""
    rows = tuple(
        (str(code.number), f"EX_{code.name}" if code.name else "-", code.brief, code.scheduler)
        for code in EXIT_CODES
    )
    table = Table(("CODE", "NAME", "MEANING", "A SCHEDULER SHOULD"), rows)
    document = {"exit_codes": [asdict(code) for code in EXIT_CODES], "note": f"{UNKNOWN} {OWN}"}
    ids = tuple(row[0] for row in rows)
    return CommandResult("help", "exit-codes", document, (table, UNKNOWN, OWN), ids)


def describe_exit_code(number: int) -> CommandResult:
    """Build the answer about one exit code and the errors that end with it."""
    exit_code_found = next(exit_code for exit_code in EXIT_CODES if exit_code.number == number)
    ids = tuple(code for code, error in errors().items() if error.exit_code == number)
    facts = (
        ("exit code", str(number)),
        ("name", f"EX_{exit_code_found.name}" if exit_code_found.name else "-"),
        ("meaning", exit_code_found.meaning),
        ("a scheduler should", exit_code_found.scheduler),
        ("errors", ", ".join(ids) or "-"),
    )
    return CommandResult(
        "help", "exit-code", {**asdict(exit_code_found), "errors": ids}, (KeyValues(facts),), ids
    )


def all_errors() -> CommandResult:
    """Build the table of errors: id, exit code and meaning."""
    error_by_code = errors()
    rows = tuple(
        (code, str(error.exit_code), _description_of(error))
        for code, error in error_by_code.items()
    )
    documents = [
        {"code": code, "exit": int(number), "meaning": text} for code, number, text in rows
    ]
    table = Table(("ID", "EXIT", "MEANING"), rows)
    return CommandResult("help", "errors", {"errors": documents}, (table,), tuple(error_by_code))


def describe_error(code: str) -> CommandResult:
    """Build the explanation of one id of :func:`errors`."""
    error, explanation = errors()[code], explanations()[code]
    facts = KeyValues(
        (
            ("id", code),
            ("exit code", str(error.exit_code)),
            ("meaning", _description_of(error)),
            ("cause", explanation.cause),
            ("safe", explanation.safe),
            *(
                ("next" if not nth else "or", remedy)
                for nth, remedy in enumerate(explanation.remedies)
            ),
        )
    )
    document = {
        "code": code,
        "exit": error.exit_code,
        "meaning": _description_of(error),
        **asdict(explanation),
    }
    return CommandResult("help", "error", document, (facts,), (code,))


def topic(name: str, blocks: tuple[Table | str, ...]) -> CommandResult:
    """Build the answer with one topic."""
    rows = [
        dict(zip(map(str.lower, block.columns), row, strict=True))
        for block in blocks
        if isinstance(block, Table)
        for row in block.rows
    ]
    texts = [block for block in blocks if isinstance(block, str)]
    document = {"topic": name, "rows": rows, "texts": texts}
    return CommandResult(
        "help", "topic", document, blocks, tuple(next(iter(row.values())) for row in rows)
    )


def all_schemas() -> CommandResult:
    """Build the list of all schemas and their descriptions."""
    descriptions = {name: str(schema_document(name)["description"]) for name in schema_names()}
    table = Table(("SCHEMA", "WHAT IT DESCRIBES"), tuple(descriptions.items()))
    description, example = topic_blocks(JSON)
    blocks = (description, table, example)
    return CommandResult("help", "schemas", {"schemas": descriptions}, blocks, tuple(descriptions))


def describe_schema(name: str) -> CommandResult:
    """Build the answer with one existing schema, as in its file."""
    document = {"name": name, "document": schema_document(name)}
    return CommandResult("help", "schema", document, (schema_text(name).rstrip("\n"),), (name,))


def contents(commands: Mapping[str, str], topics: Mapping[str, str]) -> CommandResult:
    """Build the list of commands and topics."""
    tables = (
        Table(("COMMAND", "WHAT IT DOES"), tuple(commands.items())),
        Table(("TOPIC", "WHAT IT SAYS"), tuple(topics.items())),
    )
    document = {"commands": dict(commands), "topics": dict(topics)}
    return CommandResult("help", "contents", document, tables, (*commands, *topics))


def _description_of(error: type[ResilientError]) -> str:
    """Return the docstring of an error up to the description of its attributes."""
    text = " ".join((error.__doc__ or "").split())
    return text.partition("; ``")[0].rstrip(".").replace("``", "`") + "."


def _below(base: type[ResilientError]) -> Iterator[type[ResilientError]]:
    yield base
    for child in base.__subclasses__():
        if child.__module__ == ResilientError.__module__:
            yield from _below(child)


PAGES = ("refs", "storage", "environment")
JSON = "json"
TOPICS = {
    "exit-codes": "exit codes and their meaning; `resilient help 75` explains one",
    "errors": "every error id; `resilient help RES-...` explains one",
    "refs": "names of checkpoints",
    "storage": "supported URLs and their features",
    "environment": "environment variables, and the sources of arguments",
    "json": "output of --json; `resilient help json ckpt.ls` is the schema of one command",
}


def manual(
    ctx: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TOPIC]", help="A topic, a command, an exit code, or the id of an error."
        ),
    ] = None,
) -> int:
    """Explain a topic, a command or the id of an error.

    Example: resilient help RES-STORE-EXCL
    """
    name, *more_words = words or [""]
    if name in COMMANDS:
        return main([name, *more_words, "--help"])
    if name.lower() == JSON:
        show(_json(".".join(more_words).lower()), output_of(ctx))
        return 0
    if more_words:
        raise UsageError(f"one topic at a time: `{name}`, `{more_words[0]}`", hint="resilient help")
    builder = {"": _contents, "exit-codes": exit_codes, "errors": all_errors}.get(name.lower())
    output = output_of(ctx)
    if builder:
        show(builder(), output)
    elif name.lower() in PAGES:
        show(topic(name.lower(), topic_blocks(name.lower())), output)
    elif name in {str(code.number) for code in EXIT_CODES}:
        show(describe_exit_code(int(name)), output)
    elif name.upper() in errors():
        show(describe_error(name.upper()), output)
    else:
        raise UsageError(f"no help on `{name}`", hint=_nearest(name))
    return 0


def _contents() -> CommandResult:
    return contents({name: lazy.help for name, lazy in COMMANDS.items()}, TOPICS)


def _json(name: str) -> CommandResult:
    if not name:
        return all_schemas()
    if name not in schema_names():
        similar_names = get_close_matches(name, schema_names(), n=1)
        raise UsageError(
            f"no schema is called `{name}`", hint=" ".join(("resilient help json", *similar_names))
        )
    return describe_schema(name)


def _nearest(name: str) -> str:
    names = [*TOPICS, *COMMANDS, *errors()]
    by_fold = {topic.lower(): topic for topic in names}
    similar_names = get_close_matches(name.lower(), by_fold, n=1)
    return (
        f"resilient help {shell_quote(by_fold[similar_names[0]])}"
        if similar_names
        else "resilient help"
    )
