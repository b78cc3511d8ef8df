"""Checks every environment of families with `jppo.check_env`.

    python benchmarks/check_families.py xminigrid navix jumanji:Snake-v1
    python benchmarks/check_families.py minigrid pettingzoo LunarLander-v3    # on the host
    python benchmarks/check_families.py playground:Go1Getup --limit 32    # fewer steps, for slow simulations

Each environment is checked in a new process. The file of results keeps the environments of earlier calls.
"""

import json
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tyro
from throughput import RESULTS, hardware

import jppo
from jppo.config.families import FAMILIES, HOST_FAMILIES
from jppo.envs.families import family_env_names
from jppo.envs.host_families import host_env_names
from jppo.runs.files import write_json


def main(
    names: tyro.conf.Positional[tuple[str, ...]],
    output: Path = RESULTS / "check_families.json",
    timeout: float = 600.0,
    limit: int | None = None,
    steps: int | None = None,
) -> None:
    """Checks the environments and writes the results after each one.

    Args:
      names: families, or ids of environments.
      output: the file of results.
      timeout: seconds for one environment.
      limit: time limit of episodes on the device. With it, each of four environments takes three times as many steps.
      steps: number of steps of each of four environments; the default of `jppo.check_env`, with eight, when None.
    """
    results = json.loads(output.read_text())["envs"] if output.exists() else {}
    envs = [env for name in names for env in env_names(name)]
    for name in envs:
        start = time.perf_counter()
        result = in_process(_check, (name, limit, steps), timeout)
        results[name] = result | {"seconds": round(time.perf_counter() - start, 1), "cpu": hardware()["cpu"]}
        write_json(output, {"hardware": hardware(), "envs": dict(sorted(results.items()))})
        print(name, json.dumps(results[name]), flush=True)


def env_names(name: str) -> list[str]:
    """Returns the environments of a family, or the name of an environment."""
    if name in FAMILIES:
        return family_env_names(name)
    if name in HOST_FAMILIES:
        return [env for env in host_env_names() if env.startswith(f"{name}:")]
    return [name]


def measure_each(
    function: Callable[..., dict[str, Any]],
    names: tuple[str, ...],
    args: tuple[Any, ...],
    timeout: float,
    output: Path,
    **settings: Any,
) -> dict[str, Any]:
    """Calls function(name, *args) for each environment in a new process, and writes the results after each one.

    Returns the results by environment, together with those of earlier calls in the file.
    """
    results = json.loads(output.read_text())["envs"] if output.exists() else {}
    for name in names:
        results[name] = in_process(function, (name, *args), timeout)
        write_json(output, settings | {"hardware": hardware(), "envs": dict(sorted(results.items()))})
        print(name, json.dumps(results[name]), flush=True)
    return results


def in_process(function: Callable[..., dict[str, Any]], args: tuple[Any, ...], timeout: float) -> dict[str, Any]:
    """Returns the result of a function that runs in a new process, or {"error": ...}."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(function, args, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(timeout) else {"error": f"no result after {timeout:g} s"}
    except EOFError:
        return {"error": "the process ended without a result"}
    finally:
        process.kill()
        process.join()


def _send_result(function: Callable[..., dict[str, Any]], args: tuple[Any, ...], sender: Any) -> None:
    try:
        sender.send(function(*args))
    except Exception as error:  # any exception of a family is a result
        sender.send({"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]})


def _check(name: str, limit: int | None, steps: int | None) -> dict[str, Any]:
    """Returns the names of the checks that failed or warned, with their texts, and the measured speed."""
    env = name if limit is None else jppo.make_env(name, max_steps_in_episode=limit)
    steps = steps or (None if limit is None else 3 * limit)
    report = jppo.check_env(env) if steps is None else jppo.check_env(env, steps=steps, num_envs=4)
    seen = {check.name: f"{check.status}: {check.seen}" for check in report.checks if check.status in ("fail", "warn")}
    speed = next((check.seen.split(" (")[0] for check in report.checks if check.name == "speed"), None)
    return {"passed": report.passed, "limit": limit, "steps": report.steps, "seen": seen, "speed": speed}


if __name__ == "__main__":
    tyro.cli(main)
