"""What prefill over a striped prefix holds beside the pool, against `--dcp-workspace-mb`.

pass-KV expands the latent rows of a prefix into K and V of every local head, some 50 KB a token for
96 heads on two GPUs, where the latent row has 1.1 KB. So a prefix is read in chunks (bounded
buffers as in "Untied Ulysses", arXiv 2602.21196). pass-Q holds queries and partial outputs of all
heads for a slice of new tokens, 0.75 MB a token for 96 heads, and absorbed queries of own heads
for all new tokens of the batch; a batch with more of them than fit goes by pass-KV.

Slices by token alone reach down far enough, so heads are never sliced. The smallest workspaces that
are accepted, in bf16 at pages of 64 tokens, as tests/test_workspace.py counts them:

    16 heads     2 MiB (c = 2) to  3 MiB (c = 8) for pass-KV,  21 MiB for pass-Q
    128 heads    9 MiB (c = 2) to 10 MiB (c = 8) for pass-KV,  22 MiB for pass-Q

pass-KV's is one widened page of every local head, pass-Q's is one new token beside the partial
outputs of split keys (20 MiB). Slices of the heads would only lower these, which no GPU lacks, and
pass-KV would gather the prefix, pass-Q read its stripe, once for each of them.

Not counted: the communicator's buffers, which decode has anyway; upstream's activations of new
tokens, which its prefill chunk size bounds; the index of the prefixes, where the pool has 1.1 KB a
token and layer (`INDEX_BYTES` a token for pass-KV; for pass-Q 4 bytes a token of the stripe, on
triton for each group of new tokens); flashinfer's plans, 8 MiB for each distinct chunk or slice
(`attention.ragged_chunks`). Imports neither torch nor SGLang.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

_SLOT_BYTES = 4  # int32, upstream's kv_indices
_INDEX_BYTES = 8  # int64 at most, the gather plan's
#: Of a prefix token, for all layers, at most: its slot and its place in a gather.
INDEX_BYTES = _SLOT_BYTES + _INDEX_BYTES
_FLOAT_BYTES = 4
#: Places that grouped queries of a slice may take, for every token (`attention.token_groups`).
GROUP_FILL = 2
#: Rows (token, head) of partial outputs that splitting the keys adds: a tile of 64 for each
#: multiprocessor, of which no GPU has more.
SPLIT_ROWS = 64 * 160


@dataclass(frozen=True)
class ReadShape:
    """Sizes of prefill over a prefix on one rank.

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

    @property
    def row_bytes(self) -> int:
        """A latent row."""
        return (self.kv_lora_rank + self.qk_rope_head_dim) * self.element_bytes

    def group_bytes(self) -> dict[str, int]:
        """pass-KV's bytes that live at once, for c consecutive prefix tokens (one row a rank).

        A chunk is worked on while the next one arrives. Upstream's loop keeps a view of the last
        chunk's kv until it has the new one, so beside kv lives either that, or the new copies in
        token order (before the new kv), or k (after it). What grows with the new tokens (queries,
        outputs) is bounded by the prefill chunk size and no part of the read.
        """
        c, e = self.dcp_size, self.element_bytes
        nope, rope, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        row = self.row_bytes
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

    def slice_bytes(self) -> dict[str, int]:
        """pass-Q's bytes that live at once for a new token of a slice, at most, on any backend."""
        heads = self.dcp_size * self.heads_local
        o, lse = self.kv_lora_rank * self.element_bytes, _FLOAT_BYTES
        return {
            "own queries": self.heads_local * self.row_bytes,  # where other requests lie between
            "grouped queries": GROUP_FILL * heads * self.row_bytes,
            "partials of key splits": GROUP_FILL * heads * self._partial_bytes,
            "grouped o and lse": GROUP_FILL * heads * (o + lse),
            "o and lse": heads * (o + lse),  # in token order
            "merged lse": self.heads_local * lse,
        }

    def batch_bytes(self) -> dict[str, int]:
        """pass-Q's bytes for a new token of a batch, whether its turn has come or not."""
        absorbed = self.heads_local * self.kv_lora_rank * self.element_bytes
        return {
            "absorbed queries": absorbed,
            "o of the new tokens": absorbed,
            "their lse": self.heads_local * _FLOAT_BYTES,
            "latent rows": self.row_bytes,
            "lens, row, place, group": self.dcp_size * 4 + (1 + 2 * GROUP_FILL) * _INDEX_BYTES,
        }

    @property
    def split_bytes(self) -> int:
        """pass-Q's partial outputs that do not depend on the tokens."""
        return SPLIT_ROWS * self._partial_bytes

    @property
    def _partial_bytes(self) -> int:
        """A head's float32 output and LSE over a part of the keys."""
        return (self.kv_lora_rank + 1) * _FLOAT_BYTES


@dataclass(frozen=True)
class PassQLimits:
    """New tokens that pass-Q may hold.

    Attributes:
        slice_tokens: of a slice; 0 if not even one fits.
        batch_tokens: of a batch.
    """

    slice_tokens: int = sys.maxsize
    batch_tokens: int = sys.maxsize


def workspace_tokens(workspace_bytes: int, shape: ReadShape) -> int:
    """Prefix tokens that a chunk may have so that everything of its read fits, a multiple of c.

    Args:
        workspace_bytes: bound on the sum of `shape.group_bytes()` over the chunk.
    """
    return workspace_bytes // sum(shape.group_bytes().values()) * shape.dcp_size


def workspace_bytes(tokens: int, shape: ReadShape) -> int:
    """Bytes that a chunk of `tokens` prefix tokens (rounded up to a multiple of c) needs."""
    return -(-tokens // shape.dcp_size) * sum(shape.group_bytes().values())


def pass_q_limits(workspace_bytes: int, shape: ReadShape, most_slice_tokens: int) -> PassQLimits:
    """What fits: slices take half at most, the tokens of the batch what slices leave.

    Args:
        workspace_bytes: bound on `pass_q_bytes`.
        shape: sizes.
        most_slice_tokens: what the communicator's buffers hold.
    """
    of_slice, of_batch = (sum(x.values()) for x in (shape.slice_bytes(), shape.batch_bytes()))
    free = workspace_bytes - shape.split_bytes
    slice_tokens = min(most_slice_tokens, max(free // 2, of_slice) // of_slice)
    batch_tokens = (free - slice_tokens * of_slice) // of_batch
    return PassQLimits(slice_tokens, batch_tokens) if batch_tokens > 0 else PassQLimits(0, 0)


def pass_q_bytes(slice_tokens: int, batch_tokens: int, shape: ReadShape) -> int:
    """Bytes of a batch of new tokens that goes through in such slices."""
    of_slice, of_batch = (sum(x.values()) for x in (shape.slice_bytes(), shape.batch_bytes()))
    return shape.split_bytes + slice_tokens * of_slice + batch_tokens * of_batch
