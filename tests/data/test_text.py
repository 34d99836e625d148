"""Text of one's own: what tables, files and folders become, and that no test text is trained on."""

import gzip
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedbraid as fb
from fedbraid import models
from fedbraid.data import from_text, import_data, open_store, repartition, tokenizer
from fedbraid.data.catalog import load
from fedbraid.lowering import captured
from told import told

LETTERS = {"ann": ["abcdef", "gh"], "bob": ["ijk"], "cleo": ["lmnopq", "rst", "uvw", "xyz"]}
END = tokenizer("bytes").end[0]


def read(rows):
    """The text of windows, from their own bytes: padding is nothing, the end of a text is |."""
    return ["".join("|" if i == END else chr(i - 1) for i in row if i) for row in rows.tolist()]


def untested(*args, **options):
    """Data without a test split, which is said."""
    with told("no test split"):
        return from_text(*args, **options)


@pytest.mark.parametrize("name", ["bytes", "characters"])
def test_a_tokenizer_gives_back_the_text(name):
    tokens, text = tokenizer(name), "To be, or not\nto be?"
    ids = tokens.encode(text)
    assert ids.min() > 0
    assert ids.max() < tokens.size
    assert tokens.decode([*ids, 0, *tokens.end]) == text


def test_bytes_hold_any_language():
    tokens = tokenizer("bytes")
    assert tokens.decode(tokens.encode("żółw 🐢 中文")) == "żółw 🐢 中文"
    assert tokens.decode(tokens.encode("a\ud800b")) == "a?b"  # half of a surrogate pair is no text


def test_windows_hold_every_token_of_a_client_once():
    data = untested(LETTERS, length=4)
    assert data.info == {"classes": 258, "tokenizer": "bytes"}
    for i, who in enumerate(data.train.ids):
        text = "|".join(LETTERS[who]) + "|"
        starts, own = range(0, len(text) - 1, 4), data.train.client(i)
        assert sorted(read(own["x"])) == sorted(text[:-1][k : k + 4] for k in starts)
        assert sorted(read(own["y"])) == sorted(text[1:][k : k + 4] for k in starts)
        for x, y in zip(own["x"], own["y"], strict=True):
            np.testing.assert_array_equal(x[1:][x[1:] > 0], y[:-1][x[1:] > 0])


def test_held_out_texts_are_in_no_train_window():
    texts = {who: [f"{who * 9}{i:02d}" for i in range(10)] for who in ("a", "b")}
    data = from_text(texts, length=8, test_fraction=0.3)
    for i in range(2):
        found = {}
        for name, split in data.splits.items():
            parts = "".join(read(split.client(i)["x"]) + read(split.client(i)["y"]))
            found[name] = {k for k in range(10) if f"{k:02d}" in parts}
        assert len(found["test"]) == 3
        assert found["test"] | found["train"] == set(range(10))
        assert not found["test"] & found["train"]


def test_test_texts_of_other_clients_are_unseen():
    data = from_text(LETTERS, {"bob": ["zz"], "dan": ["yy"]}, length=8)
    assert data.test.sizes.tolist() == [0, 1, 0]
    assert read(data.test.client(1)["x"]) == ["zz"]
    assert list(data.unseen.ids) == ["dan"]
    with pytest.raises(ValueError, match="the test texts have none; name their client column"):
        from_text(LETTERS, pa.table({"text": ["zz"]}))
    with pytest.raises(ValueError, match="not both"):
        from_text(LETTERS, {"bob": ["zz"]}, test_fraction=0.5)


def test_only_answers_are_learned_and_cuts_are_said():
    pairs = {"ann": [("2+3", "5"), ("capital of France", "Paris")]}
    data = untested(pairs, length=30)
    own = data.train.client(0)
    assert sorted(read(own["y"])) == ["5|", "Paris|"]
    for x, y in zip(own["x"], own["y"], strict=True):
        learned = np.flatnonzero(y)
        assert read(x[None])[0][learned[0]] == "\n"  # the end of the question predicts the answer's first token
        np.testing.assert_array_equal(x[learned[1:]], y[learned[:-1]])
    with told("1 of 2 questions with their answers are longer than length = 10 tokens"):
        cut = from_text(pairs, length=10).train.client(0)
    assert sorted(read(cut["y"])) == ["5|", "Paris|"]  # the answers fit, so only a question is cut
    assert sorted(read(cut["x"])) == ["2+3\n5", "ance\nParis"]


def test_tables_by_split_are_train_and_test():
    tables = {
        "train": pa.table({"who": ["a"], "text": ["abc"]}),
        "validation": pa.table({"who": ["a"], "text": ["xy"]}),
    }
    data = from_text(tables, client="who", length=8)
    assert read(data.train.client(0)["x"]) == ["abc"]
    assert read(data.test.client(0)["x"]) == ["xy"]


