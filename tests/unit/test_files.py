"""Files get their names whole, and only once."""

import os

import pytest

from sparkdl import files


@pytest.mark.parametrize("links", [True, False])
def test_a_file_is_never_replaced(tmp_path, monkeypatch, links):
    """Also where there are no hard links; a file of the same content is taken for this one."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(PermissionError(1, "no links")))
    target = tmp_path / "target"
    for content in (b"one", b"one"):
        (tmp_path / "local").write_bytes(content)
        files.publish(tmp_path / "local", str(target), context=None)
        assert [path.name for path in tmp_path.iterdir()] == ["target"]
    (tmp_path / "local").write_bytes(b"two")

    with pytest.raises(FileExistsError, match="target exists already, with other content"):
        files.publish(tmp_path / "local", str(target), context=None)

    assert target.read_bytes() == b"one"
