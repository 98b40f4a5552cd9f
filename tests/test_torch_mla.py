"""The CPU attention backend: plain attention, ragged segments, stripes that merge exactly."""

import math
from types import SimpleNamespace

import pytest
import torch
from simulated_ranks import as_rank
from support import assert_close

from sglang_dcp.kernels.lse_merge import merge_partials_ref

pytestmark = pytest.mark.usefixtures("plugin")

SCALE, NOPE, ROPE, HEADS = 0.4, 12, 4, 4


def plain_attention(q, k, v, scale, visible=None):
    """float64, one query and one head at a time; no visible key gives 0 and -inf."""
    o = torch.zeros(*q.shape[:2], v.shape[-1], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for t in range(q.shape[0]):
        num_keys = k.shape[0] if visible is None else visible[t]
        for h in range(q.shape[1] if num_keys else 0):
            head = h if k.shape[1] > 1 else 0
            scores = k[:num_keys, head].double() @ q[t, h].double() * scale
            o[t, h] = scores.softmax(0) @ v[:num_keys, head].double()
            lse[t, h] = scores.logsumexp(0)
    return o, lse


def qkv(num_queries, num_keys, kv_heads, dtype=torch.float32):
    q = torch.randn(num_queries, HEADS, NOPE + ROPE) * 2
    k = torch.randn(num_keys, kv_heads, NOPE + ROPE)
    return q.to(dtype), k.to(dtype), torch.randn(num_keys, kv_heads, NOPE).to(dtype)


@pytest.mark.parametrize("kv_heads", [1, HEADS])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "causal"),
    [(1, 1, True), (5, 5, True), (3, 9, True), (0, 3, True), (3, 9, False), (4, 0, False)],
)
def test_attend(plugin, kv_heads, num_queries, num_keys, causal):
    from sglang_dcp.attention.torch_mla import attend

    q, k, v = qkv(num_queries, num_keys, kv_heads)
    offset = num_keys - num_queries
    visible = [t + offset + 1 for t in range(num_queries)] if causal else None
    want, want_lse = plain_attention(q, k, v, SCALE, visible)
    o, lse = attend(q, k, v, SCALE, offset if causal else None)
    assert o.dtype == lse.dtype == torch.float32
    assert_close(o, want)
    assert_close(lse, want_lse)


def test_attend_computes_in_float32(plugin):
    """Half inputs, float32 results: LSEs of stripes must not be rounded before the merge."""
    from sglang_dcp.attention.torch_mla import attend

    q, k, v = qkv(3, 40, 1, torch.bfloat16)
    o, lse = attend(q, k, v, SCALE)
    want, want_lse = plain_attention(q, k, v, SCALE)
    assert_close(o, want)
    assert_close(lse, want_lse)


@pytest.mark.parametrize("causal", [False, True])
def test_attend_segments(plugin, causal):
    """Requests of all lengths one after another, padding rows at the end."""
    from sglang_dcp.attention.torch_mla import attend_segments

    q_lens = [1, 3, 0, 2, 1]
    kv_lens = [1, 7, 0, 2, 4] if causal else [4, 0, 3, 5, 1]  # a chunk may hold no key
    q, k, v = qkv(sum(q_lens) + 2, sum(kv_lens), 1)
    o, lse = attend_segments(q, k, v, q_lens, kv_lens, SCALE, causal)
    q_at = kv_at = 0
    for q_len, kv_len in zip(q_lens, kv_lens, strict=True):
        rows, cols = slice(q_at, q_at + q_len), slice(kv_at, kv_at + kv_len)
        visible = [t + kv_len - q_len + 1 for t in range(q_len)] if causal else None
        want, want_lse = plain_attention(q[rows], k[cols], v[cols], SCALE, visible)
        assert_close(o[rows], want)
        assert_close(lse[rows], want_lse)
        q_at, kv_at = q_at + q_len, kv_at + kv_len
    assert o.shape == (sum(q_lens) + 2, HEADS, NOPE)
    assert o[q_at:].eq(0).all()
    assert lse[q_at:].eq(-math.inf).all()
    assert not o.isnan().any()


