"""Sets up one rank, from the user's arguments to a ready model runner."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import parallel_state
from sglang.srt.distributed.agreement import agree_on_gpus, agreed_plan, refuse_unlike_tiles
from sglang.srt.distributed.nodes import agree, use_interface
from sglang.srt.distributed.shared_records import shared_choices
from sglang.srt.environ import envs
from sglang.srt.hardware.arch import (
    ArchTraits,
    current_arch,
    device_count,
    device_name,
    free_memory_bytes,
    gpus_reach_one_another,
    lockable_bytes,
    pci_address,
)
from sglang.srt.hardware.cpu_cores import Neighbours, meet
from sglang.srt.hardware.numa import bind_to_numa_node, free_bytes_of, node_of
from sglang.srt.hardware.topology import Topology, library_topology, pci_topology
from sglang.srt.kernels.all_reduce_table import PIECE_BYTES, ranges_for
from sglang.srt.kernels.conditions import SCALED_MM_FEATURES
from sglang.srt.kernels.launch import tiles_in_use
from sglang.srt.kernels.measured.choices import NOT_MEASURED, MeasuredChoices
from sglang.srt.kernels.resolve import installed_packages
from sglang.srt.kernels.spec import Need, PeerLinks
from sglang.srt.layers.moe.cpu_experts.measured import rate_for_experts
from sglang.srt.managers.scheduler.replicas import ONE_REPLICA, Replicas
from sglang.srt.plan.expert_slot_plan import MainMemory
from sglang.srt.plan.host_cache import keeps_unasked
from sglang.srt.plan.layout import asked_node, check_gpus, check_machine
from sglang.srt.plan.model_planner import Probe, describe_served_model
from sglang.srt.plan.plan import Plan, make_plan
from sglang.srt.plan.ranks import Node
from sglang.srt.plan.speculation import speculative_settings
from sglang.srt.server_args import ServerArgs

if TYPE_CHECKING:
    from sglang.srt.configs.storage_backend import StorageConfig
    from sglang.srt.drafts.depth import Depth
    from sglang.srt.mem_cache.storage.engine import StorageEngine
    from sglang.srt.model_executor.media_setup import CreateEncoder
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def create_plan(
    args: ServerArgs, rank: int = 0, rendezvous: str | None = None, replicas: Replicas = ONE_REPLICA
) -> Plan:
    """Connects to the other ranks and returns the plan of this one, which is made from facts about all of them (the
    least free memory, the slowest links). A collective. rendezvous: as for `parallel_state.init`; needed with more than
    one rank; replicas: those that share the machine. Raises UserError.
    """
    model = ModelConfig.from_server_args(args)
    description = describe_served_model(args, model)  # checks sizes before the ranks connect
    node = asked_node(args)
    ranks, gpu = node.layout, node.device(rank)
    arch = current_arch(gpu, args.device)
    check_machine(arch, ranks, args.nnodes)
    on_gpu = arch.device == "cuda"
    if not on_gpu and args.dtype == "auto":
        model = replace(model, dtype="float32")  # CPUs without bf16 units are several times slower in bf16
    if on_gpu:
        import torch

        check_gpus(args, device_count())
        torch.cuda.set_device(gpu)
        if (address := pci_address(gpu)) is not None:
            bind_to_numa_node(address)  # must come before NCCL starts its threads
        meet(_neighbours(node, gpu, replicas))
    if ranks.world_size > 1:
        assert rendezvous is not None
        if args.nnodes > 1:
            use_interface(args)
        backend = "nccl" if on_gpu else "gloo"
        parallel_state.init(ranks, rank, backend, rendezvous, args.watchdog_timeout, args.dist_timeout)
        if args.nnodes > 1:
            agree(args, model)
    agreed = agree_on_gpus(arch, gpu_of_rank(args, arch, gpu))
    arch = agreed.arch
    measured = measured_choices(args, gpu) if on_gpu else NOT_MEASURED
    links = None
    if on_gpu and args.tp_size > 1:
        links = with_library_topology(
            _connect_gpus(args, model, description.hidden_size, arch, node, gpu), node.devices
        )
        links = slowest_links(links)
    available = parallel_state.min_over_ranks(free_memory_bytes(gpu if on_gpu else None, arch.unified_memory))
    host = parallel_state.min_over_ranks(free_memory_bytes(None)) if on_gpu or args.enable_hierarchical_cache else None
    if host is not None:
        (host,) = replicas.agree(f"main-memory-{node.rank}", [host])
    lockable = lockable_bytes(host) if on_gpu and host is not None else None
    by_default = False
    if on_gpu and host is not None:
        numa_host = parallel_state.min_over_ranks(_numa_memory(node, host, replicas.count))
        (numa_host,) = replicas.agree(f"numa-memory-{node.rank}", [numa_host])
        if by_default := keeps_unasked(args, arch, numa_host):
            args, host = replace(args, enable_hierarchical_cache=True), numa_host
    probe = _library_probe(arch)
    planned = replace(args, dp_size=replicas.count)  # its own flags hide the others

    def make(main_memory: MainMemory) -> Plan:
        return make_plan(
            planned, model, arch, available, links=links, rank=rank, probe=probe, host_bytes=host,
            tier_unasked=by_default, main_memory=main_memory, measured=measured,
        )  # fmt: skip

    def agree_on(memory: MainMemory) -> Plan:
        return agreed_plan(agreed, ranks.stage(rank), partial(make, memory))

    plan = _with_measured_cpus(replicas, args, gpu, MainMemory(lockable), agree_on)
    return replace(plan, warnings=(*plan.warnings, agreed.note)) if agreed.note else plan


def measured_choices(args: ServerArgs, gpu: int) -> MeasuredChoices:
    """Returns what was measured on the ranks' GPUs, unless a flag says to ignore it, or a variable to choose as for
    another GPU. A collective."""
    ignored = args.no_measured_choices or envs.SGLANG_FORCE_ARCH is not None
    return NOT_MEASURED if ignored else shared_choices(gpu)


def _neighbours(node: Node, gpu: int, replicas: Replicas) -> Neighbours:
    """Returns the ranks of this machine, of all replicas."""
    each = node.layout.world_size
    first = node.first_gpu - replicas.index * each
    devices = [first + index * each + place for index in range(replicas.count) for place in range(len(node.ranks))]
    addresses = [pci_address(device) for device in devices]
    nodes = tuple(None if address is None else node_of(address) for address in addresses)
    return Neighbours(nodes, devices.index(gpu))


def _with_measured_cpus(
    replicas: Replicas, args: ServerArgs, gpu: int, main_memory: MainMemory, make: Callable[[MainMemory], Plan]
) -> Plan:
    """Returns the plan that `make` makes of main memory. If experts lie there, and no flag says whether CPUs compute
    some of them, main memory is measured, and what the slowest rank found decides. A collective."""
    plan = make(main_memory)
    if plan.expert_slots is None or plan.device != "cuda" or args.kt_cpuinfer is not None:
        return plan
    rate, cores = replicas.agree(f"cpus-{args.node_rank}", parallel_state.all_reduce_min(rate_for_experts(gpu)))
    return make(replace(main_memory, rate=rate, cores=cores)) if rate else plan


def gpu_of_rank(args: ServerArgs, arch: ArchTraits, gpu: int) -> str:
    """Returns the name of a rank's GPU for messages, with its machine if there are several."""
    name = device_name(gpu) if envs.SGLANG_FORCE_ARCH is None and arch.device == "cuda" else arch.product or arch.name
    return f"{name}, machine {args.node_rank}" if args.nnodes > 1 else name


