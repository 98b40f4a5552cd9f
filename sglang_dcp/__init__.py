"""Decode Context Parallelism for MLA models on a released SGLang."""

__version__ = "0.1.0"
