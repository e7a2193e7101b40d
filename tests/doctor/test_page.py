"""docs/doctor.md tells of every problem that there is, and of no other; and of every key of the JSON form."""

from __future__ import annotations

import re
from pathlib import Path

from tileflash.doctor.diagnosis import Diagnosis, diagnose
from tileflash.doctor.steps import Outcome

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_every_problem_is_on_the_page_and_no_other() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/tileflash/doctor").glob("*.py"))
    named = set(
        re.findall(
            r'"((?:python|torch|numpy|driver|cuda|triton|compiler|cache|backends|kernels|self-test)\.[a-z-]+)"', source
        )
    )
    made = {
        f"{prefix}.{state}" for prefix in ("torch", "numpy", "triton") for state in ("import", "crashed", "timeout")
    } | {f"{prefix}.{state}" for prefix in ("peer", "self-test") for state in ("failed", "crashed", "timeout")}
    table = PAGE[PAGE.index("## Problems and remedies") : PAGE.index("## What loaders say")]
    told = {
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([a-z-]+\.[a-z-]+)`", row)
    }
    assert told == named | made


def test_every_key_of_the_json_form_is_on_the_page(monkeypatch) -> None:
    monkeypatch.setattr(
        "tileflash.doctor.diagnosis.run_steps",
        lambda steps, timeout_s, **_: {step: Outcome("failed", error="no") for step in steps},
    )
    found: Diagnosis = diagnose()
    form = PAGE[PAGE.index("## The JSON form") : PAGE.index("## What `explain` says")]
    told = found.to_json()
    keys = {
        *told,
        *told["versions"],
        *told["cache"],
        *told["peers"][0],
        *told["peers"][0]["built_for"],
        *told["problems"][0],
    }
    assert {key for key in keys if f"`{key}`" not in form} == set()