def slowest_links(links: PeerLinks) -> PeerLinks:
    """Returns `links` with the slowest topologies that any rank has, since machines may differ. A collective."""
    kinds = tuple(Topology)
    slowest = [kinds.index(links.topology), kinds.index(links.library_topology)]
    topology, library = (kinds[i] for i in parallel_state.all_reduce_max(slowest))
    return replace(links, topology=topology, library=library)


def with_library_topology(links: PeerLinks, devices: Sequence[int]) -> PeerLinks:
    """Returns `links` with the path that NCCL's all-reduce takes between these GPUs."""
    addresses = [pci_address(device) for device in devices]
    reach = gpus_reach_one_another(devices)
    return replace(links, library=library_topology(links.topology, addresses, os.environ, reach))


def _numa_memory(node: Node, free: int, replicas: int) -> int:
    """Returns how many bytes of main memory the ranks of this machine can take if each takes the same amount from the
    NUMA node of its GPU. free: free bytes of the machine, which the result does not exceed; replicas: engines that
    share it."""
    addresses = [pci_address(gpu) for gpu in node.devices]
    nodes = Counter(node_of(address) for address in addresses if address is not None)
    shares = [
        size // (count * replicas)
        for number, count in nodes.items()
        if number is not None and (size := free_bytes_of(number)) is not None
    ]
    return min([free, *(share * len(node.ranks) * replicas for share in shares)])


