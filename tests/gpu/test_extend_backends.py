"""Pass-Q's two kernels of every attention backend, on one GPU that plays each rank in turn."""

import pytest
import torch
from extend_ranks import Pool, check_backend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("plugin_loaded"),
]


@pytest.mark.parametrize("batch", ["mixed", "one", "verify", "long"])
@pytest.mark.parametrize(("dcp_size", "num_heads"), [(2, 96), (8, 128), (2, 16)])
@pytest.mark.parametrize("name", ["flashmla", "flashinfer", "triton"])
def test_pass_q(name, dcp_size, num_heads, batch):
    from flashinfer import BatchMLAPagedAttentionWrapper

    device = torch.device("cuda", torch.cuda.current_device())
    pool = Pool(batch, dcp_size, num_heads, (512, 64), torch.bfloat16, device)
    check_backend(name, pool, 2e-2, BatchMLAPagedAttentionWrapper)
