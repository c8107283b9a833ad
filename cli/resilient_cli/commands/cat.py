"""``resilient ckpt cat``: one tensor, one value or one file of a checkpoint."""

from __future__ import annotations

import re
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from resilient.diff.model import SECTIONS
from resilient.errors import IntegrityError, KeyNotFound, UsageError
from resilient.layouts.model import Unreadable
from resilient.redaction import shell_quote
from resilient_cli.output import (
    CommandResult,
    KeyValues,
    Progress,
    convert_write_errors,
    human_size,
    put,
    show,
)
from resilient_cli.repositories import Place, Repo, complete_ref, output_of
from resilient_cli.views.text import NONE, json_number, plain

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.diff.model import CheckpointView
    from resilient.diff.tensor_stats import Summary
    from resilient.layouts.model import Tensor

_MOMENT = r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:\d\d)?)?"
_REFERENCE = (
    rf"latest(?:~\d+)?|step:\d+|best:[^:/]+(?::(?:min|max))?|@\{{\d+\}}|@{_MOMENT}"
    r"|(?!(?:step|best):)[^:/@][^:/]*"
)
_PLACE = r"(?:[A-Za-z][A-Za-z0-9+.-]*://[^/]*/)?(?:[^:]*/)?"
_ALONE = re.compile(rf"{_PLACE}(?:{_REFERENCE})")
_INSIDE = re.compile(rf"(?P<place>{_PLACE})(?P<reference>{_REFERENCE}):(?!//)(?P<path>.+)")


def split_ref_path(text: str) -> tuple[str, str, bool] | None:
    """Split ``REF:PATH`` into a checkpoint and a name inside it; None for any other text.

    References contain colons (``step:10``, ``best:loss:max``, ``@2026-11-20T10:00``), and so do
    URLs. The separator is the first colon after a complete reference or path.

    Args:
        text: A command-line argument.

    Returns:
        The reference or path, the name inside the checkpoint, and True for a path or URL. A
        reference also needs a repository.
    """
    match = None if _ALONE.fullmatch(text) else _INSIDE.fullmatch(text)
    if match is None:
        return None
    return match["place"] + match["reference"], match["path"], bool(match["place"])


def build_tensor_result(
    side: CheckpointView, tensor: Tensor, summary: Summary | None
) -> CommandResult:
    """Build the answer about a tensor.

    Args:
        side: The checkpoint.
        tensor: The tensor.
        summary: Statistics of its elements; None if its dtype is unknown.
    """
    name = f"{tensor.part}/{tensor.name}"
    document = {
        "checkpoint": side.url,
        "name": name,
        "part": tensor.part,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "elements": tensor.elements,
        "size_bytes": tensor.size_bytes,
        "files": list(tensor.files),
        "pieces": len(tensor.pieces),
        **(
            {
                "min": json_number(summary.low),
                "max": json_number(summary.high),
                "mean": json_number(summary.mean),
                "std": json_number(summary.deviation),
                "norm": json_number(summary.norm),
                "zeros": summary.zeros,
                "nans": summary.nans,
                "infinite": summary.infinite,
                "first": json_number(summary.first),
            }
            if summary
            else {}
        ),
    }
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    pairs = [
        ("checkpoint", side.url),
        ("tensor", name),
        ("shape", f"{shape} of {tensor.dtype}, {human_size(tensor.size_bytes)}"),
        ("files", ", ".join(tensor.files)),
    ]
    if summary:
        pairs += [
            ("range", f"{_number(summary.low)} to {_number(summary.high)}"),
            ("mean", f"{_number(summary.mean)}, deviation {_number(summary.deviation)}"),
            ("norm", _number(summary.norm)),
            ("counts", f"{summary.zeros} zero, {summary.nans} NaN, {summary.infinite} infinite"),
            ("first", " ".join(_number(number) for number in summary.first) or NONE),
        ]
    return CommandResult("ckpt.cat", "tensor", document, (KeyValues(tuple(pairs)),), (name,))


