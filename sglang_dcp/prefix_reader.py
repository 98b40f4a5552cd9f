"""Reads the chunks of a striped prefix, on CUDA each one while the chunk before is attended to.

Order of communication kernels. Two of them on one GPU must never be in flight in an order that can
differ between ranks: each waits for its peers while it holds the GPU, and two ranks that started
them in different orders wait for each other for ever. Here they are chained by events, so that
there is one order, the same on all ranks:

* the first gather of a layer is on the current stream, where nothing could run beside it;
* the others are on the side stream, one after another, and each starts only after all that the
  current stream had been given before (`wait_stream`): every earlier collective of SGLang's or
  ours, on that stream, has ended;
* the current stream takes a chunk only after its gather has ended (`wait_stream`), and a gather is
  started ahead only for a chunk that the same layer goes on to take, so the current stream reaches
  the layer's next collective (all-reduce after o_proj) only after the last gather has ended;
* between two chunks the current stream runs projection, attention and merge of own heads, which do
  not communicate.

Which gathers there are follows from lengths that are equal on all ranks.

Order of memory. One buffer receives all gathers: a chunk is copied out of it, in token order, on
the current stream before the next gather is started, and that gather waits for the current stream.
The copies live as long as `attention/prefix_chunks.py` uses them, on the current stream only. So
two chunks are held at a time, one in the buffer and one in copies, and both are counted in
`sglang_dcp.workspace`.
"""

from collections.abc import Sequence

import torch

from sglang_dcp.comm.buffers import Scratch
from sglang_dcp.comm.transport import Transport
from sglang_dcp.prefix_gather import GatherPlan


class PrefixReader:
    """Gathers of one pool. On CPU the same steps run one after another.

    Args:
        transport: collectives of the DCP group.
        max_tokens: most tokens, in whole groups of c, of a chunk.
        like: latent rows of the pool, for their width, dtype and device.
    """

    def __init__(self, transport: Transport, max_tokens: int, like: torch.Tensor) -> None:
        self._transport = transport
        self._device = like.device
        self._max_groups = max_tokens // transport.size
        num_elements = self._max_groups * like.shape[1]
        self._send = Scratch(like.new_empty(num_elements))
        self._gathered = Scratch(like.new_empty(num_elements * transport.size))
        self._side = torch.cuda.Stream(like.device) if self._device.type == "cuda" else None
        self._ahead: tuple[GatherPlan, torch.Tensor] | None = None

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the static buffers."""
        return self._send.num_bytes + self._gathered.num_bytes

    def read(
        self,
        rows: torch.Tensor,
        plans: Sequence[GatherPlan],
        index: int,
        kv_lora_rank: int,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunk `index` of one layer, in token order; the gather of the next one is started.

        A caller that reads a chunk reads all that follow, in order: the next one has been sent.

        Args:
            rows: [C + P, 576], the layer's rows on this rank.
            plans: of all chunks of the batch.
            kv_lora_rank: 512.
            dtype: of the result.

        Returns:
            nope [T, 512] and rope [T, 64], contiguous, used on the current stream only.
        """
        ahead, self._ahead = self._ahead, None
        if index == 0:
            assert ahead is None, "the chunks of the layer before were not read to the end"
            gathered = self._gather(rows, plans[0])
        else:
            assert ahead is not None
            assert ahead[0] is plans[index], f"chunk {index} was asked for out of order"
            gathered = ahead[1]
            self._finish()
        result = plans[index].in_order(gathered, kv_lora_rank, dtype)
        if index + 1 < len(plans):
            self._ahead = plans[index + 1], self._gather_ahead(rows, plans[index + 1])
        return result

    def _gather(self, rows: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        """Enqueue a gather into the buffer on the current stream."""
        shape = plan.send_rows.shape[0], rows.shape[1]
        assert shape[0] <= self._max_groups, (shape, self._max_groups)  # no temporaries here
        send, out = self._send.take(*shape), self._gathered.take(plan.dcp_size, *shape)
        return plan.gather(rows, self._transport, send, out)

    def _gather_ahead(self, rows: torch.Tensor, plan: GatherPlan) -> torch.Tensor:
        """The same on the side stream, behind everything that was enqueued so far."""
        if self._side is None:
            return self._gather(rows, plan)
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            return self._gather(rows, plan)

    def _finish(self) -> None:
        """Let the current stream wait for the last gather."""
        if self._side is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._side)
