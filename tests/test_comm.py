"""Communicators on gloo ranks: gather, local attention and exchange equal unsharded attention."""

import math
import os
import time
from dataclasses import dataclass

import pytest
import torch
from fake_pynccl import FakePyncclCommunicator
from ranks import run_ranks
from support import assert_close, attention_ref

from sglang_dcp.comm import (
    COMM_BACKENDS,
    Communicator,
    GroupInfo,
    PyncclTransport,
    TorchTransport,
    comm_backend_names,
    hangs_on_peer_access,
    register_comm_backend,
    resolve_auto,
)
from sglang_dcp.kernels import dispatch

DIM, ROPE = 32, 16
MAX_TOKENS = 4
TRANSPORTS = {"torch": TorchTransport, "pynccl": lambda: PyncclTransport(FakePyncclCommunicator())}


@dataclass
class Case:
    """One decode step: full queries and latent rows, float64."""

    num_heads: int
    lens: list[int]
    lse_base: str
    dtype: torch.dtype
    q: torch.Tensor
    kv: torch.Tensor
    mutation: str = ""

    def want(self) -> torch.Tensor:
        return self.reference()[0]

    def reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attention_ref(self.q, self.kv, self.kv[..., :DIM], self.lens, self.lse_base)


def make_case(num_heads, lens, lse_base="e", dtype=torch.float32, mutation=""):
    scale = 10 ** (torch.rand(len(lens), num_heads, 1) - 1)  # heads from flat to peaked
    q = (torch.randn(len(lens), num_heads, DIM + ROPE) * scale).to(dtype).double()
    kv = torch.randn(len(lens), max(lens), DIM + ROPE).to(dtype).double()
    return Case(num_heads, lens, lse_base, dtype, q, kv, mutation)


def local_q(case, rank, size):
    """Own heads with upstream's strides: nope a transposed bmm result, pe a slice."""
    local = case.num_heads // size
    q = case.q[:, rank * local : (rank + 1) * local].to(case.dtype)
    nope = q[..., :DIM].transpose(0, 1).contiguous().transpose(0, 1)
    return nope, q[..., DIM:]


def stripe_attention(case, q_all, rank, size):
    """A backend with lengths clamped to 1: an empty stripe attends to a garbage row."""
    lens = [len(range(rank, n, size)) for n in case.lens]
    stripe = case.kv[:, rank::size]
    stripe = torch.cat([stripe, torch.randn(len(lens), 1, DIM + ROPE).double() * 5], 1)
    clamped = [max(n, 1) for n in lens]
    o, lse = attention_ref(q_all.double(), stripe, stripe[..., :DIM], clamped, case.lse_base)
    if rank % 2:  # some kernels return NaN there
        for b, n in enumerate(lens):
            if n == 0:
                o[b], lse[b] = math.nan, math.nan
    heads_first = o.to(case.dtype).transpose(0, 1).contiguous().transpose(0, 1)
    return heads_first, lse.float()[..., None][..., 0]


