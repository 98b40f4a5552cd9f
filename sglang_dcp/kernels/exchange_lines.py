"""What the line exchange does to a few lines: pick them from rows, push, receive, merge them.

Legend and layout of a line: `line_exchange`. Device code only. Tiles are [T, CELLS]: T lines of
CELLS cells, unsigned integers as wide as the elements. LSEs are in either base.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dcp.kernels.lse_merge import add_step, finish, finish_lse, max_step, weight
from sglang_dcp.kernels.peer_signal import SPINS_PER_CHECK, give_up, out_of_time

LINE_BYTES = 128
# 32-bit words of a line: 28 (16-byte chunks of the row), 2 (of its rest), the LSE, the epoch.
_LSE_WORD = tl.constexpr(30)
_EPOCH_WORD = tl.constexpr(31)


def lines_per_row(dim: int, element_bytes: int) -> int:
    """Lines that D elements take."""
    return -(-dim * element_bytes // (4 * _LSE_WORD.value))


@triton.jit
def put_word(lines, word, AT: tl.constexpr):
    """The lines with word AT replaced: word is uint32 [T], or [1] for all lines."""
    cell = tl.arange(0, lines.shape[1])[None, :]
    parts: tl.constexpr = lines.shape[1] // 32
    value = (word[:, None] >> (cell % parts * (32 // parts))).to(lines.dtype)
    return tl.where(cell // parts == AT, value, lines)


@triton.jit
def as_word(epoch):
    """uint32 [1] of an int32 scalar."""
    return (tl.zeros([1], tl.int32) + epoch).to(tl.uint32, bitcast=True)


@triton.jit
def get_word(lines, AT: tl.constexpr):
    """Word AT of each line, uint32 [T]."""
    cell = tl.arange(0, lines.shape[1])[None, :]
    parts: tl.constexpr = lines.shape[1] // 32
    value = lines.to(tl.uint32) << (cell % parts * (32 // parts)).to(tl.uint32)
    return tl.sum(tl.where(cell // parts == AT, value, 0), 1)


@triton.jit
def row_columns(part, D: tl.constexpr, ROW_LINES: tl.constexpr, CELLS: tl.constexpr):
    """Where lines `part` [T] of rows lie: (columns [T, CELLS], mask) of the chunks, of the rest.

    Chunks come first in the row, all of them, so that they are aligned in the row and in the line.
    """
    cell = tl.arange(0, CELLS)[None, :]
    chunks: tl.constexpr = CELLS * 7 // 8
    rest: tl.constexpr = CELLS // 16
    first: tl.constexpr = (ROW_LINES - 1) * chunks
    columns = (part * chunks)[:, None] + cell
    rest_columns = (first + part * rest)[:, None] + cell
    in_rest = (cell >= chunks) & (cell < chunks + rest) & (rest_columns < D)
    return columns, (cell < chunks) & (columns < D), rest_columns, in_rest


@triton.jit
def load_lines(
    source,
    line,
    valid,
    owner,
    HL: tl.constexpr,
    D: tl.constexpr,
    ROW_LINES: tl.constexpr,
    CELLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Lines `line` [T] of the rows of owner's heads, from this rank's o and lse; epoch left open.

    source: pointers to the cells of o and to lse, their strides by token and head.
    owner: scalar or [T].
    """
    o_ptr, lse_ptr, stride_ob, stride_oh, stride_lb, stride_lh = source
    row, part = line // ROW_LINES, line % ROW_LINES
    b, h = (row // HL).to(tl.int64), owner * HL + row % HL
    src = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    o_ptrs = (o_ptr + src)[:, None]
    columns, mask, rest_columns, in_rest = row_columns(part, D, ROW_LINES, CELLS)
    lines = tl.load(o_ptrs + columns, mask=mask & valid[:, None], other=0)
    if ROW_LINES * (CELLS * 7 // 8) < D:
        rest = tl.load(o_ptrs + rest_columns, mask=in_rest & valid[:, None], other=0)
        lines = tl.where(mask, lines, rest)
    lse = tl.load(lse_ptr + b * stride_lb + h * stride_lh, mask=valid, other=0.0)
    return put_word(lines, lse.to(tl.uint32, bitcast=True), _LSE_WORD)


@triton.jit
def push_lines(lines, epoch, peer_ptrs, at, valid):
    """Store lines with their epoch at index `at` [T] of the regions peer_ptrs [T]: one store.

    Eight neighbouring threads of a warp write a line, 16 bytes each, in one instruction.
    """
    words = put_word(lines, as_word(epoch), _EPOCH_WORD)
    cell = tl.arange(0, lines.shape[1])[None, :]
    tl.store((peer_ptrs + at * lines.shape[1])[:, None] + cell, words, mask=valid[:, None])


@triton.jit
def load_owned(lens_ptr, b, valid, stride_cn, N: tl.constexpr):
    """int32 [T], bit n of which says whether stripe n of token b holds anything."""
    owned = tl.zeros(b.shape, tl.int32)
    for n in tl.static_range(N):
        filled = tl.load(lens_ptr + n * stride_cn + b, mask=valid, other=0) > 0
        owned |= filled.to(tl.int32) << n
    return owned


@triton.jit
def _load_arrived(arrived_ptr, at, valid, rank, slot_lines, N: tl.constexpr, CELLS: tl.constexpr):
    """Tuple of all ranks' lines [T, CELLS] as they are now, zeros for this rank."""
    cell = tl.arange(0, CELLS)[None, :]
    lines = ()
    for n in tl.static_range(N):
        index = at + ((n - rank - 1 + N) % N).to(tl.int64) * slot_lines
        ptrs = (arrived_ptr + index * CELLS)[:, None] + cell
        # flags and data in one access (rule 7), which goes to the L2 each time
        now = tl.load(ptrs, mask=valid[:, None] & (n != rank), other=0, volatile=True)
        lines += (now,)  # type: ignore[assignment]
    return lines


@triton.jit
def _first_late(lines, valid, rank, epoch, N: tl.constexpr):
    """First peer with a line that does not carry this epoch, N if there is none."""
    cells: tl.constexpr = lines[0].shape[1]
    cell = tl.arange(0, cells)[None, :]
    flags = put_word(tl.zeros([1, cells], lines[0].dtype), epoch, _EPOCH_WORD)
    is_flag = valid[:, None] & (cell // (cells // 32) == _EPOCH_WORD)
    found = tl.zeros(lines[0].shape, tl.int32)
    for n in tl.static_range(N):
        late = is_flag & (n != rank) & (lines[n] != flags)
        found = tl.maximum(found, tl.where(late, N - n, 0))
    return N - tl.max(tl.max(found, 1), 0)


@triton.jit
def receive_lines(
    arrived_ptr,
    at,
    valid,
    rank,
    epoch,
    slot_lines,
    limit_ptr,
    report_ptr,
    lane,
    N: tl.constexpr,
    CELLS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Tuple of all ranks' lines of this epoch, in rank order, zeros for this rank.

    `at` [T] is the index of slot 0's lines in the region. Gives up after the limit.
    """
    flag = as_word(epoch)
    lines = _load_arrived(arrived_ptr, at, valid, rank, slot_lines, N, CELLS)
    late = _first_late(lines, valid, rank, flag, N)
    spins = 0
    started = tl.full([], 0, tl.int64)
    while late < N:
        lines = _load_arrived(arrived_ptr, at, valid, rank, slot_lines, N, CELLS)
        late = _first_late(lines, valid, rank, flag, N)
        spins += 1
        if spins % SPINS_PER_CHECK == 0:
            started, over = out_of_time(started, spins, limit_ptr, INTERPRETED)
            if over & (late < N):
                give_up(report_ptr, rank, late, lane, epoch, INTERPRETED)
    if INTERPRETED:
        # no unit there: cells are stored and loaded one by one, flags last
        lines = _load_arrived(arrived_ptr, at, valid, rank, slot_lines, N, CELLS)
    return lines


@triton.jit
def merge_lines(
    arrived,
    own,
    owned,
    merged_ptr,
    merged_lse_ptr,
    line,
    valid,
    rank,
    N: tl.constexpr,
    D: tl.constexpr,
    ROW_LINES: tl.constexpr,
    CELLS: tl.constexpr,
    BASE_2: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    """Two-pass merge of all ranks' lines over ranks 0..N-1, as in `merge_partials_kernel`."""
    element: tl.constexpr = merged_ptr.dtype.element_ty
    lines, lses = (), ()
    m = tl.full(line.shape, float("-inf"), tl.float32)
    for n in tl.static_range(N):
        line_n = tl.where(n == rank, own, arrived[n])
        lse = get_word(line_n, _LSE_WORD).to(tl.float32, bitcast=True)
        m = max_step(m, lse, ((owned >> n) & 1) != 0)
        lines += (line_n,)  # type: ignore[assignment]
        lses += (lse,)  # type: ignore[assignment]

    acc = tl.zeros(own.shape, tl.float32)
    total = tl.zeros(line.shape, tl.float32)
    for n in tl.static_range(N):
        is_owned = ((owned >> n) & 1) != 0
        w = weight(lses[n], m, is_owned, BASE_2)
        acc = add_step(acc, lines[n].to(element, bitcast=True), w, is_owned[:, None])
        total += w

    merged = finish(acc, total).to(element)
    row, part = line // ROW_LINES, line % ROW_LINES
    row_ptrs = (merged_ptr + row.to(tl.int64) * D)[:, None]
    columns, mask, rest_columns, in_rest = row_columns(part, D, ROW_LINES, CELLS)
    tl.store(row_ptrs + columns, merged, mask=mask & valid[:, None])
    if ROW_LINES * (CELLS * 7 // 8) < D:
        tl.store(row_ptrs + rest_columns, merged, mask=in_rest & valid[:, None])
    if STORE_LSE:
        merged_lse = finish_lse(m, total, BASE_2)
        tl.store(merged_lse_ptr + row, merged_lse, mask=valid & (part == 0))
