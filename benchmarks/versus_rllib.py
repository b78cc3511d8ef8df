"""Ray mode against RLlib's PPO (new API stack): steps per second of whole training, and the return it reached.

    python benchmarks/versus_rllib.py
    python benchmarks/versus_rllib.py --peer-python /path/to/venv/bin/python    # ray[rllib] wants its own gymnasium

Same environment, actors, environments per actor, separate 2x64 tanh networks, batch, epochs, minibatches, loss weights
and learning rate. What differs: RLlib's output layers start from torch's default weights (its hidden ones are
orthogonal, like ours) and its Adam's epsilon is 1e-8 (ours 1e-5); it standardises advantages over the batch, we over
the minibatch; its runners add a row per episode to the batch and may overshoot by some steps, which are counted. Its
torch gets one thread; our learner takes what XLA takes. Lag 1 collects with the parameters of one update before, which
RLlib's PPO does not: it is faster by the clock and learns less per step, so compare its return too.
"""

from pathlib import Path

import tyro
from throughput import RESULTS
from versus import Contestant, Options, compare


def main(options: tyro.conf.OmitArgPrefixes[Options] = Options(), output: Path = RESULTS / "versus_rllib.json") -> None:
    """Times training, ours and RLlib's in turns.

    Args:
      output: where to write the numbers.
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
