"""What a run takes of a device is counted before its first step, and settings are made to fit."""

import dataclasses
import functools
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.families import config_of, each, params_of
from tests.training import small_run
from twinkle_jax.model import init_params, shard_like_params
from twinkle_jax.rollout import RolloutConfig
from twinkle_jax.training import (
    EvaluationConfig,
    MeshConfig,
    TrainConfig,
    UpdateConfig,
    begin_training,
    make_recipe,
    memory,
    small_policy,
    train,
)
from twinkle_jax.training.config import automatic_budget, with_setting
from twinkle_jax.training.memory import (
    device_memory,
    evaluation_memory,
    fit,
    fit_evaluation,
    rollout_memory,
    update_memory,
)
from twinkle_jax.training.packing import plan
from twinkle_jax.training.run_directory import with_choices
from twinkle_jax.training.state import find_devices

POLICY = small_policy(0)
GIB = 2**30


def begun(slots=None, data=1, fsdp=1, **update):
    config = TrainConfig(
        rollout=RolloutConfig(
            prompts=8, num_samples=2, max_new_tokens=64, max_prompt_tokens=64, slots=slots
        ),
        update=UpdateConfig(**{"mini_batches": 1, "recompute": "layers", **update}),
        mesh=MeshConfig(data=data, fsdp=fsdp),
    )
    mesh = find_devices(data, fsdp, 1)
    policy = POLICY
    if mesh is not None:
        placed = jax.device_put(policy.params, shard_like_params(policy.params, mesh))
        policy = policy._replace(params=placed)
    recipe = make_recipe(config, policy, lambda trajectories, truths: [], mesh=mesh)
    return recipe, begin_training(policy.params, recipe.optimizer, mesh)


begun_once = functools.cache(lambda: begun()[0])
# Each of these compiles a program, which several tests ask the size of.
of_update = functools.cache(lambda **update: update_memory(*begun(**update)))
of_rollout = functools.cache(lambda slots=None: rollout_memory(*begun(slots)))


def bytes_of(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree))


SHAPE = POLICY.config.attention
LAYERS = POLICY.config.repeats * len(POLICY.config.block)
TOKEN = 2 * LAYERS * SHAPE.key_value_heads * SHAPE.head_dim * 4  # bytes of its keys and values


@pytest.mark.slow
def test_an_update_takes_its_state_and_more_with_more_tokens():
    needs = [of_update(micro_batch_tokens=tokens) for tokens in (256, 1024, 4096)]
    assert bytes_of(begun()[1]) < needs[0] < needs[1] < needs[2]
    # Four times the tokens take four times what follows tokens: the rest stays.
    assert needs[2] - needs[1] == pytest.approx(4 * (needs[1] - needs[0]), rel=0.1)
    kept = update_memory(*begun(micro_batch_tokens=4096, recompute="nothing"))
    assert kept > needs[2]
    with_reference = update_memory(*begun(micro_batch_tokens=256, kl_beta=0.1))
    assert with_reference - needs[0] >= bytes_of(POLICY.params)


@given(st.lists(st.integers(1, 128), min_size=8, max_size=8), st.integers(128, 600), st.booleans())
def test_no_micro_batch_has_more_places_than_are_counted(lengths, tokens, several):
    """Lines of shorter rows are narrower, and fill the budget where those of long ones do not."""
    recipe = begun_once()
    config = with_setting(recipe.config, "update.micro_batch_tokens", tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "takes_segments", lambda recipe: several)
        _, counted = memory._longest_micro_batch(recipe._replace(config=config))
    lengths = np.asarray(lengths, np.int32)
    for _, packing in plan(lengths, int(lengths.max()), tokens=tokens, several=several):
        assert packing.sources.size <= counted.sources.size


@pytest.mark.slow
def test_an_update_takes_the_experts_that_it_replays():
    """One byte each, of the rows of a mini-batch and of its lines."""
    config = config_of("qwen3_moe")
    policy = POLICY._replace(config=config, params=params_of("qwen3_moe"))

    def needed(replay_routing, memory=update_memory):
        made = TrainConfig(
            rollout=RolloutConfig(
                prompts=8, num_samples=2, max_new_tokens=64, max_prompt_tokens=64
            ),
            update=UpdateConfig(
                mini_batches=2,
                recompute="layers",
                micro_batch_tokens=256,
                replay_routing=replay_routing,
            ),
            model="served",
            task="task.jsonl",
        )
        recipe = make_recipe(made, policy, lambda trajectories, truths: [])
        return memory(recipe, begin_training(policy.params, recipe.optimizer, None))

    rows_and_time = 8 * 127
    assert (
        needed("trainer") - needed("none") >= rows_and_time * config.layers * config.experts.chosen
    )
    # Those that the sampler records: of all rows, in their slots and in what is returned.
    drawing = needed("sampler", rollout_memory) - needed("none", rollout_memory)
    assert drawing >= 2 * 2 * rows_and_time * config.layers * config.experts.chosen


