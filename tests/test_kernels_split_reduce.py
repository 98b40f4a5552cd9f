"""Split-KV reduction: kernel and reference against attention that was never split."""

import math

import pytest
import torch
from support import assert_close, attention_ref, make_qkv

from sglang_dcp.kernels.split_reduce import MIN_BLOCK_KV, reduce_splits, reduce_splits_ref

REDUCES = {"kernel": reduce_splits, "ref": reduce_splits_ref}
HEADS, DIM = 3, 24  # not a power of two
LENS = [1, 31, 32, 33, 100, 257]  # at, below and above the smallest split
SPLITS = [1, 8, 8, 2, 3, 8]


def splits_of(length, num_splits):
    """Spans of the splits that are not empty, as SGLang's first stage cuts them."""
    split_len = math.ceil(math.ceil(length / num_splits) / MIN_BLOCK_KV) * MIN_BLOCK_KV
    return [slice(at, min(at + split_len, length)) for at in range(0, length, split_len)]


def split_case(device, poison=float("nan")):
    """What the first stage leaves: (partials, lse, indptr, splits), and the unsplit attention.

    Buffers are wider than the batch and hold `poison` wherever this batch wrote nothing.
    """
    q, k, v = make_qkv(LENS, HEADS, DIM)
    shape = (len(LENS) + 2, HEADS, max(SPLITS) + 1)
    partials, lse = torch.full((*shape, DIM), poison), torch.full(shape, poison)
    for b, (length, num_splits) in enumerate(zip(LENS, SPLITS, strict=True)):
        for index, span in enumerate(splits_of(length, num_splits)):
            one = q[b : b + 1], k[b : b + 1, :length], v[b : b + 1, :length]
            o, one_lse = attention_ref(*one, [length], positions=span)
            partials[b, :, index], lse[b, :, index] = o[0].float(), one_lse[0].float()
    indptr = torch.tensor([0, *LENS]).cumsum(0).int()
    splits = torch.tensor([*SPLITS, 99, 99], dtype=torch.int32)
    inputs = [t.to(device) for t in (partials, lse, indptr, splits)]
    return inputs, attention_ref(q, k, v, LENS)


@pytest.mark.parametrize("impl", REDUCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduced_splits_are_unsplit_attention(kernel_device, impl, dtype):
    inputs, (want, want_lse) = split_case(kernel_device)
    o, lse = REDUCES[impl](*inputs, num_tokens=len(LENS), dtype=dtype)
    assert o.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close(o, want, dtype)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("impl", REDUCES)
@pytest.mark.parametrize("poison", [1e30, -1e30, float("inf"), 3.0])
def test_stale_splits_change_no_bit(kernel_device, impl, poison):
    """A replayed graph keeps an earlier batch's values in the splits that it does not use."""
    torch.manual_seed(1)
    clean, _ = split_case(kernel_device)
    torch.manual_seed(1)
    stale, _ = split_case(kernel_device, poison)
    reduce = REDUCES[impl]
    for got, want in zip(
        reduce(*stale, num_tokens=len(LENS), dtype=torch.float32),
        reduce(*clean, num_tokens=len(LENS), dtype=torch.float32),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("impl", REDUCES)
def test_reading_stale_splits_would_be_seen(kernel_device, impl):
    """The test above can fail: with lengths that reach one more split, garbage comes in."""
    (partials, lse, _, splits), (want, _) = split_case(kernel_device, 3.0)
    longer = torch.tensor([0, *(n + MIN_BLOCK_KV for n in LENS)]).cumsum(0).int()
    o, _ = REDUCES[impl](
        partials, lse, longer.to(kernel_device), splits, num_tokens=len(LENS), dtype=torch.float32
    )
    assert (o.double().cpu() - want).abs().max() > 0.1


@pytest.mark.parametrize("impl", REDUCES)
def test_extreme_lse_differences_stay_finite(kernel_device, impl):
    partials = torch.randn(1, HEADS, 3, DIM, device=kernel_device)
    lse = torch.tensor([-3e4, 3e4, 0.0], device=kernel_device).expand(1, HEADS, 3).contiguous()
    indptr = torch.tensor([0, 3 * MIN_BLOCK_KV], dtype=torch.int32, device=kernel_device)
    splits = torch.tensor([3], dtype=torch.int32, device=kernel_device)
    o, total = REDUCES[impl](partials, lse, indptr, splits, num_tokens=1, dtype=torch.float32)
    torch.testing.assert_close(o[0], partials[0, :, 1], atol=0, rtol=1e-6)
    torch.testing.assert_close(total, torch.full_like(total, 3e4))


def test_kernel_equals_reference(kernel_device):
    inputs, _ = split_case(kernel_device)
    got, want = (f(*inputs, num_tokens=4, dtype=torch.float32) for f in REDUCES.values())
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_first_stage_of_sglang_fits(kernel_device):
    """Upstream's own kernel cuts the splits: its rule and ours must be one rule."""
    from sglang.srt.layers.attention.triton_ops import decode_attention

    assert decode_attention._MIN_BLOCK_KV == MIN_BLOCK_KV
    lens, splits, max_splits, heads, latent, rope = [1, 40, 150], [4, 2, 3], 4, 2, 512, 64
    q = torch.randn(len(lens), heads, latent + rope, device=kernel_device)
    pool = torch.randn(sum(lens) + 9, 1, latent + rope, device=kernel_device)
    rows = torch.randperm(pool.shape[0], device=kernel_device)[: sum(lens)]
    indptr = torch.tensor([0, *lens], device=kernel_device).cumsum(0).int()
    num_splits = torch.tensor(splits, dtype=torch.int32, device=kernel_device)
    nan = float("nan")
    partials = torch.full((len(lens), heads, max_splits, latent), nan, device=kernel_device)
    partial_lse = torch.full((len(lens), heads, max_splits), nan, device=kernel_device)
    scale = 0.05
    decode_attention._decode_grouped_att_m_fwd(
        q,
        pool,
        pool[..., :latent],
        partials,
        partial_lse,
        indptr,
        rows,
        num_splits,
        max_splits,
        scale,
        0.0,
        has_mla=True,
    )
    o, lse = reduce_splits(partials, partial_lse, indptr, num_splits, len(lens), torch.float32)
    for b in range(len(lens)):
        keys = pool[rows[indptr[b] : indptr[b + 1]], 0].double()
        scores = q[b].double() @ keys.T * scale
        torch.testing.assert_close(lse[b].double(), scores.logsumexp(-1), atol=2e-3, rtol=2e-3)
        want = scores.softmax(-1) @ keys[:, :latent]
        torch.testing.assert_close(o[b].double(), want, atol=2e-3, rtol=2e-3)
