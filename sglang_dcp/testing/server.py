"""Start, ask and stop a real SGLang HTTP server as a process group of its own."""

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType

from sglang_dcp.testing.client import Client, ServerError

__all__ = ["GpuSets", "Server", "ServerError", "free_port", "on_shared_gpu"]


def free_port() -> int:
    """A TCP port of this host that is free, and out of the range of outgoing connections.

    A port from that range can be taken by any connection while the server loads; SGLang's other
    ports are at most a few thousand above.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 28000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


class GpuSets:
    """GPUs for servers that run at the same time: apart where there are enough, else shared.

    Args:
        num_servers: how many run at a time.
        num_gpus_each: GPUs of one server.
        num_gpus: GPUs of this machine.
    """

    def __init__(self, num_servers: int, num_gpus_each: int, num_gpus: int) -> None:
        num_sets = max(1, num_gpus // num_gpus_each)
        self._free: queue.Queue[str] = queue.Queue()
        for i in range(num_servers):
            first = i % num_sets * num_gpus_each
            self._free.put(",".join(str(first + k) for k in range(num_gpus_each)))

    @contextlib.contextmanager
    def take(self) -> Iterator[dict[str, str | None]]:
        """Environment of one server, as long as it runs."""
        devices = self._free.get()
        try:
            yield {"CUDA_VISIBLE_DEVICES": devices}
        finally:
            self._free.put(devices)


def on_shared_gpu(module: str, args: Sequence[str]) -> tuple[str, list[str]]:
    """Module and arguments of the same server with all its ranks on GPU 0 (`shared_gpu`)."""
    return "sglang_dcp.testing.shared_gpu", [module, *args]


class Server(Client):
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
        super().__init__(f"http://127.0.0.1:{self.port}")
        self.log_path = log_path
        self.command = [sys.executable, "-m", module, *args]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--nccl-port", str(free_port())]  # upstream's choice can be taken as well
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
