"""Experts in main memory that CPUs compute: kernels and threads in C (`csrc`), and what hands requests to them."""
