"""Load generation and measurement behind the `sglang.bench_*` commands. Imports no torch."""
