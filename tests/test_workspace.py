"""--dcp-workspace-mb: pure accounting, and what is refused."""

import dataclasses
import math
import pickle
import random

import pytest
from sglang_args import make_args, make_args_on

from sglang_dcp.workspace import (
    MIB,
    ChunkBudget,
    PassQLimits,
    ReadShape,
    least_workspace_mb,
    pass_q_bytes,
    pass_q_limits,
)

K3_TP2 = ReadShape(2, 48, 512, 128, 64, 128, 2)


def random_shape():
    return ReadShape(
        dcp_size=random.choice([2, 4, 8]),
        heads_local=random.randint(1, 128),
        kv_lora_rank=random.choice([32, 512]),
        qk_nope_head_dim=random.choice([16, 128]),
        qk_rope_head_dim=random.choice([8, 64]),
        v_head_dim=random.choice([16, 128]),
        element_bytes=random.choice([2, 4]),
    )


def by_hand(chunk_tokens, most_tokens, new_tokens, prefix_tokens, num_plans, s):
    """Every tensor of a read in chunks of so many tokens, multiples of c, by its shape."""
    c, width = s.dcp_size, s.kv_lora_rank + s.qk_rope_head_dim
    shapes = [
        (most_tokens // c, width),  # send
        (c, most_tokens // c, width),  # gathered
        (chunk_tokens, s.heads_local, s.qk_nope_head_dim + s.v_head_dim),  # kv
        (new_tokens, s.heads_local, s.v_head_dim),
    ]
    k = (chunk_tokens, s.heads_local, s.qk_nope_head_dim + s.qk_rope_head_dim)
    beside_k, before_k = (chunk_tokens, s.qk_rope_head_dim), (chunk_tokens, width)
    elements = sum(math.prod(shape) for shape in shapes)
    elements += max(math.prod(k) + math.prod(beside_k), math.prod(before_k))
    lse_bytes = new_tokens * s.heads_local * 4
    index_bytes = prefix_tokens * (4 + 8 + 4)
    return elements * s.element_bytes + lse_bytes + index_bytes + num_plans * 8 * MIB


def test_chunks_fill_the_workspace_and_no_more():
    for _ in range(300):
        shape, limit, planned = random_shape(), random.randint(1, 1 << 28), random.random() < 0.5
        page = random.choice([1, 64]) * shape.dcp_size
        budget = ChunkBudget(limit, shape, 8 * MIB * planned, page)
        most, new, prefix = budget.most_tokens, random.randint(1, 3000), random.randint(1, 100_000)
        assert most % page == 0
        assert by_hand(most, most, 0, 0, 0, shape) <= limit
        assert limit < by_hand(most + page, most + page, 0, 0, 0, shape)
        if most == 0:
            continue
        found = budget.chunk_tokens([new], [prefix])
        assert found % page == 0
        rest = most, new, prefix, 3 * planned, shape
        assert found == page or by_hand(found, *rest) <= limit
        assert found == most or limit < by_hand(found + page, *rest)


def test_a_cap_is_kept():
    budget = ChunkBudget(1 << 30, K3_TP2, page_tokens=4, cap_tokens=51)
    assert budget.most_tokens == budget.chunk_tokens([1], [10**6]) == 48


def test_expanded_heads_and_outputs_are_most_of_it():
    """The numbers that the module and the option are about: 96 heads on two GPUs, 512 MiB."""
    budget = ChunkBudget(512 * MIB, K3_TP2, page_tokens=128)
    assert 11_000 < budget.chunk_tokens([64], [128_000]) <= budget.most_tokens < 12_000
    assert 8000 < budget.chunk_tokens([8192], [1_000_000]) < 9000
    assert 1000 < budget.chunk_tokens([32768], [1_000_000]) < 2000
    expanded = K3_TP2.heads_local * (128 + 128 + 128 + 64) * 2 * K3_TP2.dcp_size
    assert expanded > 0.99 * sum(K3_TP2.chunk_bytes().values())


def test_plans_of_many_requests():
    """Short prefixes share chunks, and so plans; long ones have plans of their own."""
    budget = ChunkBudget(512 * MIB, K3_TP2, page_tokens=128)
    assert budget.chunk_tokens([2] * 32, [2000] * 32) > 9000
    assert 4000 < budget.chunk_tokens([128] * 16, [60_000] * 16) < 5000


def pass_q_by_hand(slice_tokens, batch_tokens, s):
    """Every tensor of a pass-Q batch by its shape; grouped queries take two places a token."""
    n, t, own, heads = slice_tokens, batch_tokens, s.heads_local, s.dcp_size * s.heads_local
    o, width = s.kv_lora_rank, s.kv_lora_rank + s.qk_rope_head_dim
    elements = [
        (n, own, width),  # q_nope and q_pe of a slice's rows
        (2, n, heads, width),
        (2, n, heads, o),
        (n, heads, o),
        (t, own, o),  # absorbed queries
        (t, own, o),  # attention to the new tokens
        (t, width),
    ]
    floats = [
        (2, n, heads, o),  # partial outputs of split keys
        (2, n, heads),
        (2, n, heads),  # lse in groups
        (n, heads),
        (n, own),
        (t, own),
        (t, s.dcp_size),  # local lens, int32
        (160 * 64, o + 1),  # one tile of rows for each multiprocessor
    ]
    total = sum(math.prod(shape) for shape in elements) * s.element_bytes
    return total + sum(math.prod(shape) for shape in floats) * 4 + t * (1 + 2 * 2) * 8


def test_pass_q_fills_the_workspace_and_no_more():
    for _ in range(200):
        shape, limit, most = random_shape(), random.randint(1, 1 << 28), random.randint(1, 300)
        found = pass_q_limits(limit, shape, most)
        if found == PassQLimits(0, 0):
            assert pass_q_by_hand(1, 1, shape) > limit
            continue
        sizes = found.slice_tokens, found.batch_tokens
        assert 1 <= found.slice_tokens <= most
        assert pass_q_bytes(*sizes, shape) == pass_q_by_hand(*sizes, shape) <= limit
        assert pass_q_by_hand(sizes[0], sizes[1] + 1, shape) > limit


GRID = [
    ReadShape(c, heads // c, 512, 128, 64, 128, element_bytes)
    for heads in (16, 32, 64, 96, 128)
    for c in (2, 4, 8)
    for element_bytes in (2, 4)
]


@pytest.mark.parametrize("shape", GRID, ids=str)
def test_slices_of_tokens_reach_down_far_enough(shape):
    """Any workspace from the least one up holds chunks and slices, so heads need no slicing."""
    page = 64 * shape.dcp_size
    budget = ChunkBudget(0, shape, 0, page)
    least_mb = least_workspace_mb(budget, 1)
    assert least_mb < 17
    assert not dataclasses.replace(budget, workspace_bytes=(least_mb - 1) * MIB).fits(1)
    for limit in (least_mb * MIB, random.randint(least_mb * MIB, 1 << 30)):
        budget = dataclasses.replace(budget, workspace_bytes=limit)
        tokens, most = budget.chunk_tokens([1], [page]), budget.most_tokens
        assert budget.fits(1)
        assert tokens >= page
        assert by_hand(tokens, most, 1, page, 0, shape) <= limit
    least = pass_q_bytes(1, 1, shape)
    assert least < 23 * MIB
    for limit in (least, random.randint(least, 1 << 30)):
        found = pass_q_limits(limit, shape, 256)
        assert found.slice_tokens >= 1
        assert found.batch_tokens >= 1
        assert pass_q_by_hand(found.slice_tokens, found.batch_tokens, shape) <= limit
    assert pass_q_limits(least - 1, shape, 256) == PassQLimits(0, 0)


def test_the_least_workspaces_that_the_module_names():
    def least_mb(heads, c):
        shape = ReadShape(c, heads // c, 512, 128, 64, 128, 2)
        by_kv = least_workspace_mb(ChunkBudget(0, shape, 0, 64 * c), 1)
        return by_kv, -(-pass_q_bytes(1, 1, shape) // MIB)

    found = {heads: [least_mb(heads, c) for c in (2, 8)] for heads in (16, 128)}
    assert found == {16: [(2, 21), (2, 21)], 128: [(8, 22), (8, 22)]}
    assert 0.8 < sum(K3_TP2.slice_bytes().values()) / MIB < 1


# ---------------------------------------------------------------- arguments


@pytest.mark.usefixtures("plugin")
class TestArguments:
    def test_a_real_field(self, tiny_model):
        """CLI, keywords, pickle, asdict and replace carry it; without DCP it changes nothing."""
        from sglang.srt.server_args import prepare_server_args

        command = ["--model-path", str(tiny_model), "--tp", "8", "--device", "cpu"]
        assert prepare_server_args(command).dcp_workspace_mb == 512
        asked = [*command, "--dcp-size", "8", "--dcp-workspace-mb", "33"]
        assert prepare_server_args(asked).dcp_workspace_mb == 33
        args = make_args(tiny_model, dcp_size=8, dcp_workspace_mb=33)
        assert args != make_args(tiny_model, dcp_size=8)
        for travelled in (
            pickle.loads(pickle.dumps(args)),
            type(args)(**dataclasses.asdict(args)),
            dataclasses.replace(args),
        ):
            assert travelled == args
            assert travelled.dcp_workspace_mb == 33

    def test_too_small_for_a_page(self, tiny_model):
        said = "8 tokens of 2 heads beside the outputs of 512 new tokens need 1 MiB. Use "
        said += "--dcp-workspace-mb 1 or more, or a smaller --chunked-prefill-size"
        sizes = {"dcp_size": 8, "chunked_prefill_size": 512}
        with pytest.raises(
            ValueError, match=f"--dcp-workspace-mb 0 was .*widened page, and {said}"
        ):
            make_args(tiny_model, dcp_workspace_mb=0, **sizes)
        assert make_args(tiny_model, dcp_workspace_mb=1, **sizes).dcp_workspace_mb == 1

    def test_the_named_minimum_is_enough(self, tiny_model):
        asked = {"dcp_size": 8, "page_size": 4096, "chunked_prefill_size": 65536}
        with pytest.raises(ValueError, match=r"32768 tokens of 2 heads .* need (\d+) MiB") as error:
            make_args(tiny_model, dcp_workspace_mb=1, **asked)
        least = int(str(error.value).split(" need ")[1].split()[0])
        assert make_args(tiny_model, dcp_workspace_mb=least, **asked)
        with pytest.raises(ValueError, match="at least one widened page"):
            make_args(tiny_model, dcp_workspace_mb=least - 1, **asked)

    def test_too_small_for_pass_q(self, tiny_model):
        """Only where pass-Q alone was asked for; pass-KV serves all batches in the other modes."""
        small = {"dcp_size": 2, "dcp_workspace_mb": 1}
        said = r"--dcp-prefill pass-q with --dcp-workspace-mb 1 was .* need (\d+) MiB"
        with pytest.raises(ValueError, match=said) as error:
            make_args(tiny_model, dcp_prefill="pass-q", **small)
        least = int(str(error.value).split(" need ")[1].split()[0])
        assert make_args(tiny_model, dcp_prefill="auto", **small)
        args = make_args(tiny_model, dcp_prefill="pass-q", dcp_size=2, dcp_workspace_mb=least)

        from sglang_dcp.hooks.workspace import limit_pass_q

        assert limit_pass_q(args, 64).batch_tokens >= 1

    def test_larger_than_the_share_that_is_left(self, tiny_model, monkeypatch):
        def make(workspace_mb):
            return make_args_on(
                "cuda",
                monkeypatch,
                tiny_model,
                dcp_size=2,
                attention_backend="flashinfer",
                mem_fraction_static=0.9,
                dcp_workspace_mb=workspace_mb,
            )

        share = int(141 * 1024 * (1 - 0.9))
        assert make(share).dcp_workspace_mb == share
        with pytest.raises(ValueError, match=rf"mem-fraction-static 0.900 .*{share} MiB of this"):
            make(share + 1)

    def test_without_dcp_nothing_is_checked(self, tiny_model):
        assert make_args(tiny_model, dcp_workspace_mb=0).dcp_workspace_mb == 0

    def test_upstreams_capacity_is_lowered(self, tiny_model):
        from sglang.srt.environ import envs

        from sglang_dcp.hooks.workspace import chunk_budget, limit_prefix_chunks

        sizes = {"dcp_size": 8, "page_size": 4, "chunked_prefill_size": 512}
        args = make_args(tiny_model, dcp_workspace_mb=1, **sizes)
        tokens = chunk_budget(args).most_tokens
        assert tokens % 32 == 0
        assert 0 < tokens < envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get()
        assert limit_prefix_chunks(args).most_tokens == tokens
        assert envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get() == tokens
        envs.SGLANG_MAX_KV_CHUNK_CAPACITY.set(51)  # what the user wants smaller stays smaller
        assert limit_prefix_chunks(args).chunk_tokens([1], [1000]) == 48
        assert envs.SGLANG_MAX_KV_CHUNK_CAPACITY.get() == 48

    def test_outputs_of_the_largest_batch_must_fit(self, tiny_model):
        sizes = {"dcp_size": 2, "dcp_workspace_mb": 1}
        assert make_args(tiny_model, chunked_prefill_size=512, **sizes)
        said = r"beside the outputs of 65536 new tokens need (\d+) MiB"
        with pytest.raises(ValueError, match=said):
            make_args(tiny_model, chunked_prefill_size=65536, **sizes)

    def test_plans_count_where_chunks_are_planned(self, tiny_model, monkeypatch):
        from sglang_dcp.hooks.workspace import chunk_budget

        for backend, plan_bytes in (("flashinfer", 8 * MIB), ("flashmla", 8 * MIB), ("triton", 0)):
            args = make_args_on(
                "cuda", monkeypatch, tiny_model, dcp_size=2, attention_backend=backend
            )
            assert chunk_budget(args).plan_bytes == plan_bytes
