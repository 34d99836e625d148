"""A generator of hostile replies: changes of a real reply of a node, drawn at random."""

from __future__ import annotations

import copy
import json

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

import flower.conftest  # noqa: F401  (Flower without telemetry)
from fedbraid.flower.pack import RAW
from fedbraid.flower.wire import ARRAYS, METRICS, PLAIN

# --- values and texts ------------------------------------------------------------------------------------------------

NUMBERS = [0, -1, 1, 2**31, 2**63 - 1, -(2**63), 0.0, -0.0, -1.0, 1e-300, 1e30, 3.4e38, 1e308, -1e308]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
TEXTS = [
    "",
    "x",
    "0",
    "null",
    "../../etc/passwd",
    "\x00",
    "\x1b[2J\x1b[31m",
    "a\nround 9/9  nodes 5/5",
    "％ｎ",
    "🙂" * 50,
]
TEXTS += [
    "{}",
    "[]",
    "[[]]",
    '{"a": 1}',
    "1e999",
    "NaN",
    "-",
    '"' * 99,
    "\u202e\u2066",
    "%s%s%n",
    "$(reboot)",
    "[/red]",
]


def nested(rng: np.random.Generator) -> str:
    opening, closing = [("[", "]"), ('{"a":', "}"), ("[[", "]]"), ('[{"b":', "}]")][rng.integers(4)]
    depth = int(rng.choice([2, 65, 990, 5000, 100_000]))
    return opening * depth + "1" + closing * depth * int(rng.integers(2))


def a_text(rng: np.random.Generator) -> str:
    kind = rng.integers(4)
    if kind == 0:
        return nested(rng)
    if kind == 1:
        return str(rng.choice(TEXTS)) * int(rng.choice([1, 3, 1000]))
    if kind == 2:
        return "".join(map(chr, rng.integers(1, 0xD7FF, size=rng.integers(1, 40))))
    return a_layout(rng)


def a_layout(rng: np.random.Generator) -> str:
    """A layout that may almost be the right one."""
    paths = [".pseudograd['b']", ".pseudograd['w']", ".aux", "", "\n", 7, None, ["x"]]
    dtypes = ["float32", "float64", "object", "O", "V8", "complex64", "nonsense", "", 3, None, "float32, float32"]
    shapes = [[], [3], [-1], [2**62], [2**40, 2**40], "x", None, [None], ["3"], [[3]], 3, {"a": 1}, [1.5]]

    def pick(some: list) -> object:
        return some[rng.integers(len(some))]

    rows = [[pick(paths), pick(dtypes), pick(shapes)][: rng.integers(1, 4)] for _ in range(rng.integers(0, 6))]
    return json.dumps(rows)


def a_value(rng: np.random.Generator) -> object:
    kind = rng.integers(6)
    if kind < 2:
        return NUMBERS[rng.integers(len(NUMBERS))]
    if kind == 2:
        return a_text(rng)
    if kind == 3:
        return bytes(rng.integers(0, 256, rng.integers(0, 50), np.uint8))
    if kind == 4:
        return bool(rng.integers(2))
    return [[1, 2], ["a"], [0.5] * 1000, []][rng.integers(4)]


# --- changes of a reply: (generator, reply, replies of earlier rounds) -> whether the honest upload may still count ---

Old = list[RecordDict]