def test_a_question_of_several_columns():
    rows = {"task": ["Add.", "Hi"], "about": ["2 3", None], "reply": ["5", "Hello"], "who": ["a", "b"]}
    data = untested(pa.table(rows), client="who", question="task, about", answer="reply", length=20)
    assert read(data.train.client(0)["x"]) == ["Add.\n2 3\n5"]
    assert read(data.train.client(1)["x"]) == ["Hi\nHello"]
    assert read(data.train.client(0)["y"]) == ["5|"]
    with pytest.raises(ValueError, match=r"no column 'abuot' \(did you mean 'about'\?\)"):
        from_text(pa.table(rows), client="who", question="task,abuot", answer="reply")


def test_columns_of_a_table_and_of_files_are_the_same_data(tmp_path):
    rows = {"who": [], "say": []}
    for who, texts in LETTERS.items():
        for text in texts:
            rows["who"].append(who)
            rows["say"].append(text)
    expected = untested(LETTERS, length=5, seed=3)
    lines = "".join(json.dumps({"who": w, "say": s}) + "\n" for w, s in zip(*rows.values(), strict=True))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.csv").write_text("who,say\n" + "".join(f"{w},{s}\n" for w, s in zip(*rows.values(), strict=True)))
    pq.write_table(pa.table(rows), tmp_path / "d.parquet")
    found = [untested(pa.table(rows), client="who", text="say", length=5, seed=3)]
    for file in sorted(tmp_path.iterdir()):
        import_data("text", [file], tmp_path / "stores" / file.name, client="who", text="say", length=5, seed=3)
        found.append(open_store(tmp_path / "stores" / file.name))
    folder = tmp_path / "folder"
    for who, texts in LETTERS.items():
        for i, text in enumerate(texts):
            (folder / who).mkdir(parents=True, exist_ok=True)
            (folder / who / f"{i}.txt").write_text(text)
    import_data("text", [folder], tmp_path / "stores" / "folder", length=5, seed=3)
    found.append(open_store(tmp_path / "stores" / "folder"))
    flat = tmp_path / "flat"
    flat.mkdir()
    for who, texts in LETTERS.items():
        (flat / f"{who}.txt").write_text("\n\n".join(texts) + "\n\n\n")
    import_data("text", [flat], tmp_path / "stores" / "flat", length=5, seed=3)
    found.append(open_store(tmp_path / "stores" / "flat"))
    assert len(found) == 7
    for data in found:
        assert list(data.train.ids) == list(expected.train.ids)
        assert data.description.classes == 258
        for field in ("x", "y"):
            np.testing.assert_array_equal(data.train.arrays[field], expected.train.arrays[field])
            assert data.description.prepared[field].dtype == np.int32


def test_a_text_of_several_megabytes_in_a_csv_file(tmp_path):
    (tmp_path / "a.csv").write_text('who,say\nann,"' + "two lines\n" * 300_000 + '"\n')
    import_data("text", [tmp_path / "a.csv"], tmp_path / "store", client="who", text="say", length=1000)
    assert open_store(tmp_path / "store").train.num_examples == 3000


def test_rows_without_a_client_are_partitioned(tmp_path):
    texts = [f"text {i}" for i in range(30)]
    data = from_text(pa.table({"text": texts}), partition="iid", clients=5, test_fraction=0.2, length=16)
    assert data.train.num_clients == data.test.num_clients == 5
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    import_data("text", [tmp_path / "a.jsonl"], tmp_path / "store", length=16, test_fraction=0.2)
    again = load(str(tmp_path / "store"), partition="iid", clients=3)
    assert again.train.num_clients == again.test.num_clients == 3
    with pytest.raises(ValueError, match="choose a partition"):
        repartition(open_store(tmp_path / "store"))


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ('{"who": "a", "say": "x"}\n', {"client": "hwo", "text": "say"}, "no column 'hwo' .did you mean 'who'"),
        ('{"who": "a", "say": ["x"]}\n', {"client": "who", "text": "say"}, "column 'say' holds list in row 0"),
        ('{"who": "a", "say": "x"}\n{"say": "y"}\n', {"client": "who", "text": "say"}, "'who' has no value in row 1"),
        ('{"who": "a"}\n["x"]\n', {"client": "who"}, "line 2: one JSON object per line expected, got list"),
        ('{"who": "a", "say"\n', {"client": "who"}, "line 1: not JSON"),
        ('{"who": "a", "say": " "}\n', {"client": "who", "text": "say"}, "has no text"),
        ('{"q": "a", "r": "x"}\n', {"question": "q"}, "needs the column of the answers, too: set answer"),
        ('{"q": "a", "r": "x"}\n', {"question": "q", "answer": "r", "text": "q"}, "a column of text, or"),
        ('{"text": "abc"}\n', {"tokenizer": "byte"}, "unknown tokenizer 'byte' .did you mean 'bytes'"),
        ('{"text": "abc"}\n', {"length": 1}, "length must be a whole number of at least 2, got 1"),
    ],
)
def test_what_is_wrong_with_text_is_said_with_its_place(tmp_path, content, options, message):
    file = tmp_path / "a.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        import_data("text", [file], tmp_path / "store", **options)
    assert not (tmp_path / "store").exists()


