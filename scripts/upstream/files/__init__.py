# SPDX-License-Identifier: Apache-2.0
"""What SGLang needs on SM120 and SM121 GPUs (RTX PRO 6000 Blackwell, RTX 50, DGX Spark). Added by sm120-sglang.

These files stand alone: they import torch and Triton, and nothing of SGLang but each other.
"""
