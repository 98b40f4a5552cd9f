"""Exchange and merge in one kernel whose data carry their own flags (stages 6 and 7).

Legend: N = dcp_size ranks, B tokens, H heads of the group, Hl = H/N heads of one rank, D head dim,
T lines of one step of a program.

`nvlink_exchange` stores data, waits until the peer's memory has acknowledged all of them (the
fence), and stores a flag: two trips over the link in a row. Here each line of 128 bytes holds its
flag, and one trip is left. The idea is that of NCCL's LL128 protocol.

A row (token b, own head h) is b*Hl + h, as there; it takes L = ceil(D / 60) lines (9 for D = 512,
16-bit elements; half as many elements to a line for float32):

    words 0..27   56 elements of the row, line l from column 56*l on: chunks of 16 bytes
    words 28, 29  4 elements of what remains of the row, line l from column 56*L + 4*l on
    word 30       the float32 LSE of the row, the same in all its lines, which are merged on their
                  own: no program waits for a line that it does not merge
    word 31       the epoch

    lines         [2 halves][N-1 slots][M*L][128 bytes]     slots and M as in `nvlink_exchange`

A program moves T lines at a time for all owners at once: lines lane*T, (lane + grid)*T, ... of
every owner, and merges exactly those of its own rows.

    epoch = cnt[lane] + 1
    push: one store instruction a line, to the peers' half (epoch & 1)
    cnt[lane], cnt[lane + grid], ... = epoch
    read lines of the own half (epoch & 1) until word 31 of all of them is epoch; merge these

No fence, no other flag. Of the rules of `peer_signal`, 1, 2, 4 and 5 hold here, too. Rule 3 is:
    3'. Every rank pushes at least one line to every peer in every launch (B > 0), and no launch
        ends before it has seen all lines that its peers push to it in the same launch.
And two are new:
    6. A line is written as a unit: by one instruction of one warp, eight neighbouring threads
       with 16 bytes each, to 128 aligned bytes. L2 and NVLink move that as one write.
    7. A line is read as a unit: flag and data in one such instruction, past the L1.

Rules 6 and 7 are properties of the hardware, not of its documented memory model. NCCL relies on
the same two for LL128, on NVLink since Volta. The layout that they need is a matter of the
compiler; tests/test_kernels_compile.py asserts it.

What is merged was sent in this launch. By (6) and (7) a line that was read with this epoch in word
31 was read with the data that were stored with it. Flags are compared for equality, since the slot
of a line never holds a later epoch: rank A writes half k & 1 of rank B again in launch k+2, which
begins after A's launch k+1 ended (4), which had seen lines of B's launch k+1 (3'), which B pushed
after its launch k had ended (4). What the slot holds before is from launch k-2 or, as small batches
use few lines, from any older launch of this parity, or the zeros of the allocation, which stand for
launch 0. Such a line looks new only if the launch that needs it comes exactly 2^32 launches after
it was written: weeks of serving in which no batch of that size occurs, until then, to the launch.
So unused lines need no refresh as the flags of unused lanes do, which look raised for 2^31 epochs.

No line is overwritten before it was read: the same argument. B reads half k & 1 in launch k only
and before that launch ends; A writes there in launch k+2. Nor can an older store overtake: all of
A's stores of launch k had been seen by B before A's launch k+2 began (3').

A peer may be one launch ahead; its lines are in the other half then.

Exchanges by flags in between change nothing: epochs count the launches of this kernel, its region
is its own, and all ranks take the same kernel for the same batch (1).

Nobody waits for ever, as in `peer_signal`: a wait ends after the limit, with the same record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, common_alignment, next_power_of_2
from sglang_dcp.kernels.exchange_lines import (
    LINE_BYTES,
    lines_per_row,
    load_lines,
    load_owned,
    merge_lines,
    push_lines,
    receive_lines,
)
from sglang_dcp.kernels.launch import Plan
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.kernels.nvlink_exchange import check_exchange
from sglang_dcp.kernels.peer_signal import (
    PeerState,
    Tiling,
    advance_counters,
    check_launch,
    jitter,
    meeting,
)


@triton.jit(
    do_not_specialize=[
        "rank",
        "num_rows",
        "row_capacity",
        "num_lanes",
        "steps",
        "stride_ob",
        "stride_oh",
        "stride_lb",
        "stride_lh",
        "stride_cn",
    ]
)
def line_exchange_kernel(
    o_ptr,
    lse_ptr,
    lens_ptr,
    merged_ptr,
    merged_lse_ptr,
    line_table_ptr,
    cnt_ptr,
    limit_ptr,
    report_ptr,
    rank,
    num_rows,
    row_capacity,
    num_lanes,
    steps,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    stride_cn,
    HL: tl.constexpr,
    N: tl.constexpr,
    PEERS: tl.constexpr,
    D: tl.constexpr,
    ROW_LINES: tl.constexpr,
    CELLS: tl.constexpr,
    BASE_2: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    JITTER_US: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    lane = tl.program_id(0)
    grid = tl.num_programs(0)
    cell_type: tl.constexpr = tl.uint16 if CELLS == 64 else tl.uint32
    cells_ptr = o_ptr.to(tl.pointer_type(cell_type), bitcast=True)
    source = (cells_ptr, lse_ptr, stride_ob, stride_oh, stride_lb, stride_lh)
    num_lines = num_rows * ROW_LINES
    slot_lines = row_capacity * ROW_LINES

    # to the next rank, and so on, so that not everyone queues for rank 0 first
    k = tl.arange(0, PEERS * BLOCK)
    step = k // BLOCK
    owner = (rank + 1 + step) % N
    line = lane * BLOCK + k % BLOCK
    valid = (line < num_lines) & (step < N - 1)
    # all loads of the first step before anything waits for one, the epoch's included
    lines = load_lines(source, line, valid, owner, HL, D, ROW_LINES, CELLS, ALIGN)
    peer_ptrs = tl.load(line_table_ptr + owner).to(tl.pointer_type(cell_type))
    peer_ptrs = tl.multiple_of(peer_ptrs, [16])
    arrived_ptr = tl.load(line_table_ptr + rank).to(tl.pointer_type(cell_type))
    arrived_ptr = tl.multiple_of(arrived_ptr, 16)
    epoch = tl.load(cnt_ptr + lane) + 1
    first_slot = (epoch & 1).to(tl.int64) * (N - 1)
    # (rank - owner - 1) mod N
    slot_at = (first_slot + N - 2 - step) * slot_lines

    jitter(0, rank, epoch, JITTER_US, INTERPRETED)
    # all pushes first (rule 5), each after the loads of the next one
    for i in range(steps):
        next_line = line + BLOCK * grid
        next_valid = (next_line < num_lines) & (step < N - 1)
        next_lines = load_lines(
            source, next_line, next_valid, owner, HL, D, ROW_LINES, CELLS, ALIGN
        )
        push_lines(lines, epoch, peer_ptrs, slot_at + line, valid)
        line, valid, lines = next_line, next_valid, next_lines
        jitter(i + 1, rank, epoch, JITTER_US, INTERPRETED)
    advance_counters(cnt_ptr, epoch, num_lanes, BLOCK_LANES)

    for i in range(steps):
        # what this rank has itself is loaded behind the wait
        own_line = (lane + i * grid) * BLOCK + tl.arange(0, BLOCK)
        own_valid = own_line < num_lines
        own = load_lines(source, own_line, own_valid, rank, HL, D, ROW_LINES, CELLS, ALIGN)
        owned = load_owned(lens_ptr, own_line // ROW_LINES // HL, own_valid, stride_cn, N)
        arrived = receive_lines(
            arrived_ptr,
            first_slot * slot_lines + own_line,
            own_valid,
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
        merge_lines(
            arrived,
            own,
            owned,
            merged_ptr,
            merged_lse_ptr,
            own_line,
            own_valid,
            rank,
            N,
            D,
            ROW_LINES,
            CELLS,
            BASE_2,
            STORE_LSE,
        )


def line_exchange(
    o: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    local_lens: torch.Tensor,
    merged: torch.Tensor,
    row_capacity: int,
    state: PeerState,
    tiling: Tiling,
    merged_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Send heads home and merge them there, in one launch that waits for all peers.

    Args:
        o, lse, lse_base, local_lens, merged, merged_lse: as for `nvlink_exchange`, the same bits.
        row_capacity: M, at least B*Hl.
        state: of this kernel; its flags are the addresses of each rank's lines, multiples of 128,
            zero before the first launch.
        tiling: the same on all ranks; block is in lines, one slice.

    Returns:
        merged. All ranks must launch with the same B, and B must not be 0.
    """
    num_tokens, num_heads, dim = o.shape
    num_ranks, item = state.num_ranks, o.element_size()
    local_heads = num_heads // num_ranks
    check_exchange(o, lse, lse_base, local_lens, merged, merged_lse, num_ranks)
    check_launch(state, tiling)
    num_rows, row_lines = num_tokens * local_heads, lines_per_row(dim, item)
    assert 0 < num_rows <= row_capacity, (num_rows, row_capacity)
    assert item in (2, 4), o.dtype
    assert tiling.slices == 1, tiling
    # each thread has 16 bytes of a line (rule 6), and they are nobody else's
    assert tiling.block * LINE_BYTES >= 16 * 32 * tiling.num_warps, tiling

    def plan() -> Plan:
        return Plan(
            (tiling.grid,),
            *state.arguments,
            num_rows,
            row_capacity,
            state.num_lanes,
            # one number for all programs and ranks; surplus steps are masked
            cdiv(num_rows * row_lines, tiling.block * tiling.grid),
            *o.stride()[:2],
            *lse.stride(),
            local_lens.stride(0),
            HL=local_heads,
            PEERS=next_power_of_2(num_ranks - 1),
            D=dim,
            ROW_LINES=row_lines,
            CELLS=LINE_BYTES // item,
            BASE_2=lse_base == "2",
            STORE_LSE=merged_lse is not None,
            ALIGN=common_alignment(item, *o.stride()[:2]),
            BLOCK=tiling.block,
            # The same roundings in every kernel that merges: contracted or not, a*b + c differs.
            enable_fp_fusion=False,
            **meeting(state, tiling),
        )

    state.launches(
        line_exchange_kernel,
        (o, lse, local_lens, merged, merged if merged_lse is None else merged_lse),
        (lse_base, merged_lse is None, row_capacity, tiling),
        plan,
    )
    return merged
