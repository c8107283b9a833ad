"""Checks of the conditions under which canonical reduction gives equal bits.

Canonical reduction sums the gradients of micro-batches in one fixed order at any world size. It
needs modules without state between micro-batches, and hosts with equal arithmetic.

In the forward pass, some modules change a buffer (running statistics, vectors of spectral norm) or
a parameter (a codebook, weights of a teacher). Such a module carries state from one micro-batch to
the next micro-batch of the same rank. This state depends on the number of ranks, because this
number determines which micro-batches a rank processes. The checks reject such a module.

A host's arithmetic is identified by the digest of the results of a fixed computation. Two hosts
with the same digest compute equal bits in the operations of this computation. Hosts with different
processors, libraries or numbers of threads usually have different digests. The computation has
matrix products of several shapes, because libraries choose kernels by shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _NormBase

from resilient.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

_INSTEAD = (
    "use a norm of single samples (GroupNorm, LayerNorm), or freeze it: call `.eval()` on it in "
    "`on_train_begin`, or make it with track_running_stats=False"
)
_BETWEEN = "change it between steps, on every rank: in `on_step_end` of a callback"


def refuse_mixing(model: nn.Module) -> None:
    """Reject modules that are known to carry state from one micro-batch to the next.

    The model must be in training mode.

    Raises:
        ConfigError: The message names the module.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm) and module.training:
            raise _mixes(name, module, "it computes with the samples of all ranks together")
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            raise _mixes(
                name, module, "its running statistics depend on the order of micro-batches"
            )


def refuse_layouts(model: nn.Module) -> None:
    """Reject parameters whose elements do not fill their memory, and sparse gradients.

    Raises:
        ConfigError: The message names the parameter or the module.
    """
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and torch.empty_like(parameter).stride() != parameter.stride():
            raise ConfigError(
                f"parameter `{name}` of shape {tuple(parameter.shape)} has strides "
                f"{parameter.stride()}, but reduction='canonical' sums dense tensors: make it "
                ".contiguous()"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ConfigError(
                f"module `{name}` ({type(module).__name__}) has sparse gradients, but "
                "reduction='canonical' adds dense gradients: set sparse=False"
            )


def _mixes(name: str, module: nn.Module, why: str, hint: str = _INSTEAD) -> ConfigError:
    return ConfigError(
        f"module `{name}` ({type(module).__name__}) cannot be trained with "
        f"reduction='canonical': {why}",
        hint=hint,
    )


@dataclass(frozen=True, slots=True)
class ImmutabilityCheck:
    """Check that no forward pass changes the buffers and parameters of a model.

    Attributes:
        seen: Identity and change count of each tensor, by name.
    """

    seen: Mapping[str, tuple[int, int]]

    @staticmethod
    def of(model: nn.Module) -> ImmutabilityCheck:
        """Record the current tensors of a model."""
        return ImmutabilityCheck(
            {name: (id(tensor), _changes(tensor)) for name, tensor in tensors_of(model)}
        )

    def require_same(self, model: nn.Module) -> None:
        """Reject a model whose forward pass has changed or replaced a tensor.

        Raises:
            ConfigError: The message names the module.
        """
        checksums = ImmutabilityCheck.of(model).seen
        changed_names = sorted(
            name for name in {*checksums, *self.seen} if checksums.get(name) != self.seen.get(name)
        )
        refuse_changed(model, changed_names)


def tensors_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors that a forward pass may read and must not change."""
    return chain(model.named_buffers(), model.named_parameters())


def refuse_changed(model: nn.Module, changed: Sequence[str]) -> None:
    """Reject a model whose forward pass changed the named buffers or parameters.

    Raises:
        ConfigError: At least one name is given; the message has the module of the first name.
    """
    if changed:
        owner, _, name = changed[0].rpartition(".")
        module = model.get_submodule(owner)
        if name in dict(module.named_parameters(recurse=False)):
            reason = f"its forward pass changes its parameter `{name}`"
            raise _mixes(owner, module, reason, _BETWEEN)
        raise _mixes(owner, module, f"its forward pass changes its buffer `{name}`")


def _changes(tensor: torch.Tensor) -> int:
    """Return the count of in-place changes of a tensor; torch does not count in inference mode."""
    return -1 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no other


_SEED = 20_220_711
_SHAPES = ((8, 8, 8), (33, 65, 17), (128, 256, 64), (5, 1000, 300))
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of some tensors, in hexadecimal."""
    hasher = blake2b(digest_size=16)
    for tensor in tensors:
        dense = tensor.detach().to("cpu").contiguous()
        hasher.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        hasher.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def checksum_of(tensor: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits, computed on the tensor's device."""
    dense = tensor.detach().contiguous().reshape(-1)
    if dense.is_complex():
        dense = torch.view_as_real(dense).reshape(-1)
    return int(dense.view(_OF_SIZE[dense.element_size()]).sum(dtype=torch.int64))


def arithmetic_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return the digest of this host's arithmetic.

    The global random generators stay unchanged.

    Args:
        device: Device of the model.
        dtype: Dtype of its matrix products.
    """
    with torch.enable_grad():
        return digest_of(_numbers(device, dtype))


def _numbers(device: torch.device, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    for rows, inner, columns in _SHAPES:
        left = torch.randn(rows, inner, generator=generator).to(device).requires_grad_()
        right = torch.randn(inner, columns, generator=generator).to(device).requires_grad_()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            product = functional.gelu(left @ right)
            result = functional.layer_norm(product, (columns,)).softmax(-1)
            loss = (result.float().log() * product.float().tanh()).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield from (
            result,
            loss,
            *(tensor.grad for tensor in (left, right) if tensor.grad is not None),
        )
    yield from _convolved(generator, device)
    yield from _stepped(generator, device)


def _convolved(generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
    image = torch.randn(2, 3, 17, 19, generator=generator).to(device)
    kernel = torch.randn(5, 3, 3, 3, generator=generator).to(device).requires_grad_()
    result = functional.conv2d(image, kernel)
    result.exp().sum().backward()  # type: ignore[no-untyped-call]  # as above
    assert kernel.grad is not None  # noqa: S101 - for mypy
    yield from (result, kernel.grad)


def _stepped(generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
    weight = torch.nn.Parameter(torch.randn(1003, generator=generator).to(device))
    optimizer = torch.optim.AdamW([weight], lr=0.01)
    for _ in range(3):
        weight.grad = torch.randn(1003, generator=generator).to(device)
        optimizer.step()
    yield weight
