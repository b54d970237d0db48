"""Strict JAX for every test: eight virtual CPU devices, no implicit promotion, no reused keys.

Tests compile thousands of small programs and run each a few times, so by default the compiler is
asked not to optimise them, and what it makes is kept in `.pytest_cache` for the next time, which
takes half as long. `JAX_DISABLE_MOST_OPTIMIZATIONS=0` before the command compiles all of them anew
and as users do; `.ci/run` does so for the sweep over the advantages.
"""

import contextlib
import gc
import itertools
import os
import pathlib
import platform

import chex
import hypothesis
import jax
import jaxlib
import pytest


def pytest_configure(config):
    """Set JAX up before it makes devices; measurements get it as a user has it, on one device."""
    jax.config.update("jax_platforms", "cpu")
    if any("benchmarks" in str(argument) for argument in config.args):
        return
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        flags = [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_parallel_codegen_split_count=1"]
        if jaxlib.__version__.startswith("0.10."):  # half the time to compile; later ones lack it
            flags.append("--xla_cpu_use_fusion_emitters=false")
        os.environ["XLA_FLAGS"] = " ".join(flags)
        jax.config.update("jax_disable_most_optimizations", True)
        if hasattr(config, "cache"):  # not with -p no:cacheprovider
            kept = config.cache.mkdir(f"jax-{platform.node()}")  # programs are for one kind of CPU
            jax.config.update("jax_compilation_cache_dir", str(kept))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "JAX_TRACEBACK_FILTERING" not in os.environ:  # takes milliseconds for each error
        jax.config.update("jax_traceback_filtering", "off")
    # PyTorch's threads wait for each other by spinning, while other workers have the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_debug_key_reuse", True)


def pytest_collection():
    """Look for no garbage until all tests are there; what is there then stays until the end.

    They and their modules are a million objects, which would be gone through again and again; so
    would be another million, of what JAX has traced and compiled: seldom is enough.
    """
    gc.disable()


def pytest_collection_finish():
    gc.enable()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


MAPS = pathlib.Path("/proc/self/maps")
ended = itertools.count(1)


@pytest.fixture(autouse=True)
def forget_compiled_programs():
    """Drop compiled programs after every twentieth test, where there are many.

    Each one holds several of the 65,530 memory maps that Linux grants a process, and the compiler
    crashes when they are used up; kept together, those of all tests fill gigabytes besides.
    Linux takes a hundredth of a second to list them.
    """
    yield
    if next(ended) % 20:
        return
    if not MAPS.exists() or MAPS.read_text().count("\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@contextlib.contextmanager
def optimised():
    """Compile as users do, and nothing that another test compiled before.

    JAX does not compile a program again when this setting changes.
    """
    before = jax.config.read("jax_disable_most_optimizations")
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
        jax.clear_caches()


@pytest.fixture
def as_users_compile():
    """Compile a test's programs with optimisations, which all others go without."""
    with optimised():
        yield


@pytest.fixture(autouse=True)
def forget_traces():
    """Have `chex.assert_max_traces` count each test by itself."""
    chex.clear_trace_counter()


@pytest.fixture
def compilations():
    """Counts programs that XLA compiles while a test runs."""
    seen = []

    def listen(event, duration, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# Compiled functions are slow the first time, so no example has a deadline; the same examples are
# drawn on every run, and TWINKLE_JAX_EXAMPLES=1000 searches further; `.ci/further` draws 40.
hypothesis.settings.register_profile(
    "twinkle_jax",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("TWINKLE_JAX_EXAMPLES", "10")),
)
hypothesis.settings.load_profile("twinkle_jax")
