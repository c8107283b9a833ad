"""The Typer application: global options, lazy commands, help layout and error output.

Only :func:`main` turns errors into text and exit codes. The module of a command is imported when
the command is called. Therefore ``--help`` and ``ckpt`` never import torch.

Typer's own help needs at least 50 columns and breaks words at hyphens, so that an option in an
example cannot be copied. The formatter of this module fits every line into the terminal and cuts no
word. On a narrow terminal, the meaning of an option is on the line below the option.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import textwrap
import traceback
from contextlib import suppress
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.completion import completion_init
from typer.core import TyperCommand, TyperGroup

from resilient.errors import EXIT_CODE_FILE, EXIT_CODES, UNKNOWN, RepositoryNotFound, ResilientError
from resilient.redaction import shell_quote
from resilient.storage.urls import redacted_text
from resilient_cli.command_tree import COMMANDS
from resilient_cli.durations import WITHIN_SECONDS, parse_duration
from resilient_cli.output import (
    Format,
    Output,
    escape_unencodable_text,
    ignore_broken_pipe,
    put,
    replace_closed_streams,
    show_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from resilient_cli.command_tree import LazyCommand

_COLUMNS_MAX = 80
_MARGIN = 2
_TWO_COLUMNS_MIN = 60
_TERM_MAX = 30
_GAP = 2
_BELOW = 4

# Base class of help contexts. Its module differs between releases of Typer.
_CONTEXT: Any = TyperGroup.context_class
_FORMATTER: Any = _CONTEXT.formatter_class


class HelpFormatter(_FORMATTER):  # type: ignore[misc]  # the base differs between releases
    """Help formatter that fits the width of the terminal."""

    def __init__(self, *_: Any, **__: Any) -> None:
        columns = min(shutil.get_terminal_size().columns, _COLUMNS_MAX)
        super().__init__(width=max(columns - _MARGIN, 1))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """Write the usage line of a command."""
        usage_prefix = f"{'Usage: ' if prefix is None else prefix}{prog} "
        is_short = len(usage_prefix) + 20 <= self.width
        indent = " " * (len(usage_prefix) if is_short else _BELOW)
        lines = _fold(args, self.width, indent)
        if is_short and lines:
            lines[0] = usage_prefix + lines[0].lstrip()
        else:
            lines = [*_fold(usage_prefix.strip(), self.width, "", _BELOW), *lines]
        self._write_lines(lines)

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        self._write_lines(_paragraphs(text, self.width, " " * self.current_indent))

    def write_dl(
        self, rows: Sequence[tuple[str, str]], col_max: int = _TERM_MAX, col_spacing: int = _GAP
    ) -> None:
        """Write terms beside their meanings, or above their meanings on a narrow terminal."""
        rows = list(rows)
        term_width = min(max((len(term) for term, _ in rows), default=0), col_max) + col_spacing
        is_narrow = self.width < _TWO_COLUMNS_MIN
        start = self.current_indent + (_BELOW if is_narrow else term_width)
        for term, meaning in rows:
            term_lines = _fold(
                term, self.width if is_narrow else 0, " " * self.current_indent, _BELOW
            )
            lines = list(_paragraphs(meaning, self.width, " " * start))
            is_beside = not is_narrow and len(term) <= term_width - col_spacing
            if is_beside and lines:
                lines[0] = term_lines[0].ljust(start) + lines[0].lstrip()
                term_lines = []
            self._write_lines([*term_lines, *lines])

    def _write_lines(self, lines: Sequence[str] | Iterator[str]) -> None:
        self.write("".join(f"{line}\n" for line in lines))


class HelpContext(_CONTEXT):  # type: ignore[misc]  # the base differs between releases
    """Parser context that formats help with :class:`HelpFormatter`."""

    formatter_class = HelpFormatter


class _Wrapper(textwrap.TextWrapper):
    """Text wrapper that breaks lines between words and after each ``|`` of a choice."""

    wordsep_simple_re = re.compile(r"([\t\n ]+|(?<=\|))")


def _paragraphs(text: str, width: int, indent: str) -> Iterator[str]:
    for number, paragraph in enumerate(block for block in text.split("\n\n") if block.strip()):
        if number:
            yield ""
        yield from _fold(" ".join(paragraph.split("\n")), width, indent)


def _fold(text: str, width: int, indent: str, more: int = 0) -> list[str]:
    """Return the lines of a text at a width; a width of 0 gives one line."""
    if not width:
        return [indent + text]
    wrapper = _Wrapper(
        width,
        initial_indent=indent,
        subsequent_indent=indent + " " * more,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapper.wrap(text)


_LISTING = ["resilient", "ckpt", "ls"]


def drop_useless_hint(hint: str, arguments: Sequence[str], code: str) -> str:
    """Return the hint, or a more useful hint if the hint repeats the failed command.

    Args:
        hint: Hint of the error.
        arguments: Command line without the program name.
        code: Code of the error.
    """
    try:
        words = shlex.split(hint)
    except ValueError:
        return hint
    positional = [word for word in arguments if not word.startswith("-")]
    # Most errors about a repository suggest `ckpt ls`. After a failed `ckpt ls`, doctor helps more.
    if words[:3] == _LISTING == ["resilient", *positional[:2]] and words[3:4] != ["--help"]:
        return (
            f"resilient doctor --repo {shell_quote(words[3])}" if words[3:] else _help_command(code)
        )
    if words[:3] == ["resilient", *positional[:2]] and words[3:] and _are_options(words[3:]):
        # The hint adds options to the same command: keep all other words that the user typed.
        hint_options = words[3:]
        better = [*_without(arguments, hint_options), *hint_options]
        is_same = sorted(better) == sorted(arguments)
        return _help_command(code) if is_same else shlex.join(["resilient", *better])
    return _help_command(code) if words == ["resilient", *arguments] else hint


def _are_options(words: Sequence[str]) -> bool:
    is_plain = all(word.startswith("--") or word.isdigit() for word in words)
    return words[0].startswith("--") and is_plain and "--help" not in words


def _without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return a command line without the given options and their values; the caller appends them.

    Args:
        arguments: Command line.
        options: Options that :func:`_are_options` accepts; a number is the value of an option.
    """
    takes_value = {name: not value.startswith("-") for name, value in pairwise([*options, "--"])}
    remaining = []
    iterator = iter(arguments)
    for word in iterator:
        name, is_joined, _ = word.partition("=")
        if not name.startswith("--") or name not in takes_value:
            remaining.append(word)
        elif takes_value[name] and not is_joined:
            next(iterator, None)
    return remaining


