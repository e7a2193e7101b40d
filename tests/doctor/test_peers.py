"""Which other libraries are installed, and what they were built for, without importing them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tileflash.doctor.loader_errors import BuiltFor
from tileflash.doctor.peers import PEERS, built_for, is_installed, version_of

Fake = Callable[..., Path]
BY_MODULE = {peer.module: peer for peer in PEERS}
ABORTS = "import os\nos.abort()"


def test_found_without_being_imported(fake: Fake) -> None:
    for peer in PEERS:
        assert not is_installed(peer)
    fake("flash_attn", ABORTS, version="2.8.3", distribution="flash-attn")
    flash, cute = BY_MODULE["flash_attn"], BY_MODULE["flash_attn.cute"]
    assert is_installed(flash)
    assert not is_installed(cute)
    assert (version_of(flash), version_of(cute)) == ("2.8.3", None)
    fake("flash_attn.cute", ABORTS)
    assert is_installed(cute)
    fake("flash_attn_interface", ABORTS)
    assert is_installed(BY_MODULE["flash_attn_interface"])


def test_built_for_as_the_local_version_says(fake: Fake) -> None:
    fake("flash_attn", "", version="2.8.3+cu12torch2.8cxx11abiTRUE", distribution="flash-attn")
    assert built_for(BY_MODULE["flash_attn"]) == BuiltFor("2.8", "12", True)
    assert built_for(BY_MODULE["xformers.ops"]) == BuiltFor()


def test_built_for_as_the_wheels_name_says(fake: Fake) -> None:
    package = fake("flash_attn", "", version="2.7.4", distribution="flash-attn")
    assert built_for(BY_MODULE["flash_attn"]) == BuiltFor()
    wheel = "https://github.com/x/flash_attn-2.7.4%2Bcu122torch2.6cxx11abiFALSE-cp311-cp311-linux_x86_64.whl"
    (package.parent / "flash_attn-2.7.4.dist-info" / "direct_url.json").write_text(json.dumps({"url": wheel}))
    assert built_for(BY_MODULE["flash_attn"]) == BuiltFor("2.6", "122", False)


def test_built_for_as_xformers_notes(fake: Fake) -> None:
    package = fake("xformers", ABORTS, version="0.0.33")
    assert built_for(BY_MODULE["xformers.ops"]) == BuiltFor()
    for text, expected in [
        ('{"version": {"cuda": 1208, "torch": "2.9.0+cu128"}}', BuiltFor("2.9.0+cu128", "1208")),
        ('{"version": {"cuda": null, "torch": "2.9.0"}}', BuiltFor("2.9.0")),
        ("[]", BuiltFor()),
        ("{", BuiltFor()),
    ]:
        (package / "cpp_lib.json").write_text(text)
        assert built_for(BY_MODULE["xformers.ops"]) == expected
