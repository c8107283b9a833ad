"""``resilient init``: training scripts to start from."""

from __future__ import annotations

from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from resilient.errors import ConfigError
from resilient.redaction import shell_quote
from resilient_cli.output import CommandResult, show
from resilient_cli.repositories import local_path, output_of

_SUFFIXES = (".py", ".toml")


class Template(StrEnum):
    """Training loop of the script."""

    TRAINER = "trainer"
    PLAIN = "plain"
    HF = "hf"
    ACCELERATE = "accelerate"


def init(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Folder to write to.")] = Path(),
    *,
    template: Annotated[
        Template,
        typer.Option(
            help="resilient.Trainer, your own loop, the Trainer of Transformers, or accelerate."
        ),
    ] = Template.TRAINER,
) -> None:
    """Write a starter script that trains on text of this machine; existing files stay.

    Example: resilient init mine --template plain
    """
    folder = local_path(folder, "DIR", f"resilient init mine --template {template.value}")
    texts = _texts(template)
    existing = [folder / name for name in texts if (folder / name).exists()]
    if existing:
        raise ConfigError(
            f"`{existing[0]}` exists already; nothing was written",
            hint=f"resilient init {shell_quote(folder / 'new')}",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            with (folder / name).open("x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write to `{folder}`: {error.strerror}") from error
    paths = [str(folder / name) for name in texts]
    options = f" --config {shell_quote(paths[1])}" if len(paths) > 1 else ""
    command = f"resilient train {shell_quote(paths[0])}{options}"
    blocks = (*(f"wrote {path}" for path in paths), f"next: {command}")
    data = {"written": paths, "next": command}
    show(CommandResult("init", "init", data, blocks, tuple(paths)), output_of(ctx))


def _texts(template: Template) -> dict[str, str]:
    """Return the files of a template by their new names."""
    source = files("resilient_cli") / "templates"
    parts = {suffix: source / f"{template.value}{suffix}" for suffix in _SUFFIXES}
    return {
        f"train{suffix}": part.read_text(encoding="utf-8")
        for suffix, part in parts.items()
        if part.is_file()
    }
