"""A deadline for every request of s3fs, which has none for a server that does not say "go on".

botocore sends ``Expect: 100-continue`` with each body, and aiohttp waits for that answer without
any timeout: a server that takes the connection and is silent holds a put for ever (seen with
aiobotocore 3 and aiohttp 3; the read timeout begins to count only after the body is sent).
"""

from __future__ import annotations

import asyncio
from typing import Any


def bound_requests(filesystem: Any, within_seconds: float) -> None:
    """Let each request of ``filesystem`` raise ``TimeoutError`` after ``within_seconds``.

    fsspec hands out the same filesystem for the same arguments, so one that is bound stays so.
    """
    if "_call_s3" in vars(filesystem):
        return
    call = filesystem._call_s3  # noqa: SLF001 - every request goes through it

    async def bounded(method: str, *arguments: Any, **options: Any) -> Any:
        return await asyncio.wait_for(call(method, *arguments, **options), within_seconds)

    filesystem._call_s3 = bounded  # noqa: SLF001
