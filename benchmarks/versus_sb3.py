"""Ray mode against Stable-Baselines3's PPO: steps per second of whole training, and the return it reached.

    python benchmarks/versus_sb3.py
    python benchmarks/versus_sb3.py --envs waiting burning --num-actors 1 2 8    # half an hour
    python benchmarks/versus_sb3.py --peer-python /path/to/venv/bin/python

Same environment, separate 2x64 tanh networks with orthogonal weights, batch, epochs, minibatches, loss weights,
learning rate and Adam. Four things differ. Its SubprocVecEnv holds one environment per process, so with as many
processes as our actors it steps fewer environments, for longer. Both its forms wait for every environment at every
step, whereas our actors hand in whole rollouts. Its torch gets one thread; ours takes what XLA takes. Lag 1 collects
with the parameters of one update before, which no form of the peer does: it is faster by the clock and learns less per
step, so compare its return too.
"""

from pathlib import Path

import tyro
from throughput import RESULTS
from versus import Contestant, Options, compare


def main(options: tyro.conf.OmitArgPrefixes[Options] = Options(), output: Path = RESULTS / "versus_sb3.json") -> None:
    """Times training, ours and Stable-Baselines3's in turns.

    Args:
      output: where to write the numbers.
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
