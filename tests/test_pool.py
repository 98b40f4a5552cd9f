"""The striped pool, made through its hook: sizes, owners, and nothing else reaches it."""

import inspect
import random
from types import SimpleNamespace

import pytest
import torch
from simulated_ranks import as_rank

pytestmark = pytest.mark.usefixtures("plugin")

NOPE, ROPE, LAYERS, FIRST_LAYER = 24, 8, 2, 5
SIZES = [(1, 2), (1, 8), (4, 4), (64, 2)]  # (P, c)


@pytest.fixture
def pool_hook(plugin, monkeypatch):
    """MLATokenToKVPool as in a scheduler with DCP: `__init__` goes through our hook."""
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    from sglang_dcp.hooks.memory_pool import around_mla_pool_init

    original = MLATokenToKVPool.__init__

    def init(self, *args, **kwargs):
        around_mla_pool_init(original, self, *args, **kwargs)

    monkeypatch.setattr(MLATokenToKVPool, "__init__", init)
    return MLATokenToKVPool


def build(cls, size, page_size, dtype=torch.float32):
    """A pool as ModelRunner._init_pools builds it."""
    return cls(
        size,
        page_size=page_size,
        dtype=dtype,
        kv_lora_rank=NOPE,
        qk_rope_head_dim=ROPE,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        start_layer=FIRST_LAYER,
        end_layer=FIRST_LAYER + LAYERS - 1,
    )


def init_pools(cls, size, page_size, dtype=torch.float32, is_draft_worker=False):
    """Run the hook on ModelRunner._init_pools; returns the pool of the runner."""
    from sglang_dcp.hooks.memory_pool import around_init_pools

    def original(runner):
        runner.token_to_kv_pool = build(cls, size, page_size, dtype)

    runner = SimpleNamespace(is_draft_worker=is_draft_worker)
    around_init_pools(original, runner)
    return runner.token_to_kv_pool


def striped_pools(cls, rows, page_size, dcp_size, dtype=torch.float32):
    """The pools of all ranks, poisoned."""
    pools = []
    for rank in range(dcp_size):
        with as_rank(rank, dcp_size):
            pool = init_pools(cls, rows * dcp_size, page_size * dcp_size, dtype)
        for buffer in pool.kv_buffer:
            buffer.fill_(float("nan"))
        pools.append(pool)
    return pools


def union(pools, layer):
    """Rows of all ranks in the order of virtual slots: what one unstriped pool would hold."""
    buffers = [pool.kv_buffer[layer][:, 0] for pool in pools]
    return torch.stack(buffers, dim=1).flatten(0, 1)


@pytest.mark.parametrize(("page_size", "dcp_size"), SIZES)
def test_pool_is_narrow(pool_hook, page_size, dcp_size):
    from sglang_dcp.pool import DcpMLATokenToKVPool

    rows = 4 * page_size
    for pool in striped_pools(pool_hook, rows, page_size, dcp_size):
        assert type(pool) is DcpMLATokenToKVPool
        assert isinstance(pool, pool_hook)
        assert (pool.size, pool.page_size) == (rows, page_size)
        shapes = {tuple(buffer.shape) for buffer in pool.kv_buffer}
        assert shapes == {(rows + page_size, 1, NOPE + ROPE)}
        assert pool.get_kv_size_bytes() == LAYERS * (rows + page_size) * (NOPE + ROPE) * 4
        assert pool.get_key_buffer(FIRST_LAYER + 1) is pool.kv_buffer[1]


def test_only_target_pools_are_striped(pool_hook):
    """Draft runners, other callers and derived pools keep virtual sizes."""

    class Derived(pool_hook):
        pass

    with as_rank(0, 4):
        plain = build(pool_hook, 32, 8)
        assert (type(plain), plain.size, plain.page_size) == (pool_hook, 32, 8)
        for cls, draft in ((Derived, False), (pool_hook, True)):
            with pytest.raises(RuntimeError, match=rf"made a {cls.__name__}\. .*--dcp-size"):
                init_pools(cls, 32, 8, is_draft_worker=draft)
        after = build(pool_hook, 32, 8)  # the context ended with the runner's pools
        assert type(after) is pool_hook


def write(pool, writer, loc, nope, rope):
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc

    layer = SimpleNamespace(layer_id=FIRST_LAYER + 1)
    if writer == "set_mla_kv_buffer":
        pool.set_mla_kv_buffer(layer, loc, nope, rope)
    else:
        where = KVWriteLoc(loc) if writer == "KVWriteLoc" else loc
        pool.set_kv_buffer(layer, where, torch.cat([nope, rope], dim=-1), None)


