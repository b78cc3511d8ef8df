"""Every row of docs/hostile_input.md: what is given there is answered as it says there."""

import contextlib
import io
import pickle
import re
import shlex
from pathlib import Path

import numpy as np
import optax
import pytest
from checks import SMALL
from lenient import lenient

import jppo
from jppo.actors import numpy_policy
from jppo.cli.main import main

DOCUMENT = Path(__file__).parent.parent / "docs" / "hostile_input.md"
ROWS = re.findall(r"^\| `(.+?)` \| (.+?) \|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and what can become of one."""
    path = tmp_path_factory.mktemp("hostile")
    with lenient():
        jppo.train("CartPole-v1", config=SMALL(), total_steps=1, run_dir=path / "RUN")
    for name in ("TORN", "UNFINISHED", "DAMAGED", "FOREIGN"):
        (path / name).mkdir()
        for file in ("config.json", "metrics.jsonl"):
            (path / name / file).write_bytes((path / "RUN" / file).read_bytes())
    (path / "TORN" / "config.json").write_text('{"env": "CartP', encoding="utf-8")
    (path / "DAMAGED" / "metrics.jsonl").write_text("no JSON\n", encoding="utf-8")
    (path / "FOREIGN" / "config.json").write_text("[1, 2]", encoding="utf-8")
    (path / "FULL").mkdir()
    (path / "FULL" / "letter.txt").touch()
    (path / "FILE").touch()
    (path / "text.npz").write_text("no archive", encoding="utf-8")
    np.savez(path / "other.npz", weights=np.zeros(3))
    (path / "pickle.npz").write_bytes(pickle.dumps(print))
    return path


def answer_to(given: str) -> str:
    """What a command says before it ends with exit code 2, or the message of a ValueError."""
    if not given.startswith("jppo "):
        with pytest.raises(ValueError) as raised:  # noqa: PT011 - the row has the message
            eval(given, {"jppo": jppo, "numpy_policy": numpy_policy, "optax": optax})
        return str(raised.value)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = main(shlex.split(given)[1:])
        except SystemExit as ended:
            code = ended.code
    assert code == 2, said.getvalue()
    assert "Traceback" not in said.getvalue()
    return re.sub(r"[│╭╮╰╯─\s]+", " ", said.getvalue())


def test_there_are_forty_rows():
    assert len(ROWS) >= 40
    assert len({given for given, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("given", "answer"), ROWS, ids=[given for given, _ in ROWS])
def test_what_is_given_is_answered(folder, monkeypatch, given, answer):
    monkeypatch.chdir(folder)
    before = sorted(folder.rglob("*"))
    with lenient():
        assert answer in answer_to(given)
    assert sorted(folder.rglob("*")) == before, "nothing is left behind"
