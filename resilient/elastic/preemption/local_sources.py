"""Preemption notices from a file, an HTTP hook, a URL or SLURM.

HTTP hook: the ``preStop`` hook of a pod or an operator's curl calls the agent. Each call is
``POST /stop`` with ``{"reason": ..., "seconds": ...}`` or an empty body. A Kubernetes hook can only
send ``GET /stop``. Every client that can connect to the address can stop the run. The server
therefore listens on the loopback interface unless the user names another address. The server
requires a token if a token is set.

SLURM: the agent itself receives SLURM's signals (``--signal=USR1@120``, SIGTERM at a preemption).
No signal contains the end time of the job. ``scontrol show job`` shows this time, even after an
extension or a preemption. ``SLURM_JOB_END_TIME`` is the end time planned at the start of the job.

File: the source polls a file, which a script or a projected volume creates.

URL: the source polls a URL of the user. A response of 404 or 204 means no notice, and 200 with JSON
is a notice.
"""

from __future__ import annotations

import hmac
import json
import re
import shutil
import subprocess
import threading
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.elastic.preemption.metadata_http import MetadataRequest, http_get
from resilient.elastic.preemption.notice import (
    Notice,
    SourceGarbled,
    SourceLost,
    notice_of,
    unix_seconds,
)
from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock

_BODY_BYTES_MAX = 1 << 16
_REQUEST_SECONDS = 5.0


class HookSource:
    """HTTP server that remembers the last call.

    Args:
        clock: Clock for the time of a call.
        host: Address of the server.
        port: Port of the server; 0 lets the system choose.
        token: Required value of ``Authorization: Bearer``; empty for no check.

    Raises:
        ConfigError: The address is not available.
    """

    every_seconds = 0.1

    def __init__(self, clock: Clock, host: str, port: int, token: str = "") -> None:
        self._clock = clock
        self._notice: Notice | None = None
        try:
            self._server = _Server((host, port), self._take, token)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"--notice http: cannot listen at {host}:{port}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="notice-hook", daemon=True
        )
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the source with its address."""
        host, port = self._server.server_address[:2]
        return f"http {host!s}:{port}"

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self._server.server_address[1])

    def look(self) -> Notice | None:
        """Return the notice of the last call."""
        return self._notice

    def acknowledge(self) -> None:
        """Do nothing: the caller already has its answer."""

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _take(self, document: dict[str, Any]) -> None:
        self._notice = notice_of(document, "http", unix_seconds(self._clock))


class _Handler(BaseHTTPRequestHandler):
    """Handler of one call; it passes the notice to its server."""

    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Handle a call without a body."""
        self._serve()

    def do_POST(self) -> None:
        """Handle a call."""
        self._serve()

    def log_message(self, *_: Any) -> None:
        """Log nothing: the agent emits an event for each notice."""

    def _serve(self) -> None:
        token, authorization = self.server.token, self.headers.get("Authorization", "")
        if self.path.partition("?")[0] != "/stop":
            self._answer(404, "POST /stop")
        elif token and not hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
            self._answer(401, "a token is required")
        else:
            self._answer(*self._accept_notice())

    def _accept_notice(self) -> tuple[int, str]:
        try:
            size = min(int(self.headers.get("Content-Length") or 0), _BODY_BYTES_MAX)
            body = self.rfile.read(size)
            document = json.loads(body) if body.strip() else {}
            self.server.take(document if isinstance(document, dict) else {"seconds": document})
        except (ValueError, RecursionError, SourceGarbled) as error:
            return 400, f"invalid request: {error}"
        return 202, "stopping"

    def _answer(self, status: int, text: str) -> None:
        body = f"{text}\n".encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], take: Any, token: str) -> None:
        self.take = take
        self.token = token
        super().__init__(address, _Handler)


_SCONTROL_SECONDS = 10.0
_END = re.compile(r"\bEndTime=(\S+)")


