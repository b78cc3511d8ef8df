"""Hooks with which another program, for example a trial of Ray Tune, follows a run."""

from typing import Any, TypeVar

from jppo.runs.checkpoints import Checkpoints

State = TypeVar("State", bound=Any)


class RunHooks:
    """Follows a run. The methods of this base class do nothing.

    A run with hooks may resume a run directory with other hyperparameters, another seed or other total_steps.
    """

    checkpoint_updates: int = 0
    """Updates between two checkpoints, which replaces the time between them. 0: only the end of a run saves one."""

    def on_updates(self, rows: list[dict[str, Any]]) -> None:
        """Is called with the metrics of consecutive updates, one dict per update.

        Their "return_mean" is the mean return of about the last 100 episodes. The last one contains the metrics of an
        evaluation (eval/*) and the numbers of a callback, if there are any.
        """

    def on_checkpoint(self, update: int) -> None:
        """Is called when a checkpoint before the end of the run is on disk."""


class PeriodicCheckpoints(Checkpoints):
    """Checkpoints after a fixed number of updates instead of a time. Training waits until each one is on disk.

    A resumed run uses the hyperparameters of its settings, not those of the checkpoint.
    """

    keeps_hyperparams = False

    def __init__(self, hooks: RunHooks, num_updates: int, *args: Any) -> None:
        """
        Args:
          num_updates: updates of the whole run.
          args: arguments of `Checkpoints`.
        """
        super().__init__(*args)
        self._hooks, self.every_updates, self._num_updates = hooks, hooks.checkpoint_updates, num_updates

    def due(self, update: int) -> bool:
        """Returns whether the state after this update is to be saved."""
        return bool(self.every_updates) and self.update < update < self._num_updates and not update % self.every_updates

    def save(self, update: int, *args: Any) -> None:
        """Writes a checkpoint and waits for it, so that its directory can be copied."""
        super().save(update, *args)
        if update < self._num_updates:
            self.wait()
            if self.update == update:
                self._hooks.on_checkpoint(update)


def restore_state(checkpoints: Checkpoints, state: State) -> State:
    """Returns the state of the newest checkpoint; without one, `state`.

    Args:
      state: the initial state, with a field `train`. A resumed run has the number of updates of its settings.
    """
    if checkpoints.start is None:
        return state
    train, state = state.train, checkpoints.start.restore(state)
    hyperparams = (state.train if checkpoints.keeps_hyperparams else train).hyperparams
    restored: State = state.replace(train=state.train.replace(num_updates=train.num_updates, hyperparams=hyperparams))
    return restored
