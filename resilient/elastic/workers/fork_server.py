"""A process that has imported what workers import, and forks workers of the next life.

Run by path, ``python -u nursery.py SOCKET IMPORTS``, with the environment and the standard
streams of the workers. It follows the file IMPORTS, where the first worker writes which of the
known packages it imports and what their variables were then, and imports the same, in the same
order, under the same variables. Nothing of the user's own is imported, and nothing is computed.

A request holds an environment and a socket for each worker. One child forks them all and ends,
so that the agent, who adopts orphans meanwhile, is their parent as if it had started them. Each
shows its pid on its socket and waits for a word to go on, which does not come from an agent that
gave up. Then it runs the bootstrap, in a process with one thread and no open device.
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
"""Of the process, once it can fork workers."""

Request = list[tuple[dict[str, str], list[str]]]


class PreloadedImports:
    """What the first worker has imported, done again.

    Attributes:
        seen: of each package that was imported here, the variables that it saw.
        is_settled: whether nothing was imported since the last look at what that brought.
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
        """Whether all that is known was imported, and nobody has looked at what that brought."""
        return bool(self.seen) and not self._pending and not self.is_settled

    def look(self) -> None:
        """Take note of what was written, once nothing was for a second."""
        try:
            size = os.stat(self._path).st_size  # noqa: PTH116 - pathlib costs 10 ms
        except OSError:
            return
        now_seconds = time.monotonic()
        if size > self._read:
            with open(self._path, "rb") as file:  # noqa: PTH123 - see above
                file.seek(self._read)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read += len(whole)
            self._pending += [json.loads(line) for line in whole.splitlines()]
            self._grown_at_seconds = now_seconds

    def is_due(self) -> bool:
        """Whether the worker has imported nothing for a while: it begins its work first."""
        return bool(self._pending) and time.monotonic() - self._grown_at_seconds > _QUIET_SECONDS

    def step(self) -> None:
        """Import the next module; one that cannot be imported here is the worker's business.

        A package may raise anything where it lacks a library or a device, and the worker, which
        imports it too, says so with its own traceback.
        """
        note = self._pending.pop(0)
        name, variables = note["name"], note.get("variables")
        # A later life that started cold has written the same again, which brings nothing.
        self.is_settled = self.is_settled and name in sys.modules
        if variables is not None and name not in self.seen:
            set_variables(variables)
            self.seen[name] = variables
        with contextlib.suppress(Exception), quiet():
            importlib.import_module(name)


