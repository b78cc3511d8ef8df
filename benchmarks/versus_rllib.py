"""Compares Ray mode with RLlib's PPO (new API stack): steps per second of whole training, and the final return.

    python benchmarks/versus_rllib.py
    python benchmarks/versus_rllib.py --peer-python /path/to/venv/bin/python    # ray[rllib] needs another gymnasium

Both use the same environment, actors, environments per actor, separate 2x64 tanh networks, batch size, epochs,
minibatches, loss weights and learning rate. The differences:

- RLlib initializes output layers with torch's defaults (hidden layers are orthogonal in both).
- The epsilon of Adam is 1e-8 in RLlib and 1e-5 in jppo.
- RLlib standardizes advantages over the batch, jppo over the minibatch.
- RLlib adds a row per episode to the batch and may exceed the batch size by some steps, which are counted.
- torch uses one thread; jppo's learner uses XLA's default number of threads.
- With lag 1, jppo collects with the parameters of the previous update, which RLlib's PPO does not. This is faster and
  learns less per step, so compare the returns, too.
"""

from pathlib import Path

import tyro
from throughput import RESULTS
from versus import Contestant, Options, compare


def main(options: tyro.conf.OmitArgPrefixes[Options] = Options(), output: Path = RESULTS / "versus_rllib.json") -> None:
    """Compares training with jppo and with RLlib and writes JSON.

    Args:
      output: JSON file.
    """
    contestants = [
        Contestant("jppo", "versus.py", extra={"policy_lag": 0, "in_process": False}),
        Contestant("RLlib", "peer_rllib.py", options.peer_python),
        Contestant("jppo, lag 1", "versus.py", extra={"policy_lag": 1, "in_process": False}),
    ]
    imports = "import torch; from ray.rllib.algorithms.ppo import PPO"
    compare("ray[rllib] and torch", imports, contestants, options, output)


if __name__ == "__main__":
    tyro.cli(main)