@pytest.mark.slow
def test_an_update_takes_all_rows_of_an_episode():
    """Which has one for each turn where the template renders the conversation anew."""
    recipe, state = begun()

    def needed(history):
        rollout = dataclasses.replace(recipe.config.rollout, max_turns=8, history=history)
        config = dataclasses.replace(recipe.config, rollout=rollout, environment="x.py:X")
        return update_memory(recipe._replace(config=config), state)

    episodes = recipe.config.rollout.prompts * recipe.config.rollout.num_samples
    rows = episodes // recipe.config.update.mini_batches
    numbers = 4 * rows * recipe.config.longest_row  # bytes of one a token, at least
    assert needed("template") - needed("append") >= 5 * 7 * numbers


@pytest.mark.slow
def test_a_rollout_takes_its_caches():
    few, all_rows = of_rollout(4), of_rollout()
    assert all_rows - few >= 12 * 127 * TOKEN  # 16 rows of 64 + 64 - 1 tokens, or 4
    assert few > bytes_of(begun()[1])


@pytest.mark.slow
@pytest.mark.parametrize("turns", each([1, 3]))
def test_a_penalty_takes_a_copy_of_the_logits(turns):
    vocab, rows = 9000, 64
    config = dataclasses.replace(POLICY.config, vocab_size=vocab)
    policy = POLICY._replace(config=config, params=init_params(jax.random.key(0), config))

    def needed(penalty):
        made = TrainConfig(
            rollout=RolloutConfig(
                prompts=rows // 4, num_samples=4, max_new_tokens=4, max_prompt_tokens=4,
                max_turns=turns, repetition_penalty=penalty,
            ),
            update=UpdateConfig(mini_batches=1, recompute="layers", micro_batch_tokens=256),
            environment="x.py:X" if turns > 1 else None,
        )  # fmt: skip
        recipe = make_recipe(made, policy, lambda trajectories, truths: [])
        return rollout_memory(recipe, begin_training(policy.params, recipe.optimizer, None))

    assert needed(1.1) - needed(1.0) >= 0.9 * rows * vocab * 4


@pytest.mark.slow
def test_episodes_take_their_caches_twice_or_are_read_again():
    """Once where they stay between turns, once in slots; with fewer slots nothing stays."""
    recipe, state = begun()

    def with_turns(slots):
        rollout = dataclasses.replace(
            recipe.config.rollout, max_episode_tokens=256, max_turns=3, slots=slots
        )
        config = dataclasses.replace(recipe.config, rollout=rollout, environment="x.py:X")
        return rollout_memory(recipe._replace(config=config), state)

    kept, again = with_turns(None), with_turns(8)
    assert kept - again >= (2 * 16 - 8) * 255 * TOKEN
    assert again > of_rollout(8)  # episodes are longer than one turn


@pytest.mark.exhaustive
def test_devices_share_what_a_run_takes():
    shared = begun(micro_batch_tokens=1024, fsdp=8)
    assert update_memory(*shared) < 0.9 * of_update(
        micro_batch_tokens=1024
    )  # tokens of each device
    assert rollout_memory(*shared) < 0.5 * of_rollout()


