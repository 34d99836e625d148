"""Checkpoints: everything that a run needs to continue, written atomically and verified before use.

Arrays are stored by orbax. A checkpoint is written to a temporary folder with a manifest of checksums, then renamed. So
a folder with its final name is complete. The manifest shows later damage.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["CheckpointError", "exists", "latest", "load", "pack", "save", "unpack", "verify"]

MANIFEST = "manifest.json"
PARTIAL = "partial-"
KEEP = 2  # number of checkpoints that a run keeps, the newest ones


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message says which one can."""


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def pack(tree: Any) -> dict[str, np.ndarray]:
    """A pytree as a flat dict of NumPy arrays; random keys are stored as their key data."""
    return {
        f"{i:04d}": np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
        for i, leaf in enumerate(jax.tree.leaves(tree))
    }


def unpack(like: Any, packed: dict[str, np.ndarray], what: str) -> Any:
    """The inverse of `pack`, with the structure of ``like``. Refuses other shapes and names the array."""
    leaves, tree = jax.tree.flatten(like)
    if len(packed) != len(leaves):
        raise CheckpointError(f"the checkpoint's {what} has {len(packed)} arrays, this run's has {len(leaves)}")
    out = []
    for name, leaf in zip(sorted(packed), leaves, strict=True):
        raw, want = packed[name], jax.random.key_data(leaf) if _is_key(leaf) else leaf
        if raw.shape != want.shape or raw.dtype != want.dtype:
            raise CheckpointError(
                f"the checkpoint's {what}, array {name}, is {raw.dtype}{list(raw.shape)}; this run needs "
                f"{want.dtype}{list(want.shape)}: resume with the configuration it was made with"
            )
        array = jnp.asarray(raw)
        out.append(jax.random.wrap_key_data(array) if _is_key(leaf) else array)
    return jax.tree.unflatten(tree, out)


def _checksums(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def _checkpointer() -> Any:
    """Orbax's checkpointer for this process only: with several hosts, orbax would wait for all of them."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.ERROR)
    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    own = jax.process_index()
    among = ocp.options.MultiprocessingOptions(own, {own}, f"fedbraid-{own}")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=among)
    return ocp.Checkpointer(handler, multiprocessing_options=among)


def save(root: Path, round_: int, tree: dict[str, Any], *, keep: int = KEEP) -> Path:
    """Write ``tree`` (nested dicts of arrays) as the checkpoint after ``round_`` rounds; keep the ``keep`` newest."""
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    for leftover in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)
    place, partial = root / f"{round_:08d}", root / f"{PARTIAL}{round_:08d}"
    with _checkpointer() as writer:
        writer.save(partial / "arrays", jax.tree.map(np.asarray, tree))
    manifest = {"round": round_, "files": _checksums(partial)}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    _sync(partial)
    if place.exists():
        shutil.rmtree(place)
    os.rename(partial, place)
    _sync(root)
    for old in _places(root)[:-keep]:
        shutil.rmtree(old)
    return place


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _places(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and p.name.isdigit()) if root.is_dir() else []


def verify(place: Path) -> str | None:
    """The damage of a checkpoint in words; None if it is intact."""
    try:
        manifest = json.loads((place / MANIFEST).read_text())
    except (OSError, ValueError):
        return "its manifest is missing or unreadable"
    found = _checksums(place)
    for name, checksum in manifest["files"].items():
        if name not in found:
            return f"{name} is missing"
        if found[name] != checksum:
            return f"{name} does not match its checksum"
    return None


def latest(root: Path) -> Path:
    """The newest checkpoint. If it is damaged, the error names the newest good one."""
    places = _places(root)
    if not places:
        raise CheckpointError(f"no checkpoint in {root}: the run stopped before its first one; start it again")
    problem = verify(places[-1])
    if problem is None:
        return places[-1]
    good = next((p for p in reversed(places[:-1]) if verify(p) is None), None)
    advice = (
        f"the newest good one is {good}; delete {places[-1]} to resume from it"
        if good
        else "there is no good one: start the run again"
    )
    raise CheckpointError(f"the checkpoint {places[-1]} is damaged: {problem}; {advice}")


def load(place: Path) -> tuple[int, dict[str, Any]]:
    """(round, tree) of a verified checkpoint."""
    with _checkpointer() as reader:
        tree = reader.restore(place.absolute() / "arrays")
    return int(json.loads((place / MANIFEST).read_text())["round"]), tree


def exists(root: Path) -> bool:
    """Whether there is a checkpoint, intact or damaged."""
    return bool(_places(root))
