"""Gradients of a batch: against all logits at once, however it is cut, for every loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.loss.cases import POLICY_LOSSES as OBJECTS
from tests.model.families import config_of, each, params_of
from tests.model.training import ADAMW, accumulate, chosen, fresh, random_batch, relative, take
from twinkle_jax.data import Batch
from twinkle_jax.loss import GRPOLoss, Loss, LossOutput, PolicyMetrics, PPOValueLoss
from twinkle_jax.model import (
    Decoder,
    LoraConfig,
    hidden_states,
    output_logits,
    prefill,
    with_adapter,
)
from twinkle_jax.model.decoder.lora import init_adapter
from twinkle_jax.sampler import Conversations, generate, generate_many
from twinkle_jax.training import (
    StepSummary,
    add_summaries,
    apply_gradients,
    grad_step,
    score_batch,
    train_state,
)
from twinkle_jax.training.gradient import _grad_step, join_loss, loss_denominator, split_loss

BATCH = random_batch()
GRPO = OBJECTS["grpo"]  # most tests are not about the loss, and this one is compiled already


def naive(name, loss_fn, batch, temperature=1.0):
    """Loss and gradient from logits at every position, as one would write it down."""
    static, traced = split_loss(loss_fn)
    return _naive(params_of(name), config_of(name), static, traced, batch, temperature)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _naive(params, config, static, traced, batch, temperature):
    loss_fn = join_loss(static, traced)

    def loss(params):
        hidden = hidden_states(params, config, batch.tokens, batch.mask)
        logprobs = jax.nn.log_softmax(output_logits(params, config, hidden) / temperature)
        labels = jnp.where(batch.labels < 0, 0, batch.labels)
        picked = jnp.take_along_axis(logprobs, labels[..., None], axis=-1)[..., 0]
        entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=-1)
        return loss_fn(
            {"labels": batch.labels},
            {"logps": picked, "entropies": entropies},
            old_logps=batch.old_logps,
            ref_logps=batch.ref_logps,
            advantages=batch.advantages,
        ).loss

    return jax.value_and_grad(loss)(params)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text", "qwen2"]))
def test_loss_and_gradient_of_each_family(name):
    value, gradient = naive(name, GRPO, BATCH, 0.75)
    ours, (summary,) = accumulate(GRPO, [BATCH], name, temperature=0.75)
    np.testing.assert_allclose(summary.loss, value, rtol=1e-5)
    assert relative(ours, gradient) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", pytest.param("dapo", marks=pytest.mark.exhaustive)])
def test_micro_batches_change_nothing(loss):
    """One that divides by sequences, and one that divides by tokens; of different numbers."""
    full_batch, (summary,) = accumulate(OBJECTS[loss], [BATCH])
    parts = [take(BATCH, rows) for rows in (slice(3), slice(3, 4))]
    summed, summaries = accumulate(OBJECTS[loss], parts)
    assert relative(summed, full_batch) < 1e-6
    total = sum(s.loss_sum for s in summaries) / sum(s.denominator for s in summaries)
    np.testing.assert_allclose(total, summary.loss, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", OBJECTS)
def test_every_loss_against_all_logits_at_once(loss):
    full_batch, (summary,) = accumulate(chosen(loss), [BATCH])
    value, gradient = naive("qwen3", chosen(loss), BATCH)
    np.testing.assert_allclose(summary.loss, value, rtol=1e-5)
    assert relative(full_batch, gradient) < 2e-5
    for size in (1, 2):
        parts = [take(BATCH, slice(i, i + size)) for i in range(0, 4, size)]
        gradient, summaries = accumulate(chosen(loss), parts)
        assert relative(gradient, full_batch) < 1e-6
        total = sum(s.loss_sum for s in summaries) / sum(s.denominator for s in summaries)
        np.testing.assert_allclose(total, summary.loss, rtol=1e-6, atol=1e-7)


@pytest.mark.exhaustive
def test_rows_that_fill_up_and_garbage_under_the_mask_change_no_bit():
    loss_fn = OBJECTS["gspo"]  # which averages over sequences
    filled = jax.tree.map(lambda x: jnp.concatenate([x, x[:2]]), BATCH)
    filled = filled._replace(labels=filled.labels.at[4:].set(-100), rows=jnp.arange(6) < 4)
    one, (first,) = accumulate(loss_fn, [filled])
    dirty = {
        name: jnp.where(filled.labels < 0, jnp.nan, getattr(filled, name))
        for name in ("advantages", "old_logps", "ref_logps")
    }
    two, (second,) = accumulate(loss_fn, [filled._replace(**dirty)])
    for a, b in zip(jax.tree.leaves((one, first)), jax.tree.leaves((two, second)), strict=True):
        np.testing.assert_array_equal(a, b)
    full_batch, (summary,) = accumulate(loss_fn, [BATCH])
    assert first.denominator == summary.denominator == 4
    assert relative(one, full_batch) < 1e-6


@pytest.mark.exhaustive
def test_left_padding_with_a_mask_is_the_same():
    mask = jnp.arange(8)[None] < jnp.array([8, 7, 5, 6])[:, None]
    batch = BATCH._replace(labels=jnp.where(mask, BATCH.labels, -100))
    turn = jax.vmap(lambda x, kept: jnp.roll(x, 8 - jnp.sum(kept)))
    left = Batch(*(None if x is None else turn(x, mask) for x in batch))._replace(
        mask=turn(mask, mask)
    )
    one, (a,) = accumulate(GRPO, [batch])
    two, (b,) = accumulate(GRPO, [left])
    np.testing.assert_allclose(a.loss, b.loss, rtol=1e-6)
    assert relative(one, two) < 2e-6


def test_coefficients_are_traced_and_losses_compile_once():
    state, _ = grad_step(fresh(), BATCH, config_of("qwen3"), GRPO)
    count = _grad_step._cache_size()
    for number in (0.1, 0.3):
        other = dataclasses.replace(GRPO, epsilon=number, beta=number, entropy_coef=number)
        state, _ = grad_step(state, BATCH, config_of("qwen3"), other, temperature=number)
    assert _grad_step._cache_size() == count
    without = dataclasses.replace(GRPO, beta=0.0)  # which needs no reference: another program
    assert split_loss(without)[0] != split_loss(GRPO)[0] == split_loss(other)[0]


class Own(Loss):
    """A loss of a user's own, without fields or reduction: its denominator is the tokens."""

    def __call__(self, inputs, outputs, *, denominator=None, **kwargs):
        kept = inputs["labels"] != -100
        return LossOutput(-jnp.sum(jnp.where(kept, outputs["logps"], 0)) / denominator)


