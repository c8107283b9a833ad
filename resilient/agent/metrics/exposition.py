"""Figures to the text that Prometheus reads, version 0.0.4 of its format (pure).

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Kind(StrEnum):
    """What the numbers of a metric are."""

    COUNTER = "counter"
    """It only grows while the agent lives; its name ends in ``_total``."""
    GAUGE = "gauge"
    SUMMARY = "summary"
    """A sum and a count, under ``NAME_sum`` and ``NAME_count``."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A name that users may rely on.

    Attributes:
        name: with the unit at its end.
        kind: of its numbers.
        meaning: one line for people.
        label: the only label that its samples have; empty for none.
    """

    name: str
    kind: Kind
    meaning: str
    label: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """One number.

    Attributes:
        metric: whose.
        value: of it.
        label: value of the metric's label; empty if it has none.
        suffix: of a summary: ``_sum`` or ``_count``.
    """

    metric: Metric
    value: float
    label: str = ""
    suffix: str = ""


def render(samples: Iterable[Sample]) -> str:
    """Return the text of samples, whatever their order; those of a metric stand together."""
    by_name = sorted(samples, key=lambda one: (one.metric.name, one.label, one.suffix))
    lines = []
    for metric, found in groupby(by_name, key=lambda one: one.metric):
        lines.append(f"# HELP {metric.name} {_escape(metric.meaning)}")
        lines.append(f"# TYPE {metric.name} {metric.kind}")
        lines += map(_line, found)
    return "".join(f"{line}\n" for line in lines)


def _line(one: Sample) -> str:
    label = f'{{{one.metric.label}="{_quote(one.label)}"}}' if one.metric.label else ""
    return f"{one.metric.name}{one.suffix}{label} {_number(one.value)}"


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _quote(text: str) -> str:
    return _escape(text).replace('"', '\\"')
