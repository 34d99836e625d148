"""Preprocessing against NumPy, and text against its decoding."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbraid.data import Split, from_arrays, text
from fedbraid.data.preprocess import FUNCTIONS, Pipeline, scaling_of, unscaled_bytes

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 8, 9, 3), np.uint8)
KEY = jax.random.key(0)


def run(*steps, x=IMAGES, key=None, train=False):
    batch = {"x": x, "y": np.arange(len(x)), "mask": np.ones(len(x), bool)}
    out = Pipeline.of(*steps)(batch, key, train)
    assert out["y"] is batch["y"]
    assert out["mask"] is batch["mask"]  # other fields are not changed
    return np.asarray(out["x"])


def test_scale_invert_flatten_integers():
    assert np.allclose(run({"name": "scale", "factor": 1 / 16, "offset": 2.0}), IMAGES / 16 + 2)
    assert np.allclose(run({"name": "scale"}, {"name": "invert"}), 1 - IMAGES / 255.0, atol=1e-6)
    assert np.array_equal(run({"name": "flatten"}), IMAGES.reshape(6, -1))
    assert run({"name": "integers"}).dtype == np.int32
    assert np.array_equal(run({"name": "integers"}), IMAGES)


def test_standardize_is_per_image():
    x = IMAGES.astype(np.float64)
    mean, std = x.mean((1, 2, 3), keepdims=True), x.std((1, 2, 3), keepdims=True)
    assert np.allclose(run({"name": "standardize"}), (x - mean) / std, atol=1e-4)
    flat = run({"name": "standardize"}, x=np.full((2, 4, 4), 7, np.uint8))
    assert np.array_equal(flat, np.zeros((2, 4, 4)))


def test_crop_and_flip():
    size = 5
    centre = run({"name": "crop-flip", "size": size})
    assert np.array_equal(centre, IMAGES[:, 1:6, 2:7])
    many = np.broadcast_to(IMAGES[:1], (400, 8, 9, 3))
    crops = run({"name": "crop-flip", "size": size}, x=many, key=KEY, train=True)
    windows = {}
    for top in range(4):
        for left in range(5):
            window = IMAGES[0, top : top + size, left : left + size]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, ::-1].tobytes()] = (top, left, True)
    found = [windows[np.ascontiguousarray(c).tobytes()] for c in crops]  # each is a crop of the image, or its mirror
    assert len(set(found)) == 40  # and every one of them occurs
    assert 150 < sum(flip for *_, flip in found) < 250
    again = run({"name": "crop-flip", "size": size}, x=many, key=KEY, train=True)
    other = run({"name": "crop-flip", "size": size}, x=many, key=jax.random.key(1), train=True)
    assert np.array_equal(crops, again)
    assert not np.array_equal(crops, other)


def test_cifar100_recipe_gives_24x24_and_works_inside_jit():
    pipeline = Pipeline.of({"name": "scale"}, {"name": "crop-flip"}, {"name": "standardize"})
    x = RNG.integers(0, 256, (3, 32, 32, 3), np.uint8)
    traces = []

    @jax.jit
    def step(batch, key):
        traces.append(1)
        return pipeline(batch, key, True)["x"]

    out = step({"x": x}, KEY)
    assert out.shape == (3, 24, 24, 3)
    assert np.allclose(out.mean((1, 2, 3)), 0, atol=1e-4)
    assert np.allclose(out.std((1, 2, 3)), 1, atol=1e-3)
    step({"x": x}, jax.random.key(5))
    assert len(traces) == 1
    assert np.allclose(out, pipeline({"x": x}, KEY, True)["x"], atol=1e-5)


def test_random_features_of_fedsplit():
    u = (RNG.integers(0, 256, (2, 28, 28)) / 255).astype(np.float32)
    a = run({"name": "random-features", "seed": 3}, x=u)
    assert a.shape == (2, 6785)
    assert np.array_equal(a[:, 0], [1, 1])
    assert np.array_equal(a[:, 1:785], u.reshape(2, -1))
    # recover R and G from unit vectors and their negatives: (R e)+ - (R (-e))+ = R e
    units = np.eye(784, dtype=np.float32)[:40].reshape(-1, 28, 28)
    step = {"name": "random-features", "seed": 3}
    maps = run(step, x=units)[:, 785:] - run(step, x=-units)[:, 785:]
    r, g = maps[:, :3000], maps[:, 3000:]
    assert set(np.unique(r)) == {-1.0, 1.0}
    assert abs(r.mean()) < 0.02
    assert abs(g.mean()) < 0.02
    assert g.std() == pytest.approx(1, abs=0.02)
    assert np.array_equal(a, run({"name": "random-features", "seed": 3}, x=u))


def test_pipelines_are_values():
    a, b = Pipeline.of({"name": "scale", "factor": 0.5}), Pipeline.of({"name": "scale", "factor": 0.5})
    assert a == b
    assert hash(a) == hash(b)
    assert a != Pipeline.of({"name": "scale"})
    assert Pipeline.of(*a.spec()) == a
    assert set(FUNCTIONS) >= {"scale", "invert", "crop-flip", "standardize", "random-features", "integers"}


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"name": "blur"}, "unknown preprocessing 'blur'; known: crop-flip"),
        ({}, "unknown preprocessing None"),
        ({"name": "scale", "power": 2}, "'scale' has no option 'power'; it takes factor"),
    ],
)
def test_unknown_steps_are_refused(step, words):
    with pytest.raises(ValueError, match=words):
        Pipeline.of(step)


def test_arrays_of_bytes_are_scaled_unless_they_are_tokens():
    labels = np.zeros(6, np.int32)
    flat, tokens = IMAGES.reshape(6, -1), IMAGES.reshape(6, -1)
    scale = Pipeline.of({"name": "scale"})
    for arrays, expected in (
        ({"x": IMAGES, "y": labels}, scale),
        ({"x": IMAGES, "y": IMAGES}, scale),  # images with a label for each pixel
        ({"x": flat, "y": labels}, scale),
        ({"x": flat}, scale),
        ({"x": tokens, "y": tokens}, None),
        ({"x": flat.astype(np.float32), "y": labels}, None),
        ({"x": labels.astype(np.uint8), "y": labels}, None),
        ({"image": IMAGES, "y": labels}, None),
    ):
        assert scaling_of(arrays) == expected
        assert from_arrays(arrays, clients=2).preprocess == expected
        assert from_arrays(arrays, clients=2, preprocess=None).preprocess is None
        assert unscaled_bytes(Split(arrays, np.array([0, 6]))) == ("x" if expected else None)
        assert unscaled_bytes(Split(arrays, np.array([0, 6]), preprocess=scale)) is None


def test_a_crop_larger_than_the_image_is_refused():
    with pytest.raises(ValueError, match="size = 24"):
        run({"name": "crop-flip"})


# ---------------------------------------------------------------- text


def test_the_vocabulary_has_the_papers_90_symbols():
    assert len(text.CHARACTERS) == len(set(text.CHARACTERS)) == 86
    assert text.VOCABULARY_SIZE == 90
    assert sorted([text.PADDING, text.UNKNOWN, text.BEGIN, text.END, *range(1, 87)]) == list(range(90))


lines = st.lists(st.text(max_size=30), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(snippets=lines, length=st.integers(1, 12))
def test_windows_hold_each_snippet_once_and_shift_by_one(snippets, length):
    windows = text.character_windows(snippets, length=length)
    x, y = windows["x"], windows["y"]
    assert x.shape == y.shape == (sum(-(-(len(s) + 2) // (length + 1)) for s in snippets), length)
    assert np.array_equal(x[:, 1:], y[:, :-1])
    stream = np.concatenate([np.concatenate([x[:, :1], y], axis=1).reshape(-1)])
    framed = []
    for s in snippets:
        known = [text.CHARACTERS.index(c) + 1 if c in text.CHARACTERS else text.UNKNOWN for c in s]
        framed += [text.BEGIN, *known, text.END]
    assert stream[stream != text.PADDING].tolist() == framed
    joined = text.character_windows(snippets, length=length, join=True)
    flat_x, flat_y = joined["x"].reshape(-1), joined["y"].reshape(-1)
    assert flat_x[: len(framed) - 1].tolist() == framed[:-1]
    assert flat_y[: len(framed) - 1].tolist() == framed[1:]
    assert not flat_y[len(framed) - 1 :].any()


@settings(max_examples=40, deadline=None)
@given(sentence=st.lists(st.sampled_from("abcxyz"), max_size=9), length=st.integers(1, 6))
def test_word_windows(sentence, length):
    index = text.word_index(["a", "b", "c"])
    windows = text.word_windows([" ".join(sentence)], index, length=length)
    ids = [{"a": 1, "b": 2, "c": 3}.get(w, 4) for w in sentence[:length]]
    full = [5, *ids, *([6] if len(ids) < length else [])]
    full += [0] * (length + 1 - len(full))
    assert windows["x"][0].tolist() == full[:-1]
    assert windows["y"][0].tolist() == full[1:]
    assert windows["x"].dtype == np.uint16


def test_text_refusals():
    with pytest.raises(ValueError, match="length"):
        text.character_windows(["a"], length=0)
    with pytest.raises(ValueError, match="size 0"):
        text.frequent_words(["a"], 0)
    with pytest.raises(ValueError, match="twice"):
        text.word_index(["a", "a"])
