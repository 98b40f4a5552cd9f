"""Plain-torch references and helpers for the tests; independent of the code under test."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def clean_env(interpret: bool = False) -> dict[str, str]:
    """Environment for a child process: Triton's interpreter only if asked for."""
    ours = ("TRITON_INTERPRET", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
    env = {k: v for k, v in os.environ.items() if k not in ours}
    if interpret:
        env["TRITON_INTERPRET"] = "1"
    return env


def run_python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`code` in a process of its own that imports this checkout; it must succeed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean_env(), "PYTHONPATH": str(ROOT), **env},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def make_qkv(
    lens: list[int], num_heads: int, dim: int, key_dim: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """float64 q [B, H, K], k [B, S, K], v [B, S, D]; logits spread over decades between heads."""
    batch, max_len = len(lens), max(lens)
    scale = 10 ** (torch.rand(batch, num_heads, 1, dtype=torch.float64) * 2 - 1)
    q = torch.randn(batch, num_heads, key_dim, dtype=torch.float64) * scale
    k = torch.randn(batch, max_len, key_dim, dtype=torch.float64)
    v = torch.randn(batch, max_len, dim, dtype=torch.float64)
    return q, k, v


def attention_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: list[int],
    lse_base: str = "e",
    positions: slice | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention over positions[:len] of each request: o [B, H, D], lse [B, H].

    A request without positions gives o = 0, lse = -inf.
    """
    positions = positions or slice(None)
    o = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    lse = torch.full(q.shape[:2], -math.inf, dtype=torch.float64)
    for b, length in enumerate(lens):
        kb, vb = k[b, :length][positions], v[b, :length][positions]
        if len(kb):
            logits = q[b] @ kb.T
            o[b] = logits.softmax(-1) @ vb
            lse[b] = logits.logsumexp(-1)
    return o, lse / math.log(2) if lse_base == "2" else lse


def stripe_states(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: list[int],
    dcp_size: int,
    lse_base: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the ranks' attention kernels return: o [c, B, H, D], lse [c, B, H], lens [c, B] int32.

    As from kernels with clamped lengths, an empty stripe holds plausible finite garbage.
    """
    states = [
        attention_ref(q, k, v, lens, lse_base, slice(r, None, dcp_size)) for r in range(dcp_size)
    ]
    o, lse = (torch.stack(t) for t in zip(*states, strict=True))
    local = torch.tensor(
        [[sum(p % dcp_size == r for p in range(n)) for n in lens] for r in range(dcp_size)],
        dtype=torch.int32,
    )
    empty = local == 0
    o[empty] = torch.randn_like(o[empty]) * 10
    lse[empty] = torch.randn_like(lse[empty]) * 3 + 5
    return o, lse, local


def assert_close(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare with a float64 reference; half types: the rounding of inputs and of the store."""
    dtype = dtype or got.dtype
    tol = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(got.double().cpu(), want.double(), atol=tol, rtol=tol)
