"""Bootstrap of a worker process, which runs the user's program and reports its end.

If the agent, the parent process, dies in any way, the kernel kills the worker.

A worker runs this file by its path: ``python bootstrap.py [-m|--exec] TARGET ARGS...``. The
bootstrap imports only the standard library before the user's program. ``sys.path`` does not contain
the folder of this file.

The program runs in a separate module that stays ``__main__`` until the process ends, as if Python
itself ran the program. ``runpy`` would remove that module while threads and exit handlers still
need it.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1
_CODE_KILLED = 137
_CODE_INTERRUPTED = 130
_CODE_PREEMPTED = 75
_CODE_NOT_FOUND = 66
# Packages that the fork server may import for a worker. They start no thread, use no device, and do
# not depend on the rank.
_WARMABLE = (
    "accelerate", "huggingface_hub", "numpy", "resilient", "safetensors", "tokenizers", "torch",
    "transformers",
)  # fmt: skip
# Prefixes of variables that these packages read at import.
_RELEVANT = (
    "ACCELERATE_", "ATEN_", "BLIS_", "CUDA_MODULE_", "DNNL_", "GOMP_", "HF_", "HUGGINGFACE_",
    "KINETO_", "KMP_", "LD_", "MALLOC_", "MKL_", "NPY_", "NUMPY_", "OMP_", "ONEDNN_", "OPENBLAS_",
    "PYTHON", "PYTORCH_", "SAFETENSORS_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_",
    "USE_", "XDG_",
)  # fmt: skip
_IRRELEVANT = ("TORCHELASTIC_", "TORCH_NCCL_")
# Value of RESILIENT_ADAPTER -> module of its trainer.
_ADAPTERS = {"transformers": "transformers.trainer"}


class TargetNotFound(Exception):
    """The script or module to run does not exist."""

    exit_code = _CODE_NOT_FOUND


def main(arguments: list[str]) -> int:
    """Run the program that ``arguments`` name and return the exit code of this process."""
    die_with_the_agent()
    _redirect_output()
    _enable_fault_handler()
    _register_stack_dump(arguments)
    _log_imports()
    _await_adapter()
    worker = os.getpid()
    try:
        _run_and_close(arguments)
    except SystemExit as error:
        code = _code_of_exit(error)
        if code not in (0, _CODE_PREEMPTED) and os.getpid() == worker:
            write_error_file(error, code)
        return code
    except BaseException as error:  # noqa: BLE001 - every error of the program becomes an exit code
        return _report(error, is_worker=os.getpid() == worker)
    return 0


def run_target(arguments: list[str]) -> None:
    """Run ``[-m] TARGET ARGS...`` as ``__main__`` with the ``sys.argv`` that Python would set.

    After ``--exec`` the target is an executable, which replaces this process.
    """
    if arguments[:1] == ["--exec"]:
        _exec_program(arguments[1:])
    is_module = arguments[:1] == ["-m"]
    target, *target_arguments = arguments[1:] if is_module else arguments
    if not sys.flags.safe_path:
        folder = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))  # noqa: PTH109, PTH120 - pathlib costs 10 ms
        sys.path.insert(0, folder)
    code, attributes = _find_module(target) if is_module else _find_script(target)
    sys.argv = [attributes["__file__"] if is_module else target, *target_arguments]
    program = ModuleType("__main__")
    program.__dict__.update(attributes)
    sys.modules["__main__"] = program
    exec(code, program.__dict__)  # noqa: S102 - running the user's program is the purpose


def _exec_program(command: list[str]) -> NoReturn:
    """Replace this process by an executable: same pid, same output."""
    try:
        os.execvp(command[0], command)  # noqa: S606 - running the user's program is the purpose
    except FileNotFoundError as error:
        raise TargetNotFound(f"no program `{command[0]}`") from error
    except PermissionError as error:
        raise TargetNotFound(f"`{command[0]}` cannot be run: chmod +x it") from error


def _run_and_close(arguments: list[str]) -> None:
    """Run the program and close what it left open; a failed close is a failure of the program."""
    try:
        run_target(arguments)
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    # A program that opened a checkpointer has imported this module; others skip the import.
    ending = sys.modules.get("resilient.exit_hooks")
    if ending is not None:
        ending.run_exit_hooks()


def write_error_file(error: BaseException, code: int) -> bool:
    """Write the error to the agent's error file, in torch's format with additional fields.

    Returns:
        True if the file was written.
    """
    import json
    import time

    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path:
        return False
    record = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(_format(error)),
                "timestamp": str(time.time_ns() // 1_000_000_000),
            },
        },
        "type": type(error).__name__,
        "exit_code": code,
        "code": str(getattr(error, "code", "")) if _is_own_error(error) else "",
        "hint": str(getattr(error, "hint", "")) if _is_own_error(error) else "",
        # The monotonic clock is the same in every process of a host. The wall clock can be set.
        "monotonic_seconds": time.monotonic(),
    }
    try:
        with open(path, "w", encoding="utf-8") as file:  # noqa: PTH123 - pathlib costs 10 ms
            json.dump(record, file)
    except OSError as failure:
        sys.stderr.write(f"resilient: cannot write the error file `{path}`: {failure}\n")
        return False
    return True


def die_with_the_agent() -> None:
    """Make the kernel kill this process when the agent dies in any way."""
    agent = int(os.environ.get("RESILIENT_AGENT_PID") or "0")
    if not agent:
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The agent may have died before the call above, and then no signal would come.
    if os.getppid() != agent:
        os._exit(_CODE_KILLED)


def relevant_variables() -> dict[str, str]:
    """Return the environment variables that packages may read at import."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(_RELEVANT) and not name.startswith(_IRRELEVANT)
    }


