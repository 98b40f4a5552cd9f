"""Index arithmetic of the striped KV cache: who owns a token, in which row, and how many.

Legend: c = dcp_size, r = dcp_rank, P = physical page size (rows of one rank), p = token position
in a request, v = virtual slot (what SGLang's allocator hands out).

Rules, with the allocator working on widened pages of P*c virtual slots:

* owner: slot v belongs to rank v % c and lies in its physical row v // c;
* a widened page starts at a multiple of c, so v(p) % c == p % c for every position p of every
  request: rank r owns exactly the positions r, r+c, r+2c, ... and ownership needs no table;
* v // (P*c) == (v // c) // P: the virtual page id of a widened page IS the physical page id, the
  same number on every rank. A block table is therefore valid on all ranks as it stands; only the
  number of valid rows in its last page differs between ranks (`local_len`).

Everything takes non-negative integers or integer tensors. Tensors are never read on the host,
so all of it may run under CUDA-graph capture. Nothing here imports SGLang.
"""

from __future__ import annotations

from typing import TypeVar

import torch

IntOrTensor = TypeVar("IntOrTensor", int, torch.Tensor)


def owner(slot: IntOrTensor, dcp_size: int) -> IntOrTensor:
    """DCP rank that stores virtual slot `slot` (or position `slot`: both give the same rank)."""
    return slot % dcp_size


def physical_row(slot: IntOrTensor, dcp_size: int) -> IntOrTensor:
    """Row of the owner's pool that holds virtual slot `slot`; meaningless on other ranks."""
    return slot // dcp_size


def physical_page(slot: IntOrTensor, page_size: int, dcp_size: int) -> IntOrTensor:
    """Physical page (of `page_size` rows) of virtual slot `slot`, equal on every rank.

    It equals the virtual page id, slot // (page_size * dcp_size), so it may be taken from any
    slot of the widened page, whoever owns that slot.
    """
    return slot // (page_size * dcp_size)


def num_owned_below(end: IntOrTensor, dcp_rank: int, dcp_size: int) -> IntOrTensor:
    """Number of positions p in [0, end) with p % dcp_size == dcp_rank."""
    return (end + (dcp_size - 1 - dcp_rank)) // dcp_size


def local_len(
    length: IntOrTensor, dcp_rank: int, dcp_size: int, start: int | torch.Tensor = 0
) -> IntOrTensor:
    """Number of positions p in [start, start + length) that rank `dcp_rank` owns.

    With start 0 this is length // c + (r < length % c). Tensors keep their shape and dtype.
    """
    end = num_owned_below(start + length, dcp_rank, dcp_size)
    return end - num_owned_below(start, dcp_rank, dcp_size)


def first_owned(start: IntOrTensor, dcp_rank: int, dcp_size: int) -> IntOrTensor:
    """Smallest position p >= start with p % dcp_size == dcp_rank."""
    return start + (dcp_rank - start) % dcp_size


def all_local_lens(
    lens: torch.Tensor, dcp_size: int, start: torch.Tensor | None = None
) -> torch.Tensor:
    """Local lengths of every rank of the group.

    Args:
        lens: [B], int32 or int64, lengths of the requests (or of their chunks) in tokens.
        dcp_size: c.
        start: [B] first position of each chunk, or None for 0.

    Returns:
        [c, B] int32 on the device of lens; row r sums the positions that rank r owns.
    """
    ranks = torch.arange(dcp_size, device=lens.device, dtype=lens.dtype)[:, None]
    # same formula as num_owned_below, over all ranks at once
    shift = dcp_size - 1 - ranks
    if start is None:
        return ((lens + shift) // dcp_size).to(torch.int32)
    end = (start + lens + shift) // dcp_size
    return (end - (start + shift) // dcp_size).to(torch.int32)


def dcp_groups(world_size: int, attn_tp_size: int, dcp_size: int) -> list[list[int]]:
    """Ranks of every DCP group: consecutive chunks of dcp_size ranks in each attention-TP group.

    Attention-TP groups are consecutive runs of attn_tp_size ranks, so a chunk never crosses a
    data-parallel, context-parallel or pipeline boundary and its heads are contiguous:
    concatenating the heads of the chunk in rank order is head order.

    Raises:
        ValueError: a size is below 1, attn_tp_size does not divide world_size, or dcp_size does
            not divide attn_tp_size.
    """
    sizes = f"world_size {world_size}, attention-TP size {attn_tp_size}, DCP size {dcp_size}"
    if min(world_size, attn_tp_size, dcp_size) < 1:
        raise ValueError(f"{sizes}: every size must be at least 1. Use positive sizes.")
    if world_size % attn_tp_size:
        raise ValueError(
            f"{sizes}: attention-TP groups must tile the world, and {world_size} % {attn_tp_size}"
            f" = {world_size % attn_tp_size}. Choose tp_size and dp_size so that it divides."
        )
    if attn_tp_size % dcp_size:
        divisors = [n for n in range(1, attn_tp_size + 1) if attn_tp_size % n == 0]
        raise ValueError(
            f"--dcp-size {dcp_size} does not fit one attention-TP group: it has {attn_tp_size}"
            f" ranks (tp_size / attention dp_size), and {attn_tp_size} % {dcp_size} ="
            f" {attn_tp_size % dcp_size}. Use one of {divisors}, or raise the attention-TP size."
        )
    return [list(range(i, i + dcp_size)) for i in range(0, world_size, dcp_size)]
