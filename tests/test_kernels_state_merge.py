"""Merge of two attention states into the first: kernel and reference against float64 attention."""

import math
from itertools import pairwise, product

import pytest
import torch
from support import assert_close, attention_ref, make_qkv

from sglang_dcp.kernels.state_merge import merge_state_into, merge_state_into_ref

MERGES = {"kernel": merge_state_into, "ref": merge_state_into_ref}
HEADS, DIM = 3, 24  # not multiples of the tile
LENS = [1, 5, 40, 0, 9]
CUT = 5  # the part holds the keys from here on: none of the first two requests


def case(bases, device, dtype=torch.float32):
    """(o, lse), (part, part_lse) of keys below and from CUT on, and the whole in float64."""
    qkv = make_qkv(LENS, HEADS, DIM)
    states = []
    for keys, base in zip((slice(None, CUT), slice(CUT, None)), bases, strict=True):
        o, lse = attention_ref(*qkv, LENS, base, keys)
        o[lse == -math.inf] = math.nan  # what a kernel may leave there
        states.append((o.to(device, dtype), lse.to(device, torch.float32)))
    return *states, attention_ref(*qkv, LENS)[0]


@pytest.mark.parametrize("impl", MERGES)
@pytest.mark.parametrize("bases", product("e2", "e2"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge_equals_attention_over_both(kernel_device, impl, bases, dtype):
    (o, lse), (part, part_lse), want = case(bases, kernel_device, dtype)
    before = lse.clone()
    got = MERGES[impl](o, lse, bases[0], part, part_lse, bases[1])
    assert got.data_ptr() == o.data_ptr()
    assert torch.equal(lse, before)
    assert_close(o, want)
    assert o[LENS.index(0)].eq(0).all()


@pytest.mark.parametrize("impl", MERGES)
@pytest.mark.parametrize("bases", product("e2", "e2"))
def test_parts_one_after_another(kernel_device, impl, bases):
    """With its LSE kept up to date a state takes any number of parts."""
    qkv, cuts = make_qkv(LENS, HEADS, DIM), [0, 5, 6, 30, 50]
    o = torch.full((len(LENS), HEADS, DIM), math.nan, device=kernel_device)
    lse = torch.full((len(LENS), HEADS), -math.inf, device=kernel_device)
    for begin, end in pairwise(cuts):
        part, part_lse = attention_ref(*qkv, LENS, bases[1], slice(begin, end))
        part[part_lse == -math.inf] = math.nan
        parts = part.to(kernel_device, torch.float32), part_lse.to(kernel_device, torch.float32)
        MERGES[impl](o, lse, bases[0], *parts, bases[1], update_lse=True)
    want, want_lse = attention_ref(*qkv, LENS, bases[0])
    assert_close(o, want)
    assert_close(lse, want_lse)
    assert lse[LENS.index(0)].eq(-math.inf).all()


@pytest.mark.parametrize("impl", MERGES)
def test_rows_and_strides(kernel_device, impl):
    """A part of some rows only, heads-first storage, a slice of a wider LSE buffer."""
    (o, lse), (part, part_lse), want = case("2e", kernel_device)
    rows = torch.tensor([4, 1, 2], device=kernel_device)
    heads_first = o.transpose(0, 1).contiguous().transpose(0, 1)
    before = heads_first.clone()
    wide = torch.full((3, HEADS + 2), math.nan, device=kernel_device)
    wide[:, :HEADS] = part_lse[rows]
    MERGES[impl](heads_first, lse, "2", part[rows], wide[:, :HEADS], "e", rows)
    for row in range(len(LENS)):
        if row in rows.tolist():
            assert_close(heads_first[row], want[row])
        else:
            assert torch.equal(heads_first[row].isnan(), before[row].isnan())
            assert torch.equal(heads_first[row].nan_to_num(), before[row].nan_to_num())


@pytest.mark.parametrize("impl", MERGES)
def test_a_wrong_base_is_visible(kernel_device, impl):
    (o, lse), (part, part_lse), want = case("e2", kernel_device)
    MERGES[impl](o, lse, "e", part, part_lse, "e")
    assert (o.double().cpu() - want)[LENS.index(40)].abs().max() > 1e-3


def test_no_rows(kernel_device):
    o, lse = (
        torch.ones(2, HEADS, DIM, device=kernel_device),
        torch.zeros(2, HEADS).to(kernel_device),
    )
    none = torch.zeros(0, dtype=torch.int64, device=kernel_device)
    assert merge_state_into(o, lse, "e", o[:0], lse[:0], "e", none).eq(1).all()


@pytest.mark.parametrize("impl", [*MERGES, "upstream's twin"])
@pytest.mark.parametrize("of_nothing", [-math.inf, -5e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_lse_of_no_keys_weighs_nothing(kernel_device, impl, of_nothing, dtype):
    """FlashInfer returns either, in base 2, with a finite o: the other state stays bit for bit."""
    from sglang_dcp.hooks.cpu import merge_state_v2

    o = torch.randn(5, HEADS, DIM, device=kernel_device).to(dtype)
    lse, part = 100 * torch.randn(5, HEADS, device=kernel_device), 50 * torch.randn_like(o)
    part_lse, before = torch.full_like(lse, of_nothing), o.clone()
    if impl in MERGES:
        MERGES[impl](o, lse, "e", part, part_lse, "2")
    else:
        o, merged_lse = merge_state_v2(part, part_lse * math.log(2), o, lse)
        assert torch.equal(merged_lse, lse)
    assert torch.equal(o, before)
