"""The random bits of the tests, by a C function or by JAX, are those of Threefry-2x32 with 20 rounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p

KNOWN = [  # key, counter, bits: of the authors' library Random123
    ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@np.errstate(over="ignore")
def threefry(k0, k1, a, b):
    """As in the paper (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011)."""
    keys = [k0, k1, np.uint32(0x1BD11BDA) ^ k0 ^ k1]
    rotations = [np.array(each, np.uint32) for each in ((13, 15, 26, 6), (17, 29, 16, 24))]
    a, b = a + keys[0], b + keys[1]
    for group in range(5):
        for by in rotations[group % 2]:
            a = a + b
            b = (b << by | b >> np.uint32(32) - by) ^ a
        a, b = a + keys[(group + 1) % 3], b + keys[(group + 2) % 3] + np.uint32(group + 1)
    return a, b


@jax.jit
def bits(*words):
    return threefry2x32_p.bind(*words)


@pytest.mark.parametrize(("key", "counter", "expected"), KNOWN)
def test_known_answers(key, counter, expected):
    words = [np.array([word], np.uint32) for word in (*key, *counter)]
    np.testing.assert_array_equal(np.ravel(threefry(*words)), expected)
    np.testing.assert_array_equal(np.ravel(bits(*words)), expected)


@pytest.mark.parametrize("shapes", [((), ()), ((), (5,)), ((2, 3), (2, 3)), ((4,), ()), ((), (0,)), ((), (2, 3, 4))])
def test_one_key_or_many_one_counter_or_many(shapes):
    rng = np.random.default_rng(0)
    draw = functools.partial(rng.integers, 0, 2**32, dtype=np.uint32)
    words = [np.asarray(draw(size=shapes[0])) for _ in range(2)] + [np.asarray(draw(size=shapes[1])) for _ in range(2)]
    expected = threefry(*words)
    np.testing.assert_array_equal(bits(*words), expected)
    if all(shapes):  # keys in a batch, and counters in another one
        nested = jax.vmap(jax.vmap(bits, (None, None, 0, 0)), (0, 0, None, None))
        outer = threefry(*(word[:, None] for word in map(np.ravel, words[:2])), *map(np.ravel, words[2:]))
        np.testing.assert_array_equal(nested(*map(jnp.ravel, words)), outer)
