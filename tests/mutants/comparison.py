"""Defects of holding two checkpoints together: what would be called equal, or another's."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ELEMENTS = "tests/unit/diff/test_elements.py"
MEASURES = "tests/unit/diff/test_measures.py"
DRAWS = "tests/unit/diff/test_draws.py"
PAIRING = "tests/unit/diff/test_pairing.py"
COMPARISON = "tests/unit/diff/test_comparison.py"
HOSTILE = "tests/unit/diff/test_hostile_sides.py"
SUMMARY = "tests/unit/diff/test_summary.py"
DIFF = "tests/cli/test_diff.py"
CAT = "tests/cli/test_cat.py"

OPAQUE = "tests/unit/diff/test_opaque.py"

PAGES = "tests/unit/diff/test_pages.py"

MUTANTS = [
    Mutant(
        "rows that are zero on purpose are a hole",
        "resilient/diff/foreign_verify.py",
        "if self._cuts_a_row(first + place)]",
        "]",
        PAGES,
    ),
    Mutant(
        "a page that a loss of power took is not seen",
        "resilient/diff/foreign_verify.py",
        "    if counts.hole and counts.nonzero:\n",
        "    if counts.hole and not counts.nonzero:\n",
        PAGES,
    ),
    Mutant(
        "what no reader understands is not compared",
        "resilient/diff/compare.py",
        "    if before.layout != after.layout:",
        "    if True:",
        f"{OPAQUE} -k by_its_bytes",
    ),
    Mutant(
        "an array counts as a field that was told",
        "resilient/diff/foreign.py",
        "        return is_plain and self._told(path)",
        "        return self._told(path)",
        f"{OPAQUE} -k by_its_bytes",
    ),
    Mutant(
        "the bytes of a storage are not in its digest",
        "resilient/diff/digests.py",
        "            found.update(data)",
        "            pass",
        f"{OPAQUE} -k quantized",
    ),
    Mutant(
        "strides of a view are not looked at",
        "resilient/diff/tensor_reader.py",
        "        if not _is_row_major(piece):",
        "        if False:",
        f"{ELEMENTS} -k torch_loads_it",
    ),
    Mutant(
        "a box begins at the storage's first element",
        "resilient/diff/tensor_reader.py",
        "            data = self._bytes(piece, piece.first + first, reach)",
        "            data = self._bytes(piece, first, reach)",
        f"{ELEMENTS} -k arithmetic",
    ),
    Mutant(
        "pieces that leave a hole are read as whole",
        "resilient/diff/tensor_reader.py",
        ("        if not covers(tensor.shape, [piece.region for piece in tensor.pieces]):"),
        "        if False:",
        f"{ELEMENTS} -k index_claims",
    ),
    Mutant(
        "ZeRO 3 is put together as if ranks cut the line",
        "resilient/layouts/deepspeed_partitions.py",
        "            yield _Run(rank * width, vectors, place, own)",
        "            yield _Run(0, vectors, place, own)",
        f"{ELEMENTS} -k arithmetic",
    ),
    Mutant(
        "a slice is believed to have the shape that the index says",
        "resilient/layouts/torch_zip.py",
        "    if found.shape != piece.region.lengths or found.dtype != dtype:",
        "    if False:",
        f"{ELEMENTS} -k slice_of_another_shape",
    ),
    Mutant(
        "numbers that are none are added up",
        "resilient/diff/compare.py",
        "        if not finite.all():",
        "        if False:",
        f"{MEASURES} -k numbers_that_are_none",
    ),
    Mutant(
        "equality is of values where it should be of bits",
        "resilient/diff/compare.py",
        "differing(before, after) if self._dtypes[0] == self._dtypes[1] else None",
        "None",
        f"{MEASURES} -k zeros_of_both",
    ),
    Mutant(
        "minus zero is a number apart from zero",
        "resilient/diff/tensor_stats.py",
        "    found: NDArray[Any] = (size ^ sign) - sign",
        "    found: NDArray[Any] = size ^ sign",
        f"{MEASURES} -k zeros_of_both",
    ),
    Mutant(
        "a stream is followed one way",
        "resilient/diff/rng.py",
        "        behind = _blocks_to(after.words, before.words)",
        "        behind = None",
        f"{DRAWS} -k both_directions",
    ),
    Mutant(
        "numbers become names whatever their shapes",
        "resilient/diff/tensor_names.py",
        ("    return len(met) * 2 > len(pairs) and all(left == right for left, right in met)"),
        "    return True",
        f"{PAIRING} -k without_an_order",
    ),
    Mutant(
        "what became NaN is told last",
        "resilient/diff/compare.py",
        "        return -1e301, change.name",
        "        return 0.5, change.name",
        f"{COMPARISON} -k became_no_number",
    ),
    Mutant(
        "any tensor of the same shape is a second name",
        "resilient/diff/compare.py",
        ("    return any(_are_equal(side, alone, tensor) for tensor in alike[:_TWINS_MAX])"),
        "    return bool(alike)",
        f"{COMPARISON} -k second_name",
    ),
    Mutant(
        "what cannot be read counts as equal",
        "resilient/diff/model.py",
        "            or any(tensor.is_equal is not True for tensor in self.tensors)",
        "            or any(tensor.is_equal is False for tensor in self.tensors)",
        f"{HOSTILE} -k shown_without_end",
    ),
    Mutant(
        "the mean is that of the last block",
        "resilient/diff/tensor_stats.py",
        "            self._mean += apart * finite.size / both",
        "            self._mean = middle",
        f"{SUMMARY} -k summed_up",
    ),
    Mutant(
        "any tensor whose name ends so is shown",
        "cli/resilient_cli/commands/cat.py",
        "    return alike[0] if len(alike) == 1 else None",
        "    return alike[0] if alike else None",
        f"{CAT} -k end_of_a_name",
    ),
    Mutant(
        "a difference is no answer of 1",
        "cli/resilient_cli/commands/diff.py",
        "    return DIFFERENT if exit_code and found.differs else 0",
        "    return 0",
        f"{DIFF} -k two_steps",
    ),
]