class _ImportLog:
    """Import finder that finds nothing and records imports for the fork server."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._worker = os.getpid()
        self._last: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Record a module that the fork server may import too, once its import succeeded."""
        del path, target
        last_import, self._last = self._last, {}
        if last_import.get("name") in sys.modules and os.getpid() == self._worker:
            import json

            os.write(self._file, json.dumps(last_import).encode() + b"\n")
        package = name.partition(".")[0]
        if package in _WARMABLE:
            variables = {"variables": relevant_variables()} if name == package else {}
            self._last = {"name": name, **variables}


def _log_imports() -> None:
    """Record imports, in the first worker of a host with a fork server."""
    path = os.environ.get("RESILIENT_IMPORTS", "")
    if not path:
        return
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    sys.meta_path.insert(0, _ImportLog(os.open(path, flags, 0o600)))


class _AdapterHook:
    """Import finder that adds the adapter of a trainer once the trainer's module is imported.

    Args:
        adapter: Module of ``resilient.integrations``.
        trainer: Module of the trainer.
    """

    def __init__(self, adapter: str, trainer: str) -> None:
        self._adapter = adapter
        self.trainer = trainer

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the trainer's module with a loader that also adds the adapter."""
        if name != self.trainer:
            return None
        import importlib.util

        del path, target
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            self.add(module)

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec

    def add(self, module: ModuleType) -> None:
        """Make each trainer of the module add the callback by itself."""
        import importlib

        integration = importlib.import_module(f"resilient.integrations.{self._adapter}")
        integration.add_to_every_trainer(module.Trainer)


def _await_adapter() -> None:
    """Add the adapter that RESILIENT_ADAPTER names, now or when its trainer is imported."""
    adapter = os.environ.get("RESILIENT_ADAPTER", "")
    if adapter not in _ADAPTERS:
        return
    hook = _AdapterHook(adapter, _ADAPTERS[adapter])
    # The fork server may have imported the module.
    imported = sys.modules.get(hook.trainer)
    if imported is not None:
        hook.add(imported)
        return
    sys.meta_path.insert(0, hook)


def _redirect_output() -> None:
    """Redirect the output into the pipes of an agent that stores and forwards it."""
    # A child process inherits these streams, and must not open the pipes itself.
    path_prefix = os.environ.pop("RESILIENT_OUTPUT", "")
    if not path_prefix:
        return
    for number, stream in ((1, "out"), (2, "err")):
        try:
            pipe = os.open(path_prefix + stream, os.O_WRONLY)
        except OSError:
            return
        os.dup2(pipe, number)
        os.close(pipe)


