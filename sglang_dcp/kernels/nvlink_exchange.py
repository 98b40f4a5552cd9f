"""Exchange and merge in one kernel over peer memory (stages 6 and 7).

Legend: N = dcp_size ranks, B tokens, H heads of the group, Hl = H/N heads of one rank, D head dim.

A rank pushes (o, lse) of the heads that it does not own into their owners' symmetric buffers,
waits for its own, and merges in rank order with the shared helpers of `lse_merge`, its own part
read where attention left it: the same bits as `merge_partials` on the same partials. No pack, no
unpack, no staging copy. The protocol, and why it is safe, is in `peer_signal`.

Layout in each rank's buffer (M = row_capacity, rows (token, own head) of the largest batch):

    o    [2 halves][N-1 slots][M][D]    dtype of o, 16-byte rows
    lse  [2 halves][N-1 slots][M]       float32, its own region, so that o rows stay aligned

The row of (token b, head h) is b*Hl + h; the slot of source s at owner n is (s - n - 1) mod N. A
program moves ROWS rows at a time, for all owners at once: rows lane*ROWS, (lane + grid)*ROWS, ...
of every owner, and merges exactly those, so that it depends on the same lane of its peers only.
With several slices it raises a flag after each, and merges one while later ones are on the wire.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import common_alignment, next_power_of_2
from sglang_dcp.kernels.exchange_rows import load_own, merge_rows, push_rows
from sglang_dcp.kernels.launch import Plan
from sglang_dcp.kernels.lse_merge import LseBase
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

MAX_SLICES = 4


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_rows",
        "row_capacity",
        "num_lanes",
        "stride_ob",
        "stride_oh",
        "stride_lb",
        "stride_lh",
        "stride_cn",
    ]
)
def nvlink_exchange_kernel(
    o_ptr,
    lse_ptr,
    lens_ptr,
    merged_ptr,
    merged_lse_ptr,
    o_table_ptr,
    lse_table_ptr,
    flag_table_ptr,
    cnt_ptr,
    limit_ptr,
    report_ptr,
    rank,
    num_rows,
    row_capacity,
    num_lanes,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_cn,
    HL: tl.constexpr,
    N: tl.constexpr,
    PEERS: tl.constexpr,
    D: tl.constexpr,
    BASE_2: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SLICES: tl.constexpr,
    FLAG_SLICES: tl.constexpr,
    WORDS: tl.constexpr,
    REFRESH: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    JITTER_US: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    lane = tl.program_id(0)
    grid = tl.num_programs(0)
    # everything that the kernel needs from tables, before there is anything to wait for
    epoch = tl.load(cnt_ptr + lane) + 1
    half = epoch & 1
    element = o_ptr.dtype.element_ty
    arrived_o_ptr = tl.load(o_table_ptr + rank).to(tl.pointer_type(element))
    arrived_o_ptr = tl.multiple_of(arrived_o_ptr, 16)
    arrived_lse_ptr = tl.load(lse_table_ptr + rank).to(tl.pointer_type(tl.float32))
    peer_flags, own_flags = load_flag_ptrs(flag_table_ptr, lane, rank, N, WORDS)
    # one number for all programs and ranks; surplus steps are masked
    steps = tl.cdiv(tl.cdiv(tl.cdiv(num_rows, ROWS), grid), SLICES)

    # all pushes first (rule 5)
    for s in tl.static_range(SLICES):
        jitter(2 * s, rank, epoch, JITTER_US, INTERPRETED)
        for i in range(s * steps, (s + 1) * steps):
            push_rows(
                o_ptr,
                lse_ptr,
                o_table_ptr,
                lse_table_ptr,
                lane + i * grid,
                half,
                rank,
                num_rows,
                row_capacity,
                stride_ob,
                stride_oh,
                stride_lb,
                stride_lh,
                HL,
                N,
                PEERS,
                D,
                ALIGN,
                ROW_ALIGN,
                ROWS,
                BLOCK_D,
            )
        jitter(2 * s + 1, rank, epoch, JITTER_US, INTERPRETED)
        signal_peers(peer_flags + s * num_lanes * WORDS, rank, epoch, N)

    advance(
        cnt_ptr, peer_flags, rank, epoch, num_lanes, N, WORDS, FLAG_SLICES, REFRESH, BLOCK_LANES
    )
    # the own part of a step is loaded ahead of it, behind the wait or behind the step before
    own_o, own_lse = load_own(
        o_ptr,
        lse_ptr,
        lane,
        rank,
        num_rows,
        stride_ob,
        stride_oh,
        stride_lb,
        stride_lh,
        HL,
        D,
        ALIGN,
        ROWS,
        BLOCK_D,
    )
    for s in tl.static_range(SLICES):
        wait_for_peers(
            own_flags + s * num_lanes * WORDS,
            rank,
            epoch,
            limit_ptr,
            report_ptr,
            lane,
            N,
            INTERPRETED,
        )
        jitter(11 + s, rank, epoch, JITTER_US, INTERPRETED)
        for i in range(s * steps, (s + 1) * steps):
            merge_rows(
                own_o,
                own_lse,
                lens_ptr,
                merged_ptr,
                merged_lse_ptr,
                arrived_o_ptr,
                arrived_lse_ptr,
                lane + i * grid,
                half,
                rank,
                num_rows,
                row_capacity,
                stride_cn,
                HL,
                N,
                D,
                BASE_2,
                STORE_LSE,
                ROW_ALIGN,
                ROWS,
                BLOCK_D,
            )
            own_o, own_lse = load_own(
                o_ptr,
                lse_ptr,
                lane + (i + 1) * grid,
                rank,
                num_rows,
                stride_ob,
                stride_oh,
                stride_lb,
                stride_lh,
                HL,
                D,
                ALIGN,
                ROWS,
                BLOCK_D,
            )


def check_exchange(
    o: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    local_lens: torch.Tensor,
    merged: torch.Tensor,
    merged_lse: torch.Tensor | None,
    num_ranks: int,
) -> None:
    """Shape and dtype invariants of an exchange over num_ranks ranks (host metadata only)."""
    num_tokens, num_heads, dim = o.shape
    assert lse_base in ("e", "2"), f"lse_base {lse_base!r} is neither 'e' nor '2'"
    assert lse.shape == o.shape[:2], f"lse {lse.shape} does not fit o {o.shape}"
    assert local_lens.shape == (num_ranks, num_tokens), f"lens {local_lens.shape}, o {o.shape}"
    assert lse.dtype == torch.float32, lse.dtype
    assert local_lens.stride(1) == 1, local_lens.stride()
    assert o.stride(2) == 1, o.stride()
    assert merged.shape == (num_tokens, num_heads // num_ranks, dim), tuple(merged.shape)
    assert merged.is_contiguous(), merged.stride()
    assert merged.dtype == o.dtype, (merged.dtype, o.dtype)
    if merged_lse is not None:
        assert merged_lse.shape == merged.shape[:2], tuple(merged_lse.shape)
        assert merged_lse.dtype == torch.float32, merged_lse.dtype
        assert merged_lse.is_contiguous(), merged_lse.stride()


def nvlink_exchange(
    o: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    local_lens: torch.Tensor,
    merged: torch.Tensor,
    o_table: torch.Tensor,
    lse_table: torch.Tensor,
    row_capacity: int,
    state: PeerState,
    tiling: Tiling,
    merged_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send heads home and merge them there, in one launch that waits for all peers.

    Args:
        o: [B, H, D] bfloat16, float16 or float32, this stripe's output for all heads; last dim
            contiguous, other strides free.
        lse: [B, H] float32 in base lse_base, any strides.
        lse_base: "e" or "2".
        local_lens: [N, B] int32, unclamped local lengths of every rank, rows may be strided. Where
            0, that rank's o and lse are ignored whatever they hold.
        merged: [B, Hl, D] of o's dtype, contiguous, written; 0 where every stripe is empty.
        o_table: int64 [N], address of each rank's o region, multiples of 16.
        lse_table: int64 [N], address of each rank's lse region.
        row_capacity: M, rows of the regions, at least B*Hl and at least 4, a multiple of 4.
        state: flags and counters of this kernel; always with the same tables.
        tiling: the same on all ranks.
        merged_lse: [B, Hl] float32, contiguous, written if given: LSE over all stripes in base
            lse_base, -inf where every stripe is empty.

    Returns:
        merged. All ranks must launch with the same B, and B must not be 0.
    """
    num_tokens, num_heads, dim = o.shape
    num_ranks = state.num_ranks
    local_heads = num_heads // num_ranks
    check_exchange(o, lse, lse_base, local_lens, merged, merged_lse, num_ranks)
    check_launch(state, tiling)
    num_rows = num_tokens * local_heads
    assert 0 < num_rows <= row_capacity, (num_rows, row_capacity)
    assert 1 <= tiling.slices <= MAX_SLICES, tiling

    def plan() -> Plan:
        return Plan(
            (tiling.grid,),
            o_table,
            lse_table,
            *state.arguments,
            num_rows,
            row_capacity,
            state.num_lanes,
            *o.stride()[:2],
            *lse.stride(),
            local_lens.stride(0),
            HL=local_heads,
            PEERS=next_power_of_2(num_ranks - 1),
            D=dim,
            BASE_2=lse_base == "2",
            STORE_LSE=merged_lse is not None,
            ALIGN=common_alignment(o.element_size(), *o.stride()[:2]),
            ROW_ALIGN=common_alignment(o.element_size(), dim),
            ROWS=tiling.block,
            BLOCK_D=next_power_of_2(dim),
            SLICES=tiling.slices,
            FLAG_SLICES=MAX_SLICES,
            WORDS=FLAG_WORDS,
            REFRESH=state.refresh_epochs,
            # The same roundings in every kernel that merges: contracted or not, a*b + c differs.
            enable_fp_fusion=False,
            **meeting(state, tiling),
        )

    state.launches(
        nvlink_exchange_kernel,
        (o, lse, local_lens, merged, merged if merged_lse is None else merged_lse),
        (lse_base, merged_lse is None, row_capacity, tiling),
        plan,
    )
    return merged
