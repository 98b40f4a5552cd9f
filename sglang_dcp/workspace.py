"""What prefill over a striped prefix holds beside the pool, against `--dcp-workspace-mb`.

pass-KV expands the latent rows of a prefix into K and V of every local head, some 50 KB a token for
96 heads on two GPUs, where the latent row has 1.1 KB. So a prefix is read in chunks (bounded
buffers as in "Untied Ulysses", arXiv 2602.21196), which are the smaller, the more new tokens the
batch has: each has an output for the chunk beside its own. pass-Q holds queries and partial outputs
of all heads for a slice of new tokens, 0.75 MB a token for 96 heads, and absorbed queries of own
heads for all new tokens of the batch; a batch with more of them than fit goes by pass-KV.

Slices by token alone reach down far enough, so heads are never sliced. The smallest workspaces that
are accepted, in bf16 at pages of 64 tokens, as tests/test_workspace.py counts them:

    16 heads     2 MiB (c = 2) to  3 MiB (c = 8) for pass-KV,  21 MiB for pass-Q
    128 heads    9 MiB (c = 2) to 10 MiB (c = 8) for pass-KV,  22 MiB for pass-Q

pass-KV's is one widened page of every local head for one new token, without plans; pass-Q's is one
new token beside the partial outputs of split keys (20 MiB). Slices of the heads would only lower
these, which no GPU lacks, and pass-KV would gather the prefix, pass-Q read its stripe, once for
each of them.

Not counted: the communicator's buffers, which decode has anyway; upstream's activations of new
tokens, which it has without a prefix, too; for pass-Q its index of the prefixes, 4 bytes a token of
the stripe (on triton for each group of new tokens), and flashinfer's plans, 8 MiB a slice. Imports
neither torch nor SGLang.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

_SLOT_BYTES = 4  # int32, upstream's kv_indices
_INDEX_BYTES = 8  # int64 at most, the gather plan's
MIB = 1 << 20
#: Of a prefix token, for all layers, at most: its slot, its place in a gather, and its rank's row.
INDEX_BYTES = _SLOT_BYTES + _INDEX_BYTES + _SLOT_BYTES
_FLOAT_BYTES = 4
#: flashinfer's integers for a plan; all full chunks of a request share one.
PLAN_BYTES = 8 * MIB
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

    def static_bytes(self) -> dict[str, int]:
        """pass-KV's static buffers for c consecutive tokens of the largest chunk.

        The next chunk's rows arrive there while a chunk is worked on.
        """
        return {
            "send": self.row_bytes,  # rows of this rank
            "gathered": self.dcp_size * self.row_bytes,  # rows of all ranks in rank order
        }

    def chunk_bytes(self) -> dict[str, int]:
        """pass-KV's bytes that live at once for c consecutive tokens of a chunk.

        Beside kv lives the latent that it is made of, and then k with its rope part.
        """
        c, e = self.dcp_size, self.element_bytes
        nope, rope, v = self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        k = c * self.heads_local * (nope + rope) * e
        return {
            "kv": c * self.heads_local * (nope + v) * e,  # v is a view of it
            "k and rope, or nope and rope": c * max(k // c + rope * e, self.row_bytes),
        }

    def output_bytes(self) -> int:
        """pass-KV's output for a chunk and its LSE, for one new token."""
        return self.heads_local * (self.v_head_dim * self.element_bytes + _FLOAT_BYTES)

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


@dataclass(frozen=True)
class ChunkBudget:
    """How many prefix tokens fit into a chunk of pass-KV, by batch.

    Attributes:
        workspace_bytes: bound on everything that reading prefixes holds.
        shape: sizes.
        plan_bytes: of a plan; 0 for backends without.
        page_tokens: least tokens of a chunk, a multiple of c: a widened page.
        cap_tokens: most tokens of a chunk, whatever fits.
    """

    workspace_bytes: int
    shape: ReadShape
    plan_bytes: int = PLAN_BYTES
    page_tokens: int = 1
    cap_tokens: int = sys.maxsize

    @property
    def most_tokens(self) -> int:
        """Of a chunk of any batch, whole pages: what fits beside nothing; sizes static buffers."""
        shape = self.shape
        group_bytes = sum(shape.static_bytes().values()) + sum(shape.chunk_bytes().values())
        tokens = self.workspace_bytes // group_bytes * shape.dcp_size
        return min(tokens, self.cap_tokens) // self.page_tokens * self.page_tokens

    def chunk_tokens(self, new_lens: Sequence[int], prefix_lens: Sequence[int]) -> int:
        """Tokens of a chunk of a batch, a multiple of c, at least `page_tokens`.

        Args:
            new_lens, prefix_lens: of every request, on the host, equal on all ranks.
        """
        shape, most = self.shape, self.most_tokens
        held_bytes = self.held_bytes(sum(new_lens), sum(prefix_lens), _num_plans(prefix_lens, most))
        num_groups = (self.workspace_bytes - held_bytes) // sum(shape.chunk_bytes().values())
        tokens = num_groups * shape.dcp_size // self.page_tokens * self.page_tokens
        return max(min(tokens, most), self.page_tokens)

    def held_bytes(self, new_tokens: int, prefix_tokens: int, num_plans: int) -> int:
        """Beside the tensors of a chunk."""
        shape = self.shape
        return (
            self.most_tokens // shape.dcp_size * sum(shape.static_bytes().values())
            + new_tokens * shape.output_bytes()
            + prefix_tokens * INDEX_BYTES
            + num_plans * self.plan_bytes
        )

    def fits(self, new_tokens: int) -> bool:
        """Whether a page of one request can be read for so many new tokens."""
        page, shape = self.page_tokens, self.shape
        page_bytes = page // shape.dcp_size * sum(shape.chunk_bytes().values())
        held_bytes = self.held_bytes(new_tokens, page, _num_plans([page], page))
        return self.most_tokens >= page and held_bytes + page_bytes <= self.workspace_bytes


def least_workspace_mb(budget: ChunkBudget, new_tokens: int) -> int:
    """A workspace, in MiB, that fits so many new tokens where one MiB less does not."""
    low, high = 0, 1 << 30
    while high - low > 1:
        middle = (low + high) // 2
        fits = replace(budget, workspace_bytes=middle * MIB).fits(new_tokens)
        low, high = (low, middle) if fits else (middle, high)
    return high


def _num_plans(prefix_lens: Sequence[int], most_tokens: int) -> int:
    """Distinct chunks of a batch, about: full ones of a request, and those at its ends.

    As many as there are chunks where requests are short, which may be half as large as the largest.
    """
    num_requests = sum(1 for prefix_len in prefix_lens if prefix_len)
    num_chunks = 2 * -(-sum(prefix_lens) // most_tokens)
    return min(2 * num_requests, num_chunks) + 1


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
