"""Which tensor of a checkpoint belongs to which parameter."""

from collections.abc import Collection, Iterable, Mapping

from twinkle_jax.model.decoder.config import DecoderConfig
from twinkle_jax.model.decoder.families import FAMILIES
from twinkle_jax.model.decoder.parameters import Parameter, parameter_table
from twinkle_jax.model.huggingface.checkpoint_files import DTYPES, StoredTensor
from twinkle_jax.model.huggingface.stored_form import stored_name, stored_shape

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
PREFIX = "model."
NESTED_PREFIXES = ("model.language_model.", "language_model.model.")


def layer_number(config: DecoderConfig, path: tuple[str, ...], repeat: int) -> int:
    """Say which layer of the checkpoint a repetition of a block member is."""
    return repeat * len(config.block) + int(path[1])


def stored_names(
    config: DecoderConfig, path: tuple[str, ...], parameter: Parameter, prefix: str
) -> list[str]:
    """Give the names of the tensors of one leaf: one, or one per repetition of the block."""
    name = stored_name(parameter.path)
    if path[0] == "layers":
        numbers = (layer_number(config, path, r) for r in range(config.repeats))
        return [f"{prefix}layers.{number}.{name}" for number in numbers]
    return [HEAD if path[0] == "lm_head" else prefix + name]


def stored_prefix(stored: Collection[str]) -> str:
    """Find what the names of the text model begin with; it may be inside another model."""
    found = [prefix for prefix in NESTED_PREFIXES if prefix + EMBEDDING in stored]
    return found[0] if found else PREFIX


def carried_tensors(config: DecoderConfig, stored: Iterable[str]) -> list[str]:
    """List the tensors of an enclosing model's checkpoint that the text model does not read."""
    carried = FAMILIES[config.model_type].carried
    return sorted(name for name in stored if name.startswith(carried))


def match_tensors(
    config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> dict[tuple[str, ...], list[str]]:
    """Pair every parameter with its tensors; refuse what is missing, extra or misshapen."""
    prefix = stored_prefix(stored)
    table = parameter_table(config)
    names = {path: stored_names(config, path, p, prefix) for path, p in table.items()}
    wanted = {name: stored_shape(table[path]) for path, group in names.items() for name in group}
    ignored = set(carried_tensors(config, stored))
    if config.tie_embeddings:
        ignored.add(HEAD)
    _refuse("hold all tensors of the model, got none named", wanted.keys() - stored.keys())
    _refuse("hold no tensors but the model's, got", stored.keys() - wanted.keys() - ignored)
    for name, shape in wanted.items():
        if stored[name].shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {stored[name].shape}")
        if stored[name].dtype not in DTYPES:
            raise ValueError(
                f"{name} must have a type of {', '.join(DTYPES)}, got {stored[name].dtype}"
            )
    return names


def _refuse(demand: str, names: Iterable[str]) -> None:
    listed = sorted(names)
    if listed:
        rest = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
        raise ValueError(f"the checkpoint must {demand} {', '.join(listed[:3])}{rest}")
