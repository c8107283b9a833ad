"""Defects of commit, rotation, resume and agreement."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

VAULT = "tests/unit/checkpoint"
SWEEP = "tests/crash/test_sweep.py -k one_crash"
FAILED = "tests/unit/test_failed_saves.py"

STEPS = "tests/unit/test_steps.py"

ROUND_TRIP = "tests/unit/state_dict/test_round_trip.py"

MUTANTS = [
    Mutant(
        "a save is not checked against the loader",
        "resilient/checkpoint_engine.py",
        "capture(checkpoint.step, parts, world.rank, self._round_trip)",
        "capture(checkpoint.step, parts, world.rank)",
        f"{ROUND_TRIP} -k at_save",
    ),
    Mutant(
        "a structure is checked at each save",
        "resilient/state_dict/round_trip.py",
        "        if seen is None or fresh:",
        "        seen = None\n        if True:",
        f"{ROUND_TRIP} -k once",
    ),
    Mutant(
        "an array without dimensions comes back as a scalar",
        "resilient/state_dict/flatten.py",
        'tag = "$numpy" if value.ndim else "$array"',
        'tag = "$numpy"',
        f"{ROUND_TRIP} -k dimension",
    ),
    Mutant(
        "the check of a save loads into a scheduler of another class",
        "resilient/state_dict/round_trip.py",
        "    return of_torch and all(map(_is_of_torch, inner))\n",
        "    return True\n",
        f"{ROUND_TRIP} -k changes_no_live",
    ),
    Mutant(
        "the check of a save loads into the live function of a schedule",
        "resilient/state_dict/round_trip.py",
        "made._scale_fn_custom = _copy_of_callable(value)",
        "made._scale_fn_custom = value",
        f"{ROUND_TRIP} -k changes_no_live",
    ),
    Mutant(
        "the check of a save runs again for each key of a crowded dict",
        "resilient/state_dict/round_trip.py",
        "if entries > _ENTRIES_MAX}",
        "if entries < 0}",
        f"{ROUND_TRIP} -k crowded",
    ),
    Mutant(
        "torch gets the empty groups of an FSDP1 optimizer",
        "resilient/state_dict/fsdp1.py",
        'self._optimizer.param_groups = [group for group in live if group["params"]]',
        "self._optimizer.param_groups = list(live)",
        "tests/process/test_empty_groups.py -k two_ranks",
    ),
    Mutant(
        "a resumed counter may be ignored",
        "resilient/checkpointer.py",
        "        self._report_unread_counters()\n",
        "",
        "tests/unit/test_resumed_counters.py",
    ),
    Mutant(
        "a launch that was to end early goes on",
        "resilient/train/run.py",
        "self.ends_here = 0 < self.until_step < step",
        "self.ends_here = False",
        "tests/process/test_same_bits.py -k end_early",
    ),
    Mutant(
        "a launch that was to end early leaves its last step unsaved",
        "resilient/train/run.py",
        ("        save()\n        self.saver.wait()\n        tell(UntilStepReached(step))"),
        ("        tell(UntilStepReached(step))"),
        "tests/process/test_same_bits.py -k end_early",
    ),
    Mutant(
        "files are deleted before the manifest",
        "resilient/checkpoint/garbage_collection.py",
        "        store.delete(checkpoint.manifest_key)\n",
        "        for entry in sorted(store.list(checkpoint.folder + '/'), reverse=True):\n"
        "            store.delete(entry.key)\n",
        SWEEP,
    ),
    Mutant(
        "rotation keeps one too few",
        "resilient/checkpoint/retention.py",
        "if checkpoint not in placed and len(placed) >= retention.keep_last:",
        ("if checkpoint not in placed and len(placed) >= max(retention.keep_last - 1, 1):"),
        SWEEP,
    ),
    Mutant(
        "rotation sweeps every folder without a manifest, saves in flight too",
        "resilient/checkpoint/repository_scan.py",
        (
            "(\n"
            "                newest\n"
            "                and checkpoint < newest\n"
            "                and MANIFEST not in names\n"
            "                and"
        ),
        "(newest and MANIFEST not in names and",
        VAULT,
    ),
    Mutant(
        "an older life rotates",
        "resilient/checkpoint/garbage_collection.py",
        ("        check_fence(store, generation, token)\n        if list_tags"),
        "        if list_tags",
        VAULT,
    ),
    Mutant(
        "an older life commits",
        "resilient/checkpoint/commit.py",
        "    check_fence(store, checkpoint.generation, token)\n",
        "",
        VAULT,
    ),
    Mutant(
        "the manifest is put before the files",
        "resilient/checkpoint/save/persist.py",
        ("        receipt = capture_failure(lambda: _write(context, job"),
        (
            "        from resilient.format.manifest import encode\n"
            "        context.store.put(checkpoint.manifest_key, encode(job.about))\n"
            "        mine = capture_failure(lambda: _write(context, job"
        ),
        SWEEP,
    ),
    Mutant(
        "a life's number is taken without an exclusive create",
        "resilient/checkpoint/generations.py",
        "        store.put_new(key, data)\n        return\n",
        "        store.put(key, data)\n        return\n",
        VAULT,
    ),
    Mutant(
        "bytes are loaded without proof",
        "resilient/checkpoint/restore/read.py",
        "    if digest_file(data) == entry.proof:",
        "    if len(data) == entry.size_bytes:",
        VAULT,
    ),
    Mutant(
        "a document's root is not checked",
        "resilient/format/document.py",
        "or root_digest(canonical(body)) != claimed",
        "",
        "tests/property tests/unit/checkpoint",
    ),
    Mutant(
        "resume takes the highest step of any life",
        "resilient/checkpoint/catalog.py",
        "        candidates=tuple(line),",
        "        candidates=tuple(sorted(whole, key=lambda one: one.step, reverse=True)),",
        VAULT,
    ),
    Mutant(
        "what was committed and lost is forgotten",
        "resilient/checkpoint/catalog.py",
        "        lost=lost,\n    )",
        '        lost="",\n    )',
        VAULT,
    ),
    Mutant(
        "a failed save deletes what is committed",
        "resilient/checkpoint/garbage_collection.py",
        "        store.stat(checkpoint.manifest_key)\n        return\n",
        "        pass\n",
        "tests/unit/test_checkpointer.py",
    ),
    Mutant(
        "a life that saved nothing hides everything before it",
        "resilient/checkpoint/catalog.py",
        "        if parent is None and own:",
        "        if parent is None:",
        VAULT,
    ),
    Mutant(
        "a failing store is taken for damage",
        "resilient/checkpoint/resume_selection.py",
        "        except IntegrityError as error:\n            return None, error.message",
        "        except Exception as error:\n            return None, str(error)",
        "tests/gang",
    ),
    Mutant(
        "only the coordinator's reading counts",
        "resilient/checkpoint/resume_selection.py",
        "    for rank, problem in enumerate(problems):",
        "    for rank, problem in enumerate(problems[:1]):",
        "tests/gang",
    ),
    Mutant(
        "with all damaged, training starts over",
        "resilient/checkpoint/resume_selection.py",
        '        if not plan["candidates"] and not plan["lost"]:',
        '        if not plan["lost"]:',
        "tests/gang",
    ),
    Mutant(
        "a rank's failure is not told to its peers",
        "resilient/distributed/coordination.py",
        ('        if "failure" in answer:\n            return'),
        ('        if "failure" in answer and rank == 0:\n            return'),
        "tests/gang",
    ),
    Mutant(
        "two saves are in flight at once",
        "resilient/checkpoint_engine.py",
        "        self.wait()\n        with self._stall.running():\n            checkpoint =",
        "        with self._stall.running():\n            checkpoint =",
        "tests/unit/test_checkpointer.py",
    ),
    Mutant(
        "an optimizer's state is matched by position",
        "resilient/state_dict/optimizer.py",
        (
            "numbers.get(name, name): _put_together(value)\n"
            '            for name, value in state_dict["state"].items()'
        ),
        ('name: _put_together(value) for name, value in enumerate(state_dict["state"].values())'),
        "tests/unit/state_dict",
    ),
    Mutant(
        "a missing part is started afresh without a word",
        "resilient/state_dict/load.py",
        '        if parts[name].scope == "replicated" and not parts[name].optional:',
        "        if False:",
        "tests/gang",
    ),
    Mutant(
        "an agent asks only who waits for the next round",
        "resilient/elastic/rendezvous/membership.py",
        (" or round_continued_without(self._handler)"),
        "",
        "tests/unit/elastic/test_membership.py",
    ),
    Mutant(
        "a save that nobody took is pending",
        "resilient/checkpoint_engine.py",
        "            if staged.rest:\n",
        "            self._pending = checkpoint\n            if staged.rest:\n",
        FAILED,
    ),
    Mutant(
        "a step in doubt may be saved again",
        "resilient/checkpoint_engine.py",
        "            self._handed.add(checkpoint)\n",
        "",
        FAILED,
    ),
    Mutant(
        "the same manifest of another process fails the save",
        "resilient/checkpoint/commit.py",
        "    except (StoreUnavailable, KeyExists):\n",
        "    except StoreUnavailable:\n",
        FAILED,
    ),
    Mutant(
        "a sink that raises stops what it is told of",
        "resilient/events.py",
        "            except Exception as error:  # noqa",
        "            except OSError as error:  # noqa",
        FAILED,
    ),
    Mutant(
        "a foreign error after the commit fails the save",
        "resilient/checkpoint/save/persist.py",
        ("        _settle_or_tell(context, job, memory, PostCommitPlan"),
        ("        _settle(context, job, memory, PostCommitPlan"),
        FAILED,
    ),
    Mutant(
        "a foreign error after a commit is told as a deletion that failed",
        "resilient/checkpoint/save/persist.py",
        "        if isinstance(cause, ResilientError):\n",
        "        if True:\n",
        f"{FAILED} -k deletion",
    ),
    Mutant(
        "a truth is taken for a step",
        "resilient/format/keys.py",
        "    if not is_truth and not getattr",
        "    if not getattr",
        STEPS,
    ),
    Mutant(
        "a row of steps is taken for one",
        "resilient/format/keys.py",
        ' and not getattr(step, "ndim", 0) and',
        " and",
        STEPS,
    ),
    Mutant(
        "a step that no name can say is taken",
        "resilient/format/keys.py",
        "    if not 0 <= number <= STEP_MAX:\n",
        "    if number < 0:\n",
        STEPS,
    ),
    Mutant(
        "the spine takes whatever a loop calls a step",
        "resilient/checkpoint_engine.py",
        "CheckpointId(generation.number, whole_step(step))",
        "CheckpointId(generation.number, step)",
        STEPS,
    ),
]