def _library_probe(arch: ArchTraits) -> Probe | None:
    """Returns a function that runs torch's kernel for a need once and returns the problem that it found, or "". It
    covers attention to prompts and scaled matrix products, these only on GPUs where they may serve. None without a
    GPU."""
    if arch.device != "cuda":
        return None
    from sglang.srt.layers.attention import flash_varlen
    from sglang.srt.layers.quantization import scaled_mm

    def probe(need: Need) -> str:
        if need.op == "prefill_attention":
            return flash_varlen.problem_of(need)
        return scaled_mm.problem_of(need) if SCALED_MM_FEATURES <= arch.features else ""

    return probe


def _connect_gpus(
    args: ServerArgs, model: ModelConfig, hidden_size: int, arch: ArchTraits, node: Node, gpu: int
) -> PeerLinks:
    """Sets up all-reduce through peer memory between the ranks, where that works, and returns the links with the reason
    where it does not. A collective; comes before free memory is measured, because it allocates workspaces. Raises
    UserError if NCCL does not work reliably either.
    """
    if "nvlink" in arch.features:
        topology = Topology.NVLINK
    else:
        topology = pci_topology([pci_address(device) for device in node.devices])
    if args.pp_size > 1 or node.count > 1 or args.attn_dp_size not in (1, args.tp_size):
        reason = "--pp-size: the ranks of a stage" if args.pp_size > 1 else "--attn-dp-size: groups of ranks"
        reason = "--nnodes: machines" if node.count > 1 else reason
        return PeerLinks(topology, f"{reason} add up through NCCL", f"{reason} add up through NCCL")
    fuse, disabled = args.enable_flashinfer_allreduce_fusion, args.disable_custom_all_reduce
    reason = "--disable-custom-all-reduce" if disabled else ""
    if disabled and not fuse:
        return PeerLinks(topology, reason)
    if "sm120_sgl_kernel" not in installed_packages() or not ranges_for(topology, args.tp_size):
        return PeerLinks(topology, reason, "the start-up probe of the links needs sgl-kernel, up to 8 ranks")
    from sglang.srt.distributed.peer_setup import connect, fused_by_flashinfer

    e4m3 = 0 if args.enable_quantized_all_reduce == "off" else PIECE_BYTES
    links, reducer = connect(parallel_state.host_group(), gpu, topology, args.watchdog_timeout, e4m3_bytes=e4m3)
    if disabled and reducer is not None:
        reducer.close()
        links, reducer = PeerLinks(topology, reason), None
    elif links.problem:
        return replace(links, fusion_problem=links.problem)
    groups = parallel_state.groups()
    group = groups.tp
    group.peers = reducer
    if reducer is not None:
        for other in (group, groups.context, groups.dp):  # groups of equal size have the same ranks in the same order
            if other.size == group.size:
                other.reduce_with(reducer)
                other.exchange_with(reducer)
    if fuse:
        problem = fused_by_flashinfer(group, parallel_state.host_group(), hidden_size, model.dtype, reducer)
        links = replace(links, fusion_problem=problem)
    return links


