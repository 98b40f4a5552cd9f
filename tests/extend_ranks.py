"""Pass-Q's two kernels of an attention backend, made without a server; one process, every rank.

Only what the kernels and their plans read is set on a backend, so the same checks run on a GPU
and, with stand-ins for kernels that exist on a GPU only, without one.
"""

from __future__ import annotations

import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
from simulated_ranks import as_rank

from sglang_dcp import state
from sglang_dcp.kernels.lse_merge import merge_partials
from sglang_dcp.kernels.state_merge import merge_state_into

PAGE = 64
CLASSES = {
    "flashmla": "DcpFlashMLABackend",
    "flashinfer": "DcpFlashInferBackend",
    "triton": "DcpTritonBackend",
}
#: (prefix, new) of every request, and tokens of a slice.
BATCHES = {
    # empty stripes, groups and slices, no prefix, a partly filled page
    "mixed": ([(1, 3), (700, 64), (0, 5), (128, 1), (5000, 17), (3, 2)], 40),
    "one": ([(9000, 64)], 64),
    "verify": ([(3000 + 7 * i, 4) for i in range(8)], 64),
    "long": ([(4100, 300)], 128),
    "small": ([(1, 3), (70, 9), (0, 5), (128, 1), (200, 6), (3, 2)], 8),
}


