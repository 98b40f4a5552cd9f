"""Start, ask and stop a real SGLang HTTP server as a process group of its own."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any


class ServerError(RuntimeError):
    """The server did not come up, or ended; the message carries the end of its log."""


def free_port() -> int:
    """A TCP port of this host that was free a moment ago, with room above for SGLang's others."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port < 50000:
            return port


class Server:
    """A server process; use as a context manager.

    Args:
        args: command line after the module name, without --host and --port.
        log_path: file for stdout and stderr.
        module: what `python -m` runs.
        env: additions to the environment; a value of None removes a variable.
        start_timeout_s: seconds until /health must answer.
    """

    def __init__(
        self,
        args: Sequence[str],
        log_path: Path,
        module: str = "sglang_dcp.launch_server",
        env: dict[str, str | None] | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self.port = free_port()
        self.log_path = log_path
        self.command = [sys.executable, "-m", module, *args]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]
        # /health would generate a token, and so write KV rows that no one asked for
        quiet = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}
        self._env = {
            **os.environ,
            **quiet,
            **{k: v for k, v in (env or {}).items() if v is not None},
        }
        for name, value in (env or {}).items():
            if value is None:
                self._env.pop(name, None)
        self._start_timeout_s = start_timeout_s
        self.process: subprocess.Popen[bytes] | None = None
        self.startup_s = float("nan")

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start and wait for /health; raises ServerError with the log's end if it fails."""
        began = time.monotonic()
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=self._env, start_new_session=True
            )
        while time.monotonic() - began < self._start_timeout_s:
            if self.process.poll() is not None:
                code = self.process.returncode
                self.stop()
                raise ServerError(f"server ended with {code}:\n{self.log_tail()}")
            try:
                self.get("/health", timeout_s=5)
            except (OSError, ServerError):  # not listening yet, or 503 while it loads
                time.sleep(0.25)
                continue
            self.startup_s = time.monotonic() - began
            return
        self.stop()
        raise ServerError(f"server not up after {self._start_timeout_s:.0f} s:\n{self.log_tail()}")

    def stop(self) -> None:
        """Kill the process group and wait for the launcher.

        At once, not politely: SGLang's own shutdown sleeps for crash diagnostics, and its ranks
        can outlive a launcher that died.
        """
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=30)
        self.process = None

    def log_tail(self, num_chars: int = 6000) -> str:
        """The end of the log."""
        return self.log_path.read_text(errors="replace")[-num_chars:]

    def get(self, path: str, timeout_s: float = 60.0) -> Any:
        """GET `path`; returns parsed JSON, or None for an empty body."""
        return self._request(urllib.request.Request(self._url(path)), timeout_s)

    def post(self, path: str, body: Any, timeout_s: float = 600.0) -> Any:
        """POST `body` as JSON to `path`; returns parsed JSON."""
        request = urllib.request.Request(
            self._url(path), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        return self._request(request, timeout_s)

    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **extra: Any
    ) -> list[dict[str, Any]]:
        """Greedy tokens of a batch of token-id prompts, with their logprobs."""
        params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True}
        body: dict[str, Any] = {"input_ids": [list(p) for p in prompts], "sampling_params": params}
        body |= {"return_logprob": True, "logprob_start_len": -1, **extra}
        return list(self.post("/generate", body))

    def _url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def _request(self, request: urllib.request.Request, timeout_s: float) -> Any:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as response:
                body = response.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            raise ServerError(f"{request.full_url} answered {error.code}: {text[:500]}") from error
        try:
            return json.loads(body) if body else None
        except json.JSONDecodeError:
            return body.decode(errors="replace")
