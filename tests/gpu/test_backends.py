"""Every attention backend on GPUs, through real servers: scripts/compare_upstream.py as a test.

On a machine with one GPU both ranks share it (sglang_dcp/testing/shared_gpu.py).
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def compare(tmp_path: Path, *runs: str) -> dict:
    """Reports of the comparison with upstream for `runs`, by backend and communicator."""
    sharing = ["--share-gpu"] if torch.cuda.device_count() < 2 else []
    size = ["--long-tokens", "20000", "--pool-tokens", "32768", "--new-tokens", "12"]
    out = tmp_path / "compare.json"
    command = [sys.executable, str(ROOT / "scripts" / "compare_upstream.py"), *sharing, *size]
    command += ["--log-dir", str(tmp_path), "--json", str(out), "--runs", *runs]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())["reports"]


def assert_as_upstream(report: dict) -> None:
    assert report["problems"] == []
    assert report["num_prompts"] > 100
    # bf16: as many equal prompts as upstream has between two of its own backends, or nearly
    assert report["num_equal"] >= 0.9 * max(report["upstream_num_equal"])


def test_flashmla(tmp_path):
    reports = compare(tmp_path, "flashmla:a2a", "flashmla:ag_rs")
    assert set(reports) == {"flashmla-a2a", "flashmla-ag_rs"}
    for report in reports.values():
        assert_as_upstream(report)


def test_flashinfer(tmp_path):
    assert_as_upstream(compare(tmp_path, "flashinfer:a2a")["flashinfer-a2a"])


def test_triton(tmp_path):
    assert_as_upstream(compare(tmp_path, "triton:a2a")["triton-a2a"])
