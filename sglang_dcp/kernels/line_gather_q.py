"""Gather the queries of all ranks in one kernel whose data carry their own flags (stage 4).

Legend as in `nvlink_gather_q`; a chunk is 16 bytes, T are the lines of one step of a program.

`nvlink_gather_q` needs two trips over the link in a row: data and fence, then a flag. Here the rows
[nope | pe] travel in lines of 128 bytes that hold their flag, as in `line_exchange`: one trip.

The rows of a rank are one sequence of chunks: chunk c of row (token b, own head h) has the index
(b*Hl + h) * C + c, with C = 72 for 576 elements of 16 bits. Line l takes seven of them:

    words 0..27   chunks 7*l .. 7*l + 6
    word 31       the epoch; words 28..30 are 0

    lines         [2 halves][N-1 slots][S][128 bytes]     slots as in `nvlink_exchange`
                                                          S = lines of the largest batch of lines

So a row takes 72/7 = 10.3 lines, and each of the eight threads of a line loads one whole chunk, of
one of the two tensors, and stores one: one load and one store a line at either end, all of 16
bytes. Lines that end with their row and use words 28, 29, too, as those of the exchange, would be
10 a row (3 % fewer bytes), for a second load and store a line at either end, of 2 to 8 bytes a
thread; nope and pe in lines of their own would be 9 + 2.

    epoch = cnt[lane] + 1
    push: one store instruction a line and peer, to the peers' half (epoch & 1)
    store the own rows in the own gathered buffer
    cnt[lane], cnt[lane + grid], ... = epoch
    read lines of the own half (epoch & 1) until word 31 of all of them is epoch; store their chunks
        in the own gathered buffer

The rules are those of `line_exchange`, and so are the arguments that what is stored was sent in
this launch, and that no line is overwritten before it was read: they speak of launches of this
kernel alone, whatever comes between. Rule 2 holds as the index of a chunk depends on (token, head,
column) only.

Must an exchange follow? Not this gather. The gathered buffer [B, H, D+R] is this rank's own memory:
no peer can reach it, `nvlink_gather_q` has another one, and its writers and readers follow each
other on one stream. Mixed sequences, as batches of different sizes take different kernels:
    line, flag    A peer that is ahead writes into the buffer of the flag gather while this rank
                  still stores or reads the result of the line gather: other memory. In one buffer
                  for both, lines that are received late would overwrite newer rows of the peer: the
                  second gather would be wrong, even if nobody reads the first one's result.
    flag, line    A peer that is ahead writes lines only.
    flag, line, flag    The line gather is as good as an exchange. The peer's third launch begins
                  after its second one ended, which had seen lines that this rank pushed after it
                  had read the first result (3', 4).
What remains is the rule of `nvlink_gather_q`, for two flag gathers with nothing between them that
waits for all peers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment
from sglang_dcp.kernels.exchange_lines import LINE_BYTES, push_lines, receive_lines
from sglang_dcp.kernels.launch import Plan
from sglang_dcp.kernels.nvlink_gather_q import check_gather
from sglang_dcp.kernels.peer_signal import (
    PeerState,
    Tiling,
    advance_counters,
    jitter,
    meeting,
)

CHUNK_BYTES = 16
_LINE_CHUNKS = tl.constexpr(7)


def lines_of_rows(num_rows: int, row_bytes: int) -> int:
    """Lines that num_rows consecutive rows of whole chunks take."""
    return -(-num_rows * row_bytes // (_LINE_CHUNKS.value * CHUNK_BYTES))


@triton.jit
def line_chunks(line, num_rows, ROW_CHUNKS: tl.constexpr, CELLS: tl.constexpr):
    """Of every cell [T, CELLS] of the lines: its row, its chunk of the row, whether it has one."""
    place = tl.arange(0, CELLS)[None, :] // (CELLS // 8)
    chunk = (line * _LINE_CHUNKS)[:, None] + place
    mask = (place < _LINE_CHUNKS) & (chunk < num_rows * ROW_CHUNKS)
    return chunk // ROW_CHUNKS, chunk % ROW_CHUNKS, mask


@triton.jit
def load_queries(
    source,
    line,
    num_rows,
    HL: tl.constexpr,
    NOPE_CHUNKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    CELLS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Lines `line` [T] of this rank's rows; epoch left open.

    source: pointers to the cells of q_nope and q_pe, the strides of both by token and head.
    """
    nope_ptr, pe_ptr, stride_nb, stride_nh, stride_pb, stride_ph = source
    vec: tl.constexpr = CELLS // 8
    row, c, mask = line_chunks(line, num_rows, ROW_CHUNKS, CELLS)
    b, h = (row // HL).to(tl.int64), (row % HL).to(tl.int64)
    nope = tl.multiple_of(b * stride_nb + h * stride_nh + c * vec, [1, ALIGN])
    pe = tl.multiple_of(b * stride_pb + h * stride_ph + (c - NOPE_CHUNKS) * vec, [1, ALIGN])
    chunk_ptrs = tl.where(c < NOPE_CHUNKS, nope_ptr + nope, pe_ptr + pe)
    return tl.load(chunk_ptrs + tl.arange(0, CELLS)[None, :] % vec, mask=mask, other=0)


@triton.jit
def store_queries(
    lines,
    q_ptr,
    line,
    num_rows,
    source,
    HL: tl.constexpr,
    N: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    wanted,
):
    """Store the chunks of lines `line` [T] of rank `source` in the gathered buffer, if wanted."""
    cells: tl.constexpr = lines.shape[1]
    vec: tl.constexpr = cells // 8
    row, c, mask = line_chunks(line, num_rows, ROW_CHUNKS, cells)
    q_row = (row // HL).to(tl.int64) * (N * HL) + source * HL + row % HL
    dst = (q_row * ROW_CHUNKS + c) * vec + tl.arange(0, cells)[None, :] % vec
    tl.store(q_ptr + dst, lines, mask=mask & wanted)


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_rows",
        "num_lines",
        "slot_lines",
        "num_lanes",
        "steps",
        "stride_nb",
        "stride_nh",
        "stride_pb",
        "stride_ph",
    ]
)
def line_gather_q_kernel(
    nope_ptr,
    pe_ptr,
    q_ptr,
    line_table_ptr,
    cnt_ptr,
    limit_ptr,
    report_ptr,
    rank,
    num_rows,
    num_lines,
    slot_lines,
    num_lanes,
    steps,
    stride_nb,
    stride_nh,
    stride_pb,
    stride_ph,
    HL: tl.constexpr,
    N: tl.constexpr,
    NOPE_CHUNKS: tl.constexpr,
    ROW_CHUNKS: tl.constexpr,
    CELLS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    JITTER_US: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    lane = tl.program_id(0)
    grid = tl.num_programs(0)
    cell_type: tl.constexpr = tl.uint16 if CELLS == 64 else tl.uint32
    cells_type: tl.constexpr = tl.pointer_type(cell_type)
    nope_cells = nope_ptr.to(cells_type, bitcast=True)
    pe_cells = pe_ptr.to(cells_type, bitcast=True)
    source = (nope_cells, pe_cells, stride_nb, stride_nh, stride_pb, stride_ph)
    q_cells = q_ptr.to(cells_type, bitcast=True)

    line = lane * BLOCK + tl.arange(0, BLOCK)
    # all loads of the first step before anything waits for one, the epoch's included
    lines = load_queries(source, line, num_rows, HL, NOPE_CHUNKS, ROW_CHUNKS, CELLS, ALIGN)
    peers = ()
    for step in tl.static_range(N - 1):
        peer_ptr = tl.load(line_table_ptr + (rank + 1 + step) % N).to(cells_type)
        peers += (tl.multiple_of(peer_ptr, 16),)  # type: ignore[assignment]
    arrived_ptr = tl.multiple_of(tl.load(line_table_ptr + rank).to(cells_type), 16)
    epoch = tl.load(cnt_ptr + lane) + 1
    first_slot = (epoch & 1).to(tl.int64) * (N - 1)

    jitter(0, rank, epoch, JITTER_US, INTERPRETED)
    # all pushes first (rule 5), each after the loads of the next one
    for i in range(steps):
        next_line = line + BLOCK * grid
        next_lines = load_queries(
            source, next_line, num_rows, HL, NOPE_CHUNKS, ROW_CHUNKS, CELLS, ALIGN
        )
        # to the next rank, and so on, so that not everyone queues for rank 0 first
        for step in tl.static_range(N - 1):
            at = (first_slot + N - 2 - step) * slot_lines + line
            push_lines(lines, epoch, peers[step], at, line < num_lines)
        store_queries(lines, q_cells, line, num_rows, rank, HL, N, ROW_CHUNKS, True)
        line, lines = next_line, next_lines
        jitter(i + 1, rank, epoch, JITTER_US, INTERPRETED)
    advance_counters(cnt_ptr, epoch, num_lanes, BLOCK_LANES)

    for i in range(steps):
        line = (lane + i * grid) * BLOCK + tl.arange(0, BLOCK)
        arrived = receive_lines(
            arrived_ptr,
            first_slot * slot_lines + line,
            line < num_lines,
            rank,
            epoch,
            slot_lines,
            limit_ptr,
            report_ptr,
            lane,
            N,
            CELLS,
            INTERPRETED,
        )
        jitter(i + 11, rank, epoch, JITTER_US, INTERPRETED)
        for n in tl.static_range(N):
            store_queries(arrived[n], q_cells, line, num_rows, n, HL, N, ROW_CHUNKS, n != rank)


def line_gather_q(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    q_all: torch.Tensor,
    line_capacity: int,
    state: PeerState,
    tiling: Tiling,
) -> torch.Tensor:
    """Gather the queries of all ranks, in one launch that waits for all peers.

    Args:
        q_nope, q_pe: as for `nvlink_gather_q`, of 2 or 4 bytes an element; D and R are whole chunks
            of 16 bytes.
        q_all: [B, H, D+R] of the same dtype, contiguous, 16-byte aligned, memory of this rank
            alone; written, heads of rank n at [n*Hl, (n+1)*Hl).
        line_capacity: S, at least `lines_of_rows` of this batch.
        state: of this kernel; its flags are the addresses of each rank's lines, multiples of 128,
            zero before the first launch.
        tiling: the same on all ranks; block is in lines, one slice.

    Returns:
        q_all. All ranks must launch with the same B, and B must not be 0.
    """
    check_gather(q_nope, q_pe, state, tiling)
    (num_tokens, local_heads, nope_dim), num_ranks = q_nope.shape, state.num_ranks
    row_dim, item = nope_dim + q_pe.shape[2], q_nope.element_size()
    assert item in (2, 4), q_nope.dtype
    assert nope_dim * item % CHUNK_BYTES == row_dim * item % CHUNK_BYTES == 0, (nope_dim, row_dim)
    assert q_all.shape == (num_tokens, num_ranks * local_heads, row_dim), tuple(q_all.shape)
    assert q_all.dtype == q_nope.dtype, (q_all.dtype, q_nope.dtype)
    assert q_all.is_contiguous(), q_all.stride()
    num_rows = num_tokens * local_heads
    num_lines = lines_of_rows(num_rows, row_dim * item)
    assert num_lines <= line_capacity, (num_lines, line_capacity)
    # each thread has 16 bytes of a line (rule 6), and they are nobody else's
    assert tiling.block * LINE_BYTES >= CHUNK_BYTES * 32 * tiling.num_warps, tiling

    def plan() -> Plan:
        strides = (*q_nope.stride()[:2], *q_pe.stride()[:2])
        return Plan(
            (tiling.grid,),
            *state.arguments,
            num_rows,
            num_lines,
            line_capacity,
            state.num_lanes,
            # one number for all programs and ranks; surplus steps are masked
            cdiv(num_lines, tiling.block * tiling.grid),
            *strides,
            HL=local_heads,
            NOPE_CHUNKS=nope_dim * item // CHUNK_BYTES,
            ROW_CHUNKS=row_dim * item // CHUNK_BYTES,
            CELLS=LINE_BYTES // item,
            ALIGN=common_alignment(item, *strides),
            BLOCK=tiling.block,
            **meeting(state, tiling),
        )

    state.launches(line_gather_q_kernel, (q_nope, q_pe, q_all), (line_capacity, tiling), plan)
    return q_all
