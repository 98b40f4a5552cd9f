"""flashinfer's plans for prefix chunks: one for all chunks that look the same."""

from typing import Any


class RaggedChunksMixin:
    """Mixed into backends whose prefill is flashinfer's ragged one, before it in the bases.

    Upstream plans every chunk and keeps a wrapper for each, which holds 8 MiB on the GPU: with
    small chunks of a long prefix that would be more than the chunks themselves. All full chunks of
    one request have the same lengths, so a batch of B requests needs at most 2 B + 1 plans.
    """

    mha_chunk_kv_cache: Any
    _chunk_wrappers: list[Any]

    def init_mha_chunk_metadata(
        self, forward_batch: Any, disable_flashinfer_ragged: bool = False
    ) -> None:
        """Plan each distinct chunk once, in upstream's code, and give every chunk its plan."""
        num_chunks = forward_batch.num_prefix_chunks
        lens = [chunk.lens for chunk in forward_batch.dcp_prefix_chunks] if num_chunks else []
        distinct = {chunk_lens: index for index, chunk_lens in reversed(list(enumerate(lens)))}
        first = sorted(distinct.values())
        runner, kv_indptr = self.mha_chunk_kv_cache, forward_batch.prefix_chunk_cu_seq_lens
        runner.chunk_ragged_wrappers = self.__dict__.setdefault("_chunk_wrappers", [])
        forward_batch.num_prefix_chunks = len(first)
        forward_batch.prefix_chunk_cu_seq_lens = [kv_indptr[index] for index in first]
        try:
            runner.update_wrapper(forward_batch, disable_flashinfer_ragged)
        finally:
            forward_batch.num_prefix_chunks = num_chunks
            forward_batch.prefix_chunk_cu_seq_lens = kv_indptr
        plan_of = {lens[index]: self._chunk_wrappers[i] for i, index in enumerate(first)}
        runner.chunk_ragged_wrappers = [plan_of[chunk_lens] for chunk_lens in lens]
