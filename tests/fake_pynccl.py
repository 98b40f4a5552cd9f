"""SGLang's PyNcclCommunicator as PyncclTransport sees it, over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class FakePyncclCommunicator:
    """Same calls, and the same traps: off by default, silent when off, sends need a group."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.group = dist.group.WORLD
        self.available, self.disabled = True, True
        self._ops: list[dist.P2POp] | None = None

    @contextmanager
    def change_state(self, enable: bool) -> Iterator[None]:
        old, self.disabled = self.disabled, not enable
        try:
            yield
        finally:
            self.disabled = old

    def group_start(self) -> None:
        assert self._ops is None
        self._ops = []

    def group_end(self) -> None:
        ops, self._ops = self._ops, None
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()

    def send(self, tensor: torch.Tensor, dst: int) -> None:
        self._queue(dist.isend, tensor, dst)

    def recv(self, tensor: torch.Tensor, src: int) -> None:
        self._queue(dist.irecv, tensor, src)

    def all_gather(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        if not self.disabled:
            dist.all_gather_into_tensor(out, inp)

    def reduce_scatter(self, out: torch.Tensor, inp: torch.Tensor) -> None:
        if not self.disabled:
            dist.reduce_scatter_tensor(out, inp)

    def _queue(self, op: object, tensor: torch.Tensor, peer: int) -> None:
        if self.disabled:
            return
        assert peer != self.rank, "NCCL may deadlock on a send to oneself"
        assert tensor.is_contiguous()
        assert self._ops is not None, "a bare send blocks until its receive"
        self._ops.append(dist.P2POp(op, tensor, peer))
