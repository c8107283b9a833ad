"""Saver daemon: a process per host that writes checkpoints from shared memory to the store.

The agent, which manages the workers of the host, starts the daemon:
``python -m resilient.checkpoint.daemon.server --socket PATH``. The daemon serves a Unix-domain
socket, and each message is one line of JSON. The bytes to save are in shared memory. The daemon
runs until its standard input ends. The agent closes this input to stop the daemon, and the kernel
closes it when the agent dies. The daemon then has ``--linger-seconds`` to commit the saves in
flight and the cached steps of ended ranks. A cached step is a step whose state is only in shared
memory. Afterwards the daemon ends and leaves no memory or files behind.

The daemon lowers its own priority, so that it runs on the cores that training leaves idle. A saving
thread in the trainer must not lower its priority. If the kernel delays such a thread while it has
the interpreter lock, training waits too.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from resilient.checkpoint.daemon.memory import MemoryQuota, SharedMemoryPool
from resilient.checkpoint.daemon.session import COMMIT_STEP_SECONDS, RankSession, StepCacheSession
from resilient.clock import SystemClock
from resilient.distributed.coordination import RankFailure
from resilient.distributed.kv_store import JsonLineSocket, KVStoreServer, MalformedMessage
from resilient.errors import ResilientError, UsageError
from resilient.storage.shared_memory import ROOT, SharedFolder, sweep

if TYPE_CHECKING:
    from collections.abc import Mapping

    from resilient.clock import Clock

_NICENESS = 10


def lower_own_priority() -> None:
    """Lower the priority of this process, which only persists saves."""
    with suppress(OSError):
        os.nice(_NICENESS)
    # A separate session may count as a separate scheduling group, with a fair share at any
    # niceness. A shared session also holds the trainers and other programs, so it stays unchanged.
    if os.getsid(0) == os.getpid():
        with suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(_NICENESS))


_TICK_SECONDS = 0.05
_SLICE_SECONDS = 0.5
# A group's signals are meant for the trainers, which may still hand over their last save.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class SaverDaemon:
    """Server of the ranks of one host.

    Args:
        path: Path of the socket.
        pool: Shared memory of this host.
        kv_store: Key-value store that ranks may use if this is the coordinator's host.
        clock: Time source.

    Raises:
        OSError: The server cannot listen at ``path``.
    """

    def __init__(
        self, path: Path, pool: SharedMemoryPool, kv_store: KVStoreServer, clock: Clock
    ) -> None:
        self._pool = pool
        self._kv_store = kv_store
        self._clock = clock
        self._sessions: list[RankSession] = []
        self._lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="keeper", daemon=True).start()

    def settle(self, within_seconds: float) -> bool:
        """Wait for all cached steps, saves and promotions; return whether they ended in time.

        A killed agent ends before its ranks. The daemon commits their cached steps after the ranks
        have ended.
        """
        deadline_seconds = self._clock.monotonic_seconds() + within_seconds
        self._hurry("")
        with ExitStack() as marks:
            for url in {session.url for session in self._caching_sessions()}:
                # The next agent's daemon must wait for these saves too.
                marks.enter_context(self._pool.saving(url))
            while self._has_work():
                if self._clock.monotonic_seconds() > deadline_seconds:
                    return False
                self._clock.sleep(_TICK_SECONDS)
        return True

    def _has_work(self) -> bool:
        # The order counts: a step that is no longer cached is in a save by then.
        return bool(
            self._caching_sessions()
            or self._busy("")
            or any(session.is_promoting for session in self._sessions)
        )

    def close(self) -> None:
        """Stop serving."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._kv_store.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="seat", daemon=True
            ).start()

    def _serve(self, connection: socket.socket) -> None:
        session = self._add_session(RankSession(self._pool, self._release_ended_sessions))
        lines = JsonLineSocket(connection)
        try:
            while (request := lines.receive()) is not None:
                if request.get("verb") == "hold_hello":
                    session = self._add_session(
                        StepCacheSession(self._pool, self._wait_for_attempt),
                        replaced_session=session,
                    )
                answer = self._answer(session, request)
                # A rank that died may have sent requests without waiting for the answers. All of
                # them count.
                with suppress(OSError):
                    lines.send(answer)
        except MalformedMessage as error:
            with suppress(OSError):
                lines.send(RankFailure(UsageError.code, str(error)).to_json())
        except OSError:
            pass
        finally:
            connection.close()
            session.leave()

    def _add_session(
        self, new_session: RankSession, replaced_session: RankSession | None = None
    ) -> RankSession:
        with self._lock:
            self._sessions = [
                session for session in self._sessions if session is not replaced_session
            ]
            self._sessions.append(new_session)
        return new_session

    def _answer(self, session: RankSession, request: Mapping[str, Any]) -> dict[str, Any]:
        verb = request.get("verb")
        if verb == "hello":
            return self._answer_hello(session, request)
        if verb == "hurry":
            self._hurry(str(request["url"]))
            return {}
        handlers = {"settle": self._settle, "recall": self._recall, "missing": self._missing}
        answer = handlers.get(str(verb))
        return session.answer(request) if answer is None else answer(session, request)

    def _settle(self, session: RankSession, _: Mapping[str, Any]) -> dict[str, Any]:
        return {"is_busy": self._is_busy_for_a_slice(session)}

    def _recall(self, session: RankSession, _: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "held": {
                key: value.to_json() for key, value in self._cached_records(session.url).items()
            }
        }

    def _missing(self, _: RankSession, request: Mapping[str, Any]) -> dict[str, Any]:
        return {"size_bytes": self._pool.missing_bytes(int(request["size_bytes"]))}

    def _answer_hello(self, session: RankSession, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answer everything that a new attempt asks, in one request."""
        answer = session.answer(request)
        if "failure" in answer:
            return answer
        is_busy = self._is_busy_for_a_slice(session)
        return {"share": answer, "board": self._kv_store.address.to_json(), "is_busy": is_busy}

    def _is_busy_for_a_slice(self, info: RankSession) -> bool:
        """Wait a little; return whether saves to the repository of ``info`` are in flight here.

        Cached steps of an older attempt are committed once its ranks are gone. A rank that still
        exists may write, so after the wait its cached steps are discarded.
        """
        deadline_seconds = self._clock.monotonic_seconds() + _SLICE_SECONDS
        self._hurry(info.url)
        while (older := self._older_caching_sessions(info)) or self._is_saving(info.url):
            if self._clock.monotonic_seconds() > deadline_seconds:
                for session in older:
                    session.discard()
                return True
            self._clock.sleep(_TICK_SECONDS)
        return False

    def _is_saving(self, url: str) -> bool:
        return bool(self._busy(url)) or self._pool.is_saved_elsewhere(url)

    def _older_caching_sessions(self, info: RankSession) -> list[StepCacheSession]:
        """Return the sessions of older attempts whose ranks still cache steps."""
        return [
            session
            for session in self._caching_sessions()
            if session.url == info.url and session.scope != info.scope
        ]

    def _caching_sessions(self) -> list[StepCacheSession]:
        """Return the sessions whose ranks are connected and may cache a step."""
        with self._lock:
            sessions = [
                session for session in self._sessions if isinstance(session, StepCacheSession)
            ]
        return [session for session in sessions if session.is_caching]

    def _wait_for_attempt(self, cache_session: StepCacheSession) -> bool:
        """Wait until all ranks of an attempt have left and none of their saves is in flight here.

        Returns:
            Whether they have: a rank that does not leave in time may still write.
        """
        deadline_seconds = self._clock.monotonic_seconds() + COMMIT_STEP_SECONDS
        while True:
            with self._lock:
                saving = [
                    session for session in self._sessions if session.scope == cache_session.scope
                ]
            saving = [session for session in saving if not isinstance(session, StepCacheSession)]
            if any(session.is_busy for session in saving):
                deadline_seconds = self._clock.monotonic_seconds() + COMMIT_STEP_SECONDS
            elif all(session.has_rank_left for session in saving):
                return True
            elif self._clock.monotonic_seconds() > deadline_seconds:
                return False
            self._clock.sleep(_TICK_SECONDS)

    def _busy(self, url: str) -> int:
        return sum(session.is_busy for session in self._saving_to(url))

    def _hurry(self, url: str) -> None:
        for session in self._saving_to(url):
            session.pacer.hurry()

    def _saving_to(self, url: str) -> list[RankSession]:
        with self._lock:
            return [session for session in self._sessions if not url or session.url == url]

    def _cached_records(self, url: str) -> dict[str, Any]:
        with self._lock:
            return {
                key: record
                for session in self._sessions
                if session.url == url
                for key, record in session.kept_files.items()
            }

    def _release_ended_sessions(self) -> None:
        """Release the memory of past attempts, because a new one begins to stage."""
        with self._lock:
            ended_sessions = [
                session
                for session in self._sessions
                if session.has_rank_left and not session.is_busy
            ]
            self._sessions = [
                session
                for session in self._sessions
                if session not in ended_sessions or session.is_promoting
            ]
        for ended_session in ended_sessions:
            ended_session.forget()


def main(arguments: list[str]) -> int:
    """Serve until standard input ends, then finish the saves in flight; 0 if all succeeded."""
    options = _parser().parse_args(arguments)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    lower_own_priority()
    sweep(options.shared)
    folder = SharedFolder(options.shared)
    # The key-value store listens on all interfaces, so it has no host name. The ranks know the
    # name.
    kv_store = KVStoreServer(options.listen, options.listen)
    share = MemoryQuota(options.host_bytes_max, options.ranks, options.auto)
    daemon = SaverDaemon(options.socket, SharedMemoryPool(folder, share), kv_store, SystemClock())
    with suppress(OSError):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
    while os.read(0, 1 << 10):
        pass
    is_done = daemon.settle(options.linger_seconds)
    daemon.close()
    folder.close()
    options.socket.unlink(missing_ok=True)
    return 0 if is_done else 1


def _run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except (ResilientError, OSError) as error:
        with suppress(OSError):
            sys.stdout.write(f"{error}\n")
            sys.stdout.flush()
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="resilient.checkpoint.daemon.server", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="socket path for the ranks")
    parser.add_argument(
        "--listen", default="127.0.0.1", help="address of the daemons' key-value store"
    )
    parser.add_argument("--shared", type=Path, default=ROOT, help="folder in shared memory")
    parser.add_argument("--host-bytes-max", type=int, default=0, help="memory limit of this host")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks of this host")
    parser.add_argument(
        "--auto", action="store_true", help="the limit was derived from free memory"
    )
    parser.add_argument(
        "--linger-seconds", type=float, default=25.0, help="seconds to finish saves in flight"
    )
    return parser


if __name__ == "__main__":
    # Not sys.exit: a save past its deadline must not keep this process alive.
    os._exit(_run(sys.argv[1:]))
