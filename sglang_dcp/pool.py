"""The striped latent pool of one rank: stage 2 of the decode step, and the read of pass-KV."""

from typing import Any, NoReturn

import torch
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc

from sglang_dcp import counters, state
from sglang_dcp.kernels.kv_write import set_mla_kv_buffer_dcp_sharded
from sglang_dcp.prefix_reader import PrefixReader


class DcpMLATokenToKVPool(MLATokenToKVPool):
    """C physical rows for c * C virtual slots: slot v lies in row v // c of rank v % c.

    `size` and `page_size` are physical (C and P); allocator, radix tree and scheduler keep the
    virtual c * C and P * c. Both of upstream's writers end in one kernel with the owner mask;
    every other method of upstream that takes slots raises.
    """

    _prefix_reader: PrefixReader | None = None

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc: torch.Tensor,
        cache_k_nope: torch.Tensor,
        cache_k_rope: torch.Tensor,
    ) -> None:
        """Store the latent rows that this rank owns.

        Args:
            layer: the RadixAttention whose layer_id names the buffer.
            loc: [T] virtual slots, int64 or int32; padded tokens carry slot 0 (rank 0, row 0).
            cache_k_nope: [T, 1, 512], cache_k_rope: [T, 1, 64]; any row stride.
        """
        dcp = state.get_state()
        buffer = self.kv_buffer[layer.layer_id - self.start_layer]
        set_mla_kv_buffer_dcp_sharded(
            buffer,
            loc,
            cache_k_nope.to(buffer.dtype),
            cache_k_rope.to(buffer.dtype),
            dcp.dcp_rank,
            dcp.dcp_size,
        )
        counters.count("kv_write")

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: torch.Tensor, cache_v: torch.Tensor | None
    ) -> None:
        """Upstream's other writer: `cache_k` [T, 1, 576] holds nope | rope, `cache_v` is unused."""
        loc, _ = unwrap_write_loc(loc_info)
        nope, rope = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        self.set_mla_kv_buffer(layer, loc, nope, rope)

    def read_prefix_chunk(
        self, layer_id: int, forward_batch: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective read (pass-KV) of the batch's chunk in turn, within static buffers.

        Every rank of the group reads all chunks of a layer, in order, with the same lengths.

        Args:
            layer_id: layer.
            forward_batch: names the chunk and has the plans of all; its largest chunk of any batch
                sizes the buffers at the first read.
            dtype: dtype of the result.

        Returns:
            nope [T, 512] and rope [T, 1, 64], contiguous, in token order.
        """
        counters.count("kv_gather")
        rows = self._rows(layer_id)
        if self._prefix_reader is None:
            transport = state.get_state().comm.transport
            most_tokens = forward_batch.get_max_chunk_capacity()
            self._prefix_reader = PrefixReader(transport, most_tokens, rows)
        plans, index = forward_batch.dcp_gather_plans, forward_batch.prefix_chunk_idx
        nope, rope = self._prefix_reader.read(rows, plans, index, self.kv_lora_rank, dtype)
        return nope, rope.unsqueeze(1)

    def _rows(self, layer_id: int) -> torch.Tensor:
        """[C + P, 576] of a layer."""
        return self.kv_buffer[layer_id - self.start_layer].squeeze(1)

    def _no_slot_access(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "a path of SGLang that DCP does not know reads or moves KV by virtual slot; a rank's "
            "pool holds only its stripe (row = slot // dcp_size). Serve without --dcp-size."
        )

    get_mla_kv_buffer = _no_slot_access
    move_kv_cache = _no_slot_access
    get_cpu_copy = _no_slot_access
    load_cpu_copy = _no_slot_access
    get_contiguous_buf_infos = _no_slot_access
