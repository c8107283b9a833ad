"""Defects of loads into live state, of optimizer state and of shards."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "the round-trip check runs at every save, not once per structure",
        "resilient/state_dict/round_trip.py",
        "        if seen_kinds is None or unseen_kinds:",
        "        seen_kinds = None\n        if True:",
        "tests/unit/state_dict/test_round_trip.py -k once",
    ),
    Mutant(
        "the round-trip check loads state into a live scheduler of another class",
        "resilient/state_dict/round_trip.py",
        "    return of_torch and all(map(_is_of_torch, inner))\n",
        "    return True\n",
        "tests/unit/state_dict/test_round_trip.py -k changes_no_live",
    ),
    Mutant(
        "the round-trip check loads state into the live function of a schedule",
        "resilient/state_dict/round_trip.py",
        "scheduler_copy._scale_fn_custom = _copy_of_callable(value)",
        "scheduler_copy._scale_fn_custom = value",
        "tests/unit/state_dict/test_round_trip.py -k changes_no_live",
    ),
    Mutant(
        "torch receives the empty parameter groups of an FSDP1 optimizer",
        "resilient/state_dict/fsdp1.py",
        'self._optimizer.param_groups = [group for group in live if group["params"]]',
        "self._optimizer.param_groups = list(live)",
        "tests/process/test_empty_groups.py -k two_ranks",
    ),
    Mutant(
        "optimizer state is matched by position",
        "resilient/state_dict/optimizer.py",
        (
            "numbers.get(name, name): _from_savable(value)\n"
            '            for name, value in state_dict["state"].items()'
        ),
        'name: _from_savable(value) for name, value in enumerate(state_dict["state"].values())',
        "tests/unit/state_dict",
        promise="Field bugs",
    ),
    Mutant(
        "a missing part starts afresh without an error",
        "resilient/state_dict/resharding.py",
        '        if parts[name].scope == "replicated" and not parts[name].optional:',
        "        if False:",
        "tests/gang",
        promise="Field bugs",
    ),
    Mutant(
        "the first ranks receive the smaller chunks",
        "resilient/state_dict/sharding.py",
        "    step = -(-length // ranks)\n",
        "    step = max(length // ranks, 1)\n",
        "tests/property/test_placement.py",
    ),
    Mutant(
        "strided shards count as plain shards",
        "resilient/state_dict/sharding.py",
        "placement.split_factor if isinstance(placement, _StridedShard) else 1",
        "1",
        "tests/property/test_placement.py",
    ),
    Mutant(
        "a region is copied to the wrong place of its target",
        "resilient/state_dict/sharding.py",
        "region.offsets[axis] - self.region.offsets[axis], count)",
        "0, count)",
        "tests/property/test_placement.py",
    ),
    Mutant(
        "the live shard is not filled in place",
        "resilient/state_dict/resharding.py",
        "        is_there = entry.name in self._live or isinstance(like, FlatShard)\n",
        "        is_there = isinstance(like, FlatShard)\n",
        "tests/property/test_placement.py",
    ),
    Mutant(
        "moments of sharded parameters are loaded whole",
        "resilient/state_dict/optimizer.py",
        "return self._tensors[name] if name in self._tensors else self._of_model().get(name)",
        "return None",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "parameter groups added later have no names",
        "resilient/state_dict/optimizer.py",
        "        if len(members) == len(self._parameters) and all(",
        "        if self._parameters or all(",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "a parameter that replaced another is not noticed",
        "resilient/state_dict/optimizer.py",
        " and all(map(is_, members, self._parameters)):",
        ":",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "state of groups added later has no place",
        "resilient/state_dict/optimizer.py",
        "        if group_sizes(self._optimizer) != self._sizes:\n",
        "        if False:\n",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "a group that canonical reduction does not train is skipped without an error",
        "resilient/state_dict/optimizer.py",
        '        if group["params"] and not names[number]:\n',
        "        if False:\n",
        "tests/unit/state_dict/test_zero.py",
    ),
    Mutant(
        "a group added later is not split into pipeline stages",
        "resilient/state_dict/pipeline.py",
        "        groups = self._optimizer.param_groups[len(self._groups) :]\n",
        "        groups = [] if self._groups else self._optimizer.param_groups\n",
        "tests/unit/state_dict/test_staged.py",
    ),
    Mutant(
        "an optimizer accepts the options of another class",
        "resilient/state_dict/optimizer.py",
        "    if missing_options and unknown_options:\n",
        "    if False:\n",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "an optimizer accepts the state of another class",
        "resilient/state_dict/optimizer.py",
        (
            "        if (\n"
            "            needed_keys\n"
            "            and parameter in members\n"
            "            and parameter_state\n"
            "            and not needed_keys <= parameter_state.keys()\n"
            "        ):\n"
        ),
        "        if False:\n",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "optional optimizer options count as another class",
        "resilient/state_dict/optimizer.py",
        "    if missing_options and unknown_options:\n",
        "    if missing_options or unknown_options:\n",
        "tests/unit/state_dict/test_optimizer.py",
    ),
    Mutant(
        "optimizer state is checked after other parts are loaded",
        "resilient/state_dict/resharding.py",
        '        elif hasattr(part.stateful, "check_saved"):\n',
        "        elif False:\n",
        "tests/unit/test_loop.py",
    ),
    Mutant(
        "all boxes of a flat range start at the first element",
        "resilient/state_dict/sharding.py",
        "        place += region.size\n",
        "",
        "tests/property/test_flat_shards.py",
        promise="Parallelism and ranks",
    ),
    Mutant(
        "parameters without elements on a rank count as tied",
        "resilient/state_dict/sharding.py",
        "memory if memory.numel() else memory.new_empty(1)[:0]",
        "memory",
        "tests/property/test_flat_shards.py",
        promise="Parallelism and ranks",
    ),
    Mutant(
        "a partition is loaded into new memory instead of in place",
        "resilient/state_dict/resharding.py",
        "        if not is_there or like.dtype != dtype:\n",
        "        if True:\n",
        "tests/property/test_flat_shards.py",
        promise="Parallelism and ranks",
    ),
    Mutant(
        "parameters of a ZeRO partition share one step counter",
        "resilient/state_dict/deepspeed.py",
        "        return value.detach().clone()\n",
        "        return value\n",
        "tests/unit/state_dict/test_zero.py",
    ),
    Mutant(
        "different step counters in a ZeRO partition become the first",
        "resilient/state_dict/deepspeed.py",
        "        if value != values[0]:\n",
        "        if False:\n",
        "tests/unit/state_dict/test_zero.py",
    ),
    Mutant(
        "moments of a parameter without saved ones are not reset",
        "resilient/state_dict/deepspeed.py",
        "                    room.zero_()  # ZeRO",
        "                    pass  # ZeRO",
        "tests/unit/state_dict/test_zero.py",
    ),
    Mutant(
        "a ZeRO partition is copied from the wrong offset",
        "resilient/state_dict/deepspeed.py",
        "narrow(0, self.offset, self.count)",
        "narrow(0, 0, self.count)",
        "tests/unit/state_dict/test_zero.py",
    ),
    Mutant(
        "padding is stored as state",
        "resilient/state_dict/deepspeed.py",
        "    return start, min(length, parameter.ds_numel - start)\n",
        "    return start, length\n",
        "tests/process/test_zero_resharding.py",
    ),
    Mutant(
        "half-precision weights are not refreshed after a load",
        "resilient/state_dict/deepspeed.py",
        "        refresh(self._engine)\n",
        "        pass\n",
        "tests/process/test_zero_resharding.py",
    ),
    Mutant(
        "parameter groups with different options are merged",
        "resilient/state_dict/optimizer.py",
        " or not all(is_same(option, options[0]) for option in options)",
        "",
        "tests/unit/state_dict/test_optimizer.py tests/unit/train/test_schedule_groups.py",
    ),
    Mutant(
        "a tensor is placed at an unaligned address",
        "resilient/state_dict/resharding.py",
        "return None if tensor.data_ptr() % MEMORY_ALIGNMENT else tensor",
        "return tensor",
        "tests/unit/checkpoint/test_bulk.py",
    ),
    Mutant(
        "a loaded value replaces the object that the loop holds",
        "resilient/state_dict/statefuls.py",
        "            value.clear()\n            value.update(saved_value)\n",
        "            self.value = saved_value\n",
        "tests/unit/test_loop.py",
    ),
    Mutant(
        "a wrapped model is saved under the wrapper's names",
        "resilient/state_dict/statefuls.py",
        "    return Part(bare(model))\n",
        "    return Part(model)\n",
        "tests/unit/test_loop.py",
    ),
    Mutant(
        "replicas load the buffers of another rank",
        "resilient/state_dict/statefuls.py",
        'parts[f"{name}_buffers"] = Part(local_buffers, "rank", optional=True)',
        "pass",
        "tests/process/test_loop_killed.py -k layout",
    ),
    Mutant(
        "a part that wraps a plain value has no state",
        "resilient/state_dict/statefuls.py",
        '        if _is_unwrapped(inner) or not hasattr(inner, "state_dict"):\n',
        "        if _is_unwrapped(inner):\n",
        "tests/unit/test_options.py -k any_name",
    ),
    Mutant(
        "optimizer state in a part is saved under numbers",
        "resilient/state_dict/statefuls.py",
        '        if _is_unwrapped(inner) or not hasattr(inner, "state_dict"):\n',
        '        if not hasattr(inner, "state_dict"):\n',
        "tests/unit/test_loop_misuse.py -k follow_names",
        promise="Field bugs",
    ),
    Mutant(
        "arguments are compared after everything is loaded",
        "resilient/state_dict/resharding.py",
        (
            "    if check.examine is not None:\n"
            "        check.examine(manifest.config)\n"
            "    absent_names = absent_parts(manifest, parts, rank)\n"
            "    fresh_names = load(manifest, files, parts, rank, landing, check)\n"
        ),
        (
            "    absent_names = absent_parts(manifest, parts, rank)\n"
            "    fresh_names = load(manifest, files, parts, rank, landing, check)\n"
            "    if check.examine is not None:\n"
            "        check.examine(manifest.config)\n"
        ),
        "tests/unit/test_checkpointer.py",
    ),
    Mutant(
        "an optional part is read in place",
        "resilient/state_dict/resharding.py",
        "    if part.optional or part.document or",
        "    if part.document or",
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "any object with state is read in place",
        "resilient/state_dict/resharding.py",
        "        return None\n    return dict(stateful.state_dict(keep_vars=True))",
        (
            "        return dict(stateful.state_dict())\n"
            "    return dict(stateful.state_dict(keep_vars=True))"
        ),
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "parts that share memory are read in place",
        "resilient/state_dict/resharding.py",
        "            sharing_parts |= {part, owner}\n",
        "            pass\n",
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "a part stored with another layout is read in place",
        "resilient/state_dict/resharding.py",
        "        if stored_shapes[name]\n        == {",
        "        if stored_shapes[name].keys()\n        >= {",
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "tensors with gaps are read in place",
        "resilient/state_dict/resharding.py",
        "return memory if memory.is_contiguous() else None",
        "return memory",
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "overlapping regions of a file are read in place",
        "resilient/state_dict/resharding.py",
        "if any(first[1] > second[0] for",
        "if any(False for",
        "tests/unit/state_dict/test_berths.py",
    ),
    Mutant(
        "a reconstructed file counts as read in place",
        "resilient/state_dict/resharding.py",
        "            if words.ctypes.data != data.data_ptr():\n",
        "            if False:\n",
        "tests/unit/state_dict/test_berths.py tests/gang/test_loading_in_place.py",
    ),
    Mutant(
        "each rank of a stage writes replicated tensors",
        "resilient/state_dict/pipeline.py",
        "    if not writes:\n",
        "    if False:\n",
        "tests/unit/state_dict/test_staged.py",
    ),
    Mutant(
        "each stage writes shared buffers",
        "resilient/state_dict/pipeline.py",
        "self._writes and name not in self._but",
        "self._writes",
        "tests/unit/state_dict/test_staged.py",
    ),
    Mutant(
        "a stage saves only its own names of optimizer groups",
        "resilient/state_dict/pipeline.py",
        '            {**group, "params": names}\n',
        '            {**group, "params": [one for one in names if one in mapped_state]}\n',
        "tests/unit/state_dict/test_staged.py",
    ),
    Mutant(
        "optimizer state with a parameter's name as key counts as the parameter's",
        "resilient/state_dict/optimizer.py",
        "        if key in self._names:\n",
        "        if False:\n",
        "tests/unit/state_dict/test_asked_state.py",
        promise="P6",
    ),
    Mutant(
        "a state hook of an optimizer is skipped",
        "resilient/state_dict/optimizer.py",
        "        and not optimizer._optimizer_state_dict_post_hooks  # noqa: SLF001\n",
        "",
        "tests/unit/state_dict/test_asked_state.py",
        promise="P6",
    ),
    Mutant(
        "optimizer state with an int key counts as a parameter's",
        "resilient/state_dict/optimizer.py",
        "            if isinstance(key, int):\n",
        "            if False:\n",
        "tests/unit/state_dict/test_asked_state.py",
        promise="P6",
    ),
]
