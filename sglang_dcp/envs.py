"""Every environment variable that this package reads or sets, with its meaning."""

import os

#: Folder to which each rank writes its counters (rank-<r>.json) when asked for /server_info.
COUNTERS_DIR = "SGLANG_DCP_COUNTERS_DIR"
#: "1": repeat every communicator call on `a2a` and count differing bits (debug, slow).
SHADOW = "SGLANG_DCP_SHADOW"
#: JSON file of this machine's rates for --dcp-prefill auto; keys: prefill_policy.PrefillRates.
PREFILL_CALIBRATION = "SGLANG_DCP_PREFILL_CALIBRATION"
#: Set by the launchers: the whitelist of general plugins (SGLang's own variable).
SGLANG_PLUGINS = "SGLANG_PLUGINS"
#: Triton's own: "1" runs its kernels in Python, on CPU tensors.
TRITON_INTERPRET = "TRITON_INTERPRET"


def counters_dir() -> str | None:
    """Folder for the ranks' counters, or None: count nothing."""
    return os.environ.get(COUNTERS_DIR) or None


def shadow() -> bool:
    """True if every communicator call is to be repeated on another one and compared."""
    return os.environ.get(SHADOW) == "1"


def prefill_calibration() -> str | None:
    """Path of rates of this machine's prefill; what it does not name is an H200's and measured."""
    return os.environ.get(PREFILL_CALIBRATION) or None


def plugin_excluded(entry_point: str) -> bool:
    """True if SGLang's plugin whitelist is set and does not name `entry_point`."""
    allowed = os.environ.get(SGLANG_PLUGINS, "")
    return bool(allowed) and entry_point not in {name.strip() for name in allowed.split(",")}


def triton_interpreted() -> bool:
    """True if Triton kernels run under its interpreter in this process."""
    return os.environ.get(TRITON_INTERPRET) == "1"


#: What SGLang 0.5.14 needs in order to run without a GPU, beyond `--device cpu`.
CPU_RECIPE = {
    "SGLANG_USE_CPU_ENGINE": "1",  # is_cpu(); without it the rotary embedding imports vllm
    "SGLANG_NCCL_SO_PATH": "none",  # the CUDA build's NCCL loads but cannot serve; PyNccl turns off
    "TORCH_COMPILE_DISABLE": "1",  # one inductor C++ compilation costs 18 s and needs a compiler
    "OMP_NUM_THREADS": "1",  # SGLang does not cap threads on CPU; ranks would fight for cores
    "GLOO_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}


def set_cpu_recipe(num_ranks: int) -> None:
    """Set the CPU recipe for this process and its children; values that the user has set stay.

    Args:
        num_ranks: tensor-parallel size; without AMX only the number of fields of the thread
            binding is used, and SGLang wants one for each TP rank.
    """
    for name, value in CPU_RECIPE.items():
        os.environ.setdefault(name, value)
    num_cores = os.cpu_count() or 1
    bind = "|".join(str(rank % num_cores) for rank in range(num_ranks))
    if num_ranks > 1:
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bind)


def disable_symm_mem_multicast() -> None:
    """Let torch's symmetric memory map plain peer memory only; to be called before its first use.

    Our kernels store to each peer, and setting up multicast objects fails on some hosts.
    """
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