def _help_command(code: str) -> str:
    return f"resilient help {code}"


EXIT_INTERRUPTED = 130
PROGRAM = "resilient"
COMPLETE_VARIABLE = "_RESILIENT_COMPLETE"

_CODES = ", ".join(
    f"{code.number} {code.brief}" for code in EXIT_CODES if code.number < EXIT_INTERRUPTED
)
_HELP = f"""Train PyTorch models to the end on machines that fail, with bit-for-bit equal results.

stdout holds only the answer; messages go to stderr. All commands use the same exit codes:
{_CODES}. {UNKNOWN}
"""


# Base class of the parser's errors. Its module differs between releases of Typer.
_PARSER_ERROR: type[Exception] = next(
    base for base in reversed(typer.BadParameter.__mro__) if hasattr(base, "format_message")
)


class LazyGroup(TyperGroup):
    """Group whose commands are placeholders until one of them is called.

    Attributes:
        table: Commands by name.
    """

    table: Mapping[str, LazyCommand]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Resolve the name and replace the placeholder with the real command."""
        name, _, remaining = super().resolve_command(ctx, args)
        return name, load(name, self.table[name]) if name else None, remaining


def load(name: str, lazy: LazyCommand) -> Any:
    """Import a command of a table and return it with the global options added."""
    if lazy.commands:
        return _group(name, lazy.help, lazy.commands)
    target = getattr(import_module(lazy.module), lazy.attribute)
    return _command(name, target, frozenset(lazy.context_settings.items()))


@cache
def _command(name: str, target: Any, settings: frozenset[tuple[str, Any]]) -> Any:
    """Return the command of a function or of a Typer group."""
    if not isinstance(target, typer.Typer):
        single_command_app = typer.Typer(add_completion=False, rich_markup_mode=None)
        single_command_app.command(name, context_settings=dict(settings))(target)
        target = single_command_app
    command = typer.main.get_command(target)
    command.name = name
    return _accept_global_options(command)


def build() -> Any:
    """Return the root command of the program, which imports each command at its first call."""
    if COMPLETE_VARIABLE in os.environ:
        completion_init()
    return _root()


@cache
def _root() -> Any:
    settings = {"help_option_names": ["-h", "--help"]}
    return _group(PROGRAM, _HELP, COMMANDS, add_completion=True, context_settings=settings)


def _group(name: str, help_text: str, table: Mapping[str, LazyCommand], **settings: Any) -> Any:
    """Return a group of placeholders."""
    app = typer.Typer(
        name=name,
        cls=LazyGroup,
        help=help_text,
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        **{"add_completion": False, **settings},
    )
    app.callback()(_do_nothing)
    group: Any = typer.main.get_command(app)
    group.table = table
    for command, lazy in table.items():
        group.commands[command] = TyperCommand(
            command, help=lazy.help, short_help=lazy.help, rich_markup_mode=None
        )
    return _accept_global_options(group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit code. Only this function turns errors into text.

    If ``RESILIENT_EXIT_CODE_FILE`` names a file, the code is also written to this file.
    A launcher such as srun may report only one code for several processes.
    """
    # A program that the training script starts must not write to the same file.
    exit_code_file = os.environ.pop(EXIT_CODE_FILE, "")
    status = _main(arguments)
    if exit_code_file:
        with suppress(OSError), open(exit_code_file, "w", encoding="utf-8") as file:  # noqa: PTH123 - at once
            file.write(f"{status}\n")
    return status


