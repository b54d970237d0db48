"""How large a step is: the learning rate rises, and may fall to the end."""

from twinkle_jax.training.configuration.train_config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Give the learning rate of a step, the first of which is 0."""
    optimizer = config.optimizer
    assert optimizer.learning_rate is not None
    assert config.steps is not None
    rate = optimizer.learning_rate * min(1.0, (step + 1) / max(optimizer.warmup_steps, 1))
    return rate * (1 - step / config.steps) if optimizer.decay else rate
