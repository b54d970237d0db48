"""Twinkle's `preprocessor`: from the columns of a data set to trajectories."""

from twinkle_jax.twinkle.preprocessor.base import DataFilter, Preprocessor
from twinkle_jax.twinkle.preprocessor.llm import (
    AlpacaProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    EmojiDPOProcessor,
    GSM8KProcessor,
    SelfCognitionProcessor,
)
from twinkle_jax.twinkle.preprocessor.olympiad_bench import OlympiadBenchProcessor

__all__ = [
    "AlpacaProcessor",
    "CompetitionMathGRPOProcessor",
    "CompetitionMathProcessor",
    "CountdownProcessor",
    "DataFilter",
    "EmojiDPOProcessor",
    "GSM8KProcessor",
    "OlympiadBenchProcessor",
    "Preprocessor",
    "SelfCognitionProcessor",
]
