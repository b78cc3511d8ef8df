"""Detects that a daemon of Ray stopped."""

import time

import ray

from jppo.actors.ray_cluster import check_reachable

_CHECK_SECONDS = 2.0  # between two checks
_HEAD_RESTART_SECONDS = 30.0  # a cluster manager may restart the head; Ray ends this process after 60 s without it


class DaemonMonitor:
    """Checks that Ray's daemons listen to their ports: the head of the cluster, and the raylet of this machine.

    Without one of them, Ray ends this process after 14 to 60 s, unless it is disconnected before.
    """

    def __init__(self, own_cluster: bool) -> None:
        """Finds the addresses of the daemons.

        Args:
          own_cluster: jppo started the cluster, so nobody restarts its head.
        """
        self._head_seconds = 0.0 if own_cluster else _HEAD_RESTART_SECONDS
        self._next_check, self._head_seen, self.head_answers = 0.0, time.monotonic(), True
        self._head = self._raylet = ""
        if not ray.util.client.ray.is_connected():  # a client depends on neither of them
            context = ray.get_runtime_context()
            self._logs = f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
            own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
            self._head = context.gcs_address
            self._raylet = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"

    def find_failure(self, at_once: bool = False) -> str | None:
        """Returns an error message if a daemon stopped. Checks at most every two seconds, unless `at_once` is set."""
        now = time.monotonic()
        if not self._head or (now < self._next_check and not at_once):
            return None
        self._next_check = now + _CHECK_SECONDS
        self.head_answers = _is_listening(self._head)
        if self.head_answers:
            self._head_seen = now
        if not _is_listening(self._raylet):
            stopped = f"raylet ({self._raylet})"
        elif now - self._head_seen > self._head_seconds:
            stopped = f"gcs_server ({self._head})"
        else:
            return None
        return (
            f"Ray's process {stopped} stopped, and actors cannot work without it; train again with the same run_dir to "
            f"resume the run. Ray's logs are in {self._logs}"
        )


def _is_listening(address: str) -> bool:
    try:
        check_reachable(address)
    except OSError:
        return False
    return True
