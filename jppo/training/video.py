"""The video of a run's final policy, `jppo.RunConfig(video=True)`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jppo.runs.policy import TrainedPolicy
from jppo.runs.render import check_drawable, play_gif
from jppo.runs.run_dir import write_output

_MAX_STEPS = 1000


def can_write_video(env: Any, warn: Callable[[str], None]) -> bool:
    """Returns whether an environment can be drawn; warns if it cannot."""
    try:
        check_drawable(env)
    except ValueError as error:
        warn(f"no video: {error}")
        return False
    return True


def write_video(
    env: Any, policy: TrainedPolicy, run_dir: Path, message: Callable[[str], None], warn: Callable[[str], None]
) -> None:
    """Writes an episode of at most 1,000 steps to video.gif in the run directory and reports it."""
    path = run_dir / "video.gif"
    try:
        played = play_gif(env, policy, max_steps=_MAX_STEPS)
        write_output(path, played.gif, ".gif")
    except Exception as error:  # of the environment or of a library that draws; the run itself is finished
        warn(f"no video: {error}")
    else:
        message(f"wrote {path}: {played.length} steps, return {played.episode_return:.2f}")