def test_text_files_have_no_columns_and_a_folder_one_form(tmp_path):
    (tmp_path / "ann").mkdir()
    (tmp_path / "ann" / "1.txt").write_text("hello there")
    with pytest.raises(ValueError, match="have no columns"):
        import_data("text", [tmp_path], tmp_path / "store", client="who")
    (tmp_path / "bob.txt").write_text("hello")
    with pytest.raises(ValueError, match="move this file into one"):
        import_data("text", [tmp_path], tmp_path / "store")
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1"))
    with pytest.raises(ValueError, match="save it as UTF-8"):
        import_data("text", [tmp_path / "latin.txt"], tmp_path / "store")
    with pytest.raises(ValueError, match="fedbraid data import text"):
        load(str(tmp_path / "bob.txt"))


def test_a_pretrained_model_refuses_ids_of_another_tokenizer():
    data = untested(LETTERS, length=8)
    with pytest.raises(ValueError, match="trained with the tokenizer 'smollm2', and the data has ids of 'bytes'"):
        models.smollm2().metrics.check(data)
    with told("does not say which tokenizer"):
        models.smollm2().metrics.check(replace(data, info={}))
    models.gpt(258, layers=1, width=8, heads=2, length=8).metrics.check(data)


def test_a_small_gpt_learns_a_text_and_writes_it():
    words = "the cat sat on the mat. "
    data = untested({who: [words * 6] for who in "abcd"}, length=48)
    model = models.gpt(258, layers=1, width=32, heads=4, length=48)
    alg = fb.fedavg(model.loss, client_lr=3e-3, client_opt="adamw", batch_size=4, epochs=2)
    params = fb.simulate(alg, model.init(jax.random.key(0)), data, rounds=60, cohort=4, eval_every=None).params
    tokens = tokenizer("bytes")
    written = models.generate(model, params, tokens.encode("the cat "), tokens=40, length=48, temperature=0.0)
    assert tokens.decode(written) == (words * 4)[8:48]


def test_generation_sees_only_the_last_tokens_and_stops():
    counts = lambda params, x: jax.nn.one_hot(x % 9 + 1, 10) * 50.0  # noqa: E731
    model = models.from_functions(lambda key: (), lambda p, b, key: 0.0, predict=counts)
    assert models.generate(model, (), [3], tokens=12, length=4, temperature=0.0) == [4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert models.generate(model, (), [3], tokens=12, length=4, end=[7]) == [4, 5, 6, 7]
    even = models.from_functions(lambda key: (), lambda p, b, key: 0.0, predict=lambda p, x: 0.0 * jax.nn.one_hot(x, 5))
    drawn = models.generate(even, (), [1], tokens=200, length=4)
    assert 0 not in drawn  # padding
    assert np.bincount(drawn, minlength=5)[1:].min() > 25
    with pytest.raises(ValueError, match="begin with at least one"):
        models.generate(even, (), [], length=4)
    with pytest.raises(ValueError, match=r"gives logits \[B, T, vocab\]"):
        models.generate(model._replace(predict=lambda p, x: x), (), [1], length=4)


def test_frozen_weights_are_an_argument_of_the_program_that_writes(monkeypatch):
    table = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)
    frozen = models.from_functions(lambda key: (), lambda p, b, key: 0.0, predict=lambda p, x: jnp.asarray(table)[x])
    programs, jit = [], captured.jit
    monkeypatch.setattr(captured, "jit", lambda function: programs.append(jit(function)) or programs[-1])
    written = models.generate(frozen, (), [1], tokens=3, length=4, temperature=0.0)
    expected = [1]
    for _ in range(3):
        expected.append(1 + int(np.argmax(table[expected[-1], 1:])))
    assert written == expected[1:]
    (program,) = programs
    arguments = (), np.zeros(4, np.int32), np.int32(1), jax.random.key(0)
    assert len(program.lower(*arguments).as_text()) < table.nbytes // 4
