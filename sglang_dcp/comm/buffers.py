"""Static scratch memory of a communicator."""

from __future__ import annotations

import math

import torch

#: Shapes that are kept: prefill may bring a new one with every batch.
MAX_VIEWS = 1024


class Scratch:
    """One flat buffer, allocated once; views of it are what CUDA graphs capture.

    A request that does not fit gets a temporary from torch's allocator, in eager mode only. The
    static buffer is never resized, since captured graphs hold its address. Freeing a temporary
    while a collective still reads it is safe: everything runs on the current stream, and the
    caching allocator reuses memory in that stream's order.

    Args:
        flat: the static buffer, 1-D and contiguous.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat
        # two views cost the host microseconds, in every layer
        self._views: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the static buffer."""
        return self._flat.nbytes

    def take(self, *shape: int) -> torch.Tensor:
        """Uninitialized contiguous tensor of the given shape; overwritten by the next `take`."""
        view = self._views.get(shape)
        if view is not None:
            return view
        num_elements = math.prod(shape)
        if num_elements <= self._flat.numel():
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            view = self._views[shape] = self._flat[:num_elements].view(shape)
            return view
        assert not (self._flat.is_cuda and torch.cuda.is_current_stream_capturing()), (
            f"{shape} does not fit the static {self._flat.numel()} elements under capture"
        )
        return torch.empty(shape, dtype=self._flat.dtype, device=self._flat.device)
