"""Hostile replies to the four messages of secure aggregation: the others' sum, or a skipped round with a note."""

from __future__ import annotations

import tempfile

import jax
import numpy as np
import pytest
from amount import cases
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedbraid.flower import Policy
from fedbraid.flower.wire import PLAIN
from flower.masked import ALG, PHASES, SECURE, dying, phase_of, secure_grid
from flower.small import bare, crash, deploy, grid_of
from zoo import start

BAD = 2
QUICK = Policy(deadline=0.03, join=0.5)


def _arrays(reply, change):
    record = reply.content["arrays"]
    arrays = {}
    for name, array in record.items():
        data, dtype = change(bytes(array.data), array.dtype)
        arrays[name] = Array(dtype, (len(data),), array.stype, data)
    content = RecordDict(dict(reply.content))
    content["arrays"] = ArrayRecord(arrays)
    reply.content = content
    return reply


def _plain(reply, values):
    content = RecordDict(dict(reply.content))
    content[PLAIN] = ConfigRecord(values)
    reply.content = content
    return reply


def mutations(rng):
    """A random change of a reply, with its name. ``noise`` keeps the layout."""

    def noise(data, dtype):
        raw = np.frombuffer(data, np.uint8).copy()
        where = rng.random(len(raw)) < rng.choice([1.0, 0.1, 0.02])
        raw[where] = rng.integers(0, 256, where.sum())
        return raw.tobytes(), dtype

    cut = int(rng.integers(1, 40))
    word = rng.choice(["", "0.0.other", "x" * 300, "../../etc"])
    return {
        "noise": lambda reply: _arrays(reply, noise),
        "zeros": lambda reply: _arrays(reply, lambda data, dtype: (bytes(len(data)), dtype)),
        "short": lambda reply: _arrays(reply, lambda data, dtype: (data[:-cut], dtype)),
        "long": lambda reply: _arrays(reply, lambda data, dtype: (data + bytes(cut), dtype)),
        "other dtype": lambda reply: _arrays(reply, lambda data, dtype: (data, "float32")),
        "huge": lambda reply: _arrays(reply, lambda data, dtype: (data + bytes(3_000_000), dtype)),
        "tag": lambda reply: _plain(reply, {"tag": str(word)}),
        "number as tag": lambda reply: _plain(reply, {"tag": 7}),
        "no tag": lambda reply: _plain(reply, {"refused": "no"}),
        "nothing": bare,
        "crash": crash,
        "silence": lambda reply: None,
    }


@pytest.fixture
def allowed(tmp_path, monkeypatch):
    """The model with all five, without the hostile one, and of a skipped round."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    runs = [
        deploy(ALG, grid_of(ALG, name="zoo", tamper=tamper), rounds=1, fingerprint="zoo", policy=QUICK)
        for tamper in (None, dying({(0, 0): {BAD: "keys"}}))
    ]
    return {"all": runs[0].params, "others": runs[1].params, "skipped": start()}


def near(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(np.asarray(x), np.asarray(y), rtol=1e-5, atol=1e-5) for x, y in pairs)


def test_a_hostile_client_cannot_spoil_or_end_a_secure_round(tally, allowed):
    """Not tried: numbers of its own choice in its masked upload, which no server can see."""
    ends = dict.fromkeys(allowed, 0)
    for seed in range(cases(14, 400)):
        rng = np.random.default_rng(seed)
        phase = ["upload", *PHASES.values()][seed % 4]
        choices = mutations(rng)
        if phase == "upload":
            del choices["noise"], choices["zeros"]
        kind = str(rng.choice(list(choices)))

        def tamper(order, reply, change=choices[kind], phase=phase):
            at = phase_of(order)
            return change(reply) if at and at[2:] == (phase, BAD) else reply

        notes = []
        try:
            served = deploy(
                ALG,
                secure_grid(ALG, SECURE, tamper=tamper),
                rounds=1,
                fingerprint="zoo",
                secure=SECURE,
                policy=QUICK,
                say=notes.append,
            )
        except Exception as error:
            tally.case(False, f"{seed}: {kind} in {phase}: {type(error).__name__}: {error}")
            continue
        end = [name for name, params in allowed.items() if near(served.params, params)]
        ends[end[0] if end else "all"] += bool(end)
        said = len(notes) > 2 or end == ["all"]  # the settings and the round are two lines
        tally.case(len(end) == 1 and said, f"{seed}: {kind} in {phase}: {end}, {notes}")
    assert ends["all"]
    assert ends["others"]
    tally.check()