def plain_values(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Other values of some fields, except weights that a site may claim."""
    record = reply.content.config_records[PLAIN]
    changed = set()
    for name in [name for name in record if rng.integers(2)] or ["tag"]:
        value = a_value(rng)
        if name == "weight" and type(value) is float and 0 <= value <= record[name]:
            value = -1.0
        if type(value) is not type(record[name]) or value != record[name]:
            record[name] = value
            changed.add(name)
    return changed <= {"leaves"}  # read only if the layout is another one


def weight(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    allowed = [9.1, 10.0, 1e9, 1e30, 1e38, 3e38, 1e308, -1e-9, -5.0, float("nan"), float("inf"), float("-inf")]
    reply.content.config_records[PLAIN]["weight"] = allowed[rng.integers(len(allowed))]
    return False


def missing_or_more(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Records or fields are missing, or there are many more."""
    record = reply.content.config_records[PLAIN]
    if rng.integers(2):
        del record[str(rng.choice(["tag", "weight", "layout"]))]
        return False
    many = int(rng.choice([1, 50, 3000]))
    for i in range(many):
        record[f"{rng.choice(TEXTS)}{i}"] = a_value(rng) if many < 100 else 1
    for i in range(int(rng.choice([0, 3, 2000]))):
        reply.content[f"other{i}"] = ConfigRecord({"a": 1})
    return "refused" not in record


def layouts(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    record = reply.content.config_records[PLAIN]
    record["layout"], record["leaves"] = (
        str(rng.choice(["0", "", "\n"])),
        nested(rng) if rng.integers(2) else a_text(rng),
    )
    return False


def buffers(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Arrays of other lengths, dtypes and names, or none."""
    found = reply.content.array_records.get(ARRAYS, ArrayRecord())
    numbers = {name: np.frombuffer(array.data, name) for name, array in found.items()}
    changed = {}
    for name, values in numbers.items():
        kind = rng.integers(7)
        dtype, key, data, stype, shape = name, name, values.tobytes(), RAW, values.shape
        if kind == 0:
            data = data[: int(rng.integers(0, len(data)))]
        elif kind == 1:
            data += bytes(int(rng.choice([1, 4, 5000, 3_000_000])))
        elif kind == 2:
            dtype = key = str(rng.choice(["float64", "int32", "object", "float16", "../x", "", "V1000000000", "🙂"]))
        elif kind == 3:
            stype = str(rng.choice(["numpy.ndarray", "pickle", "", "fedbraid.raw2"]))
        elif kind == 4:
            dtype = str(rng.choice(["float64", "int32", "O", ""]))
        elif kind == 5:
            continue
        else:
            for i in range(int(rng.choice([1, 1500]))):
                changed[f"{name}{i}"] = Array(name, values.shape, RAW, values.tobytes())
        changed[key] = Array(dtype, shape, stype, data)
    reply.content = RecordDict({**reply.content, ARRAYS: ArrayRecord(changed)})
    return False


def values(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Some numbers are not finite, or so large that a weighted sum is not finite."""
    record = reply.content.array_records[ARRAYS]
    changed = {}
    for name, array in record.items():
        numbers = np.frombuffer(array.data, name).copy()
        where = rng.integers(0, len(numbers), size=rng.integers(1, len(numbers) + 1))
        numbers[where] = rng.choice(np.array([np.nan, np.inf, -np.inf, 3.4e38, -3.4e38, 1.5e38]), size=len(where))
        changed[name] = Array(name, numbers.shape, RAW, numbers.tobytes())
    reply.content = RecordDict({**reply.content, ARRAYS: ArrayRecord(changed)})
    return False


def metrics(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Invented, missing and impossible metrics. The upload is the honest one."""
    kind = rng.integers(4)
    sent: dict = dict(reply.content.metric_records.get(METRICS, {}))
    if kind == 0:
        sent |= {f"m{i}": 1.0 for i in range(int(rng.choice([1, 40, 900, 8000])))}
    elif kind == 1:
        sent = dict.fromkeys(sent, NUMBERS[rng.integers(len(NUMBERS))])
    elif kind == 2:
        sent = {name: [1.0, 2.0] for name in sent} | {str(rng.choice(TEXTS)): 1.0}
    else:
        sent = {}
    reply.content = RecordDict({**reply.content, METRICS: MetricRecord(sent)})
    return True


def swapped_kinds(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """Records of another kind under the expected names."""
    kinds: list = [ConfigRecord({"a": 1}), MetricRecord({"a": 1.0}), ArrayRecord({})]
    name = str(rng.choice([PLAIN, ARRAYS]))
    rest = {key: value for key, value in reply.content.items() if key != name}
    i = int(rng.integers(3))
    if isinstance(kinds[i], type(reply.content[name])):
        i = (i + 1) % 3
    reply.content = RecordDict({**rest, name: kinds[i]})
    return False


def replay(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """The reply of another round or exchange, or a part of it."""
    other = old[rng.integers(len(old))]
    if rng.integers(2):
        reply.content = copy.deepcopy(other)
    else:
        reply.content.config_records[PLAIN]["tag"] = other.config_records[PLAIN]["tag"]
    return False


def refusal(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    """A refusal, with a hostile reason."""
    record: dict = {"refused": a_text(rng), "greet": bool(rng.integers(2))}
    if rng.integers(3) == 0:
        record[str(rng.choice(["refused", "greet"]))] = a_value(rng)
    reply.content = RecordDict({PLAIN: ConfigRecord(record)})
    return False


def nothing(rng: np.random.Generator, reply: Message, old: Old) -> bool:
    reply.content = RecordDict()
    return False


CHANGES = [plain_values, weight, missing_or_more, layouts, buffers, values, metrics, swapped_kinds, replay, refusal]
CHANGES += [nothing]
