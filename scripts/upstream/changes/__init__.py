"""Every change, in the order in which it is applied and committed."""

from __future__ import annotations

from upstream.change import Change
from upstream.changes.allreduce_fusion import AllReduceFusion
from upstream.changes.attention_tiles import ExtendTiles, PrefillTiles, TreeMaskTiles
from upstream.changes.deepseek_v4 import V4Arguments, V4Decode, V4Indexer
from upstream.changes.hybrid_backends import HybridBackends
from upstream.changes.inkling import InklingStages
from upstream.changes.moe_configs import MoeCapacity, MoeDefault, MoeEditions
from upstream.changes.mxfp4_layout import Mxfp4Layout
from upstream.changes.mxfp8_experts import Mxfp8Experts
from upstream.changes.routing import DefaultBackend, DsaBackends, TrtllmMlaPrefill
from upstream.changes.sparse_attention import ContextParallelIndexer, IndexerLogits, IndexerTopK, SparseMla

ALL: tuple[type[Change], ...] = (
    ExtendTiles,
    TreeMaskTiles,
    PrefillTiles,
    HybridBackends,
    DefaultBackend,
    TrtllmMlaPrefill,
    DsaBackends,
    IndexerLogits,
    IndexerTopK,
    SparseMla,
    ContextParallelIndexer,
    V4Arguments,
    V4Indexer,
    V4Decode,
    AllReduceFusion,
    Mxfp4Layout,
    Mxfp8Experts,
    MoeEditions,
    MoeDefault,
    MoeCapacity,
    InklingStages,
)
