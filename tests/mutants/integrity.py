"""Defects of proving, signing and bounding."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BITS = "tests/unit/checkpoint/test_every_bit.py -k every_flipped_bit"
BESIDE = "tests/unit/checkpoint/test_every_bit_beside.py"
SIGNING = "tests/unit/checkpoint/test_signing.py tests/unit/checkpoint/test_signing_keys.py"
BOUNDS = "tests/unit/checkpoint/test_bounds.py"
DEEP = "tests/unit/checkpoint/test_deep.py"
FUZZ = "tests/property/test_fuzz_readers.py -k tree"

MUTANTS = [
    Mutant(
        "a checkpoint whose manifest was deleted is no damage to verify",
        "resilient/checkpoint/verify.py",
        "            yield Finding(key, tensors, problem, fix=way)\n",
        "            pass\n",
        "tests/cli/test_ckpt.py -k newest_manifest_is_damage",
    ),
    Mutant(
        "what a killed save left is damage to verify",
        "resilient/checkpoint/verify.py",
        "if manifest is not None and set(own) <= set(folders[folder]):",
        "if manifest is not None:",
        "tests/cli/test_ckpt.py -k killed_save_left",
    ),
    Mutant(
        "ranks that train each for itself save one model",
        "resilient/state_dict/statefuls.py",
        "    if ranks == 1 or dist.is_initialized():\n",
        "    if ranks:\n",
        "tests/process/test_ranks_alone.py -k loop",
    ),
    Mutant(
        "the root is not compared",
        "resilient/format/document.py",
        "    if not _is_canonical(fields, data) or root_digest(canonical(body)) != claimed:\n",
        "    if not _is_canonical(fields, data):\n",
        BITS,
    ),
    Mutant(
        "any spelling of a document is taken",
        "resilient/format/document.py",
        "    if not _is_canonical(fields, data) or root_digest(canonical(body)) != claimed:\n",
        "    if root_digest(canonical(body)) != claimed:\n",
        "tests/unit/checkpoint/test_every_bit.py -k right_one",
    ),
    Mutant(
        "nobody looks at the second copy of a manifest",
        "resilient/checkpoint/verify.py",
        '    problem = copy_problem(store, checkpoint, level) if manifest.parity else ""\n',
        '    problem = ""\n',
        BESIDE,
    ),
    Mutant(
        "verify believes what it has not proved",
        "resilient/checkpoint/verify.py",
        "    except (IntegrityError, KeyNotFound):\n        return False\n    return True\n",
        "    except (IntegrityError, KeyNotFound):\n        return True\n    return True\n",
        "tests/unit/checkpoint/test_verify.py",
    ),
    Mutant(
        "verify holds a sound file whole",
        "resilient/checkpoint/verify.py",
        'if level == "full" and _is_whole(store, manifest, entry):',
        "if False:",
        "tests/unit/checkpoint/test_verify.py",
    ),
    Mutant(
        "a copy of a manifest is there or not, whatever it says",
        "resilient/checkpoint/verify.py",
        '        if level == "quick":\n            store.stat(checkpoint.copy_key)',
        "        if True:\n            store.stat(checkpoint.copy_key)",
        BESIDE,
    ),
    Mutant(
        "the seal of a segment is not looked at",
        "resilient/checkpoint/ledger_segments.py",
        "    return fetch(store, key, lambda data: decode_segment(data, key), DOCUMENT_BYTES_MAX)\n",
        "    return read_altered(store, key)\n",
        BESIDE,
    ),
    Mutant(
        "any mac will do",
        "resilient/format/signature.py",
        '    if not hmac.compare_digest(str(fields["mac"]).encode(), expected.encode()):\n',
        "    if False:\n",
        SIGNING,
    ),
    Mutant(
        "the signature comes after the manifest",
        "resilient/checkpoint/commit.py",
        "    if signature is not None:\n        put_signature(store, checkpoint, root, signature)\n    put_manifest(store, checkpoint.manifest_key, data)\n",
        "    put_manifest(store, checkpoint.manifest_key, data)\n    if signature is not None:\n        put_signature(store, checkpoint, root, signature)\n",
        SIGNING,
    ),
    Mutant(
        "what was signed of the files is not looked at",
        "resilient/checkpoint/restore/read.py",
        "        check_contents(manifest, signed, proved.files)\n",
        "        pass\n",
        SIGNING,
    ),
    Mutant(
        "the mac leaves the files out",
        "resilient/format/signature.py",
        'canonical({"manifest": root, "files": dict(files)})',
        'canonical({"manifest": root})',
        SIGNING,
    ),
    Mutant(
        "all signatures have one name",
        "resilient/format/keys.py",
        '    return f"signature-{root[:_ROOT_LENGTH]}.json"\n',
        '    return "signature-0.json"\n',
        SIGNING,
    ),
    Mutant(
        "one part is loaded unsigned",
        "resilient/checkpoint_engine.py",
        ("checkpoint, context.read_request({stored}, landing.boxes)\n            )"),
        "checkpoint, replace(context, signing=type(context.signing)()).read_request({stored}, landing.boxes))",
        SIGNING,
    ),
    Mutant(
        "resume asks for no signature",
        "resilient/checkpoint_engine.py",
        "self._desk.read_request(names, ",
        "replace(self._desk, signing=type(self._desk.signing)()).read_request(names, ",
        SIGNING,
    ),
    Mutant(
        "the key is shown",
        "resilient/format/signature.py",
        "    secret: bytes = field(repr=False)\n",
        "    secret: bytes\n",
        SIGNING,
    ),
    Mutant(
        "an object of any length is read",
        "resilient/checkpoint/verified_read.py",
        "    if size_bytes > size_bytes_max:\n",
        "    if size_bytes > 1 << 50:\n",
        BOUNDS,
    ),
    Mutant(
        "an empty axis hides the others",
        "resilient/format/document.py",
        '        elements = math.prod(max(extent, 1) for extent in tensor["shape"])\n',
        '        elements = math.prod(tensor["shape"])\n',
        BOUNDS,
    ),
    Mutant(
        "true is a number",
        "resilient/format/document.py",
        "type(value) is int and 0 <= value <= NUMBER_MAX",
        "isinstance(value, int) and 0 <= value <= NUMBER_MAX",
        BOUNDS,
    ),
    Mutant(
        "regions may share bytes",
        "resilient/format/document.py",
        '        _require(size_bytes <= sizes.get(file, 0), file, "is shorter than its tensors")\n',
        "        pass\n",
        BOUNDS,
    ),
    Mutant(
        "documents nest as deep as they like",
        "resilient/format/document.py",
        "        check_depth(fields)\n",
        "",
        BOUNDS,
    ),
    Mutant(
        "a tree is not held against its grammar",
        "resilient/state_dict/flatten.py",
        "    tensors_of(tree)\n    return",
        "    return",
        FUZZ,
    ),
    Mutant(
        "a parent of nonsense is no parent",
        "resilient/checkpoint/generations.py",
        "        if folder is not None and parent is None:\n",
        "        if False:\n",
        BOUNDS,
    ),
    Mutant(
        "deep looks at no region",
        "resilient/checkpoint/verify.py",
        ("            if region.file == entry.name and digest_bytes(held) != region.digest:\n"),
        "            if False:\n",
        DEEP,
    ),
    Mutant(
        "deep looks up no tensor",
        "resilient/checkpoint/verify.py",
        "        if missing:\n",
        "        if False:\n",
        DEEP,
    ),
    Mutant(
        "a life sweeps what a newer one is writing",
        "resilient/checkpoint/start_generation.py",
        (
            "        return is_known and checkpoint is not None and "
            "checkpoint.generation < generation\n"
        ),
        "        return is_known and checkpoint is not None\n",
        "tests/unit/storage/test_sweep_temporaries.py",
    ),
]
