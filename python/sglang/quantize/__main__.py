"""`python -m sglang.quantize --model-path DIR --scheme nvfp4 --output DIR`: quantizes a checkpoint.

The output is in a published format and loads in this server without further flags. With --kv-cache-scales FILE the
scales of an FP8 KV cache are measured, too, or alone if no --scheme is given.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sglang.srt.environ import adopt_environment
from sglang.srt.errors import UserError

if TYPE_CHECKING:
    import torch

    from sglang.quantize.awq import Change
    from sglang.quantize.calibrate import Calibration
    from sglang.quantize.export import InputScales, Prepare, Rounding
    from sglang.quantize.formats import Config, Format
    from sglang.srt.configs.quant_scheme import Scheme
    from sglang.srt.layers.quantization.reference import Quantized
    from sglang.srt.model_loader.checkpoint import Weights

EPILOG = """\
schemes:
  fp8_block     e4m3 in blocks of 128x128, as DeepSeek publishes it
  fp8_channel   e4m3 with a scale a row, activations a token (compressed-tensors)
  fp8_tensor    e4m3 with one scale a matrix
  mxfp8         e4m3 in blocks of 32 with power-of-two scales
  int8_channel  int8 with a scale a row, activations a token (compressed-tensors)
  int4_g32      int4 in groups of 32, 16-bit activations (compressed-tensors pack-quantized); int4_g64 and
                int4_g128 likewise
  mxfp4         e2m1 in blocks of 32 with power-of-two scales, 16-bit activations
  nvfp4         e2m1 in blocks of 16 with e4m3 scales, weights and activations (ModelOpt)

Embeddings, the output layer and routers keep their precision, as do weights whose width the groups do not divide.
--include '*.experts.*' quantizes the routed experts only.

nvfp4 also rounds activations, by one factor a module (largest |x| / 2688), and so does fp8_tensor with
--static-activations (largest |x| / 448). --calibrate measures them: the unquantized model computes sample prompts, one
a line, as text or as JSON: {"text": "..."}, or {"messages": [...]} for the model's chat template. It needs memory for
the whole model: of one GPU in 16 bits or, with --calibration-device cpu, of the machine in 32. --input-scales takes
factors from a JSON file {module: factor} instead. Without either nvfp4 gets a factor that suits normalized activations.

--rounding says how weights of four bits become codes:
  nearest       each is rounded to the nearest value, with a scale that covers the largest one of its group
  fitted        the scale of a group is the one, of some, with the smallest squared error
  awq           AWQ: columns with large inputs are scaled up, and norms or layers before them scaled down; then as
                fitted. For int4 and mxfp4. Needs --calibrate.
  gptq          GPTQ: columns that are not rounded yet take back the errors of others. Needs --calibrate.
  awq-gptq      columns scaled as by awq, then rounded as by gptq

These three take 4 K^2 bytes of main memory for each product with K inputs (29 GB for Qwen3-8B). Experts are fitted.

