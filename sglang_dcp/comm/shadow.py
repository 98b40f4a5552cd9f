"""Shadow mode: every call of one communicator is repeated on another one and compared, bit by bit.

A debug aid for communicators that must agree exactly, in a real server. Counting is done by the
GPU, so that captured graphs count at every replay, and nothing is read until `report`.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dcp.comm.base import Communicator
from sglang_dcp.kernels.lse_merge import LseBase

_CALLS = ("gather_q", "exchange_merge")
_FIELDS = ("calls", "elements", "differing")
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Shadow:
    """Compares what `comm` returns with what `reference` makes of the same inputs.

    The methods of `comm` are replaced on the instance; its results go on to the caller. Eager
    batches above max_tokens, which a communicator may hand to another one, are not repeated. All
    ranks must be in shadow mode, or none: the reference's calls are collective too.

    Args:
        comm: serves; after its warm-up, which is thus not counted.
        reference: another communicator of the same group and sizes, after its warm-up.
    """

    def __init__(self, comm: Communicator, reference: Communicator) -> None:
        assert comm is not reference
        self.reference = reference
        self._max_tokens = min(comm.max_tokens, reference.max_tokens)
        self._gather_q, self._exchange_merge = comm.gather_q, comm.exchange_merge
        # [call, field], read by `report`
        self._counts = torch.zeros(len(_CALLS), len(_FIELDS), dtype=torch.int64, device=comm.device)
        comm.gather_q = self._call_gather_q  # type: ignore[method-assign]
        comm.exchange_merge = self._call_exchange_merge  # type: ignore[method-assign]

    def report(self) -> dict[str, Any]:
        """Calls and elements compared since the start, and elements whose bits differ.

        Waits for the device. `gather_q` and `exchange_merge` have a dict of int each.
        """
        if self._counts.is_cuda:
            torch.cuda.synchronize(self._counts.device)
        rows = zip(_CALLS, self._counts.tolist(), strict=True)
        counts = {call: dict(zip(_FIELDS, row, strict=True)) for call, row in rows}
        return {"reference": self.reference.name, **counts}

    def destroy(self) -> None:
        """Release the reference's buffers."""
        self.reference.destroy()

    def _call_gather_q(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> torch.Tensor:
        got = self._gather_q(q_nope, q_pe)
        if q_nope.shape[0] <= self._max_tokens:
            self._compare("gather_q", got, self.reference.gather_q(q_nope, q_pe))
        return got

    def _call_exchange_merge(
        self,
        o: torch.Tensor,
        lse: torch.Tensor,
        lse_base: LseBase,
        local_lens: torch.Tensor,
        merged_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Both get the same partials; a merged LSE goes to a tensor of each, and is compared."""
        inputs: tuple[Any, ...] = (o, lse, lse_base, local_lens)
        kept = () if merged_lse is None else (merged_lse,)
        got = self._exchange_merge(*inputs, *kept)
        if o.shape[0] <= self._max_tokens:
            own = tuple(torch.empty_like(t) for t in kept)
            self._compare("exchange_merge", got, self.reference.exchange_merge(*inputs, *own))
            for got_lse, want_lse in zip(kept, own, strict=True):
                self._count("exchange_merge", got_lse, want_lse)
        return got

    def _compare(self, call: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Count one call and its elements."""
        self._counts[_CALLS.index(call)][0].add_(1)
        self._count(call, got, want)

    def _count(self, call: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Count on the device: -0 differs from 0, and a NaN equals the same NaN."""
        assert got.shape == want.shape, (got.shape, want.shape)
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        counts, integers = self._counts[_CALLS.index(call)], _INTEGERS[got.dtype.itemsize]
        counts[1].add_(got.numel())
        counts[2].add_((got.view(integers) != want.view(integers)).sum())