@pytest.mark.slow
def test_losses_of_ones_own():
    _, (summary,) = accumulate(Own(), [BATCH])
    assert float(summary.denominator) == summary.tokens
    assert float(summary.tokens) == np.sum(np.asarray(BATCH.labels) >= 0)
    assert summary.metrics is None
    assert summary.loss > 0


@dataclasses.dataclass(frozen=True)
class Shifted(GRPOLoss):
    """Another label for "no loss"."""

    ignore_index: int = -1


@pytest.mark.exhaustive
@pytest.mark.usefixtures("as_users_compile")
def test_other_labels_for_no_loss_are_the_losses_own_affair():
    settings = dataclasses.asdict(GRPO) | {"ignore_index": -1}
    one, _ = accumulate(Shifted(**settings), [BATCH])
    two, _ = accumulate(GRPO, [BATCH])
    assert relative(one, two) == 0


def test_parameters_that_are_frozen_get_no_gradient():
    params = jax.tree.map(jnp.copy, params_of("qwen3"))
    trained = {"norm": params.pop("norm")}
    state, summary = grad_step(train_state(trained), BATCH, config_of("qwen3"), GRPO, frozen=params)
    assert state.gradient_sum.keys() == {"norm"}
    full_batch, (full,) = accumulate(GRPO, [BATCH])
    np.testing.assert_allclose(summary.loss, full.loss, rtol=1e-6)
    assert (
        relative(state.gradient_sum["norm"]["scale"] / state.denominator, full_batch["norm"]) < 1e-5
    )


@pytest.mark.exhaustive
def test_adapters_under_vmap():
    """Several adapters over one frozen model: each computes what it computes alone."""
    config, frozen = config_of("qwen3"), params_of("qwen3")
    lora = LoraConfig(r=2, lora_dropout=0.5)
    frozen = with_adapter(frozen, config, lora)
    draw = jax.vmap(lambda key: jax.tree.map(lambda x: x + 0.1, init_adapter(key, config, lora)))
    adapters = draw(jax.random.split(jax.random.key(0), 3))

    def score(adapter):
        return score_batch(adapter, BATCH, config, frozen=frozen, with_entropy=True)

    def step(adapter):
        state, summary = grad_step(
            train_state(adapter), BATCH, config, GRPO, frozen=frozen, key=jax.random.key(1)
        )
        return state, summary

    scores, (state, summary) = jax.jit(lambda x: (jax.vmap(score)(x), jax.vmap(step)(x)))(adapters)
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], adapters)
        for actual, alone in zip(scores, score(one), strict=True):
            if alone is not None:
                np.testing.assert_allclose(actual[i], alone, atol=1e-5)
        alone, summary_alone = step(one)
        np.testing.assert_allclose(summary.loss_sum[i], summary_alone.loss_sum, rtol=1e-5)
        actual = jax.tree.map(lambda x, i=i: x[i], state.gradient_sum)
        assert relative(actual, alone.gradient_sum) < 1e-5


