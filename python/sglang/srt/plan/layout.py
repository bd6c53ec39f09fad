"""Checks which layouts of ranks a model can be divided over, and finds others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from sglang.srt.errors import UserError
from sglang.srt.hardware.arch import ArchTraits
from sglang.srt.plan.layer_spec import FeedForward, Mixer
from sglang.srt.plan.model_description import ModelDescription
from sglang.srt.plan.rank_weights import expert_rows
from sglang.srt.plan.ranks import HeadShares, Node, RankLayout
from sglang.srt.plan.stages import uncut_runs
from sglang.srt.plan.weight_spec import Matrix
from sglang.srt.server_args import ServerArgs


def asked_layout(args: ServerArgs) -> RankLayout:
    """Returns the layout of ranks that the flags ask for."""
    return RankLayout(
        args.tp_size, args.ep_size, args.pp_size, args.dcp_size, args.attn_dp_size, args.enable_dp_lm_head
    )


def asked_node(args: ServerArgs) -> Node:
    """Returns the ranks of the first replica that run on this machine."""
    return Node(args.node_rank, args.nnodes, asked_layout(args), args.base_gpu_id)


def replica_args(args: ServerArgs) -> list[ServerArgs]:
    """Returns the flags of each of --dp-size replicas: without --dp-size, on the GPUs behind those of the replica
    before. Each gets an even share of --max-queued-requests, rounded up."""
    queued = args.max_queued_requests
    share = None if queued is None else -(-queued // args.dp_size)
    gpus = asked_layout(args).world_size
    return [
        replace(args, dp_size=1, base_gpu_id=args.base_gpu_id + index * gpus, max_queued_requests=share)
        for index in range(args.dp_size)
    ]


def check_gpus(args: ServerArgs, seen: int) -> None:
    """Raises UserError where this machine has fewer GPUs than the flags need. `seen`: the number of GPUs that torch
    sees."""
    node = asked_node(args)
    needed = args.base_gpu_id + len(node.ranks) * args.dp_size
    if needed > seen:
        replicas = f"--dp-size {args.dp_size} " if args.dp_size > 1 else ""
        first = f" --base-gpu-id {args.base_gpu_id}" if args.base_gpu_id else ""
        raise UserError(
            f"{replicas}{node.layout.flags}{first} takes {needed} GPUs, but torch sees {seen} CUDA devices."
            " Lower one of them."
        )


class LayoutProblem(UserError):
    """Raised where a layout does not divide a model. The message names layouts that do, whether or not there is room
    for them."""

    def __init__(self, problem: str, model: ModelDescription, ranks: RankLayout) -> None:
        self.problem, self.model, self.ranks = problem, model, ranks
        super().__init__(self.with_ways(lambda layout: True))

    def with_ways(self, starts: Callable[[RankLayout], bool]) -> str:
        """Returns the message with only those layouts for which `starts` is true."""

        def works(layout: RankLayout) -> bool:
            return next(_problems(self.model, layout), None) is None and starts(layout)

        ranks = self.ranks
        working = list(filter(works, _layouts_like(ranks)))
        working = working or list(islice(filter(works, _with_fewer_stages(ranks)), 1))
        simple = [layout for layout in working if layout == RankLayout(layout.tp_size, pp_size=ranks.pp_size)]
        ways = [layout.flags for layout in working if layout not in simple]
        stages = f" --pp-size {ranks.pp_size}" if ranks.pp_size > 1 else ""
        ways += [f"--tp-size {_numbers([layout.tp_size for layout in simple])}{stages}"] if simple else []
        return f"{self.problem}; what works: {' or '.join(ways) or 'another checkpoint'}"


def check_layout(model: ModelDescription, ranks: RankLayout) -> None:
    """Raises LayoutProblem that says why the layout does not divide the model, if so."""
    problem = next(_problems(model, ranks), None)
    if problem is not None:
        raise LayoutProblem(problem, model, ranks)


def check_machine(arch: ArchTraits, ranks: RankLayout, nnodes: int, replicas: int = 1) -> None:
    """Raises UserError where one machine of this kind has too few GPUs, and where the ranks cannot be divided over
    `nnodes` machines."""
    if ranks.world_size % nnodes:
        raise UserError(f"{ranks.flags} makes {ranks.world_size} ranks, which --nnodes {nnodes} does not divide.")
    each = ranks.world_size // nnodes
    if replicas > 1 and 0 < arch.gpus_per_machine < each * replicas:
        raise UserError(
            f"--dp-size {replicas} {ranks.flags} asks for {each * replicas} GPUs of one machine, and one with a"
            f" {arch.product} has {arch.gpus_per_machine}. Start a server on each machine, without --dp-size, behind a"
            " load balancer."
        )
    if 0 < arch.gpus_per_machine < each:
        raise UserError(
            f"{ranks.flags} asks for {each} GPUs of one machine, and one with a {arch.product} has"
            f" {arch.gpus_per_machine}. Start it on several machines: --nnodes"
            f" {-(-ranks.world_size // arch.gpus_per_machine)} --node-rank N --dist-init-addr HOST:PORT on each."
        )


def _numbers(numbers: list[int]) -> str:
    """Formats ascending numbers: "1 to 4, 6, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


