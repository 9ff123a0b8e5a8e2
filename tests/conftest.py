"""The one Ray that tests in this process share: two logical CPUs on loopback, no dashboard; and hypothesis' profile."""

import os
import shutil
import tempfile

import pytest
from hypothesis import settings

from experiments.cluster import stay_on_loopback

os.environ.pop("RAY_ADDRESS", None)
os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # else Ray ends our small actors when other work fills the machine
stay_on_loopback()  # before any test module imports Ray

# The same examples on every machine, and no property is a timed test.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.load_profile("fixed")


@pytest.fixture(scope="session")
def ray_cluster():
    import ray

    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    assert ray.util.get_node_ip_address() == "127.0.0.1"
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
