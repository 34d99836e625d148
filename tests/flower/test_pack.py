"""Packing: unpacking is the inverse of packing, and other layouts are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedbraid.flower.pack import MessageError, check_layout, layout_of, pack, read_records, records, unpack

DTYPES = ["float32", "float64", "int8", "uint32", "bool", "bfloat16"]
leaves = st.sampled_from(DTYPES).flatmap(
    lambda name: hnp.arrays(np.uint8, hnp.array_shapes(min_dims=0, max_dims=3, max_side=4)).map(
        lambda raw: (raw % 2).astype(jnp.dtype(name))
    )
)
names = st.text("abc", min_size=1)
trees = st.recursive(leaves, lambda t: st.dictionaries(names, t, max_size=3) | st.tuples(t, t), max_leaves=6)


@given(trees)
@settings(max_examples=60, deadline=None)
def test_round_trip_in_one_buffer_per_dtype(tree):
    layout = layout_of(tree)
    buffers = pack(tree)
    assert set(buffers) == {leaf.dtype for leaf in layout.leaves}
    assert sum(b.nbytes for b in buffers.values()) == layout.nbytes == sum(x.nbytes for x in jax.tree.leaves(tree))
    back = read_records(layout, records(tree))
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(back), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert a.tobytes() == b.tobytes()


def test_random_keys_travel():
    tree = {"key": jax.random.key(7), "w": jnp.ones(2)}
    back = unpack(layout_of(jax.eval_shape(lambda: tree)), pack(tree))
    assert jax.random.key_data(back["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()


TREE = {"b": np.zeros(2, np.float32), "n": np.zeros((), np.int32), "w": np.zeros((3, 2), np.float32)}


def raw(name, values):
    return Array(dtype=name, shape=(len(values),), stype="fedbraid.raw", data=np.asarray(values, name).tobytes())


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"float32": raw("float32", [0] * 7), "int32": raw("int32", [0])}, ["['w'] float32[3, 2]", "7", "8"]),
        ({"float32": raw("float32", [0] * 1), "int32": raw("int32", [0])}, ["['b'] float32[2]", "cut off"]),
        ({"float32": raw("float32", [0] * 9), "int32": raw("int32", [0])}, ["9 float32", "8"]),
        ({"float32": raw("float32", [0] * 8)}, ["['n'] int32"]),
        ({"float64": raw("float64", [0] * 8), "int32": raw("int32", [0])}, ["float64", "8 float32"]),
        ({"float32": Array(np.zeros(8, np.float32)), "int32": raw("int32", [0])}, ["numpy.ndarray"]),
        ({"float32": Array("float32", (8,), "fedbraid.raw", b"123"), "int32": raw("int32", [0])}, ["3 bytes"]),
        ({}, ["['b'] float32[2]"]),
    ],
)
def test_other_buffers_are_refused_by_leaf(record, words):
    with pytest.raises(MessageError) as error:
        read_records(layout_of(TREE), ArrayRecord(record))
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("other", "word"),
    [
        ({"b": np.zeros(3, np.float32)} | {k: TREE[k] for k in "nw"}, "leaf ['b'] should be"),
        ({"b": TREE["b"], "n": TREE["n"], "w": np.zeros((3, 2))}, "got ['w'] float64[3, 2]"),
        ({"b": TREE["b"], "n": TREE["n"], "v": TREE["w"]}, "expected leaf ['w']"),
        ({"b": TREE["b"], "n": TREE["n"]}, "['w'] float32[3, 2] is missing"),
        (TREE | {"z": TREE["n"]}, "['z'] int32[] is not expected"),
    ],
)
def test_other_layouts_are_refused_by_leaf(other, word):
    with pytest.raises(MessageError) as error:
        check_layout(layout_of(TREE), json.loads(layout_of(other).to_json()), "upload")
    assert word in str(error.value)
    assert layout_of(other).digest != layout_of(TREE).digest
