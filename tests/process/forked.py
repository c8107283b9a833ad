"""Start python programs, and the workers of agents, from a process that has imported torch.

``Popen`` and ``run`` are those of ``subprocess``. A program that a fork cannot stand for gets a
fresh interpreter: other variables that imports read, a `sitecustomize`, flags of the interpreter,
an ignored signal.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

from resilient.elastic.workers import bootstrap

SERVER = Path(__file__).with_name("fork_server.py")
PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = 120.0
ANSWER_SECONDS = 60.0
SERVERS_MAX = 4
HEARD = (
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
PROGRAMS_MIN = 6  # with unusual variables, before a server for them pays
# TESTS_FORK=0: each program gets a fresh interpreter.
PLAIN = os.environ.get("TESTS_FORK", "1") == "0"


def relevant(environ):
    """Return the variables that imports read."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith((*bootstrap._RELEVANT, "RESILIENT_SHARED_FOLDER"))
        and not name.startswith(bootstrap._IRRELEVANT)
    }


class ForkChannel:
    """Connection to a process that forks programs for this process."""

    def __init__(self, channel) -> None:
        self._channel = channel

    def fork(self, arguments, environ, folder, streams, *, new_session) -> int:
        """Return the pid of a child of this process that runs the arguments."""
        request = {
            "arguments": arguments,
            "environ": environ,
            "folder": folder,
            "new_session": new_session,
        }
        text = json.dumps(request).encode()
        mine, theirs = socket.socketpair()
        with mine, adopting():
            with theirs:
                files = [theirs.fileno(), *streams]
                socket.send_fds(self._channel, [len(text).to_bytes(8, "big")], files)
                self._channel.sendall(text)
            mine.settimeout(ANSWER_SECONDS)
            pid = int(mine.recv(32))
            mine.send(b"!")
        return pid


class ForkServer(ForkChannel):
    """One server, for programs that see the same variables when they import."""

    def __init__(self, variables) -> None:
        channel, theirs = socket.socketpair()
        super().__init__(channel)
        kept = {k: v for k, v in os.environ.items() if k not in relevant(os.environ)}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(SERVER), str(theirs.fileno()), str(os.getpid())],
                env={**kept, **variables},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        self._channel.settimeout(START_SECONDS)
        self.is_fit = self._channel.recv(1) == b"y"
        atexit.register(self.stop)

    def stop(self) -> None:
        self._channel.close()
        self._process.kill()
        self._process.wait()


@contextmanager
def adopting():
    """Be the parent of the orphans below this process, inside."""
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_servers: dict[tuple, ForkServer] = {}
_asked: dict[tuple, int] = {}
_lock = threading.Lock()
_started = 0


def server_for(environ) -> ForkServer | None:
    """Return a server whose imports saw the variables of ``environ``.

    Two servers take turns: their hash seeds differ, as those of two ranks do.
    """
    global _started  # noqa: PLW0603 - one count for the process
    variables = relevant(environ)
    paths = variables.pop("PYTHONPATH", "").split(os.pathsep)
    customs = ("sitecustomize.py", "usercustomize.py")
    if any(Path(one or ".", name).exists() for one in paths if one for name in customs):
        return None
    _started += 1
    seen = tuple(sorted(variables.items()))
    _asked[seen] = _asked.get(seen, 0) + 1
    key = (_started % 2, *seen)
    if key not in _servers:
        is_worth_it = next(iter(_asked)) == seen or _asked[seen] > PROGRAMS_MIN
        if not is_worth_it or len(_servers) >= SERVERS_MAX:
            return None
        _servers[key] = ForkServer(variables)
    return _servers[key] if _servers[key].is_fit else None


class Popen(subprocess.Popen):
    """A `subprocess.Popen` whose python program is forked, where it can be."""

    def _server(self, environ):
        return server_for(environ)

    def _execute_child(self, *given):
        # The arguments of the method of `subprocess` from Python 3.11 on, in its order.
        (args, executable, preexec_fn, _, pass_fds, cwd, env, _, _, shell, *pipes) = given[:16]
        _, gid, gids, uid, umask, new_session, group = given[16:]
        arguments = [os.fspath(one) for one in args] if isinstance(args, list | tuple) else []
        environ = dict(os.environ if env is None else env)
        others = (executable, preexec_fn, shell or None, gid, gids, uid, umask, group, *pass_fds)
        server = None
        if is_program(arguments) and is_plain() and all(one in (None, -1) for one in others):
            with _lock:
                server = self._server(environ)
        if server is None:
            super()._execute_child(*given)
            return
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [
            own if one == -1 else one for own, one in enumerate((p2cread, c2pwrite, errwrite))
        ]
        folder = os.fspath(cwd) if cwd is not None else str(Path.cwd())
        with _lock:
            self.pid = server.fork(arguments[1:], environ, folder, streams, new_session=new_session)
        self._child_created = True
        self._close_pipe_fds(*pipes)


def fork_programs_of_this_process(channel) -> None:
    """Let the process behind ``channel`` fork the python programs that this process starts.

    A program whose imports would see other variables gets a fresh interpreter.
    """
    server, seen = ForkChannel(channel), relevant(os.environ)

    class ForkedPopen(Popen):
        def _server(self, environ):
            return server if relevant(environ) == seen else None

    subprocess.Popen = ForkedPopen


def is_program(arguments) -> bool:
    """Say whether the arguments are ``python [-u] SCRIPT`` or ``python -m MODULE``, with more."""
    if PLAIN or len(arguments) < 2 or arguments[0] != sys.executable:
        return False
    return arguments[1] in ("-m", "-u") or not arguments[1].startswith("-")


def is_plain() -> bool:
    """Say whether a child inherits nothing from this process that the server does not have."""
    ignored = [one for one in HEARD if signal.getsignal(one) == signal.SIG_IGN]
    return not ignored and not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def run(command, *, timeout=None, check=False, capture_output=False, **options):
    """Run a program to its end, as `subprocess.run`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done
