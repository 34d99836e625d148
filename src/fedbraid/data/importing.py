"""Import raw files of any known format into a store, with one report for all formats.

>>> import tempfile, pathlib
>>> import numpy as np
>>> folder = pathlib.Path(tempfile.mkdtemp())
>>> np.savez(folder / "tiny.npz", x=np.zeros((3, 2)), y=np.array([0, 1, 1]), client=np.array(["a", "a", "b"]))
>>> report = import_data("npz", [folder / "tiny.npz"], folder / "store")
>>> report.summary["clients"], report.summary["train_examples"]
(2, 3)
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedbraid.data import formats
from fedbraid.data.describe import summarize_data
from fedbraid.data.federated import FederatedData
from fedbraid.data.formats.archive import unpacked
from fedbraid.data.limits import one_line_errors, unlimited
from fedbraid.data.names import check_name, safe_name
from fedbraid.data.published import PUBLISHED, differences
from fedbraid.data.store import StoreWriter, is_store, open_store
from fedbraid.data.tabular import Columns

__all__ = ["FORMATS", "Report", "import_data", "open_source", "sniff"]


NO_TEST = (
    "no test split, so runs on this data have nothing to evaluate on; hold out a part of each client's rows with "
    "test_fraction = 0.2 (in [data] of a configuration, as an argument in Python, or --test-fraction 0.2 of an import)"
)


class Report(NamedTuple):
    """The result of an import: the store, its summary, and notes (counts that differ from the published ones)."""

    path: Path
    summary: dict[str, Any]
    notes: list[str]


def _one(read: Callable[..., None]) -> Callable[..., None]:
    def call(writer: StoreWriter, paths: Sequence[Path], **options: Any) -> None:
        if len(paths) != 1:
            raise ValueError(f"this format is read from one file or folder, got {len(paths)}")
        read(writer, paths[0], **options)

    call.__signature__ = inspect.signature(read)  # type: ignore[attr-defined]
    return call


def _columns(read: Callable[..., None]) -> Callable[..., None]:
    """A reader of tables that takes the fields of its ``Columns`` as options of their own."""
    own = [p for p in inspect.signature(read).parameters.values() if p.name != "columns"]
    names = [f.name for f in dataclasses.fields(Columns)]

    def call(writer: StoreWriter, paths: Sequence[Path], **options: Any) -> None:
        chosen = {name: options.pop(name) for name in names if name in options}
        lists = {name: tuple(chosen.pop(name) or ()) for name in ("features", "categories") if name in chosen}
        given = {name: value for name, value in chosen.items() if value is not None}
        read(writer, paths, columns=Columns(**lists, **given), **options)

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    call.__signature__ = inspect.Signature([*own, *more])  # type: ignore[attr-defined]
    return call


CIFAR_FILES = ("data_batch_1", "data_batch_1.bin", "data_batch_1.png", "train", "train.bin")
FORMATS: Mapping[str, Callable[..., None]] = {
    "tff": formats.read_tff,
    "leaf": _one(formats.read_leaf),
    "idx": _one(formats.read_idx),
    "cifar": _one(formats.read_cifar),
    "folder": _one(formats.read_folder),
    "parquet": _columns(formats.read_table),
    "csv": _columns(formats.read_csv),
    "svmlight": _columns(formats.read_svmlight),
    "npz": _one(formats.read_npz),
    "text": formats.read_text,
}


def import_data(
    kind: str,
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    seed: int = 0,
    drop_empty: bool = False,
    overwrite: bool = False,
    no_limits: bool = False,
    **options: Any,
) -> Report:
    """Read raw files of one format into a store. If they have an error, it is a ValueError and nothing is written.

    ``seed`` shuffles the rows within each client. ``name`` overrides the name that the format implies. Files may not
    declare far more data than they have (``fedbraid.data.limits``) unless ``no_limits`` is set. All other arguments are
    the format's own options.
    """
    if kind not in FORMATS:
        raise ValueError(f"unknown format {kind!r}; known: {', '.join(FORMATS)}")
    keywords = [p.name for p in inspect.signature(FORMATS[kind]).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if extra := sorted(set(options) - set(keywords)):
        raise ValueError(f"format {kind!r} has no option {extra[0]!r}; it takes {', '.join(keywords) or 'none'}")
    if not paths:
        raise ValueError("name at least one file or folder to import")
    published = PUBLISHED.get(name or "")
    if published is not None and "classes" in keywords and options.get("classes") is None:
        options["classes"] = published.classes
    if name is not None:
        check_name(name, "name")
    given = safe_name(Path(paths[0]).name)
    with (
        unlimited(no_limits),
        one_line_errors([*paths, out], kind),
        StoreWriter(out, name=name or given, shuffle=seed, drop_empty=drop_empty, overwrite=overwrite) as writer,
    ):
        FORMATS[kind](writer, [Path(p) for p in paths], **options)
        writer.name = name or writer.name
    data = open_store(out)
    notes = differences(data.name, data, natural=not data.info.get("plain"))
    if writer.dropped:
        notes.append(f"{writer.dropped} clients without examples were dropped")
    if data.unseen is not None:
        notes.append(f"{data.unseen.num_clients} clients never train: they are the split 'unseen'")
    if data.test is None:
        notes.append(NO_TEST)
    return Report(Path(out), summarize_data(data), notes)


def sniff(path: Path) -> str:
    """The format of a file or folder, recognised by file names.

    >>> sniff(Path("data.npz"))
    'npz'
    """
    if path.is_dir():
        names = [p.relative_to(path).as_posix() for p in sorted(path.rglob("*")) if p.is_file()][:10_000]
    else:
        names = [path.name]
    tests: list[tuple[str, Callable[[str], bool]]] = [
        ("tff", lambda n: n.endswith((".h5", ".hdf5", ".sqlite", ".sqlite.lzma", ".sqlite.xz"))),
        ("leaf", lambda n: n.endswith((".json", ".json.gz")) and ("train/" in n or path.name == "train")),
        ("npz", lambda n: n.endswith(".npz")),
        ("idx", lambda n: "images-idx3" in n),
        ("cifar", lambda n: n.rsplit("/", 1)[-1] in CIFAR_FILES),
        ("parquet", lambda n: n.endswith((".parquet", ".arrow"))),
        ("csv", lambda n: n.endswith((".csv", ".csv.gz", ".tsv"))),
        ("svmlight", lambda n: n.endswith((".svm", ".svmlight", ".libsvm"))),
        ("folder", lambda n: n.count("/") >= 1 and n.lower().endswith((".png", ".jpg", ".jpeg", ".bmp"))),
    ]
    for kind, test in tests:
        if any(test(n) for n in names):
            return kind
    raise ValueError(f"{path}: no known data format in it; known: {', '.join(FORMATS)} (see `fedbraid data import`)")


def open_source(
    path: str | os.PathLike[str],
    *,
    in_memory: bool = False,
    limit: int = 4 << 30,
    import_options: Mapping[str, Any] | None = None,
) -> FederatedData:
    """Open a store, or read raw files into memory. Raw files above ``limit`` bytes must be imported first."""
    root = Path(path)
    if not root.exists():
        raise ValueError(f"{root}: no such file or folder; path must be a store or raw files")
    if root.is_dir() and is_store(root):
        return open_store(root, in_memory=in_memory)
    with unpacked(root) as folder:
        kind = sniff(folder)
        files = [folder] if folder.is_file() else [p for p in folder.rglob("*") if p.is_file()]
        size = sum(f.stat().st_size for f in files)
        if size > limit:
            raise ValueError(
                f"{root}: {size / 1e9:.1f} GB of raw files; import them once with "
                f"`fedbraid data import {kind} {root} --out STORE` and use the store as path"
            )
        with tempfile.TemporaryDirectory(prefix="fedbraid-") as scratch:
            import_data(kind, [folder], Path(scratch) / "store", **(import_options or {}))
            return open_store(Path(scratch) / "store", in_memory=True)
