"""A list of a directory's files with their sizes and SHA-256, and what no longer agrees with it."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MANIFEST = "manifest.json"


def write_manifest(directory: Path) -> None:
    """List all files of a directory, those of its subdirectories too, in its `manifest.json`."""
    names = [p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()]
    with ThreadPoolExecutor() as pool:
        described = pool.map(lambda name: _describe(directory / name), names)
        listed = dict(zip(names, described, strict=True))
    (directory / MANIFEST).write_text(_text(listed), encoding="utf-8")


def find_fault(directory: Path) -> str | None:
    """Compare a directory with its manifest, and the manifest with itself.

    Returns:
        What is wrong with the first file that is missing, cut short, or not what was written, by
        the file's path; None if all are whole. A file that the manifest does not list is no fault.
    """
    path = directory / MANIFEST
    try:
        content = path.read_bytes().decode()
        listed = json.loads(content)["files"]
        if content != _text(listed):
            raise ValueError("another list")
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    except (ValueError, LookupError, TypeError):
        return f"{path} is not what was written"
    with ThreadPoolExecutor() as pool:
        faults = pool.map(lambda name: _fault(directory / name, listed[name]), sorted(listed))
        return next((fault for fault in faults if fault is not None), None)


def _fault(path: Path, listed: object) -> str | None:
    try:
        found = _describe(path)
    except (OSError, ValueError) as error:
        return f"{path} cannot be read: {getattr(error, 'strerror', None) or error}"
    if found == listed:
        return None
    return f"{path} is not what was written: now it has {found}, then {listed}"


def _describe(path: Path) -> dict[str, object]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def _text(listed: dict[str, dict[str, object]]) -> str:
    """Write a list with its own SHA-256, in the one way in which that list is ever written."""
    files = json.dumps(listed, indent=1, sort_keys=True)
    own = hashlib.sha256(files.encode()).hexdigest()
    return json.dumps({"files": listed, "sha256": own}, indent=1, sort_keys=True) + "\n"
