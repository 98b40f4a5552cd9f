"""The three collectives that communicators need, on NCCL (CUDA) or torch.distributed (CPU).

Legend: N = ranks of the DCP group. All tensors are contiguous; blocks are equal and in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Transport(Protocol):
    """Collectives over one DCP group, in place into caller-owned buffers.

    Every rank must make the same calls in the same order, also when its stripe is empty.
    """

    rank: int
    size: int
    # for host collectives; CPU tensors and objects
    process_group: dist.ProcessGroup | None

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Concatenate inp of every rank into out: out.numel() == N * inp.numel()."""

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Block n of inp [N, ...] goes to rank n; block n of out [N, ...] comes from rank n."""

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        """Block `rank` of the sum of inp over ranks: inp.numel() == N * out.numel()."""


class TorchTransport:
    """torch.distributed collectives: gloo for CPU ranks and tests, any dtype it knows.

    Args:
        process_group: the DCP group's ProcessGroup; None is the default group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None = None) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_sizes(out, inp, self.size, 1)
        dist.all_gather_into_tensor(out.view(-1), inp.view(-1), group=self.process_group)

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_blocks(out, inp, self.size)
        dist.all_to_all_single(out.view(-1), inp.view(-1), group=self.process_group)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_sizes(out, inp, 1, self.size)
        dist.reduce_scatter_tensor(out.view(-1), inp.view(-1), group=self.process_group)


class PyncclTransport:
    """NCCL calls through SGLang's PyNcclCommunicator, all on the current stream: capturable.

    torch.distributed would keep NCCL on its own stream and check for errors on the host; ctypes
    calls do neither, so the same code serves eager mode and CUDA-graph capture. NCCL connects
    peers lazily: call `Communicator.warm_up` before the first capture.

    Args:
        comm: a PyNcclCommunicator (duck-typed: rank, world_size, group, available, disabled,
            change_state, group_start, group_end, send, recv, all_gather, reduce_scatter).

    Raises:
        RuntimeError: comm has no NCCL communicator behind it.
    """

    def __init__(self, comm: Any) -> None:
        if not comm.available:
            raise RuntimeError(
                "DCP needs NCCL, but PyNcclCommunicator is not available on this rank: its group"
                f" has {comm.world_size} rank(s) (at least 2 are needed) or libnccl did not load."
                " Check SGLANG_NCCL_SO_PATH, or serve without --dcp-size."
            )
        self._comm = comm
        self.process_group: dist.ProcessGroup | None = comm.group
        self.rank: int = comm.rank
        self.size: int = comm.world_size

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_sizes(out, inp, self.size, 1)
        with self._enabled():
            # bytes, because NCCL's type table lacks fp8 and a gather does not care
            self._comm.all_gather(_as_bytes(out), _as_bytes(inp))

    def all_to_all(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_blocks(out, inp, self.size)
        recv = _as_bytes(out).view(self.size, -1)
        send = _as_bytes(inp).view(self.size, -1)
        recv[self.rank].copy_(send[self.rank], non_blocking=True)
        with self._enabled():
            self._comm.group_start()
            # start with the next rank, so that not everyone queues for rank 0 first
            for step in range(1, self.size):
                dst, src = (self.rank + step) % self.size, (self.rank - step) % self.size
                self._comm.send(send[dst], dst)
                self._comm.recv(recv[src], src)
            self._comm.group_end()

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        _check_sizes(out, inp, 1, self.size)
        with self._enabled():
            self._comm.reduce_scatter(out, inp)

    @contextmanager
    def _enabled(self) -> Iterator[None]:
        """Outside SGLang's own graph capture the communicator is off, and then returns silently."""
        with self._comm.change_state(enable=True):
            assert not self._comm.disabled, "PyNcclCommunicator stayed disabled"
            yield


def _as_bytes(t: torch.Tensor) -> torch.Tensor:
    return t.view(-1).view(torch.uint8)


def _check_blocks(out: torch.Tensor, inp: torch.Tensor, size: int) -> None:
    assert out.shape == inp.shape, f"{out.shape} != {inp.shape}"
    assert out.shape[0] == size, f"{out.shape[0]} blocks for {size} ranks"
    _check_sizes(out, inp, 1, 1)


def _check_sizes(out: torch.Tensor, inp: torch.Tensor, inp_times: int, out_times: int) -> None:
    assert out.numel() * out_times == inp.numel() * inp_times, (out.shape, inp.shape)
    assert out.dtype == inp.dtype, (out.dtype, inp.dtype)
    assert out.is_contiguous(), out.stride()
    assert inp.is_contiguous(), inp.stride()
