"""Tests a run on a Ray cluster of three nodes, on one machine, that loses a node."""

import functools
import os
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import ray
from checks import SMALL
from faulty_envs import Healthy
from processes import descendants, left_of
from ray.cluster_utils import Cluster

import jppo
from jppo.training.progress import NullReporter

CONFIG = SMALL(num_envs=6, num_steps=16, num_minibatches=2)
UPDATES = 12


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))
        patch.setenv("RAY_worker_niceness", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            made = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
            for _ in range(2):
                made.add_node(num_cpus=2)
        yield made
        mine = descendants()
        made.shutdown()
    left = left_of([process for process in mine if not process.command.endswith("Agent")], 20.0)
    assert not left


class Removal(NullReporter):
    """Removes a node after some updates."""

    def __init__(self, cluster):
        self.cluster, self.messages, self.removed_at = cluster, [], None

    def message(self, text):
        self.messages.append(text)

    def update(self, step, steps_per_second, recent_return):
        if self.removed_at is None and step >= 3 * CONFIG.batch_size:
            self.removed_at = step // CONFIG.batch_size
            self.cluster.remove_node(next(iter(self.cluster.worker_nodes)), allow_graceful=False)


@pytest.mark.slow
def test_a_run_survives_the_loss_of_a_node(cluster, tmp_path):
    removal = Removal(cluster)
    result = jppo.train(
        functools.partial(Healthy, notes=tmp_path, step_seconds=0.01),  # 0.32 s per fragment
        total_steps=UPDATES * CONFIG.batch_size,
        config=CONFIG,
        num_actors=3,
        ray=jppo.RayConfig(address=cluster.address),
        progress=removal,
    )
    assert any(message.startswith("3 actors on 3 nodes ready") for message in removal.messages)
    # Ray may place the first new actor on the dead node, too, before it detects the loss.
    said = [message for message in removal.messages if "failed" in message]
    matches = [
        re.fullmatch(r"(actor \d \(\D*\d to \d\)) failed \(.*\); a new one starts in \d\.\d s", text) for text in said
    ]
    assert len({match and match.group(1) for match in matches}) == 1, said
    assert matches[0], said
    metrics, lost_at = result.metrics, removal.removed_at
    assert 3 <= lost_at < UPDATES - 1
    assert metrics["update"].tolist() == list(range(1, UPDATES + 1))
    np.testing.assert_array_equal(metrics["episode/count"], CONFIG.num_envs, "each fragment ends one of each")
    lost = metrics["actors/lost_fragments"]
    assert (lost[:lost_at] == 0.0).all()
    assert lost[-1] == 1.0
    assert (np.diff(lost) >= 0.0).all()
    assert (result.summary["lost_fragments"], result.summary["restarts"]) == (1, len(said))
    assert not ray.is_initialized(), "the run must disconnect from the cluster"
    assert {process.pid for process in descendants(os.getpid())}, "the run must not stop the cluster"
