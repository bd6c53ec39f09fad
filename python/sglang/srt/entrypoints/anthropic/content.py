"""Content blocks of Anthropic's Messages API, and their form for the model: text and images."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

MAX_BLOCKS = 4_096
"""Content blocks of one message or tool result."""


class CacheControl(msgspec.Struct):
    """The whole prompt stays cached before others, for `ttl` after its last use; no part of it ends apart. A hint: no
    value of it ends a request."""

    type: Any = "ephemeral"
    ttl: Any = None


class Citations(msgspec.Struct):
    enabled: bool | None = False

    def __post_init__(self) -> None:
        if self.enabled:
            raise ValueError("citations are not supported: ask for quotes in a message")


class Block(msgspec.Struct, tag_field="type", kw_only=True):
    """A piece of content, told apart by its `type`."""

    cache_control: CacheControl | None = None


class TextBlock(Block, tag="text"):
    text: str


class Source(msgspec.Struct, tag_field="type"):
    """Where an image or a document comes from, told apart by its `type`."""


class Base64Source(Source, tag="base64"):
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: str


class UrlSource(Source, tag="url"):
    url: str


class FileSource(Source, tag="file"):
    """Refused."""

    def __post_init__(self) -> None:
        raise ValueError("no files are stored here for a source of type file; send what is in it")


class Transformations(msgspec.Struct):
    """Images are scaled to what the model reads."""

    oversized_image: Literal["downsize"] | None = None


class ImageBlock(Block, tag="image"):
    source: Base64Source | UrlSource | FileSource
    transformations: Transformations | None = None


class PlainText(Source, tag="text"):
    data: str


class BlocksSource(Source, tag="content"):
    content: str | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_BLOCKS)]


class _Pdf(Source):
    """Refused."""

    def __post_init__(self) -> None:
        raise ValueError("a document of this type (PDF) is not read here; send its text: a source of type text")


class Base64Pdf(_Pdf, tag="base64"):
    """Refused."""


class UrlPdf(_Pdf, tag="url"):
    """Refused."""


class DocumentBlock(Block, tag="document"):
    """Shown as its title, its context and its content."""

    source: PlainText | BlocksSource | Base64Pdf | UrlPdf | FileSource
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None

    def plain(self) -> list[TextBlock | ImageBlock]:
        """Returns the blocks that the model gets."""
        given = self.source
        content = given.content if isinstance(given, BlocksSource) else getattr(given, "data", "")
        heading = [TextBlock(text) for text in (self.title, self.context) if text]
        return [*heading, *blocks_of(content)]


class SearchResultBlock(Block, tag="search_result"):
    """Shown as its title, its source and its content."""

    title: str
    source: str
    content: Annotated[list[TextBlock], Meta(max_length=MAX_BLOCKS)]
    citations: Citations | None = None

    def plain(self) -> list[TextBlock | ImageBlock]:
        """Returns the blocks of text that a template gets in place of this one."""
        return [TextBlock(self.title), TextBlock(self.source), *self.content]


class ToolReferenceBlock(Block, tag="tool_reference"):
    """A tool that a search found. The model sees all tools anyway."""

    tool_name: str

    def plain(self) -> list[TextBlock | ImageBlock]:
        """Returns the block of text that a template gets in place of this one."""
        return [TextBlock(self.tool_name)]


SHOWN_AS_TEXT = (DocumentBlock, SearchResultBlock, ToolReferenceBlock)


def blocks_of(content: Any) -> list[Any]:
    """Returns the content of a message or of a result as blocks."""
    return [TextBlock(content)] if isinstance(content, str) else content or []


def plain_blocks(content: Any) -> list[Any]:
    """Returns `blocks_of` with text and images in place of documents and the like."""
    blocks: list[Any] = []
    for block in blocks_of(content):
        blocks += block.plain() if isinstance(block, SHOWN_AS_TEXT) else [block]
    return blocks
