"""The schema that every site's data must fit, and the fingerprint of what clients compute.

A federation is run by several parties. Before the first round each node reports its data's schema and its fingerprint.
If one of them differs from the server's, the node is refused with the reason, so that its uploads are never used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedbraid.core import Algorithm, MessageShapes, message_shapes
from fedbraid.data.description import Preprocess, fields_of
from fedbraid.data.federated import Split
from fedbraid.flower.pack import Layout, layout_of, pack
from fedbraid.flower.programs import client_program, noise_shapes
from fedbraid.local import ClientData

__all__ = ["Messages", "Schema", "check_data", "fingerprint", "messages_of", "schema_of"]

PyTree = Any
Schema = Mapping[str, jax.ShapeDtypeStruct]
"""Shape and dtype of one example of each field as stored: ``{"x": ShapeDtypeStruct((64,), "uint8"), "y": ...}``."""

ROWS = 8  # examples of the client that is traced for the layout of messages, which does not depend on their number


def schema_of(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """The schema of arrays with one row per example.

    >>> {name: (field.shape, field.dtype.name) for name, field in schema_of({"x": np.zeros((5, 3), "f4")}).items()}
    {'x': ((3,), 'float32')}
    """
    canonical = jax.dtypes.canonicalize_dtype
    fields = fields_of({name: np.asarray(array) for name, array in arrays.items()})
    return {name: jax.ShapeDtypeStruct(field.shape, canonical(field.dtype)) for name, field in fields.items()}


def schema_to_json(schema: Schema) -> str:
    return json.dumps({name: [list(f.shape), np.dtype(f.dtype).name] for name, f in sorted(schema.items())})


def schema_from_json(text: str) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: jax.ShapeDtypeStruct(tuple(shape), dtype) for name, (shape, dtype) in json.loads(text).items()}


def check_data(schema: Schema, arrays: Mapping[str, Any]) -> int:
    """The number of examples, if the arrays fit the schema; else a ValueError that names the field.

    >>> check_data(schema_of({"x": np.zeros((1, 3))}), {"x": np.zeros((7, 3))})
    7
    """
    if not isinstance(arrays, Mapping):
        raise ValueError(f"load_data must return a mapping of field names to arrays, got {type(arrays).__name__}")
    if sorted(arrays) != sorted(schema):
        raise ValueError(f"the data has the fields {sorted(arrays)}, the schema asks for {sorted(schema)}")
    found = schema_of(arrays)
    for name, want in schema.items():
        if found[name].shape != want.shape:
            raise ValueError(
                f"field {name!r}: one example has shape {found[name].shape}, the schema asks for {want.shape}"
            )
        if found[name].dtype != jax.dtypes.canonicalize_dtype(want.dtype):
            raise ValueError(f"field {name!r} is {found[name].dtype}, the schema asks for {np.dtype(want.dtype).name}")
    lengths = {name: len(a) for name, a in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"fields differ in length: {lengths}")
    rows = next(iter(lengths.values()))
    Split({name: np.asarray(a) for name, a in arrays.items()}, np.array([0, rows])).check()
    return rows


def shapes_of(tree: PyTree) -> PyTree:
    """Shapes and dtypes of a tree, without weak types (those of Python numbers): messages do not keep them."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        leaf = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: jnp.asarray(leaf))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(one, tree)


class Messages(NamedTuple):
    """The layouts of the two messages of one exchange, and the names of the metrics that come with an upload."""

    down: Layout
    up: Layout
    metrics: tuple[str, ...] = ()


def data_of(schema: Schema, preprocess: Preprocess | None) -> ClientData:
    """A client's data as shapes."""
    number = jax.ShapeDtypeStruct((), np.int32)
    canonical = jax.dtypes.canonicalize_dtype
    fields = {name: jax.ShapeDtypeStruct((ROWS, *f.shape), canonical(f.dtype)) for name, f in schema.items()}
    return ClientData(fields, number, number, ROWS, preprocess)


def shapes_of_messages(
    alg: Algorithm, params: PyTree, schema: Schema, preprocess: Preprocess | None = None
) -> tuple[MessageShapes, ...]:
    """The shapes of the messages of every exchange. Also checks that the functions of the algorithm fit each other."""
    return message_shapes(alg, shapes_of(params), data_of(schema, preprocess))


def messages_of(
    alg: Algorithm, params: PyTree, schema: Schema, preprocess: Preprocess | None = None
) -> tuple[Messages, ...]:
    """The message layouts of every exchange. Also checks that the functions of the algorithm fit each other."""
    shapes = shapes_of_messages(alg, params, schema, preprocess)
    return tuple(Messages(layout_of(m.down), layout_of(m.up), m.metrics) for m in shapes)


def fingerprint(alg: Algorithm, params: PyTree, schema: Schema, preprocess: Preprocess | None = None) -> str:
    """A short name of what clients compute, equal on two machines if and only if their client programs are equal.

    It is a digest of the jaxpr of every exchange's client function (with hyper-parameters as constants and with the
    data's preprocessing), of the shapes of messages and states, and of the schema. Two versions of jax may print one
    jaxpr differently: use the same version everywhere, or give all sides your own fingerprint.

    >>> import jax.numpy as jnp
    >>> from fedbraid import fedavg
    >>> loss = lambda p, batch, key: jnp.sum((p - batch["x"].mean(0)) ** 2)
    >>> name = lambda lr: fingerprint(fedavg(loss, client_lr=lr), jnp.zeros(3), schema_of({"x": np.zeros((1, 3))}))
    >>> name(0.1) == name(0.1), name(0.1) == name(0.2)
    (True, False)
    """
    digest = hashlib.sha256(schema_to_json(schema).encode())
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = shapes_of(params)
    server, state = jax.eval_shape(alg.init, params), shapes_of(jax.eval_shape(alg.init_client, params))
    for exchange in alg.exchanges:
        down = shapes_of(jax.eval_shape(exchange.send, server))
        given = down, state, data_of(schema, preprocess), key
        program = jax.make_jaxpr(client_program(exchange))(*given, noise_shapes(exchange, *given))
        digest.update(exchange.name.encode())
        digest.update(layout_of((down, state)).to_json().encode())
        # memory addresses of functions differ between processes
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(program)).encode())
        for constant in program.consts:
            for buffer in pack(constant).values():
                digest.update(buffer.tobytes())
    return digest.hexdigest()[:16]
