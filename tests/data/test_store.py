"""The store: reading returns what was written, damage is found, an unfinished store does not open, cohorts."""

import json
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store import StoreWriter, TextRows, gather, is_store, open_store, prefetch, verify, write_store


def client(n, start=0, shape=(2,)):
    rows = np.arange(start, start + n)
    return {"x": np.broadcast_to(rows.reshape(-1, *[1] * len(shape)), (n, *shape)).astype(np.float32), "y": rows % 3}


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with StoreWriter(path, name="toy", info={"classes": 3}, preprocess=Pipeline.of({"name": "scale"})) as writer:
        for i, n in enumerate((4, 1, 7)):
            writer.add("train", f"c{i}", client(n, 10 * i))
        writer.add("test", "c2", client(2, 100))
        writer.add("test", "c0", client(3, 200))
        writer.add("test", "new", client(5, 300))
    return path


def test_a_store_opens_as_it_was_written(store):
    data = open_store(store)
    assert (data.name, data.info["classes"]) == ("toy", 3)
    assert data.preprocess == Pipeline.of({"name": "scale"})
    assert isinstance(data.train.arrays["x"], np.memmap)
    assert list(data.train.ids) == ["c0", "c1", "c2"]
    assert data.train.sizes.tolist() == [4, 1, 7]
    for i, n in enumerate((4, 1, 7)):  # rows are shuffled within each client, and stay together
        rows = data.train.client(i)
        assert sorted(rows["x"][:, 0].tolist()) == list(range(10 * i, 10 * i + n))
        assert np.array_equal(rows["x"][:, 0] % 3, rows["y"])
    data.check()
    verify(store)
    whole = open_store(store, in_memory=True)
    assert not isinstance(whole.train.arrays["x"], np.memmap)
    assert np.array_equal(whole.train.arrays["x"], data.train.arrays["x"])


def test_test_clients_take_the_train_order_and_strangers_are_unseen(store):
    data = open_store(store)
    assert data.aligned
    assert data.test.sizes.tolist() == [3, 0, 2]
    assert sorted(data.test.client(2)["x"][:, 0].tolist()) == [100, 101]
    assert list(data.unseen.ids) == ["new"]
    assert sorted(data.unseen.arrays["x"][:, 0].tolist()) == [300, 301, 302, 303, 304]


def test_a_test_split_by_other_clients_stays(tmp_path):
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("train", "a", client(2))
        writer.add("test", "b", client(3))
    data = open_store(tmp_path / "s")
    assert data.unseen is None
    assert not data.aligned
    assert list(data.test.ids) == ["b"]


def test_the_shuffle_is_a_seed_and_can_be_left_out(tmp_path):
    order = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1), ("d", None)):
        with StoreWriter(tmp_path / name, shuffle=seed) as writer:
            writer.add("train", "c", client(50))
        order[name] = open_store(tmp_path / name).train.arrays["x"][:, 0].tolist()
    assert order["a"] == order["b"] != order["c"]
    assert order["d"] == list(range(50))


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    dtype=st.sampled_from(["u1", "i2", "<i4", ">i4", "f4", "f8", "?"]),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    data=st.data(),
)
def test_any_numbers_come_back_bit_for_bit(tmp_path_factory, sizes, dtype, shape, data):
    elements = {"allow_nan": False, "allow_infinity": False} if dtype.startswith("f") else {}
    rows = [data.draw(arrays(dtype, (n, *shape), elements=elements)) for n in sizes]
    path = tmp_path_factory.mktemp("any") / "store"
    split = Split.from_clients([{"v": r} for r in rows])
    write_store(path, FederatedData(split))
    back = open_store(path)
    for i, row in enumerate(rows):
        assert np.array_equal(back.train.client(i)["v"], row)
    assert back.train.arrays["v"].dtype == np.dtype(dtype).newbyteorder("=")