def decode_step(comm, case, rank, size):
    q_all = comm.gather_q(*local_q(case, rank, size))
    num_tokens, q_dim = len(case.lens), DIM + ROPE
    assert q_all.shape == (num_tokens, case.num_heads, q_dim)
    assert q_all.stride() == (q_dim, num_tokens * q_dim, 1)
    assert torch.equal(q_all, case.q.to(case.dtype))
    o, lse = stripe_attention(case, q_all, rank, size)
    local_lens = torch.tensor(
        [[len(range(r, n, size)) for n in case.lens] for r in range(size)], dtype=torch.int32
    )
    if case.mutation == "average":
        o, lse = o.nan_to_num(), torch.zeros_like(lse)
    if case.mutation == "ignore_lens":
        local_lens = torch.ones_like(local_lens)
    merged_lse = torch.full((num_tokens, case.num_heads // size), math.nan)
    kept = comm.exchange_merge(o, lse, case.lse_base, local_lens, merged_lse).clone()
    merged = comm.exchange_merge(o, lse, case.lse_base, local_lens)
    # keeping the LSE changes no bit of the outputs
    assert torch.equal(merged.nan_to_num(), kept.nan_to_num())
    assert merged.is_contiguous()
    assert merged.shape == (num_tokens, case.num_heads // size, DIM)
    return merged, merged_lse


def run_cases(rank, size, combos, cases):
    """All cases on one rank, for every (backend, transport): results and who was interpreted."""
    return [run_combo(rank, size, *combo, cases) for combo in combos], dispatch.INTERPRETED


def run_combo(rank, size, backend, transport, cases):
    """One communicator per head count and dtype, its cases in a row like the layers of a model."""
    comms, results = {}, []
    for case in cases:
        key = case.num_heads, case.dtype
        if key not in comms:
            comms[key] = COMM_BACKENDS[backend](
                TRANSPORTS[transport](),
                num_heads=case.num_heads,
                kv_lora_rank=DIM,
                qk_rope_head_dim=ROPE,
                max_tokens=MAX_TOKENS,
                dtype=case.dtype,
                device="cpu",
            )
            comms[key].warm_up()
        merged, merged_lse = decode_step(comms[key], case, rank, size)
        # with the LSE as one more column, so that it travels to the test beside its outputs
        kept = torch.cat([merged.float(), merged_lse[..., None]], -1)
        results.append((kept, merged.dtype, merged.data_ptr()))
    for comm in comms.values():
        assert comm.buffer_bytes > 0
        comm.destroy()
        assert comm.buffer_bytes == 0
        with pytest.raises(AssertionError, match="was destroyed"):
            comm.gather_q(*local_q(cases[0], rank, size))
    return results


def gathered(cases, size, combos, interpret=False):
    """Per combo: of every case with the ranks' heads side by side, merged [B, H, D] and its LSE
    [B, H]; and the pointers."""
    per_rank = run_ranks(size, run_cases, combos, cases, interpret=interpret)
    assert all(interpreted == interpret for _, interpreted in per_rank)
    for ranks_of_combo in zip(*(r for r, _ in per_rank), strict=True):
        pointers = [[ptr for *_, ptr in results] for results in ranks_of_combo]
        dtypes = [dtype for _, dtype, _ in ranks_of_combo[0]]
        by_case = zip(*([kept for kept, *_ in results] for results in ranks_of_combo), strict=True)
        both = [torch.cat(parts, 1) for parts in by_case]
        merged = [kept[..., :DIM].to(dtype) for kept, dtype in zip(both, dtypes, strict=True)]
        yield merged, [kept[..., DIM] for kept in both], pointers


def all_cases():
    lens = [1, 7, 64, 0]  # the last one is empty on all ranks: 0 and -inf
    cases = [make_case(12, lens, base) for base in ("e", "2")]
    cases += [make_case(16, lens, "2", dt) for dt in (torch.float32, torch.bfloat16)]
    cases += [make_case(16, [n], "e") for n in (1, 33)]  # B = 1
    cases += [make_case(16, [1, 2, 3, 4, 5, 30, 31], "e")]  # B above max_tokens
    cases += [make_case(16, lens, "e")]  # static buffers still serve after a larger batch
    return cases


@pytest.mark.parametrize(
    ("size", "combos"),
    [
        (2, [("a2a", "torch"), ("ag_rs", "pynccl")]),
        (4, [("a2a", "pynccl"), ("ag_rs", "torch")]),
    ],
)
def test_decode_step_equals_unsharded_attention(size, combos):
    cases = all_cases()
    mutated = [make_case(16, [1, 7, 64], mutation=m) for m in ("average", "ignore_lens")]
    results = list(gathered(cases + mutated, size, combos))
    for merged, lses, pointers in results:
        for case, got, lse in zip(cases, merged, lses, strict=False):
            assert got.dtype == case.dtype
            assert_close(got, case.want())
            assert_close(lse, case.reference()[1])
        for case, got in zip(mutated, merged[len(cases) :], strict=True):
            # the comparison above can fail: averaging, or trusting the LSE of empty stripes
            assert not torch.allclose(got.double(), case.want(), atol=1e-2)
        for ptr in pointers:  # layers share one static buffer, the large batch has its own
            assert ptr[2] == ptr[4] == ptr[5] == ptr[7] != ptr[6]
    for case, a2a, ag_rs in zip(cases, results[0][0], results[1][0], strict=False):
        tol = 5e-6 if case.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(a2a, ag_rs, atol=tol, rtol=tol)


def test_interpreted_kernels_in_the_whole_step():
    case = make_case(4, [1, 9])
    combos = [("a2a", "torch"), ("ag_rs", "torch")]
    for merged, lses, _ in gathered([case], 2, combos, interpret=True):
        assert_close(merged[0], case.want())
        assert_close(lses[0], case.reference()[1])


def transport_bytes(rank, size):
    """Every collective of both transports on plain numbers; bytes where NCCL lacks the type."""
    for transport in (TorchTransport(), PyncclTransport(FakePyncclCommunicator())):
        assert (transport.rank, transport.size) == (rank, size)
        inp = (torch.arange(size * 6) + 100 * rank).to(torch.uint8).view(size, 6)
        out = torch.full_like(inp, 255)
        transport.all_to_all(out, inp)
        want = [[(6 * rank + i + 100 * peer) % 256 for i in range(6)] for peer in range(size)]
        assert out.tolist() == want
        gathered_fp8 = torch.zeros(size, 2, dtype=torch.float8_e4m3fn)
        if isinstance(transport, PyncclTransport):
            transport.all_gather(gathered_fp8, torch.full((2,), rank + 1.0).to(gathered_fp8.dtype))
            assert gathered_fp8.float()[:, 0].tolist() == [r + 1.0 for r in range(size)]
        summed = torch.full((3,), math.nan)
        transport.reduce_scatter(summed, torch.arange(size * 3.0) * (rank + 1))
        factor = sum(r + 1 for r in range(size))
        assert summed.tolist() == [factor * (3 * rank + i) for i in range(3)]
        with pytest.raises(AssertionError, match="blocks for"):
            transport.all_to_all(out[:1], inp[:1])
    return True


def test_transports_move_the_right_bytes():
    assert run_ranks(3, transport_bytes) == [True] * 3


class DeadPyncclCommunicator:
    """World size 1 or no libnccl: upstream then disables itself and every call is a no-op."""

    available, disabled, rank, world_size = False, True, 0, 1


def test_pynccl_without_nccl_is_refused():
    with pytest.raises(RuntimeError, match=r"1 rank\(s\).*SGLANG_NCCL_SO_PATH"):
        PyncclTransport(DeadPyncclCommunicator())


def test_auto_and_named_backends():
    info = GroupInfo(size=8, device_type="cuda", num_nodes=2, peer_access=True)
    assert comm_backend_names() == ["auto", "a2a", "ag_rs", "nvlink"]
    name, reason = resolve_auto("auto", info)
    assert name == "a2a"
    assert reason.startswith("works on every group")
    assert resolve_auto("ag_rs", info) == ("ag_rs", "as requested")
    with pytest.raises(
        ValueError, match=r"fi_a2a is unknown.*Use one of \['auto', 'a2a', 'ag_rs', 'nvlink'\]"
    ):
        resolve_auto("fi_a2a", info)


def test_a_new_backend_needs_registration_only(monkeypatch):
    monkeypatch.setattr("sglang_dcp.comm.registry.COMM_BACKENDS", dict(COMM_BACKENDS))

    @register_comm_backend("peer")
    class PeerCommunicator(Communicator):
        priority = 30

        @classmethod
        def is_available(cls, group_info):
            return group_info.peer_access, "needs peer access"

    assert resolve_auto("auto", GroupInfo(2, "cuda", peer_access=True))[0] == "peer"
    assert hangs_on_peer_access("auto", GroupInfo(2, "cuda"))
    name, reason = resolve_auto("auto", GroupInfo(2, "cuda"))
    assert name == "a2a"
    assert "not peer: needs peer access" in reason
    with pytest.raises(ValueError, match="peer cannot serve.*needs peer access.*a2a"):
        resolve_auto("peer", GroupInfo(2, "cuda"))
    with pytest.raises(ValueError, match="'a2a'.*cannot be registered"):
        register_comm_backend("a2a")(PeerCommunicator)


def fail_on_rank_one(rank, size):
    assert rank != 1, "the reason"
    time.sleep(60)


def test_run_ranks_reports_failures_and_hangs():
    """The harness itself: a failing rank is reported with its traceback, a hang is killed."""
    with pytest.raises(AssertionError, match="the reason"):
        run_ranks(2, fail_on_rank_one, timeout_s=50)
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(1, fail_on_rank_one, timeout_s=1)
    assert "TRITON_INTERPRET" in os.environ or torch.cuda.is_available()
