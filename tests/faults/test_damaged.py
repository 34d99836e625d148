"""Damaged files of a run folder: what reads them gives the right result or one clear line, nothing wrong silently."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from amount import cases
from tiny import arguments, restore, result

from fedbraid.experiment.config import ConfigError, dump, load_config
from fedbraid.experiment.params import PARAMS, read_params
from fedbraid.experiment.runfolder import (
    read_clients,
    read_config,
    read_metrics,
    read_summary,
    read_table,
    write_config,
    write_table,
)
from fedbraid.experiment.trials import _rows_so_far, read_trials, write_trials
from fedbraid.simulation import Checkpoints, HostStates, checkpoint, simulate
from told import collecting, told
from zoo import clients, counting

KINDS = ("flip", "cut", "zero", "delete", "empty")


def harm(path: Path, kind: str, draw: random.Random) -> None:
    """Damage one file."""
    data = bytearray(path.read_bytes())
    if kind == "delete":
        path.unlink()
        return
    if kind == "flip" and data:
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        data = data[: draw.randrange(max(len(data), 1))]
    elif kind == "zero":
        data = bytearray(len(data))
    elif kind == "empty":
        data = bytearray()
    path.write_bytes(bytes(data))


def victims(out: Path, count: int, draw: random.Random) -> list[tuple[Path, str]]:
    """Pairs of a file of the folder and a kind of damage."""
    every = [(path, kind) for path in sorted(out.rglob("*")) if path.is_file() for kind in KINDS]
    return draw.sample(every, min(count, len(every)))


def test_a_resumed_run_with_a_damaged_file_is_right_or_says_so(forks, undisturbed, tmp_path, tally):
    """The run was killed in the middle."""
    want, operations, _, _ = undisturbed
    out, saved, draw = tmp_path / "run", tmp_path / "saved", random.Random(7)
    forks.run(*arguments(out), fault={"kind": "crash", "root": str(out), "at": operations * 5 // 6})
    assert len(list((out / "checkpoints").glob("0*"))) >= 2
    shutil.copytree(out, saved)
    for path, kind in victims(out, cases(3, 500), draw):
        restore(saved, out)
        harm(path, kind, draw)
        ended = forks.run("run", "--resume", out, "--quiet")
        held = ended.clear and (ended.status != 0 or result(out) == want)
        tally.case(held, f"{kind} {path.relative_to(out)}: {ended.status} {ended.err[-300:]}")
    tally.check()


def test_a_finished_run_with_a_damaged_file_is_right_or_says_so(forks, undisturbed, tmp_path, tally):
    """Resuming it writes damaged results again; a report says what is damaged."""
    want, _, finished, _ = undisturbed
    saved, draw = tmp_path / "saved", random.Random(8)
    shutil.copytree(finished, saved)
    try:
        for path, kind in victims(finished, cases(2, 200), draw):
            restore(saved, finished)
            harm(path, kind, draw)
            report = forks.run("report", finished, "--no-plots", "--out", tmp_path / "report.html")
            ended = forks.run("run", "--resume", finished, "--quiet")
            held = report.clear and ended.clear and (ended.status != 0 or result(finished) == want)
            tally.case(held, f"{kind} {path.name}: {report.err[-300:]} {ended.status} {ended.err[-300:]}")
    finally:
        restore(saved, finished)
    tally.check()


def test_results_are_read_as_they_were_written_or_refused(undisturbed, tmp_path, tally):
    """In this process, so that many bytes can be tried."""
    folder, draw = undisturbed[2], random.Random(9)

    def content(place: Path) -> tuple:
        tables = [{name: c.tobytes() for name, c in one.items()} for one in (read_metrics(place), read_clients(place))]
        params = {name: a.tobytes() for name, a in read_params(place / PARAMS).arrays.items()}
        return *tables, params, read_summary(place)

    want = content(folder)
    for i in range(cases(150, 3000)):
        name = ("metrics.parquet", "clients.parquet", "summary.json", PARAMS)[i % 4]
        shutil.copytree(folder, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "states"))
        kind = ("flip", "flip", "cut", "zero", "empty")[i % 5]
        harm(tmp_path / "copy" / name, kind, draw)
        try:
            held = content(tmp_path / "copy") == want
        except ConfigError as error:
            held = name in str(error)
        tally.case(held, f"{kind} {name}")
        shutil.rmtree(tmp_path / "copy")
    tally.check()


def test_trials_are_read_as_they_were_written_or_refused(tmp_path, tally):
    path, draw = tmp_path / "trials.parquet", random.Random(10)
    rows = [{"point": i, "seed": 0, "lr": 0.1 * i, "name": "a", "score": None, "curve": [0.5, None]} for i in range(9)]
    write_trials(path, rows, {"kind": "sweep"})
    whole, want = path.read_bytes(), read_trials(path)
    for _ in range(cases(100, 2000)):
        path.write_bytes(whole)
        harm(path, draw.choice(KINDS[:3]), draw)
        try:
            held = read_trials(path) == want
        except ConfigError as error:
            held = "trials.parquet" in str(error)
        tally.case(held, "trials")
    tally.check()


@pytest.mark.parametrize("text", [b'{"kind": "swe', b"\xff", b"7"])
def test_trials_whose_description_is_damaged_run_again(tmp_path, text):
    path = tmp_path / "trials.parquet"
    write_trials(path, [{"point": 0, "seed": 0}], {"kind": "sweep"})
    write_table(path, read_table(path).replace_schema_metadata({"fedbraid": text}))
    with pytest.raises(ConfigError, match=r"trials\.parquet, it is damaged"):
        read_trials(path)
    with told("Its trials run again"):
        assert _rows_so_far(path) == []


def test_no_part_of_a_configuration_is_another_one(tmp_path, tally):
    """A truncated config.toml trained the default, with the exit status 0."""
    config = load_config(
        settings=["rounds=50", "algorithm.name=fedavg", "algorithm.client_lr=0.25", "checkpoint.every=50"]
    )
    write_config(tmp_path, config)
    path = tmp_path / "config.toml"
    sealed, older = path.read_bytes(), dump(config).encode()  # an older version wrote no checksum
    for whole in (sealed, older):
        path.write_bytes(whole)
        assert read_config(tmp_path) == config
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            try:
                held = read_config(tmp_path) == config
            except ConfigError as error:
                held = "config.toml" in str(error)
            tally.case(held, f"{length} of {len(whole)} bytes")
    draw = random.Random(11)
    for _ in range(cases(200, 2000)):
        path.write_bytes(sealed)
        harm(path, "flip", draw)
        try:
            held = read_config(tmp_path) == config
        except ConfigError:
            held = True
        tally.case(held, "flip")
    tally.check()


FIRST = {"c": np.arange(3, dtype=np.float32)}


@pytest.mark.parametrize("kind", ["flip", "zero", "cut"])
def test_a_damaged_client_state_is_refused_with_the_client(tmp_path, kind):
    store = HostStates(FIRST, 10, tmp_path)
    store.write(np.array([4, 7]), {"c": np.ones((2, 3), np.float32)})
    saved, records = store.export(), tmp_path / "states.bin"
    data = bytearray(records.read_bytes())
    data[12:] = {"flip": bytes([data[12] ^ 4]) + data[13:], "zero": bytes(12), "cut": b""}[kind]
    records.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError, match=r"client 7 in .*states\.bin.*Resume"):
        store.read(np.arange(10))
    again = HostStates(FIRST, 10, tmp_path)
    again.restore(saved)
    assert again.read(np.array([4]))["c"].tolist() == [[1, 1, 1]]
    with pytest.raises(checkpoint.CheckpointError, match=r"client 7"):
        again.read(np.array([7]))


def test_a_record_that_was_not_written_is_refused(tmp_path):
    """An old record at the right place has a valid checksum of its own: the checkpoint knows the newer one."""
    store = HostStates(FIRST, 10, tmp_path)
    store.write(np.array([4]), {"c": np.ones((1, 3), np.float32)})
    before = (tmp_path / "states.bin").read_bytes()
    store.write(np.array([4]), {"c": np.full((1, 3), 2, np.float32)})
    saved = store.export()
    (tmp_path / "states.bin").write_bytes(before)
    again = HostStates(FIRST, 10, tmp_path)
    again.restore(saved)
    with pytest.raises(checkpoint.CheckpointError, match="client 4"):
        again.read(np.array([4]))


def test_zeros_in_client_states_do_not_resume_to_a_wrong_model(tmp_path):
    options = {"rounds": 4, "cohort": 3, "devices": 1, "states_in": tmp_path / "states"}
    saving = Checkpoints(tmp_path / "saved", every=2)
    early = {"checkpoints": saving, "on_progress": lambda progress: progress.round >= 2}
    simulate(counting(), jnp.float32(2.0), clients(), **early, **options)
    records = tmp_path / "states" / "states.bin"
    records.write_bytes(bytes(records.stat().st_size))
    with told("not used"), pytest.raises(checkpoint.CheckpointError, match=r"state of client \d.*delete .*saved"):
        simulate(counting(), jnp.float32(2.0), clients(), checkpoints=saving._replace(resume=True), **options)


def test_states_of_an_older_version_are_used_with_a_notice(tmp_path):
    store = HostStates(FIRST, 10, tmp_path)
    store.write(np.array([4]), {"c": np.ones((1, 3), np.float32)})
    saved = {key: value for key, value in store.export().items() if key != "checksums"}
    again = HostStates(FIRST, 10, tmp_path)
    with told("older version without checksums"):
        again.restore(saved)
    assert again.read(np.array([4]))["c"].tolist() == [[1, 1, 1]]


def test_a_damaged_checkpoint_is_passed_over_with_a_notice(tmp_path):
    options = {"rounds": 6, "cohort": 3, "devices": 1}
    whole = simulate(counting(), jnp.float32(2.0), clients(), **options)
    saving = Checkpoints(tmp_path, every=2)
    stop = {"on_progress": lambda progress: progress.round >= 4}
    simulate(counting(), jnp.float32(2.0), clients(), checkpoints=saving, **stop, **options)
    newest = max(tmp_path.glob("0*"))
    (newest / "manifest.json").write_text("{")
    with told(f"{newest.name} is damaged and is not used"):
        resumed = simulate(counting(), jnp.float32(2.0), clients(), checkpoints=saving._replace(resume=True), **options)
    assert np.asarray(resumed.params).tobytes() == np.asarray(whole.params).tobytes()
    for place in tmp_path.glob("0*"):
        (place / "manifest.json").unlink()
    with told("starts from its first round"):  # no good one is left
        resumed = simulate(counting(), jnp.float32(2.0), clients(), checkpoints=saving._replace(resume=True), **options)
    assert np.asarray(resumed.params).tobytes() == np.asarray(whole.params).tobytes()
    with collecting() as texts:
        assert len(list(checkpoint.good_ones(tmp_path))) == checkpoint.KEEP
    assert not texts
