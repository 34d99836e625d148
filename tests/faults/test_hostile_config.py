"""Hostile configurations: mutations of valid TOML files, through loading and assembling.

Each is accepted, and then written and read again it is the same; or it is refused with a ConfigError, before training.
"""

from __future__ import annotations

import copy
import signal
import sys
import time
import tomllib
from contextlib import contextmanager

import numpy as np
import pytest
import tomli_w
from amount import cases

from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.experiment.config import dump
from told import collecting

SECONDS = 20  # the longest time of one case; a first compilation is in it
LONGEST = 3000  # characters of a line

VALID = (
    """
seed = 1
rounds = 5
cohort = 2
[data]
name = "digits"
partition = "dirichlet"
alpha = 0.5
clients = 6
[model]
name = "mlp"
hidden = [8, 4]
[algorithm]
name = "fedavgm"
client_lr = 0.1
batch_size = 10
epochs = 1
[[transforms]]
name = "clip"
bound = 1.0
[arrival]
drop = 0.1
[engine]
plan = "sequential"
devices = 1
""",
    """
rounds = 3
cohort = "all"
[data]
name = "synthetic-least-squares"
clients = 4
size = 10
[model]
name = "least_squares"
[algorithm]
name = "scaffold"
client_lr = 0.01
steps = 2
[[transforms]]
name = "quantize"
bits = 8
[[transforms]]
name = "norm_bound"
bound = 2.0
[attack]
share = 0.2
[evaluation]
every = 2
""",
    """
cohort = 5
[data]
name = "digits"
partition = "shards"
clients = 5
per_client = 2
seed = 3
[model]
name = "softmax_regression"
[algorithm]
name = "fedyogi"
client_lr = 0.1
server_lr = 0.01
weighting = "examples"
[arrival]
deadline = 60.0
latency_median = 2.0
[checkpoint]
every = 5
""",
)

NAMES = (
    "os:system", "subprocess:run", "builtins:exec", "sys:exit", "os.path:join", "json:loads", "fedbraid.cli.app:main",
    "no_such_module_here:f", "..:x", ":", "a:b:c", "os:", ":system", "fedbraid.models:Model", "fedbraid.core:Algorithm",
    "../../etc/passwd", "/dev/null", "fedavg ", "FEDAVG", "fedävg", "\u202efedavg", "fed\x00avg", "$(touch x)", "$$",
    "{name}", "%s", "[bold]x[/]", "x" * 10_000, "", "__main__:x", "numpy:zeros", "fedbraid.transforms:clip",
    "fedbraid.algorithms:fedavg",
)  # fmt: skip
VALUES = (
    True, False, 0, 1, -1, 2, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), 2**31, 2**63, 2**64,
    10**18, 10**30, "", "x", "1", "auto", "all", "none", "ü" * 50, "\x00", "a" * 5000, "$$HOME/$x", [], {}, [[]],
    [[[[1]]]], [1, "a"], [True], {"a": {"b": [1]}}, {"name": "x"}, [{"name": "clip"}], ["os:system"],
)  # fmt: skip
TEXTS = (
    "\x00", "\ufeff", "[", "]", "=", "'''", '"', "\\", "\u2028", "𝔣", "#", "\r", "1e999", "[[", "[algorithm]\n",
    "[" * 3000, "x=" + "[" * 20_000, "n=" + "9" * 6000 + "\n", "a.b.c=1\n", "inf", "1979-05-27",
)  # fmt: skip


def places(tree, here=()):
    """Every key and every item of a tree, as a path."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield (*here, key)
        if isinstance(value, dict | list):
            yield from places(value, (*here, key))


def pick(rng, options):
    return options[rng.integers(len(options))]


def mutated_tree(rng, tree):
    """A tree with one to three changes of values, keys or nesting."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.integers(1, 4)):
        *parents, last = pick(rng, list(places(tree)))
        here = tree
        for part in parents:
            here = here[part]
        kind = rng.integers(6)
        if kind == 0:
            here[last] = pick(rng, VALUES)
        elif kind == 1:
            here[last] = pick(rng, NAMES) if rng.random() < 0.5 else [here[last]]
        elif kind == 2:
            del here[last]
            if not tree:
                return {"seed": 1}
        elif kind == 3 and isinstance(here, dict):
            here[f"{last}{pick(rng, ('x', ' ', '.', 'ü', ''))}"] = pick(rng, VALUES)
        elif kind == 4:
            section = pick(rng, ("data", "model", "algorithm"))
            if isinstance(tree.get(section), dict):
                tree[section]["name" if rng.random() < 0.7 else "partition"] = pick(rng, NAMES)
        else:
            key = pick(rng, ("modules", "engine", "arrival", "transforms", "attack", "Seed", "rounds"))
            tree[key] = pick(rng, VALUES)
    return tree


