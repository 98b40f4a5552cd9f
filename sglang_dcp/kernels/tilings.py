"""How the kernels over peer memory divide a batch: equally on all ranks (rule 1).

Cached: eager prefill asks in every layer, and waits for its host.
"""

from __future__ import annotations

import functools

from sglang_dcp.kernels.dispatch import cdiv, next_power_of_2
from sglang_dcp.kernels.exchange_lines import LINE_BYTES
from sglang_dcp.kernels.peer_signal import Tiling

#: Warps of the programs that max_programs counts; tilings with more warps take fewer programs.
NUM_WARPS = 4
#: Bytes that a thread moves in one instruction.
VEC_BYTES = 16


@functools.cache
def exchange_tiling(num_rows: int, row_bytes: int, num_ranks: int, max_programs: int) -> Tiling:
    """Division of the exchange; the thresholds are from sweeps on two H200 (H=96, B=1..256).

    A program costs a fence and a flag, so few programs that are full beat many; while the rows do
    not fill the GPU, small programs spread them. One slice: a fence for each of several costs more
    than the overlap that it buys.

    Args:
        num_rows: B * Hl.
        row_bytes: bytes of one output row.
        num_ranks: N; a step loads its rows for all N-1 peers at once, which bounds it by registers.
        max_programs: largest grid of programs of NUM_WARPS.
    """
    full = num_rows > 256
    num_warps = 2 * NUM_WARPS if full else NUM_WARPS
    block = max(1, next_power_of_2(32 * num_warps * VEC_BYTES // row_bytes))
    if num_rows > 1024 and num_ranks <= 4:
        block *= 2
    return _even(cdiv(num_rows, block), block, num_warps, max(1, max_programs // (1 + full)))


@functools.cache
def line_tiling(num_lines: int, num_ranks: int, max_programs: int) -> Tiling:
    """Division of a kernel that moves lines, where more programs cost nothing but their start.

    Args:
        num_lines: lines that a rank receives from one peer: B * Hl * `lines_per_row` of the
            exchange, `lines_of_rows` of the gather.
        num_ranks: N; a program holds its lines of all ranks in registers.
        max_programs: largest grid of programs of NUM_WARPS.
    """
    num_warps = 2 * NUM_WARPS
    # 16 bytes a thread
    block = 32 * num_warps * VEC_BYTES // LINE_BYTES
    most_programs = max(1, max_programs // 2)
    if num_ranks <= 4 and num_lines > 2 * block * most_programs:
        block *= 2
    return _even(cdiv(num_lines, block), block, num_warps, most_programs)


@functools.cache
def gather_tiling(num_chunks: int, max_programs: int) -> Tiling:
    """Division of the gather's 16-byte chunks, from the same sweeps: about four steps a program."""
    num_warps = 2 * NUM_WARPS
    block = 32 * num_warps
    while block < 4 * 32 * num_warps and num_chunks > block * 4 * 108:
        block *= 2
    items = cdiv(num_chunks, block)
    return _even(
        items, block, num_warps, min(max(1, max_programs // 2), 54 if items <= 216 else 124)
    )


def _even(items: int, block: int, num_warps: int, most_programs: int) -> Tiling:
    """As many programs as finish `items` in the fewest steps, each with nearly as many."""
    steps = cdiv(items, most_programs)
    return Tiling(block, num_warps, cdiv(items, steps))
