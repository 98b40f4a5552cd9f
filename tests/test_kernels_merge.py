"""LSE merge: kernel and reference against unsharded float64 attention over the union."""

import math

import pytest
import torch
from support import assert_close, attention_ref, make_qkv, stripe_states

from sglang_dcp.kernels.lse_merge import merge_partials, merge_partials_ref
from sglang_dcp.kernels.lse_weigh import weigh_partial, weigh_partial_ref

LENS = [1, 7, 64, 0]  # 1 and 7 leave ranks of DCP 8 empty; 0 leaves all of them empty
MERGES = {"kernel": merge_partials, "ref": merge_partials_ref}
WEIGHS = {"kernel": weigh_partial, "ref": weigh_partial_ref}
HEADS, DIM = 3, 24  # not multiples of the tile


def case(dcp_size, lse_base, device, dtype=torch.float32, lens=LENS):
    """(partials o, lse, lens on device), (unsharded o, lse in float64)."""
    qkv = make_qkv(lens, HEADS, DIM)
    o, lse, local = stripe_states(*qkv, lens, dcp_size, lse_base)
    states = o.to(device, dtype), lse.to(device, torch.float32), local.to(device)
    return states, attention_ref(*qkv, lens, lse_base)


def nan_like(shape, dtype, device):
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


@pytest.mark.parametrize("impl", MERGES)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dcp_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_equals_unsharded_attention(kernel_device, impl, lse_base, dcp_size, dtype):
    (o, lse, local), (want, want_lse) = case(dcp_size, lse_base, kernel_device, dtype)
    merged = nan_like((len(LENS), HEADS, DIM), dtype, kernel_device)
    merged_lse = nan_like((len(LENS), HEADS), torch.float32, kernel_device)
    got = MERGES[impl](o, lse, local, lse_base, merged, merged_lse)
    assert got.data_ptr() == merged.data_ptr()
    assert_close(merged, want)
    assert_close(merged_lse, want_lse, torch.float32)
    # all stripes empty: exactly 0 and -inf, although every rank sent a finite LSE
    assert merged[3].eq(0).all()
    assert merged_lse[3].eq(-math.inf).all()
    assert torch.equal(MERGES[impl](o, lse, local, lse_base), merged)


@pytest.mark.parametrize("impl", MERGES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf"), 3.0])
def test_empty_stripes_change_no_bit(kernel_device, impl, poison):
    """Empty is what the length says: NaN (0 * NaN is NaN), inf and finite values go."""
    (o, lse, local), (want, _) = case(8, "2", kernel_device)
    clean = MERGES[impl](o, lse, local, "2")
    empty = local == 0
    assert empty.sum() > 8
    o[empty], lse[empty] = poison, poison
    merged = MERGES[impl](o, lse, local, "2")
    assert torch.equal(merged, clean)
    assert_close(merged, want)


@pytest.mark.parametrize("impl", MERGES)
def test_emptiness_is_not_judged_from_the_lse(kernel_device, impl):
    """The test above can fail: counting the finite garbage of clamped kernels is visible."""
    (o, lse, local), (want, _) = case(8, "e", kernel_device)
    naive = MERGES[impl](o, lse, torch.ones_like(local), "e")
    assert (naive.double().cpu() - want).abs().max() > 0.1


@pytest.mark.parametrize("impl", MERGES)
def test_wrong_base_and_averaging_are_visible(kernel_device, impl):
    (o, lse, local), (want, _) = case(4, "2", kernel_device, lens=[64, 63])
    wrong = MERGES[impl](o, lse, local, "e")
    assert (wrong.double().cpu() - want).abs().max() > 1e-2
    assert (o.double().cpu().mean(0) - want).abs().max() > 1e-2


@pytest.mark.parametrize("impl", MERGES)
def test_extreme_lse_differences_stay_finite(kernel_device, impl):
    o = torch.randn(3, 1, HEADS, DIM, device=kernel_device)
    lse = torch.tensor([-3e4, 3e4, 0.0], device=kernel_device)[:, None, None].expand(3, 1, HEADS)
    local = torch.ones(3, 1, dtype=torch.int32, device=kernel_device)
    torch.testing.assert_close(MERGES[impl](o, lse, local, "e"), o[1], atol=0, rtol=1e-6)


@pytest.mark.parametrize("impl", MERGES)
def test_any_strides(kernel_device, impl):
    """Heads-first partials, [B, H, 1] LSEs, slices of static buffers, heads-first result."""
    (o, lse, local), (want, want_lse) = case(4, "2", kernel_device, torch.bfloat16)
    batch = len(LENS)
    heads_first = o.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
    wide_lse = nan_like((4, HEADS, batch + 5), torch.float32, kernel_device)
    wide_lse[..., :batch] = lse.transpose(1, 2)
    wide_lens = torch.full((4, batch + 3), -9, dtype=torch.int32, device=kernel_device)
    wide_lens[:, :batch] = local
    storage = nan_like((HEADS, batch + 1, DIM), torch.float32, kernel_device)
    merged_lse = nan_like((HEADS, batch), torch.float32, kernel_device)
    MERGES[impl](
        heads_first,
        wide_lse[..., :batch].transpose(1, 2),
        wide_lens[:, :batch],
        "2",
        storage[:, :batch].transpose(0, 1),
        merged_lse.T,
    )
    assert_close(storage[:, :batch].transpose(0, 1), want, torch.bfloat16)
    assert_close(merged_lse.T, want_lse)
    assert storage[:, batch].isnan().all()


@pytest.mark.parametrize("impl", WEIGHS)
@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dcp_size", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weighed_partials_sum_to_unsharded_attention(
    kernel_device, impl, lse_base, dcp_size, dtype
):
    (o, lse, local), (want, _) = case(dcp_size, lse_base, kernel_device, dtype)
    o[local == 0], lse[local == 0] = float("nan"), float("nan")
    total = torch.zeros(len(LENS), HEADS, DIM, device=kernel_device)
    for rank in range(dcp_size):
        storage = nan_like((HEADS, len(LENS), DIM), torch.float32, kernel_device)
        total += WEIGHS[impl](o[rank], lse, local, rank, lse_base, storage.transpose(0, 1))
        assert storage.transpose(0, 1)[local[rank] == 0].eq(0).all()
    assert_close(total, want, dtype)


def test_shape_errors_name_both_shapes(kernel_device):
    o, lse = torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 5)
    with pytest.raises(AssertionError, match=r"\[2, 3, 5\].*\[2, 3, 4, 8\]"):
        merge_partials(o, lse, torch.ones(2, 3, dtype=torch.int32), "e")
    with pytest.raises(AssertionError, match="neither 'e' nor '2'"):
        merge_partials(o, lse[..., :4], torch.ones(2, 3, dtype=torch.int32), "10")
