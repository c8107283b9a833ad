"""Defects of the way to S3; those that need a server run only where one can be started."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_ABILITIES = "tests/unit/checkpoint/test_abilities.py"
_OPTIONS = "tests/unit/storage/test_s3_options.py"
_WIRE = "tests/unit/storage/test_s3_wire.py --timeout 30"
_SUMS = "tests/unit/storage/test_s3_checksums.py --timeout 30"
_CONTRACT = "tests/s3/test_s3_contract.py"
_FAULTS = "tests/s3/test_s3_faults.py"

MUTANTS = [
    Mutant(
        "several winners are called exclusive",
        "resilient/checkpoint/fencing.py",
        "    return len(won) == 1 and kept == won[0]\n",
        "    return bool(won) and kept in won\n",
        _ABILITIES,
    ),
    Mutant(
        "the verdict is not held against",
        "resilient/checkpoint/fencing.py",
        "    if not verdict:\n",
        "    if verdict is None:\n",
        _ABILITIES,
    ),
    Mutant(
        "the verdict of a copied repository is believed",
        "resilient/checkpoint/fencing.py",
        ' or fields.get("url") != store.url',
        "",
        _ABILITIES,
    ),
    Mutant(
        "nobody asks whether the server lies",
        "resilient/checkpoint/start_generation.py",
        (
            "check_store_capabilities(\n"
            "            context.store, context.clock, "
            "single_writer=context.limits.single_writer\n"
            "        )\n"
        ),
        "pass\n",
        _ABILITIES,
    ),
    Mutant(
        "a life aborts its own uploads",
        "resilient/checkpoint/start_generation.py",
        "checkpoint.generation < generation",
        "checkpoint.generation <= generation",
        _ABILITIES,
    ),
    Mutant(
        "the first mismatch is called damage",
        "resilient/checkpoint/verified_read.py",
        "        pass\n",
        "        raise\n",
        _ABILITIES,
    ),
    Mutant(
        "a value that is refused is shown",
        "resilient/storage/options.py",
        "it is a {type(value).__name__} and must be ",
        "it is {value} and must be ",
        _OPTIONS,
    ),
    Mutant(
        "the options are part of the configuration that is saved",
        "resilient/train/arguments/arguments.py",
        'field.name not in hidden and not field.metadata.get("is_secret")',
        "field.name not in hidden",
        "tests/unit/train/arguments/test_argument_values.py",
    ),
    Mutant(
        "obstore's exclusive create overwrites",
        "resilient/storage/s3_store.py",
        'view, mode="create", use_multipart',
        "view, use_multipart",
        _CONTRACT + " -k TestObstore",
    ),
    Mutant(
        "obstore repeats by itself",
        "resilient/storage/options.py",
        '{"max_retries": 0, "retry_timeout": timedelta(0)}',
        '{"max_retries": 3, "retry_timeout": timedelta(seconds=9)}',
        _FAULTS + " -k asks_once",
    ),
    Mutant(
        "s3fs waits for ever",
        "resilient/storage/fsspec_connect.py",
        '        bound_requests(filesystem, timeouts["read_timeout"])\n',
        "        pass\n",
        _FAULTS + " -k endless",
    ),
    Mutant(
        "ranges of a large object are joined in the wrong place",
        "resilient/storage/transfer.py",
        "range(len(began), size_bytes, parts.part_bytes)",
        "range(0, size_bytes, parts.part_bytes)",
        _CONTRACT + " -k in_parts",
    ),
    Mutant(
        "a part is joined in another's place",
        "resilient/storage/s3_transfer.py",
        "range(1, cut.count + 1)",
        "range(cut.count, 0, -1)",
        _WIRE + " -k order",
    ),
    Mutant(
        "an upload that failed after its first word counts as whole",
        "resilient/storage/s3_transfer.py",
        "if _WHOLE not in ended:",
        "if False:",
        _WIRE + " -k come_to_nothing",
    ),
    Mutant(
        "an upload that failed is left behind",
        "resilient/storage/s3_transfer.py",
        'self._ask("put", key, HttpRequest("DELETE", self._prefix + key, {"uploadId": number}))\n',
        "pass\n",
        _WIRE + " -k come_to_nothing",
    ),
    Mutant(
        "a checksum that nobody said again stands for a signature",
        "resilient/storage/s3_transfer.py",
        '            return bool(self._ask("put", key, whole).checksum)\n',
        '            return bool(self._ask("put", key, whole)) and is_summed\n',
        _SUMS + " -k same_body_signed",
    ),
    Mutant(
        "parts that no checksum was held against are joined",
        "resilient/storage/s3_transfer.py",
        "        if is_summed and not all(part.checksum for part in parts):\n",
        "        if is_summed and not any(part.checksum for part in parts):\n",
        _SUMS + " -k begun_anew",
    ),
    Mutant(
        "a server that refuses checksums is asked each time",
        "resilient/storage/s3_transfer.py",
        "                holds = False\n",
        "                holds = None\n",
        _SUMS + " -k same_body_signed",
    ),
    Mutant(
        "an outage is taken for a server without checksums",
        "resilient/storage/s3_transfer.py",
        "        except StoreUnavailable:\n            raise\n        except StoreError:",
        "        except StoreError:",
        _SUMS + " -k outage",
    ),
    Mutant(
        "whatever checksum a server says is taken for ours",
        "resilient/storage/s3_transfer.py",
        "            if checksum and checksum != answer.proof.sum:\n",
        "            if False:\n",
        _SUMS + " -k no_proof_of_what_was_meant",
    ),
    Mutant(
        "a trial that nobody answered is made again at once",
        "resilient/storage/s3_client.py",
        "                self._owes_signature = True\n",
        "                pass\n",
        _SUMS + " -k outage",
    ),
    Mutant(
        "a trial that nobody answers is made for ever",
        "resilient/storage/s3_client.py",
        "self._unanswered >= _TRIALS_MAX",
        "self._unanswered < 0",
        _SUMS + " -k three_times",
    ),
    Mutant(
        "the last server of several decides",
        "resilient/storage/s3_client.py",
        "holds and (self._holds or not self._is_known)",
        "holds",
        _SUMS + " -k decides_for_all",
    ),
    Mutant(
        "the checksum is not signed",
        "resilient/storage/s3_client.py",
        "        more = {**asked.signed, **proof.headers}\n",
        "        more = {**asked.signed}\n",
        _SUMS + " -k says_again",
    ),
    Mutant(
        "a whole object is taken for a range of it",
        "resilient/storage/s3_transfer.py",
        "if start and answer.status != _PARTIAL:",
        "if False:",
        _WIRE + " -k no_range",
    ),
    Mutant(
        "a body that is cut counts as its end",
        "resilient/storage/s3_client.py",
        "        if not came:\n            raise IncompleteRead",
        "        if False:\n            raise IncompleteRead",
        _WIRE + " -k no_range",
    ),
    Mutant(
        "an answer that drips never ends",
        "resilient/storage/s3_client.py",
        "        self._timer.limit()\n        response",
        "        response",
        _WIRE + " -k drips",
    ),
    Mutant(
        "a connection is used whose server has ended it",
        "resilient/storage/s3_client.py",
        "if not _has_ended(idle):",
        "if True:",
        _WIRE + " -k ended_is",
    ),
    Mutant(
        "a body is sent without its digest",
        "resilient/storage/s3_client.py",
        "summed(asked.body) if asked.is_summed else signed(asked.body)",
        "summed(asked.body)",
        _WIRE + " -k its_digest",
    ),
    Mutant(
        "the sweep takes uploads of others",
        "resilient/storage/s3_multipart.py",
        " and is_ours(upload.key.removeprefix(prefix))",
        "",
        _CONTRACT + " -k older_life",
    ),
    Mutant(
        "a certificate that nobody vouches for is asked again",
        "resilient/storage/s3_store.py",
        " or is_untrusted(str(error))",
        "",
        "tests/s3/test_s3_tls.py -k vouches",
    ),
    Mutant(
        "only the first page of uploads is looked at",
        "resilient/storage/s3_multipart.py",
        'if page.get("IsTruncated", "false") != "true":',
        "if True:",
        "tests/s3/test_s3_uploads.py -k every_page",
    ),
    Mutant(
        "what a transfer took is never given back",
        "resilient/storage/transfer.py",
        "                self._free += taken\n",
        "                pass\n",
        "tests/unit/storage/test_parts.py --timeout 10",
    ),
    Mutant(
        "parts are taken though none is free",
        "resilient/storage/transfer.py",
        "            self._free -= taken\n",
        "",
        "tests/unit/storage/test_parts.py",
    ),
    Mutant(
        "any writer on Google is taken for oneself",
        "resilient/storage/fsspec_store.py",
        "        if found.get(_WRITER) != token:\n            raise\n",
        "        del found\n",
        "tests/unit/storage/test_cloud_options.py",
    ),
    Mutant(
        "Azure overwrites",
        "resilient/storage/fsspec_store.py",
        "overwrite=False, retry_total=0",
        "overwrite=True, retry_total=0",
        "tests/unit/storage/test_cloud_options.py",
    ),
]
