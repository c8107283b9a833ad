"""Fork server: a process with a worker's imported packages, which forks workers of later attempts.

An attempt is one start of all ranks of the run. The fork server saves the time for the imports at
each later attempt.

The agent, the process that starts and watches the workers, runs this file by its path: ``python -u
fork_server.py SOCKET IMPORTS``. The fork server has the environment and the standard streams of the
workers. The first worker records its imports of known packages in the file IMPORTS. The file also
has the environment variables at the time of each import. The fork server imports the same packages
in the same order under the same variables. The fork server never imports the user's modules, and
never runs computations.

A request of the agent has an environment and a socket for each worker. A child of the fork server
forks all workers and exits. The agent is the subreaper of its descendants meanwhile. The kernel
therefore makes the agent the parent of the orphaned workers. Each worker sends its pid on its
socket and waits for a start message. After this message the worker runs the bootstrap. The forked
process has only one thread and no open device. If the agent gives up on the fork server, it never
sends the start message.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_QUIET_SECONDS = 1.0
_LOOK_SECONDS = 0.5
_ADOPTION_SECONDS = 5.0
_CODE_KILLED = 137
_HEADER_BYTES = 8
_FDS_MAX = 250
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci")

NAME_WARM = "resilient-warm"
"""Name of the process once it can fork workers."""

Request = list[tuple[dict[str, str], list[str]]]


class PreloadedImports:
    """Replay of the imports of the first worker.

    Attributes:
        seen: Variables at import, by package imported here.
        is_settled: Whether nothing was imported since the last check of the side effects.
    """

    def __init__(self, path: str) -> None:
        self.seen: dict[str, dict[str, str]] = {}
        self.is_settled = False
        self._path = path
        self._read = 0
        self._grown_at_seconds = time.monotonic()
        self._pending: list[dict[str, Any]] = []

    @property
    def is_to_settle(self) -> bool:
        """True if all known modules are imported, and the side effects are not yet checked."""
        return bool(self.seen) and not self._pending and not self.is_settled

    def look(self) -> None:
        """Read newly recorded imports."""
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 - pathlib costs 10 ms
        except OSError:
            return
        now_seconds = time.monotonic()
        if size > self._read:
            with open(self._path, "rb") as file:  # noqa: PTH123 - see above
                file.seek(self._read)
                text = file.read()
            complete_text = text[: text.rfind(b"\n") + 1]
            self._read += len(complete_text)
            self._pending += [json.loads(line) for line in complete_text.splitlines()]
            self._grown_at_seconds = now_seconds

    def is_due(self) -> bool:
        """True if the worker has imported nothing for 1 s, so that the worker is not delayed."""
        return bool(self._pending) and time.monotonic() - self._grown_at_seconds > _QUIET_SECONDS

    def step(self) -> None:
        """Import the next module; ignore a failure, which the worker reports.

        A package may raise any error if it lacks a library or a device. The worker imports the
        package too, and reports the error with its own traceback.
        """
        note = self._pending.pop(0)
        name, variables = note["name"], note.get("variables")
        # A later attempt that started without the fork server recorded the same modules again.
        self.is_settled = self.is_settled and name in sys.modules
        if variables is not None and name not in self.seen:
            set_variables(variables)
            self.seen[name] = variables
        with contextlib.suppress(Exception), quiet():
            importlib.import_module(name)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set the variables that packages read at import to exactly ``variables``."""
    for name in bootstrap.relevant_variables():
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard output inside the block, because the worker has already printed it."""
    saved_descriptors = [os.dup(number) for number in (1, 2)]
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(devnull, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for number, copy in zip((1, 2), saved_descriptors, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(devnull)


def unfit() -> str:
    """Return the reason why no worker can be forked from this process; empty if it can."""
    # Fork-safe libraries stop their threads before each fork, until they compute again.
    trial = os.fork()
    if not trial:
        os._exit(0)
    os.waitpid(trial, 0)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - see above
    if threads > 1:
        return f"an import has started {threads - 1} threads, which a fork would lose"
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - see above
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - see above
            if target.startswith(_DEVICES):
                return f"an import has opened `{target}`"
    return ""


def settle() -> None:
    """Freeze the garbage collector, so that workers share this memory for longer."""
    gc.collect()
    gc.freeze()
    rename(NAME_WARM)


def rename(name: str) -> None:
    """Set the process name that `ps` shows."""
    with open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123 - see above
        file.write(name)


def receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """Return the next request and its sockets; None if the agent is gone."""
    head, fds, _, _ = socket.recv_fds(channel, _HEADER_BYTES, _FDS_MAX)
    size = int.from_bytes(head, "big")
    text = b""
    while head and len(text) < size:
        part = channel.recv(size - len(text))
        if not part:
            return None
        text += part
    return (
        ([(request["environ"], request["arguments"]) for request in json.loads(text)], fds)
        if head
        else None
    )


def serve(channel: socket.socket, imports: PreloadedImports) -> list[str]:
    """Import and fork until the agent is gone; return in each worker with its arguments."""
    problem = ""
    while True:
        is_busy = imports.is_due() or imports.is_to_settle
        if not is_asked(channel, 0.0 if is_busy else _LOOK_SECONDS):
            imports.look()
            if imports.is_due():
                imports.step()
            elif imports.is_to_settle:
                problem, imports.is_settled = unfit(), True
                settle()
            continue
        arguments = answer(channel, imports, problem)
        if arguments is not None:
            return arguments


def is_asked(channel: socket.socket, within_seconds: float) -> bool:
    """Wait for a request, or for the end of the agent."""
    return bool(select.select([channel], [], [], within_seconds)[0])


def answer(channel: socket.socket, imports: PreloadedImports, trouble: str) -> list[str] | None:
    """Fork the workers of a request; return arguments only in each worker."""
    message = receive(channel)
    if message is None:
        sys.exit(0)
    request, fds = message
    if imports.is_settled and not trouble:
        arguments = fork_workers(channel, request, fds, imports)
        if arguments is not None:
            return arguments
    else:
        for number in fds:
            # One refusal is enough for the agent, which may have closed the other sockets already.
            with contextlib.suppress(OSError):
                os.write(number, f"refused {trouble}".encode() if trouble else b"early")
    for number in fds:
        os.close(number)
    return None


def fork_workers(
    channel: socket.socket, request: Request, fds: list[int], imports: PreloadedImports
) -> list[str] | None:
    """Fork all workers from one child that exits, so that the workers become orphans."""
    helper = os.fork()
    if helper:
        os.waitpid(helper, 0)
        return None
    for place, (environ, arguments) in enumerate(request):
        if os.fork() == 0:
            channel.close()
            agent_end = fds[place]
            for number in fds:
                if number != agent_end:
                    os.close(number)
            begin(agent_end, environ, arguments, imports.seen)
            return arguments
    os._exit(0)


def begin(
    pipe: int, environ: dict[str, str], arguments: list[str], seen: Mapping[str, dict[str, str]]
) -> None:
    """Become a worker as if the agent had started it; exit if the agent no longer wants it."""
    os.setsid()
    agent = int(environ["RESILIENT_AGENT_PID"])
    deadline_seconds = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != agent:
        if time.monotonic() > deadline_seconds:
            os._exit(_CODE_KILLED)
        time.sleep(0.0005)
    try:
        os.write(pipe, f"{os.getpid()}\n".encode())
        word = os.read(pipe, 1)
    except OSError:
        word = b""
    if not word:
        os._exit(_CODE_KILLED)
    os.close(pipe)
    rename(os.path.basename(sys.executable))  # noqa: PTH119 - see above
    os.environ.clear()
    os.environ.update(environ)
    if "numpy.random" in sys.modules:
        # Python's other generators are reseeded after a fork, or have a fixed seed.
        sys.modules["numpy.random"].seed()
    watch_imports(environ, arguments, seen)


def watch_imports(
    environ: dict[str, str], arguments: list[str], seen: Mapping[str, dict[str, str]]
) -> None:
    """Restart without the imports if the program needs a package under other variables.

    The package was imported before the program began, so a variable that the program sets before
    its import would have no effect. The check runs when the program first imports each package.
    """
    original, unchecked_packages = builtins.__import__, dict(seen)

    def watching(name: str, *rest: Any, **more: Any) -> Any:
        variables = unchecked_packages.pop(name.partition(".")[0], None)
        if variables is not None:
            if variables != bootstrap.relevant_variables():
                start_cold(environ, arguments)
            if not unchecked_packages and builtins.__import__ is watching:
                builtins.__import__ = original
        return original(name, *rest, **more)

    builtins.__import__ = watching


def start_cold(environ: dict[str, str], arguments: list[str]) -> None:
    """Replace this process by a worker without any imports."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(sys.executable, [sys.executable, "-u", bootstrap.__file__, *arguments], environ)  # noqa: S606 - a worker's own command


def _load_bootstrap() -> Any:
    # Load by path, because the program may have a module of that name.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")  # noqa: PTH100, PTH118, PTH120 - see above
    spec = importlib.util.spec_from_file_location("__bootstrap__", path)
    assert spec is not None, "it is in the same folder"  # noqa: S101
    assert spec.loader is not None, "it is a Python file"  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = _load_bootstrap()

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python put this file's folder first, but its modules are not the user's.
        del sys.path[0]
    bootstrap.die_with_the_agent()
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        _arguments = serve(_channel, PreloadedImports(sys.argv[2]))
    sys.exit(bootstrap.main(_arguments))
