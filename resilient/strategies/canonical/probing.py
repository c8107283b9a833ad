"""What a host's arithmetic is: the digest of a computation that is the same everywhere.

Two hosts with the same digest make the same bits of these operations; other processors, other
libraries or another number of threads mostly do not. Matrix products are of several shapes, as
libraries choose their kernels by that.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SEED = 20_220_711
_SHAPES = ((8, 8, 8), (33, 65, 17), (128, 256, 64), (5, 1000, 300))
_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return a digest of the bits of some tensors, in hexadecimal."""
    hashed = blake2b(digest_size=16)
    for one in tensors:
        dense = one.detach().to("cpu").contiguous()
        hashed.update(f"{dense.dtype}{tuple(dense.shape)}".encode())
        hashed.update(dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def checksum_of(tensor: torch.Tensor) -> int:
    """Return a number that nearly any change of a tensor's bits changes; its device makes it."""
    dense = tensor.detach().contiguous().reshape(-1)
    if dense.is_complex():
        dense = torch.view_as_real(dense).reshape(-1)
    return int(dense.view(_OF_SIZE[dense.element_size()]).sum(dtype=torch.int64))


def arithmetic_of(device: torch.device, dtype: torch.dtype) -> str:
    """Return the digest of this host's arithmetic.

    Global random numbers stay as they are.

    Args:
        device: where the model is.
        dtype: in which it multiplies matrices.
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
            made = functional.layer_norm(product, (columns,)).softmax(-1)
            loss = (made.float().log() * product.float().tanh()).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        yield from (made, loss, *(one.grad for one in (left, right) if one.grad is not None))
    yield from _convolved(generator, device)
    yield from _stepped(generator, device)


def _convolved(generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
    image = torch.randn(2, 3, 17, 19, generator=generator).to(device)
    kernel = torch.randn(5, 3, 3, 3, generator=generator).to(device).requires_grad_()
    made = functional.conv2d(image, kernel)
    made.exp().sum().backward()  # type: ignore[no-untyped-call]  # as above
    assert kernel.grad is not None  # noqa: S101 - for mypy
    yield from (made, kernel.grad)


def _stepped(generator: torch.Generator, device: torch.device) -> Iterator[torch.Tensor]:
    weight = torch.nn.Parameter(torch.randn(1003, generator=generator).to(device))
    optimizer = torch.optim.AdamW([weight], lr=0.01)
    for _ in range(3):
        weight.grad = torch.randn(1003, generator=generator).to(device)
        optimizer.step()
    yield weight