--kv-cache-scales FILE computes the prompts of --calibrate twice, with any checkpoint that the server reads, and prints
what e4m3 rounds of the keys and values of each layer. The scales are powers of two that cover at least twice the
largest value. FILE is for --quantization-param-path of this server, SGLang and older vLLM; a checkpoint that --scheme
writes has them, too.
"""

CALIBRATED = ("awq", "gptq", "awq-gptq")
"""Values of --rounding that need the products of inputs."""
SCALED = ("awq", "awq-gptq")
"""Values of --rounding that scale columns first."""
SMALLEST_SHARD_GB, LARGEST_SHARD_GB = 0.00001, 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns the exit status."""
    args = _parser().parse_args(argv)
    adopt_environment()
    try:
        return _run(args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was written has been removed", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from sglang.quantize.formats import FORMATS

    parser = argparse.ArgumentParser(
        prog="python -m sglang.quantize",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-path", "--model", required=True, help="directory of the unquantized checkpoint")
    parser.add_argument("--scheme", choices=list(FORMATS), metavar="SCHEME")
    parser.add_argument("--output", help="directory to write; must not exist or be empty")
    parser.add_argument("--include", action="append", metavar="PATTERN", help="modules to quantize (shell pattern)")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="modules to leave as they are")
    parser.add_argument("--calibrate", metavar="FILE", help="measure activations on these prompts (text or JSON lines)")
    parser.add_argument("--calibration-tokens", type=int, default=16384, metavar="N", help="at most (default 16384)")
    parser.add_argument("--calibration-device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--input-scales", metavar="FILE", help="JSON with the activations' factor by module")
    parser.add_argument("--rounding", choices=("nearest", "fitted", *CALIBRATED), default="nearest")
    parser.add_argument("--static-activations", action="store_true", help="fp8_tensor: store a factor of activations")
    parser.add_argument("--kv-cache-scales", metavar="FILE", help="measure scales of the KV cache; JSON file to write")
    parser.add_argument("--kv-cache-scales-by", choices=("layer", "head"), help="(default layer)")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest file, in GB (default 4)")
    return parser


def _run(args: argparse.Namespace) -> int:
    from sglang.quantize.export import Selection, export

    _check_cache_options(args)
    if args.scheme is None:
        _cache_scales(args)
        return 0
    form = _format(args)
    if args.kv_cache_scales is not None:
        _check_caches(args)
    if args.rounding in SCALED:
        _check_awq(args.model_path)
    calibration = _CalibrationOnce(args)
    report = export(
        args.model_path,
        args.output,
        form,
        Selection(tuple(args.include or ("*",)), tuple(args.ignore)),
        _input_scales(args, form, calibration),
        int(args.shard_gb * 1e9),
        _rounding(args.rounding, calibration),
        _prepare(calibration, form.scheme) if args.rounding in SCALED else None,
        None if args.kv_cache_scales is None else lambda: _cache_scales(args),
    )
    unmeasured = f"; {len(report.unmeasured)} activation factors are the default" if report.unmeasured else ""
    print(
        f"{args.output}: {len(report.quantized)} weights in {args.scheme}, {len(report.kept)} kept;"
        f" {report.bytes_before / 1e9:.3f} GB became {report.bytes_after / 1e9:.3f} GB;"
        f" relative error of the weights {report.relative_error:.2%}{unmeasured}"
    )
    return 0


def _check_cache_options(args: argparse.Namespace) -> None:
    """Raises UserError for options that contradict or lack --kv-cache-scales."""
    if args.kv_cache_scales is None:
        if args.kv_cache_scales_by is not None:
            raise UserError("--kv-cache-scales-by has no effect without --kv-cache-scales FILE")
        if args.scheme is None or args.output is None:
            raise UserError("--scheme SCHEME with --output DIR, or --kv-cache-scales FILE, says what to write")
        return
    if args.calibrate is None:
        raise UserError("--kv-cache-scales needs --calibrate FILE, the prompts on which it measures")
    if not Path(args.kv_cache_scales).parent.is_dir() or Path(args.kv_cache_scales).is_dir():
        raise UserError(f"--kv-cache-scales {args.kv_cache_scales}: name a file in a directory that exists")
    if (args.scheme is None) != (args.output is None):
        raise UserError("--scheme and --output go together; --kv-cache-scales alone needs neither")
    if args.calibration_tokens < 1:
        raise UserError(f"--calibration-tokens must be positive; got {args.calibration_tokens}")


def _check_caches(args: argparse.Namespace) -> None:
    """Raises UserError for what the scales of the cache would be refused for, before any weight is read."""
    from sglang.quantize.cache_scales import check_caches

    check_caches(args.model_path, args.calibrate, args.calibration_tokens, args.calibration_device)


def _cache_scales(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """Measures and writes the scales of the KV cache. Returns them as tensors of a checkpoint if one is written."""
    from sglang.quantize.cache_scales import calibrate_caches, write_scales

    measured = calibrate_caches(args.model_path, args.calibrate, args.calibration_tokens, args.calibration_device)
    by_head = args.kv_cache_scales_by == "head"
    tensors = {} if args.scheme is None else measured.tensors(by_head)
    write_scales(args.kv_cache_scales, measured, by_head)
    print("\n".join(measured.report()))
    print(
        f"{args.kv_cache_scales}: scales of {len(measured.layers)} layers from {measured.num_tokens} tokens of"
        f" {measured.num_prompts} prompts; serve with --kv-cache-dtype fp8_e4m3 --quantization-param-path"
        f" {args.kv_cache_scales}"
    )
    return tensors


def _format(args: argparse.Namespace) -> Format:
    """Returns the requested format. Raises UserError for options that contradict it, or each other."""
    from sglang.quantize.formats import FORMATS, STATIC_FORMATS
    from sglang.quantize.rounding import can_be_fitted

    sources = [f"--{name.replace('_', '-')}" for name in ("calibrate", "input_scales") if getattr(args, name)]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)} both give the activations' factors; choose one")
    if not args.output:
        raise UserError("--output is empty; name a directory")
    if not SMALLEST_SHARD_GB <= args.shard_gb <= LARGEST_SHARD_GB:
        raise UserError(f"--shard-gb must be from {SMALLEST_SHARD_GB} to {LARGEST_SHARD_GB:,}; got {args.shard_gb:g}")
    if args.calibration_tokens < 1:
        raise UserError(f"--calibration-tokens must be positive; got {args.calibration_tokens}")
    if args.static_activations:
        if args.scheme not in STATIC_FORMATS:
            raise UserError(f"--static-activations is for {', '.join(STATIC_FORMATS)}, not for {args.scheme}")
        if not sources:
            raise UserError("--static-activations needs --calibrate FILE (or --input-scales FILE)")
        return STATIC_FORMATS[args.scheme]
    form = FORMATS[args.scheme]
    if args.rounding != "nearest" and not can_be_fitted(form.scheme):
        raise UserError(f"--rounding {args.rounding} is for schemes of four bits, not for {args.scheme}")
    if args.rounding in SCALED and form.scheme.activation is not None:
        raise UserError(f"--rounding {args.rounding} is for schemes with 16-bit activations, not for {args.scheme}")
    if args.rounding in CALIBRATED:
        if args.calibrate is None:
            raise UserError(f"--rounding {args.rounding} needs --calibrate FILE")
        return form
    if sources and not form.static_input and args.kv_cache_scales is None:
        hint = "; add --static-activations" if args.scheme in STATIC_FORMATS else ""
        raise UserError(f"{sources[0]} has no effect: {args.scheme} stores no factors of activations{hint}")
    return form


