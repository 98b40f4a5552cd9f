"""Plans of graph replays must reach the GPU as they were made, however far the host is ahead."""

from functools import partial

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HEADS, BATCH, POOL_ROWS = 16, 4, 4096
SHORT, LONG = 17, 900


def make_wrapper():
    from flashinfer import BatchMLAPagedAttentionWrapper
    from sglang.srt.layers.attention.flashinfer_mla_backend import fast_mla_decode_plan

    int32 = {"dtype": torch.int32, "device": "cuda"}
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(128 << 20, dtype=torch.uint8, device="cuda"),
        use_cuda_graph=True,
        qo_indptr=torch.arange(BATCH + 1, **int32),
        kv_indptr=torch.zeros(BATCH + 1, **int32),
        kv_indices=torch.zeros(BATCH * LONG, **int32),
        kv_len_arr=torch.ones(BATCH, **int32),
        backend="auto",
    )
    plan(wrapper, SHORT)
    wrapper.plan = partial(fast_mla_decode_plan, wrapper)
    return wrapper


def plan(wrapper, length):
    indptr = torch.arange(BATCH + 1, dtype=torch.int32)
    indices = torch.arange(BATCH * length, dtype=torch.int32, device="cuda")
    lens = torch.full((BATCH,), length, dtype=torch.int32)
    shape = (HEADS, 512, 64, 1, False, 576**-0.5, torch.bfloat16, torch.bfloat16)
    wrapper.plan(indptr, indptr * length, indices, lens, *shape)


def attend_unsplit(q, pool, length):
    rows = pool[: BATCH * length].double().view(BATCH, length, 576)
    weights = (torch.einsum("bhd,bld->bhl", q.double(), rows) * 576**-0.5).softmax(-1)
    return torch.einsum("bhl,bld->bhd", weights, rows[..., :512])


def outputs_of_a_late_gpu(before_plan, after_plan):
    """Relative errors of two steps whose plans were both made before the GPU began the first."""
    torch.manual_seed(torch.seed() % 2**31)
    wrapper = make_wrapper()
    pool = torch.randn(POOL_ROWS, 576, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(BATCH, HEADS, 576, dtype=torch.bfloat16, device="cuda")
    # the same rows for both lengths, since the wrapper's indices are not part of the plan
    wrapper._kv_indices_buf.copy_(torch.arange(BATCH * LONG, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda._sleep(400_000_000)
    got = {}
    for length in (SHORT, LONG):
        before_plan(wrapper)
        plan(wrapper, length)
        after_plan(wrapper)
        parts = q[..., :512], q[..., 512:], pool[:, None, :512], pool[:, None, 512:]
        got[length] = wrapper.run(*parts).clone()
    torch.cuda.synchronize()
    errors = {}
    for length, out in got.items():
        want = attend_unsplit(q, pool, length)
        errors[length] = ((out.double() - want).norm() / want.norm()).item()
    return errors


def test_spare_plan_survives_a_late_gpu():
    from sglang_dcp.attention.flashinfer import use_spare_plan

    errors = outputs_of_a_late_gpu(use_spare_plan, lambda wrapper: wrapper.dcp_plan_copied.record())
    assert max(errors.values()) < 1e-2, errors


def test_upstreams_plan_does_not():
    errors = outputs_of_a_late_gpu(lambda wrapper: None, lambda wrapper: None)
    assert errors[SHORT] > 0.1, errors
    assert errors[LONG] < 1e-2, errors
