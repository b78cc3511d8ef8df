"""Compares Ray mode with Stable-Baselines3's PPO: steps per second of whole training, and the final return.

    python benchmarks/versus_sb3.py
    python benchmarks/versus_sb3.py --envs waiting burning --num-actors 1 2 8    # half an hour
    python benchmarks/versus_sb3.py --peer-python /path/to/venv/bin/python

Both use the same environment, separate 2x64 tanh networks with orthogonal weights, batch size, epochs, minibatches,
loss weights, learning rate and Adam. The differences:

- SubprocVecEnv has one environment per process. It starts one process per actor, and therefore has fewer environments
  and longer rollouts.
- Stable-Baselines3 waits for all environments at each step; jppo's actors return whole rollouts.
- torch uses one thread; jppo's learner uses XLA's default number of threads.
- With lag 1, jppo collects with the parameters of the previous update, which Stable-Baselines3 does not. This is faster
  and learns less per step, so compare the returns, too.
"""

from pathlib import Path

import tyro
from throughput import RESULTS
from versus import Contestant, Options, compare


def main(options: tyro.conf.OmitArgPrefixes[Options] = Options(), output: Path = RESULTS / "versus_sb3.json") -> None:
    """Compares training with jppo and with Stable-Baselines3 and writes JSON.

    Args:
      output: JSON file.
    """
    theirs = ("peer_sb3.py", options.peer_python)
    contestants = [
        Contestant("jppo", "versus.py", extra={"policy_lag": 0, "in_process": False}),
        Contestant("SB3, subprocesses", *theirs, {"subprocesses": True}),
        Contestant("jppo, lag 1", "versus.py", extra={"policy_lag": 1, "in_process": False}),
        Contestant("SB3, in process", *theirs, {"subprocesses": False}),
        Contestant("jppo, in process", "versus.py", extra={"policy_lag": 0, "in_process": True}),
    ]
    compare("stable-baselines3", "import stable_baselines3", contestants, options, output)


if __name__ == "__main__":
    tyro.cli(main)
