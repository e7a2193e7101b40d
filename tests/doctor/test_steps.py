"""A step may raise, abort, exit, hang or babble: each is told for what it is, and the steps after it still run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tileflash.doctor.steps import Outcome, run_steps

Fake = Callable[..., Path]


def test_whatever_a_module_does_is_told_and_the_others_run(fake: Fake) -> None:
    fake("fine_first", "__version__ = '1.2'\nprint('{\"not\": \"an event\"}', flush=True)")
    fake("raises", "raise OSError('libcudart.so.12: cannot open shared object file')")
    fake("leaves", "raise SystemExit(3)")
    fake("aborts", "import os, sys\nprint('  assertion x > 0 failed', file=sys.stderr, flush=True)\nos.abort()")
    fake("ends", "import os\nos._exit(7)")
    fake("hangs", "import time\ntime.sleep(600)")
    fake("fine_last", "")
    started: list[str] = []
    names = ["fine_first", "raises", "leaves", "aborts", "ends", "hangs", "fine_last"]
    begin = time.monotonic()
    outcomes = run_steps([f"import:{name}" for name in names], 2.5, on_start=started.append)
    assert time.monotonic() - begin < 20
    assert [outcomes[f"import:{name}"].status for name in names] == [
        "ok", "failed", "failed", "crashed", "crashed", "timeout", "ok",
    ]  # fmt: skip
    assert outcomes["import:fine_first"].facts["version"] == "1.2"
    assert outcomes["import:raises"].error == "OSError: libcudart.so.12: cannot open shared object file"
    assert outcomes["import:leaves"].error == "SystemExit: 3"
    aborted = outcomes["import:aborts"].error
    assert aborted.startswith("the process died of SIGABRT: assertion x > 0 failed (in ")
    assert aborted.endswith(f"{os.sep}aborts{os.sep}__init__.py, line 3)")
    assert outcomes["import:ends"].error == "the process ended with status 7"
    assert outcomes["import:hangs"].error == "no answer within 2.5 s"
    assert 2.4 < outcomes["import:hangs"].seconds < 10
    assert [name for name in names if f"import:{name}" in started] == names


def test_a_child_of_the_child_that_lives_on_is_not_waited_for_and_is_ended(fake: Fake, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    fake("parent", f"import subprocess, sys, time\nchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
         f"open({str(note)!r}, 'w').write(str(child.pid))\ntime.sleep(600)")  # fmt: skip
    begin = time.monotonic()
    assert run_steps(["import:parent"], 1.5)["import:parent"].status == "timeout"
    assert time.monotonic() - begin < 10
    pid = int(note.read_text())
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            return
        time.sleep(0.01)
    pytest.fail("what the hanging step started still runs")


def test_hidden_modules_cannot_be_imported_and_unwanted_steps_are_skipped(fake: Fake) -> None:
    fake("secret", "")
    fake("dies", "import os\nos._exit(1)")
    outcomes = run_steps(["import:secret"], 30, hidden=["secret"])
    assert outcomes["import:secret"].status == "failed"
    assert "secret" in outcomes["import:secret"].error

    def wanted(step: str, so_far: dict[str, Outcome]) -> bool:
        return step != "import:secret" or "import:dies" not in so_far or so_far["import:dies"].ok

    outcomes = run_steps(["import:dies", "import:secret"], 30, wanted=wanted)
    assert [outcomes[step].status for step in ("import:dies", "import:secret")] == ["crashed", "skipped"]


def test_the_children_see_the_path_of_this_process(fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the working directory as well: a file there would hide a package that the user's own programs find."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "numpy.py").write_text("raise ImportError('the wrong one')")
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "src"))
    assert run_steps(["numpy"], 60)["numpy"].ok


def test_an_xformers_that_only_logs_its_error_has_failed(fake: Fake) -> None:
    fake("xformers", "from . import _cpp_lib")
    fake("xformers.ops", "")
    fake(
        "xformers._cpp_lib",
        "class Invalid(Exception): pass\n"
        "try:\n    try:\n        raise OSError('_C.so: undefined symbol: _ZN3c104cuda9SetDeviceEa')\n"
        "    except OSError as error:\n        raise Invalid('xFormers was built for:\\n    PyTorch 2.9.0+cu128 with CUDA 1208')"
        " from error\n"
        "except Invalid as error:\n    _cpp_library_load_exception = error\n",
    )
    outcome = run_steps(["import:xformers.ops"], 30)["import:xformers.ops"]
    assert (outcome.status, outcome.error) == (
        "failed",
        "ImportError: xFormers was built for: PyTorch 2.9.0+cu128 with CUDA 1208 "
        "(OSError: _C.so: undefined symbol: _ZN3c104cuda9SetDeviceEa)",
    )
