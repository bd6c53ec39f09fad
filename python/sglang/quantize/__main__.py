"""`python -m sglang.quantize --model-path DIR --scheme nvfp4 --output DIR`: quantize a checkpoint.

The output is in a published format and loads in this server without further flags.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from sglang.srt.errors import UserError

EPILOG = """\
schemes:
  fp8_block     e4m3 in blocks of 128x128, as DeepSeek publishes it
  fp8_channel   e4m3 with a scale a row, activations a token (compressed-tensors)
  fp8_tensor    e4m3 with one scale a matrix
  mxfp8         e4m3 in blocks of 32 with power-of-two scales
  int8_channel  int8 with a scale a row, activations a token (compressed-tensors)
  int4_g32      int4 in groups of 32, 16-bit activations (compressed-tensors pack-quantized); int4_g128 likewise
  mxfp4         e2m1 in blocks of 32 with power-of-two scales, 16-bit activations
  nvfp4         e2m1 in blocks of 16 with e4m3 scales, weights and activations (ModelOpt)

Embeddings, the output layer and routers keep their precision, as do weights whose width the groups do not divide.
--include '*.experts.*' quantizes the routed experts only. nvfp4 also rounds activations, by one factor a module:
--input-scales names a JSON file {module: factor}; without it a factor that suits normalized activations is used.
"""


def main(argv: Sequence[str] | None = None) -> int:
    from sglang.quantize.export import Selection, export
    from sglang.quantize.formats import FORMATS

    parser = argparse.ArgumentParser(
        prog="python -m sglang.quantize",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", "--model", required=True, help="directory of the unquantized checkpoint")
    parser.add_argument("--scheme", required=True, choices=list(FORMATS), metavar="SCHEME")
    parser.add_argument("--output", required=True, help="directory to write; must not exist or be empty")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="modules to quantize (shell pattern)")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="modules to leave as they are")
    parser.add_argument("--input-scales", metavar="FILE", help="JSON with nvfp4's activation factor by module")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default 4)")
    args = parser.parse_args(argv)
    try:
        report = export(
            args.model_path,
            args.output,
            FORMATS[args.scheme],
            Selection(tuple(args.include or ("*",)), tuple(args.ignore)),
            _input_scales(args.input_scales),
            int(args.shard_gb * 1e9),
        )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        f"{args.output}: {len(report.quantized)} weights in {args.scheme}, {len(report.kept)} kept;"
        f" {report.bytes_before / 1e9:.3f} GB became {report.bytes_after / 1e9:.3f} GB;"
        f" relative error of the weights {report.relative_error:.2%}"
    )
    return 0


def _input_scales(path: str | None) -> dict[str, float]:
    if path is None:
        return {}
    try:
        with open(path) as file:
            scales = json.load(file)
    except (OSError, json.JSONDecodeError) as error:
        raise UserError(f"--input-scales {path}: {error}") from error
    if not isinstance(scales, dict) or not all(isinstance(s, int | float) and s > 0 for s in scales.values()):
        raise UserError(f'--input-scales {path}: expected an object of positive numbers, {{"module": factor}}')
    return scales


if __name__ == "__main__":
    sys.exit(main())
