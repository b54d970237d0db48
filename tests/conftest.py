"""Strict JAX for every test: eight virtual CPU devices, no implicit promotion, no reused keys.

Tests compile thousands of small programs and run each a few times, so the compiler does not
optimise them, which saves half of the time. It does for the values of advantages and of tokens'
log-probabilities, for what must be exact and for comparisons with Twinkle and transformers (marked
`as_users_compile`), and under JAX_DISABLE_MOST_OPTIMIZATIONS=0 everywhere but in tests of whole
decoders (marked `quick_compile`, or compiled with `QUICK`).
"""

import gc
import os

import hypothesis
import jax
import jaxlib
import pytest

_UNMARKED = pytest.StashKey[bool]()  # whether tests without a marker leave programs unoptimised


def pytest_configure(config):
    """Set JAX up before it makes devices; measurements get it as a user has it, on one device."""
    jax.config.update("jax_platforms", "cpu")
    config.stash[_UNMARKED] = False
    if any("benchmarks" in str(argument) for argument in config.args):
        return
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        jax.config.update("jax_disable_most_optimizations", True)
    config.stash[_UNMARKED] = jax.config.values["jax_disable_most_optimizations"]
    if jaxlib.__version__.startswith("0.10."):
        _emit_loops_the_older_way()
    # Tests leave little garbage among many programs that live on: do not look for it so often.
    gc.set_threshold(50_000, 20, 100)
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_debug_key_reuse", True)


def _emit_loops_the_older_way():
    """Have jaxlib 0.10, the oldest supported, compile in two thirds of the time.

    It has two ways to turn fused loops into machine code, and takes the slower one by default.
    Later versions have that one alone, so all tests run with it there; here those do that want
    what users compile. JAX has no public setting that a test could change and change back.
    """
    from jax._src import compiler

    real = compiler.get_compile_options

    def quicker(*arguments, env_options_overrides=None, **options):
        if jax.config.values["jax_disable_most_optimizations"]:
            older = {"xla_cpu_use_fusion_emitters": False}
            env_options_overrides = older | (env_options_overrides or {})
        return real(*arguments, env_options_overrides=env_options_overrides, **options)

    compiler.get_compile_options = quicker


def _leaves_unoptimised(item):
    if item.get_closest_marker("as_users_compile"):
        return False
    return item.get_closest_marker("quick_compile") is not None or item.config.stash[_UNMARKED]


def pytest_collection_modifyitems(items):
    """Keep tests that compile alike together; the order is otherwise that of the files."""
    items.sort(key=_leaves_unoptimised, reverse=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Optimise what the test and its fixtures compile, or do not, as its marker says."""
    unoptimised = _leaves_unoptimised(item)
    if jax.config.values["jax_disable_most_optimizations"] != unoptimised:
        jax.clear_caches()  # they do not tell one from the other
        jax.config.update("jax_disable_most_optimizations", unoptimised)


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
# drawn on every run, and TWINKLE_JAX_EXAMPLES=1000 searches further.
hypothesis.settings.register_profile(
    "twinkle_jax",
    deadline=None,
    derandomize=True,
    max_examples=int(os.environ.get("TWINKLE_JAX_EXAMPLES", "40")),
)
hypothesis.settings.load_profile("twinkle_jax")
