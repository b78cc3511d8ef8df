"""Plays an episode and shows it."""

import tempfile
from pathlib import Path
from typing import Any

from jppo.config.checks import check_int, check_seed
from jppo.config.run import MAX_FRAMES
from jppo.runs.display import Picture
from jppo.runs.evaluation import open_policy
from jppo.runs.render import play_gif


def play(
    env_or_run: Any, policy: Any = None, *, seed: int = 0, sampled: bool = False, max_steps: int = MAX_FRAMES
) -> Picture:
    """Plays one episode and returns it as an animation, which a notebook shows.

        jppo.play(result)                          # in a notebook
        jppo.play("runs/first").save("play.gif")

    Args:
      env_or_run, policy: see `jppo.evaluate`.
      seed: seed of the episode.
      sampled: sample actions instead of taking the most likely ones.
      max_steps: a longer episode is cut. The frames of all steps are in memory.

    Raises:
      ValueError: the environment cannot be drawn, or an argument is invalid.
    """
    seed, max_steps = check_seed(seed), check_int("max_steps", max_steps)
    env, policy = open_policy(env_or_run, policy, "jppo.play")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "play.gif"
        played = play_gif(env, policy, file, seed=seed, sampled=sampled, max_steps=max_steps)
        description = f"{env.name}: {played.length} steps, return {played.episode_return:.1f}"
        return Picture(file.read_bytes(), "gif", description)
