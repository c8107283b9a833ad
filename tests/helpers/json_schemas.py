"""What the command line writes as JSON, held against the schemas that it publishes."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Any

from jsonschema import Draft202012Validator

from resilient_cli.commands.help import schema_document

if TYPE_CHECKING:
    from collections.abc import Iterator

_NAMED = re.compile(r"resilient/([a-z0-9.-]+)@1")


@cache
def validator(name: str) -> Draft202012Validator:
    """Return what validates the documents of a schema, which is one itself."""
    document = schema_document(name)
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


def documents(text: str) -> Iterator[dict[str, Any]]:
    """Yield each object that stands on a line of its own and names a schema."""
    for line in text.splitlines():
        if line.startswith('{"schema": "'):
            yield json.loads(line)


def name_of(document: dict[str, Any]) -> str:
    """Return the name of the schema that a document is of."""
    match = _NAMED.fullmatch(document["schema"])
    assert match, document["schema"]
    return match[1]


def check(document: dict[str, Any]) -> str:
    """Fail unless a document is as its schema says; return the name of the schema."""
    name = name_of(document)
    problems = [
        f"{'/'.join(map(str, detail.absolute_path)) or '(top)'}: {detail.message[:400]}"
        for error in validator(name).iter_errors(document)
        for detail in (_nearest(error.context) if error.context else [error])
    ]
    assert not problems, f"{name} is not as `resilient help json {name}` says: {problems}"
    return name


def check_output(text: str) -> set[str]:
    """Fail unless every document of an output is as its schema says; return their names."""
    return {check(document) for document in documents(text)}


def _nearest(errors: list[Any]) -> list[Any]:
    """Return the errors of the kind that has this ``type``, of all kinds if none has."""
    wrong = {error.schema_path[0] for error in errors if list(error.absolute_path) == ["type"]}
    return [error for error in errors if error.schema_path[0] not in wrong] or errors
