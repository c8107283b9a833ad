"""A TCP proxy that breaks what passes through it, between a client and a server of HTTP.

Faults are set from the test's thread and hold until they are set again. A request is recognised
by its first line at the start of what a client sends in one piece, which is how clients of S3
send it.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

_REQUEST = re.compile(rb"(?:GET|PUT|POST|HEAD|DELETE) /")
_LENGTH = re.compile(rb"^content-length: *(\d+)", re.IGNORECASE | re.MULTILINE)
_EXPECT = re.compile(rb"^expect:", re.IGNORECASE | re.MULTILINE)
_PIECE_BYTES = 1 << 16
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Fault:
    """What goes wrong; nothing by default.

    Attributes:
        latency_seconds: each piece waits this long, in both directions.
        reset_share: of the requests, broken with a reset: half of them before the server sees
            anything, half of them after it saw the first piece.
        cut_after_bytes: each connection is reset when it has carried this much to the server.
        flip_bytes: where these pass to the client, the first of them loses a bit, once.
        stalled: connections stand, and nothing passes.
        status: answered to each request, which the server never sees.
        refusing: new connections are reset at once.
    """

    latency_seconds: float = 0.0
    reset_share: float = 0.0
    cut_after_bytes: int = 0
    flip_bytes: bytes = b""
    stalled: bool = False
    status: int = 0
    refusing: bool = False


class FaultProxy:
    """Listens on a port of its own and passes everything to ``upstream_port``.

    Attributes:
        port: where to connect to.
        fault: what goes wrong now.
        requests: lines that began a request, as ``PUT /bucket/key``.
        broken: connections that were reset, refused or answered here.
    """

    def __init__(self, upstream_port: int, seed: int = 0) -> None:
        self.fault = Fault()
        self.requests: list[str] = []
        self.broken = 0
        self._upstream_port = upstream_port
        self._random = random.Random(seed)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)

    @property
    def endpoint(self) -> str:
        """The URL to give to a client."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._connection, sock=self._listener, limit=_PIECE_BYTES)
        )
        self._loop.run_forever()
        server.close()
        # A connection that was accepted a moment ago has no task before the loop's next round, and
        # aborted transports close in one.
        self._loop.run_until_complete(asyncio.sleep(_POLL_SECONDS))
        while tasks := asyncio.all_tasks(self._loop):
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(asyncio.sleep(_POLL_SECONDS))
        self._loop.close()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.fault.refusing:
            self._reset(writer)
            return
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._upstream_port)
        except OSError:
            self._reset(writer)
            return
        except asyncio.CancelledError:
            writer.transport.abort()
            return
        lost = asyncio.Event()
        ways = [
            asyncio.ensure_future(self._to_server(reader, forth, writer, lost)),
            asyncio.ensure_future(self._to_client(back, writer, lost)),
        ]
        try:
            # Cancelled is how the proxy ends, and nobody waits for what this would say of it.
            with suppress(asyncio.CancelledError):
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            for one in (writer, forth):
                one.transport.abort()

    async def _to_server(
        self,
        reader: asyncio.StreamReader,
        forth: asyncio.StreamWriter,
        writer: asyncio.StreamWriter,
        lost: asyncio.Event,
    ) -> None:
        carried = 0
        while piece := await reader.read(_PIECE_BYTES):
            begins = _REQUEST.match(piece) is not None
            if begins:
                self.requests.append(piece.partition(b" HTTP")[0].decode())
            if begins and self.fault.status:
                await self._answer(piece, reader, writer)
                return
            breaks = begins and self._random.random() < self.fault.reset_share
            if breaks and self._random.random() < 0.5:
                self._reset(writer)
                return
            await self._wait()
            carried += len(piece)
            breaks = breaks or 0 < self.fault.cut_after_bytes <= carried
            if breaks:
                lost.set()
            forth.write(piece)
            await forth.drain()
            if breaks:
                # The server may have all of it and do it; its answer is lost.
                await asyncio.sleep(_POLL_SECONDS)
                self._reset(writer)
                return

    async def _to_client(
        self, back: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event
    ) -> None:
        while piece := await back.read(_PIECE_BYTES):
            await self._wait()
            if lost.is_set():
                continue
            writer.write(self._flipped(piece))
            with suppress(ConnectionError):
                await writer.drain()
        if not lost.is_set():
            # What was written is on its way before the connection is taken down.
            with suppress(OSError, RuntimeError):
                writer.write_eof()
            await asyncio.sleep(_POLL_SECONDS)

    def _flipped(self, piece: bytes) -> bytes:
        """Turn one bit behind the first occurrence of ``flip_bytes``, once."""
        at = piece.find(self.fault.flip_bytes) if self.fault.flip_bytes else -1
        if at < 0:
            return piece
        self.fault = Fault()
        self.broken += 1
        return piece[:at] + bytes([piece[at] ^ 1]) + piece[at + 1 :]

    async def _wait(self) -> None:
        await asyncio.sleep(self.fault.latency_seconds)
        # The fault is set from another thread, which an event of this loop could not be.
        while self.fault.stalled:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_SECONDS)

    async def _answer(
        self, piece: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        head, _, body = piece.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        left = int(length[1]) - len(body) if length and not _EXPECT.search(head) else 0
        # An answer to a request that is still being sent is lost to the reset that follows.
        while left > 0 and (more := await reader.read(min(left, _PIECE_BYTES))):
            left -= len(more)
        self.broken += 1
        text = b"<Error><Code>SlowDown</Code><Message>as told</Message></Error>"
        line = f"HTTP/1.1 {self.fault.status or 503} As told\r\nContent-Length: {len(text)}\r\n"
        writer.write(line.encode() + b"Connection: close\r\n\r\n" + text)
        with suppress(ConnectionError):
            await writer.drain()
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 1)

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        self.broken += 1
        connection = writer.get_extra_info("socket")
        if connection is not None:
            # Lingering for no time turns the close into a reset.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
