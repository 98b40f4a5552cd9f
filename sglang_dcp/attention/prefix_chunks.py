"""Pass-KV: new tokens on a striped prefix, which comes to every rank chunk by chunk.

The query stays and the latent rows move (arXiv 2411.01783, seed 2), 1.1 KB a token where expanded
K and V of own heads would be tens of KB:

    fresh   attend to the new tokens, causally       own heads, in upstream's code
    read    gather a chunk's rows in token order     prefix_reader.py, the next chunk's meanwhile
    expand  K and V of own heads                     upstream's kv_b_proj, kernels/key_concat.py
    attend  all new tokens to the chunk, no mask     upstream's backend
    merge   chunk into fresh, exactly, in place      kernels/state_merge.py

Every tensor of a chunk is gone before the next one is expanded; `workspace.ReadShape` counts what
lives at once. Chunks and plans are of the batch, made once (`hooks/forward_mha.py`).

T = new tokens of the batch, S = prefix tokens of a chunk, c = dcp_size.
"""

from typing import Any

import torch

from sglang_dcp.kernels.key_concat import concat_keys
from sglang_dcp.kernels.lse_merge import LseBase
from sglang_dcp.kernels.state_merge import merge_state_into


def attend_prefix_chunks(
    attn: Any,
    pool: Any,
    q: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lse_base: LseBase,
    forward_batch: Any,
) -> torch.Tensor:
    """Merge attention over all prefixes into `out`, the attention to the new tokens.

    Args:
        attn: SGLang's DeepseekV2AttentionMLA, for kv_b_proj and the backend.
        pool: the striped pool.
        q: [T, H/c, 192] queries of this rank's heads.
        out: [T, H/c, 128] attention to the new tokens, changed in place.
        lse: [T, H/c] float32 of it, base lse_base, -inf for a row that saw no key; changed too.
        lse_base: of `lse` and of what the backend returns for a chunk, where -inf or, in base 2,
            -5e4 stand for a request without tokens in it: either weighs exactly 0.
        forward_batch: SGLang's ForwardBatch with the chunks of this batch.

    Returns:
        out.
    """
    nope, v = attn.qk_nope_head_dim, attn.v_head_dim
    for index in range(forward_batch.num_prefix_chunks):
        forward_batch.set_prefix_chunk_idx(index)
        latent, k_rope = pool.read_prefix_chunk(attn.attn_mha.layer_id, forward_batch, q.dtype)
        kv = attn.kv_b_proj(latent)[0].view(-1, attn.num_local_heads, nope + v)
        del latent
        values = kv[..., nope:]
        keys = concat_keys(kv[..., :nope], k_rope)
        part, part_lse = attn.attn_mha(q, keys, values, forward_batch, save_kv_cache=False)
        del kv, values, keys, k_rope
        merge_state_into(out, lse, lse_base, part, part_lse, lse_base, update_lse=True)
        del part, part_lse
    return out
