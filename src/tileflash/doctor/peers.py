"""Other attention libraries that people have beside tileflash: which are installed, what they were built for, whether they load.

tileflash needs none of them.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from tileflash.doctor.loader_errors import BuiltFor
from tileflash.doctor.problem import pip_install


@dataclass(frozen=True)
class Peer:
    """A library: what people call it, the module that proves that it loads, its distributions' names, how to install it anew."""

    name: str
    module: str
    distributions: tuple[str, ...]
    install: tuple[str, ...]

    @property
    def reinstall(self) -> str:
        """A command; `--no-build-isolation` builds against the torch that is installed."""
        return pip_install(*self.install)


_REBUILD = ("--force-reinstall", "--no-deps", "--no-build-isolation", "--no-cache-dir")
PEERS = (
    Peer("FlashAttention 2", "flash_attn", ("flash-attn",), (*_REBUILD, "flash-attn")),
    Peer(
        "FlashAttention 3", "flash_attn_interface", ("flash-attn-3", "flash_attn_3"),
        (*_REBUILD, "git+https://github.com/Dao-AILab/flash-attention#subdirectory=hopper"),
    ),
    Peer("FlashAttention 4", "flash_attn.cute", ("flash-attn-4",), ("--upgrade", "--pre", "flash-attn-4")),
    Peer("xFormers", "xformers.ops", ("xformers",), (*_REBUILD, "xformers")),
    Peer("Transformer Engine", "transformer_engine.pytorch", ("transformer-engine", "transformer_engine"),
         (*_REBUILD, "transformer-engine[pytorch]")),
)  # fmt: skip


def is_installed(peer: Peer) -> bool:
    """Whether the module is there, found without importing any of its packages."""
    top, *rest = peer.module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    if peer.module != "flash_attn.cute":  # what FlashAttention 2 and 4 share is the directory
        return True
    places = [Path(place).joinpath(*rest) for place in spec.submodule_search_locations or ()]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def version_of(peer: Peer) -> str | None:
    """The installed version by its metadata."""
    for name in peer.distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def built_for(peer: Peer) -> BuiltFor:
    """What the package was built for, out of the places that tell: its local version ("2.8.3+cu12torch2.8cxx11abiTRUE"), the
    wheel's name that pip noted (direct_url.json), xformers' cpp_lib.json."""
    texts = [version_of(peer) or ""]
    for name in peer.distributions:
        try:
            noted = metadata.distribution(name).read_text("direct_url.json")
        except metadata.PackageNotFoundError:
            continue
        if noted:
            texts.append(noted.replace("%2B", "+"))
    for text in texts:
        if found := re.search(r"cu(\d+)torch(\d+\.\d+)(?:cxx11abi(TRUE|FALSE))?", text):
            return BuiltFor(found[2], found[1], None if found[3] is None else found[3] == "TRUE")
    spec = importlib.util.find_spec("xformers") if peer.module.startswith("xformers") else None
    for place in (spec.submodule_search_locations or ()) if spec else ():
        try:
            version = json.loads((Path(place) / "cpp_lib.json").read_text(encoding="utf-8"))["version"]
            cuda = version.get("cuda")
            return BuiltFor(str(version["torch"]), None if cuda is None else str(cuda))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return BuiltFor()


def uninstall(distribution: str) -> str:
    """The command that removes a package from this Python's environment."""
    return shlex.join([sys.executable, "-m", "pip", "uninstall", "-y", distribution])