def test_write_store_keeps_splits_and_preprocessing(tmp_path):
    train = Split.from_clients([client(3), client(2, 50)])
    test = Split.from_clients([client(1, 7), {k: v[:0] for k, v in client(1).items()}])
    unseen = Split.from_clients([client(4, 90)])
    data = FederatedData(train, test, "d", {"classes": 3}, Pipeline.of({"name": "flatten"}), unseen=unseen)
    write_store(tmp_path / "s", data)
    back = open_store(tmp_path / "s")
    assert back.preprocess == data.preprocess
    assert back.aligned
    for name, split in data.splits.items():
        assert back.splits[name].offsets.tolist() == split.offsets.tolist()
        assert np.array_equal(back.splits[name].arrays["x"], split.arrays["x"])
    with pytest.raises(ValueError, match="Pipeline"):
        write_store(tmp_path / "t", FederatedData(train, preprocess=lambda b, k, t: b))


def test_text_of_any_length(tmp_path):
    lines = {"ann": ["To be", "", "ünïcode ✓"], "bob": ["x" * 500]}
    with StoreWriter(tmp_path / "s") as writer:
        for name, strings in lines.items():
            writer.add("train", name, {"line": strings})
        writer.add("test", "bob", {"line": [b"bytes are text"]})
    data = open_store(tmp_path / "s")
    assert list(data.train.client(0)["line"]) == lines["ann"]
    assert list(data.train.client(1)["line"]) == lines["bob"]
    assert list(data.test.client(1)["line"]) == ["bytes are text"]
    data.train.check()
    with pytest.raises(ValueError, match="text"):
        gather(data.train, [0])
    assert list(TextRows.of(["a", "b", "c"])[-2:]) == ["b", "c"]


# ---------------------------------------------------------------- failure


def test_a_failed_import_leaves_nothing(tmp_path):
    path = tmp_path / "store"

    def half():
        with StoreWriter(path) as writer:
            writer.add("train", "a", client(3))
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError):
        half()
    assert list(tmp_path.iterdir()) == []
    writer = StoreWriter(path)  # as if the process was killed: neither finished nor aborted
    writer.add("train", "a", client(3))
    assert not is_store(path)
    for left in tmp_path.iterdir():
        assert not is_store(left)
        with pytest.raises(ValueError, match="not a store"):
            open_store(left)
    writer._abort()


def test_an_existing_store_is_only_replaced_on_request_and_never_by_half(store):
    before = (store / "header.json").read_bytes()
    with pytest.raises(ValueError, match="exists"):
        StoreWriter(store)

    def half():
        with StoreWriter(store, overwrite=True) as writer:
            writer.add("train", "z", client(1))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        half()
    assert (store / "header.json").read_bytes() == before
    with StoreWriter(store, overwrite=True) as writer:
        writer.add("train", "z", client(1))
    assert list(open_store(store).train.ids) == ["z"]
    assert [p.name for p in store.parent.iterdir()] == ["store"]
    other = store.parent / "other"
    other.mkdir()
    with pytest.raises(ValueError, match="not a store"):
        StoreWriter(other, overwrite=True)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"x": np.zeros((2, 3), np.float32), "y": [0, 1]},
            r"file.h5: client b: field x: shape \[3\] differs from \[2\]",
        ),
        ({"x": np.zeros((2, 2), np.float64), "y": [0, 1]}, "file.h5: client b: field x: type <f8 differs from <f4"),
        ({"x": np.zeros((2, 2), np.float32)}, r"client b: has fields \['x'\]"),
        ({"x": np.zeros((2, 2), np.float32), "y": [0]}, "client b: fields differ in length"),
        ({"x": np.zeros((0, 2), np.float32), "y": np.zeros(0, int)}, "client b: field x: no examples"),
        ({"x": np.full((1, 2), np.nan, np.float32), "y": [0]}, "client b: field x: not finite in row 0"),
        ({"x": [[1.0, 2.0], [3.0]], "y": [0, 1]}, "client b: field x: examples differ in shape"),
        ({"x": np.zeros((1, 2), complex), "y": [0]}, "client b: field x: type complex128"),
        ({"x": [b"\xff\xfe"], "y": [0]}, "client b: field x: text is not UTF-8"),
    ],
)
def test_bad_clients_are_refused_by_file_client_and_field(tmp_path, fields, words):
    def write():
        with StoreWriter(tmp_path / "s") as writer:
            writer.add("train", "a", {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, int)}, source="file.h5")
            writer.add("train", "b", fields, source="file.h5")

    with pytest.raises(ValueError, match=words):
        write()
    assert list(tmp_path.iterdir()) == []


