"""Models of PyTorch (`from_torch`): gradients against PyTorch's own, and time per round against our own models.

    PYTHONPATH=src python benchmarks/torch_models.py [--only gradients cnn ...] [--repeats N] [--gpu] [--json]

- gradients: of the CNN of McMahan et al., the EMNIST CNN, an LSTM, GPT-2 and Llama; the largest difference of a
  parameter's gradient to PyTorch's, divided by the largest entry of that gradient
- cnn: the EMNIST CNN in PyTorch and `emnist_cnn`; 10 clients of 200 images, batch 20 (100 clients with ``--gpu``)
- lstm: the character LSTM in PyTorch and `char_lstm`; 10 clients of 30 sequences, batch 10
- gpt2, llama: 4 layers of width 128, 4 clients of 20 sequences, batch 10; no model of ours to compare with

The two models of a comparison run in turn, ``--repeats`` times, and the best time of each counts, since other work may
share the machine. CPU seconds (all threads of the process) are reported, too.

On a machine without an index of packages, make a folder with torchax, which is pure Python and needs only jax, torch
and NumPy, and carry it along:

    pip install --no-deps --target torchax-only torchax==0.0.13
    PYTHONPATH=src:torchax-only python3 benchmarks/torch_models.py --gpu --only cnn
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import torch

import fedbraid as fb
from fedbraid import models

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import torch_networks as networks

RNG = np.random.default_rng(0)


def images(clients: int, each: int = 200) -> fb.Split:
    x, y = RNG.random((clients * each, 28, 28, 1), dtype=np.float32), RNG.integers(0, 62, clients * each)
    return fb.Split({"x": x, "y": y.astype(np.int32)}, np.arange(clients + 1) * each)


def texts(clients: int, each: int = 30) -> fb.Split:
    text = RNG.integers(1, 90, (clients * each, 81)).astype(np.int32)
    return fb.Split({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}, np.arange(clients + 1) * each)


def timed(model: models.Model, split: fb.Split, batch: int, rounds: int) -> tuple[float, float]:
    """Seconds and CPU seconds of the fastest round; on a GPU, where calls return early, of the median."""
    stamps = []

    def tick(progress) -> None:
        stamps.append((time.perf_counter(), time.process_time(), progress.round))

    algorithm = fb.fedavg(model.loss, client_lr=0.05, batch_size=batch, epochs=1)
    params = model.init(jax.random.key(0))
    fb.simulate(algorithm, params, split, rounds=rounds, cohort=split.num_clients, on_progress=tick)
    spans = [((b[0] - a[0]) / (b[2] - a[2]), (b[1] - a[1]) / (b[2] - a[2])) for a, b in pairwise(stamps)]
    typical = min if jax.default_backend() == "cpu" else statistics.median
    return typical(s[0] for s in spans[1:]), typical(s[1] for s in spans[1:])


def compared(split: fb.Split, batch: int, rounds: int, repeats: int, **ways: models.Model) -> dict:
    best = {name: (float("inf"), float("inf")) for name in ways}
    for _ in range(repeats):
        for name, model in ways.items():
            found = timed(model, split, batch, rounds)
            best[name] = (min(best[name][0], found[0]), min(best[name][1], found[1]))
    result = {f"{name}, seconds a round": best[name][0] for name in ways}
    result |= {f"{name}, CPU seconds a round": best[name][1] for name in ways}
    if len(ways) == 2:
        first, second = best.values()
        result |= {"ratio of seconds": first[0] / second[0], "ratio of CPU seconds": first[1] / second[1]}
    return result


def difference(module: torch.nn.Module, model: models.Model, x: np.ndarray, y: np.ndarray) -> float:
    """The largest difference of gradients in evaluation mode, relative to the largest entry of each parameter's."""
    gradient = jax.jit(jax.grad(model.loss))(model.init(jax.random.key(0)), {"x": x, "y": y}, None)
    module.eval()
    module.zero_grad()
    inputs = torch.from_numpy(x)
    outputs = module(inputs.permute(0, 3, 1, 2) if x.ndim == 4 else inputs)
    outputs = getattr(outputs, "logits", outputs)
    labels = torch.from_numpy(y).long().reshape(-1)
    torch.nn.functional.cross_entropy(outputs.reshape(len(labels), -1), labels).backward()
    expected = {name: p.grad.numpy() for name, p in module.named_parameters()}
    return max(float(np.abs(np.asarray(gradient[k]) - v).max() / np.abs(v).max()) for k, v in expected.items())


def gradients() -> dict:
    torch.manual_seed(0)
    pictures, text = images(1, 8).arrays, texts(1, 4).arrays
    cases = {
        "CNN of McMahan et al.": (networks.CNN(62), {"image": (28, 28, 1)}, pictures),
        "EMNIST CNN": (networks.EmnistCNN(), {"image": (28, 28, 1)}, pictures),
        "LSTM": (networks.CharLSTM(), {"score": "tokens"}, text),
        "GPT-2": (networks.gpt2_module(), {"score": "tokens"}, text),
        "Llama": (networks.llama_module(), {"score": "tokens"}, text),
    }
    return {
        name: difference(module, models.from_torch(module, **options), data["x"], data["y"])
        for name, (module, options, data) in cases.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=["gradients", "cnn", "lstm", "gpt2", "llama"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="the EMNIST CNN on 100 clients x 10 steps x 20 at once")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.gpu:
        fb.use_cores()
    elif jax.default_backend() != "gpu":
        sys.exit(f"--gpu: jax runs on {jax.default_backend()}")
    rounds, repeats = (60 if options.gpu else 5), options.repeats
    parts = {
        "gradients": gradients,
        "cnn": lambda: compared(
            images(100 if options.gpu else 10),
            20,
            rounds,
            repeats,
            torch=networks.emnist_cnn(),
            ours=models.emnist_cnn(),
        ),
        "lstm": lambda: compared(
            texts(20 if options.gpu else 10), 10, rounds, repeats, torch=networks.char_lstm(), ours=models.char_lstm(90)
        ),
        "gpt2": lambda: compared(texts(4, 20), 10, 3, 1, torch=networks.gpt2()),
        "llama": lambda: compared(texts(4, 20), 10, 3, 1, torch=networks.llama()),
    }
    found = {name: parts[name]() for name in options.only}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, figures in found.items():
        print(name)
        for what, figure in figures.items():
            print(f"  {what}: {figure:.3g}")


if __name__ == "__main__":
    main()
