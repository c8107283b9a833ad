"""The program `resilient`: its commands, its global options, its edge.

Commands are imported when they are called, so that ``--help`` and ``ckpt`` never pay for torch.
The edge, :func:`main`, is the one place where errors become text and exit codes.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperGroup

from resilient.errors import ResilientError
from resilient.exit_codes import EXIT_CODE_FILE, EXIT_CODES, UNKNOWN
from resilient.showing import quoted
from resilient.storage.urls import redacted_text
from resilient_cli.helping import HelpContext
from resilient_cli.hinting import another_way
from resilient_cli.lengths import WITHIN_SECONDS, seconds_of
from resilient_cli.render import Format, Output, show_error
from resilient_cli.streams import leave_the_pipe, put, speak_plainly, write_nowhere_if_closed
from resilient_cli.tree import COMMANDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from resilient_cli.tree import LazyCommand

EXIT_INTERRUPTED = 130
PROGRAM = "resilient"
COMPLETE_VARIABLE = "_RESILIENT_COMPLETE"

_CODES = ", ".join(
    f"{one.number} {one.brief}" for one in EXIT_CODES if one.number < EXIT_INTERRUPTED
)
_HELP = f"""Train PyTorch models to the end on machines that will fail, bit for bit.

stdout is only the answer; messages go to stderr. Exit codes are the same for all commands:
{_CODES}. {UNKNOWN}
"""


# The base of what the parser raises; it changed its home between releases of Typer.
_PARSER_ERROR: type[Exception] = next(
    base for base in reversed(typer.BadParameter.__mro__) if hasattr(base, "format_message")
)


class LazyGroup(TyperGroup):
    """A group whose commands are place holders until one of them is called.

    Attributes:
        table: its commands by name.
    """

    table: Mapping[str, LazyCommand]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Put the real command in the place holder's place."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load(name, self.table[name]) if name else None, rest


def load(name: str, lazy: LazyCommand) -> Any:
    """Import a command of a table and return it with the global options added."""
    if lazy.commands:
        return _group(name, lazy.help, lazy.commands)
    found = getattr(import_module(lazy.module), lazy.attribute)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, context_settings=dict(lazy.context_settings))(found)
        found = alone
    command = typer.main.get_command(found)
    command.name = name
    return _accept_global_options(command)


def build() -> Any:
    """Return the whole command, its parts not loaded yet."""
    if COMPLETE_VARIABLE in os.environ:
        completion_init()
    settings = {"help_option_names": ["-h", "--help"]}
    return _group(PROGRAM, _HELP, COMMANDS, add_completion=True, context_settings=settings)


def _group(name: str, said: str, table: Mapping[str, LazyCommand], **settings: Any) -> Any:
    """Return a group of place holders."""
    app = typer.Typer(
        name=name,
        cls=LazyGroup,
        help=said,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **{"add_completion": False, **settings},
    )
    app.callback()(_nothing)
    for one, lazy in table.items():
        app.command(one, help=lazy.help, short_help=lazy.help)(_nothing)
    group = typer.main.get_command(app)
    group.table = table  # type: ignore[attr-defined]
    return _accept_global_options(group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code; errors become text here and nowhere else.

    ``RESILIENT_EXIT_CODE_FILE`` names a file that gets the code too: a starter of several programs
    may tell only one code of them all.
    """
    # Programs that a script calls are others.
    told = os.environ.pop(EXIT_CODE_FILE, "")
    status = _main(arguments)
    if told:
        with suppress(OSError), open(told, "w", encoding="utf-8") as file:  # noqa: PTH123 - at once
            file.write(f"{status}\n")
    return status


