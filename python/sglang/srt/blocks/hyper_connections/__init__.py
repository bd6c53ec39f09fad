"""Hyper-connections: several residual streams that learned matrices mix around each block."""
