"""What the exchange does to a few rows: push them, load the own ones, merge them.

Legend and layout of the buffers: `nvlink_exchange`. Device code only; the pointers are into this
rank's tensors and tables, `arrived_*` into its own symmetric buffer. LSEs are in either base.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dcp.kernels.lse_merge import add_step, finish, finish_lse, max_step, weight


@triton.jit
def push_rows(
    o_ptr,
    lse_ptr,
    o_table_ptr,
    lse_table_ptr,
    item,
    half,
    rank,
    num_rows,
    row_capacity,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    HL: tl.constexpr,
    N: tl.constexpr,
    PEERS: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store ROWS rows of every peer's heads into the peers' buffers: one load, one store."""
    k = tl.arange(0, PEERS * ROWS)
    step = k // ROWS  # to the next rank, and so on, so that not everyone queues for rank 0 first
    row = item * ROWS + k % ROWS
    valid = (row < num_rows) & (step < N - 1)
    owner = (rank + 1 + step) % N
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = valid[:, None] & (d < D)

    # all loads before the first store: the compiler cannot move them up
    o_base = tl.load(o_table_ptr + owner).to(tl.pointer_type(o_ptr.dtype.element_ty))
    o_base = tl.multiple_of(o_base, [16])
    lse_base = tl.load(lse_table_ptr + owner).to(tl.pointer_type(tl.float32))
    b, h = (row // HL).to(tl.int64), owner * HL + row % HL
    src = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    o = tl.load(o_ptr + src[:, None] + d, mask=mask)
    lse = tl.load(lse_ptr + b * stride_lb + h * stride_lh, mask=valid)
    # (rank - owner - 1) mod N
    dst = (half * (N - 1) + N - 2 - step).to(tl.int64) * row_capacity + row
    offs = tl.multiple_of(dst * D, [ROW_ALIGN])
    tl.store((o_base + offs)[:, None] + d, o, mask=mask)
    tl.store(lse_base + dst, lse, mask=valid)


@triton.jit
def load_own(
    o_ptr,
    lse_ptr,
    item,
    rank,
    num_rows,
    stride_ob,
    stride_oh,
    stride_lb,
    stride_lh,
    HL: tl.constexpr,
    D: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The own partial of ROWS own rows: o [ROWS, BLOCK_D], lse [ROWS]."""
    row = item * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    d = tl.arange(0, BLOCK_D)[None, :]
    b, h = (row // HL).to(tl.int64), rank * HL + row % HL
    src = tl.multiple_of(b * stride_ob + h.to(tl.int64) * stride_oh, [ALIGN])
    o = tl.load(o_ptr + src[:, None] + d, mask=in_rows[:, None] & (d < D), other=0.0)
    lse = tl.load(lse_ptr + b * stride_lb + h * stride_lh, mask=in_rows, other=0.0)
    return o, lse


@triton.jit
def _load_lse(lens_ptr, lse_ptrs, own_lse, n, rank, in_rows):
    """Stripe n of some rows: (owned, lse), lse from registers if the stripe is this rank's."""
    owned = tl.load(lens_ptr, mask=in_rows, other=0) > 0
    arrived = tl.load(lse_ptrs, mask=in_rows & (n != rank), other=0.0, cache_modifier=".cg")
    return owned, tl.where(n == rank, own_lse, arrived)


@triton.jit
def merge_rows(
    own_o,
    own_lse,
    lens_ptr,
    merged_ptr,
    merged_lse_ptr,
    arrived_o_ptr,
    arrived_lse_ptr,
    item,
    half,
    rank,
    num_rows,
    row_capacity,
    stride_cn,
    HL: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    BASE_2: tl.constexpr,
    STORE_LSE: tl.constexpr,
    ROW_ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Two-pass merge of ROWS own rows over ranks 0..N-1, as in `merge_partials_kernel`."""
    row = item * ROWS + tl.arange(0, ROWS)
    in_rows = row < num_rows
    d = tl.arange(0, BLOCK_D)[None, :]
    mask = in_rows[:, None] & (d < D)
    len_ptrs = lens_ptr + (row // HL).to(tl.int64)
    first_row = (half * (N - 1)).to(tl.int64) * row_capacity + row

    m = tl.full([ROWS], float("-inf"), tl.float32)
    for n in tl.static_range(N):
        rows = first_row + ((n - rank - 1 + N) % N).to(tl.int64) * row_capacity
        lse_ptrs = arrived_lse_ptr + rows
        owned, lse = _load_lse(len_ptrs + n * stride_cn, lse_ptrs, own_lse, n, rank, in_rows)
        m = max_step(m, lse, owned)

    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for n in tl.static_range(N):
        rows = first_row + ((n - rank - 1 + N) % N).to(tl.int64) * row_capacity
        lse_ptrs = arrived_lse_ptr + rows
        owned, lse = _load_lse(len_ptrs + n * stride_cn, lse_ptrs, own_lse, n, rank, in_rows)
        o_ptrs = arrived_o_ptr + tl.multiple_of(rows * D, [ROW_ALIGN])[:, None] + d
        arrived = tl.load(o_ptrs, mask=mask & (n != rank), other=0.0, cache_modifier=".cg")
        w = weight(lse, m, owned, BASE_2)
        acc = add_step(acc, tl.where(n == rank, own_o, arrived), w, owned[:, None])
        total += w

    merged = finish(acc, total).to(merged_ptr.dtype.element_ty)
    offs = tl.multiple_of(row.to(tl.int64) * D, [ROW_ALIGN])
    tl.store(merged_ptr + offs[:, None] + d, merged, mask=mask)
    if STORE_LSE:
        tl.store(merged_lse_ptr + row, finish_lse(m, total, BASE_2), mask=in_rows)
