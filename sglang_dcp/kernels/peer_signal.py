"""How kernels of different ranks meet in peer memory: one protocol for Q gather and exchange.

Legend: c = ranks, lane = index of a program in its grid, epoch = number of a launch.

Each rank owns one symmetric buffer that every peer can write. A launch pushes data into the peers'
buffers, raises flags there, and waits for the same flags in its own buffer:

    epoch = cnt[lane] + 1
    push: plain 16-byte stores into the peers' half (epoch & 1)
    barrier; release at system scope: flag[lane, own rank] = epoch at every peer
    cnt[lane], cnt[lane + grid], ... = epoch
    wait until flag[lane, r] - epoch >= 0 for all r, acquire at system scope; barrier
    read the own half (epoch & 1)

Rules, each of which the argument below needs:
    1. An epoch counts the launches of one kernel; it is equal on all ranks and in all programs of a
       launch. All ranks launch the same kernels with the same batch and grid, in the same order.
    2. The address of a datum depends on (epoch & 1, source, token, head) only. Its strides come
       from the largest batch, never from grid, tile or batch of the launch.
    3. Every rank raises its flags at every peer in every launch, whatever it has to say.
    4. All launches of a rank are on one stream, without programmatic dependent launch, and never
       two at a time on one GPU.
    5. A program pushes everything before it waits for anything, and the grid is resident as a
       whole (`resident_programs`).

No datum is overwritten before it was read. Rank A in launch k writes half k & 1 of rank B, which B
last read in launch k-2. A's launch k begins after A's launch k-1 ended (4), which had seen flags of
B's launch k-1 (3), which B raised after its launch k-2 had ended (4). Between launches k and k-1
themselves the halves differ (2). With addresses that move with the batch this fails: launch k
could hit what a peer still reads in launch k-1.

No flag is missed. A peer may be one launch ahead, never two, by the same argument; its flag then
holds epoch + 1 and still counts as raised, and its data are in the other half. Epochs wrap (int32,
days of serving), so flags are compared by signed difference and halves taken by `& 1`.

A flag that no launch uses for 2^31 epochs would look raised after the wrap: lanes beyond the grid
of small batches. So in every REFRESH_EPOCHS-th launch each program also raises the flags of
lane + grid, lane + 2 * grid, ... Nobody waits for those in that launch (1), and this rank's later
launches overwrite them in order (4).

Counters agree at every kernel boundary: program p advances p, p + grid, ..., so each of the
num_lanes counters is written once a launch, whatever the grid. Nothing else than program p reads
or writes cnt[p] in that launch. They live in device memory, so replayed graphs count on.

Nobody waits for ever for a program that cannot start: by (5) all programs of a rank run at once,
and each raises its flags without waiting. If a peer died, a wait ends after the limit in
limit_ptr: the program writes (rank, peer, lane, epoch) to host memory and traps.

Memory order: the stores of all threads of a program happen before the block barrier, that before
the release by the threads that raise flags; the acquire of the waiting threads happens before the
barrier, that before all loads of the program. A volatile load would not acquire.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from sglang_dcp.kernels.dispatch import INTERPRETED, next_power_of_2
from sglang_dcp.kernels.launch import Launches

# int32 words of one flag row: a lane's flags of up to 8 sources share one 32-byte sector.
FLAG_WORDS = 8
# int32 words of one record of a wait that ran out: rank, peer, lane, epoch.
REPORT_WORDS = 4
REFRESH_EPOCHS = 1 << 20
# Registers per thread that the launchers allow. 512 threads of an SM are then always resident.
MAX_REGISTERS = 128
_RESIDENT_WARPS = 16

SPINS_PER_CHECK = tl.constexpr(256)
INTERPRETED_SPIN_NS = tl.constexpr(100_000)


def resident_programs(num_sms: int, num_warps: int) -> int:
    """Programs that are resident together on an otherwise idle GPU under MAX_REGISTERS."""
    return num_sms * (_RESIDENT_WARPS // num_warps)


@dataclass(frozen=True)
class PeerState:
    """What one kernel of one rank needs to meet its peers; the addresses never change.

    Attributes:
        rank: own rank r.
        num_ranks: N, a power of two of at most FLAG_WORDS.
        flags: int64 [N], address of each rank's flags of this kernel, seen from this rank:
            int32 [slices][num_lanes][FLAG_WORDS], column s raised by source s. For kernels
            whose data carry their flags, the region of their lines.
        counters: int32 [num_lanes], the epoch of this kernel's last launch in every element.
        limit_ns: int64 [1], how long a wait may last, read by the waiting kernel.
        report: int32 [num_lanes, REPORT_WORDS] in host memory that the GPU can write.
        refresh_epochs: launches between two refreshes of the flags of unused lanes, the same on
            all ranks.
        jitter_us: for tests, programs pause for up to this long before push, signal and read.
        launches: of this kernel; a copy with other fields begins with none.
    """

    rank: int
    num_ranks: int
    flags: torch.Tensor
    counters: torch.Tensor
    limit_ns: torch.Tensor
    report: torch.Tensor
    refresh_epochs: int = REFRESH_EPOCHS
    jitter_us: int = 0
    launches: Launches = field(default_factory=Launches, init=False, repr=False, compare=False)

    @property
    def num_lanes(self) -> int:
        """Largest grid of this kernel."""
        return self.counters.numel()

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """What every kernel that meets takes of this, in this order."""
        return self.flags, self.counters, self.limit_ns, self.report, self.rank


class Tiling(NamedTuple):
    """How a kernel divides its rows; equal on all ranks for equal batches (rule 1).

    Attributes:
        block: rows (exchange), 16-byte chunks (gather) or lines (either, by lines) of one step of
            a program, a power of two.
        num_warps: warps of a program.
        grid: programs, at most `resident_programs` and the lanes of the PeerState.
        slices: parts after each of which flags are raised.
    """

    block: int
    num_warps: int
    grid: int
    slices: int = 1


def meeting(state: PeerState, tiling: Tiling) -> dict[str, int | bool]:
    """Constexprs and compiler options that all kernels that meet have in common."""
    return {
        "N": state.num_ranks,
        "BLOCK_LANES": next_power_of_2(state.num_lanes),
        "JITTER_US": state.jitter_us,
        "INTERPRETED": INTERPRETED,
        "num_warps": tiling.num_warps,
        "maxnreg": MAX_REGISTERS,
    }


def check_launch(state: PeerState, tiling: Tiling) -> None:
    """Invariants of a launch that the kernels cannot check."""
    assert state.num_ranks in (2, 4, 8), state.num_ranks
    assert 0 <= state.rank < state.num_ranks, state.rank
    assert state.flags.shape == (state.num_ranks,), tuple(state.flags.shape)
    assert state.report.shape == (state.num_lanes, REPORT_WORDS), tuple(state.report.shape)
    assert 1 <= tiling.grid <= state.num_lanes, (tiling, state.num_lanes)


@triton.jit
def load_flag_ptrs(flag_table_ptr, lane, rank, N: tl.constexpr, WORDS: tl.constexpr):
    """Slice 0 of a lane: this rank's flag at every peer [N], all ranks' flags in own memory [N]."""
    n = tl.arange(0, N)
    peer_flags = tl.load(flag_table_ptr + n).to(tl.pointer_type(tl.int32))
    own_flags = tl.load(flag_table_ptr + rank).to(tl.pointer_type(tl.int32))
    return peer_flags + lane * WORDS + rank, own_flags + lane * WORDS + n


@triton.jit
def jitter(place, rank, epoch, JITTER_US: tl.constexpr, INTERPRETED: tl.constexpr):
    """Pause for a while that differs between places, programs, ranks and launches; for tests."""
    if JITTER_US > 0 and not INTERPRETED:
        mixed = (place * 7 + rank * 131 + tl.program_id(0) * 29 + epoch * 17) * 40503
        end = globaltimer() + ((mixed >> 3) & 1023) * (JITTER_US * 1000 // 1024)
        while globaltimer() < end:
            pass


@triton.jit
def signal_peers(peer_flags, rank, epoch, N: tl.constexpr):
    """Raise this rank's flag at every peer, after all stores of the program."""
    tl.debug_barrier()
    # one warp, one fence, c - 1 stores
    peers = tl.arange(0, N) != rank
    tl.atomic_xchg(peer_flags, epoch, mask=peers, sem="release", scope="sys")


