"""Defects of the S3 clients. Tests that need a server are skipped where none can be started."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "an error shows the rejected value of a storage option",
        "resilient/storage/options.py",
        "it is a {type(value).__name__} and must be ",
        "it is {value} and must be ",
        "tests/unit/storage/test_s3_options.py",
    ),
    Mutant(
        "the exclusive create of obstore overwrites",
        "resilient/storage/s3_store.py",
        'view, mode="create", use_multipart',
        "view, use_multipart",
        "tests/s3/test_s3_contract.py -k TestObstore",
        promise="Stores",
    ),
    Mutant(
        "obstore retries requests itself",
        "resilient/storage/options.py",
        '{"max_retries": 0, "retry_timeout": timedelta(0)}',
        '{"max_retries": 3, "retry_timeout": timedelta(seconds=9)}',
        "tests/s3/test_s3_faults.py -k asks_once",
    ),
    Mutant(
        "parts of an upload are joined in the wrong order",
        "resilient/storage/s3_transfer.py",
        "range(1, plan.count + 1)",
        "range(plan.count, 0, -1)",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k order",
        promise="S3",
    ),
    Mutant(
        "an upload that failed after its status line counts as complete",
        "resilient/storage/s3_transfer.py",
        "if _WHOLE not in response_text:",
        "if False:",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k come_to_nothing",
        promise="S3",
    ),
    Mutant(
        "a failed upload is not aborted",
        "resilient/storage/s3_transfer.py",
        (
            "self._ask(\n"
            '                "put", key, HttpRequest("DELETE", self._prefix + key, '
            '{"uploadId": upload_id})\n'
            "            )\n"
        ),
        "pass\n",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k come_to_nothing",
        promise="S3",
    ),
    Mutant(
        "an upload checksum that the server did not return is trusted",
        "resilient/storage/s3_transfer.py",
        '            return bool(self._ask("put", key, request).checksum)\n',
        '            return bool(self._ask("put", key, request)) and is_summed\n',
        "tests/unit/storage/test_s3_checksums.py --timeout 30 -k same_body_signed",
        promise="S3",
    ),
    Mutant(
        "an upload is completed although one part has no checksum",
        "resilient/storage/s3_transfer.py",
        "        if is_summed and not all(part.checksum for part in parts):\n",
        "        if is_summed and not any(part.checksum for part in parts):\n",
        "tests/unit/storage/test_s3_checksums.py --timeout 30 -k begun_anew",
        promise="S3",
    ),
    Mutant(
        "a wrong checksum in the server's answer is accepted",
        "resilient/storage/s3_transfer.py",
        "            if checksum and checksum != response.proof.sum:\n",
        "            if False:\n",
        "tests/unit/storage/test_s3_checksums.py --timeout 30 -k no_proof_of_what_was_meant",
        promise="S3",
    ),
    Mutant(
        "the checksum header is not signed",
        "resilient/storage/s3_client.py",
        "        extra_headers = {**request.signed, **proof.headers}\n",
        "        extra_headers = {**request.signed}\n",
        "tests/unit/storage/test_s3_checksums.py --timeout 30 -k says_again",
        promise="S3",
    ),
    Mutant(
        "a whole object is accepted as a range",
        "resilient/storage/s3_transfer.py",
        "if start and response.status != _PARTIAL:",
        "if False:",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k no_range",
        promise="S3",
    ),
    Mutant(
        "a truncated response counts as complete",
        "resilient/storage/s3_client.py",
        "        if not read_bytes:\n            raise IncompleteRead",
        "        if False:\n            raise IncompleteRead",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k no_range",
        promise="S3",
    ),
    Mutant(
        "a response that arrives byte by byte never times out",
        "resilient/storage/s3_client.py",
        "        self._timer.limit()\n        response",
        "        response",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k drips",
        promise="P8",
    ),
    Mutant(
        "a body is sent without its signed digest",
        "resilient/storage/s3_client.py",
        "summed(request.body) if request.is_summed else signed(request.body)",
        "summed(request.body)",
        "tests/unit/storage/test_s3_wire.py --timeout 30 -k its_digest",
        promise="S3",
    ),
    Mutant(
        "the cleanup aborts uploads of other programs",
        "resilient/storage/s3_multipart.py",
        " and is_deletable(upload.key.removeprefix(prefix))",
        "",
        "tests/s3/test_s3_contract.py -k older_life",
        promise="S3",
    ),
    Mutant(
        "a request with an untrusted certificate is retried",
        "resilient/storage/s3_store.py",
        " or is_untrusted(str(error))",
        "",
        "tests/s3/test_s3_tls.py -k vouches",
    ),
    Mutant(
        "only the first page of unfinished uploads is read",
        "resilient/storage/s3_multipart.py",
        'if page.get("IsTruncated", "false") != "true":',
        "if True:",
        "tests/s3/test_s3_uploads.py -k every_page",
    ),
]