class SlurmSource:
    """Source of the end time of a SLURM job.

    Args:
        environ: Environment of the job.
        scontrol: Path of the program; empty if there is none.

    Raises:
        ConfigError: The process does not run in a SLURM job.
    """

    name = "slurm"
    every_seconds = 30.0

    def __init__(self, environ: Mapping[str, str], scontrol: str | None = None) -> None:
        self._job = environ.get("SLURM_JOB_ID", "")
        self._job_end = environ.get("SLURM_JOB_END_TIME", "")
        self._scontrol = (shutil.which("scontrol") or "") if scontrol is None else scontrol
        if not self._job:
            raise ConfigError(
                "--notice slurm: this is not a SLURM job, SLURM_JOB_ID is not set",
                hint="start it with srun or sbatch, or omit --notice",
            )

    def look(self) -> Notice | None:
        """Return the end of the job, however far away.

        Raises:
            SourceLost: SLURM does not answer, and the environment has no end time.
            SourceGarbled: The answer is invalid.
        """
        reason = f"slurm: end of job {self._job}"
        if self._scontrol:
            try:
                at_seconds = self._ask()
            except SourceLost:
                if not self._job_end:
                    raise
            else:
                return None if at_seconds is None else Notice(reason, at_seconds, is_for_all=True)
        if not self._job_end:
            return None
        try:
            return Notice(reason, float(self._job_end), is_for_all=True)
        except ValueError as error:
            raise SourceGarbled(f"SLURM_JOB_END_TIME is {self._job_end[:40]!r}") from error

    def acknowledge(self) -> None:
        """Do nothing: SLURM sees the exit code."""

    def close(self) -> None:
        """Do nothing: the source has no resources."""

    def _ask(self) -> float | None:
        command = [self._scontrol, "show", "job", "-o", self._job]
        try:
            answer = subprocess.run(  # noqa: S603 - SLURM's own program, and a job's number
                command, capture_output=True, timeout=_SCONTROL_SECONDS, check=False, text=True
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SourceLost(f"scontrol did not answer: {error}") from error
        if answer.returncode:
            raise SourceLost(f"scontrol ended with {answer.returncode}: {answer.stderr[:200]}")
        match = _END.search(answer.stdout)
        if not match:
            raise SourceGarbled("scontrol reports no EndTime")
        if match[1] in ("Unknown", "N/A", "None"):
            return None
        try:
            # A time without a zone is in the zone of this host.
            return datetime.fromisoformat(match[1]).timestamp()
        except ValueError as error:
            raise SourceGarbled(f"EndTime is {match[1][:40]!r}") from error


_BYTES_MAX = 1 << 16


class FileSource:
    """Source that polls a file.

    An empty file asks for a stop now. ``{"reason": "...", "seconds": 90}`` counts from the file's
    modification time, and ``{"at": "2026-11-22T18:00:00Z"}`` names the time.

    Args:
        path: Path of the file.
    """

    every_seconds = 0.5

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @property
    def name(self) -> str:
        """Name of the source with its path."""
        return f"file {self._path}"

    def look(self) -> Notice | None:
        """Return the notice in the file, None without a file.

        Raises:
            SourceLost: The file cannot be read.
            SourceGarbled: The content is invalid or not completely written yet.
        """
        try:
            with self._path.open("rb") as file:
                text = file.read(_BYTES_MAX)
            since_seconds = self._path.stat().st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SourceLost(f"cannot read `{self._path}`: {error.strerror}") from error
        try:
            document = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError) as error:
            raise SourceGarbled(f"`{self._path}` is neither empty nor JSON") from error
        if not isinstance(document, dict):
            raise SourceGarbled(f"`{self._path}` is not a JSON object")
        return notice_of(document, "file", since_seconds)

    def acknowledge(self) -> None:
        """Do nothing: the file belongs to its owner."""

    def close(self) -> None:
        """Do nothing: the source has no resources."""


class PolledSource:
    """Source that polls a URL.

    Args:
        clock: Clock for the first time of a notice, from which its ``seconds`` count.
        url: Address that answers with ``{"reason": ..., "seconds": ...}`` or ``{"at": ...}``
            once a stop is due.
        seconds: Timeout of one request.
    """

    every_seconds = 2.0

    def __init__(self, clock: Clock, url: str, *, seconds: float = 5.0) -> None:
        self._clock = clock
        self._url = url
        self._seconds = seconds
        self._since_seconds: float | None = None

    @property
    def name(self) -> str:
        """URL without the parts that may be secret."""
        return self._url.partition("?")[0].rpartition("@")[2]

    def look(self) -> Notice | None:
        """Return the notice at the URL.

        Raises:
            SourceLost: The URL does not answer.
            SourceGarbled: The answer is invalid.
        """
        answer = http_get(MetadataRequest(self._url, seconds=self._seconds))
        if not answer.is_there:
            self._since_seconds = None
            return None
        if self._since_seconds is None:
            self._since_seconds = unix_seconds(self._clock)
        return notice_of(answer.document, "http", self._since_seconds)

    def acknowledge(self) -> None:
        """Do nothing: the exit of the agent is the acknowledgement."""

    def close(self) -> None:
        """Do nothing: the source has no resources."""
