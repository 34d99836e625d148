"""What all tests share: four host devices, a compilation cache, float64 on request, and who runs what beside whom."""

import gc
import importlib.util
import mmap
import os
import re
from pathlib import Path

# four devices on any machine; tests compile far more than they compute, so let the compiler do less
FLAGS = "force_host_platform_device_count=4 backend_optimization_level=0 llvm_disable_expensive_passes=true"
# the older code generator takes half the time to compile; `fedbraid run` as users run it is tested with the default one
CHEAPER = "cpu_use_fusion_emitters=false cpu_parallel_codegen_split_count=1"


def known(flags: str) -> list[str]:
    """Those that this jaxlib has: an unknown one in XLA_FLAGS ends the process."""
    found = importlib.util.find_spec("jaxlib")
    assert found is not None
    assert found.origin is not None
    largest = max(Path(found.origin).parent.iterdir(), key=lambda place: place.stat().st_size)
    with largest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as library:
        return [flag for flag in flags.split() if library.find(f"xla_{flag.partition('=')[0]}".encode()) >= 0]


os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's threads wait for each other where workers share the cores
os.environ["FEDBRAID_CACHE"] = ".pytest_cache/plans"  # not what the user's own runs were tuned to
if "XLA_FLAGS" not in os.environ:
    os.environ["XLA_FLAGS"] = " ".join(f"--xla_{flag}" for flag in [*FLAGS.split(), *known(CHEAPER)])

import jax
import pytest
from hypothesis import settings

# the same tiny programs are compiled again and again by many tests: share them, within the run and between runs
jax.config.update("jax_compilation_cache_dir", os.environ.get("FEDBRAID_TEST_CACHE", ".pytest_cache/jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# the same examples in every run, so that a failure is of the change at hand; HYPOTHESIS_PROFILE=random looks further
settings.register_profile("same", derandomize=True)
settings.register_profile("random")
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture
def x64():
    """Float64 for the length of one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def strict():
    """No dtype is converted implicitly."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(autouse=True)
def _only_expected_notices():
    """A notice that no test expects (see tests/told.py) fails the test that caused it."""
    from told import collecting

    with collecting() as texts:
        yield
    assert not texts, f"unexpected notices: {texts}"


# a test of one row of the zoo: its id ends with the row, or with the row and a number
ROW = re.compile(r"tests/(?:test_laws|flower/test_zoo)\.py::.*\[(?:.*-)?((?:transform:)?[a-z_]+)(?::\d+)?\]$")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """With ``-n``: a file is one worker's, for what its tests share is made once; of the zoo, a row is."""
    from xdist.scheduler import LoadScopeScheduling

    class Sharing(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            row = ROW.search(nodeid)
            return row[1] if row else nodeid.partition("::")[0]

    config.option.loadscopereorder = False  # see pytest_collection_modifyitems
    return Sharing(config, log)


def pytest_collection_modifyitems(items):
    """Rehearsals first: they mostly wait, while the other worker computes. Rows last: they are small and many."""
    rows: dict[str, int] = {}

    def place(item) -> tuple[bool, int]:
        row = ROW.search(item.nodeid)
        number = rows.setdefault(row[1], len(rows) + 1) if row else 0  # a row's tests follow each other: they share
        return not item.path.match("flower/test_rehearsal.py"), number

    items.sort(key=place)


def pytest_collection_finish():
    """What is imported by now stays to the end, so garbage collection need not look at it again, and is rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
