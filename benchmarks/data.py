"""The speed of the store: writes a StackOverflow-shaped set in a stream, opens it, and samples cohorts.

    python benchmarks/data.py                                # 342,477 clients, 20 million sentences, 1.6 GB on disk
    python benchmarks/data.py --examples 135818730           # the size of the real set, 10.9 GB
    python benchmarks/data.py --clients 2000 --examples 100000 --rounds 50    # a few seconds

Prints one table, or one JSON object with --json: seconds and rate of writing, seconds to open and verify, cohorts and
bytes gathered per second with and without the prefetch thread, and the peak memory of the process.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store import StoreWriter, gather, open_store, prefetch, verify
from fedbraid.data.synthetic import sentences


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--clients", type=int, default=342_477)
    arguments.add_argument("--examples", type=int, default=20_000_000)
    arguments.add_argument("--cohort", type=int, default=50)
    arguments.add_argument("--rounds", type=int, default=1_000)
    arguments.add_argument("--folder", type=Path, help="where to write the store (kept); default: a temporary folder")
    arguments.add_argument("--json", action="store_true")
    chosen = arguments.parse_args()
    folder = chosen.folder or Path(tempfile.mkdtemp(prefix="fedbraid-benchmark-"))
    try:
        result = measure(folder / "sentences", chosen.clients, chosen.examples, chosen.cohort, chosen.rounds)
    finally:
        if chosen.folder is None:
            shutil.rmtree(folder)
    if chosen.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        print(f"{key:<28} {value:>16,.3f}" if isinstance(value, float) else f"{key:<28} {value:>16,}")


def measure(path: Path, clients: int, examples: int, cohort: int, rounds: int) -> dict[str, int | float]:
    result: dict[str, int | float] = {"clients": clients, "examples": examples, "cohort": cohort, "rounds": rounds}

    start = time.perf_counter()
    integers = Pipeline.of({"name": "integers", "fields": "x,y"})
    with StoreWriter(path, name="synthetic-sentences", preprocess=integers, shuffle=None) as writer:
        for client, fields in sentences(clients=clients, examples=examples):
            writer.add("train", client, fields)
    result["write seconds"] = time.perf_counter() - start
    size = sum(f.stat().st_size for f in path.iterdir())
    result["store MB"] = size / 1e6
    result["write MB/s"] = size / 1e6 / result["write seconds"]
    result["memory MB after writing"] = memory()

    start = time.perf_counter()
    data = open_store(path)
    result["open seconds"] = time.perf_counter() - start

    rng = np.random.default_rng(1)
    draws = [rng.choice(clients, cohort, replace=False) for _ in range(rounds)]
    start = time.perf_counter()
    gathered = sum(gather(data.train, draw).nbytes for draw in draws)
    seconds = time.perf_counter() - start
    result["gathered MB"] = gathered / 1e6
    result["gather cohorts/s"] = rounds / seconds
    result["gather MB/s"] = gathered / 1e6 / seconds

    draws = [rng.choice(clients, cohort, replace=False) for _ in range(rounds)]
    start = time.perf_counter()
    gathered = sum(c.nbytes for c in prefetch(data.train, draws))
    seconds = time.perf_counter() - start
    result["prefetch cohorts/s"] = rounds / seconds
    result["prefetch MB/s"] = gathered / 1e6 / seconds
    result["peak memory MB"] = memory()

    start = time.perf_counter()
    verify(path)
    result["verify seconds"] = time.perf_counter() - start
    return result


def memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
