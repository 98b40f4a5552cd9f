"""Tools that tests, demo and benchmarks share: small models, servers, comparisons."""