def test_a_batch_is_checked():
    with pytest.raises(TypeError, match="labels"):
        grad_step(fresh(), BATCH._replace(labels=jnp.zeros((4, 8))), config_of("qwen3"), GRPOLoss())


def test_labels_at_padding_do_not_count():
    """They would be scored by the hidden state of no token, and weigh as others do."""
    real = BATCH.labels != -100
    mask = jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 0  # up to and with the last label
    mask = mask.at[2].set(True)  # the row without labels
    clean = BATCH._replace(mask=mask)
    dirty = clean._replace(labels=jnp.where(mask, BATCH.labels, 7))
    (one, (summary,)), (two, (expected,)) = (accumulate(GRPO, [x]) for x in (dirty, clean))
    assert float(summary.tokens) == float(expected.tokens) == np.asarray(real).sum()
    assert relative(one, two) == 0
    scores = score_batch(params_of("qwen3"), dirty, config_of("qwen3")).logps
    assert not np.asarray(scores)[~np.asarray(mask)].any()


@pytest.mark.parametrize(
    ("advantages", "error"),
    [
        ([[1.0, None]], TypeError),
        (np.ones((1, 2), bool), TypeError),
        ([["1", "2"]], TypeError),
        ([[1.0, 2.0], [1.0]], ValueError),
    ],
)
def test_numbers_of_a_batch_are_numbers(advantages, error):
    batch = Batch(np.ones((1, 2), int), np.ones((1, 2), int), advantages=advantages)
    with pytest.raises(error, match="advantages must be"):
        grad_step(fresh(), batch, config_of("qwen3"), GRPO)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0)])
def test_an_empty_batch_is_refused(shape):
    empty = np.zeros(shape, int)
    with pytest.raises(ValueError, match="tokens must have at least one row and one position"):
        grad_step(fresh(), Batch(empty, empty), config_of("qwen3"), GRPO)


def test_what_holds_parameters_is_not_parameters():
    config, params = config_of("qwen3"), params_of("qwen3")
    decoder = Decoder(config, params)
    with pytest.raises(TypeError, match=r"state must be a TrainState, .* got dict"):
        grad_step(params, BATCH, config, GRPO)
    with pytest.raises(TypeError, match=r"config must be a DecoderConfig, .* got Batch"):
        grad_step(fresh(), config, BATCH, GRPO)
    with pytest.raises(TypeError, match=r"params must be .* got Decoder: pass its \.params"):
        train_state(decoder)
    for call in (
        lambda params, config: score_batch(params, BATCH, config),
        lambda params, config: hidden_states(params, config, BATCH.tokens),
        lambda params, config: prefill(params, config, BATCH.tokens, max_length=16),
        lambda params, config: generate(
            params, config, BATCH.tokens, None, jax.random.key(0), max_new_tokens=2
        ),
        lambda params, config: generate_many(
            params, config, [[1]], jax.random.key(0), max_new_tokens=2
        ),
        lambda params, config: Conversations(params, config, 2, max_length=16, max_new_tokens=2),
    ):
        with pytest.raises(TypeError, match=r"params must be .* got Decoder: pass its \.params"):
            call(decoder, config)
        with pytest.raises(TypeError, match="config must be a DecoderConfig"):
            call(params, {"model_type": "qwen3"})


def test_losses_that_are_refused():
    with pytest.raises(TypeError, match="loss_fn"):
        grad_step(fresh(), BATCH, config_of("qwen3"), "grpo")
    with pytest.raises(TypeError, match="loss_fn"):
        grad_step(fresh(), BATCH, config_of("qwen3"), GRPOLoss)
    with pytest.raises(TypeError, match="old_values"):
        grad_step(fresh(), BATCH, config_of("qwen3"), PPOValueLoss())
    # A function does not say what its sum is divided by, and a mean would be divided again.
    with pytest.raises(TypeError, match=r"divides_by.*get_loss"):
        grad_step(fresh(), BATCH, config_of("qwen3"), lambda inputs, outputs, **_: LossOutput(0.0))
    # Labels of token 7 would have no loss, and still count in what the loss is divided by.
    with pytest.raises(ValueError, match=r"ignore_index.*got 7"):
        grad_step(fresh(), BATCH, config_of("qwen3"), GRPOLoss(ignore_index=7))