def set_variables(wanted: Mapping[str, str]) -> None:
    """Let the variables that packages read when they are imported be exactly ``wanted``."""
    for name in bootstrap.relevant_variables():
        if name not in wanted:
            del os.environ[name]
    os.environ.update(wanted)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Say nothing inside: the worker has said it already."""
    kept = [os.dup(number) for number in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


def unfit() -> str:
    """Say why no worker can be forked from this process; empty if one can."""
    # Libraries that can be forked stop their threads before each fork, until they compute again.
    trial = os.fork()
    if not trial:
        os._exit(0)
    os.waitpid(trial, 0)
    threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208 - see above
    if threads > 1:
        return f"an import has started {threads - 1} threads that no fork survives"
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - see above
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - see above
            if target.startswith(_DEVICES):
                return f"an import has opened `{target}`"
    return ""


def settle() -> None:
    """Let workers share this memory for longer: their collector will not walk through it."""
    gc.collect()
    gc.freeze()
    rename(NAME_WARM)


def rename(name: str) -> None:
    """Show `ps` another name."""
    with open("/proc/self/comm", "w", encoding="ascii") as file:  # noqa: PTH123 - see above
        file.write(name)


def receive(channel: socket.socket) -> tuple[Request, list[int]] | None:
    """Return the next request and the sockets that came with it; None when the agent is gone."""
    head, fds, _, _ = socket.recv_fds(channel, _HEADER_BYTES, _FDS_MAX)
    size = int.from_bytes(head, "big")
    text = b""
    while head and len(text) < size:
        part = channel.recv(size - len(text))
        if not part:
            return None
        text += part
    return ([(one["environ"], one["arguments"]) for one in json.loads(text)], fds) if head else None


def serve(channel: socket.socket, imports: PreloadedImports) -> list[str]:
    """Import and fork until the agent is gone; return in each worker, with its arguments."""
    trouble = ""
    while True:
        is_busy = imports.is_due() or imports.is_to_settle
        if not is_asked(channel, 0.0 if is_busy else _LOOK_SECONDS):
            imports.look()
            if imports.is_due():
                imports.step()
            elif imports.is_to_settle:
                trouble, imports.is_settled = unfit(), True
                settle()
            continue
        arguments = answer(channel, imports, trouble)
        if arguments is not None:
            return arguments


def is_asked(channel: socket.socket, within_seconds: float) -> bool:
    """Wait for a request, or for the end of the agent."""
    return bool(select.select([channel], [], [], within_seconds)[0])


def answer(channel: socket.socket, imports: PreloadedImports, trouble: str) -> list[str] | None:
    """Fork the workers of a request; return in each of them only, with its arguments."""
    received = receive(channel)
    if received is None:
        sys.exit(0)
    request, fds = received
    if imports.is_settled and not trouble:
        arguments = fork_workers(channel, request, fds, imports)
        if arguments is not None:
            return arguments
    else:
        for number in fds:
            # One refusal is enough for the agent: it may have closed the others already.
            with contextlib.suppress(OSError):
                os.write(number, f"refused {trouble}".encode() if trouble else b"early")
    for number in fds:
        os.close(number)
    return None


def fork_workers(
    channel: socket.socket, request: Request, fds: list[int], imports: PreloadedImports
) -> list[str] | None:
    """Fork them all from one child that ends, which makes orphans of them."""
    helper = os.fork()
    if helper:
        os.waitpid(helper, 0)
        return None
    for place, (environ, arguments) in enumerate(request):
        if os.fork() == 0:
            channel.close()
            mine = fds[place]
            for number in fds:
                if number != mine:
                    os.close(number)
            begin(mine, environ, arguments, imports.seen)
            return arguments
    os._exit(0)


def begin(
    told: int, environ: dict[str, str], arguments: list[str], seen: Mapping[str, dict[str, str]]
) -> None:
    """Become a worker as the agent would have started it; ends if it does not want one."""
    os.setsid()
    agent = int(environ["RESILIENT_AGENT_PID"])
    deadline_seconds = time.monotonic() + _ADOPTION_SECONDS
    while os.getppid() != agent:
        if time.monotonic() > deadline_seconds:
            os._exit(_CODE_KILLED)
        time.sleep(0.0005)
    try:
        os.write(told, f"{os.getpid()}\n".encode())
        word = os.read(told, 1)
    except OSError:
        word = b""
    if not word:
        os._exit(_CODE_KILLED)
    os.close(told)
    rename(os.path.basename(sys.executable))  # noqa: PTH119 - see above
    os.environ.clear()
    os.environ.update(environ)
    if "numpy.random" in sys.modules:
        # The others of Python's generators are seeded anew after a fork, or fixed.
        sys.modules["numpy.random"].seed()
    watch_imports(environ, arguments, seen)


def watch_imports(
    environ: dict[str, str], arguments: list[str], seen: Mapping[str, dict[str, str]]
) -> None:
    """Start anew, cold, if the program wants a package under other variables than it saw here.

    It was imported before the program began, so a variable that the program sets first would
    have no effect. Checked when the program first imports each package.
    """
    original, left = builtins.__import__, dict(seen)

    def watching(name: str, *rest: Any, **more: Any) -> Any:
        variables = left.pop(name.partition(".")[0], None)
        if variables is not None:
            if variables != bootstrap.relevant_variables():
                start_cold(environ, arguments)
            if not left and builtins.__import__ is watching:
                builtins.__import__ = original
        return original(name, *rest, **more)

    builtins.__import__ = watching


def start_cold(environ: dict[str, str], arguments: list[str]) -> None:
    """Replace this process by a worker that has imported nothing."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os.execve(sys.executable, [sys.executable, "-u", bootstrap.__file__, *arguments], environ)  # noqa: S606 - a worker's own command


def _load_bootstrap() -> Any:
    # By path: the program may have a module of that name.
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bootstrap.py")  # noqa: PTH100, PTH118, PTH120 - see above
    spec = importlib.util.spec_from_file_location("__bootstrap__", path)
    assert spec is not None, "it lies beside this file"  # noqa: S101
    assert spec.loader is not None, "it is a python file"  # noqa: S101
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


bootstrap = _load_bootstrap()

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python put this file's folder first; its modules are not the user's.
        del sys.path[0]
    bootstrap.die_with_the_agent()
    with socket.socket(fileno=int(sys.argv[1])) as _channel:
        _arguments = serve(_channel, PreloadedImports(sys.argv[2]))
    sys.exit(bootstrap.main(_arguments))
