"""Tests the tasks of benchmarks/learning.py, its committed results and the tables of docs/learning.md."""

import json
import math
import shlex
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import tyro

from jppo.config.presets import PRESETS, preset_for
from jppo.runs.statistics import bootstrap_interval

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import learning
import masks
import value_clipping
from learning_report import memory_table, table
from learning_tasks import MEMORY, TASKS

ROOT = Path(__file__).parents[1]
ROWS = json.loads((ROOT / "benchmarks" / "results" / "learning.json").read_text())


def preset_of(label):
    return PRESETS[TASKS[label].preset or preset_for(label.removesuffix("/ray"))]


@pytest.mark.parametrize("label", TASKS)
def test_tasks_have_the_budget_of_their_presets(label):
    """So `jppo train` of an environment has the budget of its row."""
    assert preset_of(label).total_steps == TASKS[label].total_steps


def cells_of(text, column):
    """Returns the cells of a column, by environment, of the first table of a text."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    return {row[0]: row[rows[0].index(column)] for row in rows[1:]}


def test_the_options_of_the_table_measure_the_rows_again(monkeypatch):
    shown = cells_of(table(ROWS), "options of learning.py")
    labels = [label for label in TASKS if label in ROWS]
    assert len(shown) == len(labels) >= 24
    calls = []
    monkeypatch.setattr(learning, "run", lambda *arguments: calls.append(arguments) or ROWS[arguments[0]])
    monkeypatch.setattr(learning, "write_json", lambda *arguments: None)
    monkeypatch.setattr(learning, "Console", lambda **options: type("Silent", (), {"print": lambda *a, **o: None})())
    for options in shown.values():
        tyro.cli(learning.main, args=[*shlex.split(options.strip("`")), "--document", "None"])
    for label, (called, task, seeds, total_steps) in zip(labels, calls, strict=True):
        row, config = ROWS[label], preset_of(label).config
        batch_size = config.num_envs * config.num_steps
        assert (called, task) == (label, TASKS[label])
        assert seeds == row["seeds"]
        assert math.ceil(total_steps / batch_size) * batch_size == row["steps"]


@pytest.mark.parametrize(
    ("scores", "mark"), [([15.0] * 4, ""), ([13.0, 14.0, 15.5, 15.5], " (below)"), ([14.9] * 4, " (**below**)")]
)
@pytest.mark.parametrize(
    ("label", "actions", "columns"),
    [
        ("Asterix-MinAtar", "score", ("score, IQM", "greedy")),
        ("MountainCar-v0", "greedy", ("greedy", "score, IQM")),  # its source has greedy actions
    ],
)
def test_scores_below_the_published_one_are_marked(label, actions, columns, scores, mark):
    published = float(TASKS[label].published.split()[0])
    per_seed = [published + score - 15.0 for score in scores]
    row = ROWS[label] | {actions: ROWS[label][actions] | {"per_seed": per_seed}}
    shown, other = (cells_of(table(ROWS | {label: row}), column)[label] for column in columns)
    assert shown.endswith(mark)
    assert ("below" in shown) == bool(mark)
    assert "below" not in other


def test_scores_of_other_budgets_are_not_marked():
    shown = [cells_of(table(ROWS), column) for column in ("score, IQM", "greedy")]
    for label, task in TASKS.items():
        if label in ROWS and (task.other_budget or ROWS[label]["share"] < 1):
            assert not any("below" in cells[label.replace("/ray", ", Ray")] for cells in shown), label


def test_the_memory_table_has_interquartile_means_and_intervals():
    lines = [line for line in memory_table(ROWS).splitlines() if line.startswith("| ")]
    assert len(lines) == 1 + len([label for label in MEMORY if label in ROWS])
    line = next(line for line in lines if "CartPole without velocities | GRU" in line)
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    greedy = sorted(ROWS["CartPole without velocities/GRU"]["greedy"]["per_seed"])
    assert float(cells[5]) == pytest.approx(sum(greedy[1:4]) / 3, abs=0.01)  # a quarter of five, rounded down, is one
    low, high = map(float, cells[6].split(" to "))
    assert greedy[0] <= low <= float(cells[5]) <= high <= greedy[-1]
    assert cells[7] == f"{greedy[0]:.2f} to {greedy[-1]:.2f}"


def test_the_document_contains_the_tables_of_the_results():
    text = (ROOT / "docs" / "learning.md").read_text()
    assert table(ROWS) in text
    assert memory_table(ROWS) in text


def test_the_masks_table_of_the_page_is_that_of_its_results():
    runs = json.loads((ROOT / "benchmarks" / "results" / "masks.json").read_text())["runs"]
    rows = masks.make_table(runs)
    assert "\n".join(rows) in (ROOT / "docs" / "learning.md").read_text(encoding="utf-8")
    finals = [run["final"] for run in runs["without mask"]]
    assert rows[-1].endswith(f"| {statistics.mean(finals):.1f} ± {statistics.stdev(finals):.1f} |")
    assert masks.make_table({"one seed": runs["with mask"][:1]})[-1].endswith("| 7.7 |")


def test_the_intervals_of_the_results_are_those_of_their_scores():
    for row in ROWS.values():
        for part in (row["score"], row["greedy"]):
            assert part["interval"] == pytest.approx(list(bootstrap_interval(np.array(part["per_seed"]))))


def test_the_table_of_value_clipping_is_that_of_its_results():
    rows = json.loads((ROOT / "benchmarks" / "results" / "value_clipping.json").read_text(encoding="utf-8"))
    lines = value_clipping.table(rows)
    assert lines in (ROOT / "docs" / "details.md").read_text(encoding="utf-8")
    on, off = (rows["CartPole-v1"]["variants"][name]["area"] for name in ("on", "off"))
    differences = [x - y for x, y in zip(on, off, strict=True)]
    t = statistics.mean(differences) / statistics.stdev(differences) * len(differences) ** 0.5
    cells = lines.splitlines()[2].split(" | ")
    assert cells[4] == f"{statistics.mean(on):.1f} ± {statistics.stdev(on) / len(on) ** 0.5:.1f}"
    assert float(cells[6]) == pytest.approx(2 * scipy.stats.t.sf(abs(t), len(on) - 1), rel=0.05)
