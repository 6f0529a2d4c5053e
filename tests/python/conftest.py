# SPDX-License-Identifier: MIT
"""What all Python tests share: the package from this source, and the models and gradients that they train with."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
if not os.environ.get("OFFSTAGE_TEST_INSTALLED"):
    sys.path.insert(0, str(ROOT / "python"))

try:
    import torch

    torch.set_num_threads(1)
except ImportError:
    torch = None


@pytest.fixture
def model():
    """A small network with every kind of shape, the same one each time."""
    from training import network

    return network()


@pytest.fixture
def clean():
    """Nothing of an earlier test lives; afterwards nothing of this one may."""
    gc.collect()
    yield
    gc.collect()


@pytest.fixture
def run():
    """Runs a script in a fresh interpreter that finds the package; gives its output, or fails with it."""
    def run_script(script, *, env=None, check=True, timeout=120):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), OMP_NUM_THREADS="1")
        environment.update(env or {})
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], env=environment, timeout=timeout,
                              capture_output=True, text=True)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run_script
