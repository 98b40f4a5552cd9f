"""Serve small models on CPU ranks and keep what came out: one server a configuration."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_dcp.testing.observe import rank_counters
from sglang_dcp.testing.server import Server
from sglang_dcp.testing.tiny_model import TinyModel, write_tiny_model

CHUNK = 64
VOCAB = 512
MODELS = {
    "dense": TinyModel(),
    "moe": TinyModel(moe=True, seed=1),
    "v3": TinyModel(architecture="DeepseekV3ForCausalLM", moe=True, seed=2),
    # widths for which upstream's Triton kernels have a tiling
    "lk288": TinyModel(kv_lora_rank=256, qk_rope_head_dim=32, num_layers=2, num_heads=4, seed=3),
}
#: What `--device cpu` sets by itself when the plugin is active; for servers without it.
BARE_CPU_ENV = {
    "SGLANG_PLUGINS": "none",
    "SGLANG_USE_CPU_ENGINE": "1",
    "SGLANG_NCCL_SO_PATH": "none",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
#: For servers whose module is one of this folder.
MODULES_ENV = {
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    )
}

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class Spec:
    """One server: model, sizes, further arguments and environment; `work` names its batches.

    The variant of prefill is fixed, so that every server shows what its test is about.
    """

    model: str = "dense"
    tp: int = 2
    dcp_size: int = 1
    pp: int = 1
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    pool_tokens: int | None = 2048
    module: str = "sglang_dcp.launch_server"
    work: str = "standard"
    prefill: str = "pass-kv"

    def command(self, model: Path) -> list[str]:
        """Arguments of the server; pool_tokens None leaves the size to the memory fraction."""
        sizes = ("--tp", str(self.tp), "--pp-size", str(self.pp), "--context-length", "2048")
        dcp = ("--dcp-size", str(self.dcp_size), "--dcp-prefill", self.prefill)
        dcp = dcp if self.dcp_size > 1 else ()
        pool = ("--max-total-tokens", str(self.pool_tokens)) if self.pool_tokens else ()
        own = (
            () if "--chunked-prefill-size" in self.args else ("--chunked-prefill-size", str(CHUNK))
        )
        common = ("--device", "cpu", "--dtype", "float32", "--max-running-requests", "8")
        quiet = ("--grammar-backend", "none", "--skip-server-warmup", "--random-seed", "0")
        return ["--model-path", str(model), *common, *quiet, *sizes, *dcp, *pool, *own, *self.args]


@dataclass(frozen=True)
class Batch:
    """Prompts of one /generate request, `new_tokens` output tokens each."""

    prompts: list[list[int]]
    new_tokens: int = 8


def random_prompts(rng: random.Random, *lengths: int) -> list[list[int]]:
    """Token ids without special ones."""
    return [[rng.randrange(3, VOCAB) for _ in range(n)] for n in lengths]


#: Five tokens: every rank of c = 2 and 4 gets some, ranks 5 to 7 of c = 8 none.
FIRST = Batch(random_prompts(random.Random(4), 5), new_tokens=1)


def _standard() -> dict[str, Batch]:
    """Every path of the cache: short, chunked, hit, branching prefix, waves that wrap the pool."""
    rng = random.Random(5)
    long = random_prompts(rng, 201, 130)
    (shared,) = random_prompts(rng, 137)
    tails = random_prompts(rng, 1, 2, 5, 9)
    return {
        "first": FIRST,
        "short": Batch(random_prompts(rng, 1, 2, 3, 7, 8, 9, 17)),
        "chunked": Batch(long),
        "hit": Batch(long),
        "prefix": Batch([shared]),
        "branches": Batch([shared + tail for tail in tails]),
        **{
            f"wave{i}": Batch(random_prompts(rng, *(rng.randrange(1, 60) for _ in range(10))))
            for i in range(2)
        },
    }


def _small_pool() -> dict[str, Batch]:
    """For a pool that is too small: retraction, an aborted prompt, one above a rank's share."""
    rng = random.Random(6)
    return {
        "retract": Batch(random_prompts(rng, *[20] * 8), new_tokens=100),
        "aborted": Batch(random_prompts(rng, 450)),
        "large": Batch(random_prompts(rng, 400), new_tokens=12),
    }


