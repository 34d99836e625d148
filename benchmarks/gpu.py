"""Seconds per round on a GPU: lanes compared with one padded vmap, on ragged cohorts and in a sweep.

    python benchmarks/gpu.py [--json] [--only NAME ...] [--out [FILE]] [--check [FILE]]
    python benchmarks/gpu.py --published [--only NAME ...] [--against torch] [--out [FILE]] [--check [FILE]]
    python benchmarks/gpu.py --ablate [--only NAME ...]

- cnn: the EMNIST CNN (1,206,590 parameters), 100 clients of equal size x 10 steps x batch 20
- cnn-ragged: the same with log-normal client sizes (sigma 0.6) of mean 200, cohort 100
- resnet: ResNet-18 with group norm on 24 x 24 x 3 images, 20 clients x 5 steps x batch 20
- gpt: a transformer of 4.2 million parameters (4 x 256, 128 tokens, vocabulary 2,048), 20 clients x 5 steps x batch 8
- lstm: the one-layer character LSTM (256 units), 20 clients x 3 steps x batch 10 x 80 characters
- lstm-sweep: nine client learning rates at once, cohort 20, sizes as in Shakespeare (1 to 1,003 sequences, median 17)
- pieces: the CNN's second convolution and its gradients for 100 clients, alone and with bias, ReLU and pool, and the
  LSTM's 80 positions for 20 clients, by the library's kernels and by XLA's operations
- floors: copy bandwidth and rate of matrix products of the GPU, measured in the same run

``--published`` measures the rows of docs/benchmarks.md and LoRA (lora.py), ``--against torch`` also PyTorch's best ways
for cnn, resnet and gpt (gpu_torch.py) and for LoRA. Each is a process of its own: several compile at the same time, and
all others are paused while one is timed. ``--out`` writes the numbers into FILE (benchmarks/results/h200.json),
from which docs/benchmarks.md is made (`published.py --page`). ``--check`` compares with FILE: it names rows that are
more than 5% slower, and fails if there are any, if a program failed, or if FILE has none of the rows.

``--ablate`` measures the rows in bfloat16 with all rewrites, and without one at a time (rewrites.py): what each of them
saves. verify.py checks that the kernels compute what XLA computes.

Times are medians over portions of rounds after the first, which compiles. The masked share is the share of steps whose
results are discarded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import fedbraid as fb
from fedbraid import models
from fedbraid.lowering.operations import patches
from rewrites import REWRITES, without
from turns import await_turn, measure_in_turn


def images(sizes, shape=(28, 28, 1), classes=62) -> fb.Split:
    rng = np.random.default_rng(0)
    n = int(np.sum(sizes))
    arrays = {"x": rng.random((n, *shape), dtype=np.float32), "y": rng.integers(0, classes, n).astype(np.int32)}
    return fb.Split(arrays, np.concatenate([[0], np.cumsum(sizes)]))


def texts(sizes, length=80, symbols=90) -> fb.Split:
    rng = np.random.default_rng(0)
    n = int(np.sum(sizes))
    text = rng.integers(1, symbols, (n, length + 1)).astype(np.int32)
    return fb.Split({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}, np.concatenate([[0], np.cumsum(sizes)]))


def seconds_per_round(make, split, *, rates=None, rounds, **options) -> dict:
    """Median over portions. With ``rates``, all of them run together under vmap, and whole calls are timed."""
    if rates is not None:
        run = jax.jit(
            lambda r: jax.vmap(lambda lr: fb.simulate(make(lr), rounds=rounds, data=split, **options).params)(r)
        )
        jax.block_until_ready(run(rates))
        await_turn()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            jax.block_until_ready(run(rates))
            times.append((time.perf_counter() - began) / rounds)
        return {"seconds": statistics.median(times)}
    stamps = []

    def progress(now) -> None:
        await_turn()  # after the first rounds, so the program is compiled
        stamps.append((time.perf_counter(), now.round))

    result = fb.simulate(
        make(0.05),
        data=split,
        rounds=rounds,
        on_progress=progress,
        **options,
    )
    spans = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(stamps[1:])]
    return {
        "seconds": statistics.median(spans),
        "masked_share": result.info.masked_share,
        "lanes": result.info.plan.chunk,
        "steps": result.info.steps / rounds,
    }


def cnn(sizes, cohort, *, measure=seconds_per_round, **options) -> dict:
    model = models.emnist_cnn(62)
    params = model.init(jax.random.key(0))
    make = lambda lr: fb.fedavg(model.loss, client_lr=lr, batch_size=20, epochs=1)  # noqa: E731
    return measure(make, images(sizes), params=params, cohort=cohort, rounds=60, **options)


def resnet(**options) -> dict:
    model, split = models.resnet18_gn(100), images(np.full(40, 100), (24, 24, 3), 100)
    return _equal_clients(model, split, batch=20, **options)


def gpt(**options) -> dict:
    return _equal_clients(models.gpt(2048, tied=False), texts(np.full(40, 40), 128, 2048), batch=8, **options)


def _equal_clients(model, split, *, batch, measure=seconds_per_round, **options) -> dict:
    params = model.init(jax.random.key(0))
    make = lambda lr: fb.fedavg(model.loss, client_lr=lr, batch_size=batch, epochs=1)  # noqa: E731
    return measure(make, split, params=params, cohort=20, rounds=24, plan="lanes", chunk=20, **options)


def lstm(sizes, cohort, *, rates=None, rounds=60, compute="float32", measure=seconds_per_round, **options) -> dict:
    model = models.char_lstm(90, compute=compute)
    params = model.init(jax.random.key(0))
    make = lambda lr: fb.fedavg(model.loss, client_lr=lr, batch_size=10, epochs=1)  # noqa: E731
    return measure(make, texts(sizes), rates=rates, params=params, cohort=cohort, rounds=rounds, **options)


def seconds(function, *arguments, repeats: int = 10) -> float:
    """Seconds of one compiled call."""
    compiled = jax.jit(function)
    jax.block_until_ready(compiled(*arguments))
    began = time.perf_counter()
    for _ in range(repeats):
        out = compiled(*arguments)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / repeats


def floors() -> dict:
    a = jnp.ones((1 << 29,), jnp.float32)
    m = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.float32)
    copied, multiplied = seconds(lambda x: x + 1, a), seconds(lambda x: x @ x, m)
    return {"copy_bytes_per_s": 2 * a.nbytes / copied, "matmul_flops_per_s": 2 * 8192**3 / multiplied}


def convolution_pieces(clients: int = 100, images: int = 20, size: int = 26) -> dict:
    from fedbraid.lowering.kernels.convolution import Geometry, convolve

    keys = jax.random.split(jax.random.key(0), 3)
    out = size - 2
    x = jax.random.normal(keys[0], (clients, images, size, size, 32))
    w = jax.random.normal(keys[1], (clients, 3, 3, 32, 64))
    dy = jax.random.normal(keys[2], (clients, images, out, out, 64))

    def patched(x, w):
        return (patches(x, (3, 3)).reshape(-1, 288) @ w.reshape(288, 64)).reshape(images, out, out, 64)

    ways = {"kernel": lambda x, w: convolve(x, w, Geometry((3, 3), out=(out, out))), "patches": patched}
    found = {}
    for name, one in ways.items():
        each = jax.vmap(one)
        found[f"{name}, forwards"] = seconds(each, x, w)
        found[f"{name}, images' gradient"] = seconds(
            lambda x, w, dy, f=each: jax.vjp(lambda x: f(x, w), x)[1](dy), x, w, dy
        )
        found[f"{name}, kernels' gradient"] = seconds(
            lambda x, w, dy, f=each: jax.vjp(lambda w: f(x, w), w)[1](dy), x, w, dy
        )
    return found


def layer_pieces(clients: int = 100, images: int = 20, size: int = 26) -> dict:
    """A convolution with bias, ReLU and pool: as one kernel (values in float32 and bfloat16), and as separate steps."""
    from fedbraid.lowering.kernels.activated import Geometry, convolve_relu_pool
    from fedbraid.lowering.operations import conv2d, max_pool

    keys = jax.random.split(jax.random.key(0), 3)
    out = size - 2
    x = jax.random.normal(keys[0], (clients, images, size, size, 32))
    w = jax.random.normal(keys[1], (clients, 3 * 3 * 32 + 1, 64))
    dy = jax.random.normal(keys[2], (clients, images, out // 2, out // 2, 64))

    def steps(x, w):
        return jax.nn.relu(max_pool(conv2d(x, w[:-1].reshape(3, 3, 32, 64))) + w[-1])

    def fused(x, w):
        return convolve_relu_pool(x, w, Geometry((3, 3), out=(out, out)))

    found = {}
    for name, one, kind in (
        ("steps", steps, jnp.float32),
        ("kernel", fused, jnp.float32),
        ("kernel, bfloat16", fused, jnp.bfloat16),
    ):
        each, values, slopes = jax.vmap(one), x.astype(kind), dy.astype(kind)
        found[f"{name}, forwards"] = seconds(each, values, w)
        found[f"{name}, there and back"] = seconds(lambda x, w, dy, f=each: jax.vjp(f, x, w)[1](dy), values, w, slopes)
    return found


def lstm_pieces(clients: int = 20, length: int = 80, batch: int = 10, hidden: int = 256) -> dict:
    from fedbraid.lowering.kernels import recurrence
    from fedbraid.models.lstm import _cotangent_loop, _states_loop

    keys = jax.random.split(jax.random.key(0), 2)
    inputs = jax.random.normal(keys[0], (clients, length, batch, 4 * hidden))
    u = 0.05 * jax.random.normal(keys[1], (clients, hidden, 4 * hidden))
    ways = {"kernels": (recurrence.states, recurrence.cotangent), "XLA's loop": (_states_loop, _cotangent_loop)}
    found = {}
    for kind in (jnp.float32, jnp.bfloat16):
        weights = u.astype(kind)
        h, c, gates = jax.jit(jax.vmap(_states_loop))(inputs, weights)
        for name, (forwards, backwards) in ways.items():
            what = f"{name}, {jnp.dtype(kind).name}"
            found[f"{what}, forwards"] = seconds(jax.vmap(forwards), inputs, weights)
            found[f"{what}, backwards"] = seconds(jax.vmap(backwards), weights, c, gates, h)
    return found


def ragged(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.maximum(1, np.round(rng.lognormal(np.log(200) - 0.18, 0.6, count))).astype(int)


def shakespeare(count=715, seed=0):
    rng = np.random.default_rng(seed)
    return np.clip(np.round(rng.lognormal(np.log(17), 1.4, count)), 1, 1003).astype(int)


def measurements() -> dict:
    same, wide = np.full(200, 200), ragged(400)
    plays, rates = shakespeare(), jnp.logspace(-2, 0.5, 9)
    found = {"floors": floors, "pieces of the cnn": convolution_pieces, "pieces of a layer": layer_pieces}
    found["pieces of the lstm"] = lstm_pieces
    for lanes in (25, 34, 50, 100):
        found[f"cnn, {lanes} lanes"] = lambda w=lanes: cnn(same, 100, plan="lanes", chunk=w)
    found["cnn, 100 lanes, bfloat16"] = lambda: cnn(same, 100, plan="lanes", chunk=100, precision="bfloat16")
    found["cnn, vmap"] = lambda: cnn(same, 100, plan="chunks", chunk=100)
    for lanes in (25, 34, 50):
        found[f"cnn-ragged, {lanes} lanes"] = lambda w=lanes: cnn(wide, 100, plan="lanes", chunk=w)
    found["cnn, 25 lanes, bfloat16"] = lambda: cnn(same, 100, plan="lanes", chunk=25, precision="bfloat16")
    found["cnn-ragged, 28 lanes, bfloat16"] = lambda: cnn(wide, 100, plan="lanes", chunk=28, precision="bfloat16")
    found["cnn-ragged, 25 lanes, bfloat16"] = lambda: cnn(wide, 100, plan="lanes", chunk=25, precision="bfloat16")
    found["cnn-ragged, vmap"] = lambda: cnn(wide, 100, plan="chunks", chunk=100)
    for how in ("tf32", "bfloat16"):
        found[f"resnet, {how}"] = lambda how=how: resnet(precision=how)
        found[f"gpt, {how}"] = lambda how=how: gpt(precision=how)
    found["lstm, lanes"] = lambda: lstm(np.full(60, 30), 20, plan="lanes", chunk=20)
    found["lstm, lanes, bfloat16"] = lambda: lstm(
        np.full(60, 30), 20, plan="lanes", chunk=20, compute="bfloat16", precision="bfloat16"
    )
    found["lstm, vmap"] = lambda: lstm(np.full(60, 30), 20, plan="chunks", chunk=20)
    for lanes in (5, 10):
        found[f"lstm-sweep, {lanes} lanes"] = lambda w=lanes: lstm(
            plays, 20, rates=rates, rounds=20, plan="lanes", chunk=w
        )
    found["lstm-sweep, vmap"] = lambda: lstm(plays, 20, rates=rates, rounds=20, plan="chunks", chunk=20)
    return found


AGAINST = {"cnn": "cnn, 100 lanes", "resnet": "resnet", "gpt": "gpt"}  # networks of gpu_torch.py, rows here
LORA = {"lora, bfloat16": ("ours", "bfloat16", False), "lora, bfloat16, remat": ("ours", "bfloat16", True)}
LORA_TORCH = {"torch lora": ("torch", "bfloat16", False), "torch lora compiled": ("torch", "bfloat16", True)}


def published_programs(torch: bool) -> dict[str, list[str]]:
    """Commands that print a row, of this library or of PyTorch, as JSON."""
    from published import GPU_ROWS

    here, compared = Path(__file__), " ".join(text for _, text in GPU_ROWS.values())
    rows = [name for name in measurements() if name in GPU_ROWS or f"{{{name}}}" in compared]
    programs = {name: [sys.executable, str(here), "--json", "--row", name] for name in rows}
    for name, (who, how, flag) in (LORA | LORA_TORCH if torch else LORA).items():
        programs[name] = [sys.executable, str(here.with_name("lora.py")), "--variant", who, how, str(flag)]
    for network in AGAINST if torch else ():
        for how in ("bfloat16", "tf32"):
            for way in ("graph", "vmap", "compiled"):
                command = [sys.executable, str(here.with_name("gpu_torch.py")), network, way, how]
                programs[f"torch {network} {way}, {how}"] = command
    return programs


ABLATED = {  # rows, and the rewrites that change their programs
    "gpt, bfloat16": ("epilogues", "updates", "halves", "attention", "norms", "activations", "kernels"),
    "resnet, bfloat16": ("updates", "halves", "kernels"),
    "cnn, 100 lanes, bfloat16": ("rows", "kernels"),
    "cnn-ragged, 25 lanes, bfloat16": ("rows", "graphs"),
}


def ablated_programs() -> dict[str, list[str]]:
    """Commands that print a row as JSON: as it is, and without a rewrite."""
    command = [sys.executable, str(Path(__file__)), "--json", "--row"]
    programs = {}
    for row, names in ABLATED.items():
        programs[row] = [*command, row]
        programs |= {f"{row}, without {name}": [*command, row, "--without", name] for name in names}
    return programs


def named(programs: dict[str, Any], only: list[str] | None) -> dict[str, Any]:
    """Those whose name has one of the words ``only``; all, if there are none."""
    return {name: one for name, one in programs.items() if not only or any(word in name for word in only)}


def in_turn(programs: dict[str, list[str]], together: int, compiling: float, out: Path | None) -> dict:
    """The rows that programs print, measured in turn.

    out: a file that gets each row as soon as it is measured.
    """
    from published import take_gpu

    report: dict = {}
    for name, said in measure_in_turn(programs, together=together, compiling=compiling):
        try:
            last = json.loads(said.strip().splitlines()[-1])
        except (json.JSONDecodeError, IndexError):
            print(f"{name}: {said[-300:]}", file=sys.stderr, flush=True)
            continue
        if isinstance(last, float):  # milliseconds of gpu_torch.py
            last = {"seconds": last / 1e3}
        elif "device" in last:
            report |= {key: last[key] for key in ("device", "jax")}
            last = next(row for row in last.values() if isinstance(row, dict))
        report[name] = last
        if out is not None and "device" in report:
            take_gpu(report, out)
        print(f"{name:36} {1e3 * last['seconds']:.2f} ms", file=sys.stderr, flush=True)
    return report


def measured(options: argparse.Namespace) -> dict:
    """The rows that were asked for, measured in this process."""
    report: dict = {"device": str(jax.devices()[0]), "jax": jax.__version__}
    for name, measure in named(measurements(), options.only).items():
        if options.row is not None and name != options.row:
            continue
        with without(options.without):
            report[name] = measure()
        line = ", ".join(f"{k} {v:.4g}" for k, v in report[name].items())
        print(f"{name:24} {line}", flush=True, file=sys.stderr if options.json else sys.stdout)
    return report


def main() -> int:
    from published import GPU, check_gpu, read, take_gpu

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", nargs="?", const=GPU, type=Path, metavar="FILE")
    parser.add_argument("--check", nargs="?", const=GPU, type=Path, metavar="FILE")
    parser.add_argument("--only", nargs="+", help="run only measurements whose name contains one of these words")
    parser.add_argument("--row", help="run only the measurement of exactly this name")
    parser.add_argument("--against", choices=["torch"])
    parser.add_argument("--without", nargs="+", default=[], choices=list(REWRITES), help="switch rewrites off")
    parser.add_argument("--ablate", action="store_true", help="rows without one rewrite at a time")
    parser.add_argument("--published", action="store_true", help="the published rows, each in a process of its own")
    parser.add_argument("--together", type=int, default=8, help="how many of them compile at a time")
    parser.add_argument("--compiling", type=float, default=400, help="seconds until all of them must have compiled")
    options = parser.parse_args()
    if (options.without or options.ablate) and (options.out or options.check):
        parser.error("--without and --ablate measure programs that are not published: omit --out and --check")
    before = {} if options.check is None else read(options.check).get("rows", {})  # --out may write the same file
    turns = options.together, options.compiling, options.out
    programs: dict[str, Any]
    if options.ablate:
        programs = ablated_programs()
        report = in_turn(named(programs, options.only), *turns)
    elif options.published or options.against:
        programs = published_programs(options.against is not None)
        report = in_turn(named(programs, options.only), *turns)
    else:
        programs = {name: one for name, one in measurements().items() if options.row in (None, name)}
        report = measured(options)
    if options.json:
        print(json.dumps(report))
    status = 0 if options.check is None else check_gpu(before, report, named(programs, options.only), options.check)
    if options.out:
        take_gpu(report, options.out)
    return status


if __name__ == "__main__":
    sys.exit(main())
