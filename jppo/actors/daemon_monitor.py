"""Detects that a daemon of Ray stopped or does not respond."""

import socket
import time

import ray

_CHECK_SECONDS = 2.0  # between two checks
_HEAD_RESTART_SECONDS = 30.0  # a cluster manager may restart the head; Ray ends this process after 60 s without it
_SILENT_SECONDS = 15.0  # a busy daemon may take as long to respond
_POLL_SECONDS, _CLOSE_SECONDS = 1.0, 2.0  # limits for a response during training, and at its end
_STOPPED, _SILENT = "stopped", "does not respond"


class DaemonMonitor:
    """Checks that Ray's daemons respond at their ports: the head of the cluster, and the raylet of this machine.

    Without one of them, Ray ends this process after 14 to 60 s, unless it is disconnected before. Calls to Ray wait for
    one that is frozen.
    """

    def __init__(self, own_cluster: bool) -> None:
        """Finds the addresses of the daemons.

        Args:
          own_cluster: jppo started the cluster, so nobody restarts its head.
        """
        self._patience = {"raylet": 0.0, "gcs_server": 0.0 if own_cluster else _HEAD_RESTART_SECONDS}
        self._next_check, self.head_answers = 0.0, True
        self._addresses = dict[str, str]()
        if not ray.util.client.ray.is_connected():  # a client depends on neither of them
            context = ray.get_runtime_context()
            self._logs = f"{context.get_temp_dir()}/{context.get_session_name()}/logs"
            own = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
            raylet = f"{own['NodeManagerAddress']}:{own['NodeManagerPort']}"
            self._addresses = {"raylet": raylet, "gcs_server": context.gcs_address}
        self._seen = dict.fromkeys(self._addresses, time.monotonic())
        addresses = self._addresses.items()  # with TLS, daemons do not speak first
        self._speaks = {name: not _find_problem(address, True, _CLOSE_SECONDS) for name, address in addresses}

    def find_failure(self, at_once: bool = False, closing: bool = False) -> str | None:
        """Returns an error message if a daemon stopped or is silent. See `ActorPool.check_daemons`; the default is to
        check every two seconds."""
        now, failure = time.monotonic(), None
        if now < self._next_check and not (at_once or closing):
            return None
        self._next_check = now + _CHECK_SECONDS
        timeout = _CLOSE_SECONDS if closing else _SILENT_SECONDS if at_once else _POLL_SECONDS
        for name, address in self._addresses.items():
            problem = _find_problem(address, self._speaks[name], timeout)
            if name == "gcs_server":
                self.head_answers = not problem
            if not problem:
                self._seen[name] = now
                continue
            patience = self._patience[name] if problem == _STOPPED else 0.0 if closing else _SILENT_SECONDS
            if failure is None and time.monotonic() - self._seen[name] >= patience:
                failure = (
                    f"Ray's process {name} ({address}) {problem}, and actors cannot work without it; train again with "
                    f"the same run_dir to resume the run. Ray's logs are in {self._logs}"
                )
        return failure


def _find_problem(address: str, speaks: bool, timeout: float) -> str:
    """Returns what is wrong with the daemon at host:port, or "". The system accepts connections for a frozen process,
    so this waits for the first bytes, which a gRPC server that `speaks` sends."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout) as connection:
            return "" if not speaks or connection.recv(1) else _STOPPED
    except TimeoutError:
        return _SILENT
    except OSError:
        return _STOPPED
