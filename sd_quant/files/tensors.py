"""Tensors that stay in their file until they are read, and the weights of a network as a mapping of such tensors.

Alternative not taken: a state dict, which holds all 14 GB of SDXL in memory.
"""

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Protocol

import torch

from sd_quant.errors import ArtifactError
from sd_quant.files.archive import Member


class Readable(Protocol):
    """A tensor of known shape and dtype, whose values ``read`` loads or computes."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> torch.Tensor: ...


@dataclass(frozen=True)
class LazyTensor:
    """A ``Readable`` whose values are returned by a function."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]  # returns a tensor of this shape and dtype on the CPU


def lazy(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> LazyTensor:
    """Return a ``Readable`` of a tensor in memory; reading detaches it and moves it to the CPU and to ``dtype``."""
    dtype = dtype or tensor.dtype
    return LazyTensor(tuple(tensor.shape), dtype, lambda: tensor.detach().to("cpu", dtype))


def in_dtype(source: Readable, dtype: torch.dtype) -> LazyTensor:
    return LazyTensor(tuple(source.shape), dtype, lambda: source.read().to(dtype))


def size_of(tensors: Iterable[Readable]) -> int:
    """Return the total bytes of the tensors."""
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


def read_bytes(name: str, source: Readable) -> memoryview:
    """Read a tensor and return its bytes in row-major order. Raises ValueError for a wrong shape or dtype."""
    tensor = source.read()
    if (tuple(tensor.shape), tensor.dtype) != (tuple(source.shape), source.dtype):
        raise ValueError(f"{name} was to be {source.shape} {source.dtype} and is {tuple(tensor.shape)} {tensor.dtype}")
    return bytes_of(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor of any dtype, in row-major order."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # a single number can have any stride
    return flat.view(torch.uint8).numpy().data  # numpy has no bfloat16


@dataclass(frozen=True)
class StoredTensor:
    """A ``Readable`` whose values are in a file."""

    member: Member
    start: int  # byte of ``member`` where the first element begins
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # in elements, as in torch
    dtype: torch.dtype
    crc32: int | None = None  # of its bytes, where the file states it

    def read(self) -> torch.Tensor:
        """Return a contiguous copy on the CPU. Raises ArtifactError for bytes with another checksum."""
        span = span_of(self.shape, self.stride)
        if span == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        data = self.member.read(self.start, span * self.dtype.itemsize)
        if self.crc32 is not None and zlib.crc32(data) != self.crc32:
            raise ArtifactError(
                f"{self.member.name} is damaged: the bytes from {self.start} on do not have the checksum that the file "
                "has for them; fetch it again"
            )
        flat = torch.frombuffer(data, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride).contiguous()


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    return tuple(accumulate(reversed(shape), mul, initial=1))[-2::-1]


def span_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of stored elements that a strided tensor spans, from its first to its last element."""
    if 0 in shape:
        return 0
    return 1 + sum((length - 1) * step for length, step in zip(shape, stride, strict=True))


@dataclass(frozen=True, eq=False)
class Weights(Mapping[str, torch.Tensor]):
    """The weights of one network by diffusers' names; ``weights[name]`` reads that tensor in its stored dtype."""

    path: Path  # of the checkpoint, for messages
    component: str  # diffusers' name of the network
    parameters: Mapping[str, Readable] = field(repr=False)  # by diffusers' names
    tensors: Mapping[str, Readable] = field(repr=False)  # the same tensors as the file stores them, by its own keys
    adapted: bool = False  # whether LoRAs changed the weights; then ``tensors`` equals ``parameters``

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.parameters[name].read()

    def __contains__(self, name: object) -> bool:  # Mapping's own would read the tensor
        return name in self.parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)
