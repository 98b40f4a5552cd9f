"""What upstream lacks on CPU ranks, in torch; applied only on --device cpu, with or without DCP.

The stand-ins replace Triton kernels in the modules that launch them: `kernel[grid](...)` keeps its
form. The interpreted kernels stay the judges of the stand-ins (tests/test_cpu_kernels.py).
"""

from collections.abc import Callable
from typing import Any

import torch


class TorchKernel:
    """Gives a torch function the launch syntax of a Triton kernel, `kernel[grid](*args)`."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function


def _alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Slots of positions [prefix, seq) of each request: rest of its last page, then new pages."""
    at = page_at = 0
    for prefix, seq, last in zip(
        prefix_lens.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True
    ):
        pages_before, pages_after = -(-prefix // page_size), -(-seq // page_size)
        num_new_pages = pages_after - pages_before
        if num_new_pages > free_pages.shape[0] - page_at:
            return  # the caller compares the pages it needs with those it has, and gives up
        position = torch.arange(prefix, seq)
        new_page = position // page_size - pages_before  # below 0: still in the last page
        pages = free_pages[page_at : page_at + num_new_pages]
        slots = last + 1 + position - prefix
        if num_new_pages:
            fresh = pages[new_page.clamp(min=0)] * page_size + position % page_size
            slots = torch.where(new_page >= 0, fresh, slots)
        out_indices[at : at + seq - prefix] = slots
        at, page_at = at + seq - prefix, page_at + num_new_pages


def _alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Slot of position seq - 1 of each request: next to the last one, or the start of a page."""
    starts_page = (seq_lens - 1) % page_size == 0
    which = starts_page.long().cumsum(0) - 1
    if int(starts_page.sum()) > free_pages.shape[0]:
        return  # as above
    fresh = free_pages[which[starts_page]] * page_size
    out_indices.copy_(last_loc + 1)
    out_indices[starts_page] = fresh.to(out_indices.dtype)


def _chunk_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    starts: torch.Tensor | None,
    lens: torch.Tensor,
    indptr: torch.Tensor,
    out: torch.Tensor,
) -> None:
    first = torch.zeros_like(lens) if starts is None else starts
    columns = zip(
        req_pool_indices.tolist(), first.tolist(), lens.tolist(), indptr.tolist(), strict=False
    )
    for req, start, length, at in columns:
        out[at : at + length] = req_to_token[req, start : start + length]


def _create_chunked_prefix_cache_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    chunk_starts: torch.Tensor,
    chunk_seq_lens: torch.Tensor,
    chunk_cu_seq_lens: torch.Tensor,
    chunk_kv_indices: torch.Tensor,
    stride: int,
) -> None:
    _chunk_indices(
        req_to_token,
        req_pool_indices,
        chunk_starts,
        chunk_seq_lens,
        chunk_cu_seq_lens,
        chunk_kv_indices,
    )


def _create_flashinfer_kv_indices(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    lens: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_start_idx: torch.Tensor | None,
    kv_indices: torch.Tensor,
    stride: int,
) -> None:
    _chunk_indices(req_to_token, req_pool_indices, kv_start_idx, lens, kv_indptr, kv_indices)


def memcpy_rows(
    dst: torch.Tensor,
    src: torch.Tensor,
    dim: int,
    offset: torch.Tensor,
    sz: torch.Tensor,
    offset_src: bool,
) -> None:
    """Twin of dp_attention.memcpy_triton: `sz` rows, at `offset` of src or of dst, from 0 else."""
    start, end = int(offset), int(offset) + int(sz)
    if offset_src:
        dst[: end - start] = src[start:end]
    else:
        dst[start:end] = src[: end - start]


def reg_all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """The group's own method; upstream reaches it through an operator that only CUDA has."""
    from sglang.srt.distributed import parallel_state

    parallel_state._groups[group_name]()._all_gather_into_tensor(output, input)


def reg_reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:
    """As above."""
    from sglang.srt.distributed import parallel_state

    parallel_state._groups[group_name]()._reduce_scatter_tensor(output, input)


_torch_tensor = torch.tensor


def tensor_unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
    """torch.tensor that never pins: there is no driver to pin memory for."""
    return _torch_tensor(*args, **kwargs)


alloc_extend_kernel = TorchKernel(_alloc_extend)
alloc_decode_kernel = TorchKernel(_alloc_decode)
create_chunked_prefix_cache_kv_indices = TorchKernel(_create_chunked_prefix_cache_kv_indices)
create_flashinfer_kv_indices_triton = TorchKernel(_create_flashinfer_kv_indices)


def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Twin of sgl_kernel.merge_state_v2, which exists on CUDA only.

    Args:
        v_a, v_b: [T, H, D] partial outputs; s_a, s_b: [T, H] their LSEs, base e, -inf for a row
            that saw no key (its output is dropped by a select).
        v_merged, s_merged: results, allocated if None.
    """
    v_merged = torch.empty_like(v_a) if v_merged is None else v_merged
    s_merged = torch.empty_like(s_a) if s_merged is None else s_merged
    total = torch.logaddexp(s_a, s_b)
    parts = [
        torch.where(
            (s == float("-inf"))[..., None], 0.0, torch.exp(s - total)[..., None] * v.float()
        )
        for v, s in ((v_a, s_a), (v_b, s_b))
    ]
    v_merged.copy_(parts[0] + parts[1])
    s_merged.copy_(total)
    return v_merged, s_merged


def around_moe_forward_native(
    original: Callable[..., torch.Tensor], layer: Any, x: torch.Tensor, topk: Any, config: Any
) -> torch.Tensor:
    """AROUND moe_forward_native: with expert parallelism, other ranks' experts carry id -1.

    Each (token, own expert) pair becomes a row of its own, and rows are added up by token.
    """
    own = topk.topk_ids >= 0
    if bool(own.all()):
        return original(layer, x, topk, config)
    result, (tokens, _) = torch.zeros_like(x), own.nonzero(as_tuple=True)
    if tokens.numel() == 0:
        return result
    rows = topk._replace(
        topk_ids=topk.topk_ids[own][:, None], topk_weights=topk.topk_weights[own][:, None]
    )
    return result.index_add_(0, tokens, original(layer, x[tokens], rows, config))


def around_support_triton(original: Callable[[str], bool], backend: str) -> bool:
    """AROUND support_triton: upstream decides by the backend's name, and knows every other name."""
    return False if backend == "torch_mla" else original(backend)


def handle_attention_torch_mla(attn: Any, forward_batch: Any) -> Any:
    """Dispatch of DeepSeek attention for `torch_mla`, as upstream does it for its own backends."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        _handle_attention_backend,
    )

    return _handle_attention_backend(attn, forward_batch, "torch_mla")