def build_section_result(
    side: CheckpointView, section: str, fields: Mapping[str, Any]
) -> CommandResult:
    """Build the answer about all values of a section."""
    values = {name: json_number(value) for name, value in fields.items()}
    document = {"checkpoint": side.url, "name": section, "values": values}
    pairs = tuple((name, plain(value)) for name, value in values.items())
    return CommandResult("ckpt.cat", "section", document, (KeyValues(pairs),), tuple(values))


def build_field_result(side: CheckpointView, name: str, value: Any) -> CommandResult:
    """Build the answer about one value."""
    json_value = json_number(value)
    document = {"checkpoint": side.url, "name": name, "value": json_value}
    return CommandResult("ckpt.cat", "value", document, (plain(json_value),), (plain(json_value),))


def _number(value: Any) -> str:
    return NONE if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)


_COPY_BYTES = 4 << 20
_NAMES_MAX = 5_000


def cat(  # noqa: PLR0913 - the options of a command
    ctx: typer.Context,
    ref: Annotated[
        str,
        typer.Argument(
            metavar="REF[:PATH]",
            help="A reference, or the path or URL of a checkpoint, as for `ckpt diff`; a colon and "
            "the name of a part may follow.",
            show_default=False,
            autocompletion=complete_ref,
        ),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="A tensor (model/wte.weight), a section or a value (trainer.global_step), or a "
            "file of the checkpoint (trainer_state.json).",
            show_default=False,
        ),
    ] = None,
    place: Place = None,
    repo: Repo = None,
    *,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the tensor's bytes: row-major, little-endian.")
    ] = False,
    npy: Annotated[
        bool,
        typer.Option("--npy", help="Write it as NumPy's .npy; bfloat16 and 8-bit floats as F32."),
    ] = False,
    values: Annotated[int, typer.Option(min=0, help="Number of first elements to show.")] = 8,
) -> None:
    """Show statistics of one tensor or one value, or write a file of a checkpoint unchanged.

    For a tensor: shape, dtype, extremes, mean, deviation, norm, the numbers of zero, NaN and
    infinite elements, and the first elements. --raw and --npy write all elements to stdout. Tensors
    are streamed, including sharded tensors. Any checkpoint of `ckpt diff` is accepted: of this
    library or another tool, local or at a URL.

    Example: resilient ckpt cat latest model/wte.weight s3://bucket/run

    Example: resilient ckpt cat step:500:trainer_state.json s3://bucket/run

    Example: resilient ckpt cat out/checkpoint-500 optimizer/0.exp_avg --npy > moment.npy
    """
    if raw and npy:
        raise UsageError("`--raw` and `--npy` exclude each other", hint="resilient ckpt cat --help")
    # Import late: NumPy takes longer to load than a whole `ckpt ls`.
    from resilient.diff.tensor_stats import summarize
    from resilient_cli.foreign import open_view

    ref, name, place = _parse_reference(ref, name, place, repo)
    side = open_view(ref, place, repo)
    output = output_of(ctx)
    tensor = _tensor(side, name)
    if tensor is None and (raw or npy):
        raise _not_found_error(side, name)
    try:
        if tensor is None:
            _show_other(ctx, side, name)
        elif raw or npy:
            _write(side, tensor, is_npy=npy)
        else:
            with Progress("reading") as progress:
                summary = summarize(side, tensor, values, progress)
            show(build_tensor_result(side, tensor, summary), output)
    except Unreadable as error:
        raise IntegrityError(
            f"`{name}` of {side.url} cannot be read: {error}",
            key=name,
            hint=f"resilient ckpt inspect {shell_quote(side.url)}",
        ) from error


