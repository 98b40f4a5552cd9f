"""Shadow mode: what it counts, in one process, on gloo ranks, under graphs and in a server."""

import math
from types import SimpleNamespace

import pytest
import torch
from interpreted_nvlink import CPU, DIM, MAX_TOKENS, ROPE, interpreted, shared_dims, shared_memory
from ranks import run_ranks
from serving import Farm, Spec
from virtual_nvlink import own_merge, random_partials, random_queries

from sglang_dcp.comm import COMM_BACKENDS, TorchTransport
from sglang_dcp.comm.nvlink import NvlinkCommunicator
from sglang_dcp.comm.shadow import Shadow


class Fixed:
    """A communicator that returns these tensors, whatever it is asked."""

    name = "fixed"

    def __init__(self, q, merged, max_tokens=MAX_TOKENS):
        self.q, self.merged, self.max_tokens, self.device = q, merged, max_tokens, q.device
        self.destroyed = False

    def gather_q(self, q_nope, q_pe):
        return self.q

    def exchange_merge(self, o, lse, lse_base, local_lens, merged_lse=None):
        if merged_lse is not None:
            merged_lse.fill_(self.merged.flatten()[0])
        return self.merged

    def destroy(self):
        self.destroyed = True


def call_both(comm, num_tokens=MAX_TOKENS):
    rows = torch.empty(num_tokens, 1)
    return comm.gather_q(rows, rows), comm.exchange_merge(rows, None, "e", None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_are_compared_not_values(dtype):
    q = torch.randn(4, 3, 8).to(dtype)
    q[0, 0, :3] = torch.tensor([math.nan, 0.0, math.inf])
    heads_first = q.transpose(0, 1).contiguous().transpose(0, 1)
    merged = torch.randn(4, 2, 8).to(dtype)
    comm, reference = Fixed(q, merged), Fixed(heads_first, merged.clone())
    shadow = Shadow(comm, reference)
    got = call_both(comm)
    assert got[0] is q
    assert got[1] is merged
    reference.q[0, 0, 1] = -0.0
    reference.merged.view(torch.uint8).view(-1)[5] ^= 1
    call_both(comm)
    call_both(comm, MAX_TOKENS + 1)  # above the static buffers: passed on only
    assert shadow.report() == {
        "reference": "fixed",
        "gather_q": {"calls": 2, "elements": 2 * q.numel(), "differing": 1},
        "exchange_merge": {"calls": 2, "elements": 2 * merged.numel(), "differing": 1},
    }
    shadow.destroy()
    assert reference.destroyed


def test_a_kept_lse_is_compared_and_stays_the_callers():
    q, merged = torch.randn(2, 3, 8), torch.randn(2, 2, 8)
    comm, reference = Fixed(q, merged), Fixed(q, merged.clone())
    reference.merged[0, 0, 0] += 1
    shadow = Shadow(comm, reference)
    lse = torch.empty(2, 2)
    comm.exchange_merge(q, None, "e", None, merged_lse=lse)
    assert lse.eq(merged[0, 0, 0]).all()
    counted = shadow.report()["exchange_merge"]
    assert counted == {"calls": 1, "elements": merged.numel() + 4, "differing": 1 + 4}


def serve_in_shadow(rank, size, folder, backend, flip, seed):
    """Decode steps of two communicators side by side; one bit of one call of rank 1 is flipped."""
    settings = shared_dims(12, torch.bfloat16)
    kwargs = {"allocate": shared_memory(folder, rank, size)} if backend == "nvlink" else {}
    comm = COMM_BACKENDS[backend](TorchTransport(), device="cpu", **kwargs, **settings)
    if isinstance(comm, NvlinkCommunicator):
        comm.max_programs = 3
    if flip and rank == 1:
        right = comm.exchange_merge

        def wrong(o, *args):
            merged = right(o, *args)
            if o.shape[0] == 3:
                merged.view(torch.int16)[2, 1, 7] ^= 1
            return merged

        comm.exchange_merge = wrong
    shadow = Shadow(comm, COMM_BACKENDS["a2a"](TorchTransport(), device="cpu", **settings))
    torch.manual_seed(seed)
    num_elements = 0
    for num_tokens in (1, 3, MAX_TOKENS):
        nope, pe, q_all = random_queries(size, num_tokens, 6, DIM, ROPE, torch.bfloat16, CPU)
        o, lse, lens = random_partials(size, num_tokens, 12, DIM, torch.bfloat16, CPU)
        assert torch.equal(comm.gather_q(nope[rank], pe[rank]), q_all)
        merged = comm.exchange_merge(o[rank], lse[rank], "2", lens)
        same = torch.equal(merged, own_merge(rank, o, lse, lens, "2"))
        assert same != (flip and rank == 1 and num_tokens == 3)
        num_elements += merged.numel()
    report = shadow.report()
    assert report["exchange_merge"]["elements"] == num_elements
    return {
        call: (report[call]["calls"], report[call]["differing"]) for call in report if "_" in call
    }


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("backend", ["a2a", pytest.param("nvlink", marks=interpreted)])
def test_one_wrong_bit_of_one_rank_is_counted(tmp_path, fresh_seed, backend, flip):
    args = (str(tmp_path), backend, flip, fresh_seed)
    right = {"gather_q": (3, 0), "exchange_merge": (3, 0)}
    wrong = {"gather_q": (3, 0), "exchange_merge": (3, 1)}
    found = run_ranks(2, serve_in_shadow, *args, interpret=backend == "nvlink")
    assert found == [right, wrong if flip else right]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_replays_are_counted():
    device = torch.device("cuda")
    q = torch.randn(4, 3, 8, device=device, dtype=torch.bfloat16)
    comm, reference = Fixed(q, q.clone()), Fixed(q.clone(), q.clone())
    shadow = Shadow(comm, reference)
    call_both(comm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call_both(comm)
    for _ in range(5):
        graph.replay()
    reference.merged[0, 0, 0] += 1
    graph.replay()
    report = shadow.report()
    assert report["gather_q"] == {"calls": 7, "elements": 7 * 96, "differing": 0}
    assert report["exchange_merge"] == {"calls": 7, "elements": 7 * 96, "differing": 1}


@pytest.mark.parametrize(("backend", "folder"), [("a2a", "x"), ("nvlink", "")])
def test_shadow_mode_without_use_is_refused(monkeypatch, backend, folder):
    from sglang_dcp.hooks.parallel_state import check_shadow

    monkeypatch.setenv("SGLANG_DCP_COUNTERS_DIR", folder)
    with pytest.raises(ValueError, match=f"SHADOW=1 .*communicator {backend}.*or unset"):
        check_shadow(backend)
    monkeypatch.setenv("SGLANG_DCP_COUNTERS_DIR", "x")
    check_shadow("nvlink")


def test_state_takes_the_shadow_with_it():
    from sglang_dcp import state

    events = []
    parts = [
        SimpleNamespace(destroy=lambda name=name: events.append(name))
        for name in ("coordinator", "comm", "shadow")
    ]
    state.set_state(state.DcpState(2, 0, (0, 1), *parts[:2], shadow=parts[2]))
    state.clear_state()
    assert events == ["comm", "shadow", "coordinator"]


@pytest.mark.slow
def test_a_server_in_shadow_mode(farm: Farm):
    """`ag_rs` serves; `a2a` sees every call of every layer, and gathers the same queries."""
    spec = Spec(dcp_size=2, args=("--dcp-comm-backend", "ag_rs"), env=(("SGLANG_DCP_SHADOW", "1"),))
    served = farm.outcome(spec)
    assert len(served.ranks) == 2
    for rank in served.ranks:
        assert rank["comm_backend"] == "ag_rs"
        assert rank["shadow"]["reference"] == "a2a"
        for call in ("gather_q", "exchange_merge"):
            assert rank["shadow"][call]["calls"] == rank["counts"][call] > 0
            assert rank["shadow"][call]["elements"] > rank["shadow"][call]["calls"]
        assert rank["shadow"]["gather_q"]["differing"] == 0
        merged = rank["shadow"]["exchange_merge"]
        assert merged["differing"] < 0.5 * merged["elements"]  # last bits of float32