class Pool:
    """Requests in widened pages, their queries, and the rows of all ranks."""

    def __init__(
        self,
        batch: str,
        dcp_size: int,
        num_heads: int,
        dims: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.requests, self.max_tokens = BATCHES[batch]
        self.prefix_lens, self.new_lens = (list(x) for x in zip(*self.requests, strict=True))
        self.dcp_size, self.num_heads, self.device = dcp_size, num_heads, device
        self.nope, self.dim = dims[0], sum(dims)
        wide, longest = PAGE * dcp_size, max(p + n for p, n in self.requests)
        pages_each = -(-longest // wide)
        pages = torch.randperm(len(self.requests) * pages_each).view(len(self.requests), -1) + 1
        position = torch.arange(longest)
        self.slots = (pages[:, position // wide] * wide + position % wide).int().to(device)
        num_rows = (len(self.requests) * pages_each + 1) * wide
        self.rows = torch.randn(num_rows, 1, self.dim, device=device).to(dtype)
        spread = 4 ** torch.rand(1, num_heads, 1, device=device)
        q = torch.randn(sum(self.new_lens), num_heads, self.dim, device=device)
        self.q, self.scale = (q * spread).to(dtype), (self.dim / 3) ** -0.5
        spans = enumerate(self.requests)
        self.latent = self.rows[torch.cat([self.slots[b, p : p + n] for b, (p, n) in spans]).long()]
        self.layer = SimpleNamespace(
            layer_id=0,
            v_head_dim=self.nope,
            scaling=self.scale,
            logit_cap=0.0,
            logit_capping_method="tanh",
        )

    def batch(self) -> SimpleNamespace:
        """What the plans read of a ForwardBatch."""

        def on_device(values: Any, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return SimpleNamespace(
            extend_prefix_lens_cpu=self.prefix_lens,
            extend_seq_lens_cpu=self.new_lens,
            extend_prefix_lens=on_device(self.prefix_lens, torch.int32),
            req_pool_indices=on_device(range(len(self.requests)), torch.int64),
            batch_size=len(self.requests),
        )

    def attend(self, keys_of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 o [T, H, nope], lse [T, H] base e, over keys_of(request, new token): slots."""
        outs: list[torch.Tensor] = []
        lses = []
        for b, (_, new) in enumerate(self.requests):
            for t in range(new):
                keys = self.rows[keys_of(b, t).long(), 0].double()
                logits = self.q[len(outs)].double() @ keys.T * self.scale
                outs.append(logits.softmax(-1) @ keys[:, : self.nope])
                lses.append(logits.logsumexp(-1))
        return torch.stack(outs), torch.stack(lses)

    def stripe(self, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One rank's part of the prefixes."""
        return self.attend(lambda b, t: self.slots[b, rank : self.prefix_lens[b] : self.dcp_size])

    def fresh(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The new tokens among themselves."""
        prefix = self.prefix_lens
        return self.attend(lambda b, t: self.slots[b, prefix[b] : prefix[b] + t + 1])

    def whole(self) -> torch.Tensor:
        """The answer."""
        return self.attend(lambda b, t: self.slots[b, : self.prefix_lens[b] + t + 1])[0]


def make_backend(name: str, pool: Pool, rank: int, wrapper_class: Any = None) -> Any:
    """A backend of one rank, without its constructor."""
    module = importlib.import_module(f"sglang_dcp.attention.{name}")
    backend = object.__new__(getattr(module, CLASSES[name]))
    rows = pool.rows[rank :: pool.dcp_size].contiguous()
    backend.device, backend.req_to_token = pool.device, pool.slots
    backend.token_to_kv_pool = SimpleNamespace(
        get_key_buffer=lambda layer_id: rows,
        get_kv_buffer=lambda layer_id: (rows, rows[..., : pool.nope]),
    )
    backend.max_kv_splits = 4
    backend.kv_cache_dim, backend.kv_lora_rank = pool.dim, pool.nope
    if name != "triton":
        workspace = torch.empty(384 << 20, dtype=torch.uint8, device=pool.device)
        backend.workspace_buffer, backend._prefix_wrappers = workspace, []
        backend.prefill_wrapper_paged = wrapper_class(workspace, backend="auto")
        backend.indices_updater_decode = SimpleNamespace(
            kv_lora_rank=pool.nope,
            qk_rope_head_dim=pool.dim - pool.nope,
            scaling=pool.scale,
            data_type=pool.rows.dtype,
            req_to_token=pool.slots,
        )
    return backend


def _natural(lse: torch.Tensor, base: str) -> torch.Tensor:
    return lse.double() * (math.log(2) if base == "2" else 1.0)


def _heads_first(q: torch.Tensor) -> torch.Tensor:
    """As the a2a communicator returns gathered queries, and upstream absorbed ones."""
    return q.transpose(0, 1).contiguous().transpose(0, 1)


def _run_rank(name: str, pool: Pool, rank: int, tol: float, wrapper_class: Any) -> Any:
    """(backend, o and lse of every slice, fresh part of own heads) of one rank, checked."""
    own = pool.num_heads // pool.dcp_size
    heads = slice(rank * own, (rank + 1) * own)
    want, want_lse = pool.stripe(rank)
    fresh_want, fresh_want_lse = (x[:, heads] for x in pool.fresh())
    with as_rank(rank, pool.dcp_size):
        comm = state.get_state().comm
        comm.max_tokens, comm.num_heads, comm.local_heads = pool.max_tokens, pool.num_heads, own
        comm.kv_lora_rank = pool.nope
        backend = make_backend(name, pool, rank, wrapper_class)
        for _ in range(2):  # a second batch finds what the first one left
            backend.plan_extend(pool.batch())
        partials = []
        for part in backend.prefix_slices:
            q = _heads_first(pool.q[part.tokens])
            o, lse = backend.attend_prefix(q, pool.layer, part.kernel)
            assert lse.dtype == torch.float32
            owned = part.local_lens[rank] > 0
            _close(o[owned], want[part.tokens][owned], tol)
            natural = _natural(lse, backend.lse_base)
            _close(natural[owned], want_lse[part.tokens][owned], tol)
            partials.append((o.clone(), lse.clone()))
        q = _heads_first(pool.q[:, heads])
        q_pe = pool.q[:, heads, pool.nope :]
        keys = pool.latent[..., : pool.nope].contiguous(), pool.latent[..., pool.nope :]
        fresh = backend.attend_fresh(q[..., : pool.nope], q_pe, *keys, pool.layer)
        assert fresh[0].is_contiguous()
        _close(fresh[0], fresh_want, tol)
        _close(_natural(fresh[1], backend.extend_lse_base), fresh_want_lse, tol)
    return backend, partials, fresh


def _close(got: torch.Tensor, want: torch.Tensor, tol: float) -> None:
    torch.testing.assert_close(got.double(), want, atol=tol, rtol=tol)


def check_backend(name: str, pool: Pool, tol: float, wrapper_class: Any = None) -> None:
    """Every rank's parts against float64, and merged, the answer."""
    ranks = [_run_rank(name, pool, rank, tol, wrapper_class) for rank in range(pool.dcp_size)]
    whole, own = pool.whole(), pool.num_heads // pool.dcp_size
    assert len({len(partials) for _, partials, _ in ranks}) == 1
    for rank, (backend, _, (out, fresh_lse)) in enumerate(ranks):
        heads = slice(rank * own, (rank + 1) * own)
        for i, part in enumerate(backend.prefix_slices):
            o, lse = (torch.stack([r[1][i][k] for r in ranks])[:, :, heads] for k in (0, 1))
            kept = lse.new_full(lse.shape[1:], math.nan)
            merged = merge_partials(o, lse, part.local_lens, backend.lse_base, merged_lse=kept)
            rows = torch.arange(len(out), device=out.device)[part.tokens]
            bases = backend.extend_lse_base, backend.lse_base
            merge_state_into(out, fresh_lse, bases[0], merged, kept, bases[1], rows)
        _close(out, whole[:, heads], tol)
    # the comparison can fail: without the prefixes it is another answer
    assert (pool.fresh()[0] - whole).abs().max() > 0.1
