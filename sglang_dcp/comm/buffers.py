"""Static scratch memory of a communicator."""

from __future__ import annotations

import torch


class Scratch:
    """One flat buffer, allocated once; views of it are what CUDA graphs capture.

    A request that does not fit gets a temporary from torch's allocator, in eager mode only. The
    static buffer is never resized, since captured graphs hold its address. Freeing a temporary
    while a collective still reads it is safe: everything runs on the current stream, and the
    caching allocator reuses memory in that stream's order.

    Args:
        num_elements: size of the static buffer.
        dtype, device: of its elements.
    """

    def __init__(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._flat = torch.empty(num_elements, dtype=dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the static buffer."""
        return self._flat.nbytes

    def take(self, *shape: int) -> torch.Tensor:
        """Uninitialized contiguous tensor of the given shape; overwritten by the next `take`."""
        num_elements = 1
        for n in shape:
            num_elements *= n
        if num_elements <= self._flat.numel():
            return self._flat[:num_elements].view(shape)
        assert not (self._flat.is_cuda and torch.cuda.is_current_stream_capturing()), (
            f"{shape} does not fit the static {self._flat.numel()} elements under capture"
        )
        return torch.empty(shape, dtype=self._flat.dtype, device=self._flat.device)
