"""Defects of the checkpointer of a loop of one's own."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LOOP = "tests/unit/test_loop.py"
CLIPPING = "tests/unit/train/test_clipping.py"
BAR = "tests/unit/train/test_progress_bar.py"
MISUSE = "tests/unit/test_loop_misuse.py"
OPTIONS = "tests/unit/test_options.py"
LAYOUTS = "tests/process/test_loop_killed.py -k layout"
LEFT_OPEN = "tests/process/test_left_open.py"

MUTANTS = [
    Mutant(
        "random state is not a part",
        "resilient/checkpointer.py",
        "self._given, rank_group.world.size, rng=self._rng)",
        "self._given, rank_group.world.size, rng=False)",
        LOOP,
    ),
    Mutant(
        "a value that came back is not the one that the loop holds",
        "resilient/state_dict/statefuls.py",
        "            value.clear()\n            value.update(saved)\n",
        "            self.value = saved\n",
        LOOP,
    ),
    Mutant(
        "a wrapped model is saved under wrapped names",
        "resilient/state_dict/statefuls.py",
        "    return Part(bare(model))\n",
        "    return Part(model)\n",
        LOOP,
    ),
    Mutant(
        "replicas are saved with the buffers that each happens to have",
        "resilient/checkpointer.py",
        "        tracked.align()\n",
        "",
        LAYOUTS,
    ),
    Mutant(
        "replicas that nothing aligns get the buffers of another",
        "resilient/state_dict/statefuls.py",
        'parts[f"{name}_buffers"] = Part(own, "rank", optional=True)',
        "pass",
        LAYOUTS,
    ),
    Mutant(
        "what ended the loop is covered up by a failed save",
        "resilient/checkpointer.py",
        '            error.add_note(f"the save in flight failed too: {failed}")\n',
        "            raise failed from error\n",
        LOOP,
    ),
    Mutant(
        "clipping is left out where torch's would still change a bit",
        "resilient/train/model/precision.py",
        "norm.item() + _CLIP_EPSILON <= max_norm",
        "norm.item() <= max_norm",
        CLIPPING,
    ),
    Mutant(
        "only the first group's gradients are freed",
        "resilient/train/model/precision.py",
        "for group in optimizer.param_groups:",
        "for group in optimizer.param_groups[:1]:",
        CLIPPING,
    ),
    Mutant(
        "the bar says at its end what it said a while ago",
        "resilient/train/callbacks/builtin.py",
        "        self._said_at = 0.0\n        super().close()\n",
        "        super().close()\n",
        BAR,
    ),
    Mutant(
        "what a script left open is closed when pools refuse work",
        "resilient/exit_hooks.py",
        "        threading._register_atexit(_end_or_tell)",
        "        atexit.register(_end_or_tell)",
        f"{LEFT_OPEN} -k pools",
    ),
    Mutant(
        "a fork closes what its parent opened",
        "resilient/exit_hooks.py",
        "if process == os.getpid() and (is_over or is_last):",
        "if is_over or is_last:",
        f"{LEFT_OPEN} -k fork",
    ),
    Mutant(
        "what a running thread has opened is closed before it ends",
        "resilient/exit_hooks.py",
        "is_over = thread is threading.main_thread() or not thread.is_alive()",
        "is_over = True",
        f"{LEFT_OPEN} -k thread",
    ),
    Mutant(
        "the agent does not hear what failed when the script was over",
        "resilient/elastic/workers/bootstrap.py",
        "        ending.run_exit_hooks()\n",
        "        pass\n",
        f"{LEFT_OPEN} -k worker_ends",
    ),
    Mutant(
        "a limit that Transformers calls otherwise is saved as a thing",
        "resilient/engine_factory.py",
        '        options["keep_last"] = limit\n',
        "",
        f"{OPTIONS} -k limit",
    ),
    Mutant(
        "an option that was misspelt is saved as a thing",
        "resilient/engine_factory.py",
        "    if close:\n",
        "    if False:\n",
        f"{OPTIONS} -k slip",
    ),
    Mutant(
        "usual names are taken for slips",
        "resilient/engine_factory.py",
        "_ALIKE_MIN = 0.8",
        "_ALIKE_MIN = 0.4",
        f"{OPTIONS} -k usual",
    ),
    Mutant(
        "a part may not have the name of a slip",
        "resilient/engine_factory.py",
        "    if value is not None and not isinstance(value, _PLAIN):\n",
        "    if False:\n",
        f"{OPTIONS} -k any_name",
    ),
    Mutant(
        "a part of a plain value has no state",
        "resilient/state_dict/statefuls.py",
        '        if _is_looked_through(inner) or not hasattr(inner, "state_dict"):\n',
        "        if _is_looked_through(inner):\n",
        f"{OPTIONS} -k any_name",
    ),
    Mutant(
        "an optimizer in a part is known by numbers",
        "resilient/state_dict/statefuls.py",
        '        if _is_looked_through(inner) or not hasattr(inner, "state_dict"):\n',
        '        if not hasattr(inner, "state_dict"):\n',
        f"{MISUSE} -k follow_names",
    ),
    Mutant(
        "without a keeper files are streamed all at once",
        "resilient/checkpoint/save/executor.py",
        "self._lent_bytes + size_bytes <= self._bytes_max",
        "True",
        "tests/unit/test_loop_memory.py",
    ),
    Mutant(
        "an optimizer in a part does not wait",
        "resilient/checkpointer.py",
        ("for optimizer in map(unwrap, self._given.values())\n            if"),
        "for optimizer in self._given.values() if",
        f"{MISUSE} -k waits_for",
    ),
    Mutant(
        "a lower step is saved for nobody",
        "resilient/checkpoint/save/metadata.py",
        "        if checkpoint < newest:\n",
        "        if False:\n",
        f"{MISUSE} -k lower_step",
    ),
    Mutant(
        "a secret is saved as a thing",
        "resilient/engine_factory.py",
        "isinstance(value, str | bytes) and _SECRET.search(name)",
        "isinstance(value, bytes) and _SECRET.search(name)",
        f"{MISUSE} -k a_secret",
    ),
    Mutant(
        "whatever is given as retention is taken for one",
        "resilient/engine_factory.py",
        "    if isinstance(wished, Mapping):\n        return parse_retention(wished)\n",
        "    if isinstance(wished, Mapping):\n        return wished\n",
        f"{OPTIONS} -k limit",
    ),
    Mutant(
        "what nests too deep for its reader is saved",
        "resilient/state_dict/flatten.py",
        "        if self._depth > _DEPTH_MAX:\n",
        "        if False:\n",
        "tests/unit/test_raw_errors.py",
    ),
    Mutant(
        "keys that are no texts take no room of the depth",
        "resilient/state_dict/flatten.py",
        "self._within(2, path, _Flattener.pairs, value)",
        "self._within(0, path, _Flattener.pairs, value)",
        "tests/unit/test_raw_errors.py",
    ),
]
