"""Imports damaged and hostile files in a process of its own, with limits on memory and time; one JSON line per case.

python import_child.py damaged|hostile FIRST CASES FOLDER
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # the others reserve addresses in advance
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=1")

import damage
import hostile_files as files
import hostile_tables as tables
import numpy as np
import valid_files

from fedbraid.data.importing import import_data
from fedbraid.data.names import check_name
from fedbraid.data.store import open_store, verify

BUILDERS = (
    files.h5_external_values,
    files.h5_external_link,
    files.h5_virtual,
    files.h5_soft_link,
    files.h5_group_in_itself,
    files.h5_never_written,
    files.h5_zeros,
    files.h5_shared_text,
    files.h5_strange_type,
    files.h5_names,
    files.sqlite_that_computes,
    files.tar_member,
    files.tar_outside,
    files.tar_bomb,
    files.tar_sparse,
    files.zip_outside,
    files.zip_link,
    files.zip_bomb,
    files.zip_lies,
    files.gz_bomb,
    files.idx_sizes,
    files.leaf_json,
    files.npz_objects,
    files.npz_shapes,
    files.npz_zeros,
    files.npz_values,
    files.cifar_pickle,
    files.image_sizes,
    tables.parquet_rows,
    tables.parquet_text,
    tables.table_values,
    tables.table_names,
    tables.arrow_offsets,
    files.not_a_file,
    tables.store_names,
    tables.store_files,
    tables.store_values,
)

SEED, SECONDS = 17, 20
MEMORY = 768 << 20  # bytes above what the process has after its imports
SECRET = b"SECRET-of-another-file-" + bytes(range(128, 169))  # 64 bytes


class Slow(BaseException):
    """Above Exception, so that no reader takes it for damage."""


def _alarm(*_: Any) -> None:
    raise Slow


def attempt(kind: str, paths: list[Path], out: Path, options: Mapping[str, Any]) -> Any:
    """The data of an import, or of a store that is opened: everything is read."""
    if kind != "store":
        import_data(kind, paths, out, **options)
        data = open_store(out)
        verify(out)
    else:
        data = open_store(paths[0])
        verify(paths[0])
    data.check()
    for split in data.splits.values():
        list(split.ids)
        for rows in split.arrays.values():
            list(rows) if rows.dtype == object else np.array(rows)
    return data


def harm(data: Any, out: Path, rows: set[bytes] | None) -> str:
    """What is wrong with data that was accepted."""
    for field in data.train.arrays:
        check_name(field, "field")
    check_name(data.name, "name")
    for file in out.iterdir() if out.exists() else ():
        if SECRET[:16] in file.read_bytes():
            return "bytes of another file were imported"
    if rows is not None and any(row.tobytes() not in rows for row in np.array(data.train.arrays["x"])):
        return "a value differs, and the checksum of the file shows it"
    return ""


def judge(kind: str, paths: list[Path], options: Mapping[str, Any], place: Path, **expect: Any) -> str:
    """Import and compare with what is right; an empty text if the case held."""
    out, scratch = place / "out" / "new" / "store", place / "tmp"
    out.parent.parent.mkdir()
    scratch.mkdir()
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    os.chdir(place / "out")
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    verdict = ""
    try:
        data = attempt(kind, paths, out, options)
        verdict = "accepted" if expect.get("refused") else harm(data, out, expect.get("rows"))
        del data
    except ValueError as error:
        text = str(error)
        if type(error) is not ValueError or not text or "\n" in text or len(text) > 1500:
            verdict = f"unclear error {type(error).__name__}: {text[:300]!r}"
        elif "more memory than there is" in text:
            verdict = text
        elif out.parent.exists():
            verdict = f"left {sorted(p.name for p in out.parent.rglob('*'))} after {text[:200]}"
    except Slow:
        verdict = f"more than {SECONDS} seconds"
    except BaseException as error:
        verdict = f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not verdict and (left := [p.name for p in (*scratch.iterdir(), *(place / "out").iterdir()) if p.name != "new"]):
        verdict = f"left {left}"
    return verdict


def damaged(i: int, place: Path, bases: Path) -> tuple[str, str]:
    names = list(valid_files.VALID)
    name = names[i % len(names)]
    valid = valid_files.VALID[name]
    source = place / "in"
    if not (bases / name).exists():
        (bases / name).mkdir(parents=True)
        valid.files(bases / name, np.random.default_rng(SEED))
    shutil.copytree(bases / name, source)
    rng = np.random.default_rng([SEED, i])
    paths = [source / p for p in valid.paths]
    whole = i < len(names)  # the first of each format is not damaged: it must be imported
    what = "whole" if whole else damage.damage(source, rng)
    rows = None
    if valid.sealed and "inside" not in what and " as " not in what:
        rows = _rows(name, bases)
    verdict = judge(valid.kind, paths, valid.options, place, rows=rows)
    if whole and not verdict and valid.kind != "store" and not (place / "out" / "new" / "store").exists():
        verdict = "the valid file was refused"
    return f"{i} {name}: {what}", verdict


_ROWS: dict[str, set[bytes]] = {}


def _rows(name: str, bases: Path) -> set[bytes]:
    if name not in _ROWS:
        valid = valid_files.VALID[name]
        tempfile.tempdir = str(bases)
        out = bases / f"{name}.store"
        shutil.rmtree(out, ignore_errors=True)
        import_data(valid.kind, [bases / name / p for p in valid.paths], out, **valid.options)
        data = open_store(out)
        _ROWS[name] = {row.tobytes() for split in data.splits.values() for row in np.array(split.arrays["x"])}
    return _ROWS[name]


def hostile(i: int, place: Path, bases: Path) -> tuple[str, str]:
    build = BUILDERS[i % len(BUILDERS)]
    source, secret = place / "in", bases / "secret"
    source.mkdir()
    secret.write_bytes(SECRET)
    made = build(source, np.random.default_rng([SEED, i]), secret)
    verdict = judge(made.kind, [made.path], made.options, place, refused=made.refused)
    if list(place.rglob("harm*")) or Path("/tmp/harm-of-fedbraid").exists():
        verdict = "it did harm"
    return f"{i} {build.__name__}", verdict


def main() -> None:
    what, first, cases, folder = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _alarm)
    os.fsync = lambda descriptor: None  # crashes of the machine are not tried here, and thousands of syncs are slow
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (512 << 20, resource.RLIM_INFINITY))
    bases = folder / "bases"
    bases.mkdir(exist_ok=True)
    for i in range(first, cases):
        place = folder / f"case-{i}"
        place.mkdir()
        print(json.dumps({"start": i}), flush=True)
        name, verdict = (damaged if what == "damaged" else hostile)(i, place, bases)
        print(json.dumps({"case": i, "name": name, "verdict": verdict}), flush=True)
        os.chdir(folder)
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()
