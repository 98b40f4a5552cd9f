"""CUDA-graph capture of the launchers: static buffers, replay with other lengths, no recompile."""

import pytest
import torch
import triton
from support import stripe_states

from sglang_dcp.kernels import kv_index
from sglang_dcp.kernels.lse_merge import merge_partials, merge_partials_ref

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def test_replay_follows_the_lengths_in_the_static_buffers():
    size, rank, heads, dim = 4, 1, 3, 24
    device = torch.device("cuda")
    table = torch.arange(8 * 64, dtype=torch.int32, device=device).view(8, 64)
    reqs = torch.tensor([5, 2, 0], device=device)
    seq_lens = torch.ones(3, dtype=torch.int64, device=device)  # as at capture: rank 1 is empty
    local_lens = torch.zeros(size, 3, dtype=torch.int32, device=device)
    kernel_lens = torch.zeros(3, dtype=torch.int32, device=device)
    indptr = torch.tensor([0, 16, 32, 48], dtype=torch.int32, device=device)
    indices = torch.zeros(48, dtype=torch.int32, device=device)
    q = torch.randn(3, heads, 16, dtype=torch.float64)
    k, v = torch.randn(3, 64, 16, dtype=torch.float64), torch.randn(3, 64, dim).double()
    o = torch.zeros(size, 3, heads, dim, device=device)
    lse = torch.zeros(size, 3, heads, device=device)
    merged = torch.zeros(3, heads, dim, device=device)

    def step():
        kv_index.fill_local_lens(seq_lens, local_lens, kernel_lens, rank, size)
        kv_index.build_local_kv_indices(table, reqs, seq_lens, indptr, indices, rank, size)
        merge_partials(o, lse, local_lens, "2", merged)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([64, 1, 7], [2, 33, 5]):
        seq_lens.copy_(torch.tensor(lens))
        states = stripe_states(q, k, v, lens, size, "2")
        o.copy_(states[0])
        lse.copy_(states[1])
        merged.fill_(float("nan"))
        graph.replay()
        assert torch.equal(local_lens.cpu(), states[2])
        assert kernel_lens.tolist() == [max(n, 1) for n in states[2][rank].tolist()]
        want = merge_partials_ref(o, lse, local_lens, "2")
        torch.testing.assert_close(merged, want, atol=1e-6, rtol=1e-6)
        first = table[5, rank : lens[0] : size] // size
        assert torch.equal(indices[: len(first)], first)


def test_batch_sizes_share_one_compilation(monkeypatch):
    """Batch-dependent strides are not specialized: traffic must never trigger a compilation."""
    compiled = []
    monkeypatch.setattr(
        triton.knobs.runtime, "jit_post_compile_hook", lambda **info: compiled.append(info["repr"])
    )
    for batch in (1, 2, 3, 16, 17):
        storage = torch.randn(4, 12, batch, 512, dtype=torch.bfloat16, device="cuda")
        lse = torch.randn(4, batch, 12, device="cuda")
        lens = torch.ones(4, batch, dtype=torch.int32, device="cuda")
        merge_partials(storage.transpose(1, 2), lse, lens, "e")
    assert len(compiled) <= 1, compiled
