"""The stand-ins of CPU ranks against the Triton kernels that they replace, and against formulas."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from support import assert_close

from sglang_dcp.hooks import cpu

PAGE_SIZES = [2, 4, 8, 16, 64, 128]
POISON = -7


def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


def run_both(kernel, stand_in, grid, device, arguments, out):
    """Launch both on copies of `out`; returns what they wrote. Constants follow `out`."""
    results = []
    for launch, where in ((kernel, device), (stand_in, torch.device("cpu"))):
        before, after = arguments
        moved = [a.to(where) if isinstance(a, torch.Tensor) else a for a in before]
        written = out.clone().to(where)
        launch[grid](*moved, written, *after)
        results.append(written.cpu())
    return results


def random_batch(rng, page_size):
    """Prefix lengths, last slots on pages of their own, and shuffled free pages, many enough."""
    num_requests = rng.randint(1, 9)
    prefixes = [
        rng.choice([0, rng.randint(1, 3 * page_size), page_size * rng.randint(1, 3)])
        for _ in range(num_requests)
    ]
    used = rng.sample(range(1, 60), num_requests)
    last = [
        page * page_size + (prefix - 1) % page_size if prefix else -1
        for page, prefix in zip(used, prefixes, strict=True)
    ]
    free = torch.tensor(rng.sample(range(60, 200), 100))
    return torch.tensor(prefixes), torch.tensor(last), free


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_extend_kernel(kernel_device, fresh_seed, page_size):
    from sglang.srt.mem_cache.triton_ops.allocator import alloc_extend_kernel

    rng = random.Random(fresh_seed)
    for _ in range(12):
        prefixes, last, free = random_batch(rng, page_size)
        grow = [rng.choice([0, 1, rng.randint(1, 4 * page_size), page_size]) for _ in prefixes]
        lens = prefixes + torch.tensor(grow)
        out = torch.full((sum(grow) + 3,), POISON)
        bs = len(prefixes)
        got = run_both(
            alloc_extend_kernel,
            cpu.alloc_extend_kernel,
            (bs,),
            kernel_device,
            ([prefixes, lens, last, free], [next_power_of_2(bs), page_size]),
            out,
        )
        assert torch.equal(*got)
        assert got[1][: sum(grow)].ne(POISON).all()
        assert got[1][sum(grow) :].eq(POISON).all()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_alloc_decode_kernel(kernel_device, fresh_seed, page_size):
    from sglang.srt.mem_cache.triton_ops.allocator import alloc_decode_kernel

    rng = random.Random(fresh_seed)
    for _ in range(12):
        prefixes, last, free = random_batch(rng, page_size)
        bs = len(prefixes)
        got = run_both(
            alloc_decode_kernel,
            cpu.alloc_decode_kernel,
            (bs,),
            kernel_device,
            ([prefixes + 1, last, free], [next_power_of_2(bs), page_size]),
            torch.full((bs,), POISON),
        )
        assert torch.equal(*got)
        assert got[1].ne(POISON).all()


@pytest.mark.parametrize("name", ["extend", "decode"])
def test_too_few_free_pages_end_quietly(name):
    """The allocator launches first and compares pages afterwards: no exception may come of it."""
    lens = torch.tensor([4, 8, 12])
    last, free = torch.tensor([15, 23, 31]), torch.tensor([9, 8])
    out = torch.full((3,), POISON)
    if name == "extend":
        cpu.alloc_extend_kernel[(3,)](lens, lens + 1, last, free, out, 4, 4)
        assert out.tolist() == [36, 32, POISON]
    else:
        cpu.alloc_decode_kernel[(3,)](lens + 1, last, free, out, 4, 4)
        assert out.eq(POISON).all()


def random_table(lens):
    """req_to_token with requests in shuffled rows, and the rows."""
    num_rows = len(lens) + 4
    table = torch.randint(0, 2**30, (num_rows, max(lens) + 40), dtype=torch.int32)
    return table, torch.randperm(num_rows)[: len(lens)]


def test_create_chunked_prefix_cache_kv_indices(kernel_device):
    from sglang.srt.layers.attention.triton_ops.kv_indices import (
        create_chunked_prefix_cache_kv_indices,
    )

    for lens in ([5], [0, 600, 3], [1, 0, 0, 17]):
        table, requests = random_table(lens)
        starts = torch.randint(0, 30, (len(lens),), dtype=torch.int32)
        indptr = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
        out = torch.full((sum(lens) + 2,), POISON, dtype=torch.int32)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        got = run_both(
            create_chunked_prefix_cache_kv_indices,
            cpu.create_chunked_prefix_cache_kv_indices,
            (len(lens),),
            kernel_device,
            ([table, requests, starts, seq_lens, indptr], [table.shape[1]]),
            out,
        )
        assert torch.equal(*got)
        spans = zip(requests, starts, lens, strict=True)
        want = torch.cat([table[r, s : s + n] for r, s, n in spans])
        assert torch.equal(got[1][: sum(lens)], want)
        assert got[1][sum(lens) :].eq(POISON).all()


@pytest.mark.parametrize("with_starts", [False, True])
def test_create_flashinfer_kv_indices_triton(kernel_device, with_starts):
    from sglang.srt.layers.attention.triton_ops.kv_indices import (
        create_flashinfer_kv_indices_triton,
    )

    for lens in ([5], [1, 600, 3]):
        table, requests = random_table(lens)
        starts = torch.randint(0, 30, (len(lens),), dtype=torch.int32) if with_starts else None
        indptr = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0).int()
        got = run_both(
            create_flashinfer_kv_indices_triton,
            cpu.create_flashinfer_kv_indices_triton,
            (len(lens),),
            kernel_device,
            ([table, requests, torch.tensor(lens), indptr, starts], [table.shape[1]]),
            torch.full((sum(lens) + 2,), POISON, dtype=torch.int32),
        )
        assert torch.equal(*got)
        firsts = starts.tolist() if with_starts else [0] * len(lens)
        spans = zip(requests, firsts, lens, strict=True)
        want = torch.cat([table[r, s : s + n] for r, s, n in spans])
        assert torch.equal(got[1][: sum(lens)], want)
        assert got[1][sum(lens) :].eq(POISON).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preallocated", [False, True])
def test_merge_state_v2(dtype, preallocated):
    """Two parts of one softmax, merged, are the softmax; rows that saw no key drop out."""
    tokens, heads, dim = 6, 3, 8
    scores = torch.randn(tokens, heads, 20, dtype=torch.float64) * 3
    values = torch.randn(tokens, heads, 20, dim, dtype=torch.float64)
    scores[1, :, :7], scores[2, :, 7:], scores[3] = -math.inf, -math.inf, -math.inf

    def part(keys):
        s = scores[..., keys]
        lse = s.logsumexp(-1)
        o = (s.softmax(-1).unsqueeze(-1) * values[..., keys, :]).sum(-2)
        return o.to(dtype), lse.float()

    (v_a, s_a), (v_b, s_b) = part(slice(0, 7)), part(slice(7, None))
    assert v_a[1].isnan().all()  # 0 / 0: a multiplication by weight 0 would keep it
    want_v, want_s = part(slice(None))
    want_v[3] = 0
    given = [torch.full_like(v_a, float("nan")), torch.full_like(s_a, float("nan"))]
    v, s = cpu.merge_state_v2(v_a, s_a, v_b, s_b, *(given if preallocated else []))
    assert_close(v, want_v, dtype)
    assert_close(s, want_s)
    assert s[3].eq(-math.inf).all()
    if preallocated:
        assert v is given[0]
        assert s is given[1]
    # the base matters at these logits: the same numbers read as base 2 are another merge
    ratio = math.log(2)
    skewed, _ = cpu.merge_state_v2(v_a, s_a * ratio, v_b, s_b * ratio)
    assert (skewed[[0, 4, 5]].double() - want_v[[0, 4, 5]].double()).abs().max() > 1e-2


@pytest.mark.parametrize("offset_src", [False, True])
def test_memcpy_rows(kernel_device, offset_src):
    from sglang.srt.layers.dp_attention import memcpy_triton

    rows = torch.randn(5, 3)
    big, small = (9, 5) if not offset_src else (5, 9)
    source = rows if not offset_src else torch.randn(small, 3)
    offset, size = torch.tensor(4), torch.tensor(4)
    results = []
    for copy, where in ((memcpy_triton, kernel_device), (cpu.memcpy_rows, torch.device("cpu"))):
        target = torch.full((big, 3), float(POISON), device=where)
        copy(target, source.to(where), 0, offset.to(where), size.to(where), offset_src)
        results.append(target.cpu())
    assert torch.equal(*results)
    want = source[4:8] if offset_src else source[:4]
    assert torch.equal(results[1][:4] if offset_src else results[1][4:8], want)
    assert (results[1] == POISON).sum() == (big - 4) * 3


def test_tensor_unpinned():
    assert cpu.tensor_unpinned([1, 2], pin_memory=True, dtype=torch.int32).tolist() == [1, 2]
    assert cpu.tensor_unpinned(3.5).dtype == torch.float32


def test_experts_of_other_ranks_add_nothing(monkeypatch):
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    def silu_and_mul(x):  # upstream's class wants the arguments of a server
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    monkeypatch.setattr(fused_moe_native, "SiluAndMul", lambda: silu_and_mul)
    weights = {"w13_weight": torch.randn(2, 8, 6), "w2_weight": torch.randn(2, 6, 4)}
    layer = SimpleNamespace(num_experts=4, **weights)
    x, router = torch.randn(3, 6), torch.rand(3, 2)
    config = MoeRunnerConfig(activation="silu", apply_router_weight_on_input=False)

    def local_only(ids, router):
        top = StandardTopKOutput(router, torch.tensor(ids), torch.empty(0))
        forward = fused_moe_native.moe_forward_native
        return cpu.around_moe_forward_native(forward, layer, x, top, config)

    got = local_only([[0, -1], [-1, 1], [-1, -1]], router)
    kept = router * torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    assert_close(got, local_only([[0, 1], [0, 1], [0, 1]], kept).double())
    assert got[2].eq(0).all()
    assert got[:2].abs().min() > 0
    assert local_only([[-1, -1]] * 3, router).eq(0).all()
