"""A process that has imported what test ranks import, and forks them.

Run by path, ``python fork_server.py SOCKET CLIENT_PID``. A request names the arguments, the
environment, the folder and the three streams of a process. A helper forks the process and ends, so
that the client, which adopts orphans meanwhile, is its parent as if it had started it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from resilient.elastic.workers import bootstrap

PRELOADED = (
    *("torch", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.utils.data"),
    *("torch.distributed.elastic.agent.server.api", "torch.distributed.device_mesh"),
    *("torch.distributed.elastic.rendezvous.dynamic_rendezvous", "torch.nn.parallel"),
    *(
        "numpy",
        "safetensors.torch",
        "psutil",
        "resilient.checkpoint_engine",
        "resilient.checkpointer",
    ),
    *("resilient.train.trainer", "resilient_cli.app", "resilient_cli.launch_checks"),
    *("resilient.elastic.agent", "resilient.elastic.launcher"),
)
ADOPTION_SECONDS = 30.0
REQUEST_BYTES = 8
CODE_KILLED = 137
DEMO = ["-m", "examples.demo"]


def receive(channel: socket.socket) -> tuple[dict, list[int]] | None:
    """Return the next request and its files; None when the client is gone."""
    head, files, _, _ = socket.recv_fds(channel, REQUEST_BYTES, 4)
    if not head:
        return None
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size:
        part = channel.recv(size - len(text))
        if not part:
            return None
        text += part
    return json.loads(text), files


def with_workers(arguments: list[str]) -> list[str]:
    """Fork a server for the programs that an agent starts.

    The server is forked before this process has threads. It ends with this process.

    Returns:
        The arguments of this process; in a forked program its own.
    """
    if arguments[:3] != ["-m", "resilient_cli", "train"]:
        return arguments
    starter, (mine, theirs) = os.getpid(), socket.socketpair()
    if not os.fork():
        mine.close()
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        for stream in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), stream)
        return serve(theirs, starter)
    theirs.close()
    forked.fork_programs_of_this_process(mine)
    return arguments


def serve(channel: socket.socket, client: int) -> list[str]:
    """Fork a process for each request. Return in each process, with its arguments."""
    while (received := receive(channel)) is not None:
        request, files = received
        helper = os.fork()
        if not helper:
            if os.fork():
                os._exit(0)
            channel.close()
            begin(request, files, client)
            return request["arguments"]
        os.waitpid(helper, 0)
        for file in files:
            os.close(file)
    os._exit(0)


def begin(request: dict, files: list[int], client: int) -> None:
    """Make this process what a fresh interpreter would be; end it if the client gave it up."""
    told, *streams = files
    deadline_seconds = time.monotonic() + ADOPTION_SECONDS
    while os.getppid() != client:
        if time.monotonic() > deadline_seconds:
            os._exit(CODE_KILLED)
        time.sleep(0.0005)
    if request["new_session"]:
        os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    is_unbuffered = request["arguments"][0] == "-u"
    if is_unbuffered:
        del request["arguments"][0]
    open_streams(is_unbuffered=is_unbuffered)
    os.chdir(request["folder"])
    forget_the_server(request["environ"])
    os.write(told, str(os.getpid()).encode())
    word = os.read(told, 1)
    os.close(told)
    if not word:
        os._exit(CODE_KILLED)


def forget_the_server(environ: dict[str, str]) -> None:
    """Take the environment of the program, and drop what the server derived from its own."""
    os.environ.clear()
    os.environ.update(environ)
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [one for one in paths if one and one not in sys.path]
    sys.modules["numpy"].random.seed()
    if "tempfile" in sys.modules:
        sys.modules["tempfile"].tempdir = None
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def open_streams(*, is_unbuffered: bool) -> None:
    """Open the standard streams anew: their objects remember the kind of the files before."""
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115 - for the whole life
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115 - as above
    if is_unbuffered:
        sys.stdout.reconfigure(write_through=True)
    sys.stderr = sys.__stderr__ = open(  # noqa: SIM115 - as above
        2, "w", buffering=1, errors="backslashreplace", closefd=False
    )


def run(arguments: list[str]) -> int:
    """Run the program as python would, and return its exit code."""
    try:
        bootstrap.run_target(arguments)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - the edge of a process: python prints it too
        frames = error.__traceback__
        ours = (__file__, bootstrap.__file__)
        while frames is not None and frames.tb_frame.f_code.co_filename in ours:
            frames = frames.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
        sys.excepthook(type(error), error.with_traceback(frames), frames)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return 1
    return 0


def threads() -> int:
    """Return the number of threads that a fork leaves behind."""
    # Libraries that can be forked stop their threads before a fork.
    trial = os.fork()
    if not trial:
        os._exit(0)
    os.waitpid(trial, 0)
    return len(list(Path("/proc/self/task").iterdir()))


if __name__ == "__main__":
    from tests.process import forked

    if not sys.flags.safe_path:
        # Python put the folder of this file first.
        del sys.path[0]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _channel = socket.socket(fileno=int(sys.argv[1]))
    for _name in PRELOADED:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _channel.sendall(b"y" if threads() == 1 else b"n")
    sys.exit(run(with_workers(serve(_channel, int(sys.argv[2])))))
