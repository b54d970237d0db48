"""What the names in Twinkle's scripts stand for: ids of hubs, classes by name, options."""

import inspect
import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE = "docs/from_twinkle.md"
_WARNED: set[str] = set()


def local_id(place: Any, what: str = "model_id") -> Any:
    """Return the path or the Hugging Face id that an id of Twinkle's means.

    An `ms://` id is the directory of ModelScope's cache that holds it, in `MODELSCOPE_CACHE` or
    `~/.cache/modelscope/hub`. If there is none, ModelScope's client downloads a model, where it is
    installed.

    Args:
        place: a path, `hf://owner/name`, `ms://owner/name`, or anything that is no string, which
            stays as it is.
        what: the argument's name, for errors; `dataset_id` for a data set.

    Raises:
        ValueError: for an `ms://` id that is not in the cache and cannot be downloaded.
    """
    if not isinstance(place, str) or Path(place).exists():
        return place
    if place.startswith("ms://"):
        return _modelscope_directory(place.removeprefix("ms://"), what)
    return place.removeprefix("hf://")


def _modelscope_directory(name: str, what: str) -> str:
    kind = "datasets" if what == "dataset_id" else "models"
    root = Path(os.environ.get("MODELSCOPE_CACHE") or "~/.cache/modelscope/hub").expanduser()
    # Its client writes dots in names as three underscores; older ones had no directory of a kind.
    folders = [part / x for part in (root / kind, root) for x in (name.replace(".", "___"), name)]
    for folder in folders:
        if folder.is_dir() and any(folder.iterdir()):
            return str(folder)
    if kind == "models":
        try:
            client = import_module("modelscope")
        except ImportError:
            pass
        else:
            return str(client.snapshot_download(name))
    flag = "--dataset" if kind == "datasets" else "--model"
    raise ValueError(
        f"{what} must be a directory or an id of the Hugging Face hub, hf://owner/name, or be in "
        f"ModelScope's cache, {folders[0]}, got 'ms://{name}': download it by `modelscope download "
        f"{flag} {name} --local_dir DIRECTORY` and name that directory; see {PAGE}"
    )


def class_of(name: str, module: str) -> type:
    """Return a public class of one of our modules by its name.

    Raises:
        ValueError: for a name that the module does not have.
    """
    known = vars(import_module(module))
    public = {x: y for x, y in known.items() if isinstance(y, type) and not x.startswith("_")}
    if name not in public:
        raise ValueError(f"{name!r} must be one of {', '.join(sorted(public))}; see {PAGE}")
    found: type = public[name]
    return found


def construct(kind: Any, module: str, **options: Any) -> Any:
    """Make what `kind` names: a class of a module of ours by name, a class, or an object as it is.

    Args:
        kind: a name, a class or an object.
        module: where names are looked up, `twinkle_jax.twinkle.template` for one.
        options: arguments of the class.

    Raises:
        ValueError: for a name that the module does not have.
        TypeError: for options beside an object that is made already.
    """
    if isinstance(kind, str):
        kind = class_of(kind, module)
    if inspect.isclass(kind):
        return kind(**options)
    if options:
        raise TypeError(f"options must go with a class or a name, got {options} beside {kind!r}")
    return kind


def refuse(owner: str, options: Mapping[str, Any]) -> None:
    """Refuse options that nothing here would follow."""
    if options:
        name, value = next(iter(options.items()))
        raise TypeError(f"{owner} has no option {name!r}, got {value!r}; see {PAGE}")


def warn_once(message: str) -> None:
    """Warn what a part of a script means here, the first time that it is used."""
    if message not in _WARNED:
        _WARNED.add(message)
        warnings.warn(f"{message}; see {PAGE}", UserWarning, stacklevel=3)
