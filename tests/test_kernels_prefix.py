"""What pass-KV moves of a chunk: rows picked, put in order, and keys put together."""

import pytest
import torch

from sglang_dcp.kernels import key_concat, row_order, row_pick

IMPLS = ["kernel", "ref"]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# nope, rope
DIMS = [(512, 64), (48, 24)]


def of(module, name, impl):
    return getattr(module, name if impl == "kernel" else f"{name}_ref")


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [576, 40])
def test_picked_rows_are_the_named_ones(kernel_device, impl, dtype, index_dtype, width):
    """Repeated ones too, out of wider storage, NaNs and all; twice, with other rows."""
    pick = of(row_pick, "pick_rows", impl)
    for _ in range(2):
        rows = torch.randn(19, width + 8, device=kernel_device).to(dtype)[:, :width]
        rows[3] = float("nan")
        index = torch.randint(0, 19, (13,), device=kernel_device).to(index_dtype)
        index[5] = 3
        out = torch.full((13, width), 7.0, dtype=dtype, device=kernel_device)
        assert pick(rows, index, out) is out
        assert same_bits(out, torch.stack([rows[i] for i in index.tolist()]))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dcp_size", [2, 3, 8])
@pytest.mark.parametrize("cut", [False, True])
def test_tokens_are_in_order(kernel_device, impl, dtype, dims, dcp_size, cut):
    """Rank after rank becomes token after token; a source leaves the padding of a cut group out."""
    order, num_groups = of(row_order, "order_rows", impl), 7
    for _ in range(2):
        num_tokens = num_groups * dcp_size - (1 if cut else 0)
        tokens = torch.randn(num_tokens, sum(dims), device=kernel_device).to(dtype)
        gathered = torch.full((dcp_size, num_groups, sum(dims)), float("nan"), dtype=dtype)
        gathered = gathered.to(kernel_device)
        for t in range(num_tokens):
            gathered[t % dcp_size, t // dcp_size] = tokens[t]
        source = torch.arange(num_tokens, device=kernel_device)
        source = source % dcp_size * num_groups + source // dcp_size
        nope, rope = (
            torch.full((num_tokens, dim), float("nan"), dtype=dtype, device=kernel_device)
            for dim in dims
        )
        order(gathered, source if cut else None, nope, rope)
        assert torch.equal(torch.cat([nope, rope], dim=1), tokens)


@pytest.mark.parametrize("impl", IMPLS)
def test_rows_are_cast_on_the_way(kernel_device, impl):
    gathered = torch.randn(2, 5, 576, device=kernel_device).to(torch.bfloat16)
    nope, rope = (torch.empty(10, dim, device=kernel_device) for dim in (512, 64))
    of(row_order, "order_rows", impl)(gathered, None, nope, rope)
    want = gathered.transpose(0, 1).reshape(10, 576).float()
    assert torch.equal(torch.cat([nope, rope], dim=1), want)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dims"), [(6, (128, 64)), (4, (128, 64)), (3, (24, 8))])
def test_keys_have_the_shared_part_at_every_head(kernel_device, impl, dtype, heads, dims):
    """k_nope is half of an expansion, as kv_b_proj yields it."""
    concat = of(key_concat, "concat_keys", impl)
    for _ in range(2):
        kv = torch.randn(11, heads, 2 * dims[0], device=kernel_device).to(dtype)
        rope = torch.randn(11, 1, 3 * dims[1], device=kernel_device).to(dtype)[..., : dims[1]]
        got = concat(kv[..., : dims[0]], rope)
        assert got.is_contiguous()
        for h in range(heads):
            assert torch.equal(got[:, h], torch.cat([kv[:, h, : dims[0]], rope[:, 0]], dim=1))


def test_nothing_to_move(kernel_device):
    """A chunk may hold no token of a rank's layer; no kernel is launched on an empty grid."""
    rows = torch.zeros(4, 576, device=kernel_device)
    none = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    assert row_pick.pick_rows(rows, none, rows[:0].clone()).shape == (0, 576)
    row_order.order_rows(rows[:0].view(2, 0, 576), None, rows[:0, :512], rows[:0, 512:])
    assert key_concat.concat_keys(rows.view(4, 1, 576)[:0], rows.view(4, 1, 576)[:0]).numel() == 0
