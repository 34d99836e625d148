"""What all tests share: four host devices, a compilation cache, and float64 on request."""

import os

# four devices on any machine; tests compile far more than they compute, so let the compiler do less
FLAGS = "force_host_platform_device_count=4 backend_optimization_level=0 llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in FLAGS.split()))

import jax
import pytest
from hypothesis import settings

# the same tiny programs are compiled again and again by many tests: share them, within the run and between runs
jax.config.update("jax_compilation_cache_dir", os.environ.get("FEDBRAID_TEST_CACHE", ".pytest_cache/jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
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