@triton.jit
def wait_for_peers(
    own_flags,
    rank,
    epoch,
    limit_ptr,
    report_ptr,
    lane,
    N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Wait until every peer has raised its flag in the own memory; give up after the limit."""
    n = tl.arange(0, N)
    peers = n != rank
    lead = tl.atomic_add(own_flags, 0, mask=peers, sem="acquire", scope="sys") - epoch
    spins = 0
    started = tl.full([], 0, tl.int64)
    while tl.min(tl.where(peers, lead, 0), 0) < 0:
        lead = tl.atomic_add(own_flags, 0, mask=peers, sem="acquire", scope="sys") - epoch
        spins += 1
        if spins % SPINS_PER_CHECK == 0:
            started, over = out_of_time(started, spins, limit_ptr, INTERPRETED)
            if over:
                late = tl.min(tl.where(peers & (lead < 0), n, N), 0)
                if late < N:
                    give_up(report_ptr, rank, late, lane, epoch, INTERPRETED)
    tl.debug_barrier()


@triton.jit
def out_of_time(started, spins, limit_ptr, INTERPRETED: tl.constexpr):
    """(started, over) of a wait, started being 0 at the first call; the same in all threads."""
    if INTERPRETED:
        now = tl.full([], 0, tl.int64) + spins * INTERPRETED_SPIN_NS
    else:
        # threads read different times; the reduction makes one of them, for all warps
        now = tl.max(tl.zeros([1024], tl.int64) + globaltimer(), 0)
    started = tl.where(started == 0, now, started)
    return started, now - started > tl.load(limit_ptr)


@triton.jit
def give_up(report_ptr, rank, peer, lane, epoch, INTERPRETED: tl.constexpr):
    """Tell the host who waited for whom, then end the kernel with an error."""
    word = tl.arange(0, 4)
    record = tl.where(word == 0, rank, tl.where(word == 1, peer, tl.where(word == 2, lane, epoch)))
    tl.store(report_ptr + lane * 4 + word, record)
    if INTERPRETED:
        assert peer < 0, "a peer did not arrive in time"  # there is no trap
    else:
        # the record must reach the host before any thread traps
        _asm("fence.acq_rel.sys;")
        tl.debug_barrier()
        _asm("trap;")


@triton.jit
def _asm(INSTRUCTION: tl.constexpr):
    tl.inline_asm_elementwise(
        INSTRUCTION + " mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def advance(
    cnt_ptr,
    peer_flags,
    rank,
    epoch,
    num_lanes,
    N: tl.constexpr,
    WORDS: tl.constexpr,
    SLICES: tl.constexpr,
    REFRESH: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
):
    """Advance this program's counters, and now and then the flags of lanes beyond the grid.

    To be called after the last signal, and before the wait, which hides it.
    """
    advance_counters(cnt_ptr, epoch, num_lanes, BLOCK_LANES)
    lane, grid = tl.program_id(0), tl.num_programs(0)
    if epoch % REFRESH == 0:
        peers = tl.arange(0, N) != rank
        for ahead in range(0, num_lanes - lane, grid):
            for s in tl.static_range(SLICES):
                tl.store(peer_flags + (s * num_lanes + ahead) * WORDS, epoch, mask=peers)


@triton.jit
def advance_counters(cnt_ptr, epoch, num_lanes, BLOCK_LANES: tl.constexpr):
    """Advance this program's counters."""
    lanes = tl.program_id(0) + tl.arange(0, BLOCK_LANES) * tl.num_programs(0)
    tl.store(cnt_ptr + lanes, epoch, mask=lanes < num_lanes)
