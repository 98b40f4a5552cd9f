"""Ranks of the `nvlink` communicator in plain tensors, without a rendezvous."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

from sglang_dcp.comm.nvlink import LineBytes, NvlinkCommunicator
from sglang_dcp.comm.symmetric import virtual_rank
from sglang_dcp.kernels.exchange_lines import LINE_BYTES
from sglang_dcp.kernels.lse_merge import merge_partials
from sglang_dcp.kernels.nvlink_exchange import MAX_SLICES
from sglang_dcp.kernels.peer_signal import FLAG_WORDS, PeerState


@dataclasses.dataclass
class NoTransport:
    """A transport for batches that never leave peer memory."""

    rank: int
    size: int
    process_group = None


def make_ranks(size, device, max_programs, **dims) -> list[NvlinkCommunicator]:
    """All ranks of a group on one device, in one process."""
    buffers: list[torch.Tensor] = []

    def allocate(rank, num_bytes):
        if not buffers:
            buffers.extend(
                torch.zeros(num_bytes, dtype=torch.uint8, device=device) for _ in range(size)
            )
        return virtual_rank(buffers, rank, num_sms=max_programs)

    comms = []
    for rank in range(size):
        comm = NvlinkCommunicator(
            NoTransport(rank, size),
            allocate=functools.partial(allocate, rank),
            device=device,
            **dims,
        )
        comm.max_programs = max_programs
        comms.append(comm)
    return comms


KERNELS = "exchange", "gather"


def uses_lines(comm: NvlinkCommunicator, name: str) -> bool:
    """Whether all of its exchanges, or gathers, go by lines; otherwise none may."""
    num_tokens = {"exchange": comm.line_tokens, "gather": comm.line_gather_tokens}[name]
    assert num_tokens in (0, comm.max_tokens)
    return num_tokens > 0


def states(comm: NvlinkCommunicator) -> tuple[PeerState, PeerState]:
    """Of the exchange and the gather in use."""
    exchange = comm._line_state if uses_lines(comm, "exchange") else comm._exchange_state
    gather = comm._line_gather_state if uses_lines(comm, "gather") else comm._gather_state
    return exchange, gather


def max_line_bytes(lines: bool) -> LineBytes:
    """For exchanges and gathers that all go by lines, or none."""
    return LineBytes(*(1 << 40 if lines else 0,) * 2)


def flags(comm: NvlinkCommunicator, name: str) -> torch.Tensor:
    """int32 [slices * lanes, FLAG_WORDS]: the flags that this rank waits for, none of lines."""
    start = comm._offsets[f"{name}_flags"]
    words = states(comm)[0].num_lanes * FLAG_WORDS * (MAX_SLICES if name == "exchange" else 1)
    return comm._symmetric.local[start:].view(torch.int32)[:words].view(-1, FLAG_WORDS)


def line_words(comm: NvlinkCommunicator, name: str, epoch: int) -> torch.Tensor:
    """int32 [N-1 slots, lines, 32]: the half that launch `epoch` of that line kernel reads."""
    exchange_lines = comm.line_tokens * comm.local_heads * comm._row_lines
    slots, lines = comm.dcp_size - 1, exchange_lines if name == "exchange" else comm._gather_lines
    start, size = comm._offsets[f"{name}_lines"], 2 * slots * lines * LINE_BYTES
    region = comm._symmetric.local[start : start + size].view(torch.int32)
    return region.view(2, slots, lines, LINE_BYTES // 4)[epoch & 1]


def start_at(comm: NvlinkCommunicator, epoch: int, flag_epoch: int | None = None) -> None:
    """As after launch `epoch`; with a later flag_epoch the next launch does not wait.

    Nor does any until flag_epoch, unless it moves lines.
    """
    for state in states(comm):
        state.counters.fill_(wrap(epoch))
    raised = wrap(epoch if flag_epoch is None else flag_epoch)
    for name in KERNELS:
        if not uses_lines(comm, name):
            flags(comm, name).fill_(raised)
        elif flag_epoch is not None:
            line_words(comm, name, epoch + 1)[..., -1] = wrap(epoch + 1)
        else:
            for half in (0, 1):
                line_words(comm, name, half)[..., -1] = raised


def raise_flags(comm: NvlinkCommunicator, name: str, sources: list[int], epoch: int) -> None:
    """As if these ranks had raised their flags in launch `epoch`."""
    if uses_lines(comm, name):
        slots = [(s - comm.rank - 1) % comm.dcp_size for s in sources]
        line_words(comm, name, epoch)[slots, :, -1] = wrap(epoch)
    else:
        flags(comm, name)[:, sources] = wrap(epoch)


def wrap(epoch: int) -> int:
    """To int32, as the counters wrap."""
    return (epoch + 2**31) % 2**32 - 2**31


def half_views(comm: NvlinkCommunicator, epoch: int) -> list[torch.Tensor]:
    """Bytes of the halves that launch `epoch` writes and reads: lines of both kernels, o, lse."""
    names = [name for name in KERNELS if uses_lines(comm, name)]
    parts = [line_words(comm, name, epoch).view(torch.uint8) for name in names]
    if "exchange" in names:
        return parts
    rows = (comm.dcp_size - 1) * comm._row_capacity
    for name, row_bytes in (("o", comm.kv_lora_rank * comm.dtype.itemsize), ("lse", 4)):
        start, size = comm._offsets[name], rows * row_bytes
        region = comm._symmetric.local[start : start + 2 * size]
        parts.append(region.view(2, size)[epoch & 1])
    return parts


def poison(comm: NvlinkCommunicator, epoch: int) -> None:
    """Fill these halves with NaN: a later launch that reads it must have received everything anew.

    A rank may do so on its stream right after launch `epoch`: peers write there again in launch
    epoch + 2 only, which they start after they saw this rank in launch epoch + 1.
    """
    for part in half_views(comm, epoch):
        part.fill_(255)  # NaN in every format, and epoch -1 to a line


def own_merge(
    rank: int,
    o: torch.Tensor,
    lse: torch.Tensor,
    lens: torch.Tensor,
    lse_base: str,
    merged_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `a2a` computes for a rank's heads from all ranks' partials o [N, B, H, D]."""
    local = o.shape[2] // o.shape[0]
    heads = slice(rank * local, (rank + 1) * local)
    own_lse = lse[:, :, heads].contiguous()
    return merge_partials(o[:, :, heads], own_lse, lens, lse_base, merged_lse=merged_lse)