def create_runner(
    args: ServerArgs, rank: int = 0, rendezvous: str | None = None, create_encoder: CreateEncoder | None = None
) -> ModelRunner:
    """Makes the plan (`create_plan`) and returns its model runner (`load_runner`). Raises UserError."""
    return load_runner(args, create_plan(args, rank, rendezvous), rank, create_encoder)


def load_runner(
    args: ServerArgs,
    plan: Plan,
    rank: int = 0,
    create_encoder: CreateEncoder | None = None,
    before_launches: Callable[[], None] = lambda: None,
) -> ModelRunner:
    """Loads weights, creates pools and graphs, and returns the runner after the canary has compared their results
    (unless --skip-server-warmup). create_encoder: makes the encoder of images and videos; None: the model's own, if it
    has one. before_launches: as for ModelRunner. Raises UserError."""
    if parallel_state.is_leader():
        plan.log()
    from sglang.srt.model_executor.memory_saver.saver import create_saver
    from sglang.srt.model_executor.model_runner import ModelRunner

    runner = ModelRunner(
        plan,
        **runner_options(args, plan, create_encoder),
        memory_saver=create_saver(plan.device) if args.enable_memory_saver else None,
        before_launches=before_launches,
    )
    runner.storage = create_storage(args, runner, rank)
    if not args.skip_server_warmup:
        from sglang.srt.model_executor.canary import check_runner

        check_runner(runner)
    refuse_unlike_tiles(plan.arch.name, plan.ranks.stage(rank), dict(tiles_in_use()))
    return runner


def runner_options(args: ServerArgs, plan: Plan, create_encoder: CreateEncoder | None = None) -> dict[str, Any]:
    """Returns what the user's arguments say to a ModelRunner."""
    from sglang.srt.drafts.create import create_drafter
    from sglang.srt.model_loader.loader import load_encoder

    settings, seed = speculative_settings(args, plan.model.architecture), args.random_seed or 0
    return {
        "load_format": args.load_format,
        "seed": seed,
        "create_drafter": None if settings is None else partial(create_drafter, settings),
        "keeps_hidden": args.enable_return_hidden_states,
        "widths": None if settings is None else plan.step_widths,
        "create_encoder": create_encoder or partial(load_encoder, load_format=args.load_format, seed=seed),
    }


def create_storage(args: ServerArgs, runner: ModelRunner, rank: int) -> StorageEngine | None:
    """Opens the storage tier that the flags name; returns None if they name none, or there is no host tier. Raises
    UserError if the store cannot be used."""
    host_cache = runner.plan.host_cache
    if host_cache is None or host_cache.storage is None or runner.copies is None:
        return None
    return open_store(args, runner, rank, host_cache.storage)


def open_store(args: ServerArgs, runner: ModelRunner, rank: int, config: StorageConfig) -> StorageEngine:
    """Opens a store behind the host tier, which the runner must have. Raises UserError if it cannot be used."""
    plan, copies = runner.plan, runner.copies
    assert copies is not None
    from sglang.srt.mem_cache.storage.engine import StorageEngine
    from sglang.srt.mem_cache.storage.fingerprint import fingerprint
    from sglang.srt.mem_cache.storage.store import create_store

    store, num_windows = create_store(config), len(plan.pool_sizes.windows)
    ranks_share = plan.host_cache is not None and plan.host_cache.ranks_share
    share = (plan.ranks.attn_tp_rank(rank), plan.ranks.attn_tp_size) if ranks_share else (0, 1)
    return StorageEngine(store, copies.pools, fingerprint(args, plan, rank), plan.page_size, num_windows, share)


def create_depth(args: ServerArgs, runner: ModelRunner) -> Depth | None:
    """Returns the object that chooses the number of draft tokens of each step; None without drafts. A collective (it
    measures steps)."""
    settings = speculative_settings(args, runner.plan.model.architecture)
    if settings is None:
        return None
    from sglang.srt.drafts.depth import AdaptiveDepth, FixedDepth, with_expert_copies

    widths = runner.plan.step_widths
    if settings.adaptive is None:
        return FixedDepth(widths)
    times = with_expert_copies(runner.step_times(), runner.plan.expert_slots)
    return AdaptiveDepth(settings.adaptive, settings.num_draft_tokens, times, widths)
