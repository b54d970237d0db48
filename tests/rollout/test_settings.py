"""Settings of rollouts: `auto` values, and what follows from the others."""

from tests.rollout import games
from twinkle_jax.rollout import LocalEngine, MultiTurn, RolloutConfig, SingleTurn
from twinkle_jax.sampler import Sampling


def test_auto_values_follow_from_the_others():
    settings = RolloutConfig().resolved()
    assert (settings.max_new_tokens, settings.max_episode_tokens) == (512, 1024 + 6 * 512)
    assert RolloutConfig().resolved(max_new_tokens=8).max_episode_tokens == 1024 + 6 * 8
    short = RolloutConfig(max_prompt_tokens=10, max_turns=3, max_new_tokens=5).resolved(8)
    assert (short.max_new_tokens, short.max_episode_tokens) == (5, 10 + 3 * 5)
    assert RolloutConfig(max_episode_tokens=99).resolved().max_episode_tokens == 99
    assert short.resolved() == short


def test_every_filter_is_a_setting():
    settings = RolloutConfig(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, repetition_penalty=1.2)
    assert settings.sampling([7]) == Sampling(0.5, 3, 0.9, 0.1, 1.2, stop_tokens=[7])


def test_an_episode_may_take_a_row_a_turn():
    assert RolloutConfig(max_turns=4).rows_each == 1
    assert RolloutConfig(max_turns=4, history="template").rows_each == 4


def test_sources_resolve_their_settings_and_change_them_in_a_copy():
    engine = LocalEngine(None, None)
    for source in (MultiTurn(engine, games.Guess), SingleTurn(engine, None)):
        assert source.settings == RolloutConfig().resolved()
        greedy = source.with_settings(temperature=0.0, num_samples=1)
        assert (greedy.settings.temperature, greedy.settings.num_samples) == (0.0, 1)
        assert source.settings.temperature == 1.0