def random_partials(
    size: int, num_tokens: int, num_heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """o [N, B, H, D], lse [N, B, H], lens [N, B]: empty stripes hold garbage, NaN among it.

    Each rank's o is heads-first storage, as some attention kernels return it.
    """
    o = torch.randn(size, num_heads, num_tokens, dim, device=device, dtype=torch.float32)
    o = o.to(dtype).transpose(1, 2)
    lse = torch.randn(size, num_tokens, num_heads, device=device) * 4
    lens = torch.randint(0, 3, (size, num_tokens), dtype=torch.int32, device=device)
    lens[:, 0] = 0  # empty on all ranks
    if num_tokens > 1:
        lens[:, 1] = 5
    empty = lens == 0
    odd = torch.arange(size, device=device)[:, None] % 2 == 1
    o.masked_fill_((empty & odd)[..., None, None], float("nan"))
    lse.masked_fill_((empty & odd)[..., None], float("inf"))
    return o, lse, lens


def random_queries(
    size: int, num_tokens: int, local_heads: int, dim: int, rope: int, dtype: torch.dtype, device
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """Per rank q_nope (a heads-first view) and q_pe (a slice), and q_all [B, H, D+R]."""
    nope = [
        torch.randn(local_heads, num_tokens, dim, device=device).to(dtype).transpose(0, 1)
        for _ in range(size)
    ]
    pe = [
        torch.randn(num_tokens, local_heads, dim + rope, device=device).to(dtype)[..., dim:]
        for _ in range(size)
    ]
    return nope, pe, torch.cat([torch.cat(pair, -1) for pair in zip(nope, pe, strict=True)], 1)


def batches(max_tokens: int, count: int) -> Sequence[int]:
    """Batch sizes that alternate between small and large ones."""
    sizes = [1, max_tokens, 2, max_tokens - 1, max_tokens, 1, 3]
    return [min(sizes[i % len(sizes)], max_tokens) for i in range(count)]
