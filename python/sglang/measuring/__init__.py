"""Measures kernels and tiles on this machine's GPU: `sglang tune`, and a server's start with --measure-seconds."""
