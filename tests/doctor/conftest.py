"""Packages that do not exist, or do what nobody wants, on the path of this process and of its children."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`fake("flash_attn", body, version="2.7.4")` puts a package of that name first on sys.path, with metadata where a version is given."""
    place = tmp_path / "site-packages"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))

    def make(module: str, body: str, version: str | None = None, distribution: str | None = None) -> Path:
        package = place / module.replace(".", "/")
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(body)
        if version is not None:
            name = distribution or module
            information = place / f"{name.replace('-', '_')}-{version}.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        return package

    return make
