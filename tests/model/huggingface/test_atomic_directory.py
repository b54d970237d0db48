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


def test_a_save_that_is_under_way_is_left_alone(tmp_path):
    """Two at a time: neither takes the other's directory for remains, and the later one wins."""
    target = tmp_path / "target"
    with replace_directory(target) as first:
        (first / "a").write_text("a")
        with replace_directory(target) as second:
            (second / "b").write_text("b")
        assert (first / "a").exists() and (target / "b").exists()
    assert [p.name for p in target.iterdir()] == ["a"]
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_an_export_that_was_only_renamed_comes_back(tmp_path):
    """Killed between two renames, where the system has no exchange."""
    old = tmp_path / ".target.0123abcd.old"
    old.mkdir()
    (old / "good").write_text("good")
    with pytest.raises(KeyboardInterrupt):
        interrupted(tmp_path / "target")
    assert [p.name for p in (tmp_path / "target").iterdir()] == ["good"]
    (tmp_path / ".target.89abcdef.old").mkdir()  # and one whose successor is there goes
    with replace_directory(tmp_path / "target"):
        pass
    assert [p.name for p in tmp_path.iterdir()] == ["target"]