def test_coefficients_may_be_arrays_of_numpy():
    static, traced = split_loss(dataclasses.replace(GRPO, epsilon=np.array(0.25)))
    assert hash(static) == hash(split_loss(GRPO)[0]) and traced["epsilon"] == 0.25


@pytest.mark.parametrize("temperature", [0, -1.0, np.nan])
def test_temperatures_that_are_refused(temperature):
    for call in (
        lambda: grad_step(fresh(), BATCH, config_of("qwen3"), GRPO, temperature=temperature),
        lambda: score_batch(params_of("qwen3"), BATCH, config_of("qwen3"), temperature=temperature),
    ):
        with pytest.raises(ValueError, match="temperature"):
            call()


def test_a_temperature_is_one_number():
    """As many as tokens would be one for each; any other number of them an error of the loss."""
    several = jnp.ones(BATCH.tokens.size)
    for call in (
        lambda: grad_step(fresh(), BATCH, config_of("qwen3"), GRPO, temperature=several),
        lambda: score_batch(params_of("qwen3"), BATCH, config_of("qwen3"), temperature=several),
    ):
        with pytest.raises(ValueError, match="temperature must be one number"):
            call()


@pytest.mark.parametrize("key", [0, jax.random.PRNGKey(0)])
def test_keys_that_are_refused(key):
    with pytest.raises(TypeError, match="key"):
        grad_step(fresh(), BATCH, config_of("qwen3"), GRPO, key=key)


def test_a_key_for_each_row_is_one_for_each():
    keys = jax.random.split(jax.random.key(0), 3)
    with pytest.raises(ValueError, match=r"key must be one key, or one for each of the 4 rows"):
        grad_step(fresh(), BATCH, config_of("qwen3"), GRPO, key=keys)


def test_summaries_add_up_and_each_token_weighs_the_same():
    def summary(loss_sum, denominator, tokens, *metrics):
        numbers = [jnp.float32(x) for x in (loss_sum, denominator, tokens)]
        return StepSummary(*numbers, PolicyMetrics(*map(jnp.float32, metrics)))

    a = summary(3, 2, 1, 0.0, 1.0, 0.5, 2.0, 0.8, 1.1)
    b = summary(1, 2, 3, 1.0, 0.0, 0.1, 4.0, 0.9, 1.5)
    both = add_summaries(a, b)
    assert (both.loss_sum, both.denominator, both.tokens, both.loss) == (4, 4, 4, 1)
    np.testing.assert_allclose(both.metrics, [0.75, 0.25, 0.2, 3.5, 0.8, 1.5], rtol=1e-6)
    # without tokens there is no ratio, and nothing to divide a loss by
    nothing = summary(0, 0, 0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    close = summary(1, 1, 1, 0.0, 0.0, 0.0, 0.0, 1.2, 1.3)
    for one, other in ((nothing, close), (close, nothing)):
        together = add_summaries(one, other).metrics
        np.testing.assert_allclose(together[-2:], [1.2, 1.3], rtol=1e-6)
    assert nothing.loss == 0
    assert add_summaries(nothing, nothing).metrics.ratio_max == 1


def test_denominators():
    labelled = np.array([[True, True], [True, False], [False, False]])
    rows = np.array([True, True, False])

    class Counted:
        def __init__(self, unit):
            self.divides_by = unit

    for unit, count in {"tokens": 3, "sequences": 2, "pairs": 1, "batches": 1}.items():
        assert loss_denominator(Counted(unit), labelled, rows) == count
    assert loss_denominator(object(), labelled, rows) == 3
    with pytest.raises(ValueError, match="divides_by"):
        loss_denominator(Counted("words"), labelled, rows)


@pytest.mark.parametrize("name", each(["qwen3", "qwen3_5_text"]))
def test_the_update_exports_for_tpu_and_cuda(name):
    def update(params, batch):
        state = train_state(params, ADAMW)
        state, summary = grad_step(
            state, batch, config_of(name), GRPOLoss(beta=0.1), attention="xla"
        )
        state, info = apply_gradients(state, ADAMW, learning_rate=1e-3, max_grad_norm=1.0)
        return state, summary.loss, info

    exported = jax.export.export(jax.jit(update), platforms=("tpu", "cuda"))(
        params_of(name), random_batch()
    )
    assert exported.platforms == ("tpu", "cuda")
    # A while loop over the layers forwards and one backwards, whatever their number.
    assert exported.mlir_module().count("stablehlo.while") >= 2
