"""Decode metadata of one rank's stripe, built on the device from global lengths.

Legend: B requests, c = dcp_size, r = dcp_rank, P = physical page size, R x S = req_to_token.
All launchers write in place into static buffers and have grids that depend on shapes only, so
they serve CUDA-graph capture and replay alike.

An attention kernel must never see an empty request: lengths are clamped to 1 and the spare entry
points at row 0, which exists on every rank. What comes out for such a row is garbage that the
merge drops, by the unclamped lengths of `fill_local_lens`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_dcp.kernels.dispatch import cdiv, num_splits, use_triton
from sglang_dcp.kernels.launch import Launches, Plan
from sglang_dcp.layout import all_local_lens

BLOCK_REQUESTS = 128
BLOCK_ENTRIES = 512


@triton.jit(do_not_specialize=["num_requests", "dcp_rank", "stride_all"])
def fill_local_lens_kernel(
    seq_lens_ptr,
    all_ptr,
    kernel_lens_ptr,
    num_requests,
    dcp_rank,
    stride_all,
    DCP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = b < num_requests
    seq_len = tl.load(seq_lens_ptr + b, mask=mask, other=0)
    for rank in tl.static_range(DCP_SIZE):
        local = (seq_len + (DCP_SIZE - 1 - rank)) // DCP_SIZE
        tl.store(all_ptr + rank * stride_all + b, local.to(tl.int32), mask=mask)
    own = (seq_len + (DCP_SIZE - 1 - dcp_rank)) // DCP_SIZE
    tl.store(kernel_lens_ptr + b, tl.maximum(own, 1).to(tl.int32), mask=mask)


_lens_launches = Launches()


def fill_local_lens(
    seq_lens: torch.Tensor,
    local_lens_all: torch.Tensor,
    kernel_lens: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Local lengths of all ranks, and this rank's lengths as its attention kernel gets them.

    Args:
        seq_lens: [B] int32 or int64, global lengths in tokens.
        local_lens_all: [c, B] int32, written: true local lengths, 0 where a rank owns nothing.
            Rows may be strided (a slice of a wider static buffer).
        kernel_lens: [B] int32, written: max(own local length, 1).
        dcp_rank: r of this rank.
        dcp_size: c.
    """
    num_requests = seq_lens.shape[0]
    assert local_lens_all.shape == (dcp_size, num_requests), local_lens_all.shape
    assert kernel_lens.shape == (num_requests,), kernel_lens.shape
    assert local_lens_all.stride(1) == kernel_lens.stride(0) == seq_lens.stride(0) == 1
    if num_requests == 0:
        return
    if not use_triton(seq_lens):
        fill_local_lens_ref(seq_lens, local_lens_all, kernel_lens, dcp_rank, dcp_size)
        return

    def plan() -> Plan:
        return Plan(
            (cdiv(num_requests, BLOCK_REQUESTS),),
            num_requests,
            dcp_rank,
            local_lens_all.stride(0),
            DCP_SIZE=dcp_size,
            BLOCK=BLOCK_REQUESTS,
        )

    _lens_launches(
        fill_local_lens_kernel, (seq_lens, local_lens_all, kernel_lens), (dcp_rank, dcp_size), plan
    )