def test_duplicate_and_empty_clients_and_reserved_names(tmp_path):
    def write(*calls, **options):
        with StoreWriter(tmp_path / "s", **options) as writer:
            for call in calls:
                writer.add(*call)

    with pytest.raises(ValueError, match="client a: appears twice in the train split"):
        write(("train", "a", client(1)), ("train", "a", client(1)))
    with pytest.raises(ValueError, match="unknown split 'holdout'"):
        write(("holdout", "a", client(1)))
    with pytest.raises(ValueError, match="'mask'"):
        write(("train", "a", {"mask": [1]}))
    with pytest.raises(ValueError, match=r"'../y'"):
        write(("train", "a", {"../y": [1]}))
    with pytest.raises(ValueError, match="no train examples"):
        write(("test", "a", client(1)))
    write(("train", "a", client(0)), ("train", "b", client(2)), drop_empty=True)
    assert list(open_store(tmp_path / "s").train.ids) == ["b"]


def test_damage_is_found(store):
    field = store / "train.x.bin"
    whole = field.read_bytes()
    field.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=r"train\.x\.bin: 92 bytes, expected 96"):
        open_store(store)
    field.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    open_store(store)  # the size is right: opening is cheap and does not read the data
    with pytest.raises(ValueError, match=r"train\.x\.bin: wrong checksum"):
        verify(store)
    field.unlink()
    with pytest.raises(ValueError, match=r"train\.x\.bin: missing"):
        open_store(store)
    field.write_bytes(whole)
    offsets = store / "train.offsets.bin"
    offsets.write_bytes(np.array([0, 9, 5, 12], "<i8").tobytes())
    with pytest.raises(ValueError, match="offsets are damaged"):
        open_store(store)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h.clear(), "not a header"),
        (lambda h: h.update(version=99), "version 99"),
        (lambda h: h["splits"].pop("train"), "train"),
        (lambda h: h["splits"]["train"]["fields"]["x"].update(file="../../etc/passwd"), "outside of the store"),
        (lambda h: h["splits"]["train"]["fields"]["x"].update(file="/etc/passwd"), "outside of the store"),
        (lambda h: h["splits"]["train"]["fields"]["x"].update(dtype="|O"), "unknown type"),
        (lambda h: h["splits"]["train"].pop("offsets"), "offsets"),
        (lambda h: h.update(preprocess=[{"name": "os.system"}]), "unknown preprocessing"),
    ],
)
def test_a_bad_header_is_refused(store, change, words):
    file = store / "header.json"
    header = json.loads(file.read_text())
    change(header)
    file.write_text(json.dumps(header))
    with pytest.raises(ValueError, match=words):
        open_store(store)


def test_a_cut_header_is_refused(store):
    file = store / "header.json"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="header is damaged"):
        open_store(store)


# ---------------------------------------------------------------- cohorts


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), data=st.data())
def test_gather_is_the_clients_rows_in_order(tmp_path_factory, sizes, data):
    chosen = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=10))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    table = np.arange(int(offsets[-1]) * 6, dtype=np.int16).reshape(-1, 2, 3)
    file = tmp_path_factory.mktemp("gather") / "x.bin"
    file.write_bytes(b"skip" + table.tobytes())
    forms = [table]
    if table.size:
        forms.append(np.memmap(file, np.int16, "r", offset=4, shape=table.shape))
        longer = np.memmap(file, np.int16, "r", shape=(table.size + 2,))
        forms.append(longer[2:].reshape(table.shape))  # a slice of a map has the file offset of its parent
    for form in forms:
        cohort = gather(Split({"x": form}, offsets), chosen)
        expected = [table[offsets[i] : offsets[i + 1]] for i in chosen]
        assert cohort.offsets.tolist() == np.concatenate([[0], np.cumsum([len(e) for e in expected])]).tolist()
        assert np.array_equal(cohort.arrays["x"], np.concatenate([table[:0], *expected]))


