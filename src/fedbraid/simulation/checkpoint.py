"""Checkpoints: everything that a run needs to continue, written atomically and verified before use.

Arrays are stored by orbax. A checkpoint is written to a temporary folder with a manifest of checksums, synced, then
renamed. So a folder with its final name is complete. The manifest shows later damage, and what run it belongs to.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid import files
from fedbraid.notices import notice
from fedbraid.sealed import Damaged, seal_json, unseal_json

__all__ = [
    "CheckpointError",
    "SaveError",
    "check_run",
    "differing",
    "drop_partial",
    "exists",
    "good_ones",
    "latest",
    "load",
    "pack",
    "save",
    "unpack",
    "verify",
]

MANIFEST = "manifest.json"
PARTIAL = "partial-"
KEYS = {"round", "files", "run"}  # of a manifest
KEEP = 2  # number of checkpoints that a run keeps, the newest ones


class CheckpointError(ValueError):
    """The checkpoint cannot be used; the message says which one can."""


class SaveError(OSError):
    """A checkpoint could not be written; the message says why, and which one is left."""


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
    names = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in names}


def _checkpointer() -> Any:
    """Orbax's checkpointer for this process only: with several hosts, orbax would wait for all of them."""
    import orbax.checkpoint as ocp

    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs a traceback of an error, then raises it
    if jax.process_count() == 1:
        return ocp.PyTreeCheckpointer()
    own = jax.process_index()
    among = ocp.options.MultiprocessingOptions(own, {own}, f"fedbraid-{own}")
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=among)
    return ocp.Checkpointer(handler, multiprocessing_options=among)


def save(
    root: Path, round_: int, tree: dict[str, Any], *, keep: int = KEEP, run: Mapping[str, Any] | None = None
) -> Path:
    """Write ``tree`` (nested dicts of arrays) as the checkpoint after ``round_`` rounds; keep the ``keep`` newest.

    run: what determines the results of the run, by key; `check_run` compares it. Checkpoints of later rounds are
    deleted: a run that continues from an earlier round writes them again. If the writing fails, the earlier checkpoints
    stay and `SaveError` names the newest one.
    """
    root = root.absolute()
    place, partial = root / f"{round_:08d}", root / f"{PARTIAL}{round_:08d}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        drop_partial(root)
        with _checkpointer() as writer:
            writer.save(partial / "arrays", jax.tree.map(np.asarray, tree))
        manifest = {"round": round_, "files": _checksums(partial), "run": dict(run or {})}
        (partial / MANIFEST).write_text(seal_json(manifest))
        for path in (*partial.rglob("*"), partial):
            if path.is_file() or path.is_dir():
                (files.sync if path.is_file() else files.sync_folder)(path)
        if place.exists():
            _delete(place)
        os.rename(partial, place)
        files.sync_folder(root)
    except Exception as error:
        failure = _failed(error, root, partial)
        if failure is None:
            raise
        raise failure from error
    for old in _places(root):
        if old.name > place.name:
            _delete(old)
    for old in _places(root)[:-keep]:
        _delete(old)
    return place


def _failed(error: Exception, root: Path, partial: Path) -> SaveError | None:
    """The error for a checkpoint that could not be written; None if the operating system did not cause it."""
    reason = _of_the_disk(error)
    if reason is None:
        return None
    shutil.rmtree(partial, ignore_errors=True)
    good = next((place for place in reversed(_places(root)) if verify(place) is None), None)
    kept = (
        f"the last good one, after round {int(good.name)}, is kept: the run can be resumed from it"
        if good
        else "there is no earlier one: a resumed run starts from the first round"
    )
    return SaveError(
        f"the checkpoint after round {int(partial.name.removeprefix(PARTIAL))} could not be written to {root}: "
        f"{reason}; {kept}"
    )


def _of_the_disk(error: BaseException) -> str | None:
    """The reason of an operating system's error, also of one that orbax or tensorstore pass on as text."""
    if isinstance(error, OSError):
        return error.strerror or str(error).splitlines()[0]
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES):
        if os.strerror(code) in str(error):
            return os.strerror(code)
    return None


def drop_partial(root: Path) -> None:
    """Delete what a process left that ended while it wrote or deleted a checkpoint."""
    for leftover in root.glob(f"{PARTIAL}*"):
        shutil.rmtree(leftover)


def _delete(place: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a half deleted one is not seen."""
    gone = place.with_name(f"{PARTIAL}{place.name}-{secrets.token_hex(4)}")
    os.rename(place, gone)
    shutil.rmtree(gone)


def _places(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and p.name.isdigit()) if root.is_dir() else []


def _manifest(place: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, checked."""
    manifest = unseal_json((place / MANIFEST).read_bytes())
    named = manifest.get("files")
    if not isinstance(named, dict) or manifest.get("round") != int(place.name) or not set(manifest) <= KEYS:
        raise Damaged("it is not that of this checkpoint")
    return manifest


def verify(place: Path) -> str | None:
    """The damage of a checkpoint in words; None if it is intact."""
    try:
        manifest = _manifest(place)
    except (OSError, Damaged):
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


def good_ones(root: Path) -> Iterator[Path]:
    """Checkpoints that are intact, newest first. A notice names each damaged one.

    For a simulated run, which may continue from any of them: it computes the same rounds again.
    """
    for place in reversed(_places(root)):
        problem = verify(place)
        if problem is None:
            yield place
        else:
            notice(f"the checkpoint {place} is damaged and is not used: {problem}")


def load(place: Path) -> tuple[int, dict[str, Any]]:
    """(round, tree) of a verified checkpoint."""
    with _checkpointer() as reader:
        tree = reader.restore(place.absolute() / "arrays")
    return int(_manifest(place)["round"]), tree


def check_run(place: Path, run: Mapping[str, Any]) -> None:
    """Refuse to continue a checkpoint of another run, and name the keys that differ."""
    saved = _manifest(place).get("run")
    if not saved:  # of an older version
        return
    apart = differing(saved, json.loads(json.dumps(run)))
    if apart:
        raise CheckpointError(
            f"the checkpoint {place} is of another run: {apart}. Resume with the configuration it was made with, or "
            "start a new run in another folder"
        )


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The keys at which two runs differ, in words; a key that is absent has its default value.

    >>> differing({"seed": 0, "rounds": 3}, {"seed": 1, "rounds": 3})
    'seed was 0 and is now 1'
    """

    def shown(tree: Mapping[str, Any], key: str) -> str:
        return json.dumps(tree[key]) if key in tree else "its default"

    keys = [key for key in sorted({*before, *now}) if shown(before, key) != shown(now, key)]
    return ", ".join(f"{key} was {shown(before, key)} and is now {shown(now, key)}" for key in keys)


def exists(root: Path) -> bool:
    """Whether there is a checkpoint, intact or damaged."""
    return bool(_places(root))
