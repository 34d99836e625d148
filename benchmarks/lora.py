"""LoRA on a Llama of SmolLM2-135M's shapes: tokens per second, memory and bytes, beside a sequential PyTorch loop.

    python benchmarks/lora.py [--json] [--clients 8] [--steps 4] [--batch 8] [--length 128] [--rank 8]
                              [--only ours torch] [--precisions tf32 bfloat16] [--small]

A round of FedAvg: every client takes some AdamW steps on the adapters of q and v, and the server averages the adapters.
Weights are random (of the same shapes as SmolLM2's: 134,515,008), because only time and memory are measured.

- ours: `fedbraid.simulate`, factors in TF32 and bfloat16, with and without recomputed activations (remat)
- torch: one client after the other, LoRA layers written plainly (what PEFT computes, without its module hooks), fused
  attention and AdamW; TF32, or bfloat16 by autocast with the base stored in bfloat16; eager and with torch.compile

Peak memory is that of the allocator. "activations" is what the gradient of one step of all clients at once keeps in
memory besides its arguments and results, by the compiler. The ratio is peak / (base + activations). Variants
compile at the same time, and all others are paused while one is timed. On a CPU, --small uses a Llama of 2 layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

from turns import await_turn, end_turn, measure_in_turn

SHAPES = {"vocab": 49_152, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "hidden": 1536, "theta": 1e5}
SMALL = {"vocab": 512, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "theta": 1e4}
OURS = [("tf32", False), ("tf32", True), ("bfloat16", False), ("bfloat16", True)]
TORCH = [("tf32", False), ("bfloat16", False), ("tf32", True), ("bfloat16", True)]


class Task(NamedTuple):
    """A round of FedAvg on adapters."""

    model: Any
    weights: Any
    params: Any
    data: Any
    algorithm: Any


def task(options, remat: bool) -> Task:
    import jax
    import numpy as np

    import fedbraid as fb
    from fedbraid import models

    shapes = SMALL if options.small else SHAPES
    base = models.llama(**shapes, remat=remat)
    weights = jax.block_until_ready(base.init(jax.random.key(0)))
    model = models.lora(base, weights, rank=options.rank, targets=("q", "v"))
    rng = np.random.default_rng(0)
    each = options.steps * options.batch
    text = rng.integers(1, shapes["vocab"], (options.clients * each, options.length + 1)).astype(np.int32)
    data = fb.Split({"x": text[:, :-1].copy(), "y": text[:, 1:].copy()}, np.arange(options.clients + 1) * each)
    alg = fb.fedavg(model.loss, client_lr=1e-3, client_opt="adamw", batch_size=options.batch)
    return Task(model, weights, model.init(jax.random.key(1)), data, alg)


def simulated(options, work: Task, precision: str, progress: Callable) -> Any:
    import fedbraid as fb
    from fedbraid.lowering import kernels

    how = {"precision": precision, "plan": "lanes", "chunk": options.clients} if kernels.available() else {}
    return fb.simulate(work.algorithm, work.params, work.data, rounds=options.rounds, on_progress=progress, **how)


def gradient(options, work: Task, precision: str) -> tuple[Any, tuple]:
    """The program for the gradient of one step of all clients at once, and its arguments."""
    import jax
    import numpy as np

    from fedbraid.local import value_and_grad
    from fedbraid.lowering import LoweringOptions, captured, lower_function

    many = jax.tree.map(lambda leaf: np.repeat(np.asarray(leaf)[None], options.clients, 0), work.params)
    arrays = work.data.arrays.items()
    batch = {name: array.reshape(options.clients, -1, options.length)[:, : options.batch] for name, array in arrays}
    batch["mask"] = np.ones((options.clients, options.batch), np.float32)
    one = lower_function(lambda *at: value_and_grad(work.model.loss)(*at)[1], LoweringOptions(precision=precision))
    return captured.jit(jax.vmap(one, (0, 0, None))), (many, batch, None)


def ours(options, precision, remat: bool) -> dict:
    """One variant in this process: its peak memory is that of the process."""
    import jax

    stamps, work = [], task(options, remat)

    def progress(now) -> None:
        await_turn()  # after the first rounds, so the program is compiled
        stamps.append((time.perf_counter(), now.round))

    result = simulated(options, work, precision, progress)
    spans = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(stamps[1:] if len(stamps) > 2 else stamps)]
    seconds = statistics.median(spans)
    end_turn()
    stats = jax.devices()[0].memory_stats() or {}
    step, arguments = gradient(options, work, precision)
    used = step.lower(*arguments).compile().memory_analysis()
    return {
        "seconds": seconds,
        "tokens_per_second": options.clients * options.steps * options.batch * options.length / seconds,
        "peak": stats.get("peak_bytes_in_use"),
        "base": sum(leaf.nbytes for leaf in jax.tree.leaves(work.weights)),
        "activations": used.temp_size_in_bytes,
        "up_per_client": result.info.cost.up,
        "loss": float(result.history["train/loss"][-1]),
    }


def torch_loop(options, precision: str, compiled: bool) -> dict:
    import torch  # pyright: ignore[reportMissingImports]
    import torch.nn.functional as F  # pyright: ignore[reportMissingImports]
    from torch import nn  # pyright: ignore[reportMissingImports]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    s = SMALL if options.small else SHAPES
    size = s["width"] // s["heads"]

    class Adapted(nn.Module):
        def __init__(self, d, out):
            super().__init__()
            self.base = nn.Linear(d, out, bias=False).requires_grad_(False)
            self.a = nn.Parameter(torch.empty(options.rank, d).uniform_(-(d**-0.5), d**-0.5))
            self.b = nn.Parameter(torch.zeros(out, options.rank))

        def forward(self, x):
            return self.base(x) + 16 / options.rank * F.linear(F.linear(x, self.a), self.b)

    def plain(d, out):
        return nn.Linear(d, out, bias=False).requires_grad_(False)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            d, kv = s["width"], s["kv_heads"] * size
            self.q, self.k, self.v, self.o = Adapted(d, d), plain(d, kv), Adapted(d, kv), plain(d, d)
            self.gate, self.up, self.down = plain(d, s["hidden"]), plain(d, s["hidden"]), plain(s["hidden"], d)
            self.n1, self.n2 = (nn.RMSNorm(d, eps=1e-5).requires_grad_(False) for _ in range(2))

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            z = self.n1(x)
            q, k, v = (f(z).view(b, t, -1, size).transpose(1, 2) for f in (self.q, self.k, self.v))
            q, k = (y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sin for y in (q, k))
            y = F.scaled_dot_product_attention(q, k.to(q.dtype), v.to(q.dtype), is_causal=True, enable_gqa=True)
            x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
            z = self.n2(x)
            return x + self.down(F.silu(self.gate(z)) * self.up(z))

    class Llama(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(s["vocab"], s["width"]).requires_grad_(False)
            self.layers = nn.ModuleList([Layer() for _ in range(s["layers"])])
            self.norm = nn.RMSNorm(s["width"], eps=1e-5).requires_grad_(False)
            half = torch.arange(0, size, 2, device=device) / size
            angles = torch.outer(torch.arange(options.length, device=device), s["theta"] ** -half)
            self.cos, self.sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))

        def forward(self, x, y):
            h = self.embed(x)
            for layer in self.layers:
                h = layer(h, self.cos, self.sin)
            logits = F.linear(self.norm(h), self.embed.weight)
            return F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())

    network = Llama().to(device)
    if precision == "bfloat16":
        for parameter in network.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.bfloat16()
    trained = [p for p in network.parameters() if p.requires_grad]
    run = torch.compile(network) if compiled else network
    server = [p.detach().clone() for p in trained]
    text = torch.randint(
        1, s["vocab"], (options.clients, options.steps, options.batch, options.length + 1), device=device
    )

    def one_round():
        total = [torch.zeros_like(p) for p in server]
        for client in range(options.clients):
            with torch.no_grad():
                torch._foreach_copy_(trained, server)
            opt = torch.optim.AdamW(trained, lr=1e-3, weight_decay=1e-4, fused=device == "cuda")
            for step in range(options.steps):
                rows = text[client, step]
                with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
                    loss = run(rows[:, :-1], rows[:, 1:])
                opt.zero_grad()
                loss.backward()
                opt.step()
            with torch.no_grad():
                torch._foreach_add_(total, [p / options.clients for p in trained])
        torch._foreach_copy_(server, total)

    times = []
    for i in range(2 + min(options.rounds, 5)):
        if i == 2:
            await_turn()
        began = time.perf_counter()
        one_round()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[2:])
    tokens = options.clients * options.steps * options.batch * options.length
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": peak}


def variants(options) -> list[tuple[str, str, str, bool]]:
    rows = [("ours", precision, "remat" if remat else "", remat) for precision, remat in OURS]
    rows += [("torch", precision, "compiled" if compiled else "", compiled) for precision, compiled in TORCH]
    return [row for row in rows if row[0] in options.only and row[1] in options.precisions]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("clients", 8), ("steps", 4), ("batch", 8), ("length", 128), ("rank", 8), ("rounds", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--only", nargs="+", default=["ours", "torch"])
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bfloat16"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--variant", nargs=3, help=argparse.SUPPRESS)  # one variant, in a process of its own
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.variant:
        who, precision, flag = options.variant
        print(json.dumps((ours if who == "ours" else torch_loop)(options, precision, flag == "True")))
        return
    rows = {" ".join(filter(None, row[:3])): row for row in variants(options)}
    call = [sys.executable, __file__, *sys.argv[1:], "--variant"]
    programs = {name: [*call, who, how, str(flag)] for name, (who, how, _, flag) in rows.items()}
    for name, said in measure_in_turn(programs):
        if said.startswith("failed"):
            print(f"{name}: {said}", flush=True)
            continue
        who, row = rows[name][0], json.loads(said.strip().splitlines()[-1])
        if options.json:
            print(json.dumps({"variant": name, **row}), flush=True)
            continue
        memory = "" if row["peak"] is None else f", peak {row['peak'] / 1e9:.2f} GB"
        if who == "ours":
            memory += f" (base {row['base'] / 1e9:.2f}, activations {row['activations'] / 1e9:.2f})"
            if row["peak"] is not None:
                memory += f", {row['peak'] / (row['base'] + row['activations']):.2f} of both"
            memory += f", {row['up_per_client'] / 1e6:.2f} MB up a client"
        times = f"{1e3 * row['seconds']:.1f} ms a round, {row['tokens_per_second']:,.0f} tokens/s"
        print(f"{name}: {times}{memory}", flush=True)


if __name__ == "__main__":
    main()