class Cache:
    """Requests in one latent pool with widened pages; any rank's backend over its stripe."""

    def __init__(self, lens, dcp_size, page_size=1):
        wide = page_size * dcp_size
        self.lens, self.dcp_size = lens, dcp_size
        pages_each = -(-max(lens) // wide) + 1
        pages = torch.randperm(len(lens) * pages_each).view(len(lens), pages_each) + 1
        position = torch.arange(max(lens))
        self.slots = pages[:, position // wide] * wide + position % wide
        self.rows = torch.randn((len(lens) * pages_each + 1) * wide, 1, NOPE + ROPE)
        self.layer = SimpleNamespace(
            layer_id=0, v_head_dim=NOPE, head_dim=NOPE + ROPE, scaling=SCALE, tp_q_head_num=HEADS
        )

    def backend(self, cls, rows):
        pool = SimpleNamespace(get_key_buffer=lambda layer_id: rows)
        table = SimpleNamespace(req_to_token=self.slots)
        return cls(SimpleNamespace(device="cpu", req_to_token_pool=table, token_to_kv_pool=pool))

    def batch(self):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        seq_lens = torch.tensor(self.lens)
        requests = torch.arange(len(self.lens))
        return SimpleNamespace(
            forward_mode=ForwardMode.DECODE, seq_lens=seq_lens, req_pool_indices=requests
        )

    def attend_plain(self, q):
        """q [B, H, 16] -> (o, lse) by the reference, over whole requests."""
        results = []
        for b, length in enumerate(self.lens):
            latent = self.rows[self.slots[b, :length]]
            results.append(plain_attention(q[b : b + 1], latent, latent[..., :NOPE], SCALE))
        o, lse = zip(*results, strict=True)
        return torch.cat(o), torch.cat(lse)

    def attend_stripes(self, q):
        """(o, lse, local lengths) of every rank's DcpTorchMLABackend."""
        from sglang_dcp.attention.torch_mla import DcpTorchMLABackend

        states = []
        for rank in range(self.dcp_size):
            with as_rank(rank, self.dcp_size):
                backend = self.backend(DcpTorchMLABackend, self.rows[rank :: self.dcp_size])
                backend.init_forward_metadata(self.batch())
                states.append(backend.attend_stripe(q, self.layer))
                local_lens = backend.local_lens
        o, lse = (torch.stack(t) for t in zip(*states, strict=True))
        return o, lse, local_lens


LENS = [1, 2, 7, 33, 64]


@pytest.mark.parametrize(("page_size", "dcp_size"), [(1, 2), (1, 8), (4, 4)])
def test_stripes_merge_to_unstriped_attention(plugin, page_size, dcp_size):
    cache = Cache(LENS, dcp_size, page_size)
    q = torch.randn(len(LENS), HEADS, NOPE + ROPE) * 2
    o, lse, local_lens = cache.attend_stripes(q)
    want, want_lse = cache.attend_plain(q)
    brute = [[sum(p % dcp_size == r for p in range(n)) for n in LENS] for r in range(dcp_size)]
    assert local_lens.tolist() == brute
    # empty rows come back as the worst that a GPU kernel returns for them
    assert torch.equal(lse.eq(math.inf).all(-1), local_lens == 0)
    assert o[local_lens == 0].isnan().all()
    merged_lse = torch.full((len(LENS), HEADS), float("nan"))
    merged = merge_partials_ref(o, lse, local_lens, "e", merged_lse=merged_lse)
    assert_close(merged, want)
    assert_close(merged_lse, want_lse)
    # without weights it is another answer: the ranks' shares matter
    assert (o.double().mean(0) - want)[LENS.index(33)].abs().max() > 1e-3


def test_baseline_is_the_same_attention(plugin):
    """TorchMLABackend, which serves the baseline, over the pool as one piece."""
    from sglang_dcp.attention.torch_mla import TorchMLABackend

    cache = Cache(LENS, 1)
    backend = cache.backend(TorchMLABackend, cache.rows)
    backend.init_forward_metadata(cache.batch())
    q = torch.randn(len(LENS), HEADS, NOPE + ROPE) * 2
    nope, rope = q.split([NOPE, ROPE], dim=-1)
    got = backend.forward_decode(
        nope, None, None, cache.layer, cache.batch(), q_rope=rope, k_rope=torch.empty(0)
    )
    assert_close(got.view(len(LENS), HEADS, NOPE), cache.attend_plain(q)[0])


def test_a_slot_off_its_stripe_is_an_error(plugin):
    """Pages that are no multiple of c break the owner rule; attention must not go on."""
    from sglang_dcp.attention.torch_mla import DcpTorchMLABackend

    cache = Cache([6], 2)
    cache.slots[0, 3] += 1
    with as_rank(1, 2), pytest.raises(AssertionError, match="must equal p % c"):
        cache.backend(DcpTorchMLABackend, cache.rows).init_forward_metadata(cache.batch())


def extend_batch(prefix_len):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        extend_prefix_lens_cpu=[prefix_len],
        extend_seq_lens_cpu=[1],
    )


def test_absorbed_prefill_is_refused(plugin):
    """Unless it is pass-Q: over a stripe it would see 1/c of the prefix and say nothing."""
    from sglang_dcp.attention.torch_mla import DcpTorchMLABackend

    backend = object.__new__(DcpTorchMLABackend)
    backend.token_to_kv_pool = SimpleNamespace(kv_lora_rank=NOPE)
    layer = SimpleNamespace(v_head_dim=NOPE)
    with as_rank(0, 2), pytest.raises(RuntimeError, match="absorbed prefill"):
        backend.forward_extend(None, None, None, layer, extend_batch(3))