def _main(arguments: Sequence[str] | None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    output = Output()
    write_nowhere_if_closed()
    speak_plainly(sys.stdout, sys.stderr)
    within = WITHIN_SECONDS.set(WITHIN_SECONDS.get())
    try:
        status = build().main(given, prog_name=PROGRAM, obj=output, standalone_mode=False)
    except ResilientError as error:
        hint = another_way(error.hint, given, error.code)
        return _fail(error, output, error.exit_code, error.code, error.message, hint)
    except _PARSER_ERROR as error:
        return _wrong_usage(error, output, given)
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except SystemExit as ended:
        # So the parser leaves a pipe that nobody reads any more.
        if not isinstance(ended.__context__, BrokenPipeError):
            raise
        leave_the_pipe()
        status = 0
    except Exception as error:  # noqa: BLE001 - the edge: nothing leaves it as a traceback
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(error, output, 1, "RES-ERROR", text, _where_it_was(error))
    finally:
        WITHIN_SECONDS.reset(within)
    return status if isinstance(status, int) else 0


def _nothing() -> None:
    """Stand in for a command that is not loaded, and for what the group itself does."""


def _accept_global_options(command: Any) -> Any:
    """Add the global options to a command and to all below it, so that they go anywhere.

    The same is with how their help is set.
    """
    command.context_class = HelpContext
    taken = {option for parameter in command.params for option in parameter.opts}
    for parameter in _global_parameters():
        # How patient a run is with its storage is said by its script.
        is_of_others = command.name == "train" and parameter.name == "timeout"
        if taken.isdisjoint(parameter.opts) and not is_of_others:
            command.params.append(parameter)
    if not isinstance(command, LazyGroup):
        for below in getattr(command, "commands", {}).values():
            # Typer cuts what it takes from the docstring itself.
            below.short_help = below.short_help or (below.help or "").partition("\n\n")[0]
            _accept_global_options(below)
    return command


def _global_parameters() -> list[Any]:
    """Return new parameters that write to the context's `Output` and not to a function."""
    options = typer.Typer(add_completion=False, rich_markup_mode=None)
    options.command()(_global_options)
    parameters: list[Any] = typer.main.get_command(options).params
    for parameter in parameters:
        parameter.expose_value = False
        parameter.callback = _remember
    return parameters


def _global_options(  # noqa: PLR0913 - the global options
    *,
    output_format: Annotated[
        Format | None, typer.Option("--format", help="How to write the answer.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only ids, one per line.")] = False,
    debug: Annotated[bool, typer.Option("-v", "--debug", help="Show tracebacks.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Never use colours.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask: go on.")] = False,
    no_input: Annotated[bool, typer.Option("--no-input", help="Never ask.")] = False,
    timeout: Annotated[
        str, typer.Option(metavar="30s", help="Ask storage again for so long; else for 60s.")
    ] = "",
) -> None:
    """Declare the global options; Typer turns the signature into parameters."""


def _remember(ctx: Any, parameter: Any, value: Any) -> None:
    """Write a global option's value into the `Output` that the edge handed in."""
    output: Output = ctx.find_root().obj
    if parameter.name == "output_format" and value is not None:
        output.format = Format(value)
    elif parameter.name == "json" and value:
        output.format = Format.JSON
    elif parameter.name == "no_color" and value:
        output.color = False
    elif parameter.name == "no_input" and value:
        output.asks = False
    elif parameter.name == "yes" and value:
        output.agrees = True
    elif parameter.name == "timeout" and value:
        WITHIN_SECONDS.set(seconds_of(value, "--timeout"))
    elif parameter.name in ("quiet", "debug") and value:
        setattr(output, parameter.name, True)


def _wrong_usage(error: Any, output: Output, given: Sequence[str]) -> int:
    """Report what the parser refused; it may have stopped before it met ``--json``."""
    if type(error).__name__ == "NoArgsIsHelpError":
        put(error.ctx.get_help() + "\n", sys.stderr)
        return int(error.exit_code)
    if "--json" in given or "--format=json" in given:
        output.format = Format.JSON
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "resilient"
    message, hint = error.format_message().rstrip("."), f"{path} --help"
    option = getattr(error, "option_name", None)
    lazy = COMMANDS.get(path.rpartition(" ")[2])
    if option and lazy and option in lazy.foreign:
        # What is spelled alike has nothing to do with it.
        message, hint = f"no option `{option}`: only torchrun has it", lazy.foreign[option]
    return _fail(error, output, error.exit_code, "RES-USAGE", message, hint)


def _fail(
    error: BaseException, output: Output, status: int, code: str, message: str, hint: str
) -> int:
    if output.debug:
        put(redacted_text("".join(traceback.format_exception(error))), sys.stderr)
    show_error({"exit": status, "code": code, "message": message, "hint": hint}, output)
    return status


def _where_it_was(error: BaseException) -> str:
    """Keep the traceback of what nobody foresaw, and say where."""
    text = redacted_text("".join(traceback.format_exception(error)))
    try:
        number, path = tempfile.mkstemp(prefix="resilient-", suffix=".log")
        os.close(number)
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""  # --debug shows it
    return f"cat {quoted(path)}"
