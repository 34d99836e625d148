"""Local steps on one core, here and in PyTorch's eager mode: the transformer and the ResNet.

    python benchmarks/eager.py --torch PYTHON [--networks gpt resnet] [--repeats 15] [--core 0] [--json] [--out [FILE]]

- gpt: 4.2 million parameters (4 layers of width 256, 128 tokens, vocabulary 2,048), 1 client x 5 steps x batch 8
- resnet: ResNet-18 with group norm on 24 x 24 x 3 images, 1 client x 5 steps x batch 20

``--torch`` is the Python of an environment with PyTorch; `peers/torch_eager.py` runs in it, with one thread, attention
by ``scaled_dot_product_attention`` and updates in place. Images are stored channels first and channels last there
(``torch`` and ``torch, channels last``). Without ``--torch`` only this library is measured.

Both programs start from the same weights. First the benchmark compares loss and gradient of one batch: ``loss`` and
``gradient`` are the differences, divided by the loss and by the norm of the gradient. Then all programs run on the same
core, one round each in turn, ``--repeats`` times, so that other work on the machine slows all of them down equally. The
ratio is the median over the turns of this library's time divided by PyTorch's; below 1 this library is faster. It is
given for the time of the processor, from which the milliseconds of a step (the fastest and the median round) come, and
for the time on the clock, which on a busy machine includes waiting for the core. ``share`` is the share of the rate of
a large matrix product in float32, measured on the same core in the same turns; the operations are those of products and
direct convolutions.

``--out`` writes the numbers into FILE (default: benchmarks/results/two-cores.json), from which docs/benchmarks.md is
made (`published.py --page`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
STEPS, RATE = 5, 0.05
WORDS, LENGTH, CLASSES = 2048, 128, 100
BATCH = {"gpt": 8, "resnet": 20}


def examples(network: str) -> dict[str, np.ndarray]:
    """The examples of one client: five batches."""
    rng, n = np.random.default_rng(0), STEPS * BATCH[network]
    if network == "gpt":
        text = rng.integers(1, WORDS, (n, LENGTH + 1)).astype(np.int32)
        return {"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}
    return {"x": rng.random((n, 24, 24, 3), dtype=np.float32), "y": rng.integers(0, CLASSES, n).astype(np.int32)}


def operations(network: str) -> float:
    """Operations of the products of a step, forwards and for both gradients."""
    if network == "gpt":
        tokens, width = BATCH["gpt"] * LENGTH, 256
        return 3 * 2.0 * tokens * (4 * (12 * width**2 + 2 * LENGTH * width) + width * WORDS)
    side, before, total = 24, 64, 24 * 24 * 9 * 3 * 64
    for stride in (1, 1, 2, 1, 2, 1, 2, 1):
        side, after = side // stride, before * stride
        total += side**2 * after * (9 * before + 9 * after + (before if stride > 1 else 0))
        before = after
    return 3 * 2.0 * BATCH["resnet"] * (total + 512 * CLASSES)


def serve(one_round) -> None:
    """Run a round for each line of the standard input; print its seconds on the clock and of the processor."""
    print("READY", flush=True)
    for _ in sys.stdin:
        began, used = time.perf_counter(), time.process_time()
        one_round()
        print(json.dumps([time.perf_counter() - began, time.process_time() - used]), flush=True)


# --- this library ----------------------------------------------------------------------------------------------------


def ours(network: str, folder: Path) -> None:
    """Write weights, loss and gradient into a folder, then run rounds when asked."""
    import jax

    import fedbraid as fb
    from fedbraid import models

    fb.use_cores(1)
    model = models.gpt(WORDS, tied=False) if network == "gpt" else models.resnet18_gn(CLASSES)
    params, arrays, batch = model.init(jax.random.key(0)), examples(network), BATCH[network]
    few = {name: array[:batch] for name, array in arrays.items()}

    def flat(tree) -> dict[str, np.ndarray]:
        return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(tree)}

    # One step with a learning rate of one, by the engine: its update is the gradient.
    once = fb.fedavg(model.loss, client_lr=1.0, batch_size=batch, epochs=1)
    moved = fb.simulate(once, params, fb.Split(few, np.array([0, batch])), rounds=1)
    gradient = jax.tree.map(lambda a, b: a - b, params, moved.params)
    np.savez(folder / "weights.npz", **flat(params))
    np.savez(folder / "ours.npz", loss=moved.history["train/loss"][0], **flat(gradient))
    alg = fb.fedavg(model.loss, client_lr=RATE, batch_size=batch, epochs=1)
    split, began = fb.Split(arrays, np.array([0, STEPS * batch])), [0.0, 0.0]

    def answer(progress) -> bool:
        if progress.round == 1:
            print("READY", flush=True)
        else:
            print(json.dumps([time.perf_counter() - began[0], time.process_time() - began[1]]), flush=True)
        line = sys.stdin.readline()
        began[:] = [time.perf_counter(), time.process_time()]
        return not line

    # A round takes longer than the time between two reports, so each round is reported.
    fb.simulate(alg, params, split, rounds=100_000, on_progress=answer)


def product_rate() -> None:
    """Operations of large products in float32, in GFLOP."""
    import jax

    side = 1024
    square, multiply = jax.numpy.ones((side, side)), jax.jit(lambda a: a @ a)
    multiply(square).block_until_ready()
    serve(lambda: [multiply(square).block_until_ready() for _ in range(20)])


PRODUCTS = 20 * 2.0 * 1024**3  # of a round of `product_rate`


# --- the programs in turn --------------------------------------------------------------------------------------------


class Program:
    """A program that runs a round when it is asked to."""

    def __init__(self, command: list[str], core: int) -> None:
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | limits,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        found = self.process.stdout.readline()
        if not found:
            raise SystemExit(f"{self.process.args} ended with status {self.process.wait()}")
        return found

    def until_ready(self) -> None:
        while self.line() != "READY\n":
            pass

    def seconds(self) -> list[float]:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def differences(ours: Path, theirs: Path) -> dict[str, float]:
    """Of the loss, divided by the loss, and of the gradient, divided by its norm."""
    with np.load(ours) as a, np.load(theirs) as b:
        if set(a) != set(b):
            raise SystemExit(f"different arrays: {sorted(set(a) ^ set(b))}")
        names = [name for name in a if name != "loss"]
        loss = float(abs(a["loss"] - b["loss"]) / abs(b["loss"]))
        apart = sum(float(np.square(a[n] - b[n], dtype=np.float64).sum()) for n in names)
        whole = sum(float(np.square(b[n], dtype=np.float64).sum()) for n in names)
    return {"loss": loss, "gradient": (apart / whole) ** 0.5}


def measured(network: str, torch: str | None, repeats: int, core: int) -> dict:
    """Seconds of a step by program, the ratios to PyTorch's, and by how much losses and gradients differ."""
    me = [sys.executable, str(HERE / "eager.py")]
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), {}
        try:
            running["fedbraid"] = Program([*me, "--serve", network, name], core)
            running["fedbraid"].until_ready()
            if torch is not None:
                them = [torch, str(HERE / "peers" / "torch_eager.py"), network, name]
                running["torch"] = Program([*them, "first"], core)
                running["torch"].until_ready()
                if network == "resnet":
                    running["torch, channels last"] = Program([*them, "last"], core)
                    running["torch, channels last"].until_ready()
            running["product"] = Program([*me, "--serve", "product", name], core)
            running["product"].until_ready()
            differs = {
                one: differences(folder / "ours.npz", folder / f"{one}.npz")
                for one in running
                if one.startswith("torch")
            }
            turns = [{one: program.seconds() for one, program in running.items()} for _ in range(repeats + 1)][1:]
        finally:
            for program in running.values():
                program.end()
    rate = PRODUCTS / statistics.median(turn["product"][1] for turn in turns)
    found = {}
    for one in (name for name in running if name != "product"):
        used = [turn[one][1] / STEPS for turn in turns]
        share = statistics.median(operations(network) / PRODUCTS * STEPS * t["product"][1] / t[one][1] for t in turns)
        found[one] = {"best": min(used), "median": statistics.median(used), "share_of_products": share}
        if one != "fedbraid":
            for key, at in (("ratio", 1), ("ratio_on_the_clock", 0)):
                found[one][key] = statistics.median(turn["fedbraid"][at] / turn[one][at] for turn in turns)
            found[one] |= {"differs": differs[one]}
    return {"gflops": rate / 1e9, "turns": repeats, "programs": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", help="Python of an environment with PyTorch")
    parser.add_argument("--networks", nargs="+", choices=list(BATCH), default=list(BATCH))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--out", nargs="?", const="", metavar="FILE", help="write the numbers into the published file")
    parser.add_argument("--serve", nargs=2, metavar=("NETWORK", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        what, folder = given.serve
        return product_rate() if what == "product" else ours(what, Path(folder))
    report = {network: measured(network, given.torch, given.repeats, given.core) for network in given.networks}
    if given.out is not None:
        from published import CPU, take_eager

        take_eager(report, Path(given.out) if given.out else CPU)
    if given.json:
        print(json.dumps(report))
        return None
    heads = ("best, ms", "median, ms", "share", "ratio", "on the clock", "loss", "gradient")
    for network, found in report.items():
        print(f"{network}: {found['gflops']:.0f} GFLOP/s of products")
        print(f"{'a step of':24}" + "".join(f"{head:>14}" for head in heads))
        for name, one in found["programs"].items():
            cells = [f"{1e3 * one['best']:.1f}", f"{1e3 * one['median']:.1f}", f"{one['share_of_products']:.2f}"]
            if "ratio" in one:
                cells += [f"{one['ratio']:.2f}", f"{one['ratio_on_the_clock']:.2f}"]
                cells += [f"{one['differs'][what]:.0e}" for what in ("loss", "gradient")]
            print(f"{name:24}" + "".join(f"{cell:>14}" for cell in cells))
    return None


if __name__ == "__main__":
    main()