def fill_local_lens_ref(
    seq_lens: torch.Tensor,
    local_lens_all: torch.Tensor,
    kernel_lens: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Torch reference of `fill_local_lens`."""
    local_lens_all.copy_(all_local_lens(seq_lens, dcp_size))
    kernel_lens.copy_(local_lens_all[dcp_rank].clamp(min=1))


@triton.jit(do_not_specialize=["dcp_rank"])
def build_local_kv_indices_kernel(
    req_to_token_ptr,
    req_pool_indices_ptr,
    seq_lens_ptr,
    kv_indptr_ptr,
    kv_indices_ptr,
    dcp_rank,
    stride_req,
    DCP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0)
    req = tl.load(req_pool_indices_ptr + b).to(tl.int64)
    local = (tl.load(seq_lens_ptr + b) + (DCP_SIZE - 1 - dcp_rank)) // DCP_SIZE
    out_ptr = kv_indices_ptr + tl.load(kv_indptr_ptr + b).to(tl.int64)
    table_ptr = req_to_token_ptr + req * stride_req + dcp_rank
    num_entries = tl.maximum(local, 1)
    for base in range(tl.program_id(1) * BLOCK, num_entries, tl.num_programs(1) * BLOCK):
        j = base + tl.arange(0, BLOCK)
        slot = tl.load(table_ptr + j * DCP_SIZE, mask=j < local, other=0)
        tl.store(out_ptr + j, slot // DCP_SIZE, mask=j < num_entries)


_indices_launches = Launches()


def build_local_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Physical rows of this rank's tokens, request after request (FlashInfer, page size 1).

    Entry j of request b is req_to_token[req_pool_indices[b], r + j*c] // c, for
    j < max(local length, 1); a request of which the rank owns nothing gets the single entry 0.

    Args:
        req_to_token: [R, S] int32, virtual slots by position; last dim contiguous.
        req_pool_indices: [B] int32 or int64, row of each request.
        seq_lens: [B] int32 or int64, GLOBAL lengths in tokens.
        kv_indptr: [B+1] int32, cumulative sum of `kernel_lens` of `fill_local_lens`, from 0.
        kv_indices: [>= kv_indptr[B]] int32, written up to there and left alone beyond.
        dcp_rank: r of this rank.
        dcp_size: c.
    """
    num_requests = seq_lens.shape[0]
    assert req_pool_indices.shape == (num_requests,), req_pool_indices.shape
    assert kv_indptr.shape[0] >= num_requests + 1, kv_indptr.shape
    assert req_to_token.stride(1) == 1, req_to_token.stride()
    if num_requests == 0:
        return
    if not use_triton(req_to_token):
        build_local_kv_indices_ref(
            req_to_token, req_pool_indices, seq_lens, kv_indptr, kv_indices, dcp_rank, dcp_size
        )
        return

    def plan() -> Plan:
        splits = num_splits(cdiv(req_to_token.shape[1], dcp_size), BLOCK_ENTRIES)
        return Plan(
            (num_requests, splits),
            dcp_rank,
            req_to_token.stride(0),
            DCP_SIZE=dcp_size,
            BLOCK=BLOCK_ENTRIES,
        )

    _indices_launches(
        build_local_kv_indices_kernel,
        (req_to_token, req_pool_indices, seq_lens, kv_indptr, kv_indices),
        (dcp_rank, dcp_size),
        plan,
    )


def build_local_kv_indices_ref(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    dcp_rank: int,
    dcp_size: int,
) -> None:
    """Torch reference of `build_local_kv_indices`; reads the lengths on the host."""
    starts = kv_indptr.tolist()
    for b, (req, seq_len) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        rows = req_to_token[req, dcp_rank:seq_len:dcp_size] // dcp_size
        rows = rows if len(rows) else rows.new_zeros(1)
        kv_indices[starts[b] : starts[b] + len(rows)] = rows


@triton.jit(do_not_specialize=["width", "stride_table"])
def build_block_table_kernel(
    req_to_token_ptr,
    req_pool_indices_ptr,
    seq_lens_ptr,
    table_ptr,
    width,
    stride_req,
    stride_table,
    WIDE_PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    req = tl.load(req_pool_indices_ptr + b).to(tl.int64)
    num_pages = (tl.load(seq_lens_ptr + b) + WIDE_PAGE - 1) // WIDE_PAGE
    num_pages = tl.minimum(num_pages, width)
    src_ptr = req_to_token_ptr + req * stride_req
    for base in range(tl.program_id(1) * BLOCK, num_pages, tl.num_programs(1) * BLOCK):
        j = base + tl.arange(0, BLOCK)
        slot = tl.load(src_ptr + j * WIDE_PAGE, mask=j < num_pages, other=0)
        tl.store(table_ptr + b * stride_table + j, slot // WIDE_PAGE, mask=j < num_pages)


_table_launches = Launches()


def build_block_table(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    dcp_size: int,
) -> None:
    """Physical page table of each request, the same on every rank (FlashMLA, paged kernels).

    Entry j of request b is req_to_token[req, j*P*c] // (P*c) for j < ceil(length / (P*c)).
    Entries beyond are left as they are: attention kernels stop at the (local) length. The first
    page of a rank that owns nothing is valid too where the global length is at least 1; the row of
    a request of length 0 (a prefix that is not there) is left alone.

    Args:
        req_to_token: [R, S] int32, virtual slots by position; last dim contiguous.
        req_pool_indices: [B] int32 or int64, row of each request.
        seq_lens: [B] int32 or int64, GLOBAL lengths in tokens.
        block_table: [B, W] int32, written; last dim contiguous, W at least the longest entry.
        page_size: P, rows of a physical page.
        dcp_size: c.
    """
    num_requests, width = block_table.shape
    assert req_pool_indices.shape == seq_lens.shape == (num_requests,), seq_lens.shape
    assert req_to_token.stride(1) == block_table.stride(1) == 1
    if num_requests == 0:
        return
    if not use_triton(req_to_token):
        build_block_table_ref(
            req_to_token, req_pool_indices, seq_lens, block_table, page_size, dcp_size
        )
        return

    def plan() -> Plan:
        return Plan(
            (num_requests, num_splits(width, BLOCK_ENTRIES)),
            width,
            req_to_token.stride(0),
            block_table.stride(0),
            WIDE_PAGE=page_size * dcp_size,
            BLOCK=BLOCK_ENTRIES,
        )

    _table_launches(
        build_block_table_kernel,
        (req_to_token, req_pool_indices, seq_lens, block_table),
        (page_size, dcp_size),
        plan,
    )


def build_block_table_ref(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    page_size: int,
    dcp_size: int,
) -> None:
    """Torch reference of `build_block_table`; reads the lengths on the host."""
    wide_page = page_size * dcp_size
    for b, (req, seq_len) in enumerate(
        zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
    ):
        pages = req_to_token[req, :seq_len:wide_page] // wide_page
        block_table[b, : len(pages)] = pages[: block_table.shape[1]]
