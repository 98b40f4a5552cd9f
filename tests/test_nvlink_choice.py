"""Where `nvlink` can serve, what `auto` picks, and that all ranks decide alike."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from sglang_dcp.comm import GroupInfo, hangs_on_peer_access, resolve_auto, symmetric
from sglang_dcp.comm.nvlink import NvlinkCommunicator
from sglang_dcp.comm.symmetric import probe_peers, rendezvous


def test_availability_and_auto():
    def able(**facts):
        return NvlinkCommunicator.is_available(GroupInfo(**facts))

    assert able(size=8, device_type="cuda", peer_access=True) == (True, "one node with peer access")
    assert able(size=8, device_type="cpu", peer_access=True)[1] == "needs CUDA GPUs, not cpu"
    assert "one node, not 2" in able(size=8, device_type="cuda", num_nodes=2, peer_access=True)[1]
    assert "not 16" in able(size=16, device_type="cuda", peer_access=True)[1]
    info = GroupInfo(size=2, device_type="cuda", peer_reason="GPU 1 has no peer access")
    assert able(**dataclasses.asdict(info)) == (False, "GPU 1 has no peer access")
    assert resolve_auto("nvlink", GroupInfo(2, "cuda", peer_access=True))[0] == "nvlink"
    with pytest.raises(ValueError, match="nvlink cannot serve.*GPU 1 has no peer access.*a2a"):
        resolve_auto("nvlink", info)


@pytest.mark.parametrize(
    ("priority", "able", "picked"), [(5, True, "a2a"), (20, True, "nvlink"), (20, False, "a2a")]
)
def test_priority_alone_makes_auto_pick_nvlink(monkeypatch, priority, able, picked):
    monkeypatch.setattr(NvlinkCommunicator, "priority", priority)
    reason = "" if able else "GPU 1 has no peer access"
    info = GroupInfo(2, "cuda", peer_access=able, peer_reason=reason)
    name, why = resolve_auto("auto", info)
    assert name == picked
    assert ("not nvlink: GPU 1 has no peer access" in why) == (not able)
    # memory is mapped only where the answer matters, whatever is known of it yet
    assert hangs_on_peer_access("auto", info) == (priority > 10)
    assert hangs_on_peer_access("nvlink", info)
    for requested, facts in [
        ("a2a", info),
        ("unknown", info),
        ("auto", GroupInfo(2, "cpu")),
        ("nvlink", GroupInfo(2, "cpu")),
        ("auto", GroupInfo(16, "cuda")),
        ("auto", GroupInfo(2, "cuda", num_nodes=2)),
    ]:
        assert not hangs_on_peer_access(requested, facts), (requested, facts)


def fake_gpus(rank, size):
    """This process sees `size` GPUs that reach each other, and is on that of its rank."""
    torch.cuda.synchronize = lambda device: None
    torch.cuda.current_device = lambda: rank
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(
        uuid=f"GPU-{rank}", multi_processor_count=132
    )
    symmetric._has_native_peer_atomics = lambda device, peer: True


#: What one rank lacks, and what every rank says of it.
FAULTS = {
    "": "",
    "memory": "rank 1: allocation: out of memory",
    "mapping": "rank 1: rendezvous: cannot map",
    "driver": "GPU 1 cannot be asked for peer access: no libcuda",
    "atomics": "GPU 1 has no peer access with native atomics to [0]",
}


def choose_on_ranks(rank, size):
    """What the server's hook chooses, per fault of rank 1: auto at two priorities, nvlink, a2a."""
    import torch.distributed._symmetric_memory as symm_mem

    from sglang_dcp.hooks.parallel_state import _choose_backend

    fake_gpus(rank, size)
    real_tensor = torch.tensor
    torch.tensor = lambda data, dtype, device: real_tensor(data, dtype=dtype)
    ranks = list(range(size))
    coordinator = SimpleNamespace(world_size=size, cpu_group=dist.group.WORLD, ranks=ranks)
    chosen = {}
    for name in FAULTS:
        fault = name if rank == 1 else ""

        def empty(num_bytes, dtype, device, fault=fault):
            if fault == "memory":
                raise RuntimeError("out of memory")
            return torch.full((num_bytes,), 255, dtype=dtype)

        def meet(local, group_name, fault=fault):
            assert local.eq(0).all()
            if fault == "mapping":
                raise RuntimeError("cannot map")
            return SimpleNamespace(buffer_ptrs=[256] * size)

        def atomics(device, peer, fault=fault):
            assert device == rank != peer
            if fault == "driver":
                raise OSError("no libcuda")
            return fault != "atomics"

        symm_mem.empty, symm_mem.rendezvous = empty, meet
        symmetric._has_native_peer_atomics = atomics
        chosen[name] = []
        for requested, priority in (("auto", 5), ("auto", 20), ("nvlink", 5), ("a2a", 20)):
            NvlinkCommunicator.priority = priority
            args = SimpleNamespace(dcp_comm_backend=requested)
            try:
                got = _choose_backend(args, coordinator, torch.device("cuda", rank))
            except ValueError as e:
                got = str(e)
            chosen[name].append(got)
    return chosen


def test_all_ranks_choose_alike():
    first, second = run_ranks(2, choose_on_ranks)
    assert first == second
    assert first.pop("") == ["a2a", "nvlink", "nvlink", "a2a"]
    for name, (low, high, named, a2a) in first.items():
        assert low == high == a2a == "a2a"
        assert "nvlink cannot serve" in named
        assert FAULTS[name] in named
    assert len(first) == 4


def fail_together(rank, size):
    """A rank without symmetric memory: all ranks hear of it, none hangs."""
    import torch.distributed._symmetric_memory as symm_mem

    def empty(num_bytes, dtype, device):
        if rank == 1:
            raise RuntimeError("out of memory")
        return torch.empty(num_bytes, dtype=dtype)

    fake_gpus(rank, size)
    symm_mem.empty = empty
    messages = []
    for call in (rendezvous, None):
        try:
            if call:
                call(64, torch.device("cpu"), dist.group.WORLD)
            else:
                messages.append(probe_peers(torch.device("cpu"), dist.group.WORLD))
        except RuntimeError as e:
            messages.append(str(e))
    return messages


def share_a_gpu(rank, size):
    """Two ranks on one GPU, each of which sees it as device 0."""
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-0")
    return probe_peers(torch.device("cpu"), dist.group.WORLD)


def test_ranks_that_share_a_gpu_are_no_peers():
    assert run_ranks(2, share_a_gpu) == [(False, "two ranks share a GPU")] * 2


def test_one_rank_without_symmetric_memory_stops_all():
    for raised, probed in run_ranks(2, fail_together):
        assert "64 bytes" in raised
        assert "rank 1: allocation: out of memory. Use --dcp-comm-backend a2a" in raised
        assert probed[0] is False
        assert "rank 1: allocation: out of memory" in probed[1]
