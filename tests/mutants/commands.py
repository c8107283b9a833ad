"""Defects of what the commands share: reading in part, writing for others, terminals, the edge."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SAMPLING = "resilient/checkpoint/verify.py"
SAMPLED = "tests/unit/checkpoint/test_verify_sampling.py"
PARTLY = "cli/resilient_cli/survey.py"
PARTLY_TOLD = "tests/cli/test_verifying_partly.py"
WRITING = "resilient/diff/safetensors_export.py"
WRITTEN = "tests/cli/test_exporting_plainly.py"
RENDER = "cli/resilient_cli/output.py"
APP = "cli/resilient_cli/app.py"
TERMINALS = "tests/cli/test_terminals.py"
EDGE = "tests/cli/test_edge.py"
TRAIN = "cli/resilient_cli/commands/train.py"

MUTANTS = [
    Mutant(
        "a look at a checkpoint reads more than the heads of its files",
        "resilient/layouts/json_files.py",
        "head = folder.read(name, 0, len(_POINTER))\n",
        "head = folder.read(name, 0, 1 << 20)[: len(_POINTER)]\n",
        "tests/cli/test_huge.py",
    ),
    Mutant(
        "an id is answered with advice in words",
        "cli/resilient_cli/help_texts/errors.md",
        "- resilient doctor --repo REPO\n- resilient help storage",
        "- look at the URL\n- resilient help storage",
        "tests/cli/test_manual.py -k next_is_a_command",
    ),
    Mutant(
        "a launcher of another start of the machine is alive",
        "cli/resilient_cli/liveness.py",
        "        return False  # all that ran then is gone\n",
        "        pass\n",
        "tests/cli/test_stopping.py -k took_a_number",
    ),
    Mutant(
        "a launcher is looked for by a clock that was set",
        "cli/resilient_cli/liveness.py",
        "if not (agent.boot and ours):",
        "if True:",
        "tests/cli/test_stopping.py -k set_since",
    ),
    Mutant(
        "an undo takes the id of its prune for a repository",
        "cli/resilient_cli/commands/prune.py",
        "    ids = [one for one in words if parse_prune(one)]\n",
        "    ids = [one for one in (prune_id,) if one]\n",
        "tests/cli/test_keeping.py -k older_prune_alone",
    ),
    Mutant(
        "a prune whose time is over counts as taken back",
        "cli/resilient_cli/commands/prune.py",
        "if mark is None or mark.until <= SystemClock().now_iso():",
        "if mark is None:",
        "tests/cli/test_keeping.py -k time_is_over",
    ),
    Mutant(
        "what was pruned is brought back by the newest undo, whichever let it go",
        "resilient/checkpoint/refs.py",
        (" --undo {shell_quote(mark.prune)}"),
        " --undo",
        "tests/cli/test_trash_told.py -k no_later_prune",
    ),
    Mutant(
        "a help is as wide as Typer wants it",
        "cli/resilient_cli/app.py",
        "    command.context_class = HelpContext\n",
        "",
        f"{TERMINALS} -k no_word_is_cut",
    ),
    Mutant(
        "options in an example are cut at their hyphens",
        "cli/resilient_cli/app.py",
        "break_on_hyphens=False",
        "break_on_hyphens=True",
        f"{TERMINALS} -k no_word_is_cut",
    ),
    Mutant(
        "a choice is wider than the terminal",
        "cli/resilient_cli/app.py",
        "|(?<=\\|))",
        ")",
        f"{TERMINALS} -k no_word_is_cut",
    ),
    Mutant(
        "what commands do is cut short",
        "cli/resilient_cli/app.py",
        "help=lazy.help, short_help=lazy.help)",
        "help=lazy.help)",
        f"{TERMINALS} -k no_word_is_cut",
    ),
    Mutant(
        "a moment's seconds are taken for a file in the checkpoint",
        "cli/resilient_cli/commands/cat.py",
        "None if _ALONE.fullmatch(text) else _INSIDE",
        "_INSIDE",
        "tests/cli/test_cat.py -k reference_ends",
    ),
    Mutant(
        "a file with a colon in its name cannot be named",
        "cli/resilient_cli/commands/cat.py",
        "place or Path(ref).exists()",
        "place",
        "tests/cli/test_cat.py -k though_it_has_a_colon",
    ),
    Mutant(
        "what stands behind a colon is forgotten where a repository is named",
        "cli/resilient_cli/commands/cat.py",
        "return split[0], split[1], name",
        "return split[0], split[1], None",
        "tests/cli/test_cat.py -k behind_a_colon_is",
    ),
    Mutant(
        "what is in the trash is told as if it had never been",
        "resilient/checkpoint/refs.py",
        ("    if checkpoint is None:\n        return NothingToResume("),
        "    if True:\n        return NothingToResume(",
        "tests/cli/test_trash_told.py -k names_what",
    ),
    Mutant(
        "a repair of what is in the trash says nothing of it",
        "resilient/checkpoint/repair.py",
        "    if checkpoint in trash_of(folders_of(store)):\n",
        "    if False:\n",
        "tests/cli/test_trash_told.py -k names_what",
    ),
    Mutant(
        "a listing that fails hints at itself",
        "cli/resilient_cli/app.py",
        'if words == ["resilient", *given] else hint',
        "if False else hint",
        "tests/cli/test_trash_told.py -k repeats",
    ),
    Mutant(
        "a URL becomes a folder that is called s3:",
        "cli/resilient_cli/repositories.py",
        "    if match is None:\n        return path\n    if match[1]",
        "    if match is None or match[1] == 's3':\n        return path\n    if match[1]",
        "tests/cli/test_local_places.py",
    ),
    Mutant(
        "an answer shows the signature of a URL",
        RENDER,
        "    if not answer.is_verbatim:\n        answer = _cleared(answer)\n",
        "",
        "tests/cli/test_canary.py -k no_signature",
    ),
    Mutant(
        "an error shows the signature of a URL",
        RENDER,
        "clean = redact_json(fields)",
        "clean = dict(fields)",
        "tests/cli/test_canary.py -k unknown_command",
    ),
    Mutant(
        "an event's record shows the signature of a URL",
        "resilient/events.py",
        ("json.dumps(redact_json(record))"),
        "json.dumps(record)",
        "tests/unit/test_events.py -k no_secret",
    ),
    Mutant(
        "a chunk that two checkpoints need is read twice",
        SAMPLING,
        "key = manifest.key(entry.name), number\n",
        "key = manifest.checkpoint.key(entry.name), number\n",
        f"{SAMPLED} -k each_chunk_once",
    ),
    Mutant(
        "each sample is the same",
        SAMPLING,
        "chosen = random.sample(chunks, min(len(chunks), int(wanted)))",
        "chosen = chunks[: min(len(chunks), int(wanted))]",
        f"{SAMPLED} -k others_each_time",
    ),
    Mutant(
        "a share of few chunks is none",
        SAMPLING,
        "wanted = -(-len(chunks) * share // 1)",
        "wanted = len(chunks) * share // 1",
        f"{SAMPLED} -k others_each_time",
    ),
    Mutant(
        "damage is of the checkpoint that wrote the file alone",
        SAMPLING,
        "for manifest in chunk.manifests if problem else ():",
        "for manifest in chunk.manifests[-1:] if problem else ():",
        f"{SAMPLED} -k of_both",
    ),
    Mutant(
        "a byte that flips on the way is damage",
        SAMPLING,
        "    for _ in range(2):\n",
        "    for _ in range(1):\n",
        f"{SAMPLED} -k on_the_way",
    ),
    Mutant(
        "the time is never over",
        PARTLY,
        "                over.append(done)\n",
        "                pass\n",
        f"{PARTLY_TOLD} -k time_is_over",
    ),
    Mutant(
        "what the sizes told is told again by the bytes",
        PARTLY,
        "if it.file not in known]",
        "]",
        f"{PARTLY_TOLD} -k told_once",
    ),
    Mutant(
        "a damaged checkpoint is exported",
        "cli/resilient_cli/commands/cp.py",
        "    require_whole(side)\n",
        "",
        f"{WRITTEN} -k damaged",
    ),
    Mutant(
        "tensors have the name of the key that a script saved its model under",
        WRITING,
        "name.removeprefix(key) if is_joined else name",
        "name",
        f"{WRITTEN} -k pieces",
    ),
    Mutant(
        "a pipe that closes ends the command before its verdict",
        RENDER,
        "    except BrokenPipeError:\n        ignore_broken_pipe()\n",
        "    except BrokenPipeError:\n        raise\n",
        f"{TERMINALS} -k closes_early",
    ),
    Mutant(
        "a letter that the locale lacks ends the command",
        APP,
        "    escape_unencodable_text(sys.stdout, sys.stderr)\n",
        "",
        f"{TERMINALS} -k locale",
    ),
    Mutant(
        "a table is as wide as it likes in any terminal",
        RENDER,
        "        if not width or before",
        "        if width or before",
        f"{TERMINALS} -k forty",
    ),
    Mutant(
        "a path is cut in the middle",
        RENDER,
        "break_long_words=False",
        "break_long_words=True",
        f"{TERMINALS} -k copied",
    ),
    Mutant(
        "a traceback that is kept holds the secrets of a URL",
        APP,
        'text = redacted_text("".join(traceback.format_exception(error)))\n    try',
        'text = "".join(traceback.format_exception(error))\n    try',
        f"{EDGE} -k nobody_asked_for",
    ),
    Mutant(
        "the timeout of one command is that of the next",
        APP,
        "        WITHIN_SECONDS.reset(within)\n",
        "        pass\n",
        f"{EDGE} -k timeout",
    ),
    Mutant(
        "every end is called by the number of a requeue",
        TRAIN,
        "requeue_exit_code if code == Preempted.exit_code else code",
        "requeue_exit_code",
        "tests/cli/test_train.py -k another_number",
    ),
]
