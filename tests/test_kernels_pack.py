"""Wire packing of partials and the query pack: exact copies, checked element by element."""

import pytest
import torch
from support import assert_close, attention_ref, make_qkv, stripe_states

from sglang_dcp.kernels.lse_merge import merge_partials
from sglang_dcp.kernels.pack import (
    pack_partials,
    pack_partials_ref,
    wire_block_bytes,
    wire_views,
)
from sglang_dcp.kernels.pack_q import pack_q, pack_q_ref

PACKS = {"kernel": pack_partials, "ref": pack_partials_ref}
PACK_QS = {"kernel": pack_q, "ref": pack_q_ref}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("impl", PACKS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_ranks", "num_heads"), [(1, 3), (2, 6), (4, 12), (3, 3)])
def test_pack_layout(kernel_device, impl, dtype, num_ranks, num_heads):
    num_tokens, dim = 3, 22
    local_heads = num_heads // num_ranks
    o = torch.randn(num_heads, num_tokens, dim, device=kernel_device).to(dtype).transpose(0, 1)
    lse = torch.randn(num_tokens, num_heads, 1, device=kernel_device)[..., 0]
    o[0, 0], lse[1] = float("nan"), float("inf")  # garbage travels unchanged
    size = wire_block_bytes(num_tokens, local_heads, dim, dtype)
    assert size % 16 == 0
    send = torch.full((num_ranks, size), 0xA5, dtype=torch.uint8, device=kernel_device)
    PACKS[impl](o, lse, send)
    for n in range(num_ranks):
        heads = slice(n * local_heads, (n + 1) * local_heads)
        want = [o[:, heads].contiguous(), lse[:, heads].contiguous()]
        flat = torch.cat([t.flatten().view(torch.uint8) for t in want])
        assert torch.equal(send[n, : len(flat)], flat)
        assert send[n, len(flat) :].eq(0xA5).all()  # only the padding is left over
        assert size - len(flat) < 16


@pytest.mark.parametrize("dtype", DTYPES)
def test_wire_views_share_storage_and_feed_the_merge(kernel_device, dtype):
    """Pack on every rank, exchange by hand, merge from the views: unsharded attention."""
    lens, num_ranks, num_heads, dim = [1, 9], 4, 8, 24
    qkv = make_qkv(lens, num_heads, dim)
    o, lse, local = stripe_states(*qkv, lens, num_ranks, "e")
    want, _ = attention_ref(*qkv, lens)
    o, lse, local = (
        o.to(kernel_device, dtype),
        lse.float().to(kernel_device),
        local.to(kernel_device),
    )
    size = wire_block_bytes(2, 2, dim, dtype)
    sends = torch.empty(num_ranks, num_ranks, size, dtype=torch.uint8, device=kernel_device)
    for rank in range(num_ranks):
        pack_partials(o[rank], lse[rank], sends[rank])
    for owner in range(num_ranks):
        recv = sends[:, owner].contiguous()
        o_view, lse_view = wire_views(recv, num_ranks, 2, 2, dim, dtype)
        assert o_view.data_ptr() == recv.data_ptr()
        assert lse_view.untyped_storage().data_ptr() == recv.data_ptr()
        merged = merge_partials(o_view, lse_view, local, "e")
        assert_close(merged, want[:, 2 * owner : 2 * owner + 2])


@pytest.mark.parametrize("impl", PACK_QS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "dim", "rope"), [(1, 512, 64), (5, 24, 10)])
def test_pack_q(kernel_device, impl, dtype, num_tokens, dim, rope):
    heads = 3
    # upstream's strides: nope is a transposed bmm result, pe a slice of the q projection
    nope = torch.randn(heads, num_tokens, dim, device=kernel_device).to(dtype).transpose(0, 1)
    pe = torch.randn(num_tokens, heads, 128 + rope, device=kernel_device).to(dtype)[..., 128:]
    out = torch.full((heads, num_tokens, dim + rope), float("nan"), dtype=dtype, device=nope.device)
    assert PACK_QS[impl](nope, pe, out).data_ptr() == out.data_ptr()
    for h in range(heads):
        assert torch.equal(out[h], torch.cat([nope[:, h], pe[:, h]], dim=1))


def test_empty_batches_launch_nothing(kernel_device):
    empty = torch.empty(0, 4, 8, device=kernel_device)
    pack_partials(empty, empty[..., 0], torch.empty(2, 0, dtype=torch.uint8, device=kernel_device))
    out = torch.empty(4, 0, 16, device=kernel_device)
    assert pack_q(empty, empty, out).shape == (4, 0, 16)
    lens = torch.empty(2, 0, dtype=torch.int32, device=kernel_device)
    merged = merge_partials(empty.expand(2, 0, 4, 8), torch.empty(2, 0, 4), lens, "e")
    assert merged.shape == (0, 4, 8)
