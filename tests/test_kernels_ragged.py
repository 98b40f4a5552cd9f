"""Ragged attention with an LSE, interpreted or on a GPU, against plain attention in float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import assert_close

from sglang_dcp.kernels.ragged_attention import make_spans, ragged_attention

SCALE = 0.35


def plain(q, k, v, q_lens, kv_lens, causal, scale=SCALE):
    """float64 o [T, H, Dv], lse [T, H], one query and head at a time; 0 and -inf without keys."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double().cpu(), k.double().cpu(), v.double().cpu()
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    q_at = kv_at = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        for t in range(q_len):
            num = t + 1 + kv_len - q_len if causal else kv_len
            for h in range(q.shape[1] if num else 0):
                logits = k[kv_at : kv_at + num, h // group] @ q[q_at + t, h] * scale
                o[q_at + t, h] = logits.softmax(0) @ v[kv_at : kv_at + num, h // group]
                lse[q_at + t, h] = logits.logsumexp(0)
        q_at, kv_at = q_at + q_len, kv_at + kv_len
    return o, lse


class Inputs:
    """Queries, heads first as absorbed ones are, and keys whose values are part of one tensor."""

    def __init__(self, q_lens, kv_lens, heads, dims, padding, device, dtype=torch.float32):
        nope, pe, dv = dims
        shape = heads[0], sum(q_lens) + padding, nope + pe
        spread = 4 ** torch.rand(heads[0], 1, 1)
        self.q = (torch.randn(shape) * spread).to(device, dtype).transpose(0, 1)
        kv = torch.randn(sum(kv_lens), heads[1], nope + pe + dv).to(device, dtype)
        self.k, self.v = kv[..., : nope + pe], kv[..., nope + pe :]
        self.lens, self.nope, self.device, self.scale = (q_lens, kv_lens), nope, device, SCALE

    def run(self, causal):
        queries, keys = (make_spans(lens, self.device) for lens in self.lens)
        q_nope, q_pe = self.q[..., : self.nope], self.q[..., self.nope :]
        of_requests = queries, keys.indptr, self.scale, causal
        return ragged_attention(q_nope, q_pe, self.k, self.v, *of_requests)

    def check(self, causal, dtype=torch.float32):
        o, lse = self.run(causal)
        assert o.is_contiguous()
        assert lse.is_contiguous()
        assert lse.dtype == torch.float32
        want, want_lse = plain(self.q, self.k, self.v, *self.lens, causal, self.scale)
        assert_close(o, want, dtype)
        assert_close(lse, want_lse, dtype)  # -inf equals -inf
        return o, lse


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    lens=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 70)), min_size=1, max_size=4),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 1), (6, 2)]),
    dims=st.sampled_from([(12, 4, 5), (16, 16, 16), (20, 8, 32)]),
    padding=st.integers(0, 2),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example([(33, 0), (2, 65), (40, 1)], (4, 1), (12, 4, 5), 2, False, 0)  # none, and one key
@example([(40, 40), (1, 1), (33, 70)], (6, 2), (16, 16, 16), 1, True, 1)
def test_equals_plain_attention(kernel_device, lens, heads, dims, padding, causal, seed):
    torch.manual_seed(seed)
    q_lens, kv_lens = (list(x) for x in zip(*lens, strict=True))
    if causal:  # a new token sees at least itself
        kv_lens = [max(n, length) for n, length in zip(kv_lens, q_lens, strict=True)]
    Inputs(q_lens, kv_lens, heads, dims, padding, kernel_device).check(causal)


def test_the_tiles_of_expanded_heads(kernel_device):
    """192 and 128 wide, rows and keys of more than one tile; the interpreter has no bf16 dot."""
    lens = [5, 131, 1], [70, 133, 0]
    inputs = Inputs(*lens, (2, 2), (128, 64, 128), 0, kernel_device, torch.float16)
    inputs.check(False, torch.float16)
    assert inputs.run(False)[0].dtype == torch.float16


def test_lengths_and_scale_alone_change_what_is_launched(kernel_device):
    """The same shapes again, with a longer request or another scale."""
    inputs = Inputs([20, 20], [30, 40], (4, 1), (12, 4, 5), 0, kernel_device)
    inputs.check(False)
    inputs.lens = [40, 0], [40, 30]
    inputs.check(False)
    inputs.scale = 2 * SCALE
    inputs.check(False)


def test_the_comparison_can_fail(kernel_device):
    inputs = Inputs([7, 9], [7, 9], (4, 1), (12, 4, 5), 0, kernel_device)
    (o, lse), (other, other_lse) = inputs.check(True), inputs.check(False)
    assert (o - other).abs().max() > 1e-2
    assert (lse - other_lse).abs().max() > 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(
    ("heads", "dims", "causal"),
    [((16, 16), (128, 64, 128), False), ((48, 48), (128, 64, 128), True), ((48, 1), None, True)],
)
def test_deepseeks_widths(heads, dims, causal):
    """Expanded heads, and latent rows, whose values are their own first columns."""
    dims, device = dims or (512, 64, 512), torch.device("cuda")
    lens = ([100, 3, 70], [100, 3, 70]) if causal else ([100, 3, 70], [300, 0, 17])
    inputs = Inputs(*lens, heads, dims, 3, device, torch.bfloat16)
    if heads[1] == 1:
        inputs.v = inputs.k[..., :512]
    inputs.check(causal, torch.bfloat16)
