"""Replacing a directory in one step, with and without the system's exchange."""

import pytest

import twinkle_jax.model.huggingface.atomic_directory as atomic
from twinkle_jax.model.huggingface.atomic_directory import replace_directory


@pytest.fixture(params=["exchange", "two renames"])
def target(request, tmp_path, monkeypatch):
    if request.param == "two renames":
        monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    return tmp_path / "deep" / "target"


def test_new_and_replaced(target):
    for content in ("first", "second"):
        with replace_directory(target) as fresh:
            assert not list(fresh.iterdir()) and fresh.parent == target.parent
            (fresh / content).write_text(content)
        assert [p.name for p in target.iterdir()] == [content]
        assert [p.name for p in target.parent.iterdir()] == ["target"]


def interrupted(target):
    with replace_directory(target) as fresh:
        (fresh / "new").write_text("new")
        raise KeyboardInterrupt


def test_an_exception_changes_nothing(target):
    with replace_directory(target) as fresh:
        (fresh / "old").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        interrupted(target)
    assert [p.name for p in target.iterdir()] == ["old"]
    assert [p.name for p in target.parent.iterdir()] == ["target"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda a, b: False)
    target = tmp_path / "target"
    target.mkdir()
    (target / "old").write_text("old")
    with pytest.raises(FileNotFoundError):
        atomic._swap(tmp_path / "gone.partial", target)
    assert [p.name for p in target.iterdir()] == ["old"]


def test_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with replace_directory(tmp_path / "link") as fresh:
        (fresh / "file").write_text("")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real/file").exists()


def test_the_directory_has_ordinary_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    with replace_directory(tmp_path / "target"):
        pass
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "plain").stat().st_mode
