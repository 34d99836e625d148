"""One training step of the EMNIST CNN, with different implementations of its convolutions.

On a CPU every core trains one client, with steps in a loop, as the simulator does there. On an accelerator all clients
train at once under ``vmap``. The machine may be shared: the implementations run in turn and the best time of each
counts, so compare within one run.

    python benchmarks/conv.py [--clients N] [--steps N] [--batch N] [--ways fedbraid,im2col,xla] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fedbraid.lowering import fast_convolutions
from fedbraid.lowering.operations import patches
from fedbraid.models import emnist_cnn


def xla_conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def im2col_conv(x, w):
    return patches(x, w.shape[:2]) @ w.reshape(-1, w.shape[-1])


def plain_cnn(conv):
    """The same network written without this library, with dropout by ``jax.random.bernoulli``."""

    def drop(x, rate, key):
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)

    def loss(params, batch, key):
        first, second = jax.random.split(key)
        x = batch["x"][..., None]
        for name in ("conv1", "conv2"):
            x = jax.nn.relu(conv(x, params[name]["w"]) + params[name]["b"])
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        x = drop(x.reshape(x.shape[0], -1), 0.25, first)
        x = drop(jax.nn.relu(x @ params["dense1"]["w"] + params["dense1"]["b"]), 0.5, second)
        scores = jax.nn.log_softmax(x @ params["dense2"]["w"] + params["dense2"]["b"])
        return -jnp.mean(jnp.take_along_axis(scores, batch["y"][:, None], axis=1))

    return loss


WAYS = {
    "fedbraid": emnist_cnn().loss,  # Winograd tiles
    "rewritten": fast_convolutions(plain_cnn(xla_conv)),  # XLA's convolutions, replaced
    "im2col": plain_cnn(im2col_conv),
    "xla": plain_cnn(xla_conv),
}


def train(loss, steps, batch):
    """One client: ``steps`` SGD steps over its own rows."""

    def run(params, data, key):
        def step(i, params):
            rows = {name: lax.dynamic_slice_in_dim(array, i * batch, batch) for name, array in data.items()}
            gradient = jax.grad(loss)(params, rows, jax.random.fold_in(key, i))
            return jax.tree.map(lambda p, g: p - 0.05 * g, params, gradient)

        return lax.fori_loop(0, steps, step, params)

    return run


def compiled(loss, args):
    """The round as a call without arguments: each client on its own host device, or all on the accelerator."""
    rng = np.random.default_rng(0)
    rows = args.steps * args.batch
    data = {
        "x": rng.random((args.clients, rows, 28, 28), dtype=np.float32),
        "y": rng.integers(0, 62, (args.clients, rows)),
    }
    params = emnist_cnn().init(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), args.clients)
    one = train(loss, args.steps, args.batch)
    every = jax.vmap(one, in_axes=(None, 0, 0))
    if jax.default_backend() == "cpu" and args.clients > 1:
        mesh = jax.make_mesh((args.clients,), ("clients",))
        split, copied = jax.P("clients"), jax.P()

        def alone(params, data, keys):
            mine = jax.tree.map(lambda leaf: leaf[0], (data, keys))
            return jax.tree.map(lambda leaf: leaf[None], one(params, *mine))

        every = jax.shard_map(alone, mesh=mesh, in_specs=(copied, split, split), out_specs=split, check_vma=False)
        params = jax.device_put(params, jax.NamedSharding(mesh, copied))
        data, keys = jax.device_put((data, keys), jax.NamedSharding(mesh, split))
    run = jax.jit(every).lower(params, data, keys).compile()
    return lambda: jax.block_until_ready(run(params, data, keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, help="clients at once; default: one per core, or 100 on an accelerator")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--ways", default="fedbraid,rewritten,im2col", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.clients or os.cpu_count())
    args.clients = args.clients or (os.cpu_count() if jax.default_backend() == "cpu" else 100)
    runs = {way: compiled(WAYS[way], args) for way in args.ways.split(",")}
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(args.repeats + 1):  # the first is the warm-up
        for way, run in runs.items():
            begin = time.perf_counter()
            run()
            best[way] = min(best[way], time.perf_counter() - begin)
    table = {
        way: {"ms_per_step": 1e3 * seconds / args.steps, "ms_per_round": 1e3 * seconds} for way, seconds in best.items()
    }
    if args.json:
        print(json.dumps({"backend": jax.default_backend(), **vars(args), "best": table}))
        return
    print(f"{args.clients} clients at once, batch {args.batch}, {args.steps} steps, {jax.default_backend()}")
    for way, row in table.items():
        print(f"{way:10s} {row['ms_per_step']:9.2f} ms a step of all {row['ms_per_round']:9.1f} ms a round")


if __name__ == "__main__":
    main()