def _parse_reference(
    ref: str, name: str | None, place: str | None, repo: str | None
) -> tuple[str, str, str | None]:
    """Return reference, name and repository from ``REF NAME [REPO]`` or ``REF:PATH [REPO]``.

    Raises:
        UsageError: The arguments name nothing inside the checkpoint.
    """
    # An existing file may have a colon in its name. Such a file takes precedence.
    split = None if place or Path(ref).exists() else split_ref_path(ref)
    if name is None and split is None:
        words = " ".join(shell_quote(word) for word in (ref, place or repo) if word)
        raise UsageError(
            f"`{ref}` alone does not name a tensor, a value or a file to show",
            hint="resilient ckpt inspect " + words + " --tensors",
        )
    if split is None or (split[2] and name is not None):
        return ref, name or "", place
    return split[0], split[1], name


def _show_other(ctx: typer.Context, side: CheckpointView, name: str) -> None:
    """Show a section or a value, or copy a file to stdout."""
    for section in SECTIONS:
        fields = side.fields.get(section, {})
        if name == section and fields:
            show(build_section_result(side, section, fields), output_of(ctx))
            return
        field = name.removeprefix(f"{section}.")
        if field != name and field in fields:
            show(build_field_result(side, name, fields[field]), output_of(ctx))
            return
    if name not in side.listing.sizes:
        raise _not_found_error(side, name)
    size_bytes = side.listing.sizes[name]
    with convert_write_errors(), Progress("reading") as progress:
        for start in range(0, size_bytes, _COPY_BYTES):
            _copy(side.folder.read(name, start, _COPY_BYTES))
            progress(min(size_bytes, start + _COPY_BYTES), size_bytes)
        sys.stdout.buffer.flush()


def _copy(data: bytes) -> None:
    """Write bytes unchanged; on a terminal, write text with escaped control characters."""
    if _is_terminal():
        put(data.decode("utf-8", "backslashreplace"), sys.stdout)
        sys.stdout.flush()
    else:
        sys.stdout.buffer.write(data)


def _tensor(side: CheckpointView, name: str) -> Tensor | None:
    """Return the tensor with a name, or the only tensor whose name ends with it.

    ``ckpt diff`` cuts prefixes off, so users may pass only the end of a name.
    """
    part, _, path = name.rpartition("/")
    matches = [tensor for tensor in side.tensors if tensor.part == part or not part]
    exact_matches = [tensor for tensor in matches if tensor.name == path]
    candidates = exact_matches or [tensor for tensor in matches if tensor.name.endswith(f".{path}")]
    return candidates[0] if len(candidates) == 1 else None


def _not_found_error(side: CheckpointView, name: str) -> KeyNotFound:
    names = [f"{tensor.part}/{tensor.name}" for tensor in side.tensors]
    names += [*side.listing.sizes, *(section for section in SECTIONS if side.fields.get(section))]
    similar_names = get_close_matches(name, names[:_NAMES_MAX], n=3, cutoff=0.5)
    similar_text = (
        f"; similar names: {', '.join(f'`{similar[:200]}`' for similar in similar_names)}"
        if similar_names
        else ""
    )
    hint = f"resilient ckpt inspect {shell_quote(side.url)} --tensors"
    return KeyNotFound(f"no `{name[:200]}` in {side.url}{similar_text}", key=name, hint=hint)


def _write(side: CheckpointView, tensor: Tensor, *, is_npy: bool) -> None:
    """Write the elements of a tensor to stdout, as raw bytes or in NumPy's format."""
    from resilient.diff.tensor_stats import as_numpy, blocks, npy_head

    if _is_terminal():
        raise UsageError(
            "cannot write binary data to a terminal", hint="resilient ckpt cat ... > FILE"
        )
    stream = sys.stdout.buffer
    with convert_write_errors(), Progress("reading") as progress:
        if is_npy:
            stream.write(npy_head(tensor))
        for block in blocks(side, tensor, progress):
            stream.write(as_numpy(block, tensor.dtype) if is_npy else block.tobytes())
        stream.flush()


def _is_terminal() -> bool:
    return sys.stdout.isatty()
