"""FedAvg in FedJAX, clients one after the other in compiled steps: python fedjax_jit.py WORKLOAD."""

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import jax

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 needs it, and current jax has removed it
    jax.tree_map = jax.tree_util.tree_map
import fedjax
import jax.numpy as jnp
from fedjax.algorithms import fed_avg

import workloads as W

name = sys.argv[1]
spec = W.WORKLOADS[name]
data = W.clients(name)
cohorts = W.schedule(name, len(data))


def glorot(key, shape):
    limit = (6 / (shape[0] + shape[1])) ** 0.5
    return jax.random.uniform(key, shape, jnp.float32, -limit, limit)


def mlp_init(key):
    shapes = ((784, 300), (300, 100), (100, W.CLASSES))
    return [(glorot(k, s), jnp.zeros(s[1])) for k, s in zip(jax.random.split(key, 3), shapes, strict=True)]


def mlp(params, x):
    x = x.reshape(len(x), -1)
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def lstm_init(key):
    a, b, c, d = jax.random.split(key, 4)
    return {
        "embed": jax.random.uniform(a, (W.VOCABULARY, 8), jnp.float32, -0.05, 0.05),
        "w": glorot(b, (8, 1024)),
        "u": glorot(c, (256, 1024)),
        "b": jnp.zeros(1024),
        "last": (glorot(d, (256, W.VOCABULARY)), jnp.zeros(W.VOCABULARY)),
    }


def lstm(params, x):
    inputs = params["embed"][x] @ params["w"] + params["b"]

    def step(carry, gates):
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ params["u"], 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zero = jnp.zeros((x.shape[0], 256))
    h = jax.lax.scan(step, (zero, zero), inputs.swapaxes(0, 1))[1].swapaxes(0, 1)
    return h @ params["last"][0] + params["last"][1]


init, apply = (lstm_init, lstm) if name == "shakespeare-lstm" else (mlp_init, mlp)


def loss(params, batch, rng):
    logits = jax.nn.log_softmax(apply(params, batch["x"]))
    return -jnp.take_along_axis(logits, batch["y"][..., None], -1).mean()


fedjax.set_for_each_client_backend("jit")
federated = fedjax.InMemoryFederatedData({str(i): client for i, client in enumerate(data)})
sgd = fedjax.optimizers.sgd
algorithm = fed_avg.federated_averaging(
    jax.grad(loss), sgd(W.RATE), sgd(1.0), fedjax.ShuffleRepeatBatchHParams(batch_size=spec["batch"], num_epochs=1)
)
state = algorithm.init(init(jax.random.PRNGKey(0)))
key = jax.random.PRNGKey(1)
stamps = []
for cohort in cohorts:
    key, own = jax.random.split(key)
    drawn = zip(federated.get_clients([str(c) for c in cohort]), jax.random.split(own, len(cohort)), strict=True)
    state, _ = algorithm.apply(state, [(name, examples, k) for (name, examples), k in drawn])
    jax.block_until_ready(state.params)
    stamps.append(time.time())
W.report(name, stamps, cohorts, [len(c["y"]) for c in data])
