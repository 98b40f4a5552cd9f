"""What the launchers share: kernel or reference, tile hints, bounded grids."""

from __future__ import annotations

import torch
import triton

# Fixed when Triton is imported: @triton.jit decides there whether a kernel is interpreted.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# Upper bound of the programs per request where the true length is known on the device only.
MAX_SPLITS = 64


def use_triton(t: torch.Tensor) -> bool:
    """True if a kernel on tensor t runs as Triton, compiled (CUDA) or interpreted (CPU)."""
    return t.is_cuda or INTERPRETED


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own serves kernels, too, and costs the host microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n; 1 for n below 2. As above."""
    return 1 << max(n - 1, 0).bit_length()


def common_alignment(element_bytes: int, *numbers: int) -> int:
    """Largest power of two, at most 16 bytes in elements, that divides all the numbers.

    Strides that depend on the batch are not specialized (each value would compile anew), which
    hides their divisibility and with it 16-byte loads. Launchers hand this hint over instead.
    """
    align = max(16 // element_bytes, 1)
    while any(n % align for n in numbers):
        align //= 2
    return align


def num_splits(capacity: int, block: int) -> int:
    """Programs that share one request: from the table's width, as lengths live on the device."""
    return max(1, min(MAX_SPLITS, cdiv(capacity, block)))
