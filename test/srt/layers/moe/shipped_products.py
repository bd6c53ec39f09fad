"""Expert tiles in the tuning files that the package ships."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from sglang.srt.hardware.products import ARCHS, PRODUCTS, product_of_device_name
from sglang.srt.layers.moe.fused_moe_triton.capacity import ProductTile
from sglang.srt.layers.moe.fused_moe_triton.config_files import PACKAGE_CONFIGS, files
from sglang.srt.layers.moe.fused_moe_triton.config_format import read_content
from sglang.srt.layers.moe.fused_moe_triton.config_names import FileName, parse_name


def shipped_products(features: Collection[str]) -> Iterator[ProductTile]:
    """Yields every tile of the package's own files for GPUs with these features."""
    for path in sorted(files(PACKAGE_CONFIGS)):
        name = parse_name(path.name)
        if name is None or name.is_down or _features_of(name) != frozenset(features) - {"nvlink"}:
            continue
        content = read_content(path)
        scheme = content.about["scheme"]
        layer = ProductTile(
            "",
            None if scheme == "none" else scheme,
            content.about["hidden"],
            name.intermediate,
            {},
            content.about["bias"],
        )
        for pair in content.by_tokens.values():
            yield replace(layer, kind="gate_up", tile=pair.gate_up)
            yield replace(layer, kind="down", tile=pair.down)


def _features_of(name: FileName) -> frozenset[str]:
    """Returns the features of the GPU that a file is for."""
    arch = name.arch
    if arch is None:
        product = product_of_device_name((name.device or "").replace("_", " "))
        arch = PRODUCTS[product].arch if product else None
    return ARCHS[arch].features if arch in ARCHS else frozenset()
