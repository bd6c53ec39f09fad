"""The version of the distribution `sm120-sglang`; pyproject.toml reads it from here."""

__version__ = "0.1.0"