def _long_prefixes() -> dict[str, Batch]:
    """Prompts of several chunks and hits on them, for servers that read prefixes in small parts."""
    rng = random.Random(8)
    long = random_prompts(rng, 1500, 3, 700)
    tails = random_prompts(rng, 1, 40, 9)
    return {
        "first": FIRST,
        "long": Batch(long),
        "long hit": Batch([p + tail for p, tail in zip(long, tails, strict=True)]),
    }


def _few() -> dict[str, Batch]:
    """For servers under Triton's interpreter, which make a few tokens a second."""
    rng = random.Random(7)
    long = random_prompts(rng, 70)
    return {
        "first": FIRST,
        "few short": Batch(random_prompts(rng, 1, 2, 6), new_tokens=3),
        "few chunked": Batch(long, new_tokens=2),
        "few hit": Batch(long, new_tokens=2),
    }


WORK: dict[str, dict[str, Batch]] = {
    "standard": _standard(),
    "small_pool": _small_pool(),
    "few": _few(),
    "long_prefixes": _long_prefixes(),
    "none": {},
}
WORK["all"] = {**_few(), **_small_pool(), **_standard()}


@dataclass
class Outcome:
    """What a server answered and what its ranks counted; the server itself is gone.

    Attributes:
        results: by batch name.
        first_ranks: counters after the batch "first", the first request of the server.
        ranks: counters after everything.
        flushed: /flush_cache succeeded at the end, which it does only if no request holds a page.
        log: the server's log.
    """

    spec: Spec
    results: dict[str, Results] = field(default_factory=dict)
    first_ranks: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[dict[str, Any]] = field(default_factory=list)
    flushed: bool = False
    log: str = ""

    def counts(self, name: str) -> list[int]:
        """One counter of every rank."""
        return [rank["counts"].get(name, 0) for rank in self.ranks]


class Farm:
    """Starts servers, one at a time, and remembers outcomes for the session."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[str, Path] = {}
        self._outcomes: dict[Spec, Outcome] = {}
        self._num_servers = 0

    def model(self, name: str) -> Path:
        """The checkpoint of MODELS[name], written once."""
        if name not in self._models:
            self._models[name] = write_tiny_model(self.folder / name, MODELS[name])
        return self._models[name]

    def server(self, spec: Spec) -> tuple[Server, Path]:
        """A server that is not started yet, and the folder of its counters."""
        self._num_servers += 1
        name = f"{self._num_servers:02}-{spec.model}-tp{spec.tp}-dcp{spec.dcp_size}"
        counters = self.folder / f"{name}.counters"
        # pytest's own process interprets Triton; a server does so only if its spec says so
        env = {"TRITON_INTERPRET": None, "SGLANG_DCP_COUNTERS_DIR": str(counters), **dict(spec.env)}
        command = spec.command(self.model(spec.model))
        log = self.folder / f"{name}.log"
        return Server(command, log, spec.module, env, start_timeout_s=600), counters

    def outcome(self, spec: Spec) -> Outcome:
        """Serve all batches of spec.work, once a session."""
        if spec not in self._outcomes:
            self._outcomes[spec] = self._serve(spec)
        return self._outcomes[spec]

    def baseline(self, model: str) -> Outcome:
        """The same model without DCP; float32 outputs do not depend on tp beyond 2e-5."""
        return self.outcome(Spec(model=model, pool_tokens=8192, work="all"))

    def _serve(self, spec: Spec) -> Outcome:
        server, counters = self.server(spec)
        out = Outcome(spec)
        observed = dict(spec.env).get("SGLANG_PLUGINS") != "none"
        num_ranks = spec.tp * spec.pp
        with server:
            for name, batch in WORK[spec.work].items():
                out.results[name] = generate(server, batch)
                if name == "first" and observed:
                    out.first_ranks = rank_counters(server, counters, num_ranks)
            if observed:
                out.ranks = rank_counters(server, counters, num_ranks)
            out.flushed = "flushed" in str(server.post("/flush_cache", {}))
        out.log = server.log_path.read_text(errors="replace")
        return out


def generate(server: Server, batch: Batch, **extra: Any) -> Results:
    """Greedy answers with the two best logprobs of each token."""
    return server.generate(batch.prompts, batch.new_tokens, top_logprobs_num=2, **extra)


class Background:
    """A call in a thread of its own; `join` returns its result or raises its error."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def join(self, timeout_s: float) -> Any:
        """Wait for the call."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"still running after {timeout_s} s"
        if self._error is not None:
            raise self._error
        return self._result
