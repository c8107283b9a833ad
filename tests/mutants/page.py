"""Defects of the page of checkpoints: what it would show wrong, or to whom."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HISTOGRAMS = "tests/unit/diff/test_histograms.py"
PAGE = "tests/cli/test_inspector_page.py"

MUTANTS = [
    Mutant(
        "the tabs of a narrow page stand in two rows",
        "cli/resilient_cli/page/static/page.css",
        "nav{gap:0}nav a{padding:7px 9px}",
        "",
        "tests/process/test_inspector_views.py -k tree_sizes",
    ),
    Mutant(
        "cells that are joined begin where the first one did",
        "resilient/diff/tensor_stats.py",
        "(first + np.arange(len(counts), dtype=np.int64)) >> min(bits, _FAR_BITS)",
        "first + (np.arange(len(counts), dtype=np.int64) >> min(bits, _FAR_BITS))",
        f"{HISTOGRAMS} -k whatever_comes_first",
    ),
    Mutant(
        "a range that grows forgets what was counted",
        "resilient/diff/tensor_stats.py",
        "        if not self._counts.size:\n",
        "        if True:\n",
        f"{HISTOGRAMS} -k number_by_number",
    ),
    Mutant(
        "what is no number is counted as one",
        "resilient/diff/tensor_stats.py",
        "        finite = found[np.isfinite(found)]\n        if not finite.size:",
        "        finite = np.nan_to_num(found)\n        if not finite.size:",
        f"{HISTOGRAMS} -k no_number",
    ),
    Mutant(
        "cells are as many as the range needs",
        "resilient/diff/tensor_stats.py",
        "    while _cell(high, exponent) - _cell(low, exponent) >= CELLS_MAX:",
        "    while _cell(high, exponent) - _cell(low, exponent) >= CELLS_MAX << 10:",
        f"{HISTOGRAMS} -k whatever_comes_first",
    ),
    Mutant(
        "of a very large tensor the first blocks are looked at",
        "resilient/diff/tensor_stats.py",
        "yield nth * (blocks - 1) // max(1, blocks_max - 1) * BLOCK_ELEMENTS",
        "yield nth * BLOCK_ELEMENTS",
        f"{HISTOGRAMS} -k here_and_there",
    ),
    Mutant(
        "two tensors have cells of their own",
        "resilient/diff/tensor_stats.py",
        "stats.bars.coarser(widest) for stats in found",
        "stats.bars for stats in found",
        f"{HISTOGRAMS} -k share_their_cells",
    ),
    Mutant(
        "names are shown as they are",
        "cli/resilient_cli/page/tables.py",
        ('    return escape(escape_control_chars(str(value), ""))'),
        ('    return escape_control_chars(str(value), "")'),
        f"{PAGE} -k page_of_their_own",
    ),
    Mutant(
        "control characters are shown as they are",
        "cli/resilient_cli/page/tables.py",
        ('    return escape(escape_control_chars(str(value), ""))'),
        "    return escape(str(value))",
        f"{PAGE} -k page_of_their_own",
    ),
    Mutant(
        "what was never committed is looked for",
        "cli/resilient_cli/page/lazy_parts.py",
        "if one is not None and _is_there(store, one)]",
        "if one is not None]",
        f"{PAGE} -k nothing_else",
    ),
    Mutant(
        "what nobody waits for goes on",
        "cli/resilient_cli/page/lazy_parts.py",
        "        if self._closed or waited_seconds > _PATIENCE_SECONDS:",
        "        if self._closed:",
        f"{PAGE} -k who_has_gone",
    ),
    Mutant(
        "as much as is asked for is made at once",
        "cli/resilient_cli/page/lazy_parts.py",
        "            with self._turn:\n",
        "            if self._turn:\n",
        f"{PAGE} -k told_meanwhile",
    ),
    Mutant(
        "what was damaged once is so for ever",
        "cli/resilient_cli/page/lazy_parts.py",
        "            answer, is_once = _FAILED.format(text(error)), True\n",
        "            answer = _FAILED.format(text(error))\n",
        f"{PAGE} -k is_not_kept",
    ),
    Mutant(
        "a layer of the optimizer's is another than of the weights",
        "cli/resilient_cli/page/tensors.py",
        'path.rpartition(".")[0] or path if part == OPTIMIZER else path or name',
        "path or name",
        f"{PAGE} -k first_number_ends",
    ),
    Mutant(
        "a page in a file may ask others",
        "cli/resilient_cli/page/assets.py",
        "        \"default-src 'none'; style-src",
        '        "default-src *; style-src',
        "tests/cli/test_report.py -k nothing_beside_it",
    ),
]
