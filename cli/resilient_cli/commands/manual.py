"""``resilient help``: exit codes, errors by their ids, references, storage, configuration."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Annotated

import typer

from resilient.errors import UsageError
from resilient.exit_codes import EXIT_CODES
from resilient.showing import quoted
from resilient_cli.app import main
from resilient_cli.manual.schemas import schema_names
from resilient_cli.manual.topics import ENVIRONMENT, REFS, STORAGE
from resilient_cli.places import output_of
from resilient_cli.render import Answer, show
from resilient_cli.tree import COMMANDS
from resilient_cli.views.manual import (
    all_errors,
    all_schemas,
    contents,
    errors,
    exit_codes,
    one_code,
    one_error,
    one_schema,
    topic,
)

PAGES = {"refs": REFS, "storage": STORAGE, "environment": ENVIRONMENT}
JSON = "json"
TOPICS = {
    "exit-codes": "what exit codes mean; `resilient help 75` says more of one",
    "errors": "every error id; `resilient help RES-...` explains one",
    "refs": "how a checkpoint is named",
    "storage": "which URLs there are, and what they can do",
    "environment": "variables that are read, and where arguments come from",
    "json": "what --json writes; `resilient help json ckpt.ls` is the schema of one command",
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
    name, *rest = words or [""]
    if name in COMMANDS:
        return main([name, *rest, "--help"])
    if name.lower() == JSON:
        show(_json(".".join(rest).lower()), output_of(ctx))
        return 0
    if rest:
        raise UsageError(f"one topic at a time: `{name}`, `{rest[0]}`", hint="resilient help")
    found = {"": _contents, "exit-codes": exit_codes, "errors": all_errors}.get(name.lower())
    output = output_of(ctx)
    if found:
        show(found(), output)
    elif name.lower() in PAGES:
        show(topic(name.lower(), PAGES[name.lower()]), output)
    elif name in {str(one.number) for one in EXIT_CODES}:
        show(one_code(int(name)), output)
    elif name.upper() in errors():
        show(one_error(name.upper()), output)
    else:
        raise UsageError(f"no help on `{name}`", hint=_nearest(name))
    return 0


def _contents() -> Answer:
    return contents({name: lazy.help for name, lazy in COMMANDS.items()}, TOPICS)


def _json(name: str) -> Answer:
    if not name:
        return all_schemas()
    if name not in schema_names():
        close = get_close_matches(name, schema_names(), n=1)
        raise UsageError(
            f"no schema is called `{name}`", hint=" ".join(("resilient help json", *close))
        )
    return one_schema(name)


def _nearest(name: str) -> str:
    known = [*TOPICS, *COMMANDS, *errors()]
    by_fold = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), by_fold, n=1)
    return f"resilient help {quoted(by_fold[close[0]])}" if close else "resilient help"
