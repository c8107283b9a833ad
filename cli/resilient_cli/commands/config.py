"""``resilient config``: what a run is told, where each value came from, whether it is accepted."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.errors import UsageError
from resilient.showing import quoted
from resilient.train.arguments.arguments import TrainingArguments
from resilient.train.arguments.files import SUFFIXES
from resilient.train.arguments.schema import json_schema
from resilient.train.arguments.sources import file_values
from resilient.vault.registry.catalog import read_manifest
from resilient.vault.registry.references import resolve
from resilient_cli.completing import complete_ref
from resilient_cli.places import Place, Repo, open_repository, output_of, ref_and_place
from resilient_cli.render import Answer, show
from resilient_cli.views.config import Setting, checked, settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

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
All = Annotated[bool, typer.Option("--all", help="Also what stands at its default.")]


@app.command("show")
def show_(
    ctx: typer.Context,
    source: Source,
    place: Place = None,
    *,
    repo: Repo = None,
    everything: All = False,
) -> None:
    """Show the arguments that a file says, or that a checkpoint was trained with.

    Each with where it came from: a line of the file, what follows from others, or the default.

    Examples: resilient config show train.toml --all; resilient config show latest runs/mine
    """
    if _is_file(source):
        found = _settings_of_file(Path(source))
    else:
        found = _settings_of_checkpoint(source, place, repo)
    show(settings(source, found, everything=everything), output_of(ctx))


@app.command()
def check(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="A TOML, YAML or JSON file of arguments.")],
) -> None:
    """Say whether a file of arguments is accepted; exit code 78 names what is not, and its line.

    Example: resilient config check train.toml
    """
    found = _settings_of_file(file)
    show(checked(str(file), [one for one in found if one.is_said]), output_of(ctx))


@app.command()
def schema(ctx: typer.Context) -> None:
    """Write the JSON Schema of a file of arguments, for an editor.

    Example: resilient config schema > arguments.schema.json
    """
    document = json_schema(TrainingArguments)
    text = json.dumps(document, indent=2)
    show(Answer("config.schema", "schema", {"document": document}, (text,)), output_of(ctx))


def _is_file(source: str) -> bool:
    return "://" not in source and Path(source).suffix.lower() in SUFFIXES


def _settings_of_file(file: Path) -> list[Setting]:
    """Return every argument of a file, made and checked as a run would.

    Raises:
        ConfigError: the file cannot be read, or says what is not accepted.
    """
    said, places = file_values((TrainingArguments,), file)
    return list(_all(TrainingArguments.from_file(file).to_dict(), said, places))


def _settings_of_checkpoint(ref: str, place: str | None, repo: str | None) -> list[Setting]:
    """Return the arguments that a checkpoint holds.

    Raises:
        UsageError: it holds none: another program than our trainer saved it.
    """
    named, where = ref_and_place(ref, place, repo)
    store = open_repository(where, repo)
    checkpoint = resolve(store, named or "latest")
    config = {
        name: value
        for name, value in read_manifest(store, checkpoint).config.items()
        if name != "objects"  # optimizers and schedulers are no arguments
    }
    if not config:
        raise UsageError(
            f"{checkpoint} holds no arguments: it was saved without our trainer",
            hint=f"resilient ckpt inspect {checkpoint} {quoted(store.url)}",
        )
    return [Setting(name, value, str(checkpoint), is_said=True) for name, value in config.items()]


def _all(
    values: Mapping[str, Any], said: Mapping[str, Any], places: Mapping[str, str]
) -> Iterable[Setting]:
    defaults = TrainingArguments().to_dict()
    known = {one.name for one in fields(TrainingArguments) if one.init}
    for name, value in values.items():
        if name not in known:
            continue
        is_said = name in said
        origin = places.get(name, "") if is_said else _unsaid(value, defaults[name])
        yield Setting(name, value, origin, is_said=is_said)


def _unsaid(value: Any, default: Any) -> str:
    return "default" if value == default else "follows from others"
