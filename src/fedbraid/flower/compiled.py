"""The compilation cache of a node. Flower starts a process for every message, so compiled programs are kept on disk."""

from __future__ import annotations

import os
from pathlib import Path

import jax

__all__ = ["CACHE_DIR", "use_cache"]

CACHE_DIR = "cache-dir"  # the key in a node's config


def default_cache() -> Path:
    """The default folder, inside Flower's own folder."""
    home = os.environ.get("FLWR_HOME")
    return (Path(home) if home else Path.home() / ".flwr") / "fedbraid-compiled"


def use_cache(folder: Path | str | None = None) -> Path | None:
    """Keep all compiled programs in ``folder``, small ones too, unless the process has a compilation cache already.

    Returns the folder in use. An empty string turns the cache off.
    """
    if folder == "":
        return None
    if jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]
        return Path(jax.config.jax_compilation_cache_dir)  # pyright: ignore[reportAttributeAccessIssue]
    place = Path(folder).expanduser() if folder else default_cache()
    place.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", str(place))
    # by default jax keeps only programs that took a second to compile; the process of the next message needs all
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return place
