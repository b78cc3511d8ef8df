"""Writes the files of runs by hand, without training."""

import json

import jppo
from jppo.runs.files import write_json
from jppo.runs.run_dir import run_config

SETTINGS = run_config("CartPole-v1", "device", 0, 1000, jppo.PPOConfig(), jppo.Hyperparams())


def write_run(path, returns, counts=None, stds=None, pace=1.0, summary=None, metrics=None, **settings):
    """Writes a run with one update per return; an update has ten steps and takes `pace` seconds.

    Args:
      summary: content of summary.json.
      metrics: more columns of metrics.jsonl.
    """
    path.mkdir(parents=True)
    write_json(path / "config.json", SETTINGS | settings)
    n = len(returns)
    rows = zip(returns, [1.0] * n if counts is None else counts, [0.0] * n if stds is None else stds, strict=True)
    lines = [
        {
            "update": i,
            "env_steps": 10 * i,
            "time/elapsed": pace * i,
            "episode/return_mean": mean if count else None,
            "episode/return_std": std if count else None,
            "episode/count": count,
        }
        | {name: column[i - 1] for name, column in (metrics or {}).items()}
        for i, (mean, count, std) in enumerate(rows, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        write_json(path / "summary.json", summary)
    return path


def finished(value, **more):
    """Returns the content of summary.json of a finished run."""
    return {"status": "finished", "steps": 1000, "return_mean": value} | more


def with_hyperparams(**changed):
    return {"hyperparams": SETTINGS["hyperparams"] | changed}
