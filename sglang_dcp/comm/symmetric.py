"""Memory that every rank of a group can write: the layer below the `nvlink` communicator.

Two providers give the same `SymmetricBuffer`: `rendezvous` maps the GPUs of a group into each other
through torch's symmetric memory, and `virtual_rank` takes plain tensors in one address space, for
ranks that share a GPU or, under Triton's interpreter, a CPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from sglang_dcp import envs

_PROBE_BYTES = 1 << 12
# CUdevice_P2PAttribute
_P2P_ACCESS_SUPPORTED, _P2P_NATIVE_ATOMICS = 2, 3


@dataclass(frozen=True)
class SymmetricBuffer:
    """One rank's buffer and the addresses of all of them.

    Attributes:
        rank: own rank.
        local: uint8 [num_bytes], this rank's memory; all ranks' are zero before any peer writes.
        addresses: int64 [N] on the device, where each rank's buffer lies in this rank's address
            space; multiples of 256.
        num_sms: streaming multiprocessors of the smallest GPU of the group, so that all ranks bound
            their grids alike.
        host_barrier: returns once all ranks called it.
        keep_alive: what must live as long as the mapping.
    """

    rank: int
    local: torch.Tensor
    addresses: torch.Tensor
    num_sms: int
    host_barrier: Callable[[], None]
    keep_alive: Any = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.addresses.numel()

    def table(self, offset_bytes: int) -> torch.Tensor:
        """int64 [N], addresses of the region that starts offset_bytes into every rank's buffer."""
        return self.addresses + offset_bytes


def virtual_rank(buffers: Sequence[torch.Tensor], rank: int, num_sms: int) -> SymmetricBuffer:
    """Rank `rank` of ranks whose buffers are tensors in this address space.

    Args:
        buffers: zeroed uint8 tensors of one size, one a rank, on one device; CPU tensors may map
            memory that other processes share.
        rank: which of them is the own one.
        num_sms: bound of the grid of each rank; on one GPU the ranks must be resident together.
    """
    addresses = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.int64)
    return SymmetricBuffer(
        rank=rank,
        local=buffers[rank],
        addresses=addresses.to(buffers[rank].device),
        num_sms=num_sms,
        host_barrier=lambda: None,
        keep_alive=list(buffers),
    )


def rendezvous(
    num_bytes: int, device: torch.device, process_group: dist.ProcessGroup
) -> SymmetricBuffer:
    """Allocate num_bytes on every GPU of a group and map them into each other; collective.

    Args:
        num_bytes: the same on all ranks.
        device: this rank's GPU.
        process_group: the ranks; any backend, its store is used (and its host collectives, so a
            CPU group keeps NCCL out of it).

    Raises:
        RuntimeError: a rank failed; raised on all of them, with that rank's reason.
    """
    envs.disable_symm_mem_multicast()
    import torch.distributed._symmetric_memory as symm_mem

    local, error = None, ""
    try:
        local = symm_mem.empty(num_bytes, dtype=torch.uint8, device=device)
        local.zero_()
        torch.cuda.synchronize(device)
    except RuntimeError as e:
        error = f"allocation: {e}"
    # nobody enters the rendezvous unless everybody can, and nobody maps memory that is not zero
    _raise_together(error, num_bytes, process_group)
    assert local is not None
    try:
        handle = symm_mem.rendezvous(local, process_group.group_name)
    except RuntimeError as e:
        error = f"rendezvous: {e}"
    _raise_together(error, num_bytes, process_group)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return SymmetricBuffer(
        rank=dist.get_rank(process_group),
        local=local,
        addresses=torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=device),
        num_sms=min(_gather(sms, process_group)),
        host_barrier=lambda: _raise_together("", num_bytes, process_group),
        keep_alive=handle,
    )


def probe_peers(device: torch.device, process_group: dist.ProcessGroup) -> tuple[bool, str]:
    """Whether the GPUs of a group can serve `nvlink`: a trial, decided together; collective.

    Peer access and native peer atomics between all GPUs, then a rendezvous of a small buffer.

    Returns:
        (able, reason), equal on all ranks: reason says what the first unable rank lacks.
    """
    own = torch.cuda.current_device() if device.index is None else device.index
    uuids = _gather(str(torch.cuda.get_device_properties(own).uuid), process_group)
    if len(set(uuids)) < len(uuids):
        return False, "two ranks share a GPU"
    reason = peer_problem(own, _gather(own, process_group))
    reason = next(filter(None, _gather(reason, process_group)), "")
    if reason:
        return False, reason
    try:
        rendezvous(_PROBE_BYTES, device, process_group)
    except RuntimeError as e:  # on all ranks alike
        return False, str(e)
    return True, "peer access, native peer atomics and a trial rendezvous on every rank"


def peer_problem(device: int, peers: Sequence[int]) -> str:
    """What GPU `device` lacks in order to write and signal to `peers` (itself is passed over).

    Empty if nothing. Never raises: a rank that fails here would leave the others waiting.
    """
    try:
        missing = [d for d in peers if d != device and not _has_native_peer_atomics(device, d)]
    except (OSError, RuntimeError) as e:
        return f"GPU {device} cannot be asked for peer access: {e}"
    return f"GPU {device} has no peer access with native atomics to {missing}" if missing else ""


def _has_native_peer_atomics(device: int, peer: int) -> bool:
    """What flags in peer memory need; asked of the driver, since torch does not expose it."""
    if not torch.cuda.can_device_access_peer(device, peer):
        return False
    cuda = ctypes.CDLL("libcuda.so.1")
    value, src, dst = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    for ordinal, out in ((device, src), (peer, dst)):
        _check_driver(f"cuDeviceGet({ordinal})", cuda.cuDeviceGet(ctypes.byref(out), ordinal))
    for attribute in (_P2P_ACCESS_SUPPORTED, _P2P_NATIVE_ATOMICS):
        status = cuda.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, src, dst)
        _check_driver(f"cuDeviceGetP2PAttribute({attribute})", status)
        if not value.value:
            return False
    return True


def _check_driver(call: str, status: int) -> None:
    if status != 0:
        raise RuntimeError(f"{call} returned {status}")


def _gather(value: Any, process_group: dist.ProcessGroup) -> list[Any]:
    values = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def _raise_together(error: str, num_bytes: int, process_group: dist.ProcessGroup) -> None:
    """Raise on every rank if one has an error; otherwise a host barrier."""
    errors = _gather(error, process_group)
    failed = [f"rank {r}: {e}" for r, e in enumerate(errors) if e]
    if failed:
        raise RuntimeError(
            f"Symmetric memory of {num_bytes} bytes on each GPU of the DCP group was asked for, and"
            f" must succeed on all {len(errors)} ranks, but {'; '.join(failed)}. Use"
            " --dcp-comm-backend a2a, or free memory."
        )
