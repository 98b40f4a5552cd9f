"""How many prefix tokens fit into `--dcp-workspace-mb` while pass-KV reads them: pure arithmetic.

pass-KV expands the latent rows of a prefix into K and V of every local head, some 50 KB a token for
96 heads on two GPUs, where the latent row has 1.1 KB. So a prefix is read in chunks (bounded
buffers as in "Untied Ulysses", arXiv 2602.21196). Imports neither torch nor SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass

_SLOT_BYTES = 4  # int32, upstream's kv_indices
_INDEX_BYTES = 8  # int64 at most, the gather plan's


@dataclass(frozen=True)
class ReadShape:
    """Sizes of a pass-KV read on one rank.

    Attributes:
        dcp_size: c.
        heads_local: heads that this rank expands, H / attention-TP.
        kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim: 512, 128, 64, 128.
        element_bytes: of cache, activations and K, V alike: 2 in bf16.
    """

    dcp_size: int
    heads_local: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    element_bytes: int

    def group_bytes(self) -> dict[str, int]:
        """Bytes that live at once, by tensor, for c consecutive prefix tokens (one row a rank).

        A chunk is worked on while the next one arrives. Upstream's loop keeps a view of the last
        chunk's kv until it has the new one, so beside kv lives either that, or the new copies in
        token order (before the new kv), or k (after it). What grows with the new tokens (queries,
        outputs) is bounded by the prefill chunk size and no part of the read.
        """
        c, e = self.dcp_size, self.element_bytes
        nope, rope, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        row = (self.kv_lora_rank + rope) * e
        kv = c * self.heads_local * (nope + v) * e
        k = c * self.heads_local * (nope + rope) * e
        return {
            "send": row,  # rows of this rank, of the next chunk
            "gathered": c * row,  # rows of all ranks in rank order, of the next chunk
            "nope and rope": c * row,  # in token order, of this chunk
            "kv": kv,  # what kv_b_proj makes of nope; v is a view of it
            "k or last kv": max(k, kv, c * row),
            "indices": c * (_SLOT_BYTES + _INDEX_BYTES) + _INDEX_BYTES,  # slots, source, send rows
        }


def workspace_tokens(workspace_bytes: int, shape: ReadShape) -> int:
    """Prefix tokens that a chunk may have so that everything of its read fits, a multiple of c.

    Args:
        workspace_bytes: bound on the sum of `shape.group_bytes()` over the chunk.
    """
    return workspace_bytes // sum(shape.group_bytes().values()) * shape.dcp_size


def workspace_bytes(tokens: int, shape: ReadShape) -> int:
    """Bytes that a chunk of `tokens` prefix tokens (rounded up to a multiple of c) needs."""
    return -(-tokens // shape.dcp_size) * sum(shape.group_bytes().values())
