"""Defects of reading what other tools wrote: what would be executed, believed or passed over."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PICKLES = "tests/unit/layouts/test_pickles.py"
ARCHIVES = "tests/unit/layouts/test_archives.py"
ENGINES = "tests/unit/layouts/test_engines.py"
FOLDERS = "tests/unit/layouts/test_folders.py"
TOOLS = "tests/unit/layouts/test_tools.py"
SLICES = "tests/unit/layouts/test_slices_of_tools.py"
AGREEING = "tests/unit/layouts/test_agreeing.py"
SHARDS = "tests/unit/layouts/test_shards_and_index.py"
DAMAGE = "tests/damage/test_damage.py"
STORAGE = "tests/unit/storage/test_folder.py"

CUDA = "tests/unit/layouts/test_cuda_states.py"

RUNS = "tests/unit/layouts/test_runs_of_tools.py"

MUTANTS = [
    Mutant(
        "what a file names is code to be pasted",
        "resilient/layouts/pickle_names.py",
        "module in _LIBRARIES and attribute.isidentifier() and attribute",
        "module in _LIBRARIES and attribute",
        "tests/unit/layouts/test_loading.py",
    ),
    Mutant(
        "a metric in a name is a step",
        "resilient/layouts/detect.py",
        '_METRIC.sub("", name.rpartition("/")[2].removesuffix(".ckpt"))',
        'name.rpartition("/")[2]',
        RUNS,
    ),
    Mutant(
        "the latest is the newest, whatever a tracker names",
        "resilient/layouts/detect.py",
        "enumerate(run) if checkpoint.name in latest), 0)",
        "enumerate(run) if not latest), 0)",
        RUNS,
    ),
    Mutant(
        "a part of a checkpoint is one",
        "resilient/layouts/detect.py",
        "not layout or _is_below(name, taken) or",
        "not layout or",
        RUNS,
    ),
    Mutant(
        "a tracker that names nothing is passed over",
        "resilient/layouts/detect.py",
        "            elif tag and not _is_any_there(",
        "            elif not tag and not _is_any_there(",
        RUNS,
    ),
    Mutant(
        "states of CUDA that no file has are not missed",
        "resilient/layouts/training_state.py",
        'if device.startswith("cuda") and',
        "if False and",
        f"{CUDA} -k no_file_has",
    ),
    Mutant(
        "a rank without a state of CUDA is not told",
        "resilient/layouts/training_state.py",
        "if others := [other for other, (its, _) in counts.items() if its]:",
        "if others := []:",
        f"{CUDA} -k lost_its_own",
    ),
    Mutant(
        "states of CUDA of another number of ranks are taken",
        "resilient/layouts/training_state.py",
        "        devices = [state] if is_alone else state\n",
        "        devices = [state] if isinstance(state, TensorRef) else state\n",
        f"{CUDA} -k another_number",
    ),
    Mutant(
        "a file whose state of CUDA is broken is left out whole",
        "resilient/layout_repair/donors.py",
        ("all(\n        problem.loses == OF_DEVICES or "),
        "all(",
        f"{CUDA} -k keeps_what_is_whole",
    ),
    Mutant(
        "a rank's states of the model are not missed",
        "resilient/layouts/deepspeed.py",
        ("    ranks = max(world or 1, max(rank for rank, _ in present) + 1) if cut else 1"),
        "    ranks = 1",
        f"{ENGINES} -k every_rank_are_needed",
    ),
    Mutant(
        "ranks that layers were cut over are not missed",
        "resilient/layouts/deepspeed.py",
        "    rows = max(rows, last)",
        "    rows = last",
        f"{ENGINES} -k layers_were_cut_over",
    ),
    Mutant(
        "model states of another save are believed",
        "resilient/layouts/deepspeed.py",
        "    if len(set(known.values())) < 2:  # noqa: PLR2004 - two of them differ",
        "    if known is not None:",
        f"{ENGINES} -k of_another_save",
    ),
    Mutant(
        "an engine's step is not held against its Trainer's",
        "resilient/layouts/deepspeed.py",
        "if found is not None and step is not None and step != found:",
        "if found is not None and step is not None and source != _TRAINER and step != found:",
        f"{ENGINES} -k older_engine_alone",
    ),
    Mutant(
        "a tag's name need not be that of its step",
        "resilient/layouts/deepspeed.py",
        "    return int(named[1]) if named else None",
        "    return None if named else None",
        f"{ENGINES} -k tag_of_another_name",
    ),
    Mutant(
        "a part of the optimizer may be of an earlier step",
        "resilient/layouts/deepspeed.py",
        "    low = wanted - _skipped(engine)",
        "    low = 0",
        f"{ENGINES} -k began_anew",
    ),
    Mutant(
        "parts of different steps are alike",
        "resilient/layouts/deepspeed.py",
        "        is_fatal = is_mixed or step > wanted or _trainer_step(engine) is not None",
        "        is_fatal = step > wanted or _trainer_step(engine) is not None",
        f"{ENGINES} -k part_of_another_step",
    ),
    Mutant(
        "updates that fp16 skipped count as lost",
        "resilient/layouts/deepspeed.py",
        (
            "    return max((value or 0 for value in _said(engine, "
            '"skipped_steps").values()), default=0)'
        ),
        '    return 0 * len(_said(engine, "skipped_steps"))',
        f"{ENGINES} -k fp16",
    ),
    Mutant(
        "what `latest` names within a Trainer's folder is believed",
        "resilient/layouts/deepspeed.py",
        "    if is_there and _named_step(tag) not in (None, _trainer_step(engine)):",
        "    if is_there and _named_step(tag) is False:",
        f"{ENGINES} -k latest_that_is_not",
    ),
    Mutant(
        "a Trainer's folder needs no `latest`",
        "resilient/layouts/deepspeed.py",
        '    if latest != tag and "latest_universal" not in engine.listing.sizes:',
        '    if latest is None and "latest_universal" not in engine.listing.sizes:',
        f"{ENGINES} -k latest_that_is_not",
    ),
    Mutant(
        "a copy of another rank's part is that rank's",
        "resilient/layouts/deepspeed.py",
        "        if other is not part and not _is_blank(part.archive):",
        "        if other is not part and _is_blank(part.archive):",
        f"{ENGINES} -k copy_of_another",
    ),
    Mutant(
        "ranks with nothing but filling are copies",
        "resilient/layouts/deepspeed.py",
        "                if any(archive.folder.read(archive.name, start, size_bytes)):",
        "                if archive.folder.read(archive.name, start, size_bytes):",
        f"{ENGINES} -k nothing_but_filling",
    ),
    Mutant(
        "checksums of numbers are not looked at",
        "resilient/layouts/checksums.py",
        "        if member.CRC and not is_whole:",
        "        if member.CRC and not is_whole and False:",
        DAMAGE,
    ),
    Mutant(
        "a NaN is a number like others",
        "resilient/diff/foreign_verify.py",
        "        nans += int(np.isnan(numbers).sum())",
        "        nans += int(np.isnan(numbers).sum()) * 0",
        DAMAGE,
    ),
    Mutant(
        "a schedule of accelerate that is gone is not missed",
        "resilient/layouts/accelerate.py",
        'isinstance(group, dict) and "initial_lr" in group for group',
        'isinstance(group, dict) and "initial" in group for group',
        f"{TOOLS} -k stop_at_is_told",
    ),
    Mutant(
        "Lightning is thought to keep its place within an epoch",
        "resilient/layouts/lightning.py",
        "    if is_within and not kept:",
        "    if is_within and kept:",
        f"{TOOLS} -k begin_anew",
    ),
    Mutant(
        "parameters that a universal checkpoint lacks are not counted",
        "resilient/layouts/deepspeed_universal.py",
        "    lost = [shape for shape in shapes if shape not in pieces]",
        "    lost = [shape for shape in shapes if shape in ()]",
        f"{SLICES} -k deepspeed_would_miss",
    ),
    Mutant(
        "a folder of Megatron needs nothing that is common",
        "resilient/layouts/megatron.py",
        '    if name not in listing.sizes and config and "common_backend" not in config:',
        "    if name not in listing.sizes and config:",
        f"{SLICES} -k megatron_would_miss",
    ),
    Mutant(
        "loaders of torchtitan without a place are not missed",
        "resilient/layouts/torchtitan.py",
        ("    gaps = [str(rank) for rank in range(last) if rank not in ranks][:_GAPS_MAX]"),
        "    gaps = [str(rank) for rank in range(0) if rank not in ranks][:_GAPS_MAX]",
        f"{SLICES} -k torchtitan_would",
    ),
    Mutant(
        "any tuple may be a key",
        "resilient/layouts/pickle_reader.py",
        "if len(key) > DEPTH_MAX or not all(_is_plain(element) for element in key):",
        "if len(key) > DEPTH_MAX:",
        f"{PICKLES} -k tuple_of_tuples",
    ),
    Mutant(
        "opcodes are not counted",
        "resilient/layouts/pickle_reader.py",
        "            if count >= OPCODES_MAX:",
        "            if count < 0:",
        f"{PICKLES} -k more_opcodes",
    ),
    Mutant(
        "a member that is compressed is read",
        "resilient/layouts/torch_zip.py",
        "    if info.compress_type != zipfile.ZIP_STORED:",
        "    if info.compress_type < 0:",
        f"{ARCHIVES} -k swell",
    ),
    Mutant(
        "checksums of pickles are not looked at",
        "resilient/layouts/torch_zip.py",
        "or (info.CRC and zlib.crc32(data) != info.CRC)",
        "or False",
        f"{ARCHIVES} -k checksum",
    ),
    Mutant(
        "holes between tensors are fine",
        "resilient/layouts/json_files.py",
        "        if begin != at:",
        "        if begin < at:",
        f"{ARCHIVES} -k lies",
    ),
    Mutant(
        "links are followed wherever they lead",
        "resilient/storage/folder.py",
        "        if not self._single and not _is_inside(",
        "        if False and not _is_inside(",
        f"{STORAGE} -k links",
    ),
    Mutant(
        "slices that end too early are passed over",
        "resilient/layouts/dcp.py",
        "        elif piece.start + piece.size_bytes > size_bytes:",
        "        elif piece.start > size_bytes:",
        f"{FOLDERS} -k without_its_pieces",
    ),
    Mutant(
        "a missing optimizer costs nothing",
        "resilient/layouts/accelerate.py",
        "Problem(name, str(error), loses, is_fatal=is_fatal, cure=cure)",
        'Problem(name, str(error), "", is_fatal=is_fatal)',
        f"{FOLDERS} -k what_is_left",
    ),
    Mutant(
        "any random state is taken",
        "resilient/layouts/training_state.py",
        "        if takes and not takes(state):",
        "        if takes and not takes and not takes(state):",
        f"{AGREEING} -k no_generator_takes",
    ),
    Mutant(
        "a numbered random state may be of one rank alone",
        "resilient/layouts/training_state.py",
        "_NUMBERED_LEAST = 2",
        "_NUMBERED_LEAST = 1",
        f"{AGREEING} -k numbered_random_state",
    ),
    Mutant(
        "a parameter may be in two groups",
        "resilient/layouts/consistency.py",
        "    if len(own) != len(named):",
        "    if len(own) > len(named):",
        f"{AGREEING} -k fit_their_states",
    ),
    Mutant(
        "a tensor may be in two shards",
        "resilient/layouts/weights.py",
        "        if other is not tensor and other.files != tensor.files:",
        "        if other is not tensor and other.files == tensor.files:",
        f"{SHARDS} -k two_shards",
    ),
    Mutant(
        "an index may lack what its shards have",
        "resilient/layouts/weights.py",
        "    lacking = [tensor.name for tensor in tensors if tensor.name not in mapped]",
        "    lacking = [tensor.name for tensor in tensors if tensor.name in ()]",
        f"{SHARDS} -k says_else",
    ),
    Mutant(
        "the rates of an optimizer are not held against its schedule",
        "resilient/layouts/consistency.py",
        "        if not math.isclose(left, right, rel_tol=_RATES_APART, abs_tol=1e-30):",
        "        if math.isnan(left - right):",
        f"{AGREEING} -k contradicts_itself",
    ),
    Mutant(
        "an optimizer may be behind its training",
        "resilient/layouts/consistency.py",
        "    if may_skip:",
        "    if may_skip or True:",
        f"{AGREEING} -k behind",
    ),
    Mutant(
        "a mean of squares may be negative",
        "resilient/diff/foreign_verify.py",
        "    if counts.negative and tensor.part == OPTIMIZER and",
        "    if counts.negative and tensor.part == MODEL and",
        f"{AGREEING} -k negative",
    ),
    Mutant(
        "damaged arguments stop a resume",
        "resilient/layouts/checksums.py",
        "what != BEHIND and name != _UNREAD",
        "what != BEHIND and name",
        f"{AGREEING} -k arguments_that_are_cut",
    ),
]
