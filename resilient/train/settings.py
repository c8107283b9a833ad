"""What arguments change in the process and in the model before anything is trained."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from resilient.errors import ConfigError
from resilient.train.arguments import TrainingArguments
from resilient.train.arguments.reduction import is_canonical

if TYPE_CHECKING:
    from torch import nn

# What CUDA's and others' libraries read; kernels are launched one by one with it (Transformers').
_DETERMINISTIC = {
    "CUDA_LAUNCH_BLOCKING": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "FLASH_ATTENTION_DETERMINISTIC": "1",
}
# The first generation of NVIDIA GPUs with TF32 (Ampere).
_TF32_SINCE = (8, 0)


def own_arguments(args: Any) -> TrainingArguments:
    """Return a trainer's arguments, or the defaults for None.

    Raises:
        ConfigError: they are another library's, or a value cannot be saved.
    """
    if args is None:
        return TrainingArguments()
    if not isinstance(args, TrainingArguments):
        kind = type(args)
        raise ConfigError(
            f"`args` is a {kind.__module__}.{kind.__qualname__}, not our TrainingArguments",
            hint="from resilient import TrainingArguments",
        )
    # A field may have been set since the arguments were made.
    args.to_dict()
    return args


def settle_process(args: TrainingArguments, device: torch.device) -> None:
    """Set what torch and its libraries are told for the whole process.

    Raises:
        ConfigError: the device has no TF32.
    """
    threads = args.threads_per_rank or (1 if is_canonical(args) else None)
    if threads is not None:
        torch.set_num_threads(threads)
    if args.full_determinism or (is_canonical(args) and device.type != "cpu"):
        compute_deterministically()
    if args.tf32 is not None:
        allow_tf32(device, wanted=args.tf32)


def compute_deterministically() -> None:
    """Let torch use deterministic algorithms only; an operation that has none raises."""
    os.environ.update(_DETERMINISTIC)
    torch.use_deterministic_algorithms(True)  # noqa: FBT003 - torch's signature
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def allow_tf32(device: torch.device, *, wanted: bool) -> None:
    """Multiply matrices of float32 in TF32, or exactly.

    Raises:
        ConfigError: it is wanted and the device has none.
    """
    has = device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_SINCE
    if wanted and not has:
        raise ConfigError(
            f"`tf32`=True needs an NVIDIA GPU of the Ampere generation or newer, and this trains "
            f"on `{device}`: leave it out"
        )
    if has:
        backends: Any = torch.backends  # the stubs of torch do not know it
        backends.fp32_precision = "tf32" if wanted else "ieee"


def settle_model(args: TrainingArguments, model: nn.Module) -> None:
    """Tell a model of Transformers whether to keep keys and values, of no use in training."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = args.use_cache
