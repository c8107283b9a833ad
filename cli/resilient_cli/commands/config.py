"""``resilient config``: arguments of a run, their origins and their check."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.checkpoint.catalog import read_manifest
from resilient.checkpoint.refs import resolve
from resilient.errors import UsageError
from resilient.redaction import shell_quote
from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.parsing import SUFFIXES, file_values, read_argument_file
from resilient.train.arguments.value_types import json_schema
from resilient_cli.output import CommandResult, Table, show
from resilient_cli.repositories import (
    Place,
    Repo,
    complete_ref,
    open_repository,
    output_of,
    ref_and_place,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Setting:
    """Argument with its value and origin.

    Attributes:
        name: Name in Python.
        value: Value as JSON.
        origin: File and line, checkpoint, ``default`` or ``follows from others``.
        is_said: True if the file or checkpoint contains the argument.
    """

    name: str
    value: Any
    origin: str
    is_said: bool


def build_settings_result(
    source: str, all_settings: Sequence[Setting], *, shows_defaults: bool
) -> CommandResult:
    """Build the answer of ``config show``; ``shows_defaults`` adds arguments at defaults."""
    rows = [setting for setting in all_settings if shows_defaults or setting.origin != "default"]
    document = {"source": source, "settings": [asdict(setting) for setting in rows]}
    hidden_count = len(all_settings) - len(rows)
    footer_lines = (
        (f"{hidden_count} more have their default (--all shows them).",) if hidden_count else ()
    )
    return CommandResult(
        "config.show", "config", document, (_table(rows), *footer_lines), _names(rows)
    )


def build_check_result(file: str, file_settings: Sequence[Setting]) -> CommandResult:
    """Build the answer of ``config check`` for an accepted file."""
    document = {
        "file": file,
        "ok": True,
        "settings": [asdict(setting) for setting in file_settings],
    }
    text = f"{file}: {len(file_settings)} arguments, accepted."
    return CommandResult(
        "config.check", "config", document, (_table(file_settings), text), _names(file_settings)
    )


def _table(all_settings: Sequence[Setting]) -> Table:
    rows = tuple(
        (setting.name, json.dumps(setting.value), setting.origin) for setting in all_settings
    )
    return Table(("ARGUMENT", "VALUE", "FROM"), rows)


def _names(all_settings: Sequence[Setting]) -> tuple[str, ...]:
    return tuple(setting.name for setting in all_settings)


app = typer.Typer(
    help="Show, check and describe the arguments of a run.",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
Source = Annotated[
    str,
    typer.Argument(
        metavar="FILE|REF",
        help="A TOML, YAML or JSON file of arguments, or a checkpoint.",
        autocompletion=complete_ref,
    ),
]
All = Annotated[bool, typer.Option("--all", help="Also show defaults.")]


@app.command("show")
def show_(
    ctx: typer.Context,
    source: Source,
    place: Place = None,
    *,
    repo: Repo = None,
    shows_defaults: All = False,
) -> None:
    """Show the arguments of a file, or the arguments that a checkpoint was trained with.

    Each argument has its origin: a line of the file, derived from other arguments, or the default.

    Examples: resilient config show train.toml --all; resilient config show latest runs/mine
    """
    if _is_file(source):
        all_settings = _settings_of_file(Path(source))
    else:
        all_settings = _settings_of_checkpoint(source, place, repo)
    show(build_settings_result(source, all_settings, shows_defaults=shows_defaults), output_of(ctx))


@app.command()
def check(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="A TOML, YAML or JSON file of arguments.")],
) -> None:
    """Check a file of arguments; exit code 78 names each rejected argument and its line.

    Example: resilient config check train.toml
    """
    all_settings = _settings_of_file(file)
    show(
        build_check_result(str(file), [setting for setting in all_settings if setting.is_said]),
        output_of(ctx),
    )


@app.command()
def schema(ctx: typer.Context) -> None:
    """Write the JSON Schema of a file of arguments, for an editor.

    Example: resilient config schema > arguments.schema.json
    """
    document = json_schema(TrainingArguments)
    text = json.dumps(document, indent=2)
    show(CommandResult("config.schema", "schema", {"document": document}, (text,)), output_of(ctx))


def _is_file(source: str) -> bool:
    return "://" not in source and Path(source).suffix.lower() in SUFFIXES


def _settings_of_file(file: Path) -> list[Setting]:
    """Return every argument of a file, built and checked as in a run.

    Raises:
        ConfigError: The file cannot be read, or contains a value that is not accepted.
    """
    values, places = file_values((TrainingArguments,), read_argument_file(file))
    return list(_all(TrainingArguments.from_file(file).to_dict(), values, places))


def _settings_of_checkpoint(ref: str, place: str | None, repo: str | None) -> list[Setting]:
    """Return the arguments that a checkpoint contains.

    Raises:
        UsageError: The checkpoint has no arguments, because our trainer did not save it.
    """
    checkpoint_ref, url = ref_and_place(ref, place, repo)
    store = open_repository(url, repo)
    checkpoint = resolve(store, checkpoint_ref or "latest")
    config = {
        name: value
        for name, value in read_manifest(store, checkpoint).config.items()
        if name != "objects"  # Optimizers and schedulers are not arguments.
    }
    if not config:
        raise UsageError(
            f"{checkpoint} holds no arguments: it was not saved by resilient.Trainer",
            hint=f"resilient ckpt inspect {checkpoint} {shell_quote(store.url)}",
        )
    return [Setting(name, value, str(checkpoint), is_said=True) for name, value in config.items()]


def _all(
    values: Mapping[str, Any], settings_of_file: Mapping[str, Any], places: Mapping[str, str]
) -> Iterable[Setting]:
    defaults = TrainingArguments().to_dict()
    names = {field.name for field in fields(TrainingArguments) if field.init}
    for name, value in values.items():
        if name not in names:
            continue
        is_said = name in settings_of_file
        origin = places.get(name, "") if is_said else _default_origin(value, defaults[name])
        yield Setting(name, value, origin, is_said=is_said)


def _default_origin(value: Any, default: Any) -> str:
    return "default" if value == default else "follows from others"