class _CalibrationOnce:
    """Runs the calibration when its result is first wanted."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.result: Calibration | None = None

    def get(self) -> Calibration:
        """Returns the calibration."""
        if self.result is None:
            from sglang.quantize.calibrate import calibrate

            args = self.args
            self.result = calibrate(
                args.model_path, args.calibrate, args.calibration_tokens, args.calibration_device,
                products=args.rounding in CALIBRATED,
            )  # fmt: skip
        return self.result


def _input_scales(args: argparse.Namespace, form: Format, calibration: _CalibrationOnce) -> InputScales:
    if args.calibrate is None:
        given = {} if args.input_scales is None else _read_scales(args.input_scales)
        return lambda modules: given

    def measure(modules: Collection[str]) -> dict[str, float]:
        measured = calibration.get()
        line = f"{args.calibrate}: {measured.num_tokens} tokens of {measured.num_prompts} prompts"
        if form.static_input and (unreached := measured.unreached.intersection(modules)):
            line += f"; no token reached {len(unreached)} modules of experts: they get the largest factor of the others"
        print(line)
        return {module: value / form.largest_input for module, value in measured.largest.items()}

    return measure


def _check_awq(model_path: str) -> None:
    """Raises UserError, before anything is computed, for a model whose layers AWQ does not know."""
    from sglang.quantize.awq import norm_offset
    from sglang.srt.configs.hf_config import read_json_object
    from sglang.srt.configs.model_path import resolve_model_path

    norm_offset(read_json_object(resolve_model_path(model_path, flag="The model") / "config.json").get("model_type"))


def _prepare(calibration: _CalibrationOnce, scheme: Scheme) -> Prepare:
    from sglang.quantize.awq import find_changes, find_links, norm_offset

    def prepare(config: Config, checkpoint: Weights, chosen: Collection[str]) -> Mapping[str, Change]:
        offset = norm_offset(config.get("model_type"))
        links = find_links({name for name, _, _ in checkpoint.tensors()}, chosen)
        measured = calibration.get()
        changes = find_changes(links, checkpoint, measured.products, scheme, offset, measured.device)
        for name, change in changes.items():
            module = name.removesuffix(".weight")
            if change.columns is not None:  # what the module's inputs will be
                measured.products[module] = measured.products[module] / change.columns / change.columns[:, None]
        return changes

    return prepare


def _rounding(name: str, calibration: _CalibrationOnce) -> Rounding:
    from sglang.quantize.export import round_to_nearest
    from sglang.quantize.rounding import fitted, on_device

    if name == "nearest":
        return round_to_nearest
    if name == "fitted":
        return lambda module, weight, scheme, factor: fitted(weight, scheme, factor)

    def calibrated(module: str, weight: torch.Tensor, scheme: Scheme, factor: torch.Tensor | None) -> Quantized:
        measured = calibration.get()
        products = measured.products.get(module)
        if products is None or name == "awq":
            return fitted(weight, scheme, factor, None if products is None else products.diagonal())
        return on_device(measured.device, weight, scheme, products, factor)

    return calibrated


def _read_scales(path: str) -> dict[str, float]:
    try:
        with open(path) as file:
            scales = json.load(file)
    except (OSError, ValueError) as error:  # not readable, no text, or no JSON
        raise UserError(f"--input-scales {path}: {error}") from error
    if not isinstance(scales, dict) or not all(isinstance(s, int | float) and s > 0 for s in scales.values()):
        raise UserError(f'--input-scales {path}: expected an object of positive numbers, {{"module": factor}}')
    return scales


if __name__ == "__main__":
    sys.exit(main())
