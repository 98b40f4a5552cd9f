"""--dcp-replicate-q-proj: weights of all heads on every rank, servers that gather no queries."""

from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from serving import Farm, Spec

from sglang_dcp import state
from sglang_dcp.attention.all_heads import ATTRIBUTE, AllHeads, replicate, replicated_bytes
from sglang_dcp.attention.decode import decode_over_stripes
from sglang_dcp.comm import TorchTransport
from sglang_dcp.testing.compare import compare_results

HEADS, NOPE, ROPE, LATENT, WIDTH = 3, 8, 4, 16, 10


class Attention(torch.nn.Module):
    """What the projections of upstream's attention module look like once they are loaded."""

    def __init__(self, q_lora_rank=WIDTH, dtype=torch.float32):
        super().__init__()
        self.q_lora_rank, self.num_local_heads, self.scaling = q_lora_rank, HEADS, 0.125
        projection = torch.nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False, dtype=dtype)
        setattr(self, "q_proj" if q_lora_rank is None else "q_b_proj", projection)
        self.w_kc = torch.randn(HEADS, LATENT, NOPE).to(dtype).transpose(1, 2)

    @property
    def projection(self):
        return self.q_proj if self.q_lora_rank is None else self.q_b_proj


class Model(torch.nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Module() for _ in range(2))
        for layer in self.layers:
            layer.self_attn = Attention(**kwargs)


def absorbed(attn, x):
    """Upstream's steps from x [B, WIDTH] to q_nope [B, heads, LATENT] and q_pe, with `attn`."""
    projection = attn.q_proj if attn.q_lora_rank is None else attn.q_b_proj
    q = projection(x)
    q = q[0] if isinstance(q, tuple) else q
    q_nope, q_pe = q.view(-1, attn.num_local_heads, NOPE + ROPE).split([NOPE, ROPE], -1)
    return torch.bmm(q_nope.transpose(0, 1), attn.w_kc).transpose(0, 1), q_pe


def replicate_on_ranks(rank, size, q_lora_rank, dtype, seed):
    transport = TorchTransport()
    torch.manual_seed(seed)
    x = torch.randn(5, WIDTH).to(dtype)
    models = [Model(q_lora_rank=q_lora_rank, dtype=dtype) for _ in range(size)]  # of every rank
    own, addresses = models[rank], []
    for reload in range(2):
        if reload:  # in place, as loaders do; the ranks' references change as well
            for model in models:
                for layer in model.layers:
                    layer.self_attn.projection.weight.data.mul_(1.5)
                    layer.self_attn.w_kc.add_(0.25)
        want = [[absorbed(model.layers[i].self_attn, x) for model in models] for i in range(2)]
        replicate(own.layers, transport)
        for layer, ranks_q in zip(own.layers, want, strict=True):
            all_heads = getattr(layer.self_attn, ATTRIBUTE)
            assert all_heads.num_local_heads == size * HEADS
            assert all_heads.scaling == 0.125  # the rest is the module's
            for got, parts in zip(absorbed(all_heads, x), zip(*ranks_q, strict=True), strict=True):
                torch.testing.assert_close(got, torch.cat(parts, 1))
            for got, part in zip(absorbed(layer.self_attn, x), ranks_q[rank], strict=True):
                torch.testing.assert_close(got, part)
            # the own weights are stored once
            own_rows = all_heads._q_weight.chunk(size)[rank]
            assert layer.self_attn.projection.weight.data_ptr() == own_rows.data_ptr()
        addresses.append([getattr(k.self_attn, ATTRIBUTE).w_kc.data_ptr() for k in own.layers])
    assert addresses[0] == addresses[1]  # what captured graphs read
    per_layer = HEADS * (NOPE + ROPE) * WIDTH + HEADS * NOPE * LATENT
    assert replicated_bytes(own) == (size - 1) * 2 * per_layer * dtype.itemsize
    others = [model for model in models if model is not own]
    assert replicated_bytes(others[0]) == 0
    return True


@pytest.mark.parametrize(("q_lora_rank", "dtype"), [(WIDTH, torch.float32), (None, torch.bfloat16)])
def test_all_heads_compute_what_their_ranks_do(fresh_seed, q_lora_rank, dtype):
    assert run_ranks(2, replicate_on_ranks, q_lora_rank, dtype, fresh_seed) == [True] * 2


@pytest.mark.parametrize("part", ["weight", "w_kc"])
def test_other_weights_are_refused(part):
    attn = Attention()
    if part == "weight":
        del attn.q_b_proj
        attn.q_b_proj = SimpleNamespace(qweight=torch.zeros(1))
    else:
        attn.w_kc = attn.w_kc.to(torch.float8_e4m3fn)
    with pytest.raises(
        ValueError, match="q_b_proj and w_kc .*bfloat16 and float32.*Drop --dcp-rep"
    ):
        AllHeads(attn, SimpleNamespace(size=2, rank=0))


@pytest.mark.parametrize("decode", [True, False])
def test_only_decode_sees_all_heads(decode):
    from sglang_dcp.hooks.forward_mla import around_forward_absorb_prepare

    attn = SimpleNamespace(**{ATTRIBUTE: "all heads"})
    mode = SimpleNamespace(is_decode_or_idle=lambda: decode)
    batch = SimpleNamespace(forward_mode=mode)
    got = around_forward_absorb_prepare(
        lambda *args, **kwargs: (args, kwargs), attn, "positions", "hidden", batch, 1, extra=2
    )
    seen = "all heads" if decode else attn
    assert got == ((seen, "positions", "hidden", batch, 1), {"extra": 2})


@pytest.mark.parametrize("num_heads", [2, 4])
def test_queries_of_all_heads_are_not_gathered(monkeypatch, num_heads):
    q_nope, q_pe = torch.randn(3, num_heads, 8), torch.randn(3, num_heads, 4)
    merged = torch.randn(3, 2, 8)
    calls = []
    comm = SimpleNamespace(
        num_heads=4,
        gather_q=lambda nope, pe: calls.append("gather_q")
        or torch.cat([nope, pe], -1).repeat(1, 2, 1),
        exchange_merge=lambda *args: merged,
    )

    def attend_stripe(q, layer):
        assert q.shape == (3, 4, 12)
        assert torch.equal(q[:, :num_heads], torch.cat([q_nope, q_pe], -1))
        assert q.is_contiguous()
        return q, q

    backend = SimpleNamespace(attend_stripe=attend_stripe, lse_base="e", local_lens=None)
    monkeypatch.setattr(state, "get_state", lambda: SimpleNamespace(comm=comm))
    got = decode_over_stripes(backend, q_nope, q_pe, None)
    assert torch.equal(got, merged.flatten(1))
    assert calls == (["gather_q"] if num_heads == 2 else [])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "v3"])
def test_a_server_gathers_no_queries(farm: Farm, model):
    spec = Spec(model, dcp_size=2, args=("--dcp-replicate-q-proj",))
    served, want = farm.outcome(spec), farm.baseline(model)
    found = compare_results(
        [result for name in served.results for result in want.results[name]],
        [result for results in served.results.values() for result in results],
    )
    assert found.differences == ()
    assert found.tokens_equal
    assert found.max_logprob_diff < 1e-4
    assert served.counts("gather_q") == [0, 0]
    assert served.counts("replicated_q") == served.counts("exchange_merge")
    assert min(served.counts("exchange_merge")) > 0
    assert "replicated Q weights" in served.log
    assert served.flushed