@pytest.mark.slow
def test_settings_that_choose_themselves_are_made_to_fit():
    notes = []
    recipe, state = begun()
    budget = automatic_budget(recipe.config)
    assert recipe.config.update.micro_batch_tokens == budget
    limit = of_update(micro_batch_tokens=budget // 4)
    chosen = fit(recipe, state, limit, notes.append)
    assert chosen.update.micro_batch_tokens == budget // 4
    assert f"micro_batch_tokens {budget // 4}" in notes[-2]
    assert chosen.rollout.slots is None


@pytest.mark.slow
def test_evaluations_are_made_to_fit():
    """Of 256 problems, each with a prompt of its own, where a step has 8 prompts of 2 rows."""
    recipe, state = begun(micro_batch_tokens=256)
    needed = evaluation_memory(recipe, state)
    step = max(update_memory(recipe, state), of_rollout())
    assert needed - of_rollout() >= 200 * 127 * TOKEN
    notes = []
    unbounded = fit(recipe, state, needed, notes.append, evaluates=True)
    assert unbounded.evaluation.slots is None and notes[-1].startswith("evaluation.slots all: ")
    chosen = fit(recipe, state, (needed + step) // 2, notes.append, evaluates=True)
    assert chosen.rollout.slots is None and chosen.evaluation.slots in (64, 128)
    assert notes[-1].startswith(f"evaluation.slots {chosen.evaluation.slots}: ")
    assert fit(recipe, state, (needed + step) // 2, notes.append) == unbounded
    by_eight = dataclasses.replace(recipe.config.rollout, slots=8)
    few = recipe._replace(config=dataclasses.replace(recipe.config, rollout=by_eight))
    assert fit(few, state, needed, notes.append, evaluates=True).evaluation.slots == 8
    assert notes[-1].startswith("evaluation.slots 8: ")
    sampled = dataclasses.replace(recipe.config, evaluation=EvaluationConfig(pass_k=2))
    several = evaluation_memory(recipe._replace(config=sampled), state)
    assert several - needed >= 256 * 3 * 63 * TOKEN  # four completions of each prompt, not one
    given = dataclasses.replace(recipe.config, evaluation=EvaluationConfig(slots=256, problems=300))
    with pytest.raises(ValueError, match=r"evaluation\.slots must be at most"):
        fit(
            recipe._replace(config=given),
            state,
            (needed + step) // 2,
            notes.append,
            evaluates=True,
        )


@pytest.mark.slow
def test_an_evaluation_of_a_policy_alone_is_made_to_fit():
    """It takes what one of a run takes, without the state of an optimizer."""
    recipe, state = begun()
    needed = evaluation_memory(recipe, state) - bytes_of(state) + bytes_of(state.params)
    notes = []
    size = bytes_of(POLICY.params)
    judge = SimpleNamespace(params=POLICY.params)
    frozen = POLICY._replace(params={}, frozen=POLICY.params)
    for policy, judges in ((POLICY, []), (frozen, []), (POLICY, [judge, judge])):
        notes.clear()
        chosen = [
            fit_evaluation(recipe.config, policy, judges, limit, notes.append).evaluation.slots
            for limit in (needed + len(judges) * size, needed + len(judges) * size - 1)
        ]
        assert chosen == [None, 128]
    assert [note.split(":")[0] for note in notes] == [
        "evaluation.slots all",
        "evaluation.slots 128",
    ]
    with pytest.raises(ValueError, match=r"evaluation\.slots"):
        fit_evaluation(recipe.config, POLICY, [], size, notes.append)


@pytest.mark.slow
def test_what_is_recomputed_is_chosen_by_memory():
    recipe, state = begun(recompute="auto", micro_batch_tokens=4096)
    kept = of_update(recompute="elementwise", micro_batch_tokens=4096)
    assert of_update(micro_batch_tokens=4096) < kept
    for limit, expected in ((kept, "elementwise"), (kept - 1, "layers")):
        notes = []
        chosen = fit(recipe, state, limit, notes.append)
        assert chosen.update.recompute == expected
        assert chosen.update.micro_batch_tokens == 4096
        assert notes[0] == f"update.recompute {expected}"


@pytest.mark.slow
def test_a_run_resumes_with_what_it_chose(folder, tmp_path, capsys):
    """The same configuration again: what was left to choose is as it was, and not refused."""
    settings = small_run.config(
        folder,
        tmp_path,
        steps=1,
        update=small_run.update(recompute="auto"),
        mesh=MeshConfig(memory=4.0),
        evaluation=small_run.evaluation(folder, every=0),
    )
    train(settings)
    assert "evaluation.slots all: takes" in capsys.readouterr().out
    train(dataclasses.replace(settings, steps=2, resume="auto"))
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["steps"], saved["update"]["recompute"]) == (2, "elementwise")
    assert (saved["dtype"], saved["update"]["max_logp_diff"]) == ("float32", 1e-3)
    other = small_run.update(recompute="layers")
    with pytest.raises(ValueError, match="recompute"):
        train(dataclasses.replace(settings, update=other, resume="auto"))


@pytest.mark.exhaustive
def test_a_run_resumes_where_memory_is_known(folder, tmp_path):
    """It was refused for what it chose itself, and its config.json no longer fitted its steps."""
    settings = small_run.config(
        folder, tmp_path, steps=1, update=small_run.update(recompute="auto")
    )
    train(settings)
    known = dataclasses.replace(settings, steps=2, resume="auto", mesh=MeshConfig(memory=4.0))
    train(known)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert (saved["steps"], saved["update"]["recompute"]) == (2, "auto")
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match="the smallest takes"):
        train(dataclasses.replace(known, steps=3, mesh=MeshConfig(memory=1e-6)))
    assert (tmp_path / "config.json").read_text() == before


def test_a_chosen_budget_is_kept_and_a_given_one_is_not_replaced():
    config = begun()[0].config
    budget = automatic_budget(config)
    saved = dataclasses.asdict(config)
    saved["update"]["micro_batch_tokens"] = budget // 4
    assert with_choices(config, saved).update.micro_batch_tokens == budget // 4
    smaller = begun(micro_batch_tokens=budget // 2)[0].config
    assert with_choices(smaller, saved) == smaller


@pytest.mark.slow
def test_numbers_that_were_given_are_refused_where_they_do_not_fit():
    recipe, state = begun(micro_batch_tokens=512)
    limit = of_update(micro_batch_tokens=256)
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        fit(recipe, state, limit, lambda note: None)
    with pytest.raises(ValueError, match="micro_batch_tokens"):
        fit(recipe, state, 1000, lambda note: None)
    recipe, state = begun(slots=16, micro_batch_tokens=128)
    limit = max(update_memory(recipe, state), of_rollout(8))
    with pytest.raises(ValueError, match=r"rollout\.slots"):
        fit(recipe, state, limit, lambda note: None)


def test_a_cpu_says_nothing_of_its_memory():
    assert device_memory(None) is None
    assert device_memory(1.5) == int(1.5 * GIB)
