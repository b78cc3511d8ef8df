"""What happens between two updates of a run: the call of the user's callback."""

from typing import Any

import jax

from jppo.devices.mesh import allgather_ints
from jppo.errors import HostFailed
from jppo.training.callback import Callback, CallbackEvent
from jppo.training.logger import Logger, LoopResult

_CONTINUE, _STOPPED, _FAILED = 0, 1, 2  # codes that the processes exchange after a callback


class Monitor:
    """Calls the callback of a run. The loops of both modes use it.

    Attributes:
      ended: the reason to end the run, or None.
    """

    def __init__(self, log: Logger, callback: Callback | None, callback_every: int) -> None:
        self.ended: LoopResult | None = None
        self._log, self._callback = log, callback
        self._callback_every = callback_every if callback is not None else 0

    def next_event(self, update: int) -> int:
        """Returns the next update after `update` that is due for `finish`; 2**31 if there is none."""
        every = self._callback_every
        return update + every - update % every if every else 2**31

    def is_due(self, update: int) -> bool:
        """Returns whether `finish` must be called after `update` updates."""
        return self.next_event(update - 1) == update

    def holds(self, update: int) -> bool:
        """Returns whether no update after `update` may start before `finish` was called."""
        return bool(self._callback_every) and update % self._callback_every == 0

    def finish(self, loop: Any) -> dict[str, float]:
        """Handles the event after the last update of the log, and returns metrics to add to those of the update.

        Args:
          loop: the training loop; its attribute `state` is the state after this update.
        """
        metrics: dict[str, float] = {}
        if self.holds(self._log.updates):
            metrics |= self._call_back(loop, metrics)
        return metrics

    def _call_back(self, loop: Any, metrics: dict[str, float]) -> dict[str, float]:
        """Calls the callback and returns the numbers that it logs."""
        assert self._callback is not None
        log, error = self._log, None
        event = CallbackEvent(
            update=log.updates,
            steps=log.steps,
            state=loop.state,
            metrics=log.event_means | metrics,
            return_mean=log.recent.mean,
        )
        try:
            self._callback(event)
        except Exception as failure:
            error = failure  # raised when the run is saved
        else:
            loop.state = event.state
        code = _FAILED if error is not None else _CONTINUE if event.stop_reason is None else _STOPPED
        codes = allgather_ints([code]) if jax.process_count() > 1 else [code]
        if max(codes) == _FAILED:
            self.ended = LoopResult(
                "failed", error or HostFailed("the callback raised an exception in another process")
            )
        elif max(codes) == _STOPPED:
            self.ended = LoopResult("stopped", reason=event.stop_reason or "stopped by another process")
        return event.logged