def _enable_fault_handler() -> None:
    import faulthandler

    # A script's launcher may have closed stderr.
    if sys.stderr is not None:
        faulthandler.enable()


def _register_stack_dump(arguments: list[str]) -> None:
    """Dump all stacks for the agent on its signal: see `resilient.distributed.heartbeat`.

    The handler is registered before the user's program, so that a rank stuck in its first import
    answers. The signal would kill an executable that replaces this process.
    """
    agent_folder, rank = os.environ.get("RESILIENT_NOTES", ""), os.environ.get("LOCAL_RANK", "")
    if not agent_folder or arguments[:1] == ["--exec"]:
        return
    import faulthandler
    import signal

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    try:
        file = os.open(os.path.join(agent_folder, f"stacks-{rank}"), flags, 0o600)  # noqa: PTH118 - pathlib costs 10 ms
    except OSError:
        return
    faulthandler.register(signal.SIGRTMIN + 10, file=file, all_threads=True, chain=False)
    os.write(file, f"{os.getpid()}\n".encode())


def _find_script(path: str) -> tuple[Any, dict[str, Any]]:
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - pathlib costs 10 ms
            source = file.read()
    except OSError as error:
        raise TargetNotFound(f"cannot open the script `{path}`: {error.strerror}") from error
    return compile(source, path, "exec"), {"__file__": path, "__spec__": None}


def _find_module(name: str) -> tuple[Any, dict[str, Any]]:
    import importlib.util

    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]  # loaders of source have it
    if spec is None or code is None:
        raise TargetNotFound(f"no module named `{name}` that can be run")
    return code, {
        "__file__": spec.origin,
        "__spec__": spec,
        "__package__": spec.parent,
        "__loader__": spec.loader,
        "__cached__": spec.cached,
    }


def _report(error: BaseException, *, is_worker: bool) -> int:
    code = _code_of(error)
    if code == _CODE_PREEMPTED:
        # This is not a failure: all ranks saved and left together.
        sys.stderr.write(f"{error}\n")
        return code
    error.__traceback__ = _without_own_frames(error.__traceback__)
    drop_hint_note = getattr(error, "drop_hint_note", None)
    if is_worker and drop_hint_note is not None:
        drop_hint_note()  # the agent prints the hint
    is_reported = is_worker and write_error_file(error, code)
    # As the interpreter does: exit handlers read these to detect an error.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if not (is_reported and _is_refusal(error)):
        sys.excepthook(type(error), error, error.__traceback__)
    return code


def _is_refusal(error: BaseException) -> bool:
    """Return True for an error that all ranks raise at the start: the agent prints it once."""
    errors = sys.modules.get("resilient.errors")
    return errors is not None and getattr(error, "code", "") in errors.REFUSAL_CODES


def _code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return _CODE_INTERRUPTED
    return int(getattr(error, "exit_code", 1)) if _is_own_error(error) else 1


def _code_of_exit(error: SystemExit) -> int:
    """Return the exit code that Python would use; a value other than a number is a last message."""
    if error.code is None or isinstance(error.code, int):
        return int(error.code or 0) & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _is_own_error(error: BaseException) -> bool:
    # A program that raises one of our errors has imported them; others skip the import.
    errors = sys.modules.get("resilient.errors")
    return isinstance(error, TargetNotFound) or (
        errors is not None and isinstance(error, errors.ResilientError)
    )


def _without_own_frames(frames: Any) -> Any:
    """Drop the frames of this file from the top of a traceback."""
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    return frames


def _format(error: BaseException) -> list[str]:
    import traceback

    return traceback.format_exception(type(error), error, _without_own_frames(error.__traceback__))


if __name__ == "__main__":
    if not sys.flags.safe_path:
        # Python put this file's folder first, but its modules are not the user's.
        del sys.path[0]
    sys.exit(main(sys.argv[1:]))