def test_prefetch_gives_the_same_cohorts_and_stops_its_thread(store):
    split = open_store(store).train
    draws = [[0, 2], [1], [2, 1, 0]] * 5
    for ahead, draw in zip(prefetch(split, draws, depth=3), draws, strict=True):
        plain = gather(split, draw)
        assert np.array_equal(ahead.arrays["x"], plain.arrays["x"])
        assert ahead.clients.tolist() == draw
    stream = prefetch(split, draws)
    next(stream)
    stream.close()
    assert not [t for t in threading.enumerate() if t.name == "fedbraid-prefetch"]
    with pytest.raises(ValueError, match="indices from 0 to 2"):
        list(prefetch(split, [[0], [7]]))
    with pytest.raises(ValueError, match="depth"):
        next(prefetch(split, draws, depth=0))


def test_a_file_cut_while_open_is_an_error(store):
    split = open_store(store).train
    os.truncate(store / "train.x.bin", 8)
    with pytest.raises(ValueError, match="ends early"):
        gather(split, [2])


def test_many_clients_open_at_once(tmp_path):
    with StoreWriter(tmp_path / "s", shuffle=None) as writer:
        for i in range(5_000):
            writer.add("train", f"user {i}", {"x": np.full((1, 4), i % 250, np.uint8)})
    data = open_store(tmp_path / "s")
    assert isinstance(data.train.ids, TextRows)  # strings are made on access only
    assert data.train.ids[4_321] == "user 4321"
    assert gather(data.train, [4_321]).arrays["x"][0, 0] == 4_321 % 250


@pytest.mark.parametrize("name", ["x'; import os", 'a"\nb = 1', "../x", "a b", "", "x" * 65, ".x", None, 3])
def test_names_that_could_be_code_or_paths_are_refused(tmp_path, name):
    rows = {"x": np.zeros((2, 1))}
    for options, fields in (({"name": name}, rows), ({}, {name: rows["x"]})):
        with pytest.raises(ValueError, match="not a usable name"), StoreWriter(tmp_path / "s", **options) as writer:
            writer.add("train", "a", fields)
    assert not list(tmp_path.iterdir())
    with StoreWriter(tmp_path / "s") as writer:
        writer.add("train", "a", rows)
    file = tmp_path / "s" / "header.json"
    good = json.loads(file.read_text())
    file.write_text(json.dumps({**good, "name": name}))
    with pytest.raises(ValueError, match="not a usable name"):
        open_store(tmp_path / "s")
    if isinstance(name, str):
        good["splits"]["train"]["fields"][name] = good["splits"]["train"]["fields"].pop("x")
        file.write_text(json.dumps(good))
        with pytest.raises(ValueError, match="not a usable name"):
            open_store(tmp_path / "s")


def test_fields_may_be_named_like_the_files_of_a_store(tmp_path):
    fields = {
        name: np.arange(2.0) + i for i, name in enumerate(["ids", "offsets", "ids.rows", "x", "x.rows", "x.field"])
    }
    with StoreWriter(tmp_path / "s", shuffle=None) as writer:
        writer.add("train", "a", {**fields, "words": ["to", "be"], "words.rows": ["or", "not"]})
    data = open_store(tmp_path / "s")
    for name, values in fields.items():
        assert data.train.arrays[name].tolist() == values.tolist()
    assert list(data.train.client(0)["words"]) == ["to", "be"]
