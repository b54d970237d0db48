"""Runs on several devices are runs on one; after warm-up nothing compiles, little is waited for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.training import small_run
from tests.training.runs import lines
from twinkle_jax.model import make_mesh
from twinkle_jax.training import (
    EvaluationConfig,
    MeshConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
    UpdateConfig,
    train,
)

STEPS = 6
CONVERSIONS = ("__array__", "__bool__", "__float__", "__int__", "item", "tolist")
SEEN = ("reward", "completions/mean_length", "entropy", "grad_norm", "loss", "eval/accuracy")


def config(folder, directory, **changes):
    settings = {
        "steps": STEPS,
        "update": UpdateConfig(mini_batches=1, advantage="reinforce_plus_plus"),
        "optimizer": OptimizerConfig(learning_rate=1e-3, warmup_steps=1),
        "evaluation": EvaluationConfig(every=3, problems=3, path=str(folder / "task.jsonl")),
    }
    return small_run.config(folder, directory, **(settings | changes))


class HostReads:
    """Counts how often Python waits for the devices: `device_get`, or a conversion of one array.

    NumPy reads an array on one CPU device as a buffer, unseen, and has one on several convert
    itself: so the run that is watched has two devices, and an estimator that works there.
    """

    def __init__(self):
        self.count = 0
        self.inside = False
        self.patches = pytest.MonkeyPatch()

    def __enter__(self):
        array_type = type(jnp.zeros(()))
        for owner, name in [(jax, "device_get"), *((array_type, name) for name in CONVERSIONS)]:
            self.patches.setattr(owner, name, self.counted(getattr(owner, name)))
        return self

    def __exit__(self, *error):
        self.patches.undo()

    def counted(self, read):
        def counted_read(*args, **kwargs):
            if self.inside:  # device_get has its arrays convert themselves
                return read(*args, **kwargs)
            self.count, self.inside = self.count + 1, True
            try:
                return read(*args, **kwargs)
            finally:
                self.inside = False

        return counted_read


def test_reads_are_counted_in_whatever_way_they_are_made():
    mesh = make_mesh(data=2)
    everywhere = jax.NamedSharding(mesh, jax.P())
    ways = [np.asarray, np.array, jax.device_get, lambda x: x.tolist(), lambda x: float(x.sum())]
    ways += [lambda x: bool((x > 1).any()), lambda x: jax.device_get((x, x + 1))]
    for way in ways:
        x = jax.device_put(jnp.arange(4.0), everywhere)
        with HostReads() as reads:
            way(x)
        assert reads.count == 1, way


class Watch:
    """A reward that writes down how often it was called, and what had happened by then."""

    def __init__(self, reads, compilations):
        self.reads, self.compilations = reads, compilations
        self.seen = []

    def __call__(self, trajectories, truths):
        self.seen.append((self.reads.count, len(self.compilations)))
        return [float(len(t["messages"][-1]["content"]) < 3) for t in trajectories]


@pytest.fixture(scope="module")
def alone(folder):
    train(config(folder, folder / "alone"), reward=Watch(HostReads(), []))
    return folder / "alone"


def assert_same_but_for_rounding(got, expected):
    pairs = zip(lines(got), lines(expected), strict=True)
    for one, other in pairs:
        assert [x for x in SEEN if x in one] == [x for x in SEEN if x in other]
        for name in SEEN:
            assert one.get(name, 0) == pytest.approx(other.get(name, 0), rel=1e-3, abs=1e-5), name
    a, b = (load_file(run / "policy" / "model.safetensors") for run in (got, expected))
    for name, value in b.items():
        np.testing.assert_allclose(a[name], value, atol=2e-4, err_msg=name)


@pytest.mark.exhaustive
def test_two_devices_compile_nothing_after_warm_up_and_are_seldom_waited_for(
    folder, alone, tmp_path, compilations
):
    mesh = MeshConfig(data=2)
    # The same run once before: each shape of a micro-batch compiles when it first occurs.
    train(config(folder, tmp_path / "before", mesh=mesh), reward=Watch(HostReads(), []))
    with HostReads() as reads:
        watch = Watch(reads, compilations)
        train(config(folder, tmp_path / "run", mesh=mesh), reward=watch)
    steps = [1, 2, 3, 5, 6, 7]  # calls of the reward; the others are evaluations
    assert len(watch.seen) == STEPS + 4
    before, after = watch.seen[steps[-2]], watch.seen[steps[-1]]
    # The state of the sampler, its completions, and the metrics of the step.
    assert after[0] - before[0] <= 3
    assert watch.seen[-1][1] == watch.seen[0][1]
    assert_same_but_for_rounding(tmp_path / "run", alone)


MESHES = [
    MeshConfig(data=8),
    MeshConfig(fsdp=4),
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=2, fsdp=4, transfers="once"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_any_mesh_gives_the_same_run(folder, alone, tmp_path, mesh):
    train(config(folder, tmp_path / "run", mesh=mesh), reward=Watch(HostReads(), []))
    assert_same_but_for_rounding(tmp_path / "run", alone)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "update",
    [
        UpdateConfig(mini_batches=1, advantage="remax", kl_beta=0.1),
        UpdateConfig(
            mini_batches=2, micro_batch_tokens=64, dynamic_sampling=2, mask_truncated=True
        ),
    ],
)
def test_whatever_a_step_does_it_does_on_a_mesh(folder, tmp_path, update):
    for name, mesh in (("one", MeshConfig()), ("two", MeshConfig(fsdp=2, tensor=2))):
        run_config = config(folder, tmp_path / name, update=update, steps=3, mesh=mesh)
        train(run_config, reward=Watch(HostReads(), []))
    assert_same_but_for_rounding(tmp_path / "two", tmp_path / "one")


@pytest.mark.exhaustive
def test_a_run_goes_on_with_other_devices(folder, alone, tmp_path):
    run_config = config(folder, tmp_path / "run", mesh=MeshConfig(fsdp=2), steps=3)
    train(run_config, reward=Watch(HostReads(), []))
    train(
        config(folder, tmp_path / "run", mesh=MeshConfig(data=4), resume="auto"),
        reward=Watch(HostReads(), []),
    )
    assert_same_but_for_rounding(tmp_path / "run", alone)


@pytest.mark.exhaustive
def test_the_policy_that_is_built_in_can_be_spread(tmp_path):
    run_config = TrainConfig(
        output_dir=str(tmp_path / "run"),
        steps=1,
        warm_start=0.0,
        level=1,
        rollout=RolloutConfig(prompts=4, num_samples=2),
        evaluation=EvaluationConfig(every=0, problems=3),
        mesh=MeshConfig(data=2, tensor=2),
    )
    assert train(run_config)["steps"] == 1


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("mesh.data", MeshConfig(data=0)),
        ("mesh.data times mesh.fsdp", MeshConfig(data=3)),
        ("mesh", MeshConfig(data=4, tensor=4)),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(folder, tmp_path, name, mesh):
    with pytest.raises(ValueError, match=name):
        train(config(folder, tmp_path / "run", mesh=mesh))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("own", [True, False])
def test_a_tensor_axis_that_does_not_divide_the_heads_is_refused_before_a_step(
    folder, tmp_path, own
):
    changes = {"mesh": MeshConfig(tensor=4)}
    if not own:
        changes |= {"model": None, "task": "arithmetic", "reward": None, "warm_start": 0.0}
        changes |= {"evaluation": EvaluationConfig(every=0)}
    scorer = small_run.Scorer()
    with pytest.raises(ValueError, match=r"mesh\.tensor must divide .*\[1, 2\], got 4"):
        train(config(folder, tmp_path / "run", **changes), reward=scorer if own else None)
    assert not scorer.calls and not (tmp_path / "run" / "config.json").exists()