MAX_GPUS = 16
"""Most GPUs that a machine may have, where its kind does not say."""


def larger_layouts(model: ModelDescription, ranks: RankLayout, most: int = MAX_GPUS) -> Iterator[RankLayout]:
    """Yields the first layout that divides the model for every larger number of ranks, up to `most` GPUs. Numbers of
    ranks that divide the heads evenly come first, then smaller ones. Layouts that share the experts' dims come before
    those with whole experts on a rank."""
    sizes = range(ranks.tp_size + 1, most // ranks.pp_size + 1)
    for size in sorted(sizes, key=lambda size: uneven_heads(model, size) is not None):  # stable
        layouts = (replace(layout, pp_size=ranks.pp_size) for layout in _with_experts(size))
        yield from islice((layout for layout in layouts if next(_problems(model, layout), None) is None), 1)


def uneven_heads(model: ModelDescription, tp_size: int) -> str | None:
    """Describes the uneven load of attention heads over ranks; None: all ranks have equally many."""
    for mixer in dict.fromkeys(layer.mixer for layer in model.layers):
        shares = mixer.shares(tp_size)
        if shares is not None:
            most, heads = shares.padded_heads, mixer.num_heads
            if most * tp_size != heads:
                whole = f", with whole KV heads ({shares.num_kv_heads})" if mixer.kv_heads else ""
                shared = f"{heads} attention heads over {tp_size} ranks{whole}"
                return f"{shared}: the busiest has {most}, the average {heads / tp_size:.1f}"
    return None


def _layouts_like(ranks: RankLayout) -> Iterator[RankLayout]:
    """Yields alternatives to a layout: other ways to divide the experts, equally many ranks in other stages, and other
    numbers of ranks up to twice as many."""
    stages = ranks.pp_size
    if ranks.dcp_size > 1:
        yield from (replace(ranks, dcp_size=size) for size in range(ranks.tp_size, 1, -1) if size != ranks.dcp_size)
    if ranks.tp_size % ranks.ep_size:
        yield RankLayout(-(-ranks.tp_size // ranks.ep_size) * ranks.ep_size, ranks.ep_size, stages)
    yield from (replace(layout, pp_size=stages) for layout in _with_experts(ranks.tp_size) if layout.ep_size > 1)
    if ranks.ep_size == 1:
        sizes = [size for size in range(1, ranks.world_size + 1) if ranks.world_size % size == 0]
        cuts = [RankLayout(size, pp_size=ranks.world_size // size) for size in reversed(sizes)]
        yield from (layout for layout in cuts if layout != ranks)
    yield from (RankLayout(size, pp_size=stages) for size in range(1, 2 * ranks.tp_size + 1))


def _with_fewer_stages(ranks: RankLayout) -> Iterator[RankLayout]:
    """Yields layouts with fewer stages, the most stages first, and for each the most ranks first."""
    for stages in range(ranks.pp_size - 1, 0, -1):
        yield from (RankLayout(size, pp_size=stages) for size in range(ranks.tp_size, 0, -1))


def _with_experts(tp_size: int) -> Iterator[RankLayout]:
    return (RankLayout(tp_size, ep_size) for ep_size in range(1, tp_size + 1) if tp_size % ep_size == 0)


def _stage_problems(model: ModelDescription, pp_size: int) -> Iterator[str]:
    """Yields problems of cutting the model into pipeline stages, among them layers that need something of another
    stage."""
    if pp_size == 1:
        return
    if pp_size > len(model.layers):
        yield f"--pp-size {pp_size} is more than the model's {len(model.layers)} layers"
    elif pp_size > (count := len(uncut_runs(model))):
        yield f"--pp-size {pp_size} is more than the model's {count} layers with an indexer, at which stages begin"
    if not all(layer.mixer.caches_tokens for layer in model.layers):
        yield f"--pp-size {pp_size}: layers attend to keys and values of earlier ones, which other stages would have"
    if model.per_layer_inputs is not None:
        yield f"--pp-size {pp_size}: tokens add inputs to every layer, and only the first stage embeds them"


def _class_problems(model: ModelDescription, ranks: RankLayout) -> Iterator[str]:
    """Yields problems of layouts in which a class of transformers would have to be taken apart."""
    if model.transformers_class is None:
        return
    if ranks.pp_size > 1 and model.transformers_class.facts.stages is None:
        yield f"--pp-size {ranks.pp_size}: {model.architecture} has no plan in transformers that cuts it into stages"
    if ranks.attn_dp_size > 1:
        yield f"--attn-dp-size {ranks.attn_dp_size} exchanges tokens between the blocks that transformers hides"


def _problems(model: ModelDescription, ranks: RankLayout) -> Iterator[str]:
    tp_size, ep_size = ranks.tp_size, ranks.ep_size
    kinds = model.kinds_of_experts
    if tp_size % ep_size:
        yield f"--ep-size {ep_size} does not divide --tp-size {tp_size}, whose ranks share the experts"
    if ep_size > 1 and not kinds:
        yield f"--ep-size {ep_size} shares out experts, and the model has none"
    fewest = min((experts.num_experts for experts in kinds), default=ep_size)
    if ep_size > fewest:
        yield f"--ep-size {ep_size} is more than the model's {fewest} experts"
    if tp_size % ranks.attn_dp_size:
        yield f"--attn-dp-size {ranks.attn_dp_size} does not divide --tp-size {tp_size}, whose ranks share out requests"
        return
    yield from _class_problems(model, ranks)
    yield from _context_problems(model, ranks)
    yield from _stage_problems(model, ranks.pp_size)
    for i, layer in enumerate(model.layers):
        yield from _mixer_problems(model, i, layer.mixer, ranks.attn_tp_size)
        yield from _dense_problems(layer.ffn, tp_size)
        if part := layer.ngrams.uneven_part(ranks.attn_tp_size):
            asked = f"--tp-size {tp_size}" + (f" --attn-dp-size {ranks.attn_dp_size}" if ranks.attn_dp_size > 1 else "")
            yield f"{asked} does not divide the {part}"
    if ranks.expert_tp_size > 1 and any(experts.latent_norms is not None for experts in kinds):
        yield (
            f"--tp-size {tp_size} --ep-size {ep_size} divides an expert among {ranks.expert_tp_size} ranks, and its"
            " output is normed as a whole"
        )
    for experts in kinds:
        try:
            expert_rows(model, ranks, experts)
        except UserError as error:
            yield str(error)


def _context_problems(model: ModelDescription, ranks: RankLayout) -> Iterator[str]:
    """Yields problems of sharding the tokens of caches over DCP ranks."""
    tp_size, dcp_size = ranks.attn_tp_size, ranks.dcp_size
    if dcp_size == 1:
        return
    asked = f"--dcp-size {dcp_size}"
    groups = f" in {ranks.attn_dp_size} groups of {tp_size}" if ranks.attn_dp_size > 1 else ""
    if tp_size % dcp_size:
        yield f"{asked} does not divide --tp-size {ranks.tp_size}{groups}, whose ranks share out the tokens"
        return
    mixers = [layer.mixer for layer in model.layers]
    if any(mixer.merges_tokens for mixer in mixers):
        yield f"{asked}: entries that stand for several tokens are whole on every rank"
    elif not any(mixer.effective_dcp_size(tp_size, dcp_size) > 1 for mixer in mixers):
        heads = max((mixer.kv_heads for mixer in mixers), default=0)
        yield (
            f"{asked} shares out the tokens of a cache that {dcp_size} ranks would each hold, and with --tp-size"
            f" {ranks.tp_size}{groups} no {dcp_size} ranks hold the same of the model's {heads} KV heads"
        )


def _mixer_problems(model: ModelDescription, layer: int, mixer: Mixer, tp_size: int) -> Iterator[str]:
    """Yields problems of dividing a mixer's heads. Attention heads may be divided unevenly, heads of recurrent layers
    may not."""
    shares = mixer.shares(tp_size)
    if mixer.num_heads and tp_size > mixer.num_heads:
        yield f"--tp-size {tp_size} is more than the model's {mixer.num_heads} attention heads"
    elif shares is not None:
        yield from _head_problems(model, layer, mixer, shares, tp_size)
    elif part := mixer.uneven_part(tp_size):
        yield f"--tp-size {tp_size} does not divide the model's {part}"
    elif mixer.num_heads % tp_size:
        yield f"--tp-size {tp_size} does not divide the model's {mixer.num_heads} attention heads"


def _head_problems(
    model: ModelDescription, layer: int, mixer: Mixer, shares: HeadShares, tp_size: int
) -> Iterator[str]:
    yield from mixer.share_problems(tp_size, partial(model.names.layer_module, layer))
    for part in mixer.scaled_head_dims(tp_size):
        quant = model.quant_of(layer, Matrix(part.matrix, part.parts, 0, 0))
        group = 0 if quant is None else quant.format.group[part.axis]
        if group and any(shares.cuts(part.dims, part.of_kv, rank, group) for rank in range(shares.tp_size)):
            assert quant is not None
            module = model.names.layer_module(layer, part.matrix, part.parts[0])
            groups = f"groups of {group} {'columns' if part.axis else 'rows'}"
            yield f"--tp-size {tp_size} cuts {module} within {groups} that share scales ({quant.scheme})"


def _dense_problems(ffn: FeedForward, tp_size: int) -> Iterator[str]:
    """Yields the problem of dividing an MLP's intermediate dims over all ranks, if there is one."""
    try:
        if ffn.mlp is not None:
            ffn.mlp.padded_rows(tp_size)
    except UserError as error:
        yield str(error)
