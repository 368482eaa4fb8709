"""Benchmarks and a soak of the connector on two GPUs of one host; see `python -m bench.gpu --help`."""

TRACE_FILE = "BENCH_TRACE"
"""The environment variable that names the file of `bench.gpu.tracing`."""
