"""GPU kernels of the decode step, one per file, each beside its torch reference.

Every file holds the `@triton.jit` body, a launcher `foo` and the reference `foo_ref` with the
same arguments. Launchers run the reference on plain CPU tensors. No autotuning: tile sizes are
constants, and batch-dependent integers are not specialized, so serving never compiles twice.
"""
