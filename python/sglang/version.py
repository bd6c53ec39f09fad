"""The version of the distribution `sm120-sglang`; pyproject.toml reads it from here. The image's label and the
newest heading of CHANGELOG.md repeat it, which a test compares."""

__version__ = "0.2.0"

SGLANG_VERSION = "0.5.23"
"""The release of SGLang whose names are here. `sglang.__version__` begins with it, as trainers compare that one."""