@pytest.mark.parametrize("writer", ["set_mla_kv_buffer", "set_kv_buffer", "KVWriteLoc"])
@pytest.mark.parametrize("loc_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("page_size", "dcp_size"), SIZES)
def test_only_owners_store(pool_hook, writer, loc_dtype, page_size, dcp_size):
    """Union of all ranks' rows == an unstriped pool, bit for bit; every other row untouched."""
    rows = 4 * page_size
    pools = striped_pools(pool_hook, rows, page_size, dcp_size, torch.bfloat16)
    want = torch.full_like(union(pools, 1), float("nan"))
    for num_tokens in (0, 1, 13):
        loc = torch.randperm(want.shape[0])[:num_tokens]
        num_tokens = len(loc)
        nope = torch.randn(num_tokens, 1, NOPE)
        rope = torch.randn(num_tokens, 1, 3 * ROPE)[..., ROPE : 2 * ROPE]  # a strided slice
        want[loc] = torch.cat([nope, rope], dim=-1)[:, 0].to(torch.bfloat16)
        for rank, pool in enumerate(pools):
            with as_rank(rank, dcp_size):
                write(pool, writer, loc.to(loc_dtype), nope, rope)
    assert torch.equal(union(pools, 1).view(torch.int16), want.view(torch.int16))
    assert union(pools, 0).isnan().all()  # the other layer


def test_padded_tokens_reach_rank_0_only(pool_hook):
    """Padding carries slot 0, repeatedly: row 0 of rank 0, the dummy page, takes it all."""
    pools = striped_pools(pool_hook, 8, 2, 4)
    loc = torch.tensor([9, 0, 0, 0])
    for rank, pool in enumerate(pools):
        with as_rank(rank, 4):
            write(pool, "set_mla_kv_buffer", loc, torch.ones(4, 1, NOPE), torch.ones(4, 1, ROPE))
    written = [(~p.kv_buffer[1].isnan()).any(-1).flatten().nonzero().flatten() for p in pools]
    assert [w.tolist() for w in written] == [[0], [2], [], []]


def test_unfiltered_writes_would_be_seen(pool_hook):
    """The union check can fail: without owner filter or division rows overwrite each other."""
    pools = striped_pools(pool_hook, 8, 1, 2)
    loc = torch.tensor([4, 5])  # both are row 2
    nope, rope = torch.randn(2, 1, NOPE), torch.randn(2, 1, ROPE)
    for pool in pools:
        with as_rank(0, 2):  # both believe to be rank 0
            write(pool, "set_mla_kv_buffer", loc, nope, rope)
    assert not torch.equal(union(pools, 1)[5], torch.cat([nope, rope], -1)[1, 0])


SLOT_NAMES = {"loc", "loc_info", "indices", "tgt_loc", "src_loc"}
FORBIDDEN = {
    "get_mla_kv_buffer": (None, torch.tensor([1])),
    "move_kv_cache": (torch.tensor([1]), torch.tensor([2])),
    "get_cpu_copy": (torch.tensor([1]),),
    "load_cpu_copy": ([], torch.tensor([1])),
    "get_contiguous_buf_infos": (),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_forbidden_methods_raise(pool_hook, name):
    (pool,) = striped_pools(pool_hook, 8, 1, 2)[:1]
    with pytest.raises(RuntimeError, match="virtual slot.*Serve without --dcp-size"):
        getattr(pool, name)(*FORBIDDEN[name])


def test_no_other_method_takes_slots(pool_hook):
    """Every method of upstream's pool with slots among its parameters is ours here."""
    from sglang_dcp.pool import DcpMLATokenToKVPool

    takes_slots = {
        name
        for name, method in inspect.getmembers(pool_hook, inspect.isfunction)
        if SLOT_NAMES & inspect.signature(method).parameters.keys()
    }
    assert {"set_kv_buffer", "set_mla_kv_buffer", "get_mla_kv_buffer"} <= takes_slots
    assert takes_slots | FORBIDDEN.keys() <= vars(DcpMLATokenToKVPool).keys()


# ---------------------------------------------------------------- the allocator on widened pages


class Requests:
    """A scheduler in small: requests that extend, decode, share prefixes and end at random."""

    def __init__(self, allocator):
        self.allocator, self.page = allocator, allocator.page_size
        self.slots = {}  # request -> its slots by position
        self.users = {}  # page -> number of requests on it
        self.num_allocated_pages = 0
        self.next_id = 0

    def _fits(self, num_pages):
        """As the scheduler asks before it allocates."""
        return num_pages * self.page <= self.allocator.available_size()

    def _grow(self, request, new_slots):
        before = {s // self.page for s in self.slots[request]}
        self.slots[request] += new_slots
        fresh = {s // self.page for s in new_slots} - before
        assert not fresh & self.users.keys(), "a page in use was handed out again"
        self.users |= dict.fromkeys(fresh, 1)
        self.num_allocated_pages += len(fresh)

    def extend(self, request, num_tokens):
        old = self.slots[request]
        if not self._fits(-(-(len(old) + num_tokens) // self.page) - -(-len(old) // self.page)):
            return False
        lens = torch.tensor([len(old)]), torch.tensor([len(old) + num_tokens])
        last = torch.tensor([old[-1] if old else -1])
        got = self.allocator.alloc_extend(
            lens[0], lens[0], lens[1], lens[1], last, extend_num_tokens=num_tokens
        )
        self._grow(request, got.tolist())
        return True

    def decode(self):
        running = list(self.slots)
        if not self._fits(sum(len(self.slots[r]) % self.page == 0 for r in running)):
            self.free(running[0])  # retraction
            return
        lens = torch.tensor([len(self.slots[r]) + 1 for r in running])
        last = torch.tensor([self.slots[r][-1] for r in running])
        got = self.allocator.alloc_decode(lens, lens, last)
        for request, slot in zip(running, got.tolist(), strict=True):
            self._grow(request, [slot])

    def start(self, num_tokens, rng):
        """A new request, on a prefix of another one (whole pages) if there is any."""
        request, self.next_id = self.next_id, self.next_id + 1
        self.slots[request] = []
        donors = [s for s in self.slots.values() if len(s) >= self.page]
        if donors and rng.random() < 0.5:
            donor = rng.choice(donors)
            shared = donor[: rng.randint(1, len(donor) // self.page) * self.page]
            self.slots[request] = list(shared)
            for page in {s // self.page for s in shared}:
                self.users[page] += 1
        if not self.extend(request, num_tokens):
            self.free(request)

    def free(self, request):
        pages = {s // self.page for s in self.slots[request]}
        done = {page for page in pages if self.users[page] == 1}
        for page in pages:
            self.users[page] -= 1
        self.users = {page: users for page, users in self.users.items() if users}
        freed = [s for s in self.slots.pop(request) if s // self.page in done]
        self.allocator.free(torch.tensor(freed, dtype=torch.int64))


def check_invariants(requests, page_size, dcp_size):
    """What layout.py promises and every rank relies on."""
    for slots in requests.slots.values():
        assert [s % dcp_size for s in slots] == [p % dcp_size for p in range(len(slots))]
        pages = [s // (page_size * dcp_size) for s in slots[:: page_size * dcp_size]]
        for rank in range(dcp_size):
            rows = [s // dcp_size for s in slots if s % dcp_size == rank]
            assert rows == [s // dcp_size for s in slots[rank::dcp_size]]
            # through the block table, the same one on every rank, each finds its rows
            found = [pages[j // page_size] * page_size + j % page_size for j in range(len(rows))]
            assert rows == found
    highest = max((s for slots in requests.slots.values() for s in slots), default=0)
    num_rows = requests.allocator.size // dcp_size + page_size
    assert highest // dcp_size < num_rows
    lowest = min((s for slots in requests.slots.values() for s in slots), default=10**9)
    assert lowest >= page_size * dcp_size  # page 0 is for padding


@pytest.mark.parametrize("need_sort", [False, True])
@pytest.mark.parametrize(("page_size", "dcp_size"), [(1, 2), (1, 8), (4, 4), (16, 2)])
def test_allocator_keeps_owners(plugin, monkeypatch, fresh_seed, need_sort, page_size, dcp_size):
    """Upstream's allocator on widened pages, through many wraps of the pool."""
    from sglang.srt.mem_cache.allocator import paged

    from sglang_dcp.hooks import cpu

    monkeypatch.setenv("SGLANG_DEBUG_MEMORY_POOL", "1")
    monkeypatch.setattr(paged, "alloc_extend_kernel", cpu.alloc_extend_kernel)
    monkeypatch.setattr(paged, "alloc_decode_kernel", cpu.alloc_decode_kernel)
    wide, num_pages = page_size * dcp_size, 24
    allocator = paged.PagedTokenToKVPoolAllocator(
        num_pages * wide, wide, torch.float32, "cpu", kvcache=None, need_sort=need_sort
    )
    rng = random.Random(fresh_seed)
    requests = Requests(allocator)
    while requests.num_allocated_pages < 8 * num_pages:
        action = rng.random()
        if action < 0.3 or not requests.slots:
            requests.start(rng.randint(1, 4 * wide), rng)
        elif action < 0.5:  # chunked prefill: cut anywhere
            request = rng.choice(list(requests.slots))
            if not requests.extend(request, rng.randint(1, 2 * wide)):
                requests.free(request)
        elif action < 0.85:
            requests.decode()
        else:
            requests.free(rng.choice(list(requests.slots)))
        check_invariants(requests, page_size, dcp_size)
    for request in list(requests.slots):
        requests.free(request)
    assert allocator.available_size() == num_pages * wide  # nothing leaked


def test_unwidened_pages_would_be_seen(plugin):
    """The invariant can fail: pages that are not a multiple of c lose the owner rule."""
    requests = SimpleNamespace(slots={0: [3, 4, 5]}, allocator=SimpleNamespace(size=6))
    with pytest.raises(AssertionError):
        check_invariants(requests, 1, 2)