def mutated_text(rng, text):
    """A text with a part removed, doubled, inserted or cut off."""
    lines, at = text.splitlines(keepends=True), int(rng.integers(len(text)))
    kind, line = rng.integers(5), int(rng.integers(len(lines)))
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + pick(rng, TEXTS) + text[at:]
    if kind == 2:
        return "".join([*lines[:line], *lines[line + 1 :]])
    if kind == 3:
        return "".join([*lines[: line + 1], *lines[line:]])
    return text[:at] + text[at + int(rng.integers(1, 30)) :]


def generate(rng):
    text = pick(rng, VALID)
    if rng.random() < 0.35:
        return mutated_text(rng, text)
    tree = mutated_tree(rng, tomllib.loads(text))
    return tomli_w.dumps(tree)


@contextmanager
def within(seconds):
    """Raise TimeoutError if the block takes longer (where the system has alarms)."""
    if not hasattr(signal, "SIGALRM"):
        yield
        return

    def late(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(place):
    """How a configuration ends: "accepted", "refused", or a description of what is wrong."""
    began = time.monotonic()
    try:
        with within(SECONDS), collecting():
            loaded = load_config(place)
            build(loaded)
            again = place.with_name("again.toml")
            again.write_text(dump(loaded), encoding="utf-8")
            read = load_config(again)
    except ConfigError as error:
        lines = str(error).splitlines()
        wrong = not lines or any(not line.strip() or len(line) > LONGEST for line in lines)
        return f"a bad message: {str(error)[:300]!r}" if wrong else "refused"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"{type(error).__name__}: {str(error)[:200]} after {time.monotonic() - began:.1f} s"
    same = dump(read) == dump(loaded)  # as text, because nan is not equal to itself
    return "accepted" if same else "it is another configuration when it is written and read again"


def test_hostile_configurations(tmp_path, tally, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    place, counts = tmp_path / "config.toml", {"accepted": 0, "refused": 0}
    for text in VALID:  # the generator starts from configurations that are accepted
        place.write_text(text)
        assert outcome(place) == "accepted"
    for seed in range(cases(110, 1500)):
        text = generate(np.random.default_rng(seed))
        place.write_bytes(text.encode("utf-8", "surrogatepass"))
        found = outcome(place)
        counts[found] = counts.get(found, 0) + 1
        tally.case(found in ("accepted", "refused"), f"seed {seed}: {found}")
        assert not (tmp_path / "x").exists()
    assert min(counts["accepted"], counts["refused"]) > 5, counts
    assert "antigravity" not in set(sys.modules) - before
    tally.check()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("seed=9223372036854775808", "seed = 9223372036854775808: must be less than 9223372036854775808"),
        (
            "rounds=1000000000000000000",
            "rounds = 10*: must be less than or equal to 1000000000",
        ),
        ("cohort=true", "cohort = true: true and false are not allowed here"),
        ("engine.chunk=true", "engine.chunk = true: true and false are not allowed here"),
        ("arrival.drop=false", "arrival.drop = false: true and false are not allowed here"),
        ("algorithm.shuffle='no'", "option shuffle of algorithm 'fedauto_ahead' must be true or false, got 'no'"),
        ("algorithm={name='fedavg', client_lr=true}", "client_lr must be a finite number"),
        ("algorithm={name='fedavg', client_lr='1'}", "client_lr must be a finite number"),
        ("transforms=[{name='median', exchanges='train'}]", "option exchanges of transform 'median' must be"),
        (
            "model.hidden=[1000000000,1000000000]",
            "parameters, .*the server's model and one client's need .*smaller",
        ),
        ("data.path=a$$b/c$x", "path"),
        ("seed=" + "9" * 5000, "too long or nested too deeply"),
        ("seed=" + "[" * 5000, "nested too deeply|int"),
    ],
)
def test_one_line_for_each(setting, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(load_config(settings=[setting]))
    assert len(str(caught.value).splitlines()) == 1
