# SPDX-License-Identifier: Apache-2.0
"""MXFP4 expert weights for triton_kernels on SM12x: plain strides, no persistent kernel, one stage.

The default for every capability above 10 is the layout of tcgen05 kernels, which only the persistent TMA kernel reads.
"""

from typing import Any


def strided_layouts(layout: Any, opt_flags: Any, num_warps: int) -> tuple[Any, dict, Any, dict]:
    """(value layout, its options, scale layout, its options) from the module triton_kernels.tensor_details.layout.

    Up to Triton 3.6 `convert_layout` takes the class and options, later an instance made with the dimension that is
    contiguous. Also sets the launch constraints that go with the layout.
    """
    strided = layout.StridedLayout
    constraints = {"is_persistent": False, "num_stages": 1}
    if not isinstance(layout.make_default_matmul_mxfp4_w_layout(mx_axis=-2), tuple):
        strided = strided(-2)
        constraints["num_warps"] = (
            num_warps  # no scale layout carries it; by size alone, small tiles would get one warp
        )
    opt_flags.update_opt_flags_constraints(constraints)
    return strided, {}, strided, {}
