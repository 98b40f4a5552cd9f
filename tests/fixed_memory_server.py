"""`python -m fixed_memory_server ARGS...`: the DCP server on a host whose free memory stands still.

SGLang sizes a pool without --max-total-tokens by the memory that is free at that moment; what other
processes take would make two servers differ. Spawned ranks run this module too (multiprocessing
imports a `-m` main again).
"""

import sys

import psutil

FREE_BYTES = 4 << 30

if __name__ in ("__main__", "__mp_main__"):  # the launcher and its ranks
    real_memory = psutil.virtual_memory
    psutil.virtual_memory = lambda: real_memory()._replace(available=FREE_BYTES)

if __name__ == "__main__":
    from sglang_dcp.launch_server import main

    sys.exit(main())
