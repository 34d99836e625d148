"""Memory is what this process may use: limits of control groups and of the address space count."""

import resource

import pytest

from fedbraid.experiment import ConfigError, build, load_config
from fedbraid.simulation import devices, use_cores
from told import told

GB = 1 << 30


def groups(root, text, files):
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    for name, value in files.items():
        place = root / "sys/fs/cgroup" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("text", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": 3 * GB, "a/memory.current": GB}, [(3 * GB, GB)]),
        ("0::/\n", {"memory.max": 2 * GB, "memory.current": 5}, [(2 * GB, 5)]),
        ("0::/a\n", {"a/memory.max": "max"}, []),
        (
            "9:cpu:/x\n4:cpuset,memory:/job\n",
            {"memory/job/memory.limit_in_bytes": GB, "memory/job/memory.usage_in_bytes": 7},
            [(GB, 7)],
        ),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": 9223372036854771712}, []),
        ("nonsense\n::\n", {}, []),
    ],
)
def test_limits_of_control_groups_are_read(tmp_path, text, files, expected):
    assert devices._group_limits(groups(tmp_path, text, files)) == expected


def test_the_smallest_limit_counts(monkeypatch):
    monkeypatch.setattr(devices, "_group_limits", lambda: [(3 * GB, GB), (2 * GB, GB // 2)])
    import jax

    assert devices.total_memory(jax.local_devices(backend="cpu")[0]) == 2 * GB
    assert devices.host_memory() <= GB + GB // 2
    with pytest.raises(ConfigError, match=r"has 500,0.* parameters, .*need .* and this machine has 2") as caught:
        build(load_config(settings=["model.name=softmax_regression", "data.clients=4", "cohort=2", HUGE]))
    assert len(str(caught.value).splitlines()) == 1


HUGE = "model.classes=7692308"  # 65 numbers a class: 500,000,020 parameters, 2 GB


def test_a_limit_of_the_address_space_counts(monkeypatch):
    """As ``ulimit -v`` sets it; this process has taken part of it."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (6 << 40, 6 << 40))
    assert devices._address_space() < 6 << 40
    taken = (6 << 40) - devices._address_space()
    monkeypatch.setattr(resource, "getrlimit", lambda which: (taken + GB // 4, taken + GB // 4))
    assert devices.host_memory() <= GB // 4
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert devices._address_space() is None


def test_states_that_cannot_fit_are_refused(monkeypatch):
    monkeypatch.setattr(devices, "_group_limits", lambda: [(20_000, 0)])
    settings = ["model.name=softmax_regression", "algorithm.name=scaffold", "data.clients=20", "engine.states_in=host"]
    with pytest.raises(ConfigError, match=r"20 clients keep 2.6 kB each, 52 kB, and there are 20 kB"):
        build(load_config(settings=settings))


def test_more_devices_than_a_machine_can_use():
    with pytest.raises(ValueError, match="devices = 1000: this machine has"):
        use_cores(1000)


def test_a_deadline_that_loses_every_upload_is_said():
    with told("arrival.deadline = 0.01: fewer than 1 in 1,000 uploads arrive in time"):
        build(load_config(settings=["arrival.deadline=0.01", "model.hidden=[4]"]))
    build(load_config(settings=["arrival.deadline=60.0", "model.hidden=[4]"]))
