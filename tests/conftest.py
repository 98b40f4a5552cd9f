"""Fixtures of all tests; decides, before Triton is imported, whether kernels are interpreted."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before CUDA starts: ranks that share a GPU need queues of their own, and no kernel may be loaded
# while another one waits for it. Child processes get neither (support.clean_env).
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")

import pytest
import torch
from serving import Farm

# Without a GPU the kernels of this very process run under Triton's interpreter. Processes that
# tests start must not inherit this by accident: they get their environment from support.clean_env.
if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture
def kernel_device() -> torch.device:
    """Where launchers run real Triton code: the GPU, else the CPU under the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def fresh_seed(request: pytest.FixtureRequest) -> int:
    """Fresh random inputs on every run; the seed is reported with a failure, SEED repeats it."""
    seed = int(os.environ.get("SEED", int.from_bytes(os.urandom(3), "little")))
    torch.manual_seed(seed)
    request.node.user_properties.append(("seed", seed))
    print(f"SEED={seed}")
    return seed


@pytest.fixture(scope="session")
def farm(tmp_path_factory: pytest.TempPathFactory) -> Farm:
    """Servers of this session: each configuration is served once, whichever test asks."""
    return Farm(tmp_path_factory.mktemp("servers"))


@pytest.fixture(scope="session")
def plugin_loaded() -> None:
    """SGLang with the plugin loaded as a launcher loads it: the DCP arguments exist."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture
def plugin(plugin_loaded: None) -> Iterator[None]:
    """The plugin, with the environment put back after the test (CPU arguments set variables)."""
    saved = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(saved)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small MLA checkpoint."""
    from sglang_dcp.testing.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model"))
