"""Configurations from the names that settings have as options of the command."""

from twinkle_jax.training.config import from_dict


def config_of(options):
    """A configuration with some settings, such as `{"steps": 4, "update.loss": "dapo"}`."""
    settings = {}
    for name, value in options.items():
        section, _, setting = name.rpartition(".")
        (settings.setdefault(section, {}) if section else settings)[setting] = value
    return from_dict(settings)
