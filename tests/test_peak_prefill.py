"""scripts/peak_prefill.py: what it asks of a server, and how it judges the ranks' peaks."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from sglang_dcp import envs
from sglang_dcp.testing.client import Client

ROOT = Path(__file__).resolve().parent.parent


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("peak_prefill", ROOT / "scripts/peak_prefill.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class HoldingServer(Client):
    """Two ranks that hold 1 GB, and 128 KiB for a prompt; rank 1 reads prefixes with more."""

    prefix_bytes = 200 << 20
    modules: ClassVar[list[str]] = []

    def __init__(
        self, command: list[str], log: Path, module: str, env: Any, start_timeout_s: float
    ) -> None:
        super().__init__("http://nowhere")
        self.modules.append(module)
        assert command[command.index("--dcp-prefill") + 1] == "pass-kv"
        self.folder, self.startup_s = Path(env[envs.COUNTERS_DIR]), 1.0
        self.folder.mkdir(parents=True)
        self.peaks, self.prompts = [0, 0], list[list[int]]()

    def __enter__(self) -> "HoldingServer":
        return self

    def __exit__(self, *args: Any) -> None:
        assert len(set(map(tuple, self.prompts))) == 3, "a prompt seen twice would be cached"

    def first_token(self, prompt: Any, timeout_s: float = 0) -> tuple[float, dict[str, Any]]:
        self.prompts.append(list(prompt))
        reads = self.prefix_bytes if len(prompt) > 100 else 0
        self.peaks = [1 << 17, (1 << 17) + reads]
        return 2.0, {}

    def get(self, path: str) -> Any:
        for rank, peak in enumerate(self.peaks):
            held = {"gpu_bytes": 10**9, "gpu_bytes_peak": 10**9 + peak}
            (self.folder / f"rank-{rank}.json").write_text(json.dumps(held))
        self.peaks = [0, 0]


@pytest.mark.parametrize("workspace_mb", [100, 256])
def test_peak_of_a_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, workspace_mb: int
) -> None:
    script = load_script()
    monkeypatch.setattr(script, "Server", HoldingServer)
    result = tmp_path / "peak.json"
    sizes = ["--prompt-tokens", "500", "--chunk-tokens", "100", "--git-hash", "abc"]
    sharing = ["--share-gpu"] * (workspace_mb == 256)
    files = ["--log-dir", str(tmp_path), "--json", str(result)]
    code = script.main([*sizes, "--workspace-mb", str(workspace_mb), *files, *sharing])
    assert code == (1 if workspace_mb == 100 else 0)
    module = "sglang_dcp.testing.shared_gpu" if sharing else "sglang_dcp.launch_server"
    assert script.Server.modules[-1] == module
    record = json.loads(result.read_text())
    assert record["read_bytes"] == [0, 200 << 20]
    assert f"took 0, 200 MiB on the ranks, of {workspace_mb}" in capsys.readouterr().out
