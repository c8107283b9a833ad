"""``resilient completion``: completion scripts for shells."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import get_completion_script

from resilient_cli.app import COMPLETE_VARIABLE, PROGRAM
from resilient_cli.output import CommandResult, show
from resilient_cli.repositories import output_of


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"
    PWSH = "pwsh"


def completion(
    ctx: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="Shell to write the script for.")],
) -> None:
    """Write the completion script of a shell to stdout.

    Example: source <(resilient completion bash)
    """
    script = get_completion_script(
        prog_name=PROGRAM, complete_var=COMPLETE_VARIABLE, shell=shell.value
    )
    document = {"shell": shell.value, "script": script}
    show(CommandResult("completion", "script", document, (script,)), output_of(ctx))
