"""Writes an HTML page about runs. The page needs no other file and no network."""

import html
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jppo.runs.comparison import Comparison, compare
from jppo.runs.curves import RETURN, GroupMetrics, read_groups
from jppo.runs.display import Picture, html_table
from jppo.runs.groups import all_settings, format_value
from jppo.runs.listing import read_run
from jppo.runs.load import load_run, needs_env, read_summary
from jppo.runs.plots import draw_metrics
from jppo.runs.render import play_gif
from jppo.runs.run_dir import check_output, read_config, write_output

_LOSSES = (
    *("loss/policy", "loss/value", "policy/entropy", "policy/approx_kl", "policy/clip_fraction"),
    *("value/explained_variance", "grad/norm", "eval/return_mean"),
)
_SPEED = ("time/steps_per_second",)
_NO_SPEED = "At least one run has no speed, because the runs of a sweep train at the same time."
_MAX_VIDEO_STEPS = 1000
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }}
img {{ max-width: 100%; height: auto; }}
figure {{ margin: 1rem 0; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.875rem; margin: 1rem 0; }}
caption {{ text-align: left; font-weight: 600; padding: 0.25rem 0; }}
th, td {{ text-align: left; padding: 0.25rem 0.75rem 0.25rem 0; border-bottom: 1px solid #ddd; white-space: nowrap; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def write_report(
    run_dirs: Sequence[Path],
    output: Path,
    *,
    video: bool = False,
    env: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Writes a page with the settings, scores, learning curves, losses and speed of runs.

    Args:
      output: an .html file.
      video: also play an episode with the policy of the run with the highest return of each environment.
      env: the environment for the video of runs in the user's own environment, see `load_run`.
      progress: called with a short text at each step of an episode.

    Raises:
      ValueError: a directory contains no run or damaged files, or the output cannot be written.
    """
    check_output(output, ".html")
    envs: dict[str, list[Path]] = {}
    for path in dict.fromkeys(run_dirs):
        envs.setdefault(read_config(path)["env"], []).append(path)
    title = f"jppo: {', '.join(envs)}"
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for name, paths in envs.items():
        parts += _section(name, paths, _play(paths, env, progress) if video else "")
    write_output(output, _PAGE.format(title=html.escape(title), body="\n".join(parts)).encode(), ".html")


def _section(env: str, paths: list[Path], video: str) -> list[str]:
    """Returns the elements of an environment."""
    comparison = compare(paths)
    groups = read_groups([path for score in comparison.scores for path in score.group.paths])
    if len(groups) > 1:  # the table has the settings
        groups = [group._replace(settings=score.name) for group, score in zip(groups, comparison.scores, strict=True)]
    differences = [one.describe() for one in comparison.differences]
    losses, speed = (
        [name for name in names if all(name in run for group in groups for run in group.runs)]
        for names in (_LOSSES, _SPEED)
    )
    return [
        f"<h2>{html.escape(env)}</h2>",
        _wide(html_table("Interquartile mean of the final returns over seeds", *comparison.rows(env))),
        *(f"<p>{html.escape(line)}</p>" for line in (*differences, *comparison.notes)),
        "<h3>Learning curves</h3>",
        _figure(groups, [RETURN], "steps"),
        _figure(groups, [RETURN], "minutes"),
        *(["<h3>Episode</h3>", video] if video else []),
        "<h3>Losses</h3>",
        _figure(groups, losses, "steps") if losses else "<p>The runs have no common losses.</p>",
        "<h3>Speed</h3>",
        _figure(groups, speed, "minutes") if speed else f"<p>{_NO_SPEED}</p>",
        _wide(html_table("Runs", *map(_describe_run, paths))),
        "<h3>Settings</h3>",
        _settings_table(comparison),
    ]


def _describe_run(path: Path) -> dict[str, Any]:
    """Returns the row of a run in the table."""
    state, summary = read_run(path), read_summary(path)
    speed, seconds, compiling = (summary.get(name) for name in ("steps_per_second", "seconds", "compile_seconds"))
    return {
        "run": str(path),
        "seed": state.seed,
        "status": state.status,
        "steps": f"{state.steps:,}",
        "return": "-" if math.isnan(state.return_mean) else f"{state.return_mean:.1f}",
        "steps/s": _number(speed, ",.0f"),
        "seconds": _number(seconds, ",.1f"),
        "compiling (s)": _number(compiling, ".1f"),
        "device": str(summary.get("device", "-")),
    }


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _settings_table(comparison: Comparison) -> str:
    """Returns all settings of each group, one row per setting, and the versions of the first run."""
    first = [score.group.paths[0] for score in comparison.scores]
    columns = {
        score.name: all_settings(read_config(path), path) for score, path in zip(comparison.scores, first, strict=True)
    }
    names = dict.fromkeys(name for column in columns.values() for name in column)
    rows = [
        {"setting": name} | {key: format_value(column.get(name, "-")) for key, column in columns.items()}
        for name in names
    ]
    versions = read_config(first[0]).get("versions", {})
    rows += [
        {"setting": f"version of {name}"} | dict.fromkeys(columns, str(number)) for name, number in versions.items()
    ]
    return f"<details><summary>All settings</summary>{_wide(html_table('', *rows))}</details>"


def _figure(groups: Sequence[GroupMetrics], metrics: Sequence[str], x: str) -> str:
    """Returns the plot of metrics as HTML; the reason if a run has no value of a metric."""
    try:
        picture = Picture(draw_metrics(groups, metrics, x), "png", f"{', '.join(metrics)} over {x}")
    except ValueError as error:
        return f"<p>{html.escape(str(error))}</p>"
    return f"<figure>{picture._repr_html_()}</figure>"


def _play(paths: list[Path], env: str | None, progress: Callable[[str], None]) -> str:
    """Returns an episode of the best run as HTML; the reason if it cannot be drawn."""
    best = max(paths, key=lambda path: float("-inf") if math.isnan(x := read_run(path).return_mean) else x)
    try:
        run = load_run(best, env=env if needs_env(best) else None)
        played = play_gif(run.agent.env, run.policy, max_steps=_MAX_VIDEO_STEPS, progress=progress)
    except ValueError as error:
        return f"<p>There is no video: {html.escape(str(error))}</p>"
    caption = f"{best}: an episode of {played.length} steps with return {played.episode_return:.1f}"
    picture = Picture(played.gif, "gif", "an episode")
    return f"<figure>{picture._repr_html_()}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _wide(table: str) -> str:
    """Returns a table that scrolls if it is wider than the page."""
    return f'<div class="wide">{table}</div>'
