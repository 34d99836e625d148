"""Federated data: stores, published formats, partitions, and preprocessing inside the compiled step."""

from fedbraid.data.byzantine import mark
from fedbraid.data.catalog import CATALOG, load, repartition
from fedbraid.data.describe import plot_data, summarize_data
from fedbraid.data.description import DataDescription
from fedbraid.data.federated import FederatedData, Split
from fedbraid.data.importing import import_data, open_source
from fedbraid.data.partition import (
    PARTITIONERS,
    by_id,
    dirichlet,
    hold_out,
    iid,
    log_normal,
    match_labels,
    pachinko,
    shards,
    summarize,
)
from fedbraid.data.plain import from_arrays, from_clients, from_dataset, from_table, from_text
from fedbraid.data.preprocess import Pipeline
from fedbraid.data.published import PUBLISHED
from fedbraid.data.store import Cohort, StoreWriter, gather, open_store, prefetch, verify, write_store
from fedbraid.data.tabular import Columns
from fedbraid.data.tokens import Tokenizer, tokenizer

__all__ = [
    "CATALOG",
    "PARTITIONERS",
    "PUBLISHED",
    "Cohort",
    "Columns",
    "DataDescription",
    "FederatedData",
    "Pipeline",
    "Split",
    "StoreWriter",
    "Tokenizer",
    "by_id",
    "dirichlet",
    "from_arrays",
    "from_clients",
    "from_dataset",
    "from_table",
    "from_text",
    "gather",
    "hold_out",
    "iid",
    "import_data",
    "load",
    "log_normal",
    "mark",
    "match_labels",
    "open_source",
    "open_store",
    "pachinko",
    "plot_data",
    "prefetch",
    "repartition",
    "shards",
    "summarize",
    "summarize_data",
    "tokenizer",
    "verify",
    "write_store",
]
