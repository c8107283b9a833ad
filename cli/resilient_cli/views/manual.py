"""Exit codes, errors and topics as answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from resilient.errors import ResilientError
from resilient.exit_codes import EXIT_CODES, OWN, UNKNOWN
from resilient_cli.manual.explanations import EXPLANATIONS
from resilient_cli.manual.schemas import schema_document, schema_names, schema_text
from resilient_cli.render import Answer, Facts, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_JSON = (
    "With --json each answer is one object on a line of stdout, and an error is the last line of "
    "stderr. `schema` names its schema and `type` its kind; fields are added, never taken away."
)


def errors() -> dict[str, type[ResilientError]]:
    """Return every error of the library by its id."""
    return {one.code: one for one in _below(ResilientError)}


def exit_codes() -> Answer:
    """Return the table of exit codes."""
    rows = tuple(
        (str(one.number), f"EX_{one.name}" if one.name else "-", one.brief, one.scheduler)
        for one in EXIT_CODES
    )
    table = Table(("CODE", "NAME", "MEANING", "A SCHEDULER SHOULD"), rows)
    document = {"exit_codes": [asdict(one) for one in EXIT_CODES], "note": f"{UNKNOWN} {OWN}"}
    ids = tuple(row[0] for row in rows)
    return Answer("help", "exit-codes", document, (table, UNKNOWN, OWN), ids)


def one_code(number: int) -> Answer:
    """Return one row of the table, and the errors that end in it."""
    found = next(one for one in EXIT_CODES if one.number == number)
    ids = tuple(code for code, one in errors().items() if one.exit_code == number)
    facts = (
        ("exit code", str(number)),
        ("name", f"EX_{found.name}" if found.name else "-"),
        ("meaning", found.meaning),
        ("a scheduler should", found.scheduler),
        ("errors", ", ".join(ids) or "-"),
    )
    return Answer("help", "exit-code", {**asdict(found), "errors": ids}, (Facts(facts),), ids)


def all_errors() -> Answer:
    """Return every id, its exit code and what it says."""
    known = errors()
    rows = tuple((code, str(one.exit_code), _said(one)) for code, one in known.items())
    listed = [{"code": code, "exit": int(number), "meaning": text} for code, number, text in rows]
    table = Table(("ID", "EXIT", "MEANING"), rows)
    return Answer("help", "errors", {"errors": listed}, (table,), tuple(known))


def one_error(code: str) -> Answer:
    """Return what there is to know about an id that :func:`errors` holds."""
    error, more = errors()[code], EXPLANATIONS[code]
    facts = Facts(
        (
            ("id", code),
            ("exit code", str(error.exit_code)),
            ("meaning", _said(error)),
            ("cause", more.cause),
            ("safe", more.safe),
            *(("next" if not nth else "or", one) for nth, one in enumerate(more.remedies)),
        )
    )
    document = {"code": code, "exit": error.exit_code, "meaning": _said(error), **asdict(more)}
    return Answer("help", "error", document, (facts,), (code,))


def topic(name: str, blocks: tuple[Table | str, ...]) -> Answer:
    """Return one page of :mod:`resilient_cli.manual.topics`."""
    rows = [
        dict(zip(map(str.lower, block.columns), row, strict=True))
        for block in blocks
        if isinstance(block, Table)
        for row in block.rows
    ]
    texts = [block for block in blocks if isinstance(block, str)]
    document = {"topic": name, "rows": rows, "texts": texts}
    return Answer(
        "help", "topic", document, blocks, tuple(next(iter(row.values())) for row in rows)
    )


def all_schemas() -> Answer:
    """Return the name of every schema of :mod:`resilient_cli.manual.schemas`, and what it is of."""
    known = {name: str(schema_document(name)["description"]) for name in schema_names()}
    table = Table(("SCHEMA", "WHAT IT DESCRIBES"), tuple(known.items()))
    said = (_JSON, table, "Example: resilient help json ckpt.ls > ckpt.ls.schema.json")
    return Answer("help", "schemas", {"schemas": known}, said, tuple(known))


def one_schema(name: str) -> Answer:
    """Return a schema that is there, as its file has it."""
    document = {"name": name, "document": schema_document(name)}
    return Answer("help", "schema", document, (schema_text(name).rstrip("\n"),), (name,))


def contents(commands: Mapping[str, str], topics: Mapping[str, str]) -> Answer:
    """Return what help there is."""
    tables = (
        Table(("COMMAND", "WHAT IT DOES"), tuple(commands.items())),
        Table(("TOPIC", "WHAT IT SAYS"), tuple(topics.items())),
    )
    document = {"commands": dict(commands), "topics": dict(topics)}
    return Answer("help", "contents", document, tables, (*commands, *topics))


def _said(error: type[ResilientError]) -> str:
    """Return the first sentence of an error's docstring, without its talk of attributes."""
    text = " ".join((error.__doc__ or "").split())
    return text.partition("; ``")[0].rstrip(".").replace("``", "`") + "."


def _below(base: type[ResilientError]) -> Iterator[type[ResilientError]]:
    yield base
    for child in base.__subclasses__():
        if child.__module__ == ResilientError.__module__:
            yield from _below(child)
