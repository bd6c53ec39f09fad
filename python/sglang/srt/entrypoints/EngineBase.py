"""The methods that engines and clients of trainers have in common, by the module's name in SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class EngineBase(ABC):
    """An engine, in this process or behind HTTP."""

    @abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generates text."""

    @abstractmethod
    def flush_cache(self) -> Any:
        """Empties the prefix cache."""

    @abstractmethod
    def update_weights_from_tensor(self, *args: Any, **kwargs: Any) -> Any:
        """Writes tensors into the weights."""

    @abstractmethod
    def release_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Gives memory back."""

    @abstractmethod
    def resume_memory_occupation(self, *args: Any, **kwargs: Any) -> Any:
        """Takes memory again."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the processes."""
