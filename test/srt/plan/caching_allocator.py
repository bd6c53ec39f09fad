"""The bookkeeping of torch's caching allocator: how much a process holds after tensors came and went.

As its documentation and source describe it: sizes in multiples of 512 B; blocks of up to 1 MiB from segments of 2 MiB,
others from segments of 20 MiB or, from 10 MiB on, of their own size in multiples of 2 MiB; the smallest free block that
is large enough is taken and split; only whole free segments go back to the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIB = 1 << 20


@dataclass(eq=False)
class Block:
    segment: Segment
    size: int
    used: bool = False


@dataclass(eq=False)
class Segment:
    small: bool
    blocks: list[Block] = field(default_factory=list)


@dataclass
class CachingAllocator:
    segments: list[Segment] = field(default_factory=list)

    def allocate(self, size: int) -> Block:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        free = [b for s in self.segments if s.small == small for b in s.blocks if not b.used and b.size >= size]
        block = min(free, key=lambda b: b.size, default=None) or self._new_segment(size, small)
        left, blocks = block.size - size, block.segment.blocks
        if left >= 512 if small else left > MIB:
            blocks.insert(blocks.index(block) + 1, Block(block.segment, left))
            block.size = size
        block.used = True
        return block

    def _new_segment(self, size: int, small: bool) -> Block:
        total = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        segment = Segment(small)
        segment.blocks.append(Block(segment, total))
        self.segments.append(segment)
        return segment.blocks[0]

    def free(self, *blocks: Block) -> None:
        for block in blocks:
            block.used = False
            row = block.segment.blocks
            at = row.index(block)
            for neighbour in (row[at + 1 : at + 2], row[max(at - 1, 0) : at]):
                if neighbour and not neighbour[0].used:
                    block.size += neighbour[0].size
                    row.remove(neighbour[0])

    def held(self) -> int:
        """After empty_cache."""
        return sum(b.size for s in self.segments if any(block.used for block in s.blocks) for b in s.blocks)
