"""Entry point of group `sglang.srt.plugins`: phase 1 of the activation.

SGLang calls `register` in the launcher and, again, in every scheduler process. It only registers;
SGLang applies all plugins' hooks together afterwards, so that hooks of several plugins on one
target are chained.
"""

import logging
import sys

from sglang_dcp import compat

logger = logging.getLogger(__name__)


def register() -> None:
    """Add the DCP arguments and the two hooks that lead to phase 2.

    On another SGLang release it logs what is supported and changes nothing.
    """
    problem = compat.version_error()
    if problem:
        logger.error(problem)
        return
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    from sglang_dcp.hooks import registry, table

    if "torch_mla" not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices(["torch_mla"])
    patches = table.ARGUMENTS
    # A spawned scheduler has imported its own module and needs no launcher; importing the
    # launcher there would only cost time, and the scheduler's modules here likewise.
    if "sglang.srt.managers.scheduler" in sys.modules:
        patches += table.SCHEDULER
    if (
        "sglang.srt.managers.scheduler" not in sys.modules
        or "sglang.srt.entrypoints.engine" in sys.modules
    ):
        patches += table.LAUNCH
    registry.check(patches)
    registry.register(patches)
