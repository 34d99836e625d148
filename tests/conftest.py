"""Set-up of all tests: four host devices, a compilation cache, float64 on request, and how workers share the tests."""

import gc
import importlib.util
import mmap
import os
import re
from pathlib import Path

# four devices on any machine; tests mostly compile, so use cheaper compiler flags
FLAGS = "force_host_platform_device_count=4 backend_optimization_level=0 llvm_disable_expensive_passes=true"
# the older code generator compiles in half the time; the tests of `fedbraid run` use the default one, as users do
CHEAPER = "cpu_use_fusion_emitters=false cpu_parallel_codegen_split_count=1"


def known(flags: str) -> list[str]:
    """The flags that this jaxlib has: an unknown flag in XLA_FLAGS ends the process."""
    found = importlib.util.find_spec("jaxlib")
    assert found is not None
    assert found.origin is not None
    largest = max(Path(found.origin).parent.iterdir(), key=lambda place: place.stat().st_size)
    with largest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        # between zero bytes: the names of removed flags are still part of a longer text
        names = [(flag, f"\0xla_{flag.partition('=')[0]}\0".encode()) for flag in flags.split()]
        return [flag for flag, name in names if library.find(name) >= 0]


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several workers share the cores, so NumPy uses one thread
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in [*FLAGS.split(), *known(CHEAPER)])

import jax
import pytest
from hypothesis import settings

import quick_random

# many tests compile the same small programs: cache them, within a test run and between test runs
# (an absolute path: some tests work in another folder)
CACHE = Path(os.environ.get("FEDBRAID_TEST_CACHE", ".pytest_cache/jax")).resolve()
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
quick_random.install(CACHE.parent / "random")

# the same examples in every run, so that a failure is caused by the change; HYPOTHESIS_PROFILE=random draws new ones
settings.register_profile("same", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture
def x64():
    """Float64 during one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict():
    """No dtype is converted implicitly."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session", autouse=True)
def _told_that_noise_is_seeded():
    """Many tests simulate private algorithms, and lookahead with several clients; a process is told only once."""
    from fedbraid.simulation.rounds import say_fewer_clients, say_noise_is_seeded
    from told import collecting

    with collecting():
        say_noise_is_seeded()
        say_fewer_clients(1)  # lookahead


@pytest.fixture(autouse=True)
def _only_expected_notices():
    """An unexpected notice (see tests/told.py) fails the test that caused it."""
    from told import collecting

    with collecting() as texts:
        yield
    assert not texts, f"unexpected notices: {texts}"


# a test of one row of the zoo: its id ends with the row, or with the row and a number
ROW = re.compile(r"tests/(?:test_laws|flower/test_zoo)\.py::.*\[(?:.*-)?((?:transform:)?[a-z_]+)(?::\d+)?\]$")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``, all tests of a file, or of a row of the zoo, run on one worker: they share programs and fixtures."""
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            row = ROW.search(nodeid)
            return row[1] if row else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # see pytest_collection_modifyitems
    return Sharing(config, log)


def pytest_collection_modifyitems(items):
    """Rehearsals first: they mostly wait while another worker computes. Rows of the zoo last: many and small."""
    rows: dict[str, int] = {}

    def place(item) -> tuple[bool, int]:
        row = ROW.search(item.nodeid)
        number = rows.setdefault(row[1], len(rows) + 1) if row else 0  # the tests of a row are consecutive
        return not item.path.match("flower/test_rehearsal.py"), number

    items.sort(key=place)


def pytest_collection_finish():
    """Exclude the objects imported so far from garbage collection, and collect less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