def _main(arguments: Sequence[str] | None) -> int:
    arguments_given = list(sys.argv[1:] if arguments is None else arguments)
    output = Output()
    replace_closed_streams()
    escape_unencodable_text(sys.stdout, sys.stderr)
    timeout_token = WITHIN_SECONDS.set(WITHIN_SECONDS.get())
    try:
        status = build().main(arguments_given, prog_name=PROGRAM, obj=output, standalone_mode=False)
    except ResilientError as caught:
        error = _explained(caught)
        hint = drop_useless_hint(error.hint, arguments_given, error.code)
        return _fail(error, output, error.exit_code, error.code, error.message, hint)
    except _PARSER_ERROR as error:
        return _wrong_usage(error, output, arguments_given)
    except (KeyboardInterrupt, typer.Abort):
        status = EXIT_INTERRUPTED
    except SystemExit as exit_request:
        # The parser exits this way if the reader has closed the pipe.
        if not isinstance(exit_request.__context__, BrokenPipeError):
            raise
        ignore_broken_pipe()
        status = 0
    except Exception as error:  # noqa: BLE001 - no error may leave the program as a traceback
        text = f"unexpected {type(error).__name__}: {error}"
        return _fail(error, output, 1, "RES-ERROR", text, _write_traceback(error))
    finally:
        WITHIN_SECONDS.reset(timeout_token)
    return status if isinstance(status, int) else 0


def _do_nothing() -> None:
    """Stand in for a command that is not imported yet, and for the callback of a group."""


def _explained(error: ResilientError) -> ResilientError:
    """Return an error that names the content of a location without a repository."""
    if not isinstance(error, RepositoryNotFound) or not error.url:
        return error
    # Import late: commands on our own repositories do not need these modules.
    from resilient_cli.foreign import explain_not_found

    return explain_not_found(error)


