"""Defects of what mends checkpoints of other tools."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

FILES = "tests/unit/layout_repair/test_files.py"
RUNS = "tests/unit/layout_repair/test_runs.py"
SWEEP = "tests/crash/test_repair_sweep.py -k anywhere_in_a_repair"
HISTORIES = "tests/unit/layout_repair/test_histories.py"
AGAIN = "tests/unit/train/test_random_states_again.py"
COPIES = "tests/unit/checkpoint/test_repair_from_copies.py"

MUTANTS = [
    Mutant(
        "a bit of much content is put back by chance",
        "resilient/layout_repair/zip_repair.py",
        "    if len(data) > BYTES_MAX:\n",
        "    if False:\n",
        f"{FILES} -k two_flipped",
    ),
    Mutant(
        "a zip that was cut before its last member is called whole",
        "resilient/layout_repair/zip_repair.py",
        "    if not scan.has_all:\n",
        "    if False:\n",
        f"{FILES} -k lost_a_member",
    ),
    Mutant(
        "a directory is written without the end that large files need",
        "resilient/layout_repair/zip_repair.py",
        "    return entries + end + locator + last\n",
        "    return entries + last\n",
        f"{FILES} -k directory_is_written",
    ),
    Mutant(
        "a name twice in a header is dropped whatever it says",
        "resilient/layout_repair/file_repair.py",
        ("        or any(copy != found[key] for key in doubles for copy in doubles[key])\n"),
        "",
        f"{FILES} -k lose_doubles",
    ),
    Mutant(
        "an index is made of slices that are damaged",
        "resilient/layout_repair/index_repair.py",
        ("        if not scan.has_all or not all(member.is_whole for member in scan.members):\n"),
        "        if not scan.has_all:\n",
        f"{RUNS} -k damaged_or_another",
    ),
    Mutant(
        "an index of another model is taken",
        "resilient/layout_repair/index_repair.py",
        "            if data != kinds.get((fqn, offsets)):\n",
        "            if False:\n",
        f"{RUNS} -k another_model",
    ),
    Mutant(
        "a schedule is of the step that it was made from",
        "resilient/layout_repair/trainer_state_repair.py",
        ('    return {**donor_state, **more, "last_epoch": each * step, "_last_lr": rates}\n'),
        '    return {**donor_state, **more, "last_epoch": last, "_last_lr": rates}\n',
        f"{RUNS} -k to_the_bit",
    ),
    Mutant(
        "a schedule has the rates of the step that it was made from",
        "resilient/layout_repair/trainer_state_repair.py",
        '"last_epoch": each * step, "_last_lr": rates}\n',
        '"last_epoch": each * step}\n',
        f"{RUNS} -k to_the_bit",
    ),
    Mutant(
        "files are taken from a copy of another checkpoint",
        "resilient/layout_repair/donors.py",
        "    if doubtful or not wanted:\n",
        "    if not wanted:\n",
        f"{RUNS} -k only_if_it_is_the_same",
    ),
    Mutant(
        "a history has steps that were not made yet",
        "resilient/layout_repair/trainer_state_repair.py",
        ('    return [entry for entry in entries if (whole(entry.get("step")) or 0) <= step]\n'),
        "    return entries\n",
        f"{RUNS} -k later_step",
    ),
    Mutant(
        "what was logged of a life that went on from elsewhere is taken",
        "resilient/layout_repair/training_logs.py",
        "    return min(last, limit) if first <= limit else 0\n",
        "    return last\n",
        f"{HISTORIES} -k several_lives",
    ),
    Mutant(
        "a spoiled record of TensorBoard is believed",
        "resilient/layouts/tfevents.py",
        'int.from_bytes(body[length:], "little")\n',
        "masked_sum(body[:length])\n",
        f"{HISTORIES} -k left_out_and_told",
    ),
    Mutant(
        "digits that TensorBoard did not keep are not told",
        "resilient/layout_repair/trainer_state_repair.py",
        '            known.lost += ["digits", ',
        "            known.lost += [",
        f"{HISTORIES} -k digits_are_lost",
    ),
    Mutant(
        "a spoiled history is called whole",
        "resilient/layout_repair/trainer_state_repair.py",
        '*(["history"] if log.broken else [])]',
        "]",
        f"{HISTORIES} -k left_out_and_told",
    ),
    Mutant(
        "the summary of a training is in the state of its last save",
        "resilient/layout_repair/training_logs.py",
        'if entry["step"] < step or _SUMMARY not in entry]',
        "]",
        f"{HISTORIES} -k summary",
    ),
    Mutant(
        "what a link beside a checkpoint leads to is read",
        "resilient/layout_repair/training_logs.py",
        "place.exists() and not place.is_symlink()",
        "place.exists()",
        f"{HISTORIES} -k link_beside",
    ),
    Mutant(
        "a worse evaluation is called the best",
        "resilient/layout_repair/trainer_state_repair.py",
        "(max if is_greater else min)",
        "(min if is_greater else max)",
        f"{HISTORIES} -k best_is_found",
    ),
    Mutant(
        "a folder is named for the step of which a file got into it",
        "resilient/layout_repair/index_repair.py",
        "    if any(donor.url.rstrip",
        "    if False and any(donor.url.rstrip",
        f"{RUNS} -k file_of_another_step",
    ),
    Mutant(
        "a folder of mixed steps is named for the step of most",
        "resilient/layout_repair/index_repair.py",
        '    if len(counted) > 1 and case.contents.layout == "torchtitan":\n',
        "    if False:\n",
        f"{RUNS} -k file_of_another_step",
    ),
    Mutant(
        "a copy of a checkpoint of mixed steps is taken for another step",
        "resilient/layout_repair/plan.py",
        "    if is_mixed and len(names) == 1:\n",
        "    if False:\n",
        f"{RUNS} -k file_of_another_step",
    ),
    Mutant(
        "a state that was made anew has no place for the Trainer's control",
        "resilient/layout_repair/trainer_state_repair.py",
        ".setdefault(CONTROL, _control())",
        "",
        f"{HISTORIES} -k run_of_transformers",
    ),
    Mutant(
        "the place of a callback is lost with its counters",
        "resilient/layout_repair/trainer_state_repair.py",
        '        known.state["stateful_callbacks"] = dict(callbacks)\n',
        "        pass\n",
        f"{RUNS} -k place_of_a_callback",
    ),
    Mutant(
        "tensors that were cut are saved as whole",
        "resilient/layout_repair/file_repair.py",
        "at + end - begin <= size_bytes:\n",
        "True:\n",
        f"{RUNS} -k tensor_by_tensor",
    ),
    Mutant(
        "a file that is longer is promised whole unseen",
        "resilient/checkpoint/repair.py",
        "    if damage.chunks is None or damage.chunks:\n",
        "    if True:\n",
        f"{COPIES} -k longer_file",
    ),
    Mutant(
        "another step is not asked for what did not change",
        "resilient/checkpoint/repair.py",
        "    near += siblings_of(store, manifest) if found else []\n",
        "",
        f"{COPIES} -k did_not_change",
    ),
    Mutant(
        "a damaged file is replaced before it is kept",
        "resilient/checkpoint/repair.py",
        "        store.put(kept, damaged)\n    store.put(key, data)\n",
        "    store.put(key, data)\n    if kept:\n        store.put(kept, damaged)\n",
        SWEEP,
    ),
    Mutant(
        "other damage takes the place of what was kept before",
        "resilient/checkpoint/repair.py",
        "digest_bytes(damaged)))",
        "digest_bytes(data)))",
        f"{COPIES} -k goes_with_its",
    ),
    Mutant(
        "damage of an older folder's file is kept in that folder",
        "resilient/checkpoint/repair.py",
        'kept = checkpoint.key(aside_name(key.rpartition("/")[2], digest_bytes(damaged)))',
        'kept = f"{key.rpartition(chr(47))[0]}/" + aside_name("a.json", digest_bytes(damaged))',
        f"{COPIES} -k older_checkpoint",
    ),
    Mutant(
        "states of CUDA are not made again with the others",
        "resilient/train/hf_interop/rebuild.py",
        "_DEVICES_MAX = 17\n",
        "_DEVICES_MAX = 1\n",
        f"{AGAIN} -k come_back_with_it",
    ),
    Mutant(
        "a random state is made for another step",
        "resilient/train/hf_interop/rebuild.py",
        "seed_between_steps(seed, step - 1,",
        "seed_between_steps(seed, step,",
        f"{AGAIN} -k bit_for_bit",
    ),
    Mutant(
        "the seed of the arguments outranks that of the run",
        "resilient/train/hf_interop/rebuild.py",
        (
            "            return int(read_parts(engine, manifest, "
            '["reduction"])["reduction"]["seed"])\n'
        ),
        "            pass\n",
        f"{AGAIN} -k seed_of_the_checkpoint",
    ),
    Mutant(
        "a lost random state is told as if the data position were lost too",
        "resilient/train/hf_interop/rebuild.py",
        ' and "trainer_state" not in parts:\n',
        ":\n",
        "tests/cli/test_repairing.py -k place_that_the_state",
    ),
]
