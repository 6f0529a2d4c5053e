# SPDX-License-Identifier: MIT
"""The demo's program, on very few steps: what it promises to write, and that both runs agree."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

torch = pytest.importorskip("torch")

KEYS = ("loss_torch", "loss_offstage", "max_loss_diff", "bytes_per_param", "provider", "isa", "pins_after_first_step",
        "faults_after_first_step", "optimizer_seconds_torch", "optimizer_seconds_offstage")


def demo(tmp_path, *options):
    return subprocess.run([sys.executable, str(ROOT / "scripts" / "train.py"), "--model", "tiny", "--steps", "6", "--batch", "1",
                           "--context", "32", "--out", str(tmp_path / "out"), *options], capture_output=True, text=True,
                          timeout=180)


@pytest.mark.parametrize("options", [["--dtype", "fp32"], ["--dtype", "bf16", "--drain", "step"]], ids=" ".join)
def test_the_demo_writes_what_it_promises(tmp_path, options):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(97, 123)) * 50)
    done = demo(tmp_path, "--text", str(text), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert set(KEYS) <= set(result)
    assert result["max_loss_diff"] <= (1e-4 if "fp32" in options else 2e-2)
    assert result["loss_offstage"] < result["losses_offstage"][0]
    assert result["pins_after_first_step"] == result["allocations_after_first_step"] == 0
    assert 12 <= result["bytes_per_param"] < 12.1
    assert result["text"] == str(text)
    assert "emulated" in result["device"] and "emulated" in done.stdout
    trace = json.loads((tmp_path / "out" / "trace.json").read_text())["traceEvents"]
    assert {"forward", "backward", "step", "drain", "update", "refill"} <= {event["name"] for event in trace}
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert "no picture" in done.stdout
    else:
        assert (tmp_path / "out" / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_that_is_not_there_is_a_sentence(tmp_path):
    done = demo(tmp_path, "--text", "/nowhere/text")
    assert done.returncode == 1 and "can't be read" in done.stderr and "Traceback" not in done.stderr


def test_a_text_that_is_too_short_is_a_sentence(tmp_path):
    (tmp_path / "short").write_bytes(b"short")
    done = demo(tmp_path, "--text", str(tmp_path / "short"))
    assert done.returncode == 1 and "needs more" in done.stderr


@pytest.mark.parametrize("options, sentence", [(["--lr", "nan"], "learning rate"), (["--clip", "0"], "clip"),
                                               (["--link", "-1"], "link")], ids=str)
def test_numbers_that_make_no_sense_are_a_sentence(tmp_path, options, sentence):
    done = demo(tmp_path, *options)
    assert done.returncode == 2 and sentence in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_a_directory_that_cannot_be_written_is_a_sentence_before_the_runs(tmp_path):
    (tmp_path / "out").write_bytes(b"a file")
    done = demo(tmp_path)
    assert done.returncode == 1 and "--out" in done.stderr and "Traceback" not in done.stderr
    assert "model:" not in done.stdout