def _accept_global_options(command: Any) -> Any:
    """Add the global options to a command and all its subcommands: users may put them anywhere.

    The commands also get the help context of this module.
    """
    command.context_class = HelpContext
    used_names = {option for parameter in command.params for option in parameter.opts}
    for parameter in _global_parameters():
        # The training script sets the storage timeout of a run.
        belongs_to_script = command.name == "train" and parameter.name == "timeout"
        if used_names.isdisjoint(parameter.opts) and not belongs_to_script:
            command.params.append(parameter)
    if not isinstance(command, LazyGroup):
        for subcommand in getattr(command, "commands", {}).values():
            # Typer would truncate a short help that it takes from the docstring.
            subcommand.short_help = (
                subcommand.short_help or (subcommand.help or "").partition("\n\n")[0]
            )
            _accept_global_options(subcommand)
    return command


@cache
def _global_parameters() -> list[Any]:
    """Return parameters whose values go to the context's `Output`, not to a function."""
    options = typer.Typer(add_completion=False, rich_markup_mode=None)
    options.command()(_global_options)
    parameters: list[Any] = typer.main.get_command(options).params
    for parameter in parameters:
        parameter.expose_value = False
        parameter.callback = _store_global_option
    return parameters


def _global_options(  # noqa: PLR0913 - the global options
    *,
    output_format: Annotated[
        Format | None, typer.Option("--format", help="Format of the answer.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only ids, one per line.")] = False,
    debug: Annotated[bool, typer.Option("-v", "--debug", help="Show tracebacks.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Never use colours.")] = False,
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")] = False,
    no_input: Annotated[
        bool, typer.Option("--no-input", help="Never ask for confirmation.")
    ] = False,
    timeout: Annotated[
        str, typer.Option(metavar="30s", help="Seconds to retry a storage error; 60 by default.")
    ] = "",
) -> None:
    """Declare the global options; Typer turns the signature into parameters."""


def _store_global_option(ctx: Any, parameter: Any, value: Any) -> None:
    """Store the value of a global option in the `Output` of the root context."""
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
        WITHIN_SECONDS.set(parse_duration(value, "--timeout"))
    elif parameter.name in ("quiet", "debug") and value:
        setattr(output, parameter.name, True)


def _wrong_usage(error: Any, output: Output, arguments: Sequence[str]) -> int:
    """Report a parser error; the parser may have stopped before it read ``--json``."""
    if type(error).__name__ == "NoArgsIsHelpError":
        put(error.ctx.get_help() + "\n", sys.stderr)
        return int(error.exit_code)
    if "--json" in arguments or "--format=json" in arguments:
        output.format = Format.JSON
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "resilient"
    message, hint = error.format_message().rstrip("."), f"{path} --help"
    option = getattr(error, "option_name", None)
    lazy = COMMANDS.get(path.rpartition(" ")[2])
    if option and lazy and option in lazy.foreign:
        # Replace the parser's suggestion: an option with a similar spelling is unrelated.
        message, hint = f"no option `{option}`: it exists only in torchrun", lazy.foreign[option]
    return _fail(error, output, error.exit_code, "RES-USAGE", message, hint)


def _fail(
    error: BaseException, output: Output, status: int, code: str, message: str, hint: str
) -> int:
    if output.debug:
        put(redacted_text("".join(traceback.format_exception(error))), sys.stderr)
    show_error({"exit": status, "code": code, "message": message, "hint": hint}, output)
    return status


def _write_traceback(error: BaseException) -> str:
    """Write the traceback of an unexpected error to a file and return a command that shows it."""
    text = redacted_text("".join(traceback.format_exception(error)))
    try:
        number, path = tempfile.mkstemp(prefix="resilient-", suffix=".log")
        os.close(number)
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError:
        return ""  # --debug shows the traceback
    return f"cat {shell_quote(path)}"


def parse_train_options(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``resilient train`` that these words contain, with their values.

    Unknown options raise no error here; the command itself rejects them when it runs.
    """
    from resilient_cli.command_tree import COMMANDS

    context = load("train", COMMANDS["train"]).make_context(
        "train", list(words), resilient_parsing=True
    )
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {
        name: context.params[name]
        for name, source in sources
        if source is not None and source.name == "COMMANDLINE"
    }
