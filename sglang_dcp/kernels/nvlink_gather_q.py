"""Gather the absorbed queries of all ranks in one kernel over peer memory (stage 4).

Legend: N = dcp_size ranks, B tokens, H heads of the group, Hl = H/N heads of one rank, D =
kv_lora_rank (512), R = qk_rope_head_dim (64).

A rank reads q_nope and q_pe where the absorb product and the rope left them and pushes [nope | pe]
into the gathered buffer of every rank, its own included: [B, H, D+R], token-major and contiguous,
as attention wants it. No concatenation, transposition or copy remains. The work is divided by
16-byte chunks, 72 to a row, so that each thread moves whole ones whatever the dimensions. The
protocol is in `peer_signal`; a datum's address depends on (token, head) only.

There is one gathered buffer and no half of it, because graphs hold its address. This is safe since
every gather is followed, on the same stream, by attention and then by an exchange that waits for
all peers: rank A's gather k+1 begins after its exchange k ended, which had seen rank B's exchange
k, which B began after its attention k had read the buffer. Two of these gathers without an exchange
between them may only be issued if nobody reads the first one's result. A gather by lines between
them does as well (`line_gather_q`, whose own buffer peers do not write).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import common_alignment
from sglang_dcp.kernels.launch import Plan
from sglang_dcp.kernels.peer_signal import (
    FLAG_WORDS,
    PeerState,
    Tiling,
    advance,
    check_launch,
    jitter,
    load_flag_ptrs,
    meeting,
    signal_peers,
    wait_for_peers,
)


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_rows",
        "num_lanes",
        "stride_nb",
        "stride_nh",
        "stride_pb",
        "stride_ph",
    ]
)
def nvlink_gather_q_kernel(
    nope_ptr,
    pe_ptr,
    q_table_ptr,
    flag_table_ptr,
    cnt_ptr,
    limit_ptr,
    report_ptr,
    rank,
    num_rows,
    num_lanes,
    stride_nb,
    stride_nh,
    stride_pb,
    stride_ph,
    HL: tl.constexpr,
    N: tl.constexpr,
    NOPE_DIM: tl.constexpr,
    PE_DIM: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    REFRESH: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    JITTER_US: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    lane = tl.program_id(0)
    epoch = tl.load(cnt_ptr + lane) + 1
    peer_flags, own_flags = load_flag_ptrs(flag_table_ptr, lane, rank, N, WORDS)
    element = nope_ptr.dtype.element_ty
    nope_chunks: tl.constexpr = NOPE_DIM // VEC
    row_chunks: tl.constexpr = (NOPE_DIM + PE_DIM) // VEC
    num_chunks = num_rows * row_chunks
    e = tl.arange(0, VEC)[None, :]

    jitter(0, rank, epoch, JITTER_US, INTERPRETED)
    for item in range(lane, tl.cdiv(num_chunks, BLOCK), tl.num_programs(0)):
        chunk = item * BLOCK + tl.arange(0, BLOCK)
        mask = (chunk < num_chunks)[:, None]
        row, c = chunk // row_chunks, chunk % row_chunks
        b, h = (row // HL).to(tl.int64), (row % HL).to(tl.int64)
        nope = nope_ptr + b * stride_nb + h * stride_nh + c * VEC
        pe = pe_ptr + b * stride_pb + h * stride_ph + (c - nope_chunks) * VEC
        src = tl.multiple_of(tl.where(c < nope_chunks, nope, pe), [VEC * element.itemsize])
        q = tl.load(src[:, None] + e, mask=mask)
        dst = (b * (N * HL) + rank * HL + h) * (NOPE_DIM + PE_DIM) + c * VEC
        for step in tl.static_range(1, N + 1):  # peers in turn, this rank last
            base = tl.load(q_table_ptr + (rank + step) % N).to(tl.pointer_type(element))
            q_ptrs = tl.multiple_of(base + dst, [VEC * element.itemsize])
            tl.store(q_ptrs[:, None] + e, q, mask=mask)

    jitter(1, rank, epoch, JITTER_US, INTERPRETED)
    signal_peers(peer_flags, rank, epoch, N)
    advance(cnt_ptr, peer_flags, rank, epoch, num_lanes, N, WORDS, 1, REFRESH, BLOCK_LANES)
    wait_for_peers(own_flags, rank, epoch, limit_ptr, report_ptr, lane, N, INTERPRETED)


def check_gather(
    q_nope: torch.Tensor, q_pe: torch.Tensor, state: PeerState, tiling: Tiling
) -> None:
    """Invariants of a gather's launch (host metadata only)."""
    assert q_pe.shape[:2] == q_nope.shape[:2], f"{q_pe.shape} does not fit {q_nope.shape}"
    assert q_nope.stride(2) == q_pe.stride(2) == 1, (q_nope.stride(), q_pe.stride())
    assert q_nope.dtype == q_pe.dtype, (q_nope.dtype, q_pe.dtype)
    assert q_nope.shape[0] > 0, "an empty launch would not count as one"
    assert tiling.slices == 1, tiling
    check_launch(state, tiling)


def nvlink_gather_q(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    q_table: torch.Tensor,
    state: PeerState,
    tiling: Tiling,
) -> None:
    """Fill every rank's gathered buffer, in one launch that waits for all peers.

    Args:
        q_nope: [B, Hl, D] absorbed query, last dim contiguous, other strides free (upstream hands
            a transposed view of [Hl, B, D]).
        q_pe: [B, Hl, R] of the same dtype, last dim contiguous, other strides free.
        q_table: int64 [N], address of each rank's gathered buffer, multiples of 16; it holds
            [B, H, D+R] afterwards, contiguous, heads of rank n at [n*Hl, (n+1)*Hl).
        state: flags and counters of this kernel; always with the same table.
        tiling: the same on all ranks, slices 1.

    All ranks must launch with the same B, and B must not be 0.
    """
    check_gather(q_nope, q_pe, state, tiling)
    num_tokens, local_heads, nope_dim = q_nope.shape
    pe_dim = q_pe.shape[2]

    def plan() -> Plan:
        strides = (*q_nope.stride()[:2], *q_pe.stride()[:2])
        return Plan(
            (tiling.grid,),
            q_table,
            *state.arguments,
            num_tokens * local_heads,
            state.num_lanes,
            *strides,
            HL=local_heads,
            NOPE_DIM=nope_dim,
            PE_DIM=pe_dim,
            VEC=common_alignment(q_nope.element_size(), nope_dim, pe_dim, *strides),
            BLOCK=tiling.block,
            WORDS=FLAG_WORDS,
            REFRESH=state.refresh_epochs,
            **meeting(state, tiling),
        )

    state.launches(nvlink_gather_q_kernel, (q_nope, q_pe), tiling, plan)
