"""Where in the data a run of Transformers is, counted in samples (pure).

Its state counts steps and says the epoch with its fraction. How many batches an epoch had is not
recorded; it follows from the size of the training set.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_CLOSE = 1e-6


def place_in_epoch(origin: Mapping[str, Any], size: int) -> tuple[int, int]:
    """Return the epoch, and the samples of it that were trained on.

    Args:
        origin: ``epoch`` with its fraction, ``batch`` (samples per rank and micro-batch) and
            ``ranks`` of the run that saved.
        size: samples in the training set.

    Raises:
        ValueError: no number of whole batches is that fraction of an epoch of this set.
    """
    number, share = divmod(float(origin["epoch"]), 1.0)
    if share > 1 - _CLOSE:
        number, share = number + 1, 0.0
    if share < _CLOSE:
        return int(number), 0
    each = int(origin["batch"]) * int(origin["ranks"])
    if each < 1:
        raise ValueError("it does not say how many samples a batch had")
    # With `dataloader_drop_last` the last, incomplete one is left out.
    for batches in (math.ceil(size / each), size // each):
        done = share * batches
        if batches and abs(done - round(done)) < _CLOSE * batches:
            return int(number), min(round(done) * each, size)
    raise ValueError(
        f"epoch {origin['epoch']} is no whole number of batches of {each} samples in a training "
        f"set of {size}: it was trained on another one, or with another batch size"
    )
